"""However a run ends, no host memory stays registered and no thread of ours runs on."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("megatron.training")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# Registered before our own handler is, so it runs after it. The simulated device's own end comes later still.
WATCH = textwrap.dedent(
    """
    import atexit, os, sys
    import mindspeed_swap.megatron_adaptor
    from mindspeed_swap.sim import device
    def report():
        stats = device.stats()
        print("LEFT", stats["registered_bytes"], stats["pending_copies"], flush=True)
    atexit.register(report)
    from mindspeed_swap import runtime
    stop = runtime.stop
    def stop_seen():
        print("HELD", device.stats()["registered_bytes"], flush=True)
        stop()
    runtime.stop = stop_seen
    sys.path.insert(0, os.environ["SCRIPTS"])
    sys.argv[0] = os.path.join(os.environ["SCRIPTS"], "pretrain_gpt.py")
    import runpy
    runpy.run_path(sys.argv[0], run_name="__main__")
    """
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_training_gives_everything_back(number, tmp_path):
    watch, script = tmp_path / "watch.py", SCRIPTS / "pretrain_gpt_sim.sh"
    watch.write_text(WATCH)
    env = dict(os.environ, PROGRAM=str(watch), SCRIPTS=str(SCRIPTS), PYTHON=sys.executable, PYTHONUNBUFFERED="1")
    env.update(LAYERS="4", HIDDEN="64", SEQ="256", MBS="2", GBS="4", ITERS="100000", DATA="mock")
    env["MINDSPEED_SWAP_DEVICE_CAPACITY"] = "17MiB"
    process = subprocess.Popen(
        ["bash", str(script), "--smart-swap"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.append(line)
            if "-> Stable" in line or "iteration       20/" in line:
                process.send_signal(number)
                break
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    output = "".join(lines) + rest
    held = int(output.split("HELD ")[1].split()[0])
    assert held > 0, "nothing was registered when the signal came: the test shows nothing"
    assert "LEFT 0 0" in output, output[-3000:]
    assert process.returncode in (128 + number, -number), output[-3000:]
