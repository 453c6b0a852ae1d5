"""What the one import line does, and what it does not. Each in a fresh interpreter."""
from __future__ import annotations

import ast
import os
import subprocess
import textwrap

import pytest
from warm_python import python

pytest.importorskip("megatron.training")


def run(code: str, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MINDSPEED_SWAP")}
    return subprocess.run(
        [python(), "-c", textwrap.dedent(code), *argv],
        env={**clean, "PYTHONWARNINGS": "ignore", **env}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def check(code: str, *argv: str, **env: str) -> str:
    done = run(code, *argv, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SNAPSHOT = """
    import sys, threading, torch
    import megatron.training.training, megatron.training.initialize, megatron.core.pipeline_parallel.schedules

    def snapshot():
        seen = {}
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("megatron"):
                for name, value in list(vars(module).items()):
                    seen[module_name, name] = value
                    if isinstance(value, type) and value.__module__ == module_name:
                        seen.update({(module_name, name, k): v for k, v in list(vars(value).items())})
        return seen
"""


def test_importing_wraps_the_argument_parser_and_nothing_else():
    out = check(
        SNAPSHOT
        + """
    before, modules = snapshot(), set(sys.modules)
    import mindspeed_swap.megatron_adaptor
    after = snapshot()
    print(sorted({key[-1] for key in before if after[key] is not before[key]}))
    print(threading.active_count(), torch.cuda.is_initialized())
    print(sorted(m for m in set(sys.modules) - modules if not m.startswith("importlib")))
    """
    )
    lines = out.splitlines()
    assert lines[:2] == ["['add_megatron_arguments', 'parse_args', 'validate_args']", "1 False"]
    # no torch extension, no runtime, nothing of the core that a feature would need
    loaded = ast.literal_eval(lines[2])
    assert {name.split(".")[1] for name in loaded if "." in name} <= {
        "core", "errors", "fine_grained", "fingerprint", "hooks", "log", "megatron_adaptor", "npu_versions", "options",
        "patches", "smart_swap", "units", "version", "virtual_optimizer",
    }
    # Of the core only what plans.
    assert not [name for name in loaded if name.endswith((".swap_manager", ".host_pool", ".accelerator", ".oom_guard"))]
    assert not [name for name in loaded if name.endswith((".search", ".virtual_optimizer.virtual_optimizer"))]


def test_case_26_torch_tensor_is_untouched():
    check(
        """
        import torch
        import megatron.training.training  # Megatron itself replaces torch.manual_seed
        names = [n for n in dir(torch.Tensor)]
        before = {n: getattr(torch.Tensor, n) for n in names}, {n: getattr(torch, n) for n in dir(torch)}
        torch.cuda.device_count = lambda: 1
        import mindspeed_swap.megatron_adaptor as adaptor
        from mindspeed_swap.options import Options
        adaptor.activate(Options(True, None, None, "m"))
        assert all(getattr(torch.Tensor, n) is v or getattr(torch.Tensor, n) == v for n, v in before[0].items())
        assert [n for n in dir(torch.Tensor) if n not in before[0]] == []
        assert all(getattr(torch, n) is v for n, v in before[1].items())
        x = torch.zeros(3)
        assert x.copy_(torch.ones(3)) is x
        """,
        MINDSPEED_SWAP_DEVICE="cuda",
    )


def test_flags_appear_in_the_help_of_any_megatron_script():
    out = check(
        """
        import mindspeed_swap.megatron_adaptor
        from megatron.training.arguments import parse_args
        parse_args()
        """,
        "--help",
    )
    section = out[out.index("mindspeed_swap:") :]
    for flag in ("--smart-swap", "--swap-host-memory GB", "--swap-report-dir DIR"):
        assert flag in section


@pytest.mark.parametrize("given", ["", "--swap-report-dir", "--swap-report-dir and --swap-host-memory"])
def test_a_setting_of_features_that_are_all_off_is_told(given):
    words = {"--swap-report-dir": "reports", "--swap-host-memory": "1"}
    out = check(
        """
        import mindspeed_swap.megatron_adaptor
        from megatron.training.arguments import parse_args
        from mindspeed_swap.patches import arguments
        arguments.activate(parse_args())
        """,
        *(word for flag, value in words.items() if flag in given for word in (flag, value)),
    )
    told = f"[mindspeed_swap] {given} without --smart-swap, --adaptive-memory-optimization, --swap-config, " + (
        "--virtual-optimizer: nothing changes\n"
    )
    assert out == (told if given else "")


def test_activating_installs_the_rest_and_remove_undoes_all():
    out = check(
        SNAPSHOT
        + """
    before = snapshot()
    torch.cuda.device_count = lambda: 1
    import mindspeed_swap.megatron_adaptor as adaptor
    from mindspeed_swap.options import Options
    adaptor.activate(Options(True, None, None, "m"))
    adaptor.activate(Options(True, None, None, "m"))
    during = snapshot()
    print(sorted({key[-1] for key in before if during[key] is not before[key]}))
    adaptor.remove()
    after = snapshot()
    print([key for key in before if after[key] is not before[key]], threading.active_count())
    """,
        MINDSPEED_SWAP_DEVICE="cuda",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False",
    )
    lines = out.splitlines()
    assert lines[0].startswith("[mindspeed_swap] host memory: 1 rank x ")
    patched = (
        "_maybe_dtoh_and_synchronize backward checkpoint forward forward_step maybe_move_tensor_to_cpu step train_step"
    )
    assert lines[1] == str(sorted([*patched.split(), "add_megatron_arguments", "parse_args", "validate_args"]))
    assert lines[2] == "[] 1"


def test_arguments_parsed_before_the_adaptor_is_an_error():
    done = run(
        """
        import megatron.training.global_vars as g
        g._GLOBAL_ARGS = object()
        import mindspeed_swap.megatron_adaptor
        """
    )
    assert done.returncode != 0
    assert "make it the first line of the training script" in done.stderr.splitlines()[-1]


def test_megatron_imported_before_the_simulated_device_is_an_error():
    done = run(
        """
        import megatron.core
        import mindspeed_swap.megatron_adaptor
        """,
        MINDSPEED_SWAP_DEVICE="sim",
    )
    assert done.returncode != 0
    assert "SettingError" in done.stderr.splitlines()[-1]
    assert "first line" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--swap-host-memory", "much"], "argument --swap-host-memory: 'much': expected a number of GB"),
        (["--swap-host-memory", "-1"], "argument --swap-host-memory: '-1': expected a number of GB"),
        (["--swap-host-memory", "nan"], "argument --swap-host-memory: 'nan': expected a number of GB"),
    ],
)
def test_a_bad_value_names_the_flag(argv, message):
    done = run(
        """
        import mindspeed_swap.megatron_adaptor
        from megatron.training.arguments import parse_args
        parse_args()
        """,
        "--smart-swap", *argv,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


def test_more_host_memory_than_the_node_has_is_an_error_before_anything_is_allocated():
    done = run(
        """
        import torch
        torch.cuda.device_count = lambda: 1
        import mindspeed_swap.megatron_adaptor as adaptor
        from mindspeed_swap.options import Options
        adaptor.activate(Options(True, 1e9, None, "m"))
        """,
        MINDSPEED_SWAP_DEVICE="cuda",
    )
    assert done.returncode != 0
    assert "--swap-host-memory" in done.stderr.splitlines()[-1]


def test_a_device_that_does_not_exist_is_an_error():
    done = run(
        """
        import mindspeed_swap.megatron_adaptor as adaptor
        from mindspeed_swap.options import Options
        adaptor.activate(Options(True, None, None, "m"))
        """,
        MINDSPEED_SWAP_DEVICE="tpu",
    )
    assert done.returncode != 0
    assert "MINDSPEED_SWAP_DEVICE='tpu': expected one of auto, cuda, npu, sim" in done.stderr.splitlines()[-1]


def test_no_device_at_all_is_an_error_that_says_how_to_simulate_one():
    done = run(
        """
        import torch
        torch.cuda.device_count = lambda: 0
        import mindspeed_swap.megatron_adaptor as adaptor
        from mindspeed_swap.options import Options
        adaptor.activate(Options(True, None, None, "m"))
        """
    )
    assert done.returncode != 0
    assert "MINDSPEED_SWAP_DEVICE=sim" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "variable, value, message",
    [
        ("DEVICE", "cuda", "MINDSPEED_SWAP_DEVICE=cuda: no CUDA device"),
        ("DEVICE", "npu", "torch_npu cannot be loaded (No module named 'torch_npu')"),
        ("OOM_HOOK", "no", "MINDSPEED_SWAP_OOM_HOOK='no': expected 1"),
    ],
)
def test_a_bad_environment_is_an_error_before_megatron_needs_the_device(variable, value, message):
    done = run(
        """
        import torch
        torch.cuda.device_count = lambda: 0
        from mindspeed_swap.core.accelerator import prepare_device
        prepare_device("--smart-swap")
        """,
        **{f"MINDSPEED_SWAP_{variable}": value},
    )
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]


