"""SIGTERM would end the process without running ``atexit``: page-locked memory must be given back first."""
from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

_number = 0  # of the signal that has come
_busy: Callable[[], bool] | None = None


def install(busy: Callable[[], bool]) -> None:
    """``busy``: True while the process may not end where it is, but will call ``end_if_terminated`` soon."""
    global _busy
    _busy = busy
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # somebody else's handler stays
        signal.signal(signal.SIGTERM, _on_terminate)


def uninstall() -> None:
    if signal.getsignal(signal.SIGTERM) is _on_terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_if_terminated() -> None:
    if _number:
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
