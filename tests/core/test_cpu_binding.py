"""The process runs on the cores next to its device, or says why not."""
from __future__ import annotations

import os

import pytest

from mindspeed_swap.core.accelerator import cpu_binding
from mindspeed_swap.core.accelerator.cpu_binding import bind_cpu


def test_cpu_binding_never_stops_training(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bind_cpu("npu", 0) == "CPU binding skipped: `npu-smi` not found: it comes with the driver; put it on PATH"
    assert bind_cpu("cuda", 0).startswith("CPU binding skipped: ")
    bound = []
    monkeypatch.setattr(cpu_binding, "_cuda_address", lambda index: "0000:1b:00.0")
    monkeypatch.setattr(cpu_binding, "SYSFS", tmp_path)
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: bound.append(cores))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 9})
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text("0-2,9\n")
    assert bind_cpu("cuda", 0) == "bound to the 4 cores next to the device (0-2,9)"
    assert bound == [{0, 1, 2, 9}]
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text("64-127\n")
    assert bind_cpu("cuda", 0).startswith("CPU binding skipped: none of the cores 64-127")


@pytest.mark.parametrize(
    ("told", "address"),
    [("NPU ID : 0\nPCIe Bus Info : 0000:C1:00.0\n", "0000:c1:00.0"), ("NPU ID : 0\n", None)],
)
def test_the_driver_s_tool_tells_where_an_npu_is(monkeypatch, tmp_path, told, address):
    tool = tmp_path / "npu-smi"
    tool.write_text(f"#!/bin/sh\nprintf '%b' '{told.encode('unicode_escape').decode()}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(cpu_binding, "SYSFS", tmp_path)
    if address is None:
        assert bind_cpu("npu", 0) == "CPU binding skipped: `npu-smi info -t board -i 0` names no PCI address"
        return
    (tmp_path / address).mkdir()
    core = min(os.sched_getaffinity(0))
    (tmp_path / address / "local_cpulist").write_text(f"{core}\n")
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    assert bind_cpu("npu", 0) == f"bound to the 1 cores next to the device ({core})"
