"""The promises, told from planted results."""
import check
import machine
import pytest
from planted import GIB, failed, plain, record, swap, write
from promises import HELD, NOT_RUN, SHORT, rows
from results import read
from workloads import workload

FULL = {"group": "megatron full recompute", "peak": 4 * GIB}


def states(folder):
    return {row.promise: row for row in rows(read([folder], "gpu"), "gpu")}


def test_nothing_is_known(tmp_path, capsys):
    assert check.main(["--results", str(tmp_path)]) == 0
    assert all(row.state == NOT_RUN for row in states(tmp_path).values())
    assert "0 held, 0 short" in capsys.readouterr().out


@pytest.mark.parametrize("step_ms, state, code", [(100.4, HELD, 0), (100.6, SHORT, 1)])
def test_nothing_to_do(tmp_path, capsys, step_ms, state, code):
    write(tmp_path, [plain("A"), record("A", "swap@nothing", step_ms)])
    row = states(tmp_path)["A: flags on, nothing to do (swap)"]
    assert row.state == state and f"{step_ms / 100 - 1:+.2%}" in row.figure
    assert check.main(["--results", str(tmp_path)]) == code
    assert row.figure in capsys.readouterr().out


@pytest.mark.parametrize(
    "held, peak, state", [(6.0, 8.0, HELD), (6.9, 8.0, SHORT), (6.0, 8.1, SHORT)], ids=["good", "held", "over budget"]
)
def test_share_of_held_bytes(tmp_path, held, peak, state):
    run = record("A", "swap@moved25", 100.5, held=int(held * GIB), peak=int(peak * GIB), budget_bytes=8 * GIB)
    write(tmp_path, [plain("A"), run])
    assert states(tmp_path)["A: SmartSwap, 25 % of activation bytes moved"].state == state


@pytest.mark.parametrize(
    "swapped, why", [(1.2, "the copies out alone take 36.0 ms, plain's forward 30.0 ms"), (0.9, "")]
)
def test_a_link_that_cannot_carry_it_is_named(tmp_path, swapped, why):
    source = record("A", "adaptive@nothing", 100.0, recompute_options=[],
                    link={"out_bytes_per_ms": GIB / 30, "in_bytes_per_ms": GIB})  # fmt: skip
    moved = swap(107.0) | {"swap_bytes": int(swapped * GIB)}
    write(tmp_path, [plain("A"), source, record("A", "swap@moved25", 107.0, held=6 * GIB, swap=moved)])
    row = states(tmp_path)["A: SmartSwap, 25 % of activation bytes moved"]
    assert (row.state, row.why) == (SHORT, why)


@pytest.mark.parametrize("step_ms, state", [(116.0, HELD), (117.0, SHORT)])
def test_against_full_recompute(tmp_path, step_ms, state):
    full = record("A", "full", 125.0, **FULL)
    write(tmp_path, [plain("A"), full, record("A", "adaptive@full", step_ms, peak=4 * GIB, budget_bytes=4 * GIB)])
    assert states(tmp_path)["A: adaptive at full recompute's bytes"].state == state


def test_of_several_runs_the_one_above_its_budget_is_told(tmp_path):
    runs = [
        record("A", "swap@moved25", 100.5, held=6 * GIB, peak=8 * GIB + above, budget_bytes=8 * GIB)
        for above in (-GIB, 3 << 20, -1)
    ]
    write(tmp_path, [plain("A"), *runs])
    row = states(tmp_path)["A: SmartSwap, 25 % of activation bytes moved"]
    assert (row.state, row.why) == (SHORT, "peak 3.0 MiB above the budget")


def test_another_machine_is_no_comparison(tmp_path):
    write(tmp_path, [plain("A"), record("A", "swap@nothing", 100.0, machine="other")])
    row = states(tmp_path)["A: flags on, nothing to do (swap)"]
    assert row.state == NOT_RUN and "same machine" in row.why


def test_a_run_that_failed_or_still_searched_is_short(tmp_path):
    searching = record("A", "adaptive@nothing", 100.0, swap=swap(100.0, phase="SearchPolicy", stable_steps=0))
    write(tmp_path, [plain("A"), failed("A", "swap@nothing"), searching])
    found = states(tmp_path)
    assert found["A: flags on, nothing to do (swap)"].state == SHORT
    assert "out of memory" in found["A: flags on, nothing to do (swap)"].why
    assert found["A: flags on, nothing to do (adaptive)"].state == SHORT


def budget_runs(slow_at=None):
    """10 GiB of plain; the link carries 1 GiB in a forward, so the bound rises by 30 ms per GiB below 9 GiB. Modules
    that could run again: none."""
    link = {"out_bytes_per_ms": GIB / 30, "in_bytes_per_ms": GIB}
    source = record("A", "adaptive@nothing", 100.0, link=link, recompute_options=[])
    runs = [plain("A"), source]
    for fraction in workload("A", "gpu").fractions:
        budget = int(fraction * 10 * GIB)
        bound = 100 + 30 * max(0.0, 9 - 10 * fraction)
        slow = 1.04 if fraction == slow_at else 1.02
        runs.append(record("A", f"adaptive@{fraction:.2f}", bound * slow, peak=budget, budget_bytes=budget))
    return runs


def test_budgets_against_the_bound(tmp_path):
    write(tmp_path, budget_runs())
    row = states(tmp_path)["A: every budget against the lower bound"]
    assert row.state == HELD and "1.020" in row.figure and "10 budgets" in row.figure


