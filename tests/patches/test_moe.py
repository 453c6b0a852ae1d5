"""Megatron's token counts are asked of the accelerator, and as Megatron itself does where it has no way of its own."""
import inspect
from types import SimpleNamespace

import numpy
import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe import moe_utils, token_dispatcher

from mindspeed_swap import runtime
from mindspeed_swap.options import Options
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


class Dispatcher:
    """Moves at one point and waits at a later one, as Megatron's does."""

    cuda_dtoh_point = "before_permutation_1"

    def __init__(self):
        self.splits, self.d2h_event, self.seen = torch.arange(3), None, []

    def _maybe_dtoh_and_synchronize(self, point, tokens=None):
        if point == self.cuda_dtoh_point:
            self.seen.append("moved")
            tokens, self.splits, self.d2h_event = tokens.tolist(), self.splits.tolist(), object()
        elif point == "before_finish":
            self.seen.append(self.d2h_event)
        return tokens


class Keeping:
    """A runtime in which the call runs again from the second time on."""

    def __init__(self):
        self.found = []

    def kept(self, function):
        if not self.found:
            self.found.append(function())
        return self.found[0]


def test_a_layer_that_runs_again_does_not_move_them_again(monkeypatch):
    keeping, installed = Keeping(), Installed()
    monkeypatch.setattr(runtime, "get", lambda: keeping)
    installed.wrap(Dispatcher, "_maybe_dtoh_and_synchronize", moe._maybe_dtoh_and_synchronize)
    first, again = Dispatcher(), Dispatcher()
    for dispatcher in (first, again):
        tokens = dispatcher._maybe_dtoh_and_synchronize("before_permutation_1", torch.tensor([5, 6]))
        assert tokens == [5, 6] and dispatcher.splits == [0, 1, 2]
        assert dispatcher._maybe_dtoh_and_synchronize("before_finish", tokens) is tokens
    assert first.seen == ["moved", first.d2h_event] and again.seen == [first.d2h_event]
    installed.remove()


def test_megatrons_dispatcher_is_as_it_is_taken_to_be(patched):
    """The point is an attribute of it, and is what the method is told first."""
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    assert hasattr(dispatcher._maybe_dtoh_and_synchronize, "__wrapped__")
    source = inspect.getsource(dispatcher)
    assert "point == self.cuda_dtoh_point" in source and "self.cuda_dtoh_point = " in source
    assert list(inspect.signature(dispatcher._maybe_dtoh_and_synchronize).parameters)[:2] == ["self", "point"]


class Splitting(Dispatcher):
    """What it sets may be what is there already."""

    def _maybe_dtoh_and_synchronize(self, point, tokens=None):
        if point == self.cuda_dtoh_point:
            self.num_out_tokens = int(tokens.max())
        return tokens.tolist()


def test_what_was_there_already_is_put_back_too(monkeypatch):
    """Three microbatches through one dispatcher; then the second runs again."""
    kept, installed, dispatcher = [], Installed(), Splitting()
    installed.wrap(Splitting, "_maybe_dtoh_and_synchronize", moe._maybe_dtoh_and_synchronize)
    keeping = SimpleNamespace(kept=lambda function: kept.append(function()) or kept[-1])
    monkeypatch.setattr(runtime, "get", lambda: keeping)
    for counts in ([3, 5], [5, 2], [1, 9]):
        dispatcher._maybe_dtoh_and_synchronize("before_permutation_1", torch.tensor(counts))
    monkeypatch.setattr(runtime, "get", lambda: SimpleNamespace(kept=lambda function: kept[1]))
    again = dispatcher._maybe_dtoh_and_synchronize("before_permutation_1", torch.tensor([5, 2]))
    assert again == [5, 2] and dispatcher.num_out_tokens == 5
    installed.remove()


def test_without_plans_it_is_the_plain_call(monkeypatch):
    """As of --virtual-optimizer alone: there is no manager."""
    monkeypatch.setenv("MINDSPEED_SWAP_DEVICE", "sim")
    running = runtime.Runtime(Options(False, 1.0, None, "m", virtual_optimizer=SimpleNamespace()), 1 << 30)
    installed = Installed()
    installed.wrap(Dispatcher, "_maybe_dtoh_and_synchronize", moe._maybe_dtoh_and_synchronize)
    monkeypatch.setattr(runtime, "get", lambda: running)
    with running.step([], None, 1):
        assert Dispatcher()._maybe_dtoh_and_synchronize("before_permutation_1", torch.tensor([5, 6])) == [5, 6]
    installed.remove()
    running.close()
