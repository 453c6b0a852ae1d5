"""Options and markers of the suite."""
import functools
import os
import sys

import pytest

# Searches for plans, files and tests: traced line by line they take three to four times as long, which is minutes.
NOT_TRACED = {
    "test_golden_plans.py", "test_planner_cost.py", "test_solve.py", "test_solve_oracles.py",
    "test_as_the_planner_decides", "test_all_verbs_within_a_budget",
    "test_identical_layers_are_solved_alike_and_the_cheapest_second_comes_first",
}  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="the whole matrix of layouts, not each layout once")


def pytest_configure(config):
    if config.getoption("--full"):
        os.environ["MINDSPEED_TESTS_COLD"] = "1"  # see tests/warm: every process starts from nothing


@functools.cache
def _gpus() -> int:
    import torch

    # Not torch.cuda: the simulated device answers there.
    count = getattr(torch._C, "_cuda_getDeviceCount", None)
    return count() if count else 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        # What tests of a file share is made once; tests/layouts share what they train.
        if config.pluginmanager.hasplugin("xdist"):
            folder, _, file = item.nodeid.partition("::")[0].rpartition("/")
            item.add_marker(pytest.mark.xdist_group("layouts" if folder == "tests/layouts" else f"{folder}/{file}"))
        if "full" in item.keywords and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="part of the whole matrix: --full"))
        if "gpu" in item.keywords and _gpus() == 0:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Coverage is that of the core by its own tests. (pytest-cov's mark no_cover does nothing in xdist's workers.)"""
    tracer = sys.gettrace()
    names = {item.path.name, getattr(item, "originalname", None)}
    if type(tracer).__module__ != "coverage" or (item.path.parent.name == "core" and not names & NOT_TRACED):
        return (yield)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)
