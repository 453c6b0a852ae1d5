"""``python -I -S client.py SOCKET [-X faulthandler] FILE|-c CODE [ARGUMENT ...]``: as that interpreter, by server.py.

Signals are handed on, and it ends as the program does. What the server cannot do is done by the real one.
"""
import json
import os
import signal
import socket
import sys

FORWARDED = [
    signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
]  # fmt: skip


def asked(arguments):
    """None: not for the server."""
    arguments = list(arguments)
    environment = dict(os.environ)
    if arguments[:2] == ["-X", "faulthandler"]:
        environment["PYTHONFAULTHANDLER"] = "1"
        del arguments[:2]
    if environment.get("PYTHONWARNINGS") != "ignore" or "PYTHONHASHSEED" in environment or not arguments:
        return None
    program, code = arguments.pop(0), None
    if program == "-c":
        program, code = "<string>", arguments.pop(0)
    elif program.startswith("-"):
        return None
    return {"program": program, "code": code, "arguments": arguments, "environment": environment, "folder": os.getcwd()}


def main():
    path, *arguments = sys.argv[1:]
    request = asked(arguments)
    if request is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    data = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(server, [data], [0, 1, 2])
    server.sendall(data[sent:])
    answers = server.makefile()
    process = int(answers.readline())
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
