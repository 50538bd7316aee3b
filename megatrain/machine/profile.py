"""Rates that this machine sustains: measured once, cached, and guessed until then.

Plain numbers and files: nothing here imports torch or touches a device.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from megatrain.errors import StorageError, logger, system_errors
from megatrain.machine.datasheets import DESKTOP, UNKNOWN_GPU, DataSheet, data_sheet
from megatrain.machine.hardware import (
    CPUINFO,
    GIB,
    Hardware,
    bf16_is_fast,
    drive_name,
    from_driver,
    one_of_each_drive,
    processor_facts,
    update_threads,
)

T = TypeVar("T")

Rate = Annotated[float, Field(ge=0)]
Rates = tuple[tuple[Annotated[int, Field(gt=0)], Rate], ...]  # (size, rate at it), ascending
Known = Annotated[Rates, Field(min_length=1)]
# A cached file may hold anything: what cannot be a figure raises ValueError.
CHECKED = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

FORMAT = 7  # of the measurements: a higher number makes every cached profile stale
# Memory traffic of one parameter's AdamW update: weight, remainder and two fp32 moments are read
# and written, the gradient is read.
UPDATE_BYTES = 26
# A run's steps that take as many times as long as planned, or as short, say nothing of the machine:
# other programs ran, or rows were others. Short steps are bound by launching kernels.
FAR, SHORT_S = 1.25, 0.5
SLOWER = 0.8  # of rates, as choices between equally fast plans reckon with


# why: decision 0010
@checked_dataclass(frozen=True, config=CHECKED)
class MachineProfile:
    """Sustained rates in SI units, such as bytes/s and FLOP/s; 0.0: the machine lacks it."""

    fingerprint: str  # of the machine it was measured on; "typical" for a guess
    measured_on: str  # ISO date; empty for a guess
    upload: Rate  # bytes/s, pinned host memory to device, alone
    download: Rate  # bytes/s, the other way, alone
    both: Rate  # bytes/s, both directions at once, their sum
    update: Known  # (threads, parameters/s) of our AdamW over host arrays much larger than caches
    arithmetic: Rate  # compute-bound update rate of a host thread over Optimizer.arithmetic
    update_busy: Rate  # parameters/s of all update threads while PCIe is busy both ways
    both_busy: Rate  # bytes/s of both directions meanwhile, their sum
    matmul: Known  # (tokens, FLOP/s) of the device, bf16, [tokens, 4096] x [4096, 14336]
    matmul_fp32: Known  # the same in float32
    attention: Known  # (length, FLOP/s) causal, both passes, 12 x 128 FLOP per pair and head
    memory: Rate  # bytes/s, read and written, of the device's own memory
    fresh: Rate  # bytes/s of first touch, as of a CPU's large activations; a GPU's: as `memory`
    launch: Rate  # seconds that one small eager operation costs the host
    device_update: Rate  # parameters/s of the same update on the device
    disk_write: Rate  # bytes/s past the page cache, in the run folder or memory.nvme
    disk_read: Rate
    fp8: Rate  # FLOP/s of matmuls with a scale per row and column at 8192 tokens
    # (rows an expert, FLOP/s) of a GPU's grouped matmuls, both passes, bf16, rows at random. Empty
    # on a CPU; a GPU's that was not measured is the usual share of `matmul`.
    grouped: Rates = ()
    # Of a host with several GPUs, each a rank, with all at work: then the links and updates above
    # are one rank's, too. The next two: bytes/s that come to a rank from the others of its host.
    ranks: int = 1
    gather: Rate = 0.0  # of their shares of weights
    reduce: Rate = 0.0  # of their fp32 sums, which it adds up in the order of ranks
    gather_loss: Rate = 0.0  # seconds of computing that the device loses beside a second of it
    reduce_loss: Rate = 0.0
    network: Rate = 0.0  # bytes/s of a host to the others, each way
    over_plan: Rate = 1.0  # seconds of the last run's steps over those that these rates give

    def __post_init__(self) -> None:
        if self.upload and not self.grouped:
            object.__setattr__(self, "grouped", usual_grouped(self.matmul))

    def slower(self) -> MachineProfile:
        """The same device in a host whose memory and bus are a fifth slower."""
        names = "upload", "download", "both", "update_busy", "both_busy"
        rates: dict[str, Any] = {name: SLOWER * getattr(self, name) for name in names}
        return replace(self, **rates, update=tuple((n, SLOWER * rate) for n, rate in self.update))


def usual_grouped(matmul: Rates) -> Rates:
    """The usual `MachineProfile.grouped` of a GPU with these rates of lone matmuls."""
    return tuple((rows, share * matmul[-1][1]) for rows, share in GROUPED_SHARE)


def interpolate(rates: Sequence[tuple[float, float]], size: float) -> float:
    """The rate at `size` on straight lines between the points; constant beyond the ends."""
    for (low, rate), (high, next_rate) in pairwise(rates):
        if size <= high:
            return rate + (next_rate - rate) * max(0.0, size - low) / (high - low)
    return rates[-1][1]


def interpolate_log(rates: Rates, size: float) -> float:
    """The same on straight lines over the logarithm of the size, which is more than 0."""
    return interpolate(tuple((math.log(at), rate) for at, rate in rates), math.log(size))


def fingerprint(hardware: Hardware, ranks: int = 1) -> str:
    """A short name that changes with GPU, driver, processor, cores, RAM in GiB, PyTorch, and, where
    several GPUs work together, with their number and what NCCL is told (NCCL_P2P_DISABLE, ...)."""
    gpu = hardware.gpu.name if hardware.gpu else "cpu"
    driver, torch = driver_version() if hardware.gpu else "", installed_version("torch") or ""
    gib = round(hardware.host_total_bytes / GIB)
    parts: tuple[Any, ...] = (FORMAT, gpu, driver, processor(), hardware.physical_cores, gib, torch)
    if ranks > 1:  # whichever cores each of them is bound to
        # the environment variables that steer NCCL, except those of its log
        told = sorted(pair for pair in os.environ.items() if NCCL_STEERED.match(pair[0]))
        parts = (FORMAT, gpu, driver, processor(), os.cpu_count(), gib, torch, ranks, told)
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    return f"{'-'.join(gpu.lower().split())}-{digest}"


def driver_version() -> str:
    """The NVIDIA driver's version; empty where there is none."""
    return from_driver(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()), "")


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name, as well as the system knows it."""
    return next(processor_facts(("model name",), cpuinfo), platform.processor())


NCCL_STEERED = re.compile("NCCL_(?!DEBUG)")
PACKAGES = ("megatrain", "transformers", "torch")  # on which results depend


@cache  # a start asks for some of them several times, and each is a page of metadata to parse
def installed_version(package: str) -> str | None:
    """A package's version, without importing it; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cache_folder() -> Path:
    """MEGATRAIN_CACHE, else megatrain/ in the user's cache folder."""
    own = os.environ.get("MEGATRAIN_CACHE")
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(users).expanduser() / "megatrain"


