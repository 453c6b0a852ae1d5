"""Custom operators: named in the trace, their tensors protected while they run; from C++ built as MindSpeed's
documentation builds them, and from Python."""
from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from swapping import capacity, new_manager, new_trace

import mindspeed_swap
from mindspeed_swap import cli, hooks
from mindspeed_swap.core.oom_guard import OomGuard
from mindspeed_swap.core.saved_tensor import State
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.errors import SettingError
from mindspeed_swap.sim import device
from mindspeed_swap.units import MIB

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def extensions(tmp_path_factory) -> Path:
    """TORCH_EXTENSIONS_DIR with the library and the operators in it, built by the lines of the documentation."""
    root = tmp_path_factory.mktemp("extensions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(root))
        patch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        assert cli.main(["build-hooks"]) == 0
        root_extensions_dir = os.environ.get("TORCH_EXTENSIONS_DIR")
        flags = ["-L" + f"{root_extensions_dir}/smart_swap/", "-lsmart_swap"]
        _build(root, flags)
    return root


def _build(root: Path, flags: list[str]) -> None:
    folder = root / "gmm"
    folder.mkdir()
    environment = os.environ | {"LD_LIBRARY_PATH": f"{root}/smart_swap/"}
    code = f"""
from torch.utils import cpp_extension
cpp_extension.load("gmm", [{str(HERE / "gmm.cpp")!r}], extra_cflags=["-O0", "-g0"], extra_ldflags={flags!r},
    extra_include_paths={mindspeed_swap.include_paths()!r}, build_directory={str(folder)!r}, with_cuda=False)
"""
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.fixture
def gmm(extensions, monkeypatch):
    """The operators. (The loader looks at LD_LIBRARY_PATH at start only, so here the library is opened first.)"""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    ctypes.CDLL(str(extensions / "smart_swap" / "libsmart_swap.so"), ctypes.RTLD_GLOBAL)
    library = next((extensions / "gmm").glob("*.so"))
    spec = importlib.util.spec_from_file_location("gmm", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    hooks.disconnect()


def running(extensions: Path) -> int:
    return ctypes.CDLL(str(extensions / "smart_swap" / "libsmart_swap.so")).mindspeed_swap_running_operators()


def recorded(manager, function) -> StepTrace:
    manager.begin_step(trace=new_trace())
    with manager.forward(0), manager.layer(1):
        function()
    return manager.end_step()[1]


# ---- in the trace
def test_an_operator_in_cpp_is_named_in_the_trace(sim, gmm, extensions):
    manager = new_manager(sim)
    hooks.connect(manager)
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    plain = x @ weight
    (y,) = gmm.npu_gmm(x, weight, 1)
    assert torch.equal(y, plain)
    trace = recorded(manager, lambda: gmm.npu_gmm(x, weight, 1))
    assert [operator.name for operator in trace.operators] == ["gmm_forward"]
    assert 0 <= trace.operators[0].start_ms <= trace.operators[0].end_ms <= trace.step_ms
    assert StepTrace.from_json(trace.to_json()).operators == trace.operators
    assert running(extensions) == 0
    hooks.disconnect()
    assert recorded(manager, lambda: gmm.npu_gmm(x, weight, 1)).operators == []  # and it still runs


def test_an_operator_in_python_is_named_in_the_trace(sim):
    manager = new_manager(sim)
    hooks.connect(manager)

    def operators() -> None:
        named = mindspeed_swap.custom_operator
        with named("outer"), named("inner", torch.ones(3), None) as op:
            op.hold(torch.ones(4))

    assert [operator.name for operator in recorded(manager, operators).operators] == ["inner", "outer"]
    hooks.disconnect()
    operators()


def test_its_name_is_in_the_chrome_trace(sim):
    from mindspeed_swap.core.plan import Plan
    from mindspeed_swap.core.step import ExecutedStep, StepStats
    from mindspeed_swap.report.chrome import chrome_trace

    manager = new_manager(sim)
    hooks.connect(manager)

    def operator() -> None:
        with mindspeed_swap.custom_operator("gmm"):
            pass

    trace = recorded(manager, operator)
    hooks.disconnect()
    events = chrome_trace(ExecutedStep(Plan("test", 0, ()), StepStats(), trace), 0, "run")["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "custom operators" in lanes and any(event["name"] == "gmm" for event in events)


@pytest.mark.parametrize("where", ["cpp", "python"])
def test_its_name_is_in_the_profiler(sim, gmm, where):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        if where == "cpp":
            gmm.npu_gmm(torch.ones(4, 4), torch.ones(4, 4), 1)
        else:
            with mindspeed_swap.custom_operator("gmm_forward"):
                pass
    assert "mindspeed_swap: operator gmm_forward" in {event.key for event in profile.key_averages()}


# ---- protected
def pressed(sim, run) -> list[State]:
    """Three tensors are saved and nobody else has them but ``run``, who has the first, and runs out of memory."""
    manager = new_manager(sim)
    guard = OomGuard(manager)
    hooks.connect(manager)
    manager.begin_step()
    tensors = [torch.full((MIB,), number, dtype=torch.uint8) for number in range(3)]
    with manager.forward(0):
        handles = [manager._pack(tensor) for tensor in tensors]
        given = tensors[:1]
        tensors.clear()
        with capacity(device.memory_allocated()):
            run(given)
    states = [handle.saved.state for handle in handles]
    for number, handle in enumerate(handles):
        assert bool((manager.unpack(handle) == number).all())
    guard.close()
    hooks.disconnect()
    return states


def in_python(protect: bool, given: list[torch.Tensor]) -> None:
    with mindspeed_swap.custom_operator("by_address", *(given if protect else ())):
        given.clear()
        torch.empty(MIB, dtype=torch.uint8)


@pytest.mark.parametrize("where", ["cpp", "python"])
@pytest.mark.parametrize("protect", [True, False])
def test_out_of_memory_inside_evicts_others(sim, gmm, where, protect):
    """What was saved first would go first: with the hooks it stays while its operator runs, without them it goes."""

    def run(given: list[torch.Tensor]) -> None:
        gmm.by_address(given, protect, MIB) if where == "cpp" else in_python(protect, given)

    states = pressed(sim, run)
    assert states == ([State.DEVICE, State.HOST, State.DEVICE] if protect else [State.HOST, State.DEVICE, State.DEVICE])


def test_afterwards_it_may_go(sim):
    manager = new_manager(sim)
    manager.begin_step()
    with manager.forward(0):
        tensors = [torch.full((MIB,), 7, dtype=torch.uint8)]
        handle = manager._pack(tensors[0])
        with mindspeed_swap.custom_operator("op", tensors.pop()):
            assert manager.evict(1) == 0
        assert manager.evict(1) == MIB and handle.saved.state is State.HOST


# ---- errors
def test_a_guard_ends_an_operator_that_throws(gmm, extensions, sim):
    manager = new_manager(sim)
    hooks.connect(manager)

    def guarded() -> None:
        with pytest.raises(RuntimeError, match="inside"):
            gmm.fails_inside(True)

    assert [operator.name for operator in recorded(manager, guarded).operators] == ["fails"]
    assert running(extensions) == 0


def test_a_hook_out_of_place_is_an_error(gmm):
    with pytest.raises(RuntimeError, match="TensorHook of NPUSwapManager outside BeginHook and EndHook"):
        gmm.out_of_place()


def test_without_the_variable_it_says_what_to_set(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert cli.main(["build-hooks"]) == 2
    assert "export TORCH_EXTENSIONS_DIR=" in capsys.readouterr().err
    with pytest.raises(SettingError, match="TORCH_EXTENSIONS_DIR is not set"):
        mindspeed_swap.library_paths()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(SettingError, match="mindspeed-swap build-hooks"):
        mindspeed_swap.library_paths()


def test_paths(extensions, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    assert (Path(mindspeed_swap.include_paths()[0]) / "NPUSwapManager.h").is_file()
    assert mindspeed_swap.library_paths() == [f"{extensions}/smart_swap"]


def test_a_compiler_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SettingError, match="no-such-compiler was not found"):
        hooks.build_hooks()


def test_the_exports_of_the_documentation_are_enough(extensions):
    """A fresh process with them, and nothing opened by hand."""
    library = next((extensions / "gmm").glob("*.so"))
    code = f"""
import torch, importlib.util
spec = importlib.util.spec_from_file_location("gmm", {str(library)!r})
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
assert torch.equal(module.npu_gmm(torch.eye(3), torch.ones(3, 3), 1)[0], torch.ones(3, 3))
"""
    exports = {"TORCH_EXTENSIONS_DIR": f"{extensions}/", "LD_LIBRARY_PATH": f"{extensions}/smart_swap/:"}
    subprocess.run([sys.executable, "-c", code], env=os.environ | exports, check=True, timeout=120)
