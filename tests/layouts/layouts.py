"""Every way of splitting a model, or of running its step, that must train under a cap with the same bits.

A layout is what is added to scripts/pretrain_gpt_sim.sh: its environment and Megatron's flags. Shapes are the smallest
whose activations dominate memory, and whose saved tensors are large enough to be moved (64 KiB).
"""
from __future__ import annotations

from dataclasses import dataclass, field

BASE = {"LAYERS": "6", "HIDDEN": "64", "FFN": "128", "SEQ": "128", "MBS": "8", "GBS": "8"}


@dataclass(frozen=True, slots=True)
class Layout:
    """``flags`` and ``settings`` (environment of the script) on top of BASE; ``dtype`` is that of the default run."""

    name: str
    flags: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    ranks: int = 2
    dtype: str = "bf16"

    def environment(self, dtype: str) -> dict[str, str]:
        return BASE | {"NPROC": str(self.ranks), "PRECISION": dtype} | self.settings


def _flags(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_TP2 = {"TP": "2"}
_PP2 = {"PP": "2", "GBS": "32", "LAYERS": "10"}
_DP2 = {"GBS": "16"}
_NO_DIST_OPT = {**_DP2, "DIST_OPT": "0"}
_RECOMPUTE = "--recompute-granularity selective --recompute-modules"

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("one", ranks=1),
        Layout("tp", settings=_TP2),
        Layout("tp_sp", ("--sequence-parallel",), {**_TP2, "MBS": "16", "GBS": "16"}),
        Layout("pp", settings=_PP2),
        Layout("vpp_one_layer", _flags("--num-layers-per-virtual-pipeline-stage 1"), {**_PP2, "LAYERS": "8"}),
        Layout("vpp_two_layers", _flags("--num-layers-per-virtual-pipeline-stage 2"), {**_PP2, "LAYERS": "8"}),
        Layout("dp", settings=_DP2),
        Layout("dp_overlap_grad", _flags("--overlap-grad-reduce"), _DP2, dtype="fp32"),
        Layout("dp_overlap_both", _flags("--overlap-grad-reduce --overlap-param-gather"), _DP2),
        Layout("dp_no_dist_opt", settings=_NO_DIST_OPT, dtype="fp32"),
        Layout("dp_no_dist_opt_overlap", _flags("--overlap-grad-reduce"), _NO_DIST_OPT),
        Layout(
            "ep",
            _flags(
                "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-ffn-hidden-size 64 "
                "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 "
                "--moe-router-load-balancing-type aux_loss "
                "--lr 1e-5 --min-lr 1e-6"  # routing as in the middle of a training: it varies, and does not run away
            ),
            {**_DP2, "MBS": "16", "GBS": "32", "LAYERS": "4"},
        ),
        Layout("fusion", _flags("--overlap-grad-reduce"), {**_DP2, "GRADIENT_FUSION": "1"}),
        # By tokens: 1 microbatch in 3 steps, 2 in 2, 3 in 11. (0.19 knows --rampup-batch-size, and ignores it.)
        Layout("rampup", settings={"BATCH_SCHEDULE": "0:8,3072:16,7168:24", "ITERS": "16"}, ranks=1),
        # 4 and then 8 microbatches, evaluations in between
        Layout(
            "vpp_rampup",
            _flags(
                "--num-layers-per-virtual-pipeline-stage 1 --split 80,20,0 --eval-interval 5 --eval-iters 1 "
                "--eval-global-batch-size 32"
            ),
            {**_PP2, "LAYERS": "8", "BATCH_SCHEDULE": "0:32,20480:64", "ITERS": "16"},  # two searches take their steps
        ),
        Layout(
            "optimizer_offload",
            _flags("--optimizer-cpu-offload --use-precision-aware-optimizer --optimizer-offload-fraction 1.0"),
            ranks=1,
        ),
        Layout("evaluation", _flags("--split 90,10,0 --eval-interval 3 --eval-iters 2"), ranks=1),
        Layout("recompute_core_attn", _flags(f"{_RECOMPUTE} core_attn"), ranks=1),
        Layout("recompute_mlp", _flags(f"{_RECOMPUTE} mlp"), ranks=1),
        Layout("recompute_layernorm", _flags(f"{_RECOMPUTE} layernorm"), ranks=1),
        Layout(
            "recompute_block",
            _flags("--recompute-granularity full --recompute-method block --recompute-num-layers 3"),
            {"LAYERS": "8"},
            ranks=1,
        ),
        Layout(
            "recompute_uniform",
            _flags("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
            {"LAYERS": "8", "MBS": "32", "GBS": "32"},  # with less per microbatch the optimizer's step is the peak
            ranks=1,
        ),
        Layout(
            "dropout_only", _flags("--attention-dropout 0.1 --hidden-dropout 0.1"), ranks=1
        ),
        Layout(
            "dropout", _flags(f"--attention-dropout 0.1 --hidden-dropout 0.1 {_RECOMPUTE} core_attn"), ranks=1
        ),
    )
}