def cache_file(fingerprint: str) -> Path:
    return cache_folder() / f"machine-{fingerprint}.json"


def load(fingerprint: str) -> MachineProfile | None:
    """The cached profile of the machine with this fingerprint; None without a readable one."""
    profile = read_cached(cache_file(fingerprint), MachineProfile)
    return profile if profile and profile.fingerprint == fingerprint else None


def read_cached(path: Path, kind: type[T]) -> T | None:
    """The value of a JSON file of the cache; None without a file that holds one of this kind."""
    with suppress(OSError, ValueError):
        return TypeAdapter(kind).validate_json(path.read_bytes())
    return None


def known_or_typical(hardware: Hardware) -> MachineProfile:
    """The cached profile of this machine, or one from data sheets; warns of a GPU that has none."""
    found = load(fingerprint(hardware))
    if found is not None:
        return found
    if hardware.gpu is not None and data_sheet(hardware.gpu.name) is None:
        logger.warning(
            f"{hardware.gpu.name} is not in the table of GPUs: its rates are guessed, not "
            "measured; `megatrain doctor` measures them"
        )
    return typical(hardware)


def save_profile(profile: MachineProfile) -> Path:
    """Cache a profile and return its file. Raises StorageError if it cannot be written."""
    return write_json(cache_file(profile.fingerprint), asdict(profile))


