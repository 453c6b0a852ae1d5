"""Our figures against ``torch.profiler``'s: copies on streams of their own, their bytes, the share that is hidden. And
what ``--swap-report-dir`` costs.

    python tests/gpu/profile_copies.py --out DIR [--share 0.9]        # one GPU, 4 minutes

Trains plain; then under --smart-swap with each step in a profile, and compares every recorded step with its profile;
then with the plan found, with and without the report in turn. Exit code 1 if a share differs by more than 5 % of the
copies' time, bytes differ, or a copy is not on a stream of its own. Of the report's cost the figure is printed.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parents[1] / "scripts"
PROFILE_TO = "PROFILE_COPIES_TO"  # a folder: this process is one that trains
SHAPE = {"LAYERS": "8", "HIDDEN": "4096", "FFN": "11008", "SEQ": "8192"}
STEPS, COUNTED = 16, 10
WITHIN = 0.05
# Between two kernels that follow one another the device is idle for a few microseconds without waiting for a copy.
LAUNCH_GAP_US = 20.0

Spans = list[tuple[float, float]]


# ---- of a profile
def union(spans: Spans, gap: float = 0.0) -> Spans:
    """In order, without overlap; spans less than ``gap`` apart are one."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def overlap(a: Spans, b: Spans) -> float:
    """Of two unions."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def of_profile(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Streams, bytes and hidden share of the copies that are not on the compute stream, from the profiler's events."""
    by_stream: dict[int, Spans] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memset"):
            span = event["ts"], event["ts"] + event["dur"]
            by_stream.setdefault(event["args"]["stream"], []).append(span)
    compute = max(by_stream, key=lambda stream: length(union(by_stream[stream])))
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and e["args"]["stream"] != compute]
    inline = [e for e in events if e.get("cat") == "gpu_memcpy" and e["args"]["stream"] == compute]
    busy = [*by_stream[compute], *((e["ts"], e["ts"] + e["dur"]) for e in inline)]
    copying = union([(e["ts"], e["ts"] + e["dur"]) for e in copies])
    hidden = overlap(copying, union(busy, LAUNCH_GAP_US))
    found: dict[str, Any] = {"compute_stream": compute, "copies": len(copies), "with_kernels": []}
    for way in ("DtoH", "HtoD"):
        mine = [e for e in copies if way in e["name"]]
        streams = {e["args"]["stream"] for e in mine}
        found[way] = {"streams": sorted(streams), "bytes": sum(e["args"]["bytes"] for e in mine)}
        found["with_kernels"] += sorted(streams & set(by_stream))
    found["hidden_share"] = hidden / length(copying) if copying else None
    return found


def faults(profile: dict[str, Any], bytes_out: int, bytes_in: int, hidden_share: float | None) -> list[str]:
    out, back, found = profile["DtoH"], profile["HtoD"], []
    if len(out["streams"]) != 1 or len(back["streams"]) != 1 or out["streams"] == back["streams"]:
        found.append(f"D2H on streams {out['streams']}, H2D on {back['streams']}: expected one of its own each")
    if profile["with_kernels"]:
        found.append(f"kernels on the copy streams {profile['with_kernels']}")
    for way, theirs, ours in (("out", out["bytes"], bytes_out), ("in", back["bytes"], bytes_in)):
        if theirs != ours:
            found.append(f"bytes {way}: profiler {theirs}, ours {ours}")
    if profile["hidden_share"] is None or hidden_share is None:
        found.append("no copies")
    elif abs(profile["hidden_share"] - hidden_share) > WITHIN:
        found.append(f"hidden share: profiler {profile['hidden_share']:.3f}, ours {hidden_share:.3f}")
    return found


