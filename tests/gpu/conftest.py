"""Everything in this folder needs a GPU. (A test that does with a stand-in for the driver belongs elsewhere.)"""
from pathlib import Path

import pytest

HERE = Path(__file__).parent


# Before the one beside tests/, which skips what is marked.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
