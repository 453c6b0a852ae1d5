"""Builds the product's small C++ sources at first use and loads them.

The built library is kept under ``TORCH_EXTENSIONS_DIR`` (torch's own default if unset) in a folder named after
everything it depends on, so that later processes only open it: no compiler and no ``torch.utils.cpp_extension``,
whose import costs a good part of a second.
"""
from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from mindspeed_swap.errors import SettingError
from mindspeed_swap.log import say

SOURCE_DIR = Path(__file__).resolve().parent.parent / "csrc"
BASE_CFLAGS = ("-O2", "-g0")  # torch passes no -O of its own; debug info would double the build time

_loaded: dict[str, ModuleType] = {}


def load_extension(
    name: str,
    sources: Sequence[str | Path],
    *,
    headers: Sequence[str | Path] = (),
    cflags: Sequence[str] = (),
    ldflags: Sequence[str] = (),
    include_dirs: Sequence[str | Path] = (),
) -> ModuleType:
    """The Python module ``name`` built from C++ ``sources``, built now if no earlier process has done so.

    Relative paths of ``sources`` and ``headers`` are below ``mindspeed_swap/csrc``. ``headers`` are only looked at to
    notice a change. The sources must use ``PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)``.

    Several processes may call this at once: one builds, the others wait for it.

    Raises SettingError if a tool needed for the build is missing or the build folder cannot be written, RuntimeError
    with the compiler's output if the build fails.
    """
    files = [SOURCE_DIR / source for source in sources]
    key = _key(name, [*files, *(SOURCE_DIR / header for header in headers)], cflags, ldflags, include_dirs)
    if key in _loaded:
        return _loaded[key]
    folder = extensions_dir() / "mindspeed_swap" / key
    library = _built_library(folder)
    if library is None:
        flags = {"cflags": list(cflags), "ldflags": list(ldflags), "include_dirs": [str(d) for d in include_dirs]}
        module = _build_or_wait(name, files, folder, flags)
    else:
        module = _import(library)
    _loaded[key] = module
    return module


def extensions_dir() -> Path:
    """The folder that torch itself would use for extensions of this Python and torch."""
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(root)
    from torch._appdirs import user_cache_dir

    cuda = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(user_cache_dir(appname="torch_extensions")) / f"{python}_{cuda}"


def _key(name: str, files: Sequence[Path], *flags: Sequence[str | Path]) -> str:
    digest = hashlib.sha256()
    for part in (torch.__version__, str(torch.version.cuda), sys.version, *map(repr, flags), repr(BASE_CFLAGS)):
        digest.update(part.encode() + b"\0")
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{name}-{digest.hexdigest()[:16]}"


def _built_library(folder: Path) -> Path | None:
    """The finished library of ``folder``: ``built`` is written last, so half a build is never taken for one."""
    try:
        library = folder / (folder / "built").read_text()
    except OSError:
        return None
    return library if library.is_file() else None


def _build_or_wait(name: str, sources: Sequence[Path], folder: Path, flags: dict[str, list[str]]) -> ModuleType:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")  # noqa: SIM115 - closed by the with below
    except OSError as error:
        raise SettingError(
            f"cannot build the extension {name} in {folder}: {error}. Set TORCH_EXTENSIONS_DIR to a writable folder"
        ) from error
    with lock:
        # flock, not a lock file: the kernel releases it when its owner is killed, so that nobody waits for ever.
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = _built_library(folder)
        if library is not None:
            return _import(library)
        for leftover in folder.glob("build-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # A folder of its own per attempt: compilers orphaned by a killed process may still write into the old one.
        build = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
        module = _build(name, sources, build, flags)
        marker = folder / f"built.{os.getpid()}"
        marker.write_text(f"{build.name}/{Path(str(module.__file__)).name}")
        os.replace(marker, folder / "built")
        return module


def _build(name: str, sources: Sequence[Path], build: Path, flags: dict[str, list[str]]) -> ModuleType:
    with _build_environment(name):
        # every_rank: the one that got the lock says it, whichever that is
        say(f"building {name} (C++, once per torch version; usually under a minute) ...", every_rank=True)
        from torch.utils import cpp_extension

        return cpp_extension.load(
            name,
            [str(source) for source in sources],
            extra_cflags=[*BASE_CFLAGS, *flags["cflags"]],
            extra_ldflags=flags["ldflags"],
            extra_include_paths=flags["include_dirs"],
            build_directory=str(build),
            with_cuda=False,  # no .cu sources, and the CUDA toolkit need not be installed
        )


@contextmanager
def _build_environment(name: str) -> Iterator[None]:
    """PATH and CXX such that torch finds the tools; SettingError if it cannot."""
    old = {variable: os.environ.get(variable) for variable in ("PATH", "CXX")}
    # The ninja of a virtual environment lies beside its python, which need not be on PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++") if shutil.which(c, path=path)), "g++")
    if not shutil.which(compiler.split()[0], path=path):
        raise SettingError(
            f"building {name} needs a C++ compiler, and {compiler} was not found: install g++ "
            "(apt-get install g++, or dnf install gcc-c++), or set CXX"
        )
    if not shutil.which("ninja", path=path):
        raise SettingError(f"building {name} needs ninja, which was not found: pip install ninja")
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").is_file():
        raise SettingError(f"building {name} needs Python.h in {include}: install python3-dev or python3-devel")
    os.environ.update(PATH=path, CXX=compiler)
    try:
        yield
    finally:
        for variable, value in old.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


def _import(library: Path) -> ModuleType:
    name = library.name.split(".")[0]
    spec = importlib.util.spec_from_file_location(name, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is not a Python extension")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
