"""The four documented configurations, and what their greps print."""
from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "swap_config"
EXPECTED = Path(__file__).resolve().parent / "expected"
# Name of the file -> the command that the documentation gives for it.
GREPS = {
    "case1_default": "cat output/msrun/worker_0.log | grep 'attention.flash_attention'",
    "case2_layers": "cat output/msrun/worker_0.log | grep 'Set layer swap at'",
    "case3_operators": "cat output/msrun/worker_0.log | grep 'Set op_swap at layer'",
    "case4_with_recompute": "cat output/msrun/worker_0.log | grep 'Set op_swap at layer' -C 1",
}
CASES = sorted(GREPS)
