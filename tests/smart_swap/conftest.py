"""Plans of these tests need not be the best there are: what is tested is what is made of them."""
from __future__ import annotations

import pytest
from layout_runs import Trainer, prepare_text

from mindspeed_swap.core import attempt


@pytest.fixture(autouse=True)
def _quick_plans(monkeypatch):
    monkeypatch.setattr(attempt, "SEARCH_WORK", 3000)


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """What one test trained, another looks at."""
    folder = tmp_path_factory.mktemp("training")
    return Trainer(folder, prepare_text(folder / "text"))
