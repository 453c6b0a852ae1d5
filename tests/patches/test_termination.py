"""SIGTERM ends a process also where Python's handlers never run, and processes forked from it at once."""
from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

BLOCKED = """
import atexit, ctypes, os, sys, time
from mindspeed_swap import termination
termination.GRACE_SECONDS = float(sys.argv[1])
atexit.register(print, "given back", flush=True)
termination.install(lambda: True)
mutex = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
print("now", flush=True)
ctypes.CDLL(None).pthread_mutex_lock(mutex)  # for ever, in C
"""
STEPS = """
import atexit, sys, time
from mindspeed_swap import termination
termination.GRACE_SECONDS = 0.5
atexit.register(lambda: (time.sleep(1.5), print("given back", flush=True)))
termination.install(lambda: True)
print("now", flush=True)
while True:
    time.sleep(0.1)
    termination.end_if_terminated()
"""
FORKED = """
import os, signal, time
from mindspeed_swap import termination
termination.GRACE_SECONDS = 0.5
termination.install(lambda: True)
children = 0
for _ in range(50):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        time.sleep(60)
    os.kill(child, signal.SIGTERM)  # most of them before it has left the fork
    children += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
print(children, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
time.sleep(1.5)
print("still here", flush=True)
termination.uninstall()
print(signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""
# The child uninstalls what is its parent's; then the parent ends as ever where Python's handlers do not run.
UNINSTALLED_IN_A_CHILD = """
import ctypes, os
from mindspeed_swap import termination
termination.GRACE_SECONDS = 0.5
termination.install(lambda: True)
child = os.fork()
if child == 0:
    termination.uninstall()
    os._exit(0)
os.waitpid(child, 0)
mutex = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
print("now", flush=True)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""

THEIRS = """
import signal, time
from mindspeed_swap import termination
termination.GRACE_SECONDS = 0.5
termination.install(lambda: True)
got = []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))  # as --exit-signal-handler of Megatron does
print("now", flush=True)
end = time.monotonic() + 3.0
while time.monotonic() < end:
    time.sleep(0.1)
print(len(got) > 0, "saved")
"""


def started(code: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "now\n"
    return process


@pytest.mark.parametrize("grace, signals", [(0.5, 1), (600.0, 2)], ids=["after a while", "at the second"])
def test_blocked_in_c_it_ends_all_the_same(grace, signals):
    process = started(BLOCKED, str(grace))
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == -signal.SIGTERM


def test_a_handler_that_comes_later_has_the_last_word():
    """Megatron saves a checkpoint then, however long that takes."""
    process = started(THEIRS)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert process.communicate(timeout=60)[0] == "True saved\n"
    assert process.returncode == 0


def test_at_a_border_all_is_given_back_however_long_that_takes():
    process = started(STEPS)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "given back\n"
    assert process.returncode == 128 + signal.SIGTERM


def test_a_forked_process_that_uninstalls_leaves_its_parent_be():
    with subprocess.Popen([sys.executable, "-c", UNINSTALLED_IN_A_CHILD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(20) == -signal.SIGTERM
        finally:
            process.kill()


def test_a_forked_process_has_the_default_action_and_its_parent_goes_on():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.stdout == "50 set()\nstill here\n-1 True\n", done.stderr
