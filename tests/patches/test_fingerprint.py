"""A plan is of one model and layout: whatever changes what a step saves tells two of them apart, nothing else does."""
from __future__ import annotations

import json
import os
import subprocess

import pytest
from warm_python import python

from mindspeed_swap.core.checked import first_difference

pytest.importorskip("megatron.training")

# Several lists of flags in one process: most of the time is the import of Megatron.
PROGRAM = """
import json, sys
import mindspeed_swap.megatron_adaptor
from megatron.training.arguments import parse_args, validate_args
from mindspeed_swap.options import Options

found, real = [], Options.from_args
Options.from_args = lambda args, config: (options := real(args, config), found.append(options.model))[0]
for flags in json.loads(sys.argv.pop()):
    sys.argv[1:] = flags
    validate_args(parse_args())
print(json.dumps(found))
"""
BASE = {
    "--num-layers": "4", "--hidden-size": "64", "--num-attention-heads": "4", "--seq-length": "64",
    "--max-position-embeddings": "64", "--micro-batch-size": "1", "--global-batch-size": "2", "--train-iters": "2",
    "--lr": "1e-4", "--transformer-impl": "local", "--vocab-size": "256", "--tokenizer-type": "NullTokenizer",
}  # fmt: skip
DIFFERENT = {
    "recompute of one layer or two": (
        {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"},
        {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "2"},
        "recompute_num_layers",
    ),
    "its method": (
        {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"},
        {"--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": "1"},
        "recompute_method",
    ),
    "dropout": ({}, {"--hidden-dropout": "0.0"}, "hidden_dropout"),
    "attention's dropout": ({}, {"--attention-dropout": "0.0"}, "attention_dropout"),
    "swiglu": ({}, {"--swiglu": None}, "swiglu"),
    "groups": ({}, {"--group-query-attention": None, "--num-query-groups": "2"}, "num_query_groups"),
    "normalization": ({}, {"--normalization": "RMSNorm"}, "normalization"),
    "no fusion": ({}, {"--no-masked-softmax-fusion": None}, "masked_softmax_fusion"),
    "fused loss": ({}, {"--cross-entropy-loss-fusion": None}, "cross_entropy_loss_fusion"),
    "distributed optimizer": ({}, {"--use-distributed-optimizer": None}, "use_distributed_optimizer"),
    "experts": ({"--num-experts": "4"}, {"--num-experts": "4", "--moe-router-topk": "1"}, "moe_router_topk"),
    "bias apart": ({"--swiglu": None}, {"--swiglu": None, "--no-bias-swiglu-fusion": None}, "bias_swiglu_fusion"),
    "gradients": ({"--bf16": None}, {"--bf16": None, "--grad-reduce-in-bf16": None}, "grad_reduce_in_bf16"),
    "an expert's room": (
        {"--num-experts": "4", "--moe-expert-capacity-factor": "1.0", "--moe-token-dispatcher-type": "alltoall"},
        {"--num-experts": "4", "--moe-expert-capacity-factor": "4.0", "--moe-token-dispatcher-type": "alltoall"},
        "moe_expert_capacity_factor",
    ),
    "latent rank": (
        {"--multi-latent-attention": None, "--kv-lora-rank": "16"},
        {"--multi-latent-attention": None, "--kv-lora-rank": "32"},
        "kv_lora_rank",
    ),
    "positions": ({}, {"--position-embedding-type": "rope"}, "position_embedding_type"),
}
SAME = {
    "--lr": "3e-4", "--train-iters": "9", "--seed": "7", "--log-interval": "3", "--tensorboard-dir": "there",
    "--no-initialization": None, "--init-method-std": "0.01", "--weight-decay": "0.3", "--clip-grad": "2.0",
}  # fmt: skip


def flags_of(more: dict[str, str | None]) -> list[str]:
    return [text for flag, value in {**BASE, **more}.items() for text in (flag, value) if text is not None]


@pytest.fixture(scope="module")
def fingerprints():
    asked = [flags for first, second, _ in DIFFERENT.values() for flags in (first, second)] + [{}, SAME]
    done = subprocess.run(
        [python(), "-c", PROGRAM, json.dumps([flags_of(more) for more in asked])], capture_output=True, text=True,
        timeout=240, env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("which", DIFFERENT)
def test_what_changes_what_a_step_saves(fingerprints, which):
    place = 2 * list(DIFFERENT).index(which)
    first, second = fingerprints[place : place + 2]
    names = {text.partition("=")[0] for text in {*first.split()} ^ {*second.split()}}
    assert DIFFERENT[which][2] in names
    assert first_difference(first, second)


def test_what_does_not(fingerprints):
    plain, other = fingerprints[-2:]
    assert plain == other
