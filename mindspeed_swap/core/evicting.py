"""Evicting: whether what a thread allocates may push saved tensors out."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Evicting:
    """A part of the manager, whose lock it is given."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._thread = threading.local()

    @property
    def inside(self) -> bool:
        """A finaliser allocates while this thread is inside a move: its books are not to be read now."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    @property
    def allowed(self) -> bool:
        return not (self.inside or getattr(self._thread, "off", False))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Allocations of this thread rather fail."""
        self._thread.off = True
        try:
            yield
        finally:
            self._thread.off = False
