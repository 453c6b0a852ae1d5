"""Building the C++ sources: once, by one of several processes, and with a remedy where a tool is missing."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_swap.core import extension
from mindspeed_swap.errors import SettingError

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
#include <Python.h>
#define STRING2(x) #x
#define STRING(x) STRING2(x)
#define CONCAT2(a, b) a##b
#define CONCAT(a, b) CONCAT2(a, b)
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, STRING(TORCH_EXTENSION_NAME)};
PyMODINIT_FUNC CONCAT(PyInit_, TORCH_EXTENSION_NAME)() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", ANSWER);
  return module;
}
"""  # plain C API: compiles in a moment
LOAD = """if True:
    import sys
    from mindspeed_swap.core.extension import load_extension
    module = load_extension("tiny", [sys.argv[1]], cflags=["-DANSWER=42"])
    print("answer", module.answer, "torch.utils.cpp_extension" in sys.modules, flush=True)
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    file = tmp_path / "tiny.cpp"
    file.write_text(SOURCE)
    return file


def start(source: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, str(source)], cwd=ROOT, env=os.environ | {"PYTHONPATH": "."} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


def test_one_process_builds_and_the_others_wait(source: Path) -> None:
    outputs = [finish(process) for process in [start(source) for _ in range(2)]]
    assert sum("building tiny" in output for output in outputs) == 1
    assert all("answer 42" in output for output in outputs)
    # The build is kept: another process compiles nothing, says nothing, and does not even import the compiler's driver.
    assert finish(start(source)) == "answer 42 False\n"


def test_a_killed_builder_blocks_nobody(source: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow-c++"
    slow.write_text(
        f'#!/bin/sh\ncase "$*" in *tiny.cpp*) touch {tmp_path}/compiling; sleep 30;; esac\nexec c++ "$@"\n')
    slow.chmod(0o755)
    builder = start(source, CXX=str(slow))
    deadline = time.monotonic() + 30
    while not (tmp_path / "compiling").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "compiling").exists()
    waiter = start(source)
    builder.kill()  # only the process itself: its compiler is orphaned and goes on, as after a real kill
    assert "answer 42" in finish(waiter)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.communicate()


def test_a_changed_source_or_flag_is_built_anew(source: Path) -> None:
    first = extension.load_extension("tiny", [source], cflags=["-DANSWER=1"])
    assert extension.load_extension("tiny", [source], cflags=["-DANSWER=1"]) is first
    second = extension.load_extension("tiny", [source], cflags=["-DANSWER=2"])
    assert (first.answer, second.answer) == (1, 2)


def test_a_failed_build_shows_the_compilers_words_and_can_be_repeated(source: Path) -> None:
    source.write_text("#error this cannot work\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="this cannot work"):
            extension.load_extension("tiny", [source])


def test_missing_tools_are_named_with_the_remedy(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "executable", str(tools / "python"))
    with pytest.raises(SettingError, match=r"install g\+\+"):
        extension.load_extension("tiny", [source])
    (tools / "c++").write_text("#!/bin/sh\n")
    (tools / "c++").chmod(0o755)
    with pytest.raises(SettingError, match="pip install ninja"):
        extension.load_extension("tiny", [source])
    monkeypatch.setenv("CXX", "clang++-99")
    with pytest.raises(SettingError, match=r"clang\+\+-99"):
        extension.load_extension("tiny", [source])
    assert os.environ["PATH"] == str(tools)
    assert capsys.readouterr().out == ""


def test_a_build_folder_that_cannot_be_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(SettingError, match="TORCH_EXTENSIONS_DIR"):
        extension.load_extension("tiny", [source])


def test_the_default_folder_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(os, "makedirs", lambda *args, **kwargs: None)
    assert str(extension.extensions_dir() / "x") == cpp_extension._get_build_directory("x", verbose=False)
