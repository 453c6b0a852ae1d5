"""``python()``: an interpreter for tests that start Megatron, most of whose start is over."""
from __future__ import annotations

import atexit
import functools
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
COLD = "MINDSPEED_TESTS_COLD"  # set: every process is a new interpreter. --full sets it
START_SECONDS = 120
# The server is a module of its own: of the program that is started, ``__main__`` is the tests' to fill.
START = """
import sys
path = sys.path[1:]
sys.path.insert(0, sys.argv[1])
import server
server.main(sys.argv[2], path)
"""


@functools.cache
def python() -> str:
    """Path of a program that runs ``FILE`` or ``-c CODE`` as Python does, in a process of its own."""
    if os.environ.get(COLD):
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    path = folder / "socket"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MINDSPEED_"))}
    server = subprocess.Popen(
        [sys.executable, "-c", START, str(HERE), str(path)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    atexit.register(_stop, server, folder)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {HERE / "client.py"} {path} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    end = time.monotonic() + START_SECONDS
    while not path.exists():
        if server.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"tests/warm/server.py did not start: exit code {server.poll()}")
        time.sleep(0.05)
    return str(program)


def _stop(server: subprocess.Popen[bytes], folder: Path) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()
    for name in ("socket", "python"):
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()
