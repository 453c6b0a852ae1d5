"""What is promised about speed and memory, and what result files say of it: held, short or not run."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lower_bound import lower_bound_ms, optimizer_bound_ms
from points import FULL, PLAIN
from results import Record, Results, gain_over_full, settled
from workloads import workload

HELD, SHORT, NOT_RUN = "held", "short", "not run"
TO_BOUND, TO_BEST = 1.03, 1.01
PREDICTED_TIME, PREDICTED_PEAK, PREDICTED_PEAK_BYTES = 0.03, 0.02, int(0.3 * 2**30)
HELD_TOLERANCE = 1.01  # a share of held bytes is asked for by a peak: the two are not of the same moment
# With nothing else, and with SmartSwap on.
ALL_MOMENTS = ("optimizer@all", "optimizer@all@swap")
OFFLOADS = ("optimizer_cpu@1.0", "optimizer_cpu@1.0@overlap")
TO_OFFLOAD = 0.5
NOTHING_EXPOSED = 0.01  # of the step: where the copies fit their windows, what may still be seen of them


@dataclass(frozen=True)
class Row:
    promise: str
    limit: str
    figure: str
    state: str
    why: str = ""


def rows(results: Results, device: str) -> list[Row]:
    budgets = ("A", "B", "F")
    return [
        *(_nothing(results, point) for point in ("swap@nothing", "adaptive@nothing")),
        _overhead(results, "A", "swap@moved25", 0.010, "SmartSwap, 25 % of activation bytes moved", 0.75),
        *(
            _overhead(results, name, "adaptive@held40", 0.04, "adaptive, 40 % of activation bytes held", 0.40)
            for name in ("A", "A_te")
        ),
        _gain(results, "A", "adaptive@full", 1.07, "adaptive at full recompute's bytes"),
        _gain(results, "B", "adaptive@full", 1.18, "adaptive at full recompute's bytes"),
        *(_to_bound(results, name, device) for name in budgets),
        *(_to_best(results, name, device) for name in budgets),
        _overhead(results, "C", "optimizer@3", 0.02, "--virtual-optimizer 3"),
        *(_all_moments(results, point) for point in ALL_MOMENTS),
        _to_offload(results),
        _gain(results, "E4", "adaptive@0.80", 1.1465, "adaptive, PP 4, at 0.8 of plain's peak"),
        _gain(results, "E2V", "adaptive@0.80", 1.1465, "adaptive, PP 2 x VPP 2, at 0.8 of plain's peak"),
        _gain(results, "B", "swap@0.80", 1.24, "SmartSwap in place of full recompute, at 0.8 of plain's peak"),
        _predictions(results, "step time", _time_error),
        _predictions(results, "peak", _peak_error),
        *_host(results),
    ]


def _why_not(results: Results, name: str, *points: str) -> Row | None:
    """The row's end if a point has no figure: it was not run, it failed, or its search was not over."""
    for point in (PLAIN, *points):
        record = results.latest(name, point)
        if record is None:
            return Row("", "", "", NOT_RUN, f"{name} {point}")
        if not record["ok"]:
            return Row("", "", "", SHORT, f"{name} {point} failed: {record['why']}")
        if not settled(record):
            return Row("", "", "", SHORT, f"{name} {point}: counted steps were of a search")
        if results.ratio(name, point) is None:
            return Row("", "", "", NOT_RUN, f"{name} {point}: no plain run of the same machine")
    return None


def _row(promise: str, limit: str, without: Row | None, make: Callable[[], tuple[str, bool, str]]) -> Row:
    if without is not None:
        return Row(promise, limit, "-", without.state, without.why)
    figure, good, why = make()
    return Row(promise, limit, figure, HELD if good else SHORT, why)


def _nothing(results: Results, point: str) -> Row:
    return _overhead(results, "A", point, 0.005, f"flags on, nothing to do ({point.split('@')[0]})")


def _overhead(results: Results, name: str, point: str, most: float, what: str, held: float | None = None) -> Row:
    """``held``: the share of plain's held bytes that may be."""

    def make() -> tuple[str, bool, str]:
        over = _known(results.ratio(name, point)) - 1
        share = results.runs(name, point)[-1]["held_bytes"] / results.runs(name, PLAIN)[-1]["held_bytes"]
        good = over <= most and (held is None or share <= held * HELD_TOLERANCE)
        figure = f"{over:+.2%}" + (f", {share:.0%} held" if held is not None else "")
        why = _budget_text(results, name, point) or ("" if good else _link_text(results, name, point))
        return figure, good and _within_budget(results, name, point), why

    limit = f"<= {most:.1%}" + (f", <= {held:.0%} held" if held is not None else "")
    return _row(f"{name}: {what}", limit, _why_not(results, name, point), make)


