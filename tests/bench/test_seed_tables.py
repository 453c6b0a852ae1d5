"""MindSpeed's tables: layouts that Megatron takes, gains between planted runs, and the way up to the full size."""
import gzip
from pathlib import Path

import pytest
import seed_tables
from planted import failed, plain, record, write
from results import read
from seed_sizes import CARD_BYTES, FULL_SIZE, _scale, predict, tables

from mindspeed_swap.core.recompute import full_recompute, modules_of
from mindspeed_swap.core.simulate import memory_curve, plain_step_ms
from mindspeed_swap.core.trace import StepTrace

RECORDED = Path(__file__).resolve().parents[1] / "core" / "fixtures" / "one_rank_modules.json.gz"


@pytest.mark.parametrize("ranks, device", [(8, "gpu"), (4, "gpu"), (2, "gpu"), (1, "gpu"), (4, "sim"), (2, "sim")])
def test_layouts(ranks, device):
    found = tables(ranks, device)
    assert [full for _, full in found] == ([FULL_SIZE[i] for i in (0, 1, 5)] if ranks == 1 else list(FULL_SIZE))
    for table, _ in found:
        for size in (table.before, table.after):
            assert size.ranks == ranks and ranks % (size.tp * size.pp) == 0, table.key
            assert size.layers % (size.pp * size.vpp) == 0, table.key
            microbatches = size.workload("x").microbatches
            assert microbatches * size.mbs * ranks // size.tp // size.pp == size.gbs, table.key
            assert size.vpp == 1 or microbatches % size.pp == 0, table.key


def gain_and_peak(tmp_path, key):
    text = seed_tables.page(read([tmp_path], "gpu"), "gpu")
    row = next(line for line in text.split("\n") if line.startswith(f"| {key} | 8 |"))
    return row.split(" | ")[-3], row.split(" | ")[-1].strip(" |")


def runs(table, ours_ms, theirs_ms, **more):
    before, after = (seed_tables.name_of(table, 8, side) for side in ("before", "after"))
    return [record(before, "full", theirs_ms, group="megatron full recompute", peak=10),
            record(after, "adaptive@nothing", ours_ms, peak=9, **more)]  # fmt: skip


def test_gain(tmp_path):
    printed, equal = FULL_SIZE[:2]
    # As printed, 8 layers are compared with 3: by TFLOPs.
    work = printed.after.tflop() / printed.before.tflop()
    assert 2 < work < 8 / 3
    write(tmp_path, [*runs(printed, 100.0 * work, 120.0), *runs(equal, 100.0, 115.0)])
    assert gain_and_peak(tmp_path, printed.key) == ("+20.00%", "0.90")
    assert gain_and_peak(tmp_path, equal.key) == ("+15.00%", "0.90")


def test_no_gain_between_machines_or_of_what_failed(tmp_path):
    printed, equal = FULL_SIZE[:2]
    named = seed_tables.name_of(printed, 8, "after")
    write(tmp_path, [*runs(equal, 100.0, 115.0, machine="other"), runs(printed, 1.0, 2.0)[0],
                     failed(named, "adaptive@nothing"), plain(named)])  # fmt: skip
    assert gain_and_peak(tmp_path, equal.key) == ("not run", "not run")
    assert gain_and_peak(tmp_path, printed.key)[0] == "not run"
    assert "does not train: out of memory" in seed_tables.page(read([tmp_path], "gpu"), "gpu")


def test_prediction_of_the_size_that_ran(tmp_path):
    trace = gzip.decompress(RECORDED.read_bytes()).decode()
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "step_trace.json").write_text(trace)
    told = predict(FULL_SIZE[1], FULL_SIZE[1], tmp_path)["what_if"]
    assert told["plain_ms"] == pytest.approx(plain_step_ms(StepTrace.from_json(trace)))
    assert told["plain_peak_bytes"] < CARD_BYTES and told["step_ms"] == pytest.approx(told["plain_ms"])
    assert told["full_ms"] > told["plain_ms"]


def test_a_larger_size_takes_more_of_everything():
    trace = StepTrace.from_json(gzip.decompress(RECORDED.read_bytes()).decode())
    for module in trace.modules:
        module.input_bytes, module.rerun_bytes = 1 << 12, 1 << 22
    curves = [memory_curve(t, (), full_recompute(modules_of(t))) for t in (trace, _scale(trace, 3.0, 3.0, 2.0))]
    assert curves[1] == pytest.approx([3 * nbytes for nbytes in curves[0]], abs=1000)
