"""What of the documentation is made from the sources and from measured files.

  scripts/docs.py            # write it again
  scripts/docs.py --check    # exit code 1 if something is not up to date
  scripts/docs.py --measure  # train on the simulated device first: docs/measured, docs/pictures; some minutes

In a Markdown file, what stands between ``<!-- generated: NAME -->`` and ``<!-- end -->`` is the result of BLOCKS[NAME].
Whole files are in FILES. Figures in the text come from docs/measured, never from a keyboard. (gpu_*.json are of runs
on a GPU, as predictions.py, swap_one_activation.py and largest_model.sh wrote or printed them.)
"""
from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]  # this checkout, whatever is installed

from docs_api import api  # noqa: E402
from docs_errors import error_texts  # noqa: E402
from docs_gpu import (  # noqa: E402
    MEASURED,
    NO_FLAG,
    gpu_predictions,
    head_of,
    largest_model,
    largest_model_picture,
    largest_model_sentence,
    mib,
    one_activation_on_gpu,
)
from docs_pictures import architecture_picture, life_picture  # noqa: E402

DOCS, PICTURES = ROOT / "docs", ROOT / "docs" / "pictures"
FIGURES = MEASURED / "simulated.json"
_BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# The model of the measured runs: 8 layers; everything else as scripts/pretrain_gpt_sim.sh has it.
SHAPE = {"LAYERS": "8"}
_OURS = ("--smart-swap", "--adaptive", "--virtual-optimizer")
STEPS, TIMED_STEPS = 12, 4  # enough for the search; all runs equal, so that their bits can be compared


