"""Weights are saved by autograd too, as they are, transposed, or as slices of one buffer. They never move."""
import torch
from swapping import assert_nothing_left, assert_same, new_manager, run_step

from mindspeed_swap.model_state import owned_by, with_gradients
from mindspeed_swap.sim import device

SIZE = 64


def moved_bytes(body, leaves, manager):
    """Bytes copied while everything that can be evicted is evicted, after every layer and before every read."""
    plain = run_step(body, leaves)
    before = device.stats()["d2h_bytes"]
    manager.on_interval = lambda interval: manager.evict(1 << 40)
    outcome = run_step(body, leaves, manager)
    device.synchronize()
    assert_same(outcome, plain)
    return device.stats()["d2h_bytes"] - before, outcome


def test_case_05_parameters_transposes_and_slices_of_a_buffer(sim):
    buffer = torch.randn(3 * SIZE * SIZE)  # as DDP's: parameters are views of it
    weights = [torch.nn.Parameter(part.view(SIZE, SIZE)) for part in buffer.chunk(3)]
    x = torch.randn(SIZE, SIZE, requires_grad=True)

    def body(layer):
        hidden = x @ weights[0].t()
        hidden = torch.nn.functional.linear(hidden, weights[1])
        hidden = hidden @ weights[2][:, : SIZE // 2]
        return (hidden * buffer[: SIZE * SIZE // 2].view(SIZE, -1)).sum()

    manager = new_manager(sim)
    manager.movable.keep_on_device([*weights, buffer, x])
    _, outcome = moved_bytes(body, weights, manager)
    assert outcome.stats.saved > 0  # activations are ours
    storage = buffer.untyped_storage()
    seen = []
    manager.observers.append(lambda saved, old: seen.append(saved.storage_ref()))
    moved_bytes(body, weights, manager)
    assert seen and storage not in seen
    assert_nothing_left(manager)


def test_case_05_only_weights_are_saved_nothing_moves(sim):
    weights = [torch.nn.Parameter(torch.randn(SIZE, SIZE)) for _ in range(3)]
    x = torch.randn(SIZE, SIZE)

    def body(layer):
        return sum((x @ weight.t() * weight[:, 0]).sum() for weight in weights)

    manager = new_manager(sim)
    manager.movable.keep_on_device([*weights, x])
    moved, outcome = moved_bytes(body, weights, manager)
    # x @ w.t() is an activation that is saved for the product with w[:, 0], nothing else is
    assert moved <= outcome.stats.evicted_bytes == 3 * SIZE * SIZE * 4


def test_case_05_views_of_a_parameter_that_nobody_registered(sim):
    """Autograd holds leaves that require grad, and so whatever their views are views of."""
    weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
    x = torch.randn(SIZE, SIZE, requires_grad=True)

    def body(layer):
        return (x @ weight.t()).sum() + (x @ weight[:, : SIZE // 2]).sum() + (weight * weight.t()).sum()

    moved, outcome = moved_bytes(body, [weight, x], new_manager(sim))
    assert moved == 0 and outcome.stats.saved == 0


def test_case_05_registration_follows_the_storage_not_its_address(sim):
    """A buffer that was registered and freed says nothing about the activation that gets its address next."""
    manager = new_manager(sim)
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    buffer, activation = torch.randn(SIZE, SIZE), leaf * 2.0
    manager.movable.keep_on_device([buffer])
    manager.movable.will_vanish(buffer)
    assert manager.movable.refuses(buffer) and not manager.movable.refuses(activation)
    address = buffer.untyped_storage()._cdata
    del buffer
    for known in (manager.movable._static, manager.movable._vanishing):
        known.refs[activation.untyped_storage()._cdata] = known.refs[address]  # as if the address were reused
    assert not manager.movable.refuses(activation)


def test_case_05_a_model_with_a_sparse_buffer(sim):
    """It has no storage, and nothing to keep."""
    model = torch.nn.Linear(SIZE, SIZE)
    model.register_buffer("adjacency", torch.eye(SIZE).to_sparse())
    owned = list(owned_by([model]))
    assert len(owned) == 2
    new_manager(sim).movable.keep_on_device(with_gradients(owned))
