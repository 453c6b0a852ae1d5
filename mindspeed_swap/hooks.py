"""Custom operators: what they are called, and which tensors must stay while they run.

From C++ by ``NPUSwapManager.h``, whose library ``mindspeed-swap build-hooks`` makes in
``TORCH_EXTENSIONS_DIR/smart_swap``; from Python by ``custom_operator``. Importing this loads no torch.
"""
from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_swap.errors import SettingError

SOURCES = Path(__file__).resolve().parent / "csrc" / "smart_swap"
FOLDER, LIBRARY = "smart_swap", "libsmart_swap.so"
VARIABLE = "TORCH_EXTENSIONS_DIR"


# ---- for builders of custom operators
def include_paths() -> list[str]:
    """Where ``NPUSwapManager.h`` is."""
    return [str(SOURCES)]


def library_paths() -> list[str]:
    """Where ``libsmart_swap.so`` is. Raises SettingError if it was not built, or TORCH_EXTENSIONS_DIR is not set."""
    folder = _folder()
    if not (folder / LIBRARY).is_file():
        raise SettingError(f"there is no {folder / LIBRARY}: run `mindspeed-swap build-hooks` with the same {VARIABLE}")
    return [str(folder)]


def _folder() -> Path:
    root = os.environ.get(VARIABLE)
    if not root:
        raise SettingError(
            f"{VARIABLE} is not set, and {LIBRARY} belongs into its folder {FOLDER} (a linker would otherwise be told "
            f"-LNone/{FOLDER}/): export {VARIABLE}=/some/folder, for building and for training"
        )
    return Path(root) / FOLDER


def build_hooks() -> Path:
    """Compiles ``libsmart_swap.so`` against this torch. Raises SettingError if it cannot."""
    folder = _folder()
    import torch
    from torch.utils.cpp_extension import include_paths as torch_include_paths

    compiler = os.environ.get("CXX") or next((name for name in ("c++", "g++") if shutil.which(name)), "g++")
    libraries = Path(torch.__file__).parent / "lib"
    made, ready = folder / f"{LIBRARY}.{os.getpid()}", folder / LIBRARY
    command = [
        *compiler.split(), "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-isystem{path}" for path in torch_include_paths()),
        str(SOURCES / "smart_swap.cpp"), f"-Wl,-soname,{LIBRARY}", "-o", str(made),
        f"-L{libraries}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(made, ready)  # whole or not at all, also where a process has the old one open
    except FileNotFoundError as error:
        raise SettingError(f"building {LIBRARY} needs a C++ compiler, and {compiler} was not found: set CXX") from error
    except OSError as error:
        raise SettingError(f"{LIBRARY} cannot be written to {folder}: {error}") from error
    except subprocess.CalledProcessError as error:
        raise SettingError(f"{LIBRARY} does not compile against torch {torch.__version__}:\n{error.stderr}") from error
    return ready


# ---- from Python
class CustomOperator:
    """Holds its tensors' storages: memory that anyone refers to is never given up."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def hold(self, *tensors: Any) -> None:
        # An alias has a reference of its own to the storage; the caller's tensor may be shared with whoever counts.
        self._held += [tensor.detach() for tensor in tensors if tensor is not None]

    def let_go(self) -> None:
        self._held.clear()


@contextmanager
def custom_operator(name: str, *tensors: Any) -> Iterator[CustomOperator]:
    """``with custom_operator("gmm", x, weight) as op: y = gmm(x, weight); op.hold(y)``

    Names what runs inside in the trace of a recorded step and in torch.profiler, and keeps the memory of the tensors on
    the device meanwhile. Without --smart-swap it is only the name.
    """
    from mindspeed_swap.core.spans import span

    op = CustomOperator()
    op.hold(*tensors)
    try:
        with span("operator", name):
            _listen(0, name)
            try:
                yield op
            finally:
                _listen(1, name)
    finally:
        op.let_go()


# ---- to the manager that records
_manager: Any = None
_library: tuple[Any, Any] | None = None  # the loaded one, and what it calls: alive as long as it may be called
_begun = threading.local()


def connect(manager: Any) -> None:
    """From now on operators are recorded by ``manager``: those from C++ too, if the library is where it belongs."""
    global _manager, _library
    disconnect()
    _manager = manager
    root = os.environ.get(VARIABLE)
    path = Path(root) / FOLDER / LIBRARY if root else None
    if path is not None and path.is_file():
        library = ctypes.CDLL(str(path))  # the one that operators have loaded, or will
        callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)(_from_library)
        library.mindspeed_swap_set_listener(callback)
        _library = (library, callback)


def disconnect() -> None:
    global _manager, _library
    if _library is not None:
        _library[0].mindspeed_swap_set_listener(None)
    _manager = _library = None


def _from_library(ends: int, name: bytes) -> None:
    _listen(ends, name.decode(errors="replace"))


def _listen(ends: int, name: str) -> None:
    manager = _manager
    if manager is None:
        return
    begun = _begun.__dict__.setdefault("operators", [])
    accelerator = manager.accelerator
    if not ends:
        begun.append((name, accelerator.record(accelerator.compute_stream())))
        return
    while begun:  # one that ended by an exception, from C++ without a guard, was never told to end
        began, before = begun.pop()
        if began == name:
            if (recorder := manager.recorder) is not None:
                recorder.operator(name, before, accelerator.record(accelerator.compute_stream()))
            return
