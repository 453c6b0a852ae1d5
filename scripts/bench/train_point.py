"""What a point's training process runs: scripts/pretrain_gpt.py with a competitor's plug-in installed.

Settings, from the environment: BENCH_PLUGIN (a file of competitors/), BENCH_PLUGIN_SETTING, BENCH_GATE (a file: nothing
but imports before it is there). With --swap-report-dir, what the report predicts of a plan before the first step that
executes it is kept in predictions.json beside it.
"""
import contextlib
import functools
import json
import os
import sys
import time
from pathlib import Path

# While another point trains: what this process imports is not to take cores from it, or its caches. (On a virtual
# machine two of them may be threads of one core.)
GATE = os.environ.get("BENCH_GATE", "")
WAITS = bool(GATE) and not os.path.exists(GATE)
CPUS = sorted(os.sched_getaffinity(0))


def keep_to(cpus: list[int]) -> None:
    """All threads, those that libraries have started as well."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cpus)


if WAITS:
    keep_to([CPUS[-1 - int(os.environ.get("LOCAL_RANK", "0")) % len(CPUS)]])

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import pretrain_gpt  # noqa: E402  its first line comes before anything of Megatron


def use_fused_adam() -> None:
    """torch's fused AdamW where neither Transformer Engine nor apex brings one: as theirs it needs no temporaries.

    Megatron's default without them is foreach, whose temporaries would be the peak of the step and hide all else. The
    same for every point.
    """
    import torch
    from megatron.core import optimizer

    class FusedAdamW(torch.optim.AdamW):
        def __init__(self, *args, adam_w_mode=True, **kwargs):
            super().__init__(*args, **(kwargs | {"fused": True}))

    if optimizer.Adam is torch.optim.AdamW:
        optimizer.Adam = FusedAdamW
        optimizer.USING_PYTORCH_OPTIMIZER = False  # else Megatron 0.19 takes torch's class, whatever Adam is


def allow_sequence_parallel() -> None:
    """With torch's norms too: of Megatron's own, only apex's and Transformer Engine's know it. The same for every
    point."""
    from megatron.core.transformer import torch_norm

    from mindspeed_swap.sim.megatron_fixes import allow_sequence_parallel_norm

    allow_sequence_parallel_norm(torch_norm)


GATE_SECONDS = 900.0  # longer than any point trains: nobody is left to open it


def wait_for_gate() -> None:
    if not WAITS:
        return
    ends = time.monotonic() + GATE_SECONDS
    while not os.path.exists(GATE):
        if time.monotonic() > ends:
            sys.exit(f"{GATE} has not come")
        time.sleep(0.02)
    keep_to(CPUS)


def keep_predictions() -> None:
    from megatron.training import get_args, training

    train_step, told, step, seen = training.train_step, [], 0, 0

    @functools.wraps(train_step)
    def keep(*args, **kwargs):
        nonlocal step, seen
        step += 1
        if (folder := get_args().swap_report_dir) and os.environ.get("RANK", "0") == "0":
            summary, before = Path(folder) / "rank0" / "summary.json", seen
            seen = summary.stat().st_mtime_ns if summary.exists() else 0
            plan = json.loads(summary.read_text())["plan"] if seen != before else {}
            if plan.get("prediction") and all(plan["prediction"] != each["prediction"] for each in told):
                told.append({"before_step": step, "prediction": plan["prediction"]})
                (Path(folder) / "predictions.json").write_text(json.dumps(told))
        return train_step(*args, **kwargs)

    training.train_step = keep


def main() -> None:
    use_fused_adam()
    allow_sequence_parallel()
    keep_predictions()
    if plugin := os.environ.get("BENCH_PLUGIN"):
        import importlib

        importlib.import_module(f"competitors.{plugin}").install(os.environ.get("BENCH_PLUGIN_SETTING", ""))
    wait_for_gate()
    with pretrain_gpt.oom_message.one_line():
        pretrain_gpt.main()


if __name__ == "__main__":
    main()
