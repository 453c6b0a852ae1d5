"""What results were measured on."""
from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from workloads import GPU  # noqa: E402

from mindspeed_swap.version import __version__  # noqa: E402


def describe(device: str) -> dict[str, Any]:
    """``id`` differs between machines and between starts of one: only runs of one id are compared."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    start = boot.read_text().strip() if boot.exists() else platform.node()
    found: dict[str, Any] = {"device": device, "id": start, "cpus": os.cpu_count()}
    if device == GPU:
        query = "name,uuid,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        cards = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split("\n")
        name, uuid, driver, memory, generation, width = (part.strip() for part in cards[0].split(","))
        found |= {"card": name, "cards": len(cards), "driver": driver, "memory": memory}
        found |= {"link": f"PCIe gen {generation} x{width}", "id": f"{start}/{uuid}"}
    else:
        found["card"] = "simulated device"
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "megatron-core", "transformer-engine", "torchtune", "torchao"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {"mindspeed-swap": f"{__version__}+{_code()}"}  # this checkout, installed or not


def _code() -> str:
    """Of what is measured: results of other code are not of this one."""
    files = [path for folder in ("mindspeed_swap", "patches") for path in (ROOT / folder).rglob("*")]
    digest = hashlib.sha256()
    for path in sorted({path.resolve() for path in files if path.suffix in (".py", ".cpp", ".h")}):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:8]
