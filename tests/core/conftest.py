"""What the tests of the core share."""
import pytest
from simulated import fresh_sim, late_writes, sim  # noqa: F401

from mindspeed_swap.core.swap_manager import SwapManager


@pytest.fixture(params=[False, True], ids=["", "light"])
def light_or_not(request, monkeypatch):
    """Each test twice, its steps as in training and not."""
    change = SwapManager.change_plan

    def with_default(self, plan, *, light=request.param, **how):
        change(self, plan, light=light, **how)

    monkeypatch.setattr(SwapManager, "change_plan", with_default)
