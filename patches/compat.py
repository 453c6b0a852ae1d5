"""COMPAT: our flags against Megatron's features. Each cell says: works, not tested, or an error and its remedy.

A row per flag of ours; the features are the columns. ``errors`` and ``untested`` read the table for a run's arguments.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that Megatron offers. ``in_use``: the flag as the user knows it, or "" if it is off."""

    title: str
    in_use: Callable[[argparse.Namespace], str]


@dataclass(frozen=True, slots=True)
class Works:
    note: str = ""


@dataclass(frozen=True, slots=True)
class NotTested:
    """One warning line. Only for what could not be run here."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An error before anything is allocated. ``remedy`` empty: remove Megatron's flag."""

    why: str
    remedy: str = ""


Cell = Works | NotTested | Refused


def _switch(*names: str) -> Callable[[argparse.Namespace], str]:
    """In use if the argument of one of these flags is set. A Megatron that does not know it has it off."""

    def in_use(args: argparse.Namespace) -> str:
        return next((name for name in names if getattr(args, name.lstrip("-").replace("-", "_"), None)), "")

    return in_use


def is_on(args: argparse.Namespace, flag: str) -> bool:
    return bool(_switch(flag)(args))


def _recompute_selective(args: argparse.Namespace) -> str:
    if getattr(args, "recompute_activations", False):  # Megatron's older name; gone once it has validated arguments
        return "--recompute-activations"
    chosen = getattr(args, "recompute_granularity", None) == "selective"
    return "--recompute-granularity selective" if chosen else ""


def _recompute_full(args: argparse.Namespace) -> str:
    return "--recompute-granularity full" if getattr(args, "recompute_granularity", None) == "full" else ""


def _cuda_graphs(args: argparse.Namespace) -> str:
    if older := _switch("--enable-cuda-graph", "--external-cuda-graph")(args):  # its older names
        return older
    kind = getattr(args, "cuda_graph_impl", None) or "none"
    return "" if kind == "none" else f"--cuda-graph-impl {kind}"


def _low_precision(args: argparse.Namespace) -> str:
    for name, attribute in (("--fp8-format", "fp8"), ("--fp4-format", "fp4")):
        if getattr(args, attribute, None):
            return name
    return ""


def _context_parallel(args: argparse.Namespace) -> str:
    return "--context-parallel-size" if (getattr(args, "context_parallel_size", 1) or 1) > 1 else ""


def _transformer_engine(args: argparse.Namespace) -> str:
    name = "transformer_engine"
    return f"--transformer-impl {name}" if getattr(args, "transformer_impl", None) == name else ""


def _other_optimizer(args: argparse.Namespace) -> str:
    name = getattr(args, "optimizer", None) or "adam"
    return "" if name == "adam" else f"--optimizer {name}"


RECOMPUTE_SELECTIVE = Feature("selective recompute", _recompute_selective)
RECOMPUTE_FULL = Feature("full recompute", _recompute_full)
FINE_GRAINED_OFFLOAD = Feature("fine-grained activation offload", _switch("--fine-grained-activation-offloading"))
LAYER_OFFLOAD = Feature("offload of whole layers", _switch("--cpu-offloading-num-layers"))
OPTIMIZER_OFFLOAD = Feature("optimizer on the CPU", _switch("--optimizer-cpu-offload"))
CUDA_GRAPHS = Feature("CUDA graphs", _cuda_graphs)
COMBINED_1F1B = Feature("overlap of expert communication", _switch("--overlap-moe-expert-parallel-comm"))
# custom: older name
FSDP = Feature("FSDP", _switch("--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2"))
LOW_PRECISION = Feature("fp8, fp4", _low_precision)
CONTEXT_PARALLEL = Feature("context parallel", _context_parallel)
TRANSFORMER_ENGINE = Feature("Transformer Engine", _transformer_engine)
PRECISION_AWARE = Feature("precision-aware optimizer", _switch("--use-precision-aware-optimizer"))
OPTIMIZER_GRAPH = Feature("CUDA graph of the optimizer", _switch("--optimizer-cuda-graph"))
OTHER_OPTIMIZER = Feature("other optimizers than Adam", _other_optimizer)

SMART_SWAP = Feature("`--smart-swap`", _switch("--smart-swap"))
ADAPTIVE = Feature("`--adaptive-memory-optimization`", _switch("--adaptive-memory-optimization"))
# Of MindSpeed, where that is installed.
MEMORY_FRAGMENTATION = Feature("MindSpeed: memory fragmentation", _switch("--memory-fragmentation"))
MINDSPEED_MEMORY = Feature(
    "MindSpeed: swap attention, other recompute",
    _switch(
        "--adaptive-recompute-device-swap", "--recompute-in-bubble", "--recompute-in-advance", "--swap-attention"
    ),
)

