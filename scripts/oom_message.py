"""Out of memory as one line that says what, of how much, and where, a wrong setting as the line that it is; and the end
of this process, so of its job."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

import torch

from mindspeed_swap.errors import SettingError
from mindspeed_swap.units import MIB, format_bytes

TRACEBACK_VARIABLE = "MINDSPEED_SWAP_TRACEBACK"  # 1: the traceback too

# "1.50 GiB (1610612736 bytes)" of the simulated device, "1.50 GiB" of CUDA.
_SIZE = r"([\d.]+) ?(bytes|[KMGT]iB)(?: \((\d+) bytes\))?"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_REQUEST = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_CAPACITY = re.compile(rf"capacity of {_SIZE}")
_ALLOWED = re.compile(rf"{_SIZE} allowed")  # what CUDA says where the process may take only a part of the device
_IN_USE = re.compile(rf"{_SIZE} (?:memory in use|is in use by this process)")
_PEER_GONE = re.compile(r"[Cc]onnection (?:was )?(?:closed|reset) by peer")

# Functions of Megatron that a failing call is in, innermost phase first: recomputation runs forward inside backward.
_PHASE_OF_FUNCTION: tuple[tuple[str, set[str]], ...] = (
    ("backward", {"backward_step", "custom_backward", "finalize_model_grads"}),
    ("forward", {"forward_step"}),
    ("optimizer", {"train_step"}),
    ("setup", set()),
)


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Ends the process with exit code 1: torch.OutOfMemoryError, a SettingError, the loss of a rank that ended so."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        _end(message(error))
    except SettingError as error:
        _end(f"{type(error).__name__}: {error}")
    except RuntimeError as error:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not _PEER_GONE.search(str(error)):
            raise
        _end(f"rank {os.environ.get('RANK')} ends because a rank that it talked to has ended")


def _end(line: str) -> NoReturn:
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exc()
    sys.stdout.flush()
    print(line, file=sys.stderr, flush=True)
    os._exit(1)  # no clean-up: it would wait for ranks that wait for this one


def message(error: BaseException) -> str:
    """``out of memory: tried to allocate 1.5 GiB with 78.1 GiB of 79.2 GiB in use (step 3, backward)``."""
    text = str(error)
    request = _bytes_in(_REQUEST, text)
    in_use = _bytes_in(_IN_USE, text) or torch.cuda.memory_allocated()
    capacity = _bytes_in(_ALLOWED, text) or _bytes_in(_CAPACITY, text) or torch.cuda.mem_get_info()[1]
    step = _step()
    where = phase(error.__traceback__)
    place = f"step {step}, {where}" if step is not None and where != "setup" else where
    wanted = f"tried to allocate {_text(request)} with " if request else ""
    return f"out of memory: {wanted}{_text(in_use)} of {_text(capacity)} in use ({place})"


def _bytes_in(pattern: re.Pattern, text: str) -> int | None:
    found = pattern.search(text)
    if found is None:
        return None
    number, unit, exact = found.groups()
    return int(exact) if exact else int(float(number) * _UNITS[unit])


def _text(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes >= MIB else f"{nbytes / 1024:.1f} KiB"


def phase(trace: TracebackType | None) -> str:
    """forward, backward, optimizer or setup: which part of Megatron's step the exception came through."""
    functions = {frame.f_code.co_name for frame, _ in traceback.walk_tb(trace)}
    return next(name for name, known in _PHASE_OF_FUNCTION if not known or functions & known)


def _step() -> int | None:
    """The running step, counted from 1; None before training."""
    from megatron.training import get_args

    try:
        return get_args().curr_iteration + 1
    except (AssertionError, AttributeError):
        return None
