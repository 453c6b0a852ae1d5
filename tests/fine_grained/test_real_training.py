"""Real Megatron on the simulated device under swap configurations: the bits, the bytes per operator, the log."""
from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from cases import CASES, CONFIGS, EXPECTED, GREPS
from layer_steps import layer_names
from layout_runs import Run, Trainer, prepare_text
from layouts import LAYOUTS

from mindspeed_swap.core.trace import StepTrace

pytest.importorskip("megatron.training")

FOUR = replace(LAYOUTS["one"], settings={"LAYERS": "4"})
STEPS = "6"
UNIT = 128 * 8 * 64 * 2  # bytes of one hidden state in bf16: sequence x batch x hidden


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> Trainer:
    folder = tmp_path_factory.mktemp("training")
    return Trainer(folder, prepare_text(folder / "text"))


class Trained:
    """A run under a configuration."""

    def __init__(self, trainer: Trainer, layout, text: str | Path, *flags: str, **extra: str) -> None:
        if isinstance(text, str):
            path = trainer._folder / f"{abs(hash((text, flags)))}.yaml"
            path.write_text(text)
        else:
            path = text
        done, self.folder = trainer.start(
            layout, layout.dtype, "--swap-config", str(path), *flags, **{"ITERS": STEPS} | extra
        )
        assert done.returncode == 0, done.stderr[-3000:]
        self.output = done.stdout
        ranks = range(layout.ranks)
        self.measured = [json.loads((self.folder / f"measured.{rank}.json").read_text()) for rank in ranks]
        self.summaries = [json.loads((self.folder / f"rank{rank}" / "summary.json").read_text()) for rank in ranks]
        self.traces = [
            StepTrace.from_json((self.folder / f"rank{rank}" / "step_trace.json").read_text()) for rank in ranks
        ]

    def digests(self):
        return [rank["sha256"] for rank in self.measured]

    def moved(self, rank: int = 0) -> dict[int, dict[str, float]]:
        """By layer and part of the layer: what was really copied out in the first microbatch, in UNITs."""
        trace = self.traces[rank]
        records = {record.key: record for record in trace.saved}
        found: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for copy in trace.copies:
            if not copy.to_host or copy.key.microbatch:
                continue
            record = records[copy.key]
            inside = [m.key.name for m in trace.modules
                      if m.key[:3] == copy.key[:3] and m.begin < record.saved < m.end and "." not in m.key.name]
            part = next((name for name in inside if name != "layer"), "layer")
            found[copy.key.layer - 1][part] += copy.nbytes / UNIT
        return {layer: dict(parts) for layer, parts in sorted(found.items())}

    def log(self, rank: int = 0) -> str:
        return (self.folder / "output" / "msrun" / f"worker_{rank}.log").read_text()

    def recomputed(self, rank: int = 0) -> int:
        return self.summaries[rank]["step"]["counters"]["recomputed_calls"]


def plain(trainer: Trainer, layout) -> Run:
    key = layout.name, str(sorted(layout.settings.items()))
    if key not in trainer._plain:
        trainer._plain[key] = trainer.train(layout, layout.dtype, ITERS=STEPS)
    return trainer._plain[key]


# In hidden states. Attention: its input, q, k, what v is cut from (q, k and v in one) and its output. MLP: its input,
# what comes out of the first product (twice as wide as its half), what is made of the halves, what enters the second.
# Norm: two figures in fp32.
CORE, ATTENTION, MLP, NORM = 6.0, 7.0, 11.0, 4.0
OPERATORS = {
    0: {"self_attention": ATTENTION},
    1: {"mlp": MLP, "self_attention": ATTENTION},
    # 15 and 20 operators back from there is before the last of them have left.
    2: {"mlp": MLP - 2.0, "self_attention": ATTENTION - 1.0},
}
CASE_BYTES = {
    "case1_default": {layer: {"self_attention": CORE} for layer in (0, 1, 2)},
    "case2_layers": {
        0: {"input_layernorm": NORM, "mlp": MLP, "pre_mlp_layernorm": NORM, "self_attention": ATTENTION}
    },
    "case3_operators": OPERATORS,
    "case4_with_recompute": OPERATORS,
}


