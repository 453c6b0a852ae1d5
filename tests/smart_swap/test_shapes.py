"""The runtime on the simulated device, without Megatron: shapes that change, experts whose share varies, late loads."""
from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch

from mindspeed_swap import runtime as runtime_module
from mindspeed_swap.core.mover import LATE_MS
from mindspeed_swap.options import Options
from mindspeed_swap.runtime import Runtime
from mindspeed_swap.sim import device
from mindspeed_swap.smart_swap.outcomes import Phase
from mindspeed_swap.smart_swap.policy import Policy

HIDDEN, LAYERS = 32, 6
LARGE = 8 << 30


class Expert(torch.nn.Module):
    """A layer that saves two tensors of the size of its input, and, of an expert, one for its share of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: torch.Tensor, share: float) -> torch.Tensor:
        x = torch.tanh(x @ self.weight)
        if share:
            taken = int(share * x.shape[0])
            x = torch.cat([torch.sin(x[:taken].clone()), x[taken:]])
        return x


class Training:
    """A model, its optimizer, and a runtime that it may run under."""

    def __init__(self, policy: Policy | None, host_bytes: int = 256 << 20) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.ModuleList(Expert() for _ in range(LAYERS))
        self.embedding = torch.nn.Parameter(torch.ones(HIDDEN))
        self.sgd = torch.optim.Adam([self.embedding, *self.model.parameters()], lr=1e-3)
        self.losses: list[torch.Tensor] = []
        self.runtime: Runtime | None = None
        if policy is not None:
            options = Options(True, None, None, "model=test", policy=policy)
            self.runtime = Runtime(options, host_bytes)

    def forward(self, tokens: int, share: float) -> torch.Tensor:
        x = torch.sigmoid(torch.full((tokens, HIDDEN), 0.5) * self.embedding)  # saved before the first layer
        for number, layer in enumerate(self.model, 1):
            if self.runtime is None:
                x = layer(x, share)
            else:
                with self.runtime.layer(number, x):
                    x = layer(x, share)
        return x.square().mean()

    def step(self, tokens: int, share: float = 0.0, microbatches: int = 1) -> None:
        run = self.runtime
        if run is None:
            self._step(tokens, share, microbatches)
            return
        holder = type("Optimizer", (), {"optimizer": self.sgd})()
        with run.step([self.model], holder, microbatches):
            self._step(tokens, share, microbatches)

    def _step(self, tokens: int, share: float, microbatches: int) -> None:
        self.sgd.zero_grad()
        for _ in range(microbatches):
            if self.runtime is None:
                loss = self.forward(tokens, share)
            else:
                with self.runtime.microbatch(self.model):
                    loss = self.forward(tokens, share)
            loss.backward()
            self.losses.append(loss.detach().clone())
            del loss
        if self.runtime is not None:
            self.runtime.enter_optimizer()
        self.sgd.step()

    @property
    def search(self):
        return self.runtime.smart_swap


@pytest.fixture
def train(monkeypatch) -> Iterator:
    """``train(policy)`` -> Training. From here on CPU tensors are device memory."""
    monkeypatch.setenv("MINDSPEED_SWAP_DEVICE", "sim")
    device.install(LARGE)
    gc.collect()  # memory of earlier tests would come free in the middle of one that measures
    started: list[Training] = []

    def start(policy: Policy | None = None, **settings: int) -> Training:
        started.append(Training(policy, **settings))
        return started[-1]

    yield start
    for each in started:
        if each.runtime is not None:
            each.runtime._guard.close()
            each.runtime.manager.close()
            each.runtime.pool.close()
    device.extension().set_pressure_handler(None)
    device.extension().shutdown()
    device.set_capacity(LARGE)
    assert not runtime_module.started()


def peak_of(train, tokens: int, share: float = 0.0) -> tuple[int, int]:
    """(bytes before, peak) of a plain step with optimizer state."""
    plain = train()
    plain.step(tokens, share)
    device.reset_peak()
    before = device.memory_allocated()
    plain.step(tokens, share)
    return before, device.max_memory_allocated()


def same(ours: Training, plain: Training) -> None:
    assert len(ours.losses) == len(plain.losses)
    assert all(torch.equal(a, b) for a, b in zip(ours.losses, plain.losses, strict=True))
    for a, b in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_case_35_sequence_grows_in_stable_survived_and_replanned_within_3_steps(train):
    short, long = 4096, 6144
    before, peak = peak_of(train, long)
    plain, ours = train(), train(Policy())
    for tokens in [short] * 5 + [long] * 13 + [short]:
        plain.step(tokens)
    device.set_capacity(device.memory_allocated() + int(0.8 * (peak - before)))  # the short one fits, the long does not
    for _ in range(5):
        ours.step(short)
    assert ours.search.phase is Phase.STABLE and ours.search.plan.swaps == ()
    ours.step(long)
    assert ours.runtime.manager.stats.evictions > 0, "survived"
    for _ in range(2):
        ours.step(long)
    assert ours.search.plan is not None and ours.search.plan.swaps, "not planned for after 3 steps"
    for _ in range(10):
        ours.step(long)
    assert ours.search.phase is Phase.STABLE
    assert ours.search.stable.evictions == ours.search.stable.on_demand_loads == 0
    ours.step(short)
    assert ours.search.phase is Phase.STABLE, "the plan of the short one is still there"
    device.set_capacity(LARGE)
    same(ours, plain)


FEW, LONGEST = (2048, 3072, 4096, 6144, 8192), 8192
ANY = range(2048, LONGEST + 1)


@pytest.mark.parametrize("capped", [False, True], ids=["moves_all", "capped"])
@pytest.mark.parametrize("lengths", [FEW, pytest.param(ANY, marks=pytest.mark.full)], ids=["few", "any"])
def test_a_sequence_length_that_changes_every_step_has_the_same_bits_and_flat_host_memory(train, lengths, capped):
    rng = random.Random(1)
    # What is pinned follows the longest step so far: those come first, as many as the longest search takes.
    tokens = [LONGEST, FEW[0]] * 10
    while len(tokens) < 100:  # how many steps a search takes depends on what it measures; there are nine of them
        tokens.append(rng.choice([n for n in lengths if n != tokens[-1]]))
    before, peak = peak_of(train, LONGEST)
    plain = train()
    for n in tokens:
        plain.step(n)
    ours = train(Policy() if capped else Policy().with_target(0), host_bytes=12 << 20)
    if capped:
        device.set_capacity(device.memory_allocated() + int(0.8 * (peak - before)))
    pool, pinned = ours.runtime.pool, []
    for n in tokens:
        ours.step(n)
        pinned.append(pool.pinned_bytes)
        assert pool.used_bytes == 0, "all blocks are given back"
        assert device.stats()["registered_bytes"] == pinned[-1]
    device.set_capacity(LARGE)
    same(ours, plain)
    assert pinned[20:] == [pinned[20]] * 80
    assert pool.peak_used_bytes > 1.5 * pool._slab_bytes, "several slabs: it could have grown"
    assert all(search.stable.on_demand_loads == 0 for search in ours.runtime.shapes._searches.values())
    assert len(ours.runtime.shapes.stable_plans()) >= 5
    assert any(plan.swap_bytes for plan in ours.runtime.shapes.stable_plans().values())


def test_case_30_experts_whose_share_varies_by_30_percent(train):
    rng = random.Random(2)
    shares = [0.5 * rng.uniform(0.7, 1.3) for _ in range(60)]
    plain, ours = train(), train(Policy().with_target(0))
    for share in shares:
        plain.step(4096, share)
    pinned, moved, host_full = [], [], 0
    for share in shares:
        ours.step(4096, share)
        pinned.append(ours.runtime.pool.pinned_bytes)
        moved.append(ours.runtime.manager.stats.offloaded_bytes)
        host_full += ours.runtime.manager.stats.host_full
    same(ours, plain)
    assert ours.search.phase is Phase.STABLE
    assert pinned[20:] == [pinned[20]] * 40
    assert host_full == 0
    assert len(set(moved[20:])) > 10, "their actual bytes move, not those of the plan"
    assert min(moved[20:]) > 0.7 * max(moved[20:])
    assert len(ours.runtime.shapes.stable_plans()) == 1


def test_microbatches_and_sizes_each_have_plans_of_their_own(train):
    plain, ours = train(), train(Policy().with_target(0))
    for each in (plain, ours):
        for tokens, microbatches in [(2048, 1)] * 5 + [(2048, 2)] * 5 + [(4096, 2)] * 5 + [(2048, 1)]:
            each.step(tokens, 0.0, microbatches)
    same(ours, plain)
    assert len(ours.runtime.shapes.stable_plans()) == 3
    assert {shape[0] for shape in ours.runtime.shapes.stable_plans()} == {1, 2}


@pytest.mark.parametrize("gbps, late", [(8.0, False), (0.05, True)])
def test_late_loads_are_told_by_device_time(train, gbps, late):
    device.set_link(gbps, gbps)
    ours = train(Policy(stable_step=3).with_target(0))
    for _ in range(6):
        ours.step(8192)
    assert ours.search.phase is Phase.STABLE
    reads = [w for w in ours.search.shown.trace.waits if w.cause == "USE_AFTER_LOAD"]
    waits = [wait for wait in reads if wait.end_ms - wait.start_ms > LATE_MS]
    if late:
        assert waits and ours.search.stable.late_loads > 0
    else:
        # on a busy machine the thread that copies may be late at a few of 3 x 12 loads
        assert ours.search.stable.late_loads < 18


def test_a_host_far_ahead_of_the_device_does_not_count_as_late(train, monkeypatch):
    """At the read the host cannot know whether the copy will be done by the time compute gets there."""
    ours = train(Policy(stable_step=3).with_target(0))
    for _ in range(4):
        ours.step(2048)
    accelerator = ours.runtime._accelerator
    ahead = True  # while the step is queued, nothing of it has happened yet
    really = type(accelerator).done
    monkeypatch.setattr(accelerator, "done", lambda event: not ahead and really(accelerator, event))
    monkeypatch.setattr(accelerator, "elapsed_ms", lambda start, end: -1.0)
    ours.step(2048)
    assert ours.runtime.manager.stats.late_loads == 0
    ahead = False
    ours.step(2048)  # those of the step before are compared with its own
    assert ours.runtime.manager.stats.late_loads == 0
    monkeypatch.setattr(accelerator, "elapsed_ms", lambda start, end: 5.0)
    ours.step(2048)
    assert ours.runtime.manager.stats.late_loads > 0


def test_the_first_step_of_a_run_leaves_room_and_gives_the_cache_back(train, monkeypatch):
    """The simulated device has nobody to leave it to: what it is asked for, and when."""
    run, asked = train(Policy()), []
    accelerator = run.runtime._accelerator
    monkeypatch.setattr(accelerator, "leave_room", lambda nbytes: asked.append((run.search.steps, nbytes > 0)))
    monkeypatch.setattr(accelerator, "empty_cache", lambda: asked.append((run.search.steps, "cache")))
    for _ in range(3):
        run.step(2048)
    assert asked == [(0, True), (0, "cache"), (1, True)]


@pytest.mark.parametrize("share", [0.05, 0.1])
def test_a_step_that_could_not_do_without_the_room_is_planned_with_it(train, monkeypatch, share):
    """What cannot move needs a part of the room that the second step leaves: it takes it, and so does the plan."""
    probe = train(Policy())
    before = device.memory_allocated()
    for _ in range(3):
        probe.step(4096)
    floor, span = probe.search.floor.reachable_bytes, probe.search.peak_bytes - probe.search.floor.reachable_bytes
    probe.runtime._guard.close()
    run = train(Policy())
    cap = floor + device.memory_allocated() - before + int(share * span)
    accelerator, room, taken = run.runtime._accelerator, [0, int(0.3 * span)], []

    def take_room() -> bool:
        taken.append(run.search.steps)
        device.set_capacity(cap)
        return len(taken) == 1

    monkeypatch.setattr(accelerator, "leave_room", lambda nbytes: device.set_capacity(cap - room.pop(0)))
    monkeypatch.setattr(accelerator, "take_room", take_room)
    for _ in range(6):
        run.step(4096)
    assert taken[0] == 1 and run.search.target_bytes > cap - int(0.3 * span)
