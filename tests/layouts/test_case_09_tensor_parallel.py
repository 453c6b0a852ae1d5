"""Copy streams beside the all-reduces of tensor parallel in backward made losses worse."""
from layout_runs import Trainer, faults
from layouts import LAYOUTS


def test_case_09_all_reduce_in_backward(trainer: Trainer):
    """Without sequence parallel: its layouts reduce and scatter instead."""
    layout = LAYOUTS["tp"]
    plain, swapped = trainer.plain(layout, layout.dtype), trainer.swapped(layout, layout.dtype)
    assert faults(trainer, layout, layout.dtype, plain, swapped) == []