def test_one_budget_above_the_bound(tmp_path):
    write(tmp_path, budget_runs(slow_at=0.84))
    row = states(tmp_path)["A: every budget against the lower bound"]
    assert row.state == SHORT and "1.040 x at 0.84" in row.figure


def test_a_budget_that_did_not_run(tmp_path):
    write(tmp_path, budget_runs()[:-1])
    assert states(tmp_path)["A: every budget against the lower bound"].state == NOT_RUN


@pytest.mark.parametrize("theirs, state", [(130.0, HELD), (101.0, SHORT)])
def test_budgets_against_the_best_of_the_others(tmp_path, theirs, state):
    other = record("A", "fine_grained@core_attn", theirs, group="megatron fine-grained offload", peak=int(8.4 * GIB))
    write(tmp_path, [*budget_runs(), other])
    assert states(tmp_path)["A: every budget against the best competitor"].state == state


@pytest.mark.parametrize("measured, peak, states_", [(102.0, 10.1, (HELD, HELD)), (104.0, 10.4, (SHORT, SHORT))])
def test_predictions(tmp_path, measured, peak, states_):
    write(tmp_path, [plain("A"), record("A", "adaptive@0.98", measured, peak=int(peak * GIB), swap=swap(100.0))])
    found = states(tmp_path)
    names = [f"predicted against measured, every point: {what}" for what in ("step time", "peak")]
    assert tuple(found[name].state for name in names) == states_


def test_a_step_with_nothing_planned_was_not_predicted(tmp_path):
    nothing = swap(120.0) | {"swap_bytes": 0}
    write(tmp_path, [plain("A"), record("A", "adaptive@nothing", 100.0, swap=nothing)])
    assert states(tmp_path)["predicted against measured, every point: step time"].state == NOT_RUN


def test_moments(tmp_path):
    source = record("A", "adaptive@nothing", 100.0, recompute_options=[],
                    link={"out_bytes_per_ms": GIB / 30, "in_bytes_per_ms": GIB / 30})  # fmt: skip
    # 3 GiB: out 90 ms in 30, in 90 ms in 60: 90 ms exposed
    virtual = record("C", "optimizer@all", 490.0, swap=swap(None) | {"phase": "off", "moments_bytes": 3 * GIB})
    write(tmp_path, [plain("A"), source, plain("C", 400.0), virtual])
    row = states(tmp_path)["C: --virtual-optimizer all, exposed part"]
    assert row.state == HELD and "bound 90.0 ms" in row.figure


@pytest.mark.parametrize(("ours_ms", "state"), [(449.0, HELD), (460.0, SHORT)])
def test_moments_against_the_optimizer_on_the_cpu(tmp_path, ours_ms, state):
    """The cheaper of its two ways takes 100 ms more than plain."""
    theirs = {"optimizer_cpu@1.0": 900.0, "optimizer_cpu@1.0@overlap": 500.0}
    ours = record("C", "optimizer@all", ours_ms, swap=swap(None) | {"phase": "off", "moments_bytes": 3 * GIB})
    records = [record("C", point, ms, group="theirs") for point, ms in theirs.items()]
    write(tmp_path, [plain("C", 400.0), ours, *records])
    assert states(tmp_path)["C: --virtual-optimizer all against --optimizer-cpu-offload"].state == state


def test_host_time(tmp_path):
    told = {"tensors": 1000, "kept_us": 9.0, "swapped_us": 41.0, "step_ms": 100.0, "plain_step_ms": 100.0}
    write(tmp_path, [], host_overhead=told)
    found = states(tmp_path)
    assert found["host time of pack + unpack, kept"].state == HELD
    assert found["host time of pack + unpack, swapped"].state == SHORT


def test_of_ours_the_newest_code_counts_of_others_every_run(tmp_path):
    """What was mended since is no longer what it was; a competitor's runs are all of the same thing."""
    for number, (code, ours, theirs) in enumerate([("a", 120.0, 130.0), ("b", 101.0, 110.0), ("b", 103.0, 120.0)]):
        when = {"when": f"2026-01-0{number + 1}T00:00:00"}
        points = [record("A", "adaptive@0.90", ours, **when), record("A", "full", theirs, **FULL, **when)]
        runs = [plain("A", **when), *points]
        write(tmp_path, runs, versions={"mindspeed-swap": code})
    results = read([tmp_path], "gpu")
    assert results.ratio("A", "adaptive@0.90") == 1.02 and results.ratio("A", "full") == 1.2


def test_the_code_is_named_by_what_is_in_it(tmp_path, monkeypatch):
    names = []
    for text in ("x = 1\n", "x = 2\n", "x = 2\n"):
        (tmp_path / "patches").mkdir(exist_ok=True)
        (tmp_path / "patches" / "a.py").write_text(text)
        monkeypatch.setattr(machine, "ROOT", tmp_path)
        names.append(machine.versions()["mindspeed-swap"])
    assert names[0] != names[1] == names[2] and names[0].startswith("0.")


def test_times_are_compared_with_the_plain_runs_next_to_them(tmp_path):
    """What else a machine has to do changes."""
    order = [plain("A", 100.0), record("A", "full", 150.0, **FULL), plain("A", 200.0), record("A", "swap@0.90", 220.0),
             plain("A", 200.0), record("A", "swap@0.80", 100.0)]  # fmt: skip
    write(tmp_path, [each | {"when": f"2026-01-01T00:00:0{number}"} for number, each in enumerate(order)])
    results = read([tmp_path], "gpu")
    assert [results.ratio("A", name) for name in ("full", "swap@0.90", "swap@0.80")] == [1.0, 1.1, 0.5]
