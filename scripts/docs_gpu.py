"""What of the documentation is made from the files of runs on a GPU, docs/measured/gpu_*.json."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs_pictures import limits_picture
from largest_model import Trial, figures, results

MEASURED = Path(__file__).resolve().parent.parent / "docs" / "measured"
NO_FLAG = ("no flag", "不加参数")


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def head_of(names: Sequence[str]) -> list[str]:
    """Of a table."""
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


def gpu_predictions(language: int = 0) -> str:
    head = (
        ("{card}, torch {torch}", "budget, of the peak without a flag", "predicted before step", "step time predicted",
         "measured", "difference", "peak predicted", "measured"),
        ("{card}，torch {torch}", "预算，占不加参数时峰值", "在第几步之前预测", "预测步时间", "实测", "差", "预测峰值",
         "实测峰值"),
    )[language]  # fmt: skip
    runs = [json.loads((MEASURED / f"gpu_predictions_{name}.json").read_text()) for name in ("swap", "adaptive")]
    about = runs[0]["machine"]["card"], runs[0]["versions"]["torch"]
    assert all((run["machine"]["card"], run["versions"]["torch"]) == about for run in runs)
    lines = head_of((head[0].format(card=about[0], torch=about[1]), *head[1:]))
    for row in (row for run in runs for row in run["rows"]):
        (told_ms, ms), (told_peak, peak) = row["step_ms"], row["peak_bytes"]
        lines.append(f"| `{row['flag']}` | {row['budget_share']:.2f} | {row['before_step']} | {told_ms:.1f} ms | "
                     f"{ms:.1f} ms | {ms / told_ms - 1:+.1%} | {mib(told_peak)} | {mib(peak)} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def one_activation_on_gpu() -> str:
    run = json.loads((MEASURED / "gpu_one_activation.json").read_text())
    about = f"{run['card']}, torch {run['versions']['torch']}: {run['command']}"
    return f"```text\n{about}\n\n{run['output']}\n(exit code {run['code']})\n```\n"


def _limits() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of scripts/largest_model.sh on a GPU: what it ran on, and each variant at its limit. Plain comes first."""
    data = json.loads((MEASURED / "gpu_largest_model.json").read_text())
    trials = [Trial(why="", wall_seconds=0.0, **trial) for trial in data["trials"]]
    rows = results(data["shape"], {trial.variant: trial for trial in trials if trial.fits})
    for row in rows:
        row["tried"] = [t.layers for t in trials if not t.fits and t.variant == row["variant"]]
    return data, rows


def largest_model(language: int = 0) -> str:
    head = (
        ("{card}, torch {torch}", "layers", "tried without success", "parameters", "x plain", "step", "TFLOP/s",
         "x plain", "peak", "host memory", "loss"),
        ("{card}，torch {torch}", "层数", "试过而放不下", "参数量", "与不加参数之比", "步时间", "TFLOP/s",
         "与不加参数之比", "峰值", "主机内存", "loss"),
    )[language]  # fmt: skip
    data, rows = _limits()
    lines = head_of((head[0].format(card=data["card"], torch=data["versions"]["torch"]), *head[1:]))
    for row in rows:
        name = f"`{row['flags']}`" if row["flags"] else NO_FLAG[language]
        tried = ", ".join(map(str, row["tried"])) or "-"
        lines.append("| " + " | ".join((name, str(row["layers"]), tried, *figures(row))) + " |")
    return "\n".join(lines) + "\n"


def largest_model_sentence(language: int = 0) -> str:
    """Of the READMEs."""
    data, (plain, *_, all_together) = _limits()
    text = (
        "On one {card}: without a flag the largest Llama-shaped model of hidden 4096 that trains on sequences of "
        "{tokens} tokens has {plain[layers]} layers ({few:.1f} B parameters); with `{flags}` {all[layers]} layers "
        "train ({many:.1f} B) at {speed:.0%} of its TFLOP/s.\n",
        "在一块 {card} 上：不加参数，hidden 4096、序列 {tokens} token 的 Llama 结构模型"
        "最多能训练 {plain[layers]} 层（{few:.1f} B 参数）；"
        "加 `{flags}` 可训练 {all[layers]} 层（{many:.1f} B），TFLOP/s 为前者的 {speed:.0%}。\n",
    )[language]  # fmt: skip
    return text.format(
        card=data["card"], tokens=data["shape"]["SEQ"], plain=plain, all=all_together,
        flags=all_together["flags"], few=plain["parameters"] / 1e9, many=all_together["parameters"] / 1e9,
        speed=all_together["tflops_ratio"],
    )  # fmt: skip


def largest_model_picture() -> str:
    data, rows = _limits()
    bars = [(row["variant"], row["parameters"] / 1e9, f"{row['layers']} layers, {row['tflops']:.0f} TFLOP/s")
            for row in rows]  # fmt: skip
    return limits_picture(f"parameters of the largest model that trains on one {data['card']}, in billions", bars)