@pytest.mark.parametrize("name", CASES)
def test_documented_cases(trainer, name):
    run = Trained(trainer, FOUR, CONFIGS / f"{name}.yaml")
    assert run.digests() == plain(trainer, FOUR).digests()
    done = subprocess.run(GREPS[name], shell=True, cwd=run.folder, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip("\n") == (EXPECTED / f"{name}.txt").read_text().rstrip("\n")
    assert run.moved() == CASE_BYTES[name]
    assert run.recomputed() == (2 if name == "case4_with_recompute" else 0)
    assert set(layer_names(run.traces[0])) == {0, 1, 2, 3}
    assert run.measured[0]["steps"][-1]["peak_bytes"] < plain(trainer, FOUR).measured[0]["steps"][-1]["peak_bytes"]


def test_recompute_wins_on_real_layers(trainer):
    """Both rules: what is recomputed, and what it is run from, stay where they are."""
    text = """
recompute_config:
  recompute: [0]
  select_recompute: {feed_forward: [1], attention.flash_attention: [3]}
swap_config:
  swap: True
  op_swap: [{op_name: [attention, ffn_norm], backward_prefetch: 3, layers: True}]
"""
    layout = replace(FOUR, flags=("--hidden-dropout", "0.1"))
    run = Trained(trainer, layout, text)
    assert run.digests() == trainer.train(layout, layout.dtype, ITERS=STEPS).digests()
    moved = run.moved()
    assert moved.pop(2).keys() == {"self_attention", "pre_mlp_layernorm"}
    assert moved.pop(1).keys() == {"self_attention"}  # feed_forward runs from what ffn_norm gives
    assert moved == {3: {"pre_mlp_layernorm": NORM}}  # flash_attention runs from what the product before it gives
    assert run.recomputed() == 3
    log = run.log()
    assert "layer 1: pre_mlp_layernorm" in log and "a recomputed operator runs from its output, so not swapped" in log
    assert "layer 0: self_attention" in log and "recomputed, so not swapped" in log
    assert "Set full recompute at layer 0\n" in log
    assert "Set select recompute at layer 3: attention.flash_attention\n" in log


def test_wrong_input_is_an_error_before_anything_starts(trainer, tmp_path):
    path = tmp_path / "swap.yaml"
    for text, message in (
        ("swap_config: {swap: True, layer_swap: [{backward_prefetch: 1, layers: [99]}]}", "layers[0]: layer 99"),
        ("swap_config: {swap: True, op_swap: [{op_name: atention, backward_prefetch: 1, layers: [0]}]}",
         "atention: no operator of this model matches; near it: attention"),
    ):  # fmt: skip
        path.write_text(text)
        done, _ = trainer.start(FOUR, FOUR.dtype, "--swap-config", str(path), ITERS=STEPS)
        assert done.returncode != 0
        assert message in done.stderr
        assert "elapsed time per iteration" not in done.stdout


def test_operators_of_a_run_are_listed(trainer, capsys):
    from mindspeed_swap.cli import main

    run = Trained(trainer, FOUR, "swap_config: {swap: False}")
    assert "nothing is swapped and nothing recomputed" in run.output
    assert run.digests() == plain(trainer, FOUR).digests()
    assert main(["ops", str(run.folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("layers 0, 1, 2, 3\n")
    assert main(["report", str(run.folder)]) == 0
    assert "Swap configuration" in (run.folder / "report.html").read_text()
    row = next(line.split() for line in printed.splitlines() if "self_attention.core_attention" in line)
    assert row == ["self_attention.core_attention", "*", "attention.flash_attention", "0.8", "MiB", "0.8", "MiB", "4"]


@pytest.mark.full
def test_recompute_mix_under_tensor_and_sequence_parallel(trainer):
    layout = replace(LAYOUTS["tp_sp"], flags=("--sequence-parallel", "--hidden-dropout", "0.1"))
    text = """
recompute_config:
  recompute: [0]
  select_recompute: {feed_forward: [1, 2], attention.flash_attention: [2, 3]}
  select_comm_recompute: [1, 2, 3]
swap_config:
  swap: True
  layer_swap: [{backward_prefetch: 5, layers: [4]}]
  op_swap: [{op_name: attention, backward_prefetch: 4, layers: [0, 1, 3]}]
"""
    run = Trained(trainer, layout, text)
    assert run.digests() == trainer.train(layout, layout.dtype, ITERS=STEPS).digests()
    for rank in (0, 1):
        moved = run.moved(rank)
        assert 0 not in moved and moved[1].keys() == {"self_attention"}
        parts = {"input_layernorm", "mlp", "pre_mlp_layernorm", "self_attention", "layer"}  # masks of the dropout
        assert moved[4].keys() == parts
        assert run.recomputed(rank) == 5
        assert "Set select comm recompute at layer 1\n" in run.log(rank)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("pp", [0, 3, 7], [{0, 3}, {7}]),
        ("vpp_two_layers", [0, 2, 4, 5, 6], [{0, 4, 5}, {2, 6}]),
    ],
)
def test_global_numbers_in_a_pipeline(trainer, name, layers, expected):
    layout = LAYOUTS[name]
    text = f"""
recompute_config: {{select_recompute: {{feed_forward: [1, 3]}}}}
swap_config: {{swap: True, op_swap: [{{op_name: attention, backward_prefetch: 2, layers: {layers}}}]}}
"""
    run = Trained(trainer, layout, text)
    assert run.digests() == plain(trainer, layout).digests()
    for rank in (0, 1):
        moved = run.moved(rank)
        assert set(moved) == expected[rank]
        # one hidden state of a microbatch is what UNIT says; all of attention goes where there is time for it
        assert all(parts == {"self_attention": ATTENTION} for parts in moved.values())
        set_for = {line.split(":")[0] for line in run.log(rank).splitlines() if "Set op_swap" in line}
        assert set_for == {f"-INFO - Set op_swap at layer {layer}" for layer in expected[rank]}
    microbatches = 4
    assert run.recomputed(0) + run.recomputed(1) == 2 * microbatches


@pytest.mark.full
@pytest.mark.parametrize("name", ["ep", "rampup", "evaluation", "dp_overlap_both", "fusion"])
def test_other_layouts_keep_their_bits(trainer, name):
    """Experts, of which a part cannot run again; other numbers of microbatches; evaluation; overlaps."""
    layout = LAYOUTS[name]
    text = """
recompute_config: {select_recompute: {mlp: [1], attention.flash_attention: [2]}}
swap_config: {swap: True, op_swap: [{op_name: [mlp, attention], backward_prefetch: 3, layers: True}]}
"""
    run = Trained(trainer, layout, text, ITERS="8")
    assert run.digests() == trainer.train(layout, layout.dtype, ITERS="8").digests()
    assert {"mlp", "self_attention"} <= set(run.moved()[0])
    assert ("layer 1: mlp: cannot run again" in run.log()) == (name == "ep")
    for summary in run.summaries:
        assert summary["phase"] == "Stable" and summary["stable"]["on_demand_loads"] == 0


@pytest.mark.full
def test_case_19_some_of_32_layers(trainer):
    layout = replace(LAYOUTS["one"], settings={"LAYERS": "32"})
    text = "swap_config: {swap: True, op_swap: [{op_name: attention, backward_prefetch: 3, layers: [0, 6, 13]}]}"
    run = Trained(trainer, layout, text)
    assert run.digests() == plain(trainer, layout).digests()
    assert run.moved() == {layer: {"self_attention": ATTENTION} for layer in (0, 6, 13)}


@pytest.mark.full
def test_later_release_and_earlier_prefetch_on_a_slow_link(trainer):
    layout = replace(LAYOUTS["one"], settings={"LAYERS": "12"})
    runs = {
        value: Trained(
            trainer, layout, f"swap_config: {{swap: True, default_prefetch: {value}}}",
            MINDSPEED_SWAP_SIM_LINK_GBPS="0.2",
        )
        for value in (1, 10, 50)
    }  # fmt: skip
    late, peaks, stalls = {}, {}, {}
    for value, run in runs.items():
        assert run.digests() == plain(trainer, layout).digests()
        step = run.summaries[0]["step"]
        late[value] = step["counters"]["late_loads"] + step["counters"]["on_demand_loads"]
        stalls[value] = step["stall_ms"]["measured"]
        peaks[value] = run.measured[0]["steps"][-1]["peak_bytes"]
    assert late[1] > late[10] >= late[50], late
    assert stalls[1] > stalls[10] >= stalls[50], stalls
    assert peaks[1] < peaks[10] < peaks[50], peaks
    advice = runs[1].summaries[0]["swap_config"]["advice"]
    assert any("ms late" in line and "would do" in line for line in advice), advice
    assert any("ms late" in line for line in runs[1].output.splitlines())
    assert any("is too large" in line for line in runs[50].summaries[0]["swap_config"]["without_effect"])
