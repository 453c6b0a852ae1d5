"""Host or device: what each call gives on a real machine with a GPU, it gives on the simulated one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("places_program.py")

# expression -> "d" device, "h" host, "m" meta, or a value. ``d`` and ``h`` are such tensors of 8 floats.
TABLE: dict[str, object] = {
    # factories
    "torch.empty(8)": "h",
    "torch.zeros(8, device='cpu')": "h",
    "torch.zeros(8, device=torch.device('cpu'))": "h",
    "torch.ones(8, device='cuda')": "d",
    "torch.ones(8, device='cuda:0')": "d",
    "torch.full((8,), 1.0, device=0)": "d",
    "torch.rand(8, device=torch.device('cuda'))": "d",
    "torch.randn(8, device=torch.device('cuda', 0))": "d",
    "torch.arange(8, device=torch.cuda.current_device())": "d",
    "torch.arange(8)": "h",
    "torch.randperm(8, generator=torch.Generator())": "h",
    "torch.empty(8, device='meta')": "m",
    "torch.empty(8, pin_memory=True)": "h",
    "torch.zeros_like(d, device='cpu', pin_memory=True)": "h",
    "torch.tensor([1.0, 2.0])": "h",
    "torch.tensor([1.0, 2.0], device='cuda')": "d",
    "torch.tensor(d)": "d",
    "torch.tensor(h)": "h",
    "torch.as_tensor([1.0])": "h",
    "torch.as_tensor(np.ones(3))": "h",
    "torch.as_tensor(np.ones(3), device='cuda')": "d",
    "torch.as_tensor(h, device='cuda')": "d",
    "torch.as_tensor(d) is d": True,
    "torch.as_tensor(d, device='cpu')": "h",
    "torch.asarray(h) is h": True,
    "torch.from_numpy(np.ones(3))": "h",
    "torch.nn.Linear(4, 4).weight": "h",
    "torch.nn.Linear(4, 4, device='cuda').weight": "d",
    # like another tensor
    "torch.empty_like(d)": "d",
    "torch.empty_like(h)": "h",
    "torch.empty_like(h, device='cuda')": "d",
    "torch.zeros_like(d, device='cpu')": "h",
    "torch.rand_like(torch.empty(8, device='meta'))": "m",
    "d.new_zeros(8)": "d",
    "h.new_empty(8)": "h",
    "h.new_ones(8, device='cuda')": "d",
    "d.new_tensor([1.0])": "d",
    "torch.zeros(8, device=d.device)": "d",
    "torch.zeros(8, device=h.device)": "h",
    # where am I
    "d.device == torch.device('cuda', 0)": True,
    "h.device == torch.device('cpu')": True,
    "(d.is_cuda, d.is_cpu, h.is_cuda, h.is_cpu)": [True, False, False, True],
    "(d.get_device(), h.get_device())": [0, -1],
    "d.type()": "torch.cuda.FloatTensor",
    "h.type()": "torch.FloatTensor",
    "d.bfloat16().type()": "torch.cuda.BFloat16Tensor",
    "(h.is_pinned(), d.is_pinned())": [True, False],
    "isinstance(d, torch.cuda.FloatTensor)": True,
    "isinstance(torch.default_generator, torch.Generator)": True,
    "'cuda:0' in repr(d) and 'cuda' not in repr(h)": True,
    # moving
    "d.cuda() is d and d.to('cuda') is d and d.to(0) is d": True,
    "h.cpu() is h and h.to('cpu') is h": True,
    "h.cuda()": "d",
    "h.cuda(0, non_blocking=True)": "d",
    "h.to('cuda')": "d",
    "h.to(0)": "d",
    "h.to(device='cuda', dtype=torch.bfloat16)": "d",
    "h.to('cuda', torch.bfloat16, True, True).dtype == torch.bfloat16": True,
    "h.to(d)": "d",
    "h.to(other=d)": "d",
    "h.to(d.double()).dtype == torch.float64": True,
    "d.to(h)": "h",
    "d.cpu()": "h",
    "d.to('cpu', non_blocking=True)": "h",
    "d.to('cuda', copy=True).data_ptr() != d.data_ptr()": True,
    "d.pin_memory()": "h",
    "d.to('meta')": "m",
    "d.type('torch.FloatTensor')": "h",
    "h.type('torch.cuda.FloatTensor')": "d",
    "h.type(torch.float64)": "h",
    "h.type_as(d)": "d",
    "torch.equal(h.cuda().cpu(), h)": True,
    "h.cuda().data_ptr() != h.data_ptr() and d.cpu().data_ptr() != d.data_ptr()": True,
    "torch.empty(0, 3).cuda().shape == (0, 3)": True,
    # staying
    "h.clone()": "h",
    "d.clone()": "d",
    "torch.clone(h)": "h",
    "h.double()": "h",
    "h.bfloat16()": "h",
    "h.to(torch.float64)": "h",
    "d.to(torch.float64)": "d",
    "h.view(2, 4).t().contiguous()": "h",
    "copy.deepcopy(h)": "h",
    "copy.deepcopy(d)": "d",
    "copy.deepcopy(torch.nn.Parameter(h))": "h",
    "h[2:]": "h",
    "d[2:]": "d",
    "d + 1": "d",
    # modules
    "module().cuda().weight": "d",
    "module().cuda().running": "d",
    "module().to('cuda', torch.bfloat16).running": "d",
    "module().to(0).weight": "d",
    "module().cuda().cpu().weight": "h",
    "module().to('meta').to_empty(device='cuda').weight": "d",
    "keeps_parameters()": True,
    # default device
    "under('meta', lambda: torch.empty(8))": "m",
    "under('cuda', lambda: torch.empty(8))": "d",
    "under('cuda', lambda: torch.empty(8, device='cpu'))": "h",
    "under('cuda', lambda: torch.tensor([1.0]))": "d",
    "under('cpu', lambda: torch.empty(8, device='cuda'))": "d",
    "by_default('cuda', lambda: torch.zeros(8))": "d",
    "by_default('meta', lambda: torch.nn.Linear(2, 2).weight)": "m",
    # saved and loaded
    "saved(h)": "h",
    "saved(d)": "d",
    "saved(d, map_location='cpu')": "h",
    "saved(h, map_location='cuda')": "d",
    "saved(h, map_location=torch.device('cuda', 0))": "d",
    "saved(d, map_location=lambda storage, location: storage)": "h",
    "saved(d, map_location={'cuda:0': 'cpu'})": "h",
    "torch.equal(saved(d), d)": True,
    "pickle.loads(pickle.dumps(h))": "h",
    "torch.equal(pickle.loads(pickle.dumps(d)), d)": True,
    # random numbers
    "torch.get_rng_state()": "h",
    "torch.cuda.get_rng_state()": "h",
    "torch.Generator(device='cuda').manual_seed(3).initial_seed()": 3,
    "same_numbers_again()": True,
    # gradients pass through moves
    "(torch.ones(2, requires_grad=True).cuda() * 3).sum().backward() is None": True,
    # streams and events
    "streams()": True,
    # data loaders
    "next(iter(loader(0)))[0]": "h",
    "next(iter(loader(2)))[0]": "h",
    "next(iter(loader(2, pin_memory=True)))[0]": "h",
    "next(iter(loader(2)))[0].cuda()": "d",
    # not of torch.cuda
    "h.numpy().sum()": 8.0,
    "d.tolist()": [1.0] * 8,
    "torch.jit.script(scripted)(h).tolist()": [0.0] * 8,
    "float(autocast_dtype())": 1.0,
}


@pytest.fixture(scope="module")
def results(run_python, tmp_path_factory) -> dict[str, object]:
    table = tmp_path_factory.mktemp("table") / "expressions.json"
    table.write_text(json.dumps(list(TABLE)))
    done = run_python(PROGRAM, str(table))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULTS")[1])


@pytest.mark.parametrize("expression", TABLE)
def test_place(expression: str, results: dict[str, object]) -> None:
    assert results[expression] == TABLE[expression]
