"""What is written, and what the reader says of directories that are damaged, foreign, of two runs, or incomplete."""
import errno
import json
import os

import pytest

from mindspeed_swap.errors import SettingError
from mindspeed_swap.report.reader import SUMMARY_VERSION, read


def test_what_was_written_can_be_read(write_run):
    files = read(str(write_run(ranks=2)))
    assert files.run_id == "run-1" and not files.problems
    assert [rank.rank for rank in files.ranks] == [0, 1]
    for rank in files.ranks:
        assert rank.summary["version"] == SUMMARY_VERSION and rank.summary["world_size"] == 2
        assert rank.summary["phase"] == "Stable" and rank.step["layers"] and rank.events("X") and rank.events("C")
        assert rank.summary["versions"]["torch"] and rank.summary["layout"] == {"num_layers": 4}


def test_not_a_directory(tmp_path):
    with pytest.raises(SettingError, match="is no directory"):
        read(str(tmp_path / "nothing"))


def test_empty_or_foreign(tmp_path):
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rankings").mkdir()
    (tmp_path / "rank0" / "model.pt").write_text("")
    with pytest.raises(SettingError, match=r"no rank<N>/summary\.json in it"):
        read(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "damaged or not ours"),
        ('{"version": 3', "damaged or not ours"),
        ("[1, 2]", "version None"),
        ('{"version": 1}', f"version 1, this release reads version {SUMMARY_VERSION}"),
        ('{"version": 3, "rank": 0}', "'run_id' is missing"),
        (b"\xff\xfe\x00", "damaged or not ours"),
    ],
)
def test_damaged_summary(tmp_path, content, told):
    (tmp_path / "rank0").mkdir()
    file = tmp_path / "rank0" / "summary.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingError, match=told) as error:
        read(str(tmp_path))
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    "path",
    ["host.budget_bytes", "step.step_ms.measured", "step.phases.forward.peak_allocated_bytes.measured", "step.layers"],
)
def test_a_figure_of_the_wrong_type_is_named(write_run, path):
    def change(name, data):
        if name == "summary.json":
            *folders, last = path.split(".")
            for folder in folders:
                data = data[folder]
            data[last] = "many"

    with pytest.raises(SettingError, match="damaged or not ours"):
        read(str(write_run(change=change)))


def test_two_runs_in_one_directory(write_run):
    write_run(ranks=4, run_id="older")
    directory = str(write_run(ranks=2, run_id="newer"))
    told = r"files of 2 runs \(newer: ranks 0, 1; older: ranks 2, 3\): choose one with --run"
    with pytest.raises(SettingError, match=told):
        read(directory)
    assert [rank.rank for rank in read(directory, "newer").ranks] == [0, 1]
    assert read(directory, "older").problems == ["no summary.json of rank 0, 1: 2 of 4 ranks are shown"]
    with pytest.raises(SettingError, match="holds newer, older"):
        read(directory, "third")


def test_a_rank_is_missing(write_run):
    files = read(str(write_run(ranks=4, only=(0, 1, 3))))
    assert files.problems == ["no summary.json of rank 2: 3 of 4 ranks are shown"]


def test_a_file_of_another_rank(write_run):
    directory = write_run(ranks=2)
    os.rename(directory / "rank1", directory / "rank7")
    with pytest.raises(SettingError, match="is of rank 1: copied by hand"):
        read(str(directory))


@pytest.mark.parametrize("how", ["gone", "damaged", "other run", "foreign"])
def test_without_its_trace_a_rank_is_still_shown(write_run, how):
    directory = write_run()
    file = directory / "rank0" / "trace.json"
    if how == "gone":
        file.unlink()
    elif how == "damaged":
        file.write_text(file.read_text()[:-40])
    else:
        data = json.loads(file.read_text())
        if how == "foreign":
            data["traceEvents"].append({"ph": "X", "name": "op"})
        data["otherData"]["run_id"] = "another" if how == "other run" else "run-1"
        file.write_text(json.dumps(data))
    files = read(str(directory))
    assert files.ranks[0].trace is None and files.ranks[0].step
    (problem,) = files.problems
    assert str(file) in problem and "no pictures over time for this rank" in problem


def test_a_full_disk_is_said_and_stops_nothing(write_run, monkeypatch, capsys):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.replace", full)
    directory = write_run()
    assert not list(directory.rglob("*.*")), "half a file would only fill the disk"
    said = capsys.readouterr().out
    assert said.count("report not written, training goes on: [Errno 28]") == 1, "said once, not for each file"


def test_a_directory_that_cannot_be(write_run, tmp_path, capsys):
    (tmp_path / "run").write_text("a file")
    write_run()
    assert "report not written" in capsys.readouterr().out