def _gain(results: Results, name: str, point: str, least: float, what: str) -> Row:
    def make() -> tuple[str, bool, str]:
        gain = _known(gain_over_full(results, name, point))
        good = gain >= least and _within_budget(results, name, point)
        return f"{gain:.3f} x", good, _budget_text(results, name, point)

    return _row(f"{name}: {what}", f">= {least} x full recompute", _why_not(results, name, point, FULL), make)


def _at_budgets(results: Results, name: str, device: str) -> tuple[list[tuple[float, Record]], list[str], Row | None]:
    """(runs that ended well by fraction, what is wrong with others, a row's end if some did not run)"""
    found, wrong = [], []
    for fraction in workload(name, device).fractions:
        point = f"adaptive@{fraction:.2f}"
        missing = _why_not(results, name, point)
        record = results.latest(name, point)
        if missing is None and record is not None:
            found.append((fraction, record))
        elif missing is not None and missing.state == NOT_RUN:
            return [], [], missing
        elif record is not None and results.best_competitor(name, _budget(results, name, fraction)) is None:
            continue  # nobody trains there
        elif missing is not None:
            wrong.append(missing.why)
    return found, wrong, None if found or wrong else Row("", "", "", NOT_RUN, f"{name}: no budget trains")


def _budget(results: Results, name: str, fraction: float) -> int:
    return int(fraction * (results.peak(name, PLAIN) or 0))


def _to_bound(results: Results, name: str, device: str) -> Row:
    found, wrong, missing = _at_budgets(results, name, device)
    inputs = results.bound_inputs(name)
    if missing is None and inputs is None:
        missing = Row("", "", "", NOT_RUN, f"{name} adaptive@nothing, which the bound's inputs are of")

    def make() -> tuple[str, bool, str]:
        assert inputs is not None
        ratios = {}
        for fraction, run in found:
            bound = lower_bound_ms(inputs, run["budget_bytes"]) / inputs.step_ms
            ratios[fraction] = _known(results.ratio(name, run["point"])) / bound
            if not _within_budget(results, name, run["point"]):
                wrong.append(f"at {fraction}: {_budget_text(results, name, run['point'])}")
        return _worst(ratios, TO_BOUND, wrong)

    return _row(f"{name}: every budget against the lower bound", f"<= {TO_BOUND} x", missing, make)


def _to_best(results: Results, name: str, device: str) -> Row:
    found, wrong, missing = _at_budgets(results, name, device)

    def make() -> tuple[str, bool, str]:
        ratios = {}
        for fraction, run in found:
            best = results.best_competitor(name, _known(results.peak(name, run["point"])))
            if best is not None:
                ratios[fraction] = _known(results.ratio(name, run["point"])) / best[1]
        return _worst(ratios, TO_BEST, wrong)

    return _row(f"{name}: every budget against the best competitor", f"<= {TO_BEST} x", missing, make)


def _worst(ratios: dict[float, float], most: float, wrong: list[str]) -> tuple[str, bool, str]:
    if not ratios:
        return "-", not wrong, "; ".join(wrong) or "no competitor holds as little at any budget"
    at = max(ratios, key=lambda fraction: ratios[fraction])
    over = [f"{fraction}: {ratio:.3f}" for fraction, ratio in ratios.items() if ratio > most]
    return f"{ratios[at]:.3f} x at {at} ({len(ratios)} budgets)", not over and not wrong, "; ".join(over + wrong)


def _all_moments(results: Results, point: str) -> Row:
    inputs = results.bound_inputs("C") or results.bound_inputs("A")
    missing = _why_not(results, "C", point)
    if missing is None and inputs is None:
        missing = Row("", "", "", NOT_RUN, "C adaptive@nothing, which the link's figures are of")

    def make() -> tuple[str, bool, str]:
        assert inputs is not None
        run, plain = results.runs("C", point)[-1], _known(results.step_ms("C", PLAIN))
        exposed = _exposed_ms(results, point)
        bound = optimizer_bound_ms(inputs, run["swap"]["moments_bytes"])
        good = exposed <= max(1.10 * bound, NOTHING_EXPOSED * plain)
        return f"{exposed:.1f} ms, bound {bound:.1f} ms", good, ""

    what = "--virtual-optimizer all" + (" with SmartSwap" if point != ALL_MOMENTS[0] else "")
    return _row(f"C: {what}, exposed part", "<= 1.10 x bound", missing, make)


