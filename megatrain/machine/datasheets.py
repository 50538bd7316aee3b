"""GPUs by their makers' public figures, and the hosts and links that usually go with them.

One table for every reader: plans, MFU and energy.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST_BFLOAT16 = (8, 0)  # compute capability with bf16 units: Ampere
FIRST_FP8 = (8, 9)  # and with fp8 units: Ada, before Hopper (9.0) and Blackwell


@dataclass(frozen=True)
class HostLink:
    """Sustained rates between host and GPU in bytes/s: one direction alone, and the sum of both."""

    one_way: float
    both: float


PCIE_3 = HostLink(12.5e9, 22e9)  # half of PCIE_4, as are 8 lanes of it
PCIE_4 = HostLink(25e9, 44e9)  # 16 lanes, as PCIE_5, which was measured beside an H200
PCIE_5 = HostLink(55.5e9, 101e9)
# Assumed: 5/6 of 450 GB/s each way; together no more than the processor's memory sustains.
NVLINK_C2C = HostLink(375e9, 410e9)


@dataclass(frozen=True)
class Host:
    """The usual machine around a GPU."""

    cores: int  # beside one GPU
    memory: tuple[tuple[int, float], ...]  # (threads, bytes/s) of host RAM
    arithmetic: float  # see MachineProfile.arithmetic
    disk_write: float  # bytes/s
    disk_read: float


# Measured on the 16 Intel cores beside an H200; a desktop's memory has two channels.
_SERVER_MEMORY = ((1, 20e9), (4, 78e9), (8, 122e9), (12, 148e9), (16, 159e9))
_DESKTOP_MEMORY = ((1, 25e9), (2, 38e9), (4, 50e9), (8, 60e9))
SERVER = Host(16, _SERVER_MEMORY, arithmetic=0.3, disk_write=2.75e9, disk_read=3.5e9)
DESKTOP = Host(8, _DESKTOP_MEMORY, arithmetic=1.0, disk_write=1.5e9, disk_read=2.5e9)


@dataclass(frozen=True)
class DataSheet:
    """A GPU by its maker's figures."""

    bfloat16: float  # dense matmuls with fp32 accumulation, TFLOP/s; without such units float32's
    float32: float  # TFLOP/s
    fp8: float  # TFLOP/s; 0: no such units
    memory: float  # GB/s
    link: HostLink
    host: Host
    mebibytes: int  # of memory, as nvidia-smi shows them
    capability: tuple[int, int]
    watts: int | None  # board power; GH200's includes its processor. None: unknown
    nvlink: float = 0.0  # GB/s each way to the other GPUs of a host; 0: none, or a bridge at most


LINKS = {
    "PCIE_3": PCIE_3,
    "PCIE_4": PCIE_4,
    "PCIE_5": PCIE_5,
    "PCIE_4X8": PCIE_3,
    "PCIE_5X8": HostLink(PCIE_5.one_way / 2, PCIE_5.both / 2),
    "NVLINK_C2C": NVLINK_C2C,
}
HOSTS = {"SERVER": SERVER, "DESKTOP": DESKTOP}


def _sheet(row: list[Any]) -> DataSheet:
    """The data sheet of a row of gpus.toml."""
    bfloat16, float32, fp8, memory, link, host, mebibytes, (major, minor), watts, nvlink = row
    around = LINKS[link], HOSTS[host], mebibytes, (major, minor)
    return DataSheet(bfloat16, float32, fp8, memory, *around, watts, nvlink)


_ROWS = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
GPUS = {name: _sheet(row) for name, row in _ROWS.items()}
# Words in the names of slower cards that share a desktop card's name; none of these is listed.
SLOWER = {"LAPTOP", "MAX", "D"}  # Max-Q; the 4090 D and 5090 D
# For a card that is not listed, where it was neither measured nor described by hand.
UNKNOWN_GPU = DataSheet(60, 25, 0, 500, PCIE_4, DESKTOP, 8_192, FIRST_BFLOAT16, None)


def data_sheet(gpu_name: str | None) -> DataSheet | None:
    """The row of a GPU by the name its driver gives; None for a card that is not listed."""
    words = set((gpu_name or "").upper().replace("-", " ").split())
    if words & SLOWER:
        return None
    return next((sheet for name, sheet in GPUS.items() if words >= set(name.upper().split())), None)


def peak_tflops(gpu_name: str | None) -> float | None:
    """Peak dense bf16 TFLOP/s, the whole of which MFU is a share; None where it is unknown."""
    sheet = data_sheet(gpu_name)
    return None if sheet is None else sheet.bfloat16


def board_power_w(gpu_name: str | None) -> float | None:
    """Board power of the data sheet in watts; None where it is unknown."""
    sheet = data_sheet(gpu_name)
    return None if sheet is None else sheet.watts


# Bare K, M, G and T are binary, as docker, systemd and slurm read them.
_UNIT_BYTES = {"": 1, "B": 1}
_UNIT_BYTES |= {f"{p}B": 1000**n for n, p in enumerate("KMGT", start=1)}
_UNIT_BYTES |= {f"{p}{end}": 1024**n for n, p in enumerate("KMGT", start=1) for end in ("", "IB")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object) -> object:
    """Bytes of a human size (`80GiB`, `512 MB`, `1.5TB`, a plain number); else the value itself."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _UNIT_BYTES:
        return value
    size = float(match[1]) * _UNIT_BYTES[match[2].upper()]
    return int(size) if math.isfinite(size) else value
