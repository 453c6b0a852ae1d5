"""One activation leaves the device after its last use in forward and is back before its first use in backward.

A few transformer blocks in plain PyTorch train for one step three times: as they are; under the swap manager, which
only records; and with exactly one saved tensor swapped over its lifetime, everything else kept. Loss and gradients must
have the same bits, and both copies must lie inside their windows, or the exit code is 1.

  scripts/swap_one_activation.py --list                          # what can be chosen
  scripts/swap_one_activation.py --layer 2 --site 3              # copies on streams of their own, beside compute
  scripts/swap_one_activation.py --layer 2 --site 3 --same-stream    # before: copies in line with compute
  scripts/swap_one_activation.py --layer 2 --site 3 --late-prefetch  # asked for too late: exit code 1

Runs on a GPU if there is one; MINDSPEED_SWAP_DEVICE=sim simulates a device. Files go to --out: profiler.json (the trace
of torch.profiler, with the copies in it) and trace.json (the same step as the swap manager recorded it).
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: the same sums in the same order

import torch
from torch.nn import functional

from mindspeed_swap.core.accelerator import Accelerator, device_choice, get_accelerator
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.link import probe_link
from mindspeed_swap.core.plan import Plan, Swap
from mindspeed_swap.core.spans import PREFIX
from mindspeed_swap.core.step import ExecutedStep
from mindspeed_swap.core.swap_manager import SwapManager
from mindspeed_swap.core.trace import Key, StepTrace
from mindspeed_swap.core.waits import Wait
from mindspeed_swap.core.windows import Window, windows
from mindspeed_swap.errors import SettingError
from mindspeed_swap.report.chrome import chrome_trace
from mindspeed_swap.report.figures import hidden_share
from mindspeed_swap.units import GIB

MODEL = "swap_one_activation"
# Of the time that the tensor is not needed, the copy out gets the first part of this size and the copy back the last.
COPY_SHARE = 0.25
# Times of two streams come from events on both; they are exact to about this.
CLOCK_MS = 0.005


class Block(torch.nn.Module):
    """Attention and MLP of a GPT, before each a norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


@dataclass
class Training:
    """The model, its input, and one step of it."""

    blocks: torch.nn.ModuleList
    inputs: torch.Tensor

    def step(self, manager: SwapManager | None = None) -> torch.Tensor:
        """Forward and backward. Returns the loss. With a manager: inside its step."""
        self.blocks.zero_grad(set_to_none=True)
        with manager.forward(0) if manager else contextlib.nullcontext():
            x = self.inputs
            for number, block in enumerate(self.blocks, 1):
                with manager.layer(number) if manager else contextlib.nullcontext():
                    x = block(x)
            loss = x.float().square().mean()
            del x
        loss.backward()
        return loss.detach()

    def hashes(self, loss: torch.Tensor) -> dict[str, str]:
        return {"loss": sha256([loss]), "gradients": sha256([p.grad for p in self.blocks.parameters()])}


