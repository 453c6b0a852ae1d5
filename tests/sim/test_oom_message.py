"""scripts/oom_message.py reads the messages of a real GPU and of the simulated device alike."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from simulated_run import SCRIPTS

from mindspeed_swap.errors import SettingError

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.05 GiB is "
    "free. Process 77 has 78.14 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch"
)
CAPPED = (
    "CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 79.19 GiB of which 42.5 GiB is "
    "free. 36.63 GiB allowed; Including non-PyTorch memory, this process has 36.10 GiB memory in use. Of the allocated "
    "memory 35.00 GiB is allocated by PyTorch"
)
SIMULATED = (
    "Simulated device out of memory. Tried to allocate 512.00 KiB (524288 bytes). The device has a capacity of "
    "100.00 MiB (104857600 bytes) of which 0 bytes is free; 99.52 MiB (104354283 bytes) is in use by this process."
)


@pytest.fixture(scope="module")
def oom_message():
    spec = importlib.util.spec_from_file_location("oom_message", SCRIPTS / "oom_message.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fail(text: str) -> None:
    raise torch.OutOfMemoryError(text)


def forward_step(text: str) -> None:
    fail(text)


def backward_step(text: str) -> None:
    forward_step(text)  # recomputation


def train_step(text: str) -> None:
    fail(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CUDA, "out of memory: tried to allocate 2.0 GiB with 78.1 GiB of 79.2 GiB in use"),
        (CAPPED, "out of memory: tried to allocate 3.9 GiB with 36.1 GiB of 36.6 GiB in use"),
        (SIMULATED, "out of memory: tried to allocate 512.0 KiB with 99.5 MiB of 100.0 MiB in use"),
    ],
)
@pytest.mark.parametrize(
    ("function", "phase"),
    [(forward_step, "forward"), (backward_step, "backward"), (train_step, "optimizer"), (fail, "setup")],
)
def test_message(oom_message, text: str, expected: str, function, phase: str) -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        function(text)
    assert oom_message.message(raised.value) == f"{expected} ({phase})"


def test_a_wrong_setting_is_its_own_line(oom_message, monkeypatch) -> None:
    ends = []
    monkeypatch.setattr(oom_message, "_end", ends.append)
    with oom_message.one_line():
        raise SettingError("--smart-swap: give less")
    assert ends == ["SettingError: --smart-swap: give less"]


def test_other_errors_pass(oom_message) -> None:
    with pytest.raises(RuntimeError, match="something else"), oom_message.one_line():
        raise RuntimeError("something else")
