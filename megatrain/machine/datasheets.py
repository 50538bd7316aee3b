"""GPUs by their makers' public figures, and the hosts and links that usually go with them.

One table for every reader: plans, MFU and energy.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

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
PCIE_4X8, PCIE_5X8 = PCIE_3, HostLink(27.75e9, 50.5e9)
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


# From NVIDIA's public data sheets and architecture papers, not rounded further. The first row
# whose words all occur in a device's name counts, so variants stand before the plain name.
GPUS: tuple[tuple[str, DataSheet], ...] = (
    ("B200", DataSheet(2250, 75, 4500, 8000, PCIE_5, SERVER, 183_359, (10, 0), 1000, 900)),
    ("H200 NVL", DataSheet(835.5, 60, 1671, 4800, PCIE_5, SERVER, 143_771, (9, 0), 600, 450)),
    ("H200", DataSheet(989.4, 67, 1979, 4800, PCIE_5, SERVER, 143_771, (9, 0), 700, 450)),
    ("H100 PCIe", DataSheet(756.4, 51, 1513, 2000, PCIE_5, SERVER, 81_559, (9, 0), 350)),
    ("H100 NVL", DataSheet(835.5, 60, 1671, 3938, PCIE_5, SERVER, 95_830, (9, 0), 400, 300)),
    ("H100", DataSheet(989.4, 67, 1979, 3350, PCIE_5, SERVER, 81_559, (9, 0), 700, 450)),
    ("GH200", DataSheet(989.4, 67, 1979, 4000, NVLINK_C2C, SERVER, 97_871, (9, 0), 1000, 450)),
    ("A100 PCIe 40GB", DataSheet(312, 19.5, 0, 1555, PCIE_4, SERVER, 40_960, (8, 0), 250)),
    ("A100 40GB", DataSheet(312, 19.5, 0, 1555, PCIE_4, SERVER, 40_960, (8, 0), 400, 300)),
    ("A100 PCIe", DataSheet(312, 19.5, 0, 1935, PCIE_4, SERVER, 81_920, (8, 0), 300)),
    ("A100", DataSheet(312, 19.5, 0, 2039, PCIE_4, SERVER, 81_920, (8, 0), 400, 300)),
    ("L40S", DataSheet(362.1, 91.6, 733, 864, PCIE_4, SERVER, 46_068, (8, 9), 350)),
    ("L4", DataSheet(121, 30.3, 242.5, 300, PCIE_4, SERVER, 23_034, (8, 9), 72)),
    ("A10", DataSheet(125, 31.2, 0, 600, PCIE_4, SERVER, 23_028, (8, 6), 150)),
    ("A40", DataSheet(149.7, 37.4, 0, 696, PCIE_4, SERVER, 46_068, (8, 6), 300)),
    ("V100 32GB", DataSheet(15.7, 15.7, 0, 900, PCIE_3, SERVER, 32_768, (7, 0), 300)),
    ("V100", DataSheet(15.7, 15.7, 0, 900, PCIE_3, SERVER, 16_384, (7, 0), 300)),
    ("T4", DataSheet(8.1, 8.1, 0, 320, PCIE_3, SERVER, 15_360, (7, 5), 70)),
    ("RTX PRO 6000", DataSheet(503.8, 126, 1007.6, 1792, PCIE_5, DESKTOP, 97_887, (12, 0), 600)),
    ("RTX 6000 Ada", DataSheet(364.2, 91.1, 728.5, 960, PCIE_4, DESKTOP, 49_140, (8, 9), 300)),
    ("RTX A6000", DataSheet(154.8, 38.7, 0, 768, PCIE_4, DESKTOP, 49_140, (8, 6), 300)),
    ("RTX 5090", DataSheet(209.5, 104.8, 419, 1792, PCIE_5, DESKTOP, 32_607, (12, 0), 575)),
    ("RTX 5080", DataSheet(112.6, 56.3, 225.1, 960, PCIE_5, DESKTOP, 16_303, (12, 0), 360)),
    ("RTX 5070 Ti", DataSheet(87.9, 43.9, 175.8, 896, PCIE_5, DESKTOP, 16_303, (12, 0), 300)),
    ("RTX 5070", DataSheet(61.7, 30.9, 123.5, 672, PCIE_5, DESKTOP, 12_227, (12, 0), 250)),
    (
        "RTX 5060 Ti 16GB",
        DataSheet(47.4, 23.7, 94.8, 448, PCIE_5X8, DESKTOP, 16_311, (12, 0), 180),
    ),
    ("RTX 5060 Ti", DataSheet(47.4, 23.7, 94.8, 448, PCIE_5X8, DESKTOP, 8_151, (12, 0), 180)),
    ("RTX 5060", DataSheet(38.4, 19.2, 76.7, 448, PCIE_5X8, DESKTOP, 8_151, (12, 0), 145)),
    ("RTX 4090", DataSheet(165.2, 82.6, 330, 1008, PCIE_4, DESKTOP, 24_564, (8, 9), 450)),
    ("RTX 4080 SUPER", DataSheet(104.4, 52.2, 208.9, 736, PCIE_4, DESKTOP, 16_376, (8, 9), 320)),
    ("RTX 4080", DataSheet(97.5, 48.7, 194.9, 717, PCIE_4, DESKTOP, 16_376, (8, 9), 320)),
    ("RTX 4070 Ti SUPER", DataSheet(88.2, 44.1, 176.4, 672, PCIE_4, DESKTOP, 16_376, (8, 9), 285)),
    ("RTX 4070 Ti", DataSheet(80.2, 40.1, 160.4, 504, PCIE_4, DESKTOP, 12_282, (8, 9), 285)),
    ("RTX 4070 SUPER", DataSheet(71, 35.5, 141.9, 504, PCIE_4, DESKTOP, 12_282, (8, 9), 220)),
    ("RTX 4070", DataSheet(58.3, 29.1, 116.6, 504, PCIE_4, DESKTOP, 12_282, (8, 9), 200)),
    ("RTX 4060 Ti 16GB", DataSheet(44.1, 22.1, 88.2, 288, PCIE_4X8, DESKTOP, 16_380, (8, 9), 165)),
    ("RTX 4060 Ti", DataSheet(44.1, 22.1, 88.2, 288, PCIE_4X8, DESKTOP, 8_188, (8, 9), 160)),
    ("RTX 4060", DataSheet(30.2, 15.1, 60.4, 272, PCIE_4X8, DESKTOP, 8_188, (8, 9), 115)),
    ("RTX 3090 Ti", DataSheet(80, 40, 0, 1008, PCIE_4, DESKTOP, 24_564, (8, 6), 450)),
    ("RTX 3090", DataSheet(71, 35.6, 0, 936, PCIE_4, DESKTOP, 24_576, (8, 6), 350)),
    ("RTX 3080 Ti", DataSheet(68.2, 34.1, 0, 912, PCIE_4, DESKTOP, 12_288, (8, 6), 350)),
    ("RTX 3080", DataSheet(59.5, 29.8, 0, 760, PCIE_4, DESKTOP, 10_240, (8, 6), 320)),
    ("RTX 3070 Ti", DataSheet(43.5, 21.7, 0, 608, PCIE_4, DESKTOP, 8_192, (8, 6), 290)),
    ("RTX 3070", DataSheet(40.6, 20.3, 0, 448, PCIE_4, DESKTOP, 8_192, (8, 6), 220)),
    ("RTX 3060 Ti", DataSheet(32.4, 16.2, 0, 448, PCIE_4, DESKTOP, 8_192, (8, 6), 200)),
    ("RTX 3060", DataSheet(25.5, 12.7, 0, 360, PCIE_4, DESKTOP, 12_288, (8, 6), 170)),
    ("RTX 2080 Ti", DataSheet(13.4, 13.4, 0, 616, PCIE_3, DESKTOP, 11_264, (7, 5), 250)),
)
# Words in the names of slower cards that share a desktop card's name; none of these is listed.
SLOWER = {"LAPTOP", "MAX", "D"}  # Max-Q; the 4090 D and 5090 D
# For a card that is not listed, where it was neither measured nor described by hand.
UNKNOWN_GPU = DataSheet(60, 25, 0, 500, PCIE_4, DESKTOP, 8_192, FIRST_BFLOAT16, None)


def data_sheet(gpu_name: str | None) -> DataSheet | None:
    """The row of a GPU by the name its driver gives; None for a card that is not listed."""
    words = set((gpu_name or "").upper().replace("-", " ").split())
    if words & SLOWER:
        return None
    return next((sheet for name, sheet in GPUS if words >= set(name.upper().split())), None)


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