def keep_ratio(profile: MachineProfile, planned_s: float, measured_s: float | None) -> None:
    """Keep how long the steps of a run on one GPU took beside their plan, which later plans of this
    machine reckon with."""
    ratio = profile.over_plan * (measured_s or 0.0) / planned_s
    known = load(profile.fingerprint) if profile.ranks == 1 else None
    if known is not None and planned_s > SHORT_S and 1 / FAR < ratio < FAR:
        with suppress(StorageError):  # a cache
            save_profile(replace(known, over_plan=ratio))


def write_json(path: Path, value: dict[str, Any]) -> Path:
    """Write a file of the cache. Raises StorageError."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with system_errors(path, "write it", "name another folder in MEGATRAIN_CACHE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(value, indent=1) + "\n")
        unfinished.replace(path)  # at once: another process may be reading
    return path


@checked_dataclass(frozen=True, config=CHECKED)
class DriveRates:
    """The rates that a drive sustained past the page cache, in bytes/s."""

    write: Annotated[float, Field(gt=0)]
    read: Annotated[float, Field(gt=0)]
    measured_on: str  # ISO date


def drives_file(fingerprint: str) -> Path:
    return cache_folder() / f"drives-{fingerprint}.json"


def load_drives(fingerprint: str) -> dict[str, DriveRates]:
    """The measured rates of this machine's drives by `hardware.drive_name`; empty without any."""
    return read_cached(drives_file(fingerprint), dict[str, DriveRates]) or {}


def save_drive(fingerprint: str, name: str, rates: DriveRates) -> None:
    """Cache a drive's rates in place of older ones. Raises StorageError."""
    kept = load_drives(fingerprint) | {name: rates}
    write_json(drives_file(fingerprint), {name: asdict(found) for name, found in kept.items()})


# Shares of a data sheet that an H200 sustained: matmuls by tokens, under the power that a whole
# step draws (in short bursts they reach 750 TFLOP/s instead of 690), cuDNN's attention by length:
# steps with sequences of 8k to 512k took what the share of 4k says, to 4%.
MATMUL_SHARE: Rates = ((512, 0.51), (2048, 0.645), (8192, 0.69))
ATTENTION_SHARE: Rates = ((256, 0.13), (1024, 0.31), (4096, 0.45))
# Of a lone matmul's rate, by rows an expert: the shapes of three mixtures on an H200, each with
# lone matmuls of its own sizes (benchmarks/grouped.py). 0.39; 0.71 to 0.76; 0.83 and 0.93.
GROUPED_SHARE = ((128, 0.39), (512, 0.74), (2048, 0.88))
FLOAT32_SHARE = 0.8
FP8_SHARE = 0.71
MEMORY_SHARE = 0.85
# Of the update's rate while PCIe is busy both ways: 3.6 of 5.3 G parameters/s beside an H200.
BUSY_SHARE = 0.68
# Of both directions' rate while the host updates: 0.87 beside 12 threads and 0.55 beside 56, in a
# measurement and a step on hosts of H200s; another step, of 14.8B, fits 0.75.
BUSY_LINK_SHARE = 0.75
CORE_FRESH = 4e9  # bytes/s of first touch by one core: the kernel clears the pages
# FLOP/s of one core with wide vectors
CORE_FLOPS = {"fast bfloat16": 100e9, "bfloat16": 25e9, "float32": 50e9, "attention": 20e9}
LAUNCH_S = {"gpu": 5e-6, "cpu": 2e-6}


def with_drives(
    profile: MachineProfile,
    folders: Sequence[Path],
    hardware: Hardware,
    measure: Callable[[Path], DriveRates | None] = lambda folder: None,
) -> tuple[MachineProfile, tuple[Path, ...]]:
    """The profile with the rates of the slowest drive of `folders`, and a folder on each drive
    whose rates are assumed to be the profile's own. measure: of a folder on a drive that has not
    been measured yet; None where it cannot be."""
    if not folders:
        return profile, ()
    kept = load_drives(fingerprint(hardware))
    found = {
        folder: kept.get(drive_name(folder)) or measure(folder)
        for folder in one_of_each_drive(folders)
    }
    assumed = tuple(folder for folder, rates in found.items() if rates is None)
    rates = [(known.write, known.read) for known in found.values() if known is not None]
    if assumed:
        rates.append((profile.disk_write, profile.disk_read))
    write, read = map(min, zip(*rates, strict=True))
    return replace(profile, disk_write=write, disk_read=read), assumed


