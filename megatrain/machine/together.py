"""Rates of a host's GPUs while all of them work: measured (`measure/ranks.py`), or assumed.

Links to the host and its memory are shared, and what is sent between GPUs takes from computing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from megatrain.machine.datasheets import data_sheet
from megatrain.machine.hardware import Hardware, update_threads
from megatrain.machine.profile import (
    UPDATE_BYTES,
    MachineProfile,
    Rates,
    fingerprint,
    interpolate,
    load,
    thread_counts,
)

# The fields that ranks measure together; the others are one GPU's by itself.
TOGETHER = (
    *("ranks", "upload", "download", "both", "update", "update_busy", "both_busy"),
    *("gather", "reduce", "gather_loss", "reduce_loss"),
)

# Of the link to the host, one way: GPUs that do not reach each other send through its RAM.
STAGED_GATHER_SHARE, STAGED_REDUCE_SHARE = 0.44, 0.41
# Of each byte that links carry, what the host's update loses of its traffic in the same memory:
# 0.50 with two GPUs at work, 0.48 with four, whose ranks had 56 threads each on 64 cores.
LOST_TO_LINKS = 0.5
LEAST_BUSY = 0.2  # share of the update that is left beside busy links
GEFORCE = re.compile(r"RTX [2-5]0[5-9]0")
GLOO_SHARE = 0.03  # of memory's rate, between processes without GPUs


@dataclass(frozen=True)
class Shares:
    """Rates of each of several GPUs while all work.

    Attributes:
        upload, download, both: of one GPU's link to the host.
        gather, reduce: of NVLink's rate each way by the maker.
        gather_loss, reduce_loss: of each second of these, what matmuls lose.
    """

    upload: float
    download: float
    both: float
    gather: float
    reduce: float
    gather_loss: float
    reduce_loss: float


# H200s of one host. Sums of two are the library's, which may
# add two numbers in any order.
OF_TWO = Shares(0.97, 0.97, 0.69, 0.53, 0.58, 0.31, 0.28)
OF_FOUR = Shares(0.80, 0.67, 0.43, 0.69, 0.60, 0.26, 0.64)


def peers(hardware: Hardware) -> bool:
    """True if GPUs like this one reach each other's memory: GeForce cards do not (but for a bridge
    between two 3090), others do."""
    return hardware.gpu is None or GEFORCE.search(hardware.gpu.name) is None


def part_of(hardware: Hardware, ranks: int) -> Hardware:
    """The share of a host that each rank has, where this process has seen whole.

    Disks are as they are: what is saved is saved once.
    """
    if ranks == 1:
        return hardware
    return replace(
        hardware,
        host_total_bytes=hardware.host_total_bytes // ranks,
        host_available_bytes=hardware.host_available_bytes // ranks,
        physical_cores=max(1, hardware.physical_cores // ranks),
    )


def known(base: MachineProfile, hardware: Hardware, ranks: int) -> MachineProfile | None:
    """`base` with what so many ranks of this machine were measured to reach; None: they were not.

    base: the rates of one. hardware: of the host, not of a rank.
    """
    found = load(fingerprint(hardware, ranks))
    return None if found is None or found.ranks != ranks else joined(base, found)


def joined(base: MachineProfile, together: MachineProfile) -> MachineProfile:
    """The profile of one, with what ranks have measured together."""
    if not base.upload:
        base = shared_cores(base, together.ranks)
    return replace(base, **{name: getattr(together, name) for name in TOGETHER})


def assumed(base: MachineProfile, hardware: Hardware, ranks: int) -> MachineProfile:
    """A guess at the same, from the rates of one. hardware: of the host."""
    if ranks == 1:
        return base
    cores = max(1, hardware.physical_cores // ranks)
    # more threads in all, which share the host's memory
    update = tuple((n, interpolate(base.update, ranks * n) / ranks) for n in thread_counts(cores))
    if hardware.gpu is None:
        return _without_gpus(base, ranks, update, cores)
    sheet = data_sheet(hardware.gpu.name)
    shares = OF_TWO if ranks == 2 else OF_FOUR
    upload, both = shares.upload * base.upload, shares.both * base.both
    gather, reduce = STAGED_GATHER_SHARE * base.upload, STAGED_REDUCE_SHARE * base.upload
    if sheet is not None and sheet.nvlink:
        nvlink = sheet.nvlink * 1e9
        gather, reduce = shares.gather * nvlink, shares.reduce * nvlink
    alone = interpolate(update, update_threads(cores))
    lost = LOST_TO_LINKS * both / UPDATE_BYTES
    return replace(
        base,
        ranks=ranks,
        upload=upload,
        download=shares.download * base.download,
        both=both,
        update=update,
        update_busy=max(LEAST_BUSY * alone, alone - lost),
        both_busy=shares.both * base.both_busy,
        gather=gather,
        reduce=reduce,
        gather_loss=shares.gather_loss,
        reduce_loss=shares.reduce_loss,
    )


def shared_cores(base: MachineProfile, ranks: int) -> MachineProfile:
    """The share of cores and memory that each rank without a GPU has."""

    def part(rates: Rates) -> Rates:
        return tuple((size, rate / ranks) for size, rate in rates)

    return replace(
        base,
        matmul=part(base.matmul),
        matmul_fp32=part(base.matmul_fp32),
        attention=part(base.attention),
        memory=base.memory / ranks,
        fresh=base.fresh / ranks,
        device_update=base.device_update / ranks,
    )


def _without_gpus(base: MachineProfile, ranks: int, update: Rates, cores: int) -> MachineProfile:
    return replace(
        shared_cores(base, ranks),
        ranks=ranks,
        update=update,
        update_busy=interpolate(update, update_threads(cores)),
        gather=GLOO_SHARE * base.memory / ranks,
        reduce=GLOO_SHARE * base.memory / ranks,
    )
