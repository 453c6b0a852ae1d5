"""Dropout, recompute and swap together: the recompute draws what the forward drew."""
from layout_runs import Trainer, faults
from layouts import LAYOUTS


def test_case_20_dropout_recompute_and_swap(trainer: Trainer):
    layout = LAYOUTS["dropout"]
    plain, swapped = trainer.plain(layout, layout.dtype), trainer.swapped(layout, layout.dtype)
    assert faults(trainer, layout, layout.dtype, plain, swapped) == []
    undropped = trainer.plain(LAYOUTS["one"], layout.dtype)
    assert plain.measured[0]["steps"][-1]["loss"] != undropped.measured[0]["steps"][-1]["loss"]
