"""DP 2 with overlapped gradient reduction and a stand-in for the fused kernel: under hooks backward gets no Parameter,
and Megatron dies ("param.grad being None is not safe ...") unless it is given it."""
from layout_runs import Trainer, faults
from layouts import LAYOUTS


def test_case_38_fusion_with_overlapped_reduction(trainer: Trainer):
    layout = LAYOUTS["fusion"]
    assert {"GRADIENT_FUSION": "1"}.items() <= layout.settings.items() and "--overlap-grad-reduce" in layout.flags
    plain, swapped = trainer.plain(layout, layout.dtype), trainer.swapped(layout, layout.dtype)
    assert faults(trainer, layout, layout.dtype, plain, swapped) == []
