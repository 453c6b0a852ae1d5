"""Evaluates expressions on the simulated device and says where the results are: see test_places.py."""

import copy  # noqa: F401  the expressions use it
import io
import json
import pickle  # noqa: F401
import sys
from pathlib import Path

import numpy as np
import torch

from mindspeed_swap import sim
from mindspeed_swap.sim.device import is_device

sim.redirect_cuda()
sim.redirect_cuda()  # again: nothing happens

d, h = torch.ones(8, device="cuda"), torch.ones(8)


def module():
    class WithBuffer(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("running", torch.ones(4))

    return WithBuffer()


def keeps_parameters():
    built = module()
    before = built.weight
    values = before.detach().clone()
    return built.cuda().weight is before and torch.equal(before.cpu(), values)


def under(device, make):
    with torch.device(device):
        return make()


def by_default(device, make):
    torch.set_default_device(device)
    try:
        return make()
    finally:
        torch.set_default_device(None)


def saved(tensor, **how):
    file = io.BytesIO()
    torch.save({"t": tensor}, file)
    file.seek(0)
    return torch.load(file, **how)["t"]


def same_numbers_again():
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    return torch.equal(first, torch.rand(4, device="cuda"))


def streams():
    side, mark = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        inside = torch.cuda.current_stream() is side
        mark.record()
    d.record_stream(side)
    torch.cuda.synchronize()
    return inside and torch.cuda.current_stream() is torch.cuda.default_stream() and mark.elapsed_time(mark) == 0


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.arange(3) * index  # the product is an arbitrary operation


def loader(workers, **how):
    return torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=workers, **how)


def scripted(x):
    return torch.zeros_like(x)


def autocast_dtype():
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return (d.view(1, 8) @ d.view(8, 1)).dtype == torch.bfloat16


def place(value):
    if not isinstance(value, torch.Tensor):
        return value.item() if isinstance(value, np.generic) else value
    return "m" if value.is_meta else "d" if is_device(value) else "h"


results = {}
for expression in json.loads(Path(sys.argv[1]).read_text()):
    try:
        results[expression] = place(eval(expression))
    except Exception as error:
        results[expression] = f"{type(error).__name__}: {error}"
print("RESULTS" + json.dumps(results))
