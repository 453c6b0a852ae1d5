"""A reentrant checkpoint hides from hooks what its layer saves, but not the input of the layer."""
from layout_runs import Trainer
from layouts import LAYOUTS


def test_case_17_in_megatron(trainer: Trainer):
    """Every layer is recomputed: all there is to swap are the inputs of the layers."""
    layout = LAYOUTS["recompute_uniform"]
    swapped = trainer.swapped(layout, layout.dtype)
    assert swapped.summaries[0]["plan"]["swap_bytes"] > 0
    assert swapped.digests() == trainer.plain(layout, layout.dtype).digests()
