"""CPU binding: the process runs on the cores next to its device, from which copies and launches are shortest.

The kernel knows which they are; it must be told the device's place on the PCI bus, by the driver's own tool.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

SYSFS = Path("/sys/bus/pci/devices")


def bind_cpu(device: str, index: int) -> str:
    """Bind this process to the cores of device ``index`` (cuda, npu). Returns a line for the log. Never raises: a
    process that is not bound is a little slower, nothing else."""
    try:
        address = _cuda_address(index) if device == "cuda" else _npu_address(index)
        listed = (SYSFS / address / "local_cpulist").read_text().strip()
        cores = _cores(listed) & os.sched_getaffinity(0)
        if not cores:
            return f"CPU binding skipped: none of the cores {listed} next to the device are this process's"
        os.sched_setaffinity(0, cores)
    except (OSError, RuntimeError, ValueError, AttributeError) as error:
        return f"CPU binding skipped: {error}"
    return f"bound to the {len(cores)} cores next to the device ({listed})"


def _cuda_address(index: int) -> str:
    place: Any = torch.cuda.get_device_properties(index)
    return f"{place.pci_domain_id:04x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0"


def _npu_address(index: int) -> str:
    if shutil.which("npu-smi") is None:
        raise RuntimeError("`npu-smi` not found: it comes with the driver; put it on PATH")
    command = ["npu-smi", "info", "-t", "board", "-i", str(index)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    found = re.search(r"([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])", told)
    if found is None:
        raise RuntimeError(f"`{' '.join(command)}` names no PCI address")
    return found.group(1).lower()


def _cores(text: str) -> set[int]:
    """``0-3,8`` -> {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
