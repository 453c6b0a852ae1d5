"""adapt_mem_func_wrapper: a user's autograd Function is measured and recomputed by name, and nothing changes."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from warm_python import python

from mindspeed_swap.adaptive_memory import adapt_mem_func_wrapper

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
TIMEOUT_SECONDS = 600


SHAPE = (
    "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion "
    "--no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --bf16 "
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 2 --seq-length 128 "
    "--max-position-embeddings 128 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 4 --global-batch-size 8 --train-iters 9 --lr 1e-3 "
    "--log-interval 1 --eval-interval 100 --eval-iters 0 --split 100,0,0 --num-workers 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128 --no-load-optim --use-distributed-optimizer"
)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, note, *, extra=None):
        return x * 2, note

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 2, None


def test_without_the_feature_it_is_apply():
    x = torch.ones(3, requires_grad=True)
    y, note = adapt_mem_func_wrapper(Twice, x, "note")
    y.sum().backward()
    assert note == "note" and torch.equal(x.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("wrong", [Twice.apply, len, torch.nn.Linear, None, "Twice"])
def test_not_a_function(wrong):
    with pytest.raises(TypeError, match=r"expected a class derived from torch\.autograd\.Function"):
        adapt_mem_func_wrapper(wrong, torch.ones(3))


def run(program: str, *flags: str, **extra: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_SWAP_")}
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "scripts"), os.environ.get("PYTHONPATH", "")])
    environment = kept | {
        "PYTHONPATH": path, "MINDSPEED_SWAP_DEVICE": "sim", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "localhost", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
    } | extra  # fmt: skip
    return subprocess.run(
        [python(), program, *flags], env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )


def test_pipe_expert_in_megatron(tmp_path):
    pytest.importorskip("megatron.training")
    shape = SHAPE.split()
    program = str(HERE / "pipe_expert.py")
    plain = run(program, *shape, "--measure-file", str(tmp_path / "plain.json"), MASTER_PORT="0")
    assert plain.returncode == 0, plain.stderr[-3000:]
    measured = json.loads((tmp_path / "plain.json").read_text())
    ours = run(
        program, *shape, "--measure-file", str(tmp_path / "ours.json"), "--adaptive-memory-optimization",
        "--swap-plan-save", str(tmp_path / "plan.json"), MASTER_PORT="0", MINDSPEED_SWAP_SIM_LINK_GBPS="0.004",
        MINDSPEED_SWAP_DEVICE_CAPACITY=str(int(0.7 * measured["peak_bytes"])),
    )  # fmt: skip
    assert ours.returncode == 0, ours.stderr[-3000:]
    assert json.loads((tmp_path / "ours.json").read_text())["sha256"] == measured["sha256"]
    (plan,) = json.loads((tmp_path / "plan.json").read_text())["plans"].values()
    assert "PipeExpert" in {recompute["key"][3] for recompute in plan["recomputes"]}


def test_the_seed_s_import_line():
    """Only after mindspeed_swap.compat was imported, and for nothing else of MindSpeed."""
    code = (
        "import importlib.util\n"
        "assert importlib.util.find_spec('mindspeed') is None\n"
        "import mindspeed_swap.compat\n"
        "from mindspeed.core.memory.adaptive_memory.adaptive_memory_function import adapt_mem_func_wrapper as found\n"
        "from mindspeed_swap.adaptive_memory import adapt_mem_func_wrapper\n"
        "assert found is adapt_mem_func_wrapper\n"
        "try:\n    import mindspeed.core.training\nexcept ImportError:\n    print('nothing else')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout == "nothing else\n", done.stderr


def test_mindspeed_s_function_is_replaced_where_it_is_installed(tmp_path):
    folder = tmp_path / "mindspeed" / "core" / "memory" / "adaptive_memory"
    folder.mkdir(parents=True)
    for level in (folder, *folder.parents[:3]):
        (level / "__init__.py").write_text("")
    (folder / "adaptive_memory_function.py").write_text("def adapt_mem_func_wrapper(f, *args):\n    raise OSError\n")
    code = (
        "import mindspeed_swap.compat\n"
        "from mindspeed.core.memory.adaptive_memory.adaptive_memory_function import adapt_mem_func_wrapper as found\n"
        "print(found.__module__)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "mindspeed_swap.adaptive_memory.adaptive_memory_function", done.stderr
