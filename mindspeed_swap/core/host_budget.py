"""How much host memory a rank may page-lock: what the flag says, or a safe share of what the node has left.

Pure but for two readers, which tests replace. Imports no torch.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from mindspeed_swap.errors import SettingError
from mindspeed_swap.units import GIB, MIB

# The rest is for what grows after the start and cannot be taken back from page-locked memory: data loader workers, the
# host copy of a checkpoint being saved, the page cache of the data set, compiler caches.
HOST_SHARE = 0.7
# cgroup v1 writes "no limit" as the largest page-aligned 63-bit number.
_UNLIMITED = 1 << 60

ReadFile = Callable[[str], "str | None"]


@dataclass(frozen=True, slots=True)
class Budget:
    per_rank_bytes: int
    line: str  # for the log


def _read_file(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isdigit() else None


def _field(text: str | None, name: str) -> int:
    """Value of a ``name value`` line (memory.stat, meminfo); 0 if there is none."""
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) > 1 and words[0].rstrip(":") == name and words[1].isdigit():
            return int(words[1])
    return 0


def _cgroups(read: ReadFile) -> Iterator[tuple[str, str, str, str]]:
    """(folder, limit file, usage file, reclaimable field) of every memory cgroup above this process.

    Both versions may be mounted at once (hybrid). In a container the path may be the host's and not exist below the
    mount; then only the mount itself, where the container's own limit is, will be found to have the files.
    """
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            mounts = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mounts = (f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup/memory")
        else:
            continue
        inside = PurePosixPath(path)
        for mount in dict.fromkeys(mounts):
            for folder in (inside, *inside.parents):
                yield (mount + str(folder).rstrip("/"), *names)


def node_memory(read: ReadFile = _read_file) -> tuple[int, int]:
    """(bytes in all, bytes that could be taken now) of the node or of the tightest container around us."""
    meminfo = read("/proc/meminfo")
    total, free = _field(meminfo, "MemTotal") * 1024, _field(meminfo, "MemAvailable") * 1024
    for folder, limit_file, usage_file, reclaimable in _cgroups(read):
        limit = _number(read(f"{folder}/{limit_file}"))
        if limit is None or limit >= _UNLIMITED:
            continue
        used = _number(read(f"{folder}/{usage_file}")) or 0
        # Page cache counts as used but is dropped when needed; a job that has read its data would seem to have nothing.
        used -= min(used, _field(read(f"{folder}/memory.stat"), reclaimable))
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def host_budget(
    flag_gb: float | None,
    ranks_on_node: int,
    memory: Callable[[], tuple[int, int]] = node_memory,
) -> Budget:
    """The budget of each rank. ``flag_gb``: --swap-host-memory (GB = 1024^3 bytes per rank), None if not given.

    Raises SettingError if the flag is no size above 0 or more than the node has.
    """
    total, free = memory()
    if flag_gb is None:
        per_rank = int(free * HOST_SHARE / ranks_on_node)
    else:
        if not math.isfinite(flag_gb) or flag_gb <= 0:
            raise SettingError(f"--swap-host-memory {flag_gb}: expected a number of GB per rank above 0")
        if flag_gb * GIB * ranks_on_node > total:
            most = total / ranks_on_node / GIB
            raise SettingError(
                f"--swap-host-memory {flag_gb:g}: {ranks_on_node} ranks x {flag_gb:g} GB is more than the "
                f"{total / GIB:.1f} GB of this node; give less than {most:.1f}, or leave the flag out"
            )
        per_rank = int(flag_gb * GIB)
    line = (
        f"host memory: {ranks_on_node} rank{'s' if ranks_on_node != 1 else ''} x {_text(per_rank)} = "
        f"{_text(per_rank * ranks_on_node)} of {_text(total)}"
    )
    return Budget(per_rank, line)


def _text(nbytes: int) -> str:
    """In GiB, as the flag is given, unless that would show a small budget as nothing."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / MIB:.1f} MiB"
