"""A saved tensor that is changed in place before backward: PyTorch's error, with hooks as without, swapped or not."""
import functools
import re

import pytest
import torch
from swapping import capture, new_manager, recorded_plan, run_step

SIZE = 32
PREFIX = "one of the variables needed for gradient computation has been modified by an inplace operation: "


def message(error: BaseException | None) -> str:
    """Without the part that only the original tensor knows: which output of which node it is."""
    assert type(error) is RuntimeError
    return re.sub(r", which is output \d+ of \w+,", "", str(error))


def build(leaf, change):
    """An activation is saved by two nodes; ``change`` gets it and says what is changed."""

    def body(layer, act=True):
        with layer(1):
            hidden = leaf * 2.0
            out = hidden.sin() + hidden[1:5].exp().sum()
        with layer(2):
            loss = out.sum()
        if act:
            with torch.no_grad():
                change(hidden)
        return loss

    return body


CHANGES = {
    "itself": lambda x: x.mul_(2),
    "a view": lambda x: x[3:4].zero_(),
    "a detached alias": lambda x: x.detach().add_(1),
    "an element": lambda x: x.view(-1)[7].fill_(0),
    "resized": lambda x: x.t_(),
}


def run(body, manager, plan=None, between=lambda: None):
    manager.begin_step(plan)
    with manager.forward(0):
        loss = body(manager.layer)
    between()
    loss.backward()


@pytest.mark.parametrize("name", CHANGES)
def test_case_37_same_error(sim, name):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    body = build(leaf, CHANGES[name])
    plain = message(capture(run_step, body, [leaf]))
    assert plain.startswith(PREFIX)
    for min_bytes in (1024, 1 << 30):  # ours to move, and passed through
        manager = new_manager(sim, min_bytes=min_bytes)
        assert message(capture(run, body, manager)) == plain
        assert message(capture(run, body, manager, None, functools.partial(manager.evict, 1 << 40))) == plain

    # Swapped, while the user goes on holding the tensor, and changes it before or after the device memory was released.
    manager = new_manager(sim)
    quiet = build(leaf, lambda x: None)
    plan = recorded_plan(quiet, [leaf], manager)
    assert plan.swaps
    kept = []

    def holds(layer):
        loss = build(leaf, kept.append)(layer)
        CHANGES[name](kept.pop()) if early else None
        return loss

    for early in (True, False):
        with torch.no_grad():
            between = (lambda: None) if early else (lambda: [CHANGES[name](x) for x in kept])
            manager.begin_step(plan)
            with torch.enable_grad(), manager.forward(0):
                loss = holds(manager.layer)
            between()
        assert message(capture(loss.backward)) == plain


def test_case_37_the_error_does_not_fetch_anything(sim):
    """Found before the copy back: an error under memory pressure stays this error."""
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    manager = new_manager(sim)
    hidden = leaf * 2.0
    with manager.forward(0):
        loss = hidden.sin().sum()
    alias = hidden.detach()
    saved = next(iter(manager.live.by_serial.values()))
    manager._mover.offload(saved)
    assert manager._mover.release(saved, planned=False)
    alias.zero_()
    assert PREFIX in str(capture(loss.backward))
    assert manager.stats.loaded_bytes == 0


@pytest.mark.parametrize("min_bytes", [1, 1 << 30])
def test_case_37_small_tensors_outputs_and_parameters(sim, min_bytes):
    weight = torch.nn.Parameter(torch.randn(4))
    for function in (torch.exp, torch.sin, lambda x: x * weight):  # saves its output, its input, a parameter
        for target in ("input", "output", "parameter"):

            def body(layer, function=function, target=target):
                x = weight * 2.0
                out = function(x)
                loss = out.sum()
                with torch.no_grad():
                    {"input": x, "output": out, "parameter": weight}[target].add_(1.0)
                return loss

            plain = capture(run_step, body, [weight])
            found = capture(run_step, body, [weight], new_manager(sim, min_bytes=min_bytes))
            assert type(found) is type(plain)
            if plain is not None:
                # a parameter's version goes on counting from run to run
                assert re.sub(r"version \d+", "", message(found)) == re.sub(r"version \d+", "", message(plain))


def test_case_37_other_types_and_layouts(sim):
    """Views of another type share the counter; sparse and complex tensors are passed through with it."""

    def sparse():
        return torch.randn(8, 8).relu().to_sparse()

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, other):
            ctx.save_for_backward(other)
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            (other,) = ctx.saved_tensors
            assert other is not None
            return grad, None

    leaf = torch.randn(4, requires_grad=True)
    base = torch.randn(SIZE, SIZE)
    makers = {
        "sparse": sparse,
        "conj": lambda: torch.randn(8, 8, dtype=torch.complex64).conj(),
        "int view": lambda: base.view(torch.int32),
    }
    for name, make in makers.items():
        for manager in (None, new_manager(sim)):

            def body(layer, make=make):
                other = make()
                loss = Saves.apply(leaf, other).sum()
                other.mul_(2)
                return loss

            error = capture(run_step, body, [leaf], manager)
            assert type(error) is RuntimeError, (name, manager, error)
            assert str(error).startswith(PREFIX), (name, manager, error)


def test_case_37_a_change_in_backward_is_seen_by_the_next_reader(sim):
    """A node that writes into what it saved: a second backward must refuse, through views of any type."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            copy = x.detach().clone()
            ctx.save_for_backward(copy, copy.view(torch.int32), copy[3:])
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            ctx.saved_tensors[which].mul_(2)
            return grad

    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    manager = new_manager(sim)
    for which in range(3):
        for evict in (False, True):
            with manager.forward(0):
                loss = Writes.apply(leaf * 2.0).sum()
            if evict:
                assert manager.evict(1 << 40) > 0
            loss.backward(retain_graph=True)
            assert PREFIX in str(capture(loss.backward)), which


def test_case_37_no_false_alarm(sim):
    """Changed before it was saved, or a copy changed: no error."""
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)

    def body(layer):
        hidden = (leaf * 2.0).mul_(3.0)
        copy = hidden.clone()
        loss = hidden.sin().sum()
        copy.detach().zero_()
        return loss

    manager = new_manager(sim)
    expected = run_step(body, [leaf]).grads[0]
    assert torch.equal(run_step(body, [leaf], manager).grads[0], expected)
