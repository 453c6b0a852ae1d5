"""PP 2 x VPP 2: 4 microbatches, then 8, evaluations in between. Each number is planned for by itself."""
from layout_runs import Trainer, faults
from layouts import LAYOUTS


def test_case_18_interleaved_with_rampup_and_evaluation(trainer: Trainer):
    layout = LAYOUTS["vpp_rampup"]
    plain, swapped = trainer.plain(layout, layout.dtype), trainer.swapped(layout, layout.dtype)
    assert faults(trainer, layout, layout.dtype, plain, swapped) == []
    assert "smart-swap: 8 microbatches from step 6 on: planned anew" in swapped.output
    assert "validation loss at iteration 5 " in swapped.output


def test_case_18_three_numbers_on_one_rank(trainer: Trainer):
    layout = LAYOUTS["rampup"]
    plain, swapped = trainer.plain(layout, layout.dtype), trainer.swapped(layout, layout.dtype)
    assert faults(trainer, layout, layout.dtype, plain, swapped) == []
    for text in ("2 microbatches from step 4 on", "3 microbatches from step 6 on"):
        assert f"smart-swap: {text}: planned anew" in swapped.output


def test_case_18_every_stage_says_what_it_does(trainer: Trainer):
    layout = LAYOUTS["vpp_rampup"]
    output = trainer.swapped(layout, layout.dtype).output
    for rank in (0, 1):
        assert f"[mindspeed_swap rank {rank}] smart-swap: WarmUp -> SearchPolicy at step 2" in output
