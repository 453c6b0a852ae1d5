"""Real Megatron on the simulated device: what a setting of the policy file moves is gone from the bytes that the
allocator holds at the end of forward."""
from __future__ import annotations

import pytest
from layout_runs import Trainer
from layouts import LAYOUTS
from trained import stable_steps

pytest.importorskip("megatron.training")
pytestmark = pytest.mark.full

ONE = LAYOUTS["one"]
STAGES = int(ONE.environment(ONE.dtype)["LAYERS"]) + 1  # of one layer each, and what is saved outside the layers
FREED = 0.95  # of the bytes moved
MOVES_ALL = {"target_mode": True, "target_memory": 0}
SMALL, LARGE = 700_000, 1_400_000
LESS, MORE = 5_000_000, 10_000_000
LAYERS = 3
FILTER = 300_000


@pytest.fixture(scope="module")
def moved(trainer: Trainer, tmp_path_factory):
    """``moved(settings)`` -> bytes; that so many are gone, and no bit has changed, is seen to here."""
    found: dict[str, int] = {}
    file = tmp_path_factory.mktemp("policy") / "policy.py"
    plain = trainer.plain(ONE, ONE.dtype)

    def of(settings: dict) -> int:
        text = "".join(f"self.{name} = {value}\n" for name, value in settings.items())
        if text not in found:
            file.write_text(text)
            run = trainer.train(ONE, ONE.dtype, "--smart-swap", "--swap-policy-config", str(file))
            assert run.digests() == plain.digests()
            found[text] = run.summaries[0]["plan"]["swap_bytes"]
            steps = stable_steps(run)
            assert len(steps) >= 2
            for step in steps:
                assert plain.held()[0] - step["held_bytes"] >= FREED * found[text] > 0, settings
        return found[text]

    return of


def v1(settings: dict) -> dict:
    return {**settings, "policy_v2": False}


def test_bucket_size_of_v2(moved):
    """Each stage is filled as far as whole tensors go; the more goes into a bucket, the more is moved."""
    small, large = (moved({**MOVES_ALL, "swap_bucket_size": size}) for size in (SMALL, LARGE))
    assert 0.75 * SMALL * STAGES <= small <= SMALL * STAGES
    assert 0.75 * LARGE * STAGES <= large <= LARGE * STAGES


def test_bucket_size_with_v1_moves_all(moved):
    assert moved(v1({**MOVES_ALL, "swap_bucket_size": SMALL})) == moved(v1({**MOVES_ALL, "swap_bucket_size": LARGE}))
    assert moved(v1({**MOVES_ALL, "swap_bucket_size": SMALL})) > 2 * LARGE * STAGES


@pytest.mark.parametrize("version", [dict, v1])
def test_reduction_memory(moved, version):
    less, more = (moved(version({"reduction_memory": nbytes})) for nbytes in (LESS, MORE))
    assert LESS <= less < MORE <= more


def test_layers_per_stage(moved):
    """As many bytes of fewer stages."""
    of_several = moved({**MOVES_ALL, "swap_bucket_size": LARGE, "num_attn_layers_per_stage": LAYERS})
    stages = (STAGES - 1) // LAYERS + 1
    assert 0.75 * LARGE * stages <= of_several <= LARGE * stages


def test_tensor_size_filter(moved):
    large = moved({**MOVES_ALL, "tensor_size_filter": FILTER})
    assert large < 0.9 * moved(v1({**MOVES_ALL, "swap_bucket_size": SMALL}))