# ---- measure: every figure that the text shows
def _train(folder: Path, *flags: str, steps: int = STEPS, cap: int | None = None, script: str = "pretrain_gpt_sim.sh",
           arguments: Sequence[str] = (), **settings: str) -> dict[str, Any]:  # fmt: skip
    """One run in a process of its own: exit code, last line, and what it wrote."""
    folder.mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_SWAP_")}
    environment = kept | SHAPE | {"ITERS": str(steps), "PYTHON": sys.executable, "OMP_NUM_THREADS": "2"} | settings
    if cap is not None:
        environment["MINDSPEED_SWAP_DEVICE_CAPACITY"] = str(cap)
    report = ["--swap-report-dir", str(folder)] if arguments or any(flag.startswith(_OURS) for flag in flags) else []
    command = ["bash", str(ROOT / "scripts" / script), *arguments, *flags, *report]
    done = subprocess.run(
        [*command, "--measure-file", str(folder / "measure.json")], env=environment, cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    print(f"{folder.name}: exit code {done.returncode}", flush=True)
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    result: dict[str, Any] = {"flags": " ".join(flags), "cap": cap, "code": done.returncode}
    if done.returncode:
        return result | {"last_line": lines[-1]}
    measure = json.loads((folder / "measure.json").read_text())
    steps_measured = measure["steps"]
    result |= {
        "peak_bytes": measure["peak_bytes"], "held_bytes": steps_measured[-1]["held_bytes"],
        "static_bytes": steps_measured[-1]["static_bytes"], "loss": steps_measured[-1]["loss"],
        "step_seconds": median(step["seconds"] for step in steps_measured[-TIMED_STEPS:]), "sha256": measure["sha256"],
        "steps": len(steps_measured),
    }  # fmt: skip
    log = folder / "output/msrun/worker_0.log"
    if log.is_file():
        result["set_lines"] = log.read_text().strip()
    summary = folder / "rank0" / "summary.json"
    return result | ({"summary": json.loads(summary.read_text())} if summary.is_file() else {})


def _one_activation(folder: Path, *flags: str) -> dict[str, Any]:
    """The compulsory experiment: its output, its exit code, and the profiler's trace."""
    folder.mkdir(parents=True)
    script = str(ROOT / "scripts/swap_one_activation.py")
    done = subprocess.run(
        [sys.executable, script, "--layer", "2", "--out", ".", *flags],
        env={**os.environ, "MINDSPEED_SWAP_DEVICE": "sim", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        cwd=folder, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    print(f"{folder.name}: exit code {done.returncode}", flush=True)
    return {"code": done.returncode, "output": done.stdout.strip()}


def measure() -> None:
    from mindspeed_swap.report.command import make_report

    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        full = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
        plain = _train(out / "plain")
        probe = _train(out / "probe", "--smart-swap", steps=4)
        cap = (probe["summary"]["floor_bytes"] + plain["peak_bytes"]) // 2
        runs = {
            "plain": plain,
            "capped": _train(out / "capped", cap=cap),
            "smart-swap": _train(out / "smart-swap", "--smart-swap", cap=cap),
            "adaptive": _train(out / "adaptive", "--adaptive-memory-optimization", cap=cap),
            "recompute": _train(out / "recompute", *full),
            "virtual-optimizer": _train(out / "virtual", "--virtual-optimizer", "all"),
            "swap-config": _train(
                out / "listed", script="pretrain_llama2_swap_config.sh",
                arguments=[str(ROOT / "configs/swap_config/case1_default.yaml")], LAYERS="4",
            ),
        }  # fmt: skip
        activation = {
            "own streams": _one_activation(out / "own"),
            "same stream": _one_activation(out / "same", "--same-stream"),
            "late prefetch": _one_activation(out / "late", "--late-prefetch"),
        }
        PICTURES.mkdir(parents=True, exist_ok=True)
        MEASURED.mkdir(parents=True, exist_ok=True)
        make_report(str(out / "smart-swap"), None, None)
        for picture in ("memory", "lanes", "layers"):
            _shrink(out / "smart-swap" / f"report_rank0_{picture}.png", PICTURES / f"{picture}.png")
        _pack(out / "smart-swap" / "rank0" / "trace.json", MEASURED / "smart_swap_trace.json.gz")
        _pack(out / "own" / "profiler.json", MEASURED / "one_activation_profiler.json.gz", str(out))
        versions = {"python": platform.python_version()}
        versions |= {name: metadata.version(name) for name in ("torch", "megatron-core")}
        figures = {
            "versions": versions, "shape": SHAPE, "floor_bytes": probe["summary"]["floor_bytes"], "cap_bytes": cap,
            "runs": {name: _without_paths(run) for name, run in runs.items()}, "one_activation": activation,
        }  # fmt: skip
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


def _without_paths(run: dict[str, Any]) -> dict[str, Any]:
    """Only what is shown or may be asked for: not thousands of lines of tensors."""
    summary = run.get("summary")
    if summary and summary.get("step"):
        summary["step"] = {name: value for name, value in summary["step"].items() if name not in ("tensors", "layers")}
    return run


def _shrink(source: Path, target: Path) -> None:
    """Few colors: a quarter of the size."""
    from PIL import Image

    with Image.open(source) as image:
        small = image.convert("RGB").resize((1200, round(image.height * 1200 / image.width)), Image.Resampling.LANCZOS)
        small.quantize(128).save(target, optimize=True)


def _pack(source: Path, target: Path, private: str = "") -> None:
    """``private``: a folder of this machine that must not be in it."""
    text = source.read_text()
    for folder in filter(None, (private, str(ROOT), sys.prefix, os.path.expanduser("~"))):
        text = text.replace(folder, "...")
    with target.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:
        packed.write(text.encode())


# ---- blocks
def _figures() -> dict[str, Any]:
    return dict(json.loads(FIGURES.read_text()))


_ROWS = {
    "plain": NO_FLAG,
    "capped": ("no flag, capped", "不加参数，限制显存"),
    "smart-swap": ("`--smart-swap`, capped", "`--smart-swap`，限制显存"),
    "adaptive": ("`--adaptive-memory-optimization`, capped", "`--adaptive-memory-optimization`，限制显存"),
    "recompute": ("Megatron's full recompute", "Megatron 全重计算"),
    "virtual-optimizer": ("`--virtual-optimizer all`", "`--virtual-optimizer all`"),
}
_HEAD = (
    ("run", "cap", "peak of a step", "static", "held at end of forward", "same bits", "result"),
    ("运行", "上限", "步内峰值", "静态", "前向结束时持有", "逐比特相同", "结果"),
)
_WORDS = (
    {True: "yes", False: "NO", "trained": "trains", "none": "none"},
    {True: "是", False: "否", "trained": "训练完成", "none": "无"},
)


def results(language: int = 0) -> str:
    figures = _figures()
    words, runs = _WORDS[language], figures["runs"]
    lines = head_of(_HEAD[language])
    for name, titles in _ROWS.items():
        run = runs[name]
        cap = mib(run["cap"]) if run["cap"] else words["none"]
        if run["code"]:
            cells = [titles[language], cap, "-", "-", "-", "-", f"`{run['last_line'].partition(';')[0]}`"]
        else:
            same = _same_bits(run, runs)
            cells = [titles[language], cap, mib(run["peak_bytes"]), mib(run["static_bytes"]),
                     mib(run["held_bytes"]), words[same] if same is not None else "-", words["trained"]]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _same_bits(run: dict[str, Any], runs: dict[str, Any]) -> bool | None:
    """As the plain run; None for that itself."""
    return None if run is runs["plain"] else run["sha256"] == runs["plain"]["sha256"]


def predictions(language: int = 0) -> str:
    head = (
        ("run", "tries", "predicted peak", "measured", "difference", "moved a step", "late", "on demand", "evicted"),
        ("运行", "尝试次数", "预测峰值", "实测峰值", "差", "每步搬移", "来迟", "按需加载", "驱逐"),
    )[language]
    lines = head_of(head)
    for name in ("smart-swap", "adaptive"):
        summary = _figures()["runs"][name]["summary"]
        step, stable = summary["step"], summary["stable"]
        peaks = [phase["peak_allocated_bytes"] for phase in step["phases"].values()]
        predicted_peak, measured = (max(peak[which] for peak in peaks) for which in ("predicted", "measured"))
        cells = [_ROWS[name][language], len(summary["tries"]), mib(predicted_peak), mib(measured),
                 f"{measured / predicted_peak - 1:+.2%}", mib(summary["plan"]["swap_bytes"]),
                 stable["late_loads"], stable["on_demand_loads"], stable["evictions"]]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def versions(language: int = 0) -> str:
    found = _figures()["versions"]
    text = ("Simulated device, Python {python}, torch {torch}, megatron-core {megatron-core}",
            "模拟设备，Python {python}，torch {torch}，megatron-core {megatron-core}")[language]  # fmt: skip
    return text.format(**found) + ".\n" if not language else text.format(**found) + "。\n"


def lane_figures(language: int = 0) -> str:
    """What the step of the picture says of itself."""
    step = _figures()["runs"]["smart-swap"]["summary"]["step"]
    rows = (
        (("bytes out", "搬出字节"), mib(step["bytes_out"])),
        (("bytes in", "搬回字节"), mib(step["bytes_in"])),
        (("copies out took", "搬出耗时"), f"{step['copy_ms']['out']:.1f} ms"),
        (("copies in took", "搬回耗时"), f"{step['copy_ms']['in']:.1f} ms"),
        (("compute waited for copies", "计算等待拷贝"), f"{step['stall_ms']['measured']:.1f} ms"),
        (("share of copy time hidden", "被掩盖的拷贝时间占比"), f"{step['hidden_share']:.1%}"),
    )
    head = ("| of one step of `--smart-swap` | |", "| `--smart-swap` 的一步 | |")[language]
    return "\n".join([head, "|---|---|", *(f"| {names[language]} | {value} |" for names, value in rows)]) + "\n"


def caption(language: int = 0) -> str:
    """Under the picture of the READMEs."""
    figures = _figures()
    plain, swapped = figures["runs"]["plain"], figures["runs"]["smart-swap"]
    peak = max(phase["peak_allocated_bytes"]["measured"] for phase in swapped["summary"]["step"]["phases"].values())
    assert _same_bits(swapped, figures["runs"])
    text = (
        "One step of a GPT of {layers} layers on the simulated device. Without a flag it needs {plain}; capped at "
        "{cap} it runs out of memory. With `--smart-swap` under that cap the step takes {peak}, moves {moved} each "
        "way, and ends with the same bits.\n",
        "模拟设备上 {layers} 层 GPT 的一步。不加参数需要 {plain}；上限 {cap} 时 OOM。"
        "同样上限下加 `--smart-swap`，该步用 {peak}，来回各搬 {moved}，结果逐比特相同。\n",
    )[language]
    return text.format(
        layers=figures["shape"]["LAYERS"], plain=mib(plain["peak_bytes"]), cap=mib(figures["cap_bytes"]),
        peak=mib(peak), moved=mib(swapped["summary"]["plan"]["swap_bytes"]),
    )  # fmt: skip


def one_activation(name: str) -> str:
    run = _figures()["one_activation"][name]
    return f"```text\n{run['output']}\n(exit code {run['code']})\n```\n"


def set_lines() -> str:
    return f"```text\n{_figures()['runs']['swap-config']['set_lines']}\n```\n"


def knobs(language: int = 0) -> str:
    from mindspeed_swap.smart_swap.knobs import KNOBS, SwapPolicyPref

    head = ("| name | default | takes | what it does |", "| 名称 | 默认值 | 取值 | 作用（英文，取自源码） |")[language]
    lines = [head, "|---|---|---|---|"]
    for name, knob in KNOBS.items():
        if knob.effect:
            value = str(knob.default) if isinstance(knob.default, SwapPolicyPref) else repr(knob.default)
            lines.append(f"| `{name}` | `{value}` | {knob.takes} | {knob.effect} |")
    idle = ", ".join(f"`{name}`" for name, knob in KNOBS.items() if not knob.effect)
    last = ("Accepted, without effect: ", "接受但不起作用：")[language]
    return "\n".join(lines) + f"\n\n{last}{idle}.\n"


def aliases(language: int = 0) -> str:
    from mindspeed_swap.fine_grained.names import ALIASES

    head = ("| MindFormers | Megatron |", "| MindFormers 名称 | Megatron 名称 |")[language]
    return "\n".join([head, "|---|---|", *(f"| `{theirs}` | `{ours}` |" for theirs, ours in ALIASES.items())]) + "\n"


def compatibility() -> str:
    """A line per feature of Megatron's, a column per flag of ours."""
    from mindspeed_swap.patches.compat import COMPAT, FEATURES, Refused, Works

    def text(cell: Any) -> str:
        if cell is None:
            return "no concern"
        if isinstance(cell, Works):
            return f"works: {cell.note}" if cell.note else "works"
        return f"error: {cell.why}" if isinstance(cell, Refused) else "not tested"

    lines = head_of(["Megatron", *(f"`{ours}`" for ours in COMPAT)])
    lines += [
        f"| {feature.title} | " + " | ".join(text(row.get(feature)) for row in COMPAT.values()) + " |"
        for feature in FEATURES
    ]
    return "\n".join(lines) + "\n"


BLOCKS: dict[str, Callable[[], str]] = {
    "compatibility": compatibility,
    "api": api,
    "knobs": knobs,
    "knobs-zh": functools.partial(knobs, 1),
    "aliases": aliases,
    "aliases-zh": functools.partial(aliases, 1),
    "results": results,
    "results-zh": functools.partial(results, 1),
    "predictions": predictions,
    "predictions-zh": functools.partial(predictions, 1),
    "gpu-predictions": gpu_predictions,
    "gpu-predictions-zh": functools.partial(gpu_predictions, 1),
    "caption": caption,
    "caption-zh": functools.partial(caption, 1),
    "lanes": lane_figures,
    "lanes-zh": functools.partial(lane_figures, 1),
    "versions": versions,
    "versions-zh": functools.partial(versions, 1),
    "one-activation": functools.partial(one_activation, "own streams"),
    "one-activation-same-stream": functools.partial(one_activation, "same stream"),
    "one-activation-late": functools.partial(one_activation, "late prefetch"),
    "one-activation-gpu": one_activation_on_gpu,
    "largest-model": largest_model,
    "largest-model-sentence": largest_model_sentence,
    "largest-model-sentence-zh": functools.partial(largest_model_sentence, 1),
    "largest-model-zh": functools.partial(largest_model, 1),
    "set-lines": set_lines,
}
FILES: dict[Path, Callable[[], str]] = {
    PICTURES / "architecture.svg": architecture_picture,
    PICTURES / "life.svg": life_picture,
    PICTURES / "largest_model.svg": largest_model_picture,
}


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]


def wanted() -> Iterator[tuple[Path, str]]:
    """(file, what it should hold) of everything that has something generated in it. KeyError: no such block."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if "<!-- generated:" in text:
            yield path, _BLOCK.sub(lambda match: match[1] + "\n" + BLOCKS[match[2]]() + "\n" + match[3], text)
    for path, make in FILES.items():
        yield path, make()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--measure", action="store_true", help="train first")
    parser.add_argument("--errors", action="store_true", help="list the error texts of the product, and end")
    args = parser.parse_args()
    if args.errors:
        print("\n".join(error_texts()))
        return 0
    if args.measure:
        measure()
    stale = [(path, text) for path, text in wanted() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path, text in stale:
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"{'not up to date' if args.check else 'written'}: {path.relative_to(ROOT)}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
