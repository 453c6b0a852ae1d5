"""What the runtime measures at start, before there is a step."""
from __future__ import annotations

import pytest

from mindspeed_swap.core.accelerator.sim import SimAccelerator
from mindspeed_swap.core.link import GBPS
from mindspeed_swap.options import Options
from mindspeed_swap.runtime import Runtime
from mindspeed_swap.sim import device
from mindspeed_swap.smart_swap.policy import Policy
from mindspeed_swap.units import MIB


@pytest.mark.parametrize(("slot_gbps", "warns"), [(64.0, True), (0.01, False), (None, False)])
def test_a_link_far_below_its_slot_is_said(monkeypatch, capsys, slot_gbps, warns):
    monkeypatch.setenv("MINDSPEED_SWAP_DEVICE", "sim")
    device.install(8 << 30)
    device.set_link(2.0, 2.0)
    limit = None if slot_gbps is None else slot_gbps * GBPS
    monkeypatch.setattr(SimAccelerator, "link_limit_bytes_per_ms", lambda self: limit)
    runtime = Runtime(Options(True, None, None, "model=test", policy=Policy()), 256 * MIB)
    try:
        assert (f"of the {slot_gbps} GB/s that its PCIe slot has" in capsys.readouterr().out) == warns
    finally:
        runtime.close()
        device.extension().set_pressure_handler(None)
        device.extension().shutdown()