def _to_offload(results: Results) -> Row:
    """Against the cheaper one of Megatron's two ways."""

    def make() -> tuple[str, bool, str]:
        ours = _exposed_ms(results, ALL_MOMENTS[0])
        theirs = min(_exposed_ms(results, point) for point in OFFLOADS)
        return f"{ours:.1f} ms, theirs {theirs:.1f} ms", ours <= TO_OFFLOAD * theirs, ""

    missing = _why_not(results, "C", ALL_MOMENTS[0], *OFFLOADS)
    return _row("C: --virtual-optimizer all against --optimizer-cpu-offload", f"<= {TO_OFFLOAD} x", missing, make)


def _exposed_ms(results: Results, point: str) -> float:
    return (_known(results.ratio("C", point)) - 1) * _known(results.step_ms("C", PLAIN))


def _predictions(results: Results, what: str, error: Callable[[Record], tuple[float, bool] | None]) -> Row:
    errors = {
        f"{r['workload']} {r['point']}": found
        for r in results.records
        if r["ok"] and settled(r) and (found := error(r)) is not None
    }
    missing = None if errors else Row("", "", "", NOT_RUN, "no point with a prediction")

    def make() -> tuple[str, bool, str]:
        worst = max(errors, key=lambda name: abs(errors[name][0]))
        bad = [f"{name}: {value:+.1%}" for name, (value, good) in errors.items() if not good]
        return f"worst {errors[worst][0]:+.1%} of {len(errors)} ({worst})", not bad, "; ".join(bad)

    limit = f"{PREDICTED_TIME:.0%}" if error is _time_error else f"{PREDICTED_PEAK:.0%} or 0.3 GiB"
    return _row(f"predicted against measured, every point: {what}", f"<= {limit}", missing, make)


def _time_error(run: Record) -> tuple[float, bool] | None:
    ours = run.get("swap") or {}
    predicted = ours.get("predicted_ms")
    if not predicted or not (ours.get("swap_bytes") or ours.get("recompute_ms")):
        return None  # nothing was planned: that time is of the step that WarmUp recorded
    error = run["step_ms"] / predicted - 1
    return error, abs(error) <= PREDICTED_TIME


def _peak_error(run: Record) -> tuple[float, bool] | None:
    predicted = (run.get("swap") or {}).get("predicted_peak_bytes")
    if not predicted:
        return None
    measured = max(run["peak_bytes"].values())
    error = measured / predicted - 1
    return error, abs(error) <= PREDICTED_PEAK or abs(measured - predicted) <= PREDICTED_PEAK_BYTES


def _host(results: Results) -> Iterator[Row]:
    found = results.host_overheads[-1] if results.host_overheads else None
    missing = None if found else Row("", "", "", NOT_RUN, "host_overhead.py")
    for name, key, most in (("kept", "kept_us", 10.0), ("swapped", "swapped_us", 40.0)):

        def make(key: str = key, most: float = most) -> tuple[str, bool, str]:
            assert found is not None
            return f"{found[key]:.1f} us ({found['tensors']} tensors)", found[key] <= most, ""

        yield _row(f"host time of pack + unpack, {name}", f"<= {most:.0f} us", missing, make)

    def step() -> tuple[str, bool, str]:
        assert found is not None
        over = found["step_ms"] / found["plain_step_ms"] - 1
        return f"{over:+.2%}", over <= 0.005, ""

    yield _row("a chain of products, nothing to swap", "<= 0.5% step time", missing, step)


def _above_budget(results: Results, name: str, point: str) -> int:
    """Bytes, of the run that fared worst."""
    runs = [run for run in results.runs(name, point) if run["budget_bytes"] is not None]
    return max((run["peak_bytes"]["forward_backward"] - run["budget_bytes"] for run in runs), default=0)


def _within_budget(results: Results, name: str, point: str) -> bool:
    return _above_budget(results, name, point) <= 0


def _budget_text(results: Results, name: str, point: str) -> str:
    above = _above_budget(results, name, point)
    return f"peak {above / 2**20:.1f} MiB above the budget" if above > 0 else ""


def _link_text(results: Results, name: str, point: str) -> str:
    """If the link cannot carry what was swapped while forward runs: by how much."""
    inputs, swap = results.bound_inputs(name), results.runs(name, point)[-1].get("swap")
    if inputs is None or not swap:
        return ""
    out_ms = swap["swap_bytes"] / inputs.out_bytes_per_ms
    if out_ms <= inputs.forward_ms:
        return ""
    return f"the copies out alone take {out_ms:.1f} ms, plain's forward {inputs.forward_ms:.1f} ms"


def _known(value: float | int | None) -> float:
    assert value is not None
    return value
