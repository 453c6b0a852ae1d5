"""One trainer for the whole session: what one test trained, another looks at."""
from __future__ import annotations

import pytest
from layout_runs import Trainer, prepare_text


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("layouts")
    return Trainer(folder, prepare_text(folder / "text"))
