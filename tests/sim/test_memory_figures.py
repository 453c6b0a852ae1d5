"""torch.cuda's memory figures are the simulated allocator's, to the byte."""

from __future__ import annotations

import json
from typing import Any

import pytest

MIB = 1 << 20

PROGRAM = """
import json
from mindspeed_swap import sim
sim.redirect_cuda()
import torch
MIB = 1 << 20
out = {}
start = torch.cuda.memory_allocated()
big = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
host = torch.empty(64 * MIB, dtype=torch.uint8)
numpy_made = torch.from_numpy(__import__("numpy").zeros(64 * MIB, dtype="uint8"))
out["one tensor"] = torch.cuda.memory_allocated() - start
torch.cuda.reset_peak_memory_stats()
temporary = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
del temporary
out["peak above"] = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
out["peak reset"] = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
free, total = torch.cuda.mem_get_info()
out["total"] = total
out["used"] = total - free - torch.cuda.memory_allocated()
out["properties"] = torch.cuda.get_device_properties(0).total_memory
out["reserved"] = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
stats = torch.cuda.memory_stats()
out["stats"] = [stats["allocated_bytes.all.current"] - torch.cuda.memory_allocated(),
                stats["allocated_bytes.all.peak"] - torch.cuda.max_memory_allocated(),
                stats["reserved_bytes.all.peak"] - torch.cuda.max_memory_reserved(), stats["num_ooms"]]
out["accelerator"] = torch.accelerator.memory_allocated() - torch.cuda.memory_allocated()
copied = host.cuda()
out["copied in"] = torch.cuda.memory_allocated() - start - 8 * MIB
out["copied out"] = copied.cpu().numel() - 64 * MIB
del copied, big
out["freed"] = torch.cuda.memory_allocated() - start
try:
    torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    out["oom"] = str(error)
torch.empty(200 * MIB, dtype=torch.uint8)
out["ooms"] = torch.cuda.memory_stats()["num_ooms"]
print("RESULTS" + json.dumps(out))
"""

EXPECTED: dict[str, Any] = {
    "one tensor": 8 * MIB,
    "peak above": 4 * MIB,
    "peak reset": 0,
    "total": 100 * MIB,
    "used": 0,
    "properties": 100 * MIB,
    "reserved": 0,
    "stats": [0, 0, 0, 0],
    "accelerator": 0,
    "copied in": 64 * MIB,
    "copied out": 0,
    "freed": 0,
    "ooms": 1,
}


@pytest.fixture(scope="module")
def figures(run_python) -> dict[str, Any]:
    done = run_python(PROGRAM, MINDSPEED_SWAP_DEVICE_CAPACITY="100MiB")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULTS")[1])


@pytest.mark.parametrize("what", EXPECTED)
def test_figure(what: str, figures: dict[str, Any]) -> None:
    assert figures[what] == EXPECTED[what]


def test_oom_says_what_was_wanted(figures: dict[str, Any]) -> None:
    assert "200.00 MiB" in figures["oom"] and "100.00 MiB" in figures["oom"]


def test_bad_capacity_names_the_setting(run_python) -> None:
    done = run_python("from mindspeed_swap import sim; sim.redirect_cuda()", MINDSPEED_SWAP_DEVICE_CAPACITY="lots")
    assert done.returncode != 0
    assert "MINDSPEED_SWAP_DEVICE_CAPACITY='lots'" in done.stderr.splitlines()[-1]


def test_too_late_after_megatron(run_python) -> None:
    done = run_python("import megatron.core\nfrom mindspeed_swap import sim\nsim.redirect_cuda()")
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("mindspeed_swap.errors.SettingError")
    assert "first line" in done.stderr.splitlines()[-1]


# Whoever imports it before us has it know torch's own attributes only.
SHARDED = """
import torch, torch.distributed.checkpoint
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from mindspeed_swap import sim
sim.redirect_cuda()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
tensor = sharded_tensor.zeros(ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 4)
print(tensor.device, tensor.is_cuda, tensor.is_cpu)
torch.distributed.destroy_process_group()
"""


def test_a_sharded_tensor_has_a_place(run_python) -> None:
    done = run_python(SHARDED)
    assert done.stdout.splitlines()[-1:] == ["cpu False True"], done.stderr
