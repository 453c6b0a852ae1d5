"""What the experts save varies from batch to batch."""
from layout_runs import Trainer, faults
from layouts import LAYOUTS


def test_case_30_in_megatron(trainer: Trainer):
    layout = LAYOUTS["ep"]
    plain, swapped = trainer.plain(layout, layout.dtype), trainer.swapped(layout, layout.dtype)
    assert faults(trainer, layout, layout.dtype, plain, swapped) == []
