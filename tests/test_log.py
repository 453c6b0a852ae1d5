"""Which rank says what."""
import pytest

from mindspeed_swap import log


@pytest.mark.parametrize(
    ("rank", "first_of_stage", "heard"),
    [
        (0, False, ["[mindspeed_swap] a", "[mindspeed_swap] b", "[mindspeed_swap rank 0] c"]),
        (0, True, ["[mindspeed_swap] a", "[mindspeed_swap rank 0] b", "[mindspeed_swap rank 0] c"]),
        (4, True, ["[mindspeed_swap rank 4] b", "[mindspeed_swap rank 4] c"]),
        (5, False, ["[mindspeed_swap rank 5] c"]),
    ],
)
def test_one_line_of_each_pipeline_stage(monkeypatch, capsys, rank, first_of_stage, heard):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(log, "_speaks_for_stage", False)
    if first_of_stage:
        log.speak_for_stage()
    log.say("a")
    log.say("b", every_stage=True)
    log.say("c", every_rank=True)
    assert capsys.readouterr().out.splitlines() == heard
