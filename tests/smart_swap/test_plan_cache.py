"""Plans that were found, and plans that did not fit, by everything that decides whether they fit again."""
from __future__ import annotations

from traces import Shape, megatron_trace

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.solve import floor
from mindspeed_swap.core.step import StepStats
from mindspeed_swap.smart_swap.plan_cache import PlanCache, digest
from mindspeed_swap.smart_swap.search import SmartSwap

KEY = {"model": "layers=4", "capacity_mib": 100}


def test_what_was_kept_is_found_by_the_same_key_and_rank(tmp_path):
    plans = {(4, 7): Plan("layers=4", 1000)}
    PlanCache(str(tmp_path), KEY, 0).save(plans, {"abc"})
    assert PlanCache(str(tmp_path), KEY, 0).load("layers=4") == (plans, {"abc"})
    for key, rank in ((KEY | {"capacity_mib": 99}, 0), (KEY, 1)):
        assert PlanCache(str(tmp_path), key, rank).load("layers=4") == ({}, set())


def test_what_cannot_be_read_is_not_there(tmp_path):
    cache = PlanCache(str(tmp_path), KEY, 0)
    cache.save({(1, 1): Plan("layers=4", 1000)}, set())
    for file in cache.folder.iterdir():
        file.write_text("{")
    assert cache.load("layers=4") == ({}, set())


def test_a_plan_that_did_not_fit_is_not_tried_again():
    trace = megatron_trace(Shape(layers=4))
    target = (floor(trace).reachable_bytes + trace.capacity_bytes) // 2

    def first_plan(failed: set[str]) -> Plan:
        search = SmartSwap(target, failed=failed)
        while search.plan is None:
            search.after_step(StepStats(), megatron_trace(Shape(layers=4)))
        return search.plan

    before = first_plan(set())
    after = first_plan({digest(before)})
    assert after.decisions != before.decisions and after.swap_bytes > before.swap_bytes
