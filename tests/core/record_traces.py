"""Records the fixtures anew: real Megatron on the simulated device. ``python record_traces.py [NAME...]``, minutes.

Then ``python test_golden_plans.py`` writes the plans for them. Sizes of the model are such that a file stays small.
"""
from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt_sim.sh"
SMALL = {"LAYERS": "4", "HIDDEN": "64", "FFN": "128", "SEQ": "128", "ITERS": "4"}
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-ffn-hidden-size 64 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss "
    "--lr 1e-5 --min-lr 1e-6"
)
# Settings of the script, flags, and by fixture the rank that it is of. SmartSwap records no modules.
RUNS: list[tuple[dict[str, str], str, dict[str, int]]] = [
    ({"MBS": "4", "GBS": "4"}, "--smart-swap", {"one_rank": 0}),
    ({"MBS": "4", "GBS": "4"}, "--adaptive-memory-optimization", {"one_rank_modules": 0}),
    (
        {"NPROC": "4", "PP": "4", "MBS": "2", "GBS": "12"}, "--adaptive-memory-optimization",
        {"pp4_first": 0, "pp4_last": 3},
    ),
    (
        {"NPROC": "2", "PP": "2", "MBS": "2", "GBS": "8"},
        "--adaptive-memory-optimization --num-layers-per-virtual-pipeline-stage 1", {"vpp_first": 0},
    ),
    ({"NPROC": "2", "MBS": "8", "GBS": "16"}, f"--adaptive-memory-optimization {EXPERTS}", {"experts": 0}),
    (
        {"LAYERS": "2", "SEQ": "32768", "MBS": "1", "GBS": "1", "ITERS": "3"}, "--adaptive-memory-optimization",
        {"long_32k": 0},
    ),
]


def record(settings: dict[str, str], flags: str, ranks: dict[str, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = ["bash", str(SCRIPT), *flags.split(), "--swap-report-dir", folder]
        environment = os.environ | {"PYTHON": sys.executable} | SMALL | settings
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        for name, rank in ranks.items():
            text = (Path(folder) / f"rank{rank}" / "step_trace.json").read_bytes()
            (FIXTURES / f"{name}.json.gz").write_bytes(gzip.compress(text, mtime=0))


if __name__ == "__main__":
    for run in RUNS:
        if not sys.argv[1:] or set(sys.argv[1:]) & set(run[2]):
            record(*run)
