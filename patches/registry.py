"""Installs and removes patches of Megatron. A patch is (dotted target, wrapper): the wrapper gets the original and
returns what takes its place.

A target that is not there is an error that names the Megatron found and the versions supported. Names that other
modules from-imported earlier are swept too, and ``remove`` undoes exactly what was done.
"""
from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from mindspeed_swap.errors import SettingError
from mindspeed_swap.version import installed

Wrapper = Callable[[Any], Any]
Patch = tuple[str, Wrapper]

SUPPORTED = "0.12.1 to 0.19"
_OLDEST, _FIRST_UNKNOWN = (0, 12, 1), (0, 20)
_INHERITED = object()  # the class did not define the name itself


def in_place_of(function: Callable[..., Any]) -> Wrapper:
    """The wrapper whose replacement calls ``function`` with the original before its own arguments."""

    def wrapper(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return wrapper


def megatron_version() -> str:
    """Of the wheel, or of a checkout on PYTHONPATH."""
    if found := installed("megatron-core"):
        return found
    from megatron.core import __version__

    return str(__version__)


def check_version() -> None:
    """Raises SettingError if this Megatron is older or newer than the patches were written for."""
    found = megatron_version()
    numbers = tuple(int(part) for part in found.split("rc")[0].split(".")[:3] if part.isdigit())
    if not _OLDEST <= numbers < _FIRST_UNKNOWN:
        raise SettingError(
            f"megatron-core {found} is installed; mindspeed_swap supports {SUPPORTED}: install one of these, such as "
            "pip install 'megatron-core>=0.17,<0.20'"
        )


def resolve(target: str) -> tuple[Any, str]:
    """``megatron.core.x.Class.method`` -> (owner, name). Raises SettingError if it is not there."""
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if error.name is not None and target.startswith(error.name):
                continue  # a class, not a module: look one level up
            raise
        try:
            for name in parts[split:-1]:
                owner = getattr(owner, name)
            getattr(owner, parts[-1])
        except AttributeError:
            break
        return owner, parts[-1]
    raise SettingError(
        f"patch target {target} does not exist in megatron-core {megatron_version()}; "
        f"mindspeed_swap supports {SUPPORTED}"
    )


class Installed:
    """Patches in place. ``remove`` puts everything back."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what we put

    def install(self, patches: Iterable[Patch]) -> None:
        resolved = [(*resolve(target), wrapper) for target, wrapper in patches]  # all or nothing
        for owner, name, wrapper in resolved:
            self.wrap(owner, name, wrapper)

    def wrap(self, owner: Any, name: str, wrapper: Wrapper) -> None:
        # vars() and not getattr: a staticmethod must go back as the staticmethod object it was
        own = vars(owner).get(name, _INHERITED)
        found = getattr(owner, name) if own is _INHERITED else own
        static = isinstance(found, staticmethod)
        original = found.__func__ if static else found
        after = wrapper(original)
        self._put(owner, name, own, staticmethod(after) if static else after)
        if not isinstance(owner, type):
            for module, alias in _from_imports(original, owner):
                self._put(module, alias, original, after)

    def _put(self, owner: Any, name: str, before: Any, after: Any) -> None:
        setattr(owner, name, after)
        self._undo.append((owner, name, before, after))

    def remove(self) -> None:
        """Put back what was there, except where somebody else has patched on top since."""
        while self._undo:
            owner, name, before, after = self._undo.pop()
            if vars(owner).get(name) is not after:
                continue
            if before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _from_imports(original: Any, owner: Any) -> list[tuple[Any, str]]:
    """(module, name) of every name that other modules from-imported the original under."""
    return [
        (module, name)
        for module_name, module in list(sys.modules.items())
        if module not in (None, owner) and (module_name == "__main__" or module_name.startswith("megatron"))
        for name, value in list(vars(module).items())
        if value is original
    ]