def test_importing_again_changes_nothing():
    out = check(
        """
        import importlib
        import mindspeed_swap.megatron_adaptor as adaptor
        importlib.reload(adaptor)
        from megatron.training import arguments
        args = arguments.parse_args()
        print(args.smart_swap)
        adaptor.remove()
        print(hasattr(arguments.parse_args(), "smart_swap"))
        """
    )
    assert out.splitlines() == ["False", "False"]


@pytest.mark.parametrize("given", [[], ["--smart-swap"]])
def test_arguments_of_an_earlier_parser(given):
    """Our flags are not in them. Without one on the command line that is nobody's business."""
    done = run(
        """
        from megatron.training import arguments
        arguments.validate_args = lambda args, defaults={}: args  # not what this is about
        args = arguments.parse_args(ignore_unknown_args=True)
        import mindspeed_swap.megatron_adaptor
        arguments.validate_args(args)
        """,
        *given,
    )
    if given:
        assert "--smart-swap was not read" in done.stderr.splitlines()[-1]
        assert "first line" in done.stderr.splitlines()[-1]
    assert (done.returncode != 0) == bool(given), done.stderr


def test_a_report_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    done = run(
        """
        import sys
        from mindspeed_swap import runtime
        from mindspeed_swap.options import Options
        runtime.start(Options(True, None, sys.argv[1], "m"))
        """,
        str(file / "reports"),
        MINDSPEED_SWAP_DEVICE="sim",
    )
    assert done.returncode != 0
    assert f"--swap-report-dir {file}/reports: cannot be written to" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "host_gib, remedy",
    [
        (1.0, "the rest cannot move (floor: known only after two steps that fit): give the device"),
        (1 / 4096, "host memory (0.2 MiB) is used up: raise --swap-host-memory"),
    ],
)
def test_out_of_memory_in_spite_of_swapping_says_what_would_help(host_gib, remedy):
    out = check(
        """
        import sys, torch
        from mindspeed_swap.sim import device
        device.install()
        from mindspeed_swap import runtime
        from mindspeed_swap.options import Options
        runtime.start(Options(True, float(sys.argv[1]), None, "m"))
        model, kept = torch.nn.Linear(256, 256), []
        try:
            with runtime.get().step([model], None, 1), runtime.get().microbatch(model):
                x = torch.ones(1024, 256, requires_grad=True)
                for _ in range(20):
                    x = (x * 1.5).exp().tanh()
                    kept.append(torch.ones(1 << 18))  # the user's own, which does not move
        except torch.OutOfMemoryError:
            print("raised")
        """,
        str(host_gib),
        MINDSPEED_SWAP_DEVICE="sim",
        MINDSPEED_SWAP_DEVICE_CAPACITY="12MiB",
    )
    *_, said, raised = out.splitlines()
    assert said.startswith("[mindspeed_swap] smart-swap: out of memory in step 1, ")
    assert remedy in said
    assert raised == "raised"
