"""What a recomputed call draws from Megatron's tracker is what its forward drew, and what follows is as without it."""
from __future__ import annotations

import os
import subprocess

import pytest
from warm_python import python

pytest.importorskip("megatron.core")

PROGRAM = """
import sys
from mindspeed_swap.sim import redirect_cuda
redirect_cuda()
import torch
from megatron.core.tensor_parallel import random as megatron_random
from mindspeed_swap.patches.random_state import MegatronRandomState

NAME = "model-parallel-rng"

class Generators(megatron_random.CudaRNGStatesTracker):
    '''As with --te-rng-tracker: the states are generators, and draws change them in place.'''
    def __init__(self):
        super().__init__()
        self.states_ = {NAME: torch.Generator().manual_seed(7)}

    def draw(self):
        return torch.rand(4, generator=self.states_[NAME])

class Tensors(megatron_random.CudaRNGStatesTracker):
    def __init__(self):
        super().__init__()
        self.add(NAME, 7)

    def draw(self):
        with self.fork(NAME):
            return torch.rand(4, device="cuda").cpu()

def tracker(kind=dict(generators=Generators, tensors=Tensors)[sys.argv[1]]):
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    megatron_random._CUDA_RNG_STATE_TRACKER = kind()
    return megatron_random._CUDA_RNG_STATE_TRACKER

plain = tracker()
expected = [plain.draw() for _ in range(3)]
random, ours = MegatronRandomState(), tracker()
states = [random.get()]
forward = [ours.draw()]
states.append(random.get())
forward.append(ours.draw())
for number in (1, 0, 0):  # backward; any of them may run twice
    with random.restored(states[number]):
        assert torch.equal(ours.draw(), expected[number]), number
assert all(map(torch.equal, [*forward, ours.draw()], expected))
"""


def check(states: str, program: str = PROGRAM) -> None:
    done = subprocess.run(
        [python(), "-c", program, states], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("states", ["tensors", "generators"])
def test_the_tracker_is_as_in_forward_and_then_as_before(states):
    check(states)


def test_generators_stay_the_same_objects():
    """CUDA graphs have them registered."""
    kept = PROGRAM.replace("states = [random.get()]", "before, states = ours.states_[NAME], [random.get()]")
    check("generators", kept + "assert ours.states_[NAME] is before")
