"""Runs Python programs in processes that have torch imported already: each is forked from this one.

Most of the start of a Megatron process is the import of torch and of what torch brings. Nothing of Megatron
and nothing of ours is imported here: a program meets both as in a new interpreter. Of torch, bf16 products are not as
there: see products.py.
"""
from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import selectors
import signal
import socket
import sys

# Not torch._dynamo: it brings torch.distributed._shard, which remembers attributes of torch.Tensor that the simulated
# device replaces.
PRELOADED = ("torch", "sympy", "torch.distributed.tensor")
MOST_BYTES = 1 << 20  # of a request


class Server:
    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{path}.new")
        self._listener.listen(64)
        os.rename(f"{path}.new", path)  # whoever sees it may connect
        self._ended, ended = os.pipe()
        os.set_blocking(ended, False)
        signal.set_wakeup_fd(ended, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._clients: dict[int, socket.socket] = {}  # by process
        self._selector = selectors.DefaultSelector()
        for source in (self._listener, self._ended, 0):
            self._selector.register(source, selectors.EVENT_READ)

    def next_program(self) -> tuple[dict[str, object], list[int]]:
        """Returns in the new process: what to run, and its standard streams. Here it returns never."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    if asked := self._fork():
                        return asked
                elif key.fileobj == self._ended:
                    os.read(self._ended, 4096)
                elif key.fileobj == 0:
                    if not os.read(0, 1):
                        for process in self._clients:
                            os.kill(process, signal.SIGKILL)
                        os._exit(0)
                else:
                    self._client_is_gone(key.data)
            self._collect()

    def _fork(self) -> tuple[dict[str, object], list[int]] | None:
        client, _ = self._listener.accept()
        data, streams, _, _ = socket.recv_fds(client, MOST_BYTES, 3)
        more = data
        while more and not data.endswith(b"\n"):
            data += (more := client.recv(MOST_BYTES))
        process = os.fork() if more else None
        if process == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for other in (client, self._listener, *self._clients.values()):
                other.close()
            os.close(self._ended)
            return json.loads(data), streams
        for stream in streams:
            os.close(stream)
        if process is None:  # killed before it could ask
            client.close()
            return None
        client.sendall(f"{process}\n".encode())
        self._clients[process] = client
        self._selector.register(client, selectors.EVENT_READ, process)
        return None

    def _client_is_gone(self, process: int) -> None:
        """It has nothing more to say: this is its end. Killed, as it could not hand that on."""
        self._selector.unregister(self._clients[process])
        os.kill(process, signal.SIGKILL)

    def _collect(self) -> None:
        for process in list(self._clients):
            found, status = os.waitpid(process, os.WNOHANG)
            if not found:
                continue
            client = self._clients.pop(process)
            if client in {key.fileobj for key in self._selector.get_map().values()}:
                self._selector.unregister(client)
            with contextlib.suppress(OSError):  # it has been killed
                client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            client.close()


def become(asked: dict[str, object], streams: list[int], path: list[str]) -> dict[str, object]:
    """As the interpreter is at the start of that program. Returns the globals to run it in."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw) if number else io.BufferedReader(raw), encoding="utf-8",
            errors="backslashreplace" if number == 2 else None,
            line_buffering=number == 2 or (number == 1 and raw.isatty()), write_through=unbuffered,
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    program, code = asked["program"], asked["code"]
    added = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = ["" if code is not None else os.path.dirname(os.path.realpath(program)), *added, *path]
    sys.argv[:] = ["-c" if code is not None else program, *asked["arguments"]]
    main = sys.modules["__main__"].__dict__
    for name in set(main) - {"__name__", "__builtins__", "__loader__", "__spec__", "__doc__", "__package__"}:
        del main[name]
    if code is None:
        main["__file__"] = program
    return main


def run(asked: dict[str, object], main: dict[str, object]) -> None:
    """Its exceptions are shown without what of this file is around it."""
    try:
        source = asked["code"]
        if source is None:
            with open(asked["program"], "rb") as file:
                source = file.read()
        exec(compile(source, asked["program"], "exec", dont_inherit=True), main)
    except Exception as error:
        shown = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        sys.exit(1)


def main(socket_path: str, path: list[str]) -> None:
    """``path``: ``sys.path`` of an interpreter that was given no program."""
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module("products").install()
    gc.freeze()  # or every process would copy all of this memory, when it looks for garbage
    asked, streams = Server(socket_path).next_program()
    run(asked, become(asked, streams, path))
