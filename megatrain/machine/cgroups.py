"""Memory and processor limits of this process's cgroups, version 1 or 2. Only files are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NVIDIA = "/dev/nvidiactl"
CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_V1_UNLIMITED = 2**60  # version 1 writes "no limit" as the largest page-aligned 64-bit number
_CPU = {2: "cpu.max", 1: "cpu.cfs_quota_us"}


class _MemoryFiles(NamedTuple):
    """Files of one version. Swap is left out: a run that needs it would never end."""

    limits: tuple[str, ...]  # the smallest one binds
    usage: str
    stat: str  # before memory.stat's keys that include child groups
    mapped: str


# memory.high does not kill, but the kernel slows a group above it down to a crawl.
_MEMORY = {
    2: _MemoryFiles(("memory.max", "memory.high"), "memory.current", "", "file_mapped"),
    1: _MemoryFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_", "mapped_file"),
}


def cgroup_memory(
    mount: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> tuple[int | None, int | None]:
    """(smallest limit, bytes left under the tightest one) of this process's cgroup and its parents.
    None where no limit is set. Both versions are read: a machine may mount either, or version 1 for
    memory beside an empty version 2. Page cache, such as a checkpoint just written, counts as free;
    what lies in /dev/shm does not."""
    limits: list[int] = []
    left: list[int] = []
    names = {version: files.limits[0] for version, files in _MEMORY.items()}
    for folder, version in _folders(mount, membership, "memory", names):
        files, stat = _MEMORY[version], _numbers(folder / "memory.stat")
        # version 1 tells here of parents' limits that a container does not see
        found = [stat.get("hierarchical_memory_limit")]
        found += [_number(folder / name) for name in files.limits]
        limit = min((n for n in found if n is not None), default=_V1_UNLIMITED)
        if limit >= _V1_UNLIMITED:
            continue
        limits.append(limit)
        usage = _number(folder / files.usage)
        if usage is not None:
            # The kernel frees page cache before it kills. Mapped pages are running code, but also
            # shared memory, which is not in the cache: hence max.
            inactive, active, mapped = (
                stat.get(files.stat + key, 0)
                for key in ("inactive_file", "active_file", files.mapped)
            )
            left.append(max(0, limit - usage + max(inactive, inactive + active - mapped)))
    return min(limits, default=None), min(left, default=None)


def cgroup_cpus(mount: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Processors' worth of time that the tightest cgroup allows (--cpus); None: no limit."""
    quotas = []
    for folder, version in _folders(mount, membership, "cpu", _CPU):
        if version == 2:
            quota, _, period = _text(folder / _CPU[2]).strip().partition(" ")
        else:  # a quota of -1: no limit
            quota, period = (
                str(_number(folder / name) or "max") for name in (_CPU[1], "cpu.cfs_period_us")
            )
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def keep_to_quota() -> None:
    """Give PyTorch as many threads as the container's quota has processors, not as the machine has.
    The kernel stops all threads of a group that has used its share. Where the CPU computes alone,
    have them spin shortly for each other: beside another program each wait lasts a time slice.
    Call it before torch is imported. What is set already stays."""
    if not os.path.exists(NVIDIA) and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    quota = cgroup_cpus()
    if quota is not None and quota < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(quota))))


def _folders(
    mount: Path, membership: Path, controller: str, markers: dict[int, str]
) -> Iterator[tuple[Path, int]]:
    """(folder, version) from our cgroup up to the mount point, where the marker file exists."""
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, version = mount, 2
        elif controller in controllers.split(","):
            # mounted with others under one name, mostly beside a link for each
            alone = (mount / controller).exists()
            root, version = mount / (controller if alone else controllers), 1
        else:
            continue
        # In a container the path may be the host's and lead nowhere: the mount point is its group.
        own = Path(path.lstrip("/"))
        for folder in [own, *own.parents]:
            if (root / folder / markers[version]).exists():
                yield root / folder, version


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def _numbers(file: Path) -> dict[str, int]:
    """Lines of a name and a number each."""
    pairs = [line.split() for line in _text(file).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # as everywhere but on Linux
        return ""
