"""What this machine's resources sustain: measured once by `megatrain doctor`, kept in the user's cache, guessed where nothing was measured.

Plain numbers and files: nothing here imports torch or touches a device. What measures is in megatrain/measure.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatrain.errors import StorageError
from megatrain.hardware import GIB, Hardware, _nvml, bf16_is_fast, update_threads

Rates = tuple[tuple[int, float], ...]  # (size, rate at that size), sizes ascending
Link = int | str  # PCIe's generation, or "C2C"

FORMAT = 4  # of the measurements: a higher number makes every cached profile stale
UPDATE_BYTES = 26  # memory traffic of one parameter's AdamW update: weight, remainder, two fp32 moments read and written, gradient read


@dataclass(frozen=True)
class MachineProfile:
    """Sustained rates in SI units: bytes/s, FLOP/s, parameters/s, seconds. 0.0: the machine lacks it."""

    fingerprint: str  # of the machine it was measured on; "typical" for a guess
    measured_on: str  # ISO date; empty for a guess
    upload: float  # bytes/s, pinned host memory to device, alone
    download: float  # bytes/s, the other way, alone
    both: float  # bytes/s, both directions at once, their sum
    update: Rates  # (threads, parameters/s) of our AdamW kernel over host arrays much larger than caches, 26 bytes a parameter
    arithmetic: float  # how fast a thread of the host computes updates, as a share of what `Optimizer.arithmetic` says
    update_busy: float  # parameters/s on `hardware.update_threads` threads while PCIe is busy both ways; without a GPU as alone
    matmul: Rates  # (tokens, FLOP/s) on the compute device, bfloat16, [tokens, 4096] x [4096, 14336]
    matmul_fp32: Rates  # the same in float32
    attention: Rates  # (sequence length, FLOP/s) causal, forward and backward, heads of 128; 12 x heads x 128 FLOP per pair that attends
    memory: float  # bytes/s of the compute device's own memory, read and written ones counted
    fresh: float  # the same into memory that nothing has touched before, where a CPU's larger activations lie; a GPU's: as `memory`
    launch: float  # seconds that one small eager operation costs the host
    device_update: float  # parameters/s of the same update on the compute device
    disk_write: float  # bytes/s in the output folder, or of the slowest drive of memory.nvme, past the page cache
    disk_read: float
    fp8: float  # FLOP/s of row-wise scaled products at 8192 tokens

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be a profile: a cached file may hold anything."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "Rates":
                points = tuple((size, rate) for size, rate in value)
                if not points or not all(type(size) is int and is_rate(rate) for size, rate in points):
                    raise ValueError(f"{field.name}: {value!r}")
                object.__setattr__(self, field.name, points)  # lists where it comes from JSON
            elif not (isinstance(value, str) if field.type == "str" else is_rate(value)):
                raise ValueError(f"{field.name}: {value!r}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def is_rate(value: object) -> bool:
    """Whether `value` is a finite number that is not negative."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def interpolate(rates: Rates, size: float) -> float:
    """The rate at `size`, on straight lines between the points; beyond the first and last point theirs."""
    for (low, rate), (high, next_rate) in pairwise(rates):
        if size <= high:
            return rate + (next_rate - rate) * max(0.0, size - low) / (high - low)
    return rates[-1][1]


# -- which machine ------------------------------------------------------------------------------------------------------------------


def fingerprint(hardware: Hardware) -> str:
    """A short name that changes with whatever the figures depend on: GPU, driver, processor, cores, RAM in GiB, PyTorch."""
    gpu = hardware.gpu.name if hardware.gpu else "cpu"
    parts = (
        FORMAT,
        gpu,
        driver_version() if hardware.gpu else "",
        processor(),
        hardware.physical_cores,
        round(hardware.host_total_bytes / GIB),
        installed_version("torch") or "",
    )
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    return f"{'-'.join(gpu.lower().split())}-{digest}"


