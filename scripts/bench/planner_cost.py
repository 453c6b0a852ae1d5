"""Seconds that a plan takes, by size of the step. ``python scripts/bench/planner_cost.py``; no accelerator, no torch.

The target is 2 s on one idle core for 96 layers x 8 microbatches, and a cost that grows no faster than n log n (n:
points of the step). Steps are the Llama-shaped ones of the planner's tests, with five kinds of modules to recompute.
"""
from __future__ import annotations

import sys
import time
from math import log
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "core")]

from traces import LLAMA_MODULES, Shape, megatron_trace  # noqa: E402

from mindspeed_swap.core.simulate import memory_curve  # noqa: E402
from mindspeed_swap.core.solve import ALL_VERBS, KEEP_SWAP, floor, solve  # noqa: E402

SIZES = ((8, 1), (32, 1), (64, 1), (24, 8), (48, 8), (96, 8), (192, 8))
SHARES = (0.8, 0.3, 0.05)  # of the way from what is reachable to keeping everything


def main() -> None:
    head = ("layers x microbatches", "points", "keep|swap s", "keep|swap|recompute s", "/ n log n")
    print(f"{head[0]:>21} {head[1]:>7} {head[2]:>20} {head[3]:>22} {head[4]:>10}")
    for layers, microbatches in SIZES:
        stages = 8 if microbatches > 1 else 1
        shape = Shape(layers=layers, microbatches=microbatches, stages=stages, both_gbps=43.0, modules=LLAMA_MODULES)
        trace = megatron_trace(shape)
        seconds: list[list[float]] = []
        for verbs in (KEEP_SWAP, ALL_VERBS):
            low, high = floor(trace, verbs).reachable_bytes, max(memory_curve(trace, ()))
            seconds.append([])
            for share in SHARES:
                began = time.process_time()
                solve(trace, low + int((high - low) * share), verbs)
                seconds[-1].append(time.process_time() - began)
        n = len(trace.points)
        two, three = (" ".join(f"{s:.2f}" for s in column) for column in seconds)
        most = max(map(max, seconds)) / (n * log(n)) * 1e6
        print(f"{layers:>17} x {microbatches} {n:>7} {two:>20} {three:>22} {most:>7.2f} us")


if __name__ == "__main__":
    main()
