"""Fixtures of the tests of swap configurations."""
from __future__ import annotations

import pytest


@pytest.fixture
def written(tmp_path):
    """Text or bytes -> path of a file."""

    def write(text: str | bytes) -> str:
        path = tmp_path / "swap.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write