def driver_version() -> str:
    """The NVIDIA driver's version; empty where there is none."""
    with _nvml() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion()) if nvml is not None else ""


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, as well as the system knows it."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def installed_version(package: str) -> str | None:
    """A package's version, without importing it; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -- cache --------------------------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """MEGATRAIN_CACHE, else megatrain/ in the user's cache folder."""
    own = os.environ.get("MEGATRAIN_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain"


def cache_file(fingerprint: str) -> Path:
    return cache_folder() / f"machine-{fingerprint}.json"


def load(fingerprint: str) -> MachineProfile | None:
    """The cached profile of the machine with this fingerprint; None if there is none that can be read, or it is another machine's."""
    try:
        profile = MachineProfile(**json.loads(cache_file(fingerprint).read_text()))
    except (OSError, ValueError, TypeError):  # no file; not JSON, or a figure that is none; not an object, or other keys
        return None
    return profile if profile.fingerprint == fingerprint else None


def save(profile: MachineProfile) -> Path:
    """Cache a profile and return its file. Raises StorageError if it cannot be written."""
    return _write(cache_file(profile.fingerprint), profile.to_dict())


def _write(path: Path, value: dict[str, Any]) -> Path:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(value, indent=1) + "\n")
        unfinished.replace(path)  # at once: another process may be reading
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}; name another folder in MEGATRAIN_CACHE") from error
    return path


