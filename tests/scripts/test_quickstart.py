"""The quickstart's judgement, with a stand-in for the trainer: each promise that is broken must make it fail."""
import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Answers like scripts/pretrain_gpt_sim.sh. FAKE (JSON in the environment) changes single figures.
TRAINER = """
import json, os, sys
from pathlib import Path
fake = json.loads(os.environ["FAKE"])
args, cap = sys.argv[1:], os.environ.get("MINDSPEED_SWAP_DEVICE_CAPACITY")
assert os.environ["MINDSPEED_SWAP_DEVICE"] == "sim" and os.environ["DATA"]
swap, steps = "--smart-swap" in args, int(os.environ["ITERS"])
if cap and not swap and not fake.get("survives"):
    print("Traceback of something")
    print(fake.get("last words", "out of memory: tried to allocate 1 MiB"), file=sys.stderr)
    sys.exit(1)
if cap and swap and fake.get("dies"):
    sys.exit("out of memory: tried to allocate 2 MiB")
key = "swapped" if cap else "plain"
values = {"peak": 700 if cap else 1000, "held": 300 if cap else 800, "parameters": "p" * 64, "gradients": "g" * 64,
          "optimizer": "o" * 64, "floor": 400, "on_demand_loads": 0, "phase": "Stable", **fake.get(key, {})}
print(" [2026-01-01 00:00:00] iteration        1/       4 | elapsed: 3.0 | lm loss: 5.545177E+00 | grad norm: 1.0 |")
if swap: print("[mindspeed_swap] smart-swap: WarmUp -> Stable")
step = {"peak_bytes": values["peak"], "static_bytes": 1, "held_bytes": values["held"], "seconds": 0.5, "loss": 5.5}
Path(args[args.index("--measure-file") + 1]).write_text(json.dumps({
    "iterations": steps, "peak_bytes": values["peak"], "steps": [step] * steps,
    "sha256": {k: values[k] for k in ("parameters", "gradients", "optimizer")}}))
if swap:
    folder = Path(args[args.index("--swap-report-dir") + 1]) / "rank0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({"floor_bytes": values["floor"], "phase": values["phase"],
        "stable": {"steps": 3, "on_demand_loads": values["on_demand_loads"]}}))
"""


@pytest.fixture
def quickstart(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "scripts" / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "quickstart", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "trainer.sh").write_text(f'exec "$PYTHON" "{tmp_path}/trainer.py" "$@"\n')

    def run(**fake):
        monkeypatch.setenv("FAKE", json.dumps(fake))
        monkeypatch.setenv("MINDSPEED_SWAP_DEVICE_CAPACITY", "1")  # the caller's must not leak into uncapped runs
        trainer, data = str(tmp_path / "trainer.sh"), str(tmp_path / "data")
        return module.main(["--out", str(tmp_path), "--trainer", trainer, "--steps", "6", "--data", data])

    run.Failed = module.Failed
    return run


def test_all_well(quickstart, capsys):
    assert quickstart() == 0
    out = capsys.readouterr().out
    assert "FAILED" not in out and out.count("\nok ") == 8
    assert "  step 1/4  loss 5.5452" in out and "  [mindspeed_swap] smart-swap: WarmUp -> Stable" in out
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if line.count("|") == 6]
    assert rows[0] == ["run", "cap", "peak", "held at end of forward", "step time", "loss", "result"]
    assert [(row[0], row[-1]) for row in rows[1:]] == [
        ("uncapped", "trained"), ("capped", "out of memory"), ("capped, --smart-swap", "trained"),
    ]  # fmt: skip
    assert "cap 70% of the uncapped peak" in out


@pytest.mark.parametrize(
    ("fake", "told"),
    [
        ({"swapped": {"parameters": "x" * 64}}, "sha256 of parameters"),
        ({"swapped": {"gradients": "x" * 64}}, "sha256 of gradients"),
        ({"swapped": {"optimizer": "x" * 64}}, "sha256 of optimizer"),
        ({"swapped": {"held": 561}}, "held at end of forward"),
        ({"swapped": {"on_demand_loads": 1}}, "on-demand loads in Stable: 1"),
        ({"swapped": {"peak": 701}}, "measured peak"),
        ({"swapped": {"phase": "SearchPolicy"}}, "ends in phase Stable: SearchPolicy"),
        ({"last words": "Segmentation fault"}, "out of memory"),
    ],
)
def test_each_broken_promise_fails(quickstart, capsys, fake, told):
    assert quickstart(**fake) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 1 and told in failed[0]


@pytest.mark.parametrize(
    ("fake", "told"),
    [
        ({"plain": {"floor": 502}}, "above 75%"),
        ({"plain": {"floor": None}}, "did not report a floor"),
        ({"survives": True}, "without the flag"),
        ({"dies": True}, "out of memory: tried to allocate 2 MiB"),
    ],
)
def test_what_ends_it_says_why(quickstart, fake, told):
    with pytest.raises(quickstart.Failed, match=told):
        quickstart(**fake)


def test_held_at_exactly_30_percent_lower_is_enough(quickstart):
    assert quickstart(swapped={"held": 560}) == 0
