"""Runs the tests in ``lane`` without an NPU: the real torch_npu, in an environment that scripts/ascend_env.sh makes,
over the runtime of ``fake_cann``.

Shows the allocator and its hook, streams, events and copies, pinned and swapped memory, and elementwise kernels in the
order of their streams. Not shown: an NPU's own kernels, formats, driver, links and speed (docs/ascend.md).
"""
from __future__ import annotations

import pytest
from ascend import run


# With torch_npu's task queue, its default, a thread of torch_npu calls the runtime; without it the caller does.
@pytest.mark.parametrize(
    ("task_queue", "tests"), [("1", [""]), ("0", ["test_races.py", "test_pack.py"])], ids=["all", "without task queue"]
)
def test_the_lane(lane_python, fake_runtime, task_queue, tests):
    paths = [f"tests/ascend/lane/{name}" for name in tests]
    arguments = ("-W", "ignore", "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", *paths)
    done = run(lane_python, fake_runtime, *arguments, TASK_QUEUE_ENABLE=task_queue)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
    print(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_torch_npu_without_cann_is_one_clear_message(lane_python, autoload):
    """Where torch loads torch_npu by itself, ``import torch`` fails first; then the command says it all the same."""
    arguments = ("-m", "mindspeed_swap", "selftest", "--device", "npu")
    done = run(lane_python, None, *arguments, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    for part in ("torch_npu cannot be loaded", "libhccl.so", "CANN 8.1.RC1", "torch_npu 2.13.0", "no CANN"):
        assert part in done.stderr, done.stderr


def test_selftest_on_the_fake_runtime(lane_python, fake_runtime):
    arguments = ("-m", "mindspeed_swap", "selftest", "--device", "npu")
    done = run(lane_python, fake_runtime, *arguments, MINDSPEED_SWAP_DEVICE_CAPACITY="96MiB")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "PASS: all 4 checks" in done.stdout and "caught in the allocator" in done.stdout


def test_an_adaptor_without_cann_is_one_clear_message(lane_python):
    done = run(lane_python, None, "-c", "import mindspeed_swap.megatron_adaptor")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("mindspeed_swap.errors.SettingError: torch_npu cannot be loaded") and "CANN 8.1.RC1" in last