@dataclass(frozen=True)
class DriveRates:
    """What a drive sustained past the page cache, in bytes/s."""

    write: float
    read: float
    measured_on: str  # ISO date

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be one: a cached file may hold anything."""
        if not (is_rate(self.write) and is_rate(self.read) and min(self.write, self.read) > 0 and isinstance(self.measured_on, str)):
            raise ValueError(repr(self))


def drives_file(fingerprint: str) -> Path:
    return cache_folder() / f"drives-{fingerprint}.json"


def load_drives(fingerprint: str) -> dict[str, DriveRates]:
    """What was measured of this machine's drives, by `hardware.drive_name`; nothing where the file cannot be read."""
    try:
        return {name: DriveRates(**rates) for name, rates in json.loads(drives_file(fingerprint).read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # as `load`; or a list
        return {}


def save_drive(fingerprint: str, name: str, rates: DriveRates) -> None:
    """Keep a drive's rates beside the profile, instead of older ones. Raises StorageError if they cannot be written."""
    kept = load_drives(fingerprint) | {name: rates}
    _write(drives_file(fingerprint), {name: asdict(found) for name, found in kept.items()})


# -- guesses ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _DataSheet:
    """A GPU by its maker's figures: dense products in TFLOP/s (fp8 0: none), memory in GB/s, its link to the host (a PCIe generation, or
    NVLink-C2C), its usual host, MiB of memory as nvidia-smi shows them, compute capability, and board power in watts (0: not known)."""

    bfloat16: float
    float32: float
    fp8: float
    memory: float
    link: Link
    host: str
    mebibytes: int
    capability: tuple[int, int]
    watts: int


# From NVIDIA's public data sheets and architecture papers: products without sparsity and with fp32 accumulation. GH200's watts are those of
# the whole module, processor included. The first row whose words all occur in the device's name counts.
GPUS: tuple[tuple[str, _DataSheet], ...] = (
    ("B200", _DataSheet(2250, 75, 4500, 8000, 5, "server", 183_359, (10, 0), 1000)),
    ("H200", _DataSheet(989, 67, 1979, 4800, 5, "server", 143_771, (9, 0), 700)),
    ("H100 PCIe", _DataSheet(756, 51, 1513, 2000, 5, "server", 81_559, (9, 0), 350)),
    ("H100 NVL", _DataSheet(835, 60, 1671, 3938, 5, "server", 95_830, (9, 0), 400)),
    ("H100", _DataSheet(989, 67, 1979, 3350, 5, "server", 81_559, (9, 0), 700)),
    ("GH200", _DataSheet(989, 67, 1979, 4000, "C2C", "server", 97_871, (9, 0), 1000)),
    ("A100 PCIe 40GB", _DataSheet(312, 19.5, 0, 1555, 4, "server", 40_960, (8, 0), 250)),
    ("A100 40GB", _DataSheet(312, 19.5, 0, 1555, 4, "server", 40_960, (8, 0), 400)),
    ("A100 PCIe", _DataSheet(312, 19.5, 0, 1935, 4, "server", 81_920, (8, 0), 300)),
    ("A100", _DataSheet(312, 19.5, 0, 2039, 4, "server", 81_920, (8, 0), 400)),
    ("L40S", _DataSheet(362, 91.6, 733, 864, 4, "server", 46_068, (8, 9), 350)),
    ("RTX PRO 6000", _DataSheet(503.8, 126, 1007.6, 1792, 5, "desktop", 97_887, (12, 0), 600)),
    ("RTX 6000 Ada", _DataSheet(364.2, 91.1, 728.5, 960, 4, "desktop", 49_140, (8, 9), 300)),
    ("RTX A6000", _DataSheet(154.8, 38.7, 0, 768, 4, "desktop", 49_140, (8, 6), 300)),
    ("RTX 5090", _DataSheet(209.5, 104.8, 419, 1792, 5, "desktop", 32_607, (12, 0), 575)),
    ("RTX 5080", _DataSheet(112.6, 56.3, 225.1, 960, 5, "desktop", 16_303, (12, 0), 360)),
    ("RTX 5070 Ti", _DataSheet(87.9, 43.9, 175.8, 896, 5, "desktop", 16_303, (12, 0), 300)),
    ("RTX 4090", _DataSheet(165, 82.6, 330, 1008, 4, "desktop", 24_564, (8, 9), 450)),
    ("RTX 4080 SUPER", _DataSheet(104.4, 52.2, 208.9, 736, 4, "desktop", 16_376, (8, 9), 320)),
    ("RTX 4080", _DataSheet(97.5, 48.7, 194.9, 717, 4, "desktop", 16_376, (8, 9), 320)),
    ("RTX 4070 Ti SUPER", _DataSheet(88.2, 44.1, 176.4, 672, 4, "desktop", 16_376, (8, 9), 285)),
    ("RTX 3090 Ti", _DataSheet(80, 40, 0, 1008, 4, "desktop", 24_564, (8, 6), 450)),
    ("RTX 3090", _DataSheet(71, 35.6, 0, 936, 4, "desktop", 24_576, (8, 6), 350)),
    ("RTX 3080 Ti", _DataSheet(68.2, 34.1, 0, 912, 4, "desktop", 12_288, (8, 6), 350)),
    ("RTX 3080", _DataSheet(59.5, 29.8, 0, 760, 4, "desktop", 10_240, (8, 6), 320)),
)
UNKNOWN_GPU = _DataSheet(60, 25, 0, 500, 4, "desktop", 8_192, (8, 0), 0)

# What of a data sheet was sustained on an H200: products by tokens, under the power that a whole step draws (in short bursts they reach
# 750 TFLOP/s instead of 690), cuDNN's attention by sequence length.
MATMUL_SHARE: Rates = ((512, 0.51), (2048, 0.645), (8192, 0.69))
ATTENTION_SHARE: Rates = ((1024, 0.31), (4096, 0.51), (16384, 0.58))
FLOAT32_SHARE = 0.8
FP8_SHARE = 0.71
MEMORY_SHARE = 0.85

# Bytes/s through 16 lanes of a generation: one way, and both at once. The fifth as measured beside an H200. NVLink-C2C: five sixths of its
# 450 GB/s each way, and together no more than the processor's memory; assumed.
LINKS: dict[Link, tuple[float, float]] = {4: (25e9, 44e9), 5: (55.5e9, 101e9), "C2C": (375e9, 410e9)}
# Bytes/s of host memory by threads: a server with 16 cores to a GPU as measured (fused AdamW), a desktop with two channels as usual.
HOST_MEMORY: dict[str, Rates] = {
    "server": ((1, 20e9), (4, 78e9), (8, 122e9), (12, 148e9), (16, 159e9)),
    "desktop": ((1, 25e9), (2, 38e9), (4, 50e9), (8, 60e9)),
}
DISK = {"server": (2.75e9, 3.5e9), "desktop": (1.5e9, 2.5e9)}
ARITHMETIC = {"server": 0.3, "desktop": 1.0}  # the Intel cores beside an H200, from the steps of a 20B model with moments in 8 bits
BUSY_SHARE = 0.68  # of the update's rate that is left while PCIe is busy both ways: 3.6 of 5.3 G parameters/s beside an H200
CORE_FRESH = 4e9  # bytes/s of one core, into memory that the kernel has to clear first
CORE_FLOPS = {"fast bfloat16": 100e9, "bfloat16": 25e9, "float32": 50e9, "attention": 20e9}  # of one core with wide vectors
LAUNCH_S = {"gpu": 5e-6, "cpu": 2e-6}


def typical(hardware: Hardware) -> MachineProfile:
    """A guess at the profile, from the GPU's name and the number of cores alone."""
    gpu, cores = hardware.gpu, hardware.physical_cores
    sheet = data_sheet(gpu.name) if gpu else None
    host = sheet.host if sheet else "desktop"
    chosen = update_threads(cores)
    update = tuple((threads, interpolate(HOST_MEMORY[host], threads) / UPDATE_BYTES) for threads in thread_counts(cores))
    alone = interpolate(update, chosen)
    common: dict[str, Any] = {
        "fingerprint": "typical",
        "measured_on": "",
        "update": update,
        "arithmetic": ARITHMETIC[host],
        "disk_write": DISK[host][0],
        "disk_read": DISK[host][1],
    }
    if sheet is None:
        return MachineProfile(**common, **_computing_on_cpu(cores), update_busy=alone, device_update=interpolate(update, cores))
    return MachineProfile(**common, **_computing_on_gpu(sheet), update_busy=BUSY_SHARE * alone)


def thread_counts(cores: int) -> Sequence[int]:
    """Numbers of threads at which the host update is known, the one that a run chooses among them; ascending."""
    return sorted({1, max(1, cores // 4), max(1, cores // 2), update_threads(cores), cores})


def data_sheet(gpu_name: str) -> _DataSheet:
    words = set(gpu_name.upper().replace("-", " ").split())
    return next((sheet for name, sheet in GPUS if words.issuperset(name.upper().split())), UNKNOWN_GPU)


def board_power_w(gpu_name: str) -> float | None:
    """What the GPU's board may draw by its data sheet, in watts; None for one that is not in the table."""
    return data_sheet(gpu_name).watts or None


def _computing_on_gpu(sheet: _DataSheet) -> dict[str, Any]:
    one_way, both = LINKS[sheet.link]
    memory = MEMORY_SHARE * sheet.memory * 1e9
    return {
        "upload": one_way,
        "download": one_way,
        "both": both,
        "matmul": tuple((tokens, share * sheet.bfloat16 * 1e12) for tokens, share in MATMUL_SHARE),
        "matmul_fp32": tuple((tokens, FLOAT32_SHARE * sheet.float32 * 1e12) for tokens, _ in MATMUL_SHARE),
        "attention": tuple((length, share * sheet.bfloat16 * 1e12) for length, share in ATTENTION_SHARE),
        "memory": memory,
        "fresh": memory,
        "launch": LAUNCH_S["gpu"],
        "device_update": memory / UPDATE_BYTES,
        "fp8": FP8_SHARE * sheet.fp8 * 1e12,
    }


def _computing_on_cpu(cores: int) -> dict[str, Any]:
    bfloat16 = "fast bfloat16" if bf16_is_fast("cpu") else "bfloat16"
    return {
        "upload": 0.0,
        "download": 0.0,
        "both": 0.0,
        "matmul": ((512, cores * CORE_FLOPS[bfloat16]),),
        "matmul_fp32": ((512, cores * CORE_FLOPS["float32"]),),
        "attention": ((1024, cores * CORE_FLOPS["attention"]),),
        "memory": interpolate(HOST_MEMORY["desktop"], cores),
        "fresh": cores * CORE_FRESH,
        "launch": LAUNCH_S["cpu"],
        "fp8": 0.0,
    }
