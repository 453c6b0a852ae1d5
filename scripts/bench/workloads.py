"""The workloads, as data: what is set for scripts/pretrain_gpt_{gpu,sim}.sh, and the budgets that each is tried at.

On the simulated device every workload is tiny: it tests the runner, its times say nothing.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

GPU, SIM = "gpu", "sim"
COUNTED_STEPS = 10
# Where a step is short: steps differ by more than a percent, and promises are of half of one. Where the device waits
# for the host: steps in which that was slowed down do not count, and may be nearly all.
COUNTED_SHORT_STEPS, COUNTED_NOISY_STEPS, UNDISTURBED_STEPS = 30, 100, 15
# Of what has no plan to search: first steps allocate, choose kernels and make the optimizer's state.
WARM_UP_STEPS = 4
# WarmUp (8) and at most 8 tries of SearchPolicy, of four steps each and now and then of more; Stable settles in one.
SEARCH_STEPS = 46
# Experts: steps get shorter for as many, as kernels are chosen for shapes that they have not met; WarmUp may be 45, and
# a try 14, as steps differ by a tenth.
NOISY_WARM_UP_STEPS, NOISY_SEARCH_STEPS = 40, 160
# No step is timed, so each try is one.
SIM_SEARCH_STEPS = 12


@dataclass(frozen=True)
class Workload:
    name: str
    what: str
    settings: Mapping[str, str]
    flags: tuple[str, ...] = ()
    ranks: int = 1
    microbatches: int = 1
    # Budgets, as fractions of the plain run's forward/backward peak; fixed before anything is measured. Where static
    # memory is most of the peak they lie close together: below the last, full recompute does not fit either.
    fractions: tuple[float, ...] = ()
    features: tuple[str, ...] = ("swap", "adaptive")  # of ours; "optimizer": the virtual optimizer
    counted_steps: int = COUNTED_STEPS
    warm_up_steps: int = WARM_UP_STEPS
    search_steps: int = SEARCH_STEPS
    undisturbed_steps: int = 0  # so many are enough: the run ends. Steps count from the end of its search on


def _spaced(first: int, step: int) -> tuple[float, ...]:
    return tuple((first - step * i) / 100 for i in range(10))


_MOE = (
    "--num-experts", "8", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall",
    "--moe-aux-loss-coeff", "0.01", "--moe-router-load-balancing-type", "aux_loss",
)  # fmt: skip
_VPP = ("--num-layers-per-virtual-pipeline-stage",)
_A, _B = {"LAYERS": "8", "SEQ": "8192"}, {"LAYERS": "4", "SEQ": "32768"}
_TE = {"IMPL": "transformer_engine", "SDPA": "1"}  # its own fused attention needs a newer cuDNN than torch brings

_GPU = (
    Workload("A", "8 layers x 4096, 8192 tokens", _A, fractions=_spaced(98, 2), counted_steps=COUNTED_SHORT_STEPS),
    Workload("B", "4 layers x 4096, 32768 tokens", _B, fractions=_spaced(96, 4)),
    Workload("C", "A with 4 microbatches", _A | {"GBS": "4"}, microbatches=4, features=("adaptive", "optimizer")),
    Workload("D", "A, TP 2", _A | {"TP": "2"}, ranks=2, fractions=_spaced(98, 2)),
    Workload("E2", "16 layers, PP 2, 8 microbatches", _A | {"LAYERS": "16", "PP": "2", "GBS": "8"}, ranks=2,
             microbatches=8, features=("adaptive",)),
    Workload("E2V", "16 layers, PP 2 x VPP 2, 8 microbatches", _A | {"LAYERS": "16", "PP": "2", "GBS": "8"},
             (*_VPP, "4"), ranks=2, microbatches=8, features=("adaptive",)),
    Workload("E4", "32 layers, PP 4, 8 microbatches", _A | {"LAYERS": "32", "PP": "4", "GBS": "8"}, ranks=4,
             microbatches=8, features=("adaptive",)),
    Workload("F", "MoE: 4 layers, 8 experts of 2816, top 2, 8192 tokens", {"LAYERS": "4", "SEQ": "8192"},
             (*_MOE, "--moe-ffn-hidden-size", "2816"), fractions=_spaced(98, 2), counted_steps=COUNTED_NOISY_STEPS,
             warm_up_steps=NOISY_WARM_UP_STEPS, search_steps=NOISY_SEARCH_STEPS, undisturbed_steps=UNDISTURBED_STEPS),
    Workload("A_te", "A with Transformer Engine layers", _A | _TE, fractions=_spaced(98, 2),
             counted_steps=COUNTED_SHORT_STEPS),
    Workload("B_te", "B with Transformer Engine layers", _B | _TE, fractions=_spaced(96, 4)),
)  # fmt: skip

_TINY = {"LAYERS": "6", "HIDDEN": "64", "FFN": "128", "SEQ": "128", "MBS": "8", "GBS": "8"}
_PP = _TINY | {"LAYERS": "8", "PP": "2", "GBS": "64"}
_SIM = {
    "A": Workload("A", "tiny", _TINY, fractions=_spaced(96, 5)),
    "B": Workload("B", "tiny", _TINY | {"LAYERS": "4", "SEQ": "256"}, fractions=_spaced(96, 5)),
    "C": Workload("C", "tiny", _TINY | {"GBS": "32"}, microbatches=4, features=("adaptive", "optimizer")),
    "D": Workload("D", "tiny", _TINY | {"TP": "2"}, ranks=2, fractions=_spaced(96, 5)),
    "E2": Workload("E2", "tiny", _PP, ranks=2, microbatches=8, features=("adaptive",)),
    "E2V": Workload("E2V", "tiny", _PP, (*_VPP, "2"), ranks=2, microbatches=8, features=("adaptive",)),
    "E4": Workload("E4", "tiny", _PP | {"PP": "4"}, ranks=4, microbatches=8, features=("adaptive",)),
    "F": Workload("F", "tiny", _TINY | {"LAYERS": "4", "MBS": "16", "GBS": "16"},
                  (*_MOE, "--moe-ffn-hidden-size", "64"), fractions=_spaced(96, 5)),
}  # fmt: skip
NAMES = tuple(workload.name for workload in _GPU)


def workload(name: str, device: str) -> Workload:
    """Raises KeyError; Transformer Engine's are not there on the simulated device."""
    if device == GPU:
        return {workload.name: workload for workload in _GPU}[name]
    return replace(_SIM[name], search_steps=SIM_SEARCH_STEPS)
