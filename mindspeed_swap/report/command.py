"""``mindspeed-swap report DIR``, one page and one PNG per picture, and ``mindspeed-swap what-if DIR|TRACE``."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_swap.errors import SettingError
from mindspeed_swap.report.reader import read
from mindspeed_swap.report.what_if import explained, frontier, read_traces, table
from mindspeed_swap.units import GIB, parse_bytes


def make_report(directory: str, out: str | None, run: str | None) -> int:
    """Exit code: 0, or 1 when something of the run is missing (the rest is shown). Raises SettingError."""
    files = read(directory, run)
    from mindspeed_swap.report import pictures  # tells in one line that matplotlib is needed
    from mindspeed_swap.report.page import drawings, page

    target = Path(out) if out else files.directory / "report.html"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page(files), encoding="utf-8")
        print(target)
        for rank in files.ranks:
            for name, _, _, draw in drawings(rank):
                picture = target.with_name(f"{target.stem}_rank{rank.rank}_{name}.png")
                pictures.png(draw, str(picture))
                print(picture)
    except OSError as error:
        raise SettingError(f"the report cannot be written: {error}") from None
    for problem in files.problems:
        print(f"missing: {problem}")
    return 1 if files.problems else 0


def what_if(
    path: str, budgets: Sequence[str] = (), host_memory_gib: float | None = None, picture: str | None = None
) -> int:
    """Print the table. Returns the exit code. Raises SettingError for what is not a trace and for wrong budgets."""
    if picture:
        from mindspeed_swap.report import pictures  # tells in one line that matplotlib is needed
    wanted = [parse_bytes(text, "--budgets") for text in budgets]
    host = None if host_memory_gib is None else int(host_memory_gib * GIB)
    traces = read_traces(path)
    found = frontier(traces, wanted, host)
    print(table(found))
    if len(wanted) == 1:
        print("\n".join(explained(traces, wanted[0], host)))
    if picture:
        try:
            pictures.png(lambda size: pictures.frontier(found, size), picture)
        except (OSError, ValueError) as error:
            raise SettingError(f"--picture: {error}") from None
        print(picture)
    return 0
