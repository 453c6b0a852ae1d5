"""Real Megatron with --swap-report-dir: the ranks' files belong together and tell of the plan that runs."""
from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_swap.report.chrome import TO_DEVICE, TO_HOST
from mindspeed_swap.report.reader import read

pytestmark = pytest.mark.slow


def test_two_pipeline_stages(pretrain, tmp_path: Path) -> None:
    done = pretrain(
        "--smart-swap", "--swap-report-dir", str(tmp_path), NPROC="2", PP="2", SEQ="128", MBS="4", GBS="8", ITERS="12",
        MINDSPEED_SWAP_DEVICE_CAPACITY="7MiB",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    files = read(str(tmp_path))
    assert not files.problems
    assert [rank.rank for rank in files.ranks] == [0, 1]
    for rank in files.ranks:
        summary, step = rank.summary, rank.step
        assert summary["phase"] == "Stable" and summary["layout"]["pipeline_model_parallel_size"] == 2
        assert list(step["phases"]) == ["forward", "backward", "optimizer"]
    first = files.ranks[0]
    assert first.summary["plan"]["swap_bytes"] > 0
    for lane, figure in ((TO_HOST, "bytes_out"), (TO_DEVICE, "bytes_in")):
        carried = sum(e["args"]["bytes"] for e in first.events("X") if e["tid"] == lane)
        assert carried == first.step[figure] >= first.summary["plan"]["swap_bytes"]
    counters = first.step["counters"]
    assert first.step["bytes_in"] == counters["loaded_bytes"]
