"""The runner, the page and the host times on the simulated device: tiny models in real Megatron."""
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import run
import seed_tables
import table
import training
from competitors import torchtune_offload
from planted import plain, record, write
from warm_python import python

from mindspeed_swap.core.trace import StepTrace

BENCH = Path(run.__file__).parent
POINTS = "save_on_cpu,adaptive@0.81"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


def call(folder, *more):
    return run.main(["--device", "sim", "--workload", "A", "--out", str(folder), "--points", POINTS,
                     "--references", "plain", *more])  # fmt: skip


def test_runs_once_each(folder, capfd, monkeypatch):
    monkeypatch.setattr(sys, "executable", python())
    assert call(folder, "--minutes", "8", "--part", "one", "--ahead", "--known", str(folder / "none"),
                "--traces", str(folder / "traces")) == 0  # fmt: skip
    data = json.loads((folder / "sim-A-one.json").read_text())
    assert [record["point"] for record in data["points"]] == ["plain", "adaptive@0.81", "save_on_cpu"]
    assert {"machine", "versions", "command"} <= set(data) and data["machine"]["card"] == "simulated device"
    plain_run, ours, theirs = data["points"]
    assert all(record["ok"] and len(record["steps_ms"]) == 10 for record in data["points"])
    assert ours["budget_bytes"] == int(0.81 * plain_run["peak_bytes"]["forward_backward"])
    assert ours["peak_bytes"]["forward_backward"] <= ours["budget_bytes"]
    assert ours["swap"]["phase"] == "Stable" and ours["swap"]["stable_steps"] >= 10
    assert theirs["held_bytes"] < 0.1 * plain_run["held_bytes"]
    assert len({tuple(record["losses"]) for record in data["points"] if record is not ours}) == 1
    assert str(Path.home()) not in json.dumps(data["points"])  # commands name no folder of a machine
    assert "--out OUT" in data["command"] and "--known KNOWN" in data["command"]
    assert str(folder) not in data["command"]
    (kept,) = (folder / "traces").iterdir()
    assert kept.name == "A-adaptive-0.81-rank0.json.gz"
    trace = StepTrace.from_json(gzip.decompress(kept.read_bytes()).decode())
    assert max(point.peak_bytes for point in trace.points) == ours["peak_bytes"]["forward_backward"]
    # A second call has nothing left to do.
    assert call(folder, "--minutes", "8", "--part", "two") == 0
    assert not (folder / "sim-A-two.json").exists()


def test_page_of_it(folder, tmp_path):
    page = tmp_path / "docs" / "benchmarks.md"
    assert table.main(["--results", str(folder), "--device", "sim", "--out", str(page)]) == 0
    text = page.read_text()
    assert "`adaptive@0.81`" in text and "B: tiny\n\nNot run.\n" in text and "**not run**" in text
    assert (tmp_path / "docs" / "images" / "bench-sim-A.png").stat().st_size > 1000


def test_time_is_up(tmp_path, capsys):
    assert call(tmp_path, "--minutes", "0") == 1
    assert "time is up" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_what_is_not_installed_is_skipped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torchtune_offload, "folder", lambda package: None)
    args = ["--device", "sim", "--workload", "A", "--out", str(tmp_path), "--references", "", "--points", "torchtune*"]
    assert run.main(args) == 0
    assert "torchtune: skipped: install torchtune 0.6.1" in capsys.readouterr().out and not list(tmp_path.iterdir())


TORCHRUN = """E1129 09:44:34.243000 642 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================"""


@pytest.mark.parametrize("said, why", [
    ("Traceback\n[rank1]: AssertionError: CUDA_DEVICE_MAX_CONNECTIONS\nW warning of rank 0\n" + TORCHRUN,
     "[rank1]: AssertionError: CUDA_DEVICE_MAX_CONNECTIONS"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried\nRuntimeError: NCCL\n" + TORCHRUN,
     "torch.OutOfMemoryError: CUDA out of memory. Tried"),
    ("pretrain_gpt.py: error: no such flag\nwarning: destroy_process_group() was not called",
     "pretrain_gpt.py: error: no such flag"),
    ("", ""),
])  # fmt: skip
def test_why_a_run_failed(said, why):
    assert training.why_it_failed(training.said_by_ranks(said)) == why


def test_a_log_says_nothing_of_where_things_are_on_this_machine():
    installed = next(place for place in sys.path if place.endswith("site-packages"))
    root = BENCH.resolve().parents[1]
    said = f'File "{root}/scripts/measure.py", line 80\nFile "{installed}/megatron/training/training.py", line 3856\n'
    assert training.without_places(said) == (
        'File "scripts/measure.py", line 80\nFile "megatron/training/training.py", line 3856\n'
    )


def test_rounds_begin_elsewhere(tmp_path):
    machine = run.describe("sim")["id"]
    write(tmp_path, [plain("A", machine=machine), record("A", "adaptive@0.81", 1.0), record("A", "save_on_cpu", 1.0)],
          device="sim")  # fmt: skip
    args = ["--device", "sim", "--workload", "A", "--out", str(tmp_path), "--points", POINTS]
    for rounds, expected in (("1", None), ("2", "save_on_cpu")):
        call_ = run.Call(run.parse([*args, "--references", "plain", "--rounds", rounds]), run.workload("A", "sim"))
        job = call_.next_job()
        assert (job.point.name if job else None) == expected


def test_seeds_tables_of_nothing(tmp_path, capsys):
    assert seed_tables.main(["--results", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 0
    rows = [line for line in (tmp_path / "page.md").read_text().split("\n") if line.startswith("| adaptive")]
    assert len(rows) == (4 * 3 + 2) + (4 * 2 + 2) and all("not run" in row for row in rows)


def test_seeds_tables_are_run_one_point_after_the_other_into_one_file(tmp_path, monkeypatch, capsys):
    class Trained:
        def __init__(self, job, device, machine):
            self.job, self.machine = job, machine

        def finish(self, left):
            return record(self.job.workload.name, self.job.point.name, 100.0, machine=self.machine)

        def drop(self):
            pass

    monkeypatch.setattr(run, "Run", Trained)
    out = tmp_path / "results"
    assert seed_tables.main(["--run", "1", "--device", "sim", "--out", str(out)]) == 0
    (path,) = out.iterdir()
    points = [(each["workload"], each["point"]) for each in json.loads(path.read_text())["points"]]
    assert len(set(points)) == len(points) > 3
    told = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if " ms, peak " in line]
    assert told == [point for _, point in points]


def test_host_times(tmp_path):
    command = [sys.executable, str(BENCH / "host_overhead.py"), "--device", "sim", "--tensors", "40"]
    subprocess.run([*command, "--out", str(tmp_path)], check=True, timeout=300, capture_output=True)
    found = json.loads((tmp_path / "sim-host_overhead.json").read_text())["host_overhead"]
    assert found["tensors"] == 40 and found["swapped_tensors"] > 20
    assert found["kept_us"] > 0 and found["swapped_us"] > 0 and found["moved_bytes"] > 0
