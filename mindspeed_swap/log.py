"""One line per thing worth knowing, on rank 0 unless it concerns one rank: ``[mindspeed_swap] ...``."""
from __future__ import annotations

import os
import sys

_quiet = _everywhere = False


def speak(at_all: bool, everywhere: bool) -> None:
    """Whether ``say`` prints, and whether on all ranks."""
    global _quiet, _everywhere
    _quiet, _everywhere = not at_all, everywhere


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


_speaks_for_stage = False


def speak_for_stage() -> None:
    """This rank is the first of its pipeline stage, and there are several: it says what differs between stages."""
    global _speaks_for_stage
    _speaks_for_stage = True


class Once:
    """``say`` on every rank, each text once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text, every_rank=True)


def say(message: str, *, every_rank: bool = False, every_stage: bool = False) -> None:
    """Print one line. ``every_rank`` adds the rank's number and prints on all of them, ``every_stage`` on the first of
    each pipeline stage: one line per rank would be thousands."""
    if _quiet:
        return
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if ((every_rank or _everywhere) and several) or (every_stage and _speaks_for_stage):
        print(f"[mindspeed_swap rank {rank()}] {message}", file=sys.stdout, flush=True)
    elif rank() == 0:
        print(f"[mindspeed_swap] {message}", file=sys.stdout, flush=True)
