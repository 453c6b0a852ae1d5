"""Out of memory as one line that says what, of how much, and where; and the end of this process, so of its job."""
from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

import torch

from mindspeed_swap.units import format_bytes

TRACEBACK_VARIABLE = "MINDSPEED_SWAP_TRACEBACK"  # 1: the traceback too

_SIZE = r"([\d.]+ ?[KMGT]?i?B|\d+ bytes)(?: \(\d+ bytes\))?"
_REQUEST = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_CAPACITY = re.compile(rf"capacity of {_SIZE}")
_IN_USE = re.compile(rf"{_SIZE} (?:memory in use|is in use by this process)")

# Functions of Megatron that a failing call is in, innermost phase first: recomputation runs forward inside backward.
_PHASE_OF_FUNCTION = (
    ("backward", {"backward_step", "custom_backward"}),
    ("forward", {"forward_step"}),
    ("optimizer", {"train_step"}),
    ("setup", set()),
)


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Ends the process with exit code 1 on torch.OutOfMemoryError. A launcher then ends the other ranks."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            traceback.print_exc()
        sys.stdout.flush()
        print(message(error), file=sys.stderr, flush=True)
        # No clean-up: it would wait for ranks that wait for this one.
        os._exit(1)


def message(error: BaseException) -> str:
    """``out of memory: tried to allocate 1.5 GiB with 78.1 GiB of 79.2 GiB in use (step 3, backward)``."""
    text = str(error)
    request = _first(_REQUEST, text) or "memory"
    in_use = _first(_IN_USE, text) or format_bytes(torch.cuda.memory_allocated())
    capacity = _first(_CAPACITY, text) or format_bytes(torch.cuda.mem_get_info()[1])
    step = _step()
    where = phase(error.__traceback__)
    place = f"step {step}, {where}" if step is not None and where != "setup" else where
    return f"out of memory: tried to allocate {request} with {in_use} of {capacity} in use ({place})"


def phase(trace: TracebackType | None) -> str:
    """forward, backward, optimizer or setup: which part of Megatron's step the exception came through."""
    functions = {frame.f_code.co_name for frame, _ in traceback.walk_tb(trace)}
    return next(name for name, known in _PHASE_OF_FUNCTION if not known or functions & known)


def _first(pattern: re.Pattern, text: str) -> str | None:
    found = pattern.search(text)
    return found.group(1) if found else None


def _step() -> int | None:
    """The running step, counted from 1; None before training."""
    from megatron.training import get_args

    try:
        return get_args().curr_iteration + 1
    except (AssertionError, AttributeError):
        return None
