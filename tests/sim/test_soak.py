"""Many steps: what the device reserves, what is page-locked and what the process has resident do not grow."""
from __future__ import annotations

import statistics

import pytest
from layout_runs import ADAPTIVE, SMART_SWAP, Trainer, prepare_text
from layouts import LAYOUTS

from mindspeed_swap.units import GIB, MIB

pytest.importorskip("megatron.training")

ONE = LAYOUTS["one"]
SMALL = {"LAYERS": "3"}
WARM_STEPS = 30  # the search is over
# Resident memory still rises then, without any feature as well: C's and Python's own pools, for some 250 steps. What it
# may rise by after that: one lost tensor of 64 KiB a step, the smallest that is moved, would be four times as much.
POOLS_STEPS = 250
MOST_GROWTH_BYTES = 4 * MIB
SCALARS_BYTES = 64


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("soak")
    return Trainer(folder, prepare_text(folder / "text"))


def soak(trainer: Trainer, steps: int, *flags: str, **settings: str) -> None:
    run = trainer.train(ONE, ONE.dtype, *flags, ITERS=str(steps), **SMALL, **settings)
    (rank,) = run.measured
    assert len(rank["steps"]) == steps
    for name in ("reserved_bytes", "pinned_bytes"):
        values = [step[name] for step in rank["steps"][WARM_STEPS:]]
        print(name, values[0], values[-1], max(values))
        # gloo's thread lets go of the scalar of a finished collective a moment late
        assert values[0] > 0 and max(values) <= values[0] + SCALARS_BYTES, (name, values)
    resident = [step["resident_bytes"] for step in rank["steps"][POOLS_STEPS:]]
    if resident:
        first, last = (statistics.median(part) for part in (resident[:25], resident[-25:]))
        print("resident_bytes", first, last, max(resident))
        assert last <= first + MOST_GROWTH_BYTES, resident


def target(trainer: Trainer) -> str:
    """Most of the way down to what no plan goes below."""
    floor = trainer.train(ONE, ONE.dtype, SMART_SWAP, "--swap-memory-target", "0", ITERS="4", **SMALL)
    return f"{1.1 * floor.summaries[0]['floor']['reachable_bytes'] / GIB:.9f}"


def test_a_soak_of_activations_and_optimizer_state(trainer):
    soak(trainer, 60, SMART_SWAP, "--swap-memory-target", "0", "--virtual-optimizer", "all")


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [(SMART_SWAP, "--virtual-optimizer", "all"), (SMART_SWAP,), (ADAPTIVE,)],
    ids=["activations and optimizer state", "smart swap", "adaptive"],
)
def test_a_soak_of_500_steps(trainer, flags):
    soak(trainer, 500, *flags, "--swap-memory-target", target(trainer), MINDSPEED_SWAP_SIM_LINK_GBPS="0.05")