def sha256(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def build(args: argparse.Namespace, on_gpu: bool) -> Training:
    torch.manual_seed(1234)
    torch.use_deterministic_algorithms(True)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    place = {"device": "cuda" if on_gpu else "cpu", "dtype": dtype}
    blocks = torch.nn.ModuleList(Block(args.hidden, args.heads) for _ in range(args.layers)).to(**place)
    return Training(blocks, torch.randn(1, args.tokens, args.hidden, **place))


class Device:
    """The device, its link, and swap managers over one pool of host memory."""

    def __init__(self, accelerator: Accelerator, host_bytes: int) -> None:
        self.accelerator = accelerator
        self.pool = HostPool(accelerator, host_bytes)
        link = probe_link(accelerator, self.pool)
        if link is None:
            raise SettingError("no memory to measure the link with: give the device or the host more")
        self._rates = link.d2h_bytes_per_ms, link.h2d_bytes_per_ms

    def recorded(
        self, training: Training, plan: Plan | None = None, streams: tuple[Any, Any] | None = None
    ) -> tuple[ExecutedStep, torch.Tensor]:
        """One step under the plan, recorded, and its loss."""
        memory = self.accelerator.memory()
        manager = SwapManager(self.accelerator, self.pool, min_bytes=1, copy_streams=streams)
        manager.begin_step(
            plan, trace=StepTrace(MODEL, memory.capacity_bytes, memory.allocated_bytes, *self._rates)
        )
        loss = training.step(manager)
        stats, trace = manager.end_step()
        manager.close()
        assert trace is not None
        return ExecutedStep(plan or Plan(MODEL, 0), stats, trace), loss


# ---- when
def choose(trace: StepTrace, key: Key, *, late: bool) -> Swap:
    """When the tensor leaves and when its way back begins. Raises SettingError if it cannot be moved."""
    window = _window_of(trace, key)
    times = [point.time_ms for point in trace.points]
    share = COPY_SHARE * (times[window.read] - times[window.saved])
    release = bisect_left(times, times[window.saved] + share, window.release, window.prefetch - 1)
    prefetch = bisect_right(times, times[window.read] - share, release + 1, window.prefetch) - 1
    prefetch = max(prefetch, release + 1)
    if late:  # what is planned for the read itself comes after it: the read has to load on demand
        prefetch = window.read
    points = trace.points
    return Swap(key, window.nbytes, points[release].position, points[prefetch].position)


def _key(trace: StepTrace, layer: int, site: int | None) -> Key:
    if site is None:
        movable = [window for window in windows(trace) if trace.saved[window.record].key.layer == layer]
        if movable:
            return trace.saved[max(movable, key=lambda window: window.nbytes).record].key
    return Key(0, 0, layer, site or 0)


def _window_of(trace: StepTrace, key: Key) -> Window:
    for window in windows(trace):
        if trace.saved[window.record].key == key:
            return window
    for record in trace.saved:
        if record.key == key:
            raise SettingError(f"{key} cannot be moved: {record.reason or 'it is needed again at once'}; see --list")
    raise SettingError(f"{key}: no tensor that the swap manager may move is saved there; see --list")


def sites(trace: StepTrace) -> Iterator[str]:
    movable = {window.record for window in windows(trace)}
    for number, record in enumerate(trace.saved):
        why = "" if number in movable else f"   stays: {record.reason or 'needed again at once'}"
        yield f"--layer {record.key.layer} --site {record.key.ordinal:<3} {record.nbytes:>13,} bytes{why}"


# ---- what happened
def check(step: ExecutedStep, swap: Swap, *, same_stream: bool) -> list[str]:
    """Prints the tensor's life. Returns what was not as it should be."""
    trace = step.trace
    record = next(r for r in trace.saved if r.key == swap.key)
    times = trace.measured_ms()
    assert record.sole is not None and record.first_read is not None
    by_position = {point.position: at for point, at in zip(reversed(trace.points), reversed(times), strict=True)}
    produced, last_forward = times[record.saved], times[max(record.sole, record.last_use)]
    due, wanted = by_position[swap.release], times[record.first_read]
    out = [copy for copy in trace.copies if copy.to_host]
    back = [copy for copy in trace.copies if not copy.to_host]
    if len(out) != 1 or len(back) != 1 or {out[0].key, back[0].key} != {swap.key}:
        return [f"expected one copy each way, found {len(out)} out and {len(back)} back"]
    (d2h,), (h2d,) = out, back
    given_up = next((w.end_ms for w in trace.waits if w.cause == Wait.RELEASE_AFTER_OFFLOAD.name), due)
    rows = [
        ("saved by forward", produced), ("D2H copy starts", d2h.start_ms), ("D2H copy ends", d2h.end_ms),
        ("last use in forward over by", last_forward), ("device memory given up", given_up),
        ("H2D copy starts", h2d.start_ms), ("H2D copy ends", h2d.end_ms), ("first use in backward", wanted),
    ]  # fmt: skip
    for name, at in sorted(rows, key=lambda row: row[1]):
        print(f"  {at:10.3f} ms  {name}")
    hidden = 0.0 if same_stream else hidden_share(trace) or 0.0
    print(f"  away from the device for {h2d.start_ms - given_up:.3f} ms of the step's {trace.step_ms:.3f} ms")
    how = "in line with compute" if same_stream else f"{hidden:.1%} of their time hidden behind compute"
    print(f"  copies: {d2h.end_ms - d2h.start_ms:.3f} ms out, {h2d.end_ms - h2d.start_ms:.3f} ms back, {how}")
    # The copy out may run while forward still reads the tensor: both only read. What it must not do is to start before
    # the tensor was written, or to be unfinished when its memory is to be given up.
    rules = [
        (produced, d2h.start_ms, "the D2H copy starts before the tensor was written"),
        (d2h.end_ms, due, "the D2H copy is not over when the device memory is to be given up: compute waits for it"),
        (last_forward, due, "the device memory is given up before the last use in forward is over"),
        (given_up, h2d.start_ms, "the H2D copy starts before the device memory was given up"),
        (h2d.end_ms, wanted, "the H2D copy is not over when backward first uses the tensor: compute waits for it"),
    ]
    return [what for earlier, later, what in rules if earlier > later + CLOCK_MS]


def find_copies(path: Path, *, on_gpu: bool, same_stream: bool) -> list[str]:
    """Prints the two copies as torch.profiler saw them. Returns what is wrong."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    # (What torch shows of a range on the GPU has another category.)
    ours = [e for e in events if e["name"].startswith(f"{PREFIX}copy to") and e.get("cat") == "user_annotation"]
    if len(ours) != 2:
        return [f"the profiler's trace has {len(ours)} ranges of ours around copies, expected 2"]
    compute = {event["args"].get("stream") for event in events if event.get("cat") == "kernel"}
    problems = []
    for span in ours:
        print(f"  {span['name']!r} at {span['ts']} us: the call that queues it, {span['dur']} us")
        if not on_gpu:
            continue
        inside = [
            event["args"]["correlation"] for event in events
            if event.get("cat") == "cuda_runtime" and span["ts"] <= event["ts"] <= span["ts"] + span["dur"]
        ]  # fmt: skip
        copies = [
            event for event in events
            if event.get("cat") == "gpu_memcpy" and event["args"].get("correlation") in inside
        ]  # fmt: skip
        if len(copies) != 1:
            problems.append(f"the profiler saw {len(copies)} copies for {span['name']!r}, expected 1")
            continue
        copy = copies[0]
        stream = copy["args"]["stream"]
        print(
            f"    {copy['name']!r} at {copy['ts']} us: {copy['dur']} us on stream {stream}, "
            f"{copy['args']['bytes']} bytes (kernels are on stream {', '.join(map(str, sorted(compute)))})"
        )
        if (stream in compute) is not same_stream:
            problems.append(f"{copy['name']!r} is on stream {stream}, kernels on {sorted(compute)}")
    return problems


def _stream_name(stream: Any) -> str:
    return hex(stream.cuda_stream) if hasattr(stream, "cuda_stream") else str(stream)


def run(args: argparse.Namespace) -> list[str]:
    """Returns what was not as it should be."""
    on_gpu = device_choice() != "sim" and torch.cuda.is_available()
    accelerator = get_accelerator()
    device = Device(accelerator, int(args.host_gib * GIB))
    training = build(args, on_gpu)
    for _ in range(2):  # libraries choose their kernels, the allocator fills its cache
        plain = training.hashes(training.step())
    watched, loss = device.recorded(training)
    if args.list:
        print("\n".join(sites(watched.trace)))
        return []
    watched, loss = device.recorded(training)  # again: the first one paid for what the hooks set up
    same = [("recorded, nothing swapped", training.hashes(loss))]
    key = _key(watched.trace, args.layer, args.site)
    swap = choose(watched.trace, key, late=args.late_prefetch)
    plan = Plan(MODEL, 0, (swap,))
    compute = accelerator.compute_stream()
    streams = (compute, compute) if args.same_stream else (accelerator.new_stream(), accelerator.new_stream())
    device.recorded(training, plan, streams)  # page-locks the host memory
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        step, loss = device.recorded(training, plan, streams)
    same.append(("one tensor swapped", training.hashes(loss)))

    print(f"{key}: {swap.nbytes:,} bytes on {accelerator.name}")
    names = [_stream_name(stream) for stream in (compute, *streams)]
    print(f"streams: compute {names[0]}, D2H {names[1]}, H2D {names[2]}\n\nIts life in the step:")
    problems = check(step, swap, same_stream=args.same_stream)
    print(f"\n{'':<28}{'loss sha256':<20}gradients sha256")
    for name, hashes in [("plain PyTorch", plain), *same]:
        print(f"  {name:<26}{hashes['loss'][:16]:<20}{hashes['gradients'][:16]}")
        problems += [f"{name}: {what} differ from plain PyTorch" for what in hashes if hashes[what] != plain[what]]

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(out / "profiler.json"))
    (out / "trace.json").write_text(json.dumps(chrome_trace(step, 0, MODEL)))
    print(f"\nThe copies in {out / 'profiler.json'} (ours: {out / 'trace.json'}):")
    problems += find_copies(out / "profiler.json", on_gpu=on_gpu, same_stream=args.same_stream)
    if not on_gpu:
        print("  (a simulated device copies on threads of its own, which the profiler does not see)")
    device.pool.close()
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 all well, 1 something was not as it should be, 2 a choice that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", type=int, default=2, help="from 1; 0: outside the layers (default: %(default)s)")
    parser.add_argument("--site", type=int, help="the n-th tensor that it saves, from 0 (default: its largest)")
    parser.add_argument("--list", action="store_true", help="show all layers and sites, and end")
    parser.add_argument("--same-stream", action="store_true", help="copy on the compute stream")
    parser.add_argument("--late-prefetch", action="store_true", help="ask for the tensor too late, on purpose")
    parser.add_argument("--out", default="runs/swap_one_activation", help="for the traces (default: %(default)s)")
    for name, on_sim, on_gpu in (("layers", 4, 8), ("hidden", 128, 2048), ("heads", 4, 16), ("tokens", 256, 8192)):
        parser.add_argument(f"--{name}", type=int, help=f"of the model (default: {on_sim} simulated, {on_gpu} on GPU)")
        parser.set_defaults(**{f"_{name}": (on_sim, on_gpu)})
    parser.add_argument("--host-gib", type=float, default=2.0, help="host memory at most (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("layers", "hidden", "heads", "tokens"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(args, f"_{name}")[device_choice() != "sim"])
    try:
        problems = run(args)
    except SettingError as error:
        print(f"swap_one_activation: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"FAILED {problem}")
    if not problems and not args.list:
        print("\nok: same bits, both copies inside their windows")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
