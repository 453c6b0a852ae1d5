"""SIGTERM would end the process without running ``atexit``: page-locked memory must be given back first.

Note: [In a collective]
Python runs handlers in the main thread, between two of its instructions: never while that waits in C++ for ranks that
do not come. But the signal itself also writes to a pipe (``set_wakeup_fd``). A thread that reads there ends the process
if nothing has come of the signal after a while, or of a second one at once; the kernel then gives the memory back.

A forked process reaches no border: there the signal has its default action. While a process is forked the signal waits,
or Python would forget it in the new one, and its byte in the pipe, which both share, would end the old one.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

# Between a border of the step and the next one lies less than this, unless the other ranks are gone.
GRACE_SECONDS = 10.0
JOIN_SECONDS = 1.0

_number = 0  # of the signal that has come
_busy: Callable[[], bool] | None = None
_wakeup = -1  # the pipe's end that the signal writes to
_reader: threading.Thread | None = None  # of the other end
_STOP = b"\0"  # no signal has this number
_ending = threading.Event()
_forking = threading.local()  # the signals that its thread had blocked before


def install(busy: Callable[[], bool]) -> None:
    """``busy``: True while the process may not end where it is, but will call ``end_if_terminated`` soon."""
    global _busy, _wakeup, _reader
    _busy = busy
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # somebody else's handler stays
        return
    signal.signal(signal.SIGTERM, _on_terminate)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    others = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if others != -1:
        signal.set_wakeup_fd(others)
        os.close(reading)
        os.close(writing)
        return
    _wakeup = writing
    _reader = threading.Thread(target=_end_the_hard_way, args=(reading,), name="mindspeed_swap SIGTERM", daemon=True)
    _reader.start()


def uninstall() -> None:
    global _wakeup, _reader
    if signal.getsignal(signal.SIGTERM) is _on_terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _wakeup != -1 and _let_go(_wakeup):
        with contextlib.suppress(BlockingIOError):
            os.write(_wakeup, _STOP)
        os.close(_wakeup)  # a child's copy may stay open
        if _reader is not None:
            _reader.join(JOIN_SECONDS)
        _wakeup, _reader = -1, None


def end_if_terminated() -> None:
    if _number:
        _ending.set()
        raise SystemExit(128 + _number)


def _on_terminate(number: int, frame: Any) -> None:
    """Raising here would be lost if the signal came during a finaliser or an allocator's callback, so inside a step the
    next border of the step raises. A second signal has the default action."""
    del frame
    global _number
    signal.signal(number, signal.SIG_DFL)
    _number = number
    if _busy is None or not _busy():
        end_if_terminated()


def _end_the_hard_way(reading: int) -> None:
    """See Note [In a collective]. As a second signal does, so that the exit code tells of the signal."""
    end: float | None = None  # of the patience
    while True:
        ready, _, _ = select.select([reading], [], [], None if end is None else max(0.0, end - time.monotonic()))
        data = os.read(reading, 256) if ready else b""
        if ready and (not data or _STOP in data):
            os.close(reading)
            return
        signals = data.count(signal.SIGTERM)
        theirs = signal.getsignal(signal.SIGTERM) not in (_on_terminate, signal.SIG_DFL)  # taken over since
        if _ending.is_set() or theirs:
            end = None
        elif signals > 1 or (end is not None and (signals or not ready)):
            libc = ctypes.CDLL(None)  # Python's own function is for the main thread only
            libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
            libc.signal(signal.SIGTERM, None)
            os.kill(os.getpid(), signal.SIGTERM)
        elif signals:
            end = time.monotonic() + GRACE_SECONDS


def _let_go(writing: int) -> bool:
    """Signals no longer write there. Somebody else's pipe stays. False: only the main thread can do that."""
    if threading.current_thread() is not threading.main_thread():
        return False
    current = signal.set_wakeup_fd(-1)
    if current not in (-1, writing):
        signal.set_wakeup_fd(current)
    return True


def _before_fork() -> None:
    if _wakeup != -1:
        _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    blocked, _forking.blocked = getattr(_forking, "blocked", None), None
    if blocked is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _after_fork_in_child() -> None:
    """The thread is the parent's, and so is what it reads."""
    global _wakeup, _reader
    if _wakeup != -1:
        _let_go(_wakeup)
        os.close(_wakeup)
        _wakeup, _reader = -1, None
        if signal.getsignal(signal.SIGTERM) is _on_terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
