"""Every promise about speed as held, short or not run, with its figure. Exit code 1 if one is short.

    python scripts/bench/check.py --results docs/results [--device gpu]
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from promises import HELD, NOT_RUN, SHORT, rows  # noqa: E402
from results import read  # noqa: E402
from workloads import GPU, SIM  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, action="append", required=True, help="folder of results; repeatable")
    parser.add_argument("--device", choices=(GPU, SIM), default=GPU)
    args = parser.parse_args(argv)
    found = rows(read(args.results, args.device), args.device)
    for row in found:
        print(f"{row.state:8} {row.promise}: {row.figure} (limit {row.limit})" + (f"; {row.why}" if row.why else ""))
    counts = {state: sum(row.state == state for row in found) for state in (HELD, SHORT, NOT_RUN)}
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 1 if counts[SHORT] else 0


if __name__ == "__main__":
    sys.exit(main())
