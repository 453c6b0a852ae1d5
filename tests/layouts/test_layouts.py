"""Each layout, capped halfway between its floor and its peak on every rank, against the same run without a cap."""
from __future__ import annotations

import pytest
from layout_runs import Trainer, faults
from layouts import LAYOUTS

DTYPES = ("bf16", "fp32")
# Run by default, beside those that the cases here train; the others take too long for every run: --full.
DEFAULT = ("one", "tp_sp", "ep")

pytest.importorskip("megatron.training")


def _default() -> set[tuple[str, str]]:
    return {(name, LAYOUTS[name].dtype) for name in DEFAULT}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in _default() else pytest.mark.full)
        for name in LAYOUTS
        for dtype in DTYPES
    ],
)
def test_capped_with_the_same_bits(trainer: Trainer, name: str, dtype: str) -> None:
    """sha256 of parameters, gradients and optimizer state; peak within the cap; a quarter of the held bytes gone; no
    load on demand once Stable."""
    layout = LAYOUTS[name]
    assert faults(trainer, layout, dtype, trainer.plain(layout, dtype), trainer.swapped(layout, dtype)) == []
