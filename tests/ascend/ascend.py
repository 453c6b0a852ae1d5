"""How the Ascend lane's processes are started."""
from __future__ import annotations

import os
import subprocess
from pathlib import Path

from mindspeed_swap.units import MIB

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def environment(lane_python: str, runtime: Path | None, **settings: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_SWAP_", "ASCEND"))}
    ours |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE / "lane")]),
        "TORCH_EXTENSIONS_DIR": str(Path(lane_python).parent.parent / "extensions"),
        "FAKE_NPU_CAPACITY": str(256 * MIB),
        "OMP_NUM_THREADS": "1",
    }
    if runtime is not None:
        ours["LD_LIBRARY_PATH"] = str(runtime)
    return ours | settings


def run(lane_python: str, runtime: Path | None, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [lane_python, "-X", "faulthandler", *arguments], env=environment(lane_python, runtime, **settings), cwd=ROOT,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
