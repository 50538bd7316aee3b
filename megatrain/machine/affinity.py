"""Which cores a process of several on one host computes with."""

from __future__ import annotations

import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


def share_of_cores(number: int, of: int, cpus: Path = CPUS) -> set[int]:
    """The logical cores of process `number` of so many, out of those that this one may use.

    They are neighbours: of one socket where that goes. Those of one physical core stay together.
    All of them, if there are fewer than processes.
    """
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in allowed:
        cores.setdefault(_place(cpu, cpus), []).append(cpu)
    whole = [cores[place] for place in sorted(cores)]
    if len(whole) < of:
        return set(allowed)
    start, stop = (len(whole) * edge // of for edge in (number, number + 1))
    return {cpu for core in whole[start:stop] for cpu in core}


def _place(cpu: int, cpus: Path) -> tuple[int, ...]:
    """Socket and core; only the logical core itself where the kernel does not say."""
    topology = cpus / f"cpu{cpu}" / "topology"
    try:
        names = ("physical_package_id", "core_id")
        return tuple(int((topology / name).read_text()) for name in names)
    except (OSError, ValueError):
        return (0, cpu)
