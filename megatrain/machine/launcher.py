"""The environment's description of the processes that a launcher has started together."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import ConfigError

# Of torchrun and Kubernetes' operators, and of Slurm: the process among all, how many there are,
# and the same among those of its host.
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OF_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
MEETING = ("MASTER_ADDR", "MASTER_PORT")  # the address at which ranks meet
TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # of hosts in turn: 8(x2),7
FIRST_OF_LIST = re.compile(r"([^\[,]+)(?:\[([^],-]+))?")  # of gpu[007-008,012],login
HERE = "127.0.0.1"  # where ranks of one host meet
PORTS = (10_000, 20_000)  # the first, and how many, for jobs of Slurm; below those of connections


@dataclass(frozen=True)
class Place:
    """The rank that a launcher has given this process, of all ranks and on its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def started_by(environ: Mapping[str, str]) -> tuple[str, int]:
    """(the launcher's name for it, how many processes it has started); 1: there is none."""
    name = _names_in(environ)[1]
    size = environ.get(name, "")
    return name, int(size) if size.isdecimal() else 1


def _names_in(environ: Mapping[str, str]) -> tuple[str, str, str, str]:
    """The names under which a launcher has described this process: NAMES, or OF_SLURM in a task of
    srun. The script of a Slurm job has those as well, but no step: it is one process."""
    script = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    of_slurm = "SLURM_PROCID" in environ and not script
    return OF_SLURM if of_slurm and "WORLD_SIZE" not in environ else NAMES


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Read the place from the environment; None for a process by itself. Raises ConfigError."""
    names = _names_in(environ)
    _, size = started_by(environ)
    if size < 2:
        return None
    given = {name: environ.get(name, "") for name in names}
    if names is OF_SLURM:  # of this step; a job may have been given --ntasks-per-node for others
        given[names[3]] = _tasks_here(environ) or given[names[3]]
    given[names[3]] = given[names[3]] or str(size)  # all on one host
    rank, _, local_rank, local_size = (int(v) if v.isdecimal() else -1 for v in given.values())
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(
            f"the environment: {said}: that is no rank of a launcher; start several processes with "
            "torchrun, or unset these"
        )
    return Place(rank, size, local_rank, local_size)


def _tasks_here(environ: Mapping[str, str]) -> str:
    """The number of tasks of Slurm's step on this host; "" if it is unknown."""
    counts = [
        count
        for count, times in TASKS.findall(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        for _ in range(int(times or 1))
    ]
    number = environ.get("SLURM_NODEID", "0")
    return counts[int(number)] if number.isdecimal() and int(number) < len(counts) else ""


def first_host(environ: Mapping[str, str], place: Place) -> str:
    """The default meeting place of ranks: the host of the first of them."""
    if place.size == place.local_size:
        return HERE
    first = FIRST_OF_LIST.match(environ.get("SLURM_STEP_NODELIST", ""))
    return "".join(filter(None, first.groups())) if first else HERE


def job_of(environ: Mapping[str, str]) -> str:
    """The name of the step of a Slurm job that this process is a task of; "" without Slurm."""
    if _names_in(environ) is not OF_SLURM:
        return ""
    return f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"


def port_of(job: str) -> int:
    """The port at which the ranks of a job meet where nobody names one; others have others."""
    first, count = PORTS
    return first + zlib.crc32(job.encode()) % count


CPUS = Path("/sys/devices/system/cpu")


def share_of_cores(number: int, of: int, cpus: Path = CPUS) -> set[int]:
    """The logical cores of process `number` of so many, out of those that this one may use. They
    are neighbours: of one socket where that goes. Those of one physical core stay together. All of
    them, if there are fewer than processes."""
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