def typical(hardware: Hardware, sheet: DataSheet | None = None) -> MachineProfile:
    """A guess at the profile, from the GPU's data sheet and the number of cores alone. sheet: of a
    GPU that was described by hand; None: found by name, else UNKNOWN_GPU's."""
    cores = hardware.physical_cores
    if hardware.gpu is not None and sheet is None:
        sheet = data_sheet(hardware.gpu.name) or UNKNOWN_GPU
    host = sheet.host if sheet else DESKTOP
    update = tuple((n, interpolate(host.memory, n) / UPDATE_BYTES) for n in thread_counts(cores))
    bfloat16 = "fast bfloat16" if bf16_is_fast("cpu") else "bfloat16"
    on_cpu = MachineProfile(
        fingerprint="typical",
        measured_on="",
        upload=0.0,
        download=0.0,
        both=0.0,
        update=update,
        arithmetic=host.arithmetic,
        update_busy=interpolate(update, update_threads(cores)),
        both_busy=0.0,
        matmul=((512, cores * CORE_FLOPS[bfloat16]),),
        matmul_fp32=((512, cores * CORE_FLOPS["float32"]),),
        attention=((1024, cores * CORE_FLOPS["attention"]),),
        memory=interpolate(host.memory, cores),
        fresh=cores * CORE_FRESH,
        launch=LAUNCH_S["cpu"],
        device_update=interpolate(update, cores),
        disk_write=host.disk_write,
        disk_read=host.disk_read,
        fp8=0.0,
    )
    return on_cpu if sheet is None else _with_gpu(on_cpu, sheet)


def _with_gpu(host: MachineProfile, sheet: DataSheet) -> MachineProfile:
    bfloat16 = float(f"{sheet.bfloat16:.3g}")  # a guess has no more digits
    memory = MEMORY_SHARE * sheet.memory * 1e9
    float32 = FLOAT32_SHARE * sheet.float32 * 1e12
    return replace(
        host,
        upload=sheet.link.one_way,
        download=sheet.link.one_way,
        both=sheet.link.both,
        update_busy=BUSY_SHARE * host.update_busy,
        both_busy=BUSY_LINK_SHARE * sheet.link.both,
        matmul=tuple((tokens, share * bfloat16 * 1e12) for tokens, share in MATMUL_SHARE),
        matmul_fp32=tuple((tokens, float32) for tokens, _ in MATMUL_SHARE),
        attention=tuple((length, share * bfloat16 * 1e12) for length, share in ATTENTION_SHARE),
        memory=memory,
        fresh=memory,
        launch=LAUNCH_S["gpu"],
        device_update=memory / UPDATE_BYTES,
        fp8=FP8_SHARE * sheet.fp8 * 1e12,
    )


def thread_counts(cores: int) -> Sequence[int]:
    """Numbers of threads at which the host update is known, ascending."""
    return sorted({1, max(1, cores // 4), max(1, cores // 2), update_threads(cores), cores})


# -- several GPUs of a host at work ---------------------------------------------------------------

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
# These do not reach each other's memory (but for a bridge between two 3090); others do.
GEFORCE = re.compile(r"RTX [2-5]0[5-9]0")
GLOO_SHARE = 0.03  # of memory's rate, between processes without GPUs


class Shares(NamedTuple):
    """Rates of each of several GPUs while all work."""

    upload: float  # of one GPU's link to the host, as the next two
    download: float
    both: float
    gather: float  # of NVLink's rate each way by the maker
    reduce: float
    gather_loss: float  # of each second of these, what matmuls lose
    reduce_loss: float


# H200s of one host. Sums of two are the library's, which may
# add two numbers in any order.
OF_TWO = Shares(0.97, 0.97, 0.69, 0.53, 0.58, 0.31, 0.28)
OF_FOUR = Shares(0.80, 0.67, 0.43, 0.69, 0.60, 0.26, 0.64)


def part_of(hardware: Hardware, ranks: int) -> Hardware:
    """The share of a host that each rank has, where this process has seen whole. Disks are as they
    are: what is saved is saved once."""
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
    base: the rates of one. hardware: of the host, not of a rank."""
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
        rate = GLOO_SHARE * base.memory / ranks
        busy = interpolate(update, update_threads(cores))
        together = replace(base, ranks=ranks, update=update, update_busy=busy)
        return replace(shared_cores(together, ranks), gather=rate, reduce=rate)
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
