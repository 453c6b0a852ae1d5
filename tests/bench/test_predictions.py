"""scripts/bench/predictions.py, tiny: memory is predicted to the byte there, times mean nothing."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.training")
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "predictions.py"


@pytest.mark.full
def test_what_is_predicted_and_what_is_measured(tmp_path):
    command = [sys.executable, str(SCRIPT), "--device", "sim", "--workload", "A", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--features", "swap", "--budgets", "0.9,0.8"],
        capture_output=True, text=True, timeout=300, check=True,
    )
    plain, searched, unseen = json.loads((tmp_path / "sim-A-swap.json").read_text())
    assert plain["point"] == "plain" and searched["swap"]["tries"] > 0 and unseen["swap"]["tries"] == 0
    for record in (searched, unseen):
        promised = {told["prediction"]["step_ms"]: told["prediction"] for told in record["predictions"]}
        peaks = promised[record["swap"]["predicted_ms"]]["peak_bytes"]
        peak = max(nbytes for phase, nbytes in peaks.items() if phase != "O")
        assert record["peak_bytes"]["forward_backward"] == pytest.approx(peak, rel=0.02)
        assert record["peak_bytes"]["forward_backward"] <= record["budget_bytes"]
    rows = json.loads((tmp_path / "sim-A-swap-table.json").read_text())["rows"]
    assert [(row["flag"], row["budget_share"], row["step_ms"][1]) for row in rows] == [
        ("--smart-swap", 0.9, searched["step_ms"]), ("--smart-swap", 0.8, unseen["step_ms"]),
    ]  # fmt: skip
    assert "nothing measured at it" in done.stdout and "of 2 within" in done.stdout