FEATURES = (
    SMART_SWAP, ADAPTIVE,
    RECOMPUTE_SELECTIVE, RECOMPUTE_FULL, FINE_GRAINED_OFFLOAD, LAYER_OFFLOAD, OPTIMIZER_OFFLOAD, CUDA_GRAPHS,
    COMBINED_1F1B, FSDP, LOW_PRECISION, CONTEXT_PARALLEL, TRANSFORMER_ENGINE,
    PRECISION_AWARE, OPTIMIZER_GRAPH, OTHER_OPTIMIZER, MEMORY_FRAGMENTATION, MINDSPEED_MEMORY,
)  # fmt: skip

_LAYERS_AND_ADAM = Works("its layers and its FusedAdam")  # neither fp8 nor its fused attention was run
_SAME_TENSORS = Refused("both move saved tensors to the host, and each would count on memory that the other holds")
# Of every flag that moves or drops saved tensors.
_SAVED_TENSORS: dict[Feature, Cell] = {
    FINE_GRAINED_OFFLOAD: _SAME_TENSORS,
    LAYER_OFFLOAD: _SAME_TENSORS,
    OPTIMIZER_OFFLOAD: Works(),
    CUDA_GRAPHS: Refused("a captured graph runs without Python, where saved tensors are seen"),
    COMBINED_1F1B: Refused("its schedule does not go through forward_step, where saved tensors are seen"),
    FSDP: NotTested(),
    LOW_PRECISION: NotTested(),
    CONTEXT_PARALLEL: NotTested(),
    TRANSFORMER_ENGINE: _LAYERS_AND_ADAM,
    MEMORY_FRAGMENTATION: Refused("it replaces the allocator whose memory pressure is listened to"),
    MINDSPEED_MEMORY: Refused("both move or drop saved tensors"),
}

_ITS_CHOICE_SELECTIVE = Refused(
    "the feature decides what to recompute",
    "remove --recompute-granularity, --recompute-modules and --recompute-activations",
)
_ITS_CHOICE_FULL = Refused(
    "the feature decides what to recompute",
    "remove --recompute-granularity, --recompute-method and --recompute-num-layers",
)

_OWN_LIST = Refused("the file lists what is swapped, and that would choose for itself")
_LISTED_SELECTIVE = Refused(
    "the file says what is recomputed", "use select_recompute in its recompute_config"
)
_LISTED_FULL = Refused("the file says what is recomputed", "use recompute in its recompute_config")

# A new flag of ours is a new row; of two of ours, the later row says in a Feature of its own how they go together. A
# feature that a row does not name has nothing to do with that flag.
COMPAT: dict[str, dict[Feature, Cell]] = {
    "--smart-swap": {
        RECOMPUTE_SELECTIVE: Works("what recompute leaves is swapped"),
        RECOMPUTE_FULL: Works("the inputs of the recomputed layers are swapped"),
        **_SAVED_TENSORS,
    },
    "--adaptive-memory-optimization": {
        SMART_SWAP: Refused("it decides what to swap itself"),
        RECOMPUTE_SELECTIVE: _ITS_CHOICE_SELECTIVE,
        RECOMPUTE_FULL: _ITS_CHOICE_FULL,
        **_SAVED_TENSORS,
    },
    "--swap-config": {
        SMART_SWAP: _OWN_LIST,
        ADAPTIVE: _OWN_LIST,
        RECOMPUTE_SELECTIVE: _LISTED_SELECTIVE,
        RECOMPUTE_FULL: _LISTED_FULL,
        **_SAVED_TENSORS,
    },
    "--virtual-optimizer": {
        OPTIMIZER_OFFLOAD: Refused("it keeps the optimizer's state on the host itself"),
        CUDA_GRAPHS: Refused("a captured iteration would be replayed without the copies of the state"),
        FSDP: Refused("it owns the optimizer's state"),
        LOW_PRECISION: NotTested(),
        CONTEXT_PARALLEL: NotTested(),
        TRANSFORMER_ENGINE: _LAYERS_AND_ADAM,
        PRECISION_AWARE: Refused("its state has scales beside the moments"),
        OPTIMIZER_GRAPH: Refused("a captured step cannot be cut into slices"),
        OTHER_OPTIMIZER: Refused("it moves Adam's moments", "use --optimizer adam"),
    },
}


def _cells(args: argparse.Namespace) -> Iterator[tuple[str, str, Cell]]:
    """(our flag, Megatron's flag, cell) of everything that is in use together."""
    for ours, row in COMPAT.items():
        if not _switch(ours)(args):
            continue
        for feature, cell in row.items():
            if theirs := feature.in_use(args):
                yield ours, theirs, cell


def errors(args: argparse.Namespace) -> list[str]:
    """One text per combination that cannot work: both flags, why, and the remedy."""
    return [
        f"{ours} cannot be used with {theirs}: {cell.why}; {cell.remedy or 'remove ' + theirs}"
        for ours, theirs, cell in _cells(args)
        if isinstance(cell, Refused)
    ]


def untested(args: argparse.Namespace) -> list[str]:
    """One text per combination that nobody has run."""
    return [
        f"{ours} with {theirs} is not tested: compare the losses of some steps with a run without {ours}"
        for ours, theirs, cell in _cells(args)
        if isinstance(cell, NotTested)
    ]