# ---- the process that trains
def train(folder: Path) -> None:
    """As scripts/bench/train_point.py, each step in a profile of its own. Rows of recorded steps go to rows.json."""
    sys.path[:0] = [str(SCRIPTS / "bench"), str(SCRIPTS)]
    import pretrain_gpt  # its first line comes before anything of Megatron

    # isort: split
    import measure
    import torch
    import train_point
    from megatron.training import training

    from mindspeed_swap.core.swap_manager import SwapManager
    from mindspeed_swap.report.figures import hidden_share

    start, end_step = measure.start, SwapManager.end_step
    rows: list[dict[str, Any]] = []
    recorded: list[Any] = []
    path = folder / "step.json"

    def profiled(train_step: Any) -> Any:
        number = 0

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            number += 1
            recorded.clear()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                result = train_step(*args, **kwargs)
                torch.cuda.synchronize()
            if recorded and recorded[-1].copies:
                profiler.export_chrome_trace(str(path))
                compare(number, recorded[-1])
            return result

        return step

    def compare(number: int, trace: Any) -> None:
        out, back = (sum(copy.nbytes for copy in trace.copies if copy.to_host is way) for way in (True, False))
        profile, ours = of_profile(json.loads(path.read_text())["traceEvents"]), hidden_share(trace)
        rows.append({"step": number, "profile": profile, "bytes": [out, back], "hidden_share": ours,
                     "faults": faults(profile, out, back, ours)})  # fmt: skip
        (folder / "rows.json").write_text(json.dumps(rows, indent=1))

    def started(*args: Any) -> Any:
        """Outside all that is patched: what the profiler takes is in no step."""
        measurement = start(*args)
        training.train_step = profiled(training.train_step)
        return measurement

    def ended(manager: SwapManager) -> Any:
        stats, trace = end_step(manager)
        if trace is not None:
            recorded.append(trace)
        return stats, trace

    measure.start, SwapManager.end_step = started, ended
    train_point.use_fused_adam()
    with pretrain_gpt.oom_message.one_line():
        pretrain_gpt.main()


# ---- the process that compares
def run(folder: Path, name: str, *flags: str, profile: bool = False) -> dict[str, Any]:
    """What --measure-file wrote. Raises SystemExit."""
    file, log = folder / f"{name}.json", folder / f"{name}.log"
    program = HERE / "profile_copies.py" if profile else SCRIPTS / "bench" / "train_point.py"
    kept = {n: value for n, value in os.environ.items() if not n.startswith("MINDSPEED_SWAP_")}
    environment = SHAPE | kept | {"ITERS": str(STEPS), "PROGRAM": str(program), "PYTHON": sys.executable}
    if profile:
        environment[PROFILE_TO] = str(folder)
    command = ["bash", str(SCRIPTS / "pretrain_gpt_gpu.sh"), *flags, "--measure-file", str(file), "--measure-no-hashes"]
    with log.open("w") as output:
        code = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        print(f"{name}: exit code {code}\n" + "\n".join(log.read_text(errors="replace").split("\n")[-30:]))
        raise SystemExit(1)
    return json.loads(file.read_text())


def median_ms(runs: list[dict[str, Any]]) -> float:
    return 1000 * statistics.median(step["seconds"] for each in runs for step in each["steps"][-COUNTED:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.9, help="of the plain peak, to stay under")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.out.resolve()
    steps = run(folder, "plain")["steps"]
    peak = max(step["phases"]["forward_backward"]["allocated_bytes"] for step in steps)
    print(f"plain: {median_ms([{'steps': steps}]):.1f} ms, peak {peak / 2**20:.0f} MiB", flush=True)
    target, plan = str(args.share * peak / 2**30), str(folder / "plan.json")
    swap = ("--smart-swap", "--swap-memory-target", target)
    run(folder, "profiled", *swap, "--swap-plan-save", plan, "--swap-report-dir", str(folder), profile=True)
    rows = json.loads((folder / "rows.json").read_text())
    told = json.loads((folder / "rank0" / "summary.json").read_text())["step"]
    bad = 0
    for row in rows:
        profile, shown = row["profile"], row["hidden_share"] == told["hidden_share"]
        bad += bool(row["faults"])
        print(
            f"step {row['step']:>2}: {profile['copies']} copies, compute on stream {profile['compute_stream']}, D2H on "
            f"{profile['DtoH']['streams']}, H2D on {profile['HtoD']['streams']}; hidden by the profiler "
            f"{profile['hidden_share']:.3f}, by us {row['hidden_share']:.3f}{' (summary.json)' if shown else ''}"
            + "".join(f"\n  WRONG {what}" for what in row["faults"]),
            flush=True,
        )
    if not any(row["hidden_share"] == told["hidden_share"] for row in rows):
        bad += 1
        print("WRONG the step that summary.json shows was not profiled")
    runs: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    for turn in ("off", "on", "on", "off"):
        report = ("--swap-report-dir", str(folder / f"report{len(runs['on'])}")) if turn == "on" else ()
        runs[turn].append(run(folder, f"{turn}{len(runs[turn])}", "--smart-swap", "--swap-plan", plan, *report))
    off, on = median_ms(runs["off"]), median_ms(runs["on"])
    print(f"report off {off:.2f} ms, on {on:.2f} ms: {on / off - 1:+.2%} step time (wanted: at most +1 %)")
    return 1 if bad else 0


if __name__ == "__main__":
    if to := os.environ.get(PROFILE_TO):
        train(Path(to))
    else:
        sys.exit(main())
