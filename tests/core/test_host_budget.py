"""Host memory budget: cgroup v1 and v2, hybrid mounts, containers, the flag."""
import math

import pytest

from mindspeed_swap.core.host_budget import HOST_SHARE, host_budget, node_memory
from mindspeed_swap.errors import SettingError
from mindspeed_swap.units import GIB

MEMINFO = f"MemTotal: {512 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {400 * GIB // 1024} kB\n"


def reader(**files):
    files.setdefault("/proc/meminfo", MEMINFO)
    return files.get


def test_no_cgroup_means_meminfo():
    assert node_memory(reader()) == (512 * GIB, 400 * GIB)


def test_v2_walks_up_to_the_tightest_limit():
    files = {
        "/proc/self/cgroup": "0::/slurm/job_1/step_0\n",
        "/sys/fs/cgroup/slurm/job_1/step_0/memory.max": "max\n",
        "/sys/fs/cgroup/slurm/job_1/step_0/memory.current": f"{GIB}\n",
        "/sys/fs/cgroup/slurm/job_1/memory.max": f"{100 * GIB}\n",
        "/sys/fs/cgroup/slurm/job_1/memory.current": f"{30 * GIB}\n",
        "/sys/fs/cgroup/slurm/memory.max": f"{300 * GIB}\n",
        "/sys/fs/cgroup/slurm/memory.current": f"{290 * GIB}\n",
    }
    # the tightest limit and the least left need not be the same group's
    assert node_memory(reader(**files)) == (100 * GIB, 10 * GIB)


def test_v2_page_cache_is_not_in_use():
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": f"{100 * GIB}",
        "/sys/fs/cgroup/memory.current": f"{95 * GIB}",
        "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {60 * GIB}\n",
    }
    assert node_memory(reader(**files)) == (100 * GIB, 65 * GIB)


def test_container_whose_cgroup_path_is_the_hosts():
    files = {
        "/proc/self/cgroup": "0::/kubepods/pod7/abc\n",
        "/sys/fs/cgroup/memory.max": f"{64 * GIB}",
        "/sys/fs/cgroup/memory.current": f"{4 * GIB}",
    }
    assert node_memory(reader(**files)) == (64 * GIB, 60 * GIB)


@pytest.mark.parametrize("controllers", ["memory", "cpuset,memory"])
def test_v1_in_a_hybrid_mount(controllers):
    files = {
        "/proc/self/cgroup": f"5:devices:/\n4:{controllers}:/job:with:colons\n0::/\n",
        "/sys/fs/cgroup/memory/job:with:colons/memory.limit_in_bytes": f"{80 * GIB}",
        "/sys/fs/cgroup/memory/job:with:colons/memory.usage_in_bytes": f"{20 * GIB}",
        "/sys/fs/cgroup/memory/job:with:colons/memory.stat": f"inactive_file 1\ntotal_inactive_file {5 * GIB}\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    assert node_memory(reader(**files)) == (80 * GIB, 65 * GIB)


def test_more_in_use_than_the_limit_leaves_nothing():
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": f"{2 * GIB}",
        "/sys/fs/cgroup/memory.current": f"{3 * GIB}",
    }
    assert node_memory(reader(**files)) == (2 * GIB, 0)


def test_this_machine_has_memory():
    total, free = node_memory()
    assert 0 < free <= total


def test_default_is_a_share_of_what_is_free():
    budget = host_budget(None, 8, lambda: (512 * GIB, 400 * GIB))
    assert budget.per_rank_bytes == int(400 * GIB * HOST_SHARE / 8)
    assert budget.line == "host memory: 8 ranks x 35.0 GiB = 280.0 GiB of 512.0 GiB"


def test_flag_is_per_rank():
    budget = host_budget(30, 8, lambda: (512 * GIB, 100 * GIB))
    assert budget.per_rank_bytes == 30 * GIB
    assert budget.line == "host memory: 8 ranks x 30.0 GiB = 240.0 GiB of 512.0 GiB"
    assert host_budget(0.5, 1, lambda: (GIB, GIB)).line == "host memory: 1 rank x 0.5 GiB = 0.5 GiB of 1.0 GiB"
    assert host_budget(0.05, 1, lambda: (GIB, GIB)).line == "host memory: 1 rank x 51.2 MiB = 51.2 MiB of 1.0 GiB"


@pytest.mark.parametrize("gb", [0, -1, math.nan, math.inf, 64.1, 1e300])
def test_flag_that_cannot_work_names_itself(gb):
    with pytest.raises(SettingError, match="--swap-host-memory"):
        host_budget(gb, 8, lambda: (512 * GIB, 400 * GIB))


def test_flag_may_ask_for_the_whole_node():
    assert host_budget(64, 8, lambda: (512 * GIB, 0)).per_rank_bytes == 64 * GIB
