"""Options and markers of the suite."""
import functools

import pytest


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="the whole matrix of layouts, not each layout once")


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
