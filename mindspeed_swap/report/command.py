"""``mindspeed-swap report DIR``: one page and one PNG per picture."""
from __future__ import annotations

from pathlib import Path

from mindspeed_swap.errors import SettingError
from mindspeed_swap.report.reader import read


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
