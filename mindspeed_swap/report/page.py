"""The report as one HTML page that opens offline: every name is escaped, nothing is loaded. Imports no torch."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from mindspeed_swap.report import pictures
from mindspeed_swap.report.reader import RankFiles, RunFiles
from mindspeed_swap.units import format_bytes

_STYLE = Path(__file__).with_name("page.css")
Draw = Callable[[str], Any]


def page(files: RunFiles) -> str:
    first = files.ranks[0].summary
    world, feature = first["world_size"], first.get("feature") or "plans"
    parts = [
        f"<h1>Memory of a training step</h1><p class=soft>run <code>{escape(files.run_id)}</code> · {world} "
        f"rank{'s' if world > 1 else ''} on {escape(first['device'])} · {escape(feature)}: {escape(first['phase'])} "
        f"after {first['steps']} steps</p>",
        *(_note(problem) for problem in files.problems),
    ]
    if len(files.ranks) > 1:
        parts.append(_all_ranks(files.ranks))
    parts += [_rank(rank, opened=i == 0, alone=len(files.ranks) == 1) for i, rank in enumerate(files.ranks)]
    parts.append(_about(first))
    title = f"mindspeed_swap report, run {escape(files.run_id)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Nothing may be loaded, whatever a name contained.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{_STYLE.read_text()}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def drawings(rank: RankFiles) -> list[tuple[str, str, str, Draw]]:
    """(name, title, what it shows, function) of every picture that this rank has figures for."""
    found: list[tuple[str, str, str, Draw]] = []
    if rank.trace and rank.events("C"):
        found += [
            ("memory", "Device memory over the step", "The most that was allocated between two points of the step, and "
             "what it would have been had nothing been swapped. Background: forward, backward, optimizer.",
             partial(pictures.memory, rank)),
            ("lanes", "Link against compute", "Copies run beside compute. Red: compute had to wait for one.",
             partial(pictures.lanes, rank)),
        ]  # fmt: skip
    if rank.step and rank.step["layers"]:
        found += [
            ("layers", "What went where, by layer", "Bytes that autograd saved in the step. Immovable: somebody else "
             "holds them, or backward does not read them.", partial(pictures.layers, rank)),
            ("tensors", "Biggest tensors", "All layers and microbatches together; tensor n is the n-th that a layer "
             "saves.", partial(pictures.tensors, rank)),
        ]  # fmt: skip
    return found


def _rank(rank: RankFiles, *, opened: bool, alone: bool) -> str:
    if rank.step is None:
        body = _note("no step has been recorded" + ("" if rank.summary["phase"] == "off" else " yet"))
    else:
        body = _tiles(rank) + "".join(_note(note) for note in rank.step["notes"]) + _phases(rank)
        for name, title, text, draw in drawings(rank):
            body += _card(title, f"<p class=soft>{text}</p>{_picture(draw, f'{name}{rank.rank}')}")
        body += _search(rank)
    listed = rank.summary.get("swap_config")
    if isinstance(listed, dict):
        lines = [(line,) for name in ("advice", "without_effect") for line in listed.get(name) or ()]
        body += _card("Swap configuration", _table(("",), lines) if lines else "all of it has its effect, in time")
    virtual = rank.summary.get("virtual_optimizer")
    if isinstance(virtual, dict):
        told = {name: _bytes(v) if name.endswith("bytes") else v for name, v in virtual.items()}
        body += _card("Virtual optimizer", _pairs(told))
    if alone:
        return body
    return f"<details class=rank{' open' if opened else ''}><summary>Rank {rank.rank}</summary>{body}</details>"


def _tiles(rank: RankFiles) -> str:
    step, host = rank.step, rank.summary["host"]
    assert step
    plain, peak = pictures.peak_of(rank, "without_plan"), pictures.peak_of(rank, "measured")
    counters = step["counters"]
    saved = f"{1 - peak / plain:.0%} less than {format_bytes(plain)}" if plain > peak else "as without a plan"
    loads = f"{counters['late_loads']} / {counters['on_demand_loads']} / {counters['evictions']}"
    tiles = [
        (format_bytes(peak), f"peak, {saved}"),
        (_ms(step["step_ms"]["measured"]), f"step; {_ms(step['step_ms']['without_plan'])} without waits"),
        (format_bytes(step["bytes_out"]), f"out, {format_bytes(step['bytes_in'])} back in"),
        (_share(step["hidden_share"]), "of copy time hidden"),
        (loads, "late loads / on demand / evictions"),
        (format_bytes(host["peak_used_bytes"]), f"host memory, of {format_bytes(host['budget_bytes'])}"),
    ]
    return f"<div class=tiles>{''.join(f'<div class=tile><b>{a}</b><span>{b}</span></div>' for a, b in tiles)}</div>"


def _phases(rank: RankFiles) -> str:
    step = rank.step
    assert step
    rows: list[Sequence[str]] = []
    for name, phase in step["phases"].items():
        peak = phase["peak_allocated_bytes"]
        rows.append((
            f"peak, {name}", _bytes(peak["without_plan"]), _bytes(peak["predicted"]), _bytes(peak["measured"]),
            _difference(peak), _bytes(phase["peak_reserved_bytes"]["measured"]),
        ))  # fmt: skip
    rows_ms = (("step_ms", "step time"), ("stall_ms", "waits for copies"), ("recompute_ms", "recompute"))
    for name, what in rows_ms:
        values = step[name]
        rows.append((
            what, _ms(values.get("without_plan")), _ms(values["predicted"]), _ms(values["measured"]),
            _difference(values) if name == "step_ms" else "", "",
        ))  # fmt: skip
    columns = ("", "nothing swapped", "predicted", "measured", "off by", "reserved")
    return _card("Predicted and measured", _table(columns, rows))


def _search(rank: RankFiles) -> str:
    tries = rank.summary["tries"]
    if not tries:
        return ""
    rows = [
        (str(i), format_bytes(t["swap_bytes"]), _bytes(t["peak_bytes"]), _ms(t["step_ms"]), str(t["trouble"]))
        for i, t in enumerate(tries, 1)
    ]
    return _card("Plans that were tried", _table(("try", "swapped", "peak", "step", "trouble"), rows))


def _all_ranks(ranks: Sequence[RankFiles]) -> str:
    rows = []
    for rank in ranks:
        step = rank.step
        cells = ("–",) * 6 if step is None else (
            format_bytes(pictures.peak_of(rank, "without_plan")), format_bytes(pictures.peak_of(rank, "measured")),
            format_bytes(step["bytes_out"]), _share(step["hidden_share"]), _ms(step["step_ms"]["measured"]),
            format_bytes(rank.summary["host"]["peak_used_bytes"]),
        )  # fmt: skip
        rows.append((str(rank.rank), *cells))
    columns = ("rank", "peak, no swap", "peak", "out", "hidden", "step", "host")
    picture = _picture(partial(pictures.ranks, ranks), "ranks") if any(rank.step for rank in ranks) else ""
    return f"<h2>Ranks side by side</h2>{_card('', picture)}{_card('', _table(columns, rows))}"


def _about(summary: dict[str, Any]) -> str:
    parts = (("Versions", summary["versions"]), ("Layout", summary["layout"]))
    cards = (_card("", f"<details><summary>{title}</summary>{_pairs(told)}</details>") for title, told in parts)
    return f"<h2>About this run</h2>{''.join(cards)}"


# ---- pieces
def _card(title: str, body: str) -> str:
    return f"<div class=card>{f'<h3>{title}</h3>' if title else ''}{body}</div>"


def _picture(draw: Draw, name: str) -> str:
    return "".join(f"<div class={size}>{pictures.svg(draw, name, size)}</div>" for size in pictures.SIZES)


def _pairs(told: dict[str, Any]) -> str:
    return _table(("", ""), [(name, str(value)) for name, value in told.items()])


def _note(text: str) -> str:
    return f'<div class="card note">{escape(text)}</div>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in columns)}</tr>" if any(columns) else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=scroll><table>{head}{body}</table></div>"


def _bytes(value: float | None) -> str:
    return "–" if value is None else format_bytes(value)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} ms"


def _share(value: float | None) -> str:
    return "no copies" if value is None else f"{value:.1%}"


def _difference(values: dict[str, Any]) -> str:
    predicted = values["predicted"]
    return f"{values['measured'] / predicted - 1:+.1%}" if predicted else ""
