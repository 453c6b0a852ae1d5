"""A storage that its owner empties after it was saved, and fills again before backward, is never touched."""
import torch
from swapping import assert_nothing_left, assert_same, new_manager, recorded_plan, run_step

SIZE = 48


def discarding(leaf, tell):
    """As Megatron's CheckpointWithoutOutput: the output is emptied after its consumer saved it and computed again when
    backward reaches the consumer."""

    def body(layer):
        with layer(1):
            hidden = leaf * 2.0
            with torch.no_grad():
                output = hidden.exp()
            output.requires_grad_()
            tell(output)
            consumed = output @ output.t()
            storage, nbytes = output.untyped_storage(), output.untyped_storage().nbytes()
            storage.resize_(0)

            def fill(grad):
                storage.resize_(nbytes)
                with torch.no_grad():
                    output.data.copy_(hidden.exp())

            consumed.register_hook(fill)
        with layer(2):
            return consumed.sin().sum() + (hidden.cos() @ hidden).sum()

    return body


def test_case_39_declared(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    plain = run_step(discarding(leaf, lambda x: None), [leaf])
    manager = new_manager(sim)
    body = discarding(leaf, manager.movable.will_vanish)
    plan = recorded_plan(body, [leaf], manager)
    assert plan.swaps
    manager.on_interval = lambda interval: manager.evict(1 << 40)
    for each in (None, plan):
        assert_same(run_step(body, [leaf], manager, each), plain)
    assert_nothing_left(manager)


def test_case_39_undeclared_and_empty_is_left_alone(sim):
    """Nobody said so, and eviction comes while it is empty: others are evicted, this one is not."""
    manager = new_manager(sim)
    empty, full = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    with manager.forward(0):
        handles = [manager._pack(empty), manager._pack(full)]
    storage = empty.untyped_storage()
    del empty
    storage.resize_(0)
    address = storage._cdata
    del storage, full
    assert manager.evict(1 << 40) == SIZE * SIZE * 4
    assert handles[0].saved.identity[0] == address
    assert manager.pool.used_bytes == SIZE * SIZE * 4
    del handles
    assert_nothing_left(manager)
