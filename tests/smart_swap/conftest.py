"""Plans of these tests need not be the best there are: what is tested is what is made of them."""
from __future__ import annotations

import pytest

from mindspeed_swap.core import attempt


@pytest.fixture(autouse=True)
def _quick_plans(monkeypatch):
    monkeypatch.setattr(attempt, "SEARCH_WORK", 3000)
