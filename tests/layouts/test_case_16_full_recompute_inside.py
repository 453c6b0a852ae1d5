"""The first layers are recomputed as a whole (block method), the others are swapped."""
from layout_runs import Trainer, faults
from layouts import LAYOUTS


def test_case_16_block_method(trainer: Trainer):
    layout = LAYOUTS["recompute_block"]
    plain, swapped = trainer.plain(layout, layout.dtype), trainer.swapped(layout, layout.dtype)
    assert faults(trainer, layout, layout.dtype, plain, swapped) == []
