"""Megatron's token counts are asked of the accelerator, and as Megatron itself does where it has no way of its own."""
import numpy
import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe import moe_utils, token_dispatcher

from mindspeed_swap import runtime
from mindspeed_swap.patches import moe
from mindspeed_swap.patches.registry import Installed


class OnDevice(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True
    recorded = None

    def record_stream(self, stream):
        self.recorded = stream


class Runtime:
    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def read_small(self, tensor):
        self.asked.append(tensor)
        return self.answer


@pytest.fixture
def patched():
    installed = Installed()
    moe.install_into(installed)
    yield
    installed.remove()


def test_it_is_the_accelerators_where_it_has_one(patched, monkeypatch):
    counts, answer = torch.arange(4).as_subclass(OnDevice), torch.arange(4)
    monkeypatch.setattr(runtime, "get", lambda: Runtime(answer))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream")
    move = token_dispatcher.maybe_move_tensor_to_cpu
    assert move is moe_utils.maybe_move_tensor_to_cpu and move(counts) is answer
    assert counts.recorded is None
    found = move(counts, as_numpy=True, record_stream=True)
    assert isinstance(found, numpy.ndarray) and found.tolist() == [0, 1, 2, 3] and counts.recorded == "the stream"


def test_else_it_is_megatrons(patched, monkeypatch):
    monkeypatch.setattr(runtime, "get", lambda: asked)
    asked = Runtime(None)
    counts = torch.arange(4).as_subclass(OnDevice)
    assert token_dispatcher.maybe_move_tensor_to_cpu(counts).tolist() == [0, 1, 2, 3] and asked.asked == [counts]
    assert token_dispatcher.maybe_move_tensor_to_cpu([1, 2]) == [1, 2] and len(asked.asked) == 1


def test_removed_it_is_as_before():
    before, installed = token_dispatcher.maybe_move_tensor_to_cpu, Installed()
    moe.install_into(installed)
    assert token_dispatcher.maybe_move_tensor_to_cpu is not before
    installed.remove()
    assert token_dispatcher.maybe_move_tensor_to_cpu is before is moe_utils.maybe_move_tensor_to_cpu
