"""A machine that one does not have yet, for `megatrain plan --gpu "RTX 4090" --ram 128GiB`: from public figures of its GPU, and its RAM."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import psutil
import torch

from megatrain.config import Config
from megatrain.config.values import parse_size
from megatrain.errors import ConfigError
from megatrain.hardware import (
    CUBLAS_WORKSPACE_BYTES,
    CUDA_CONTEXT_BYTES,
    CUDA_LIBRARY_BYTES,
    FIRST_BFLOAT16,
    GIB,
    MIB,
    Gpu,
    Hardware,
    without_tables,
)
from megatrain.machine import GPUS, typical
from megatrain.models.fp8 import FIRST_CAPABILITY
from megatrain.recipes.setup import Machine

DRIVER_BYTES = 600 * MIB  # of the GPU's memory, that its driver keeps
SYSTEM_BYTES = 2 * GIB  # of RAM, that others use
DISK_BYTES = 16 << 40  # disks are cheap
CORES = {"server": 16, "desktop": 8}  # beside one GPU


def another_machine(config: Config, gpu: str, ram: str, cores: int | None = None) -> Machine:
    """A machine with this GPU (a name in machine.py's table) and so much RAM ("128GiB"); cores: those usual beside the GPU, unless said.

    Raises ConfigError for a GPU that is not known, a size that is none, and a precision that the GPU has not.
    """
    sheets = dict(GPUS)
    name = next((known for known in sheets if _words(gpu) == _words(known)), None)
    if name is None:
        raise ConfigError(f"--gpu: {gpu!r} is not known; {_nearest(gpu, sheets)}")
    size = parse_size(ram)
    if not isinstance(size, int) or size <= SYSTEM_BYTES:
        raise ConfigError(f"--ram: must be a size of more than {SYSTEM_BYTES // GIB} GiB, such as 128GiB, not {ram!r}")
    sheet = sheets[name]
    total = sheet.mebibytes * MIB
    hardware = Hardware(
        gpu=Gpu(f"NVIDIA {name}", total, total - DRIVER_BYTES, sheet.capability),
        host_total_bytes=size,
        host_available_bytes=without_tables(size - SYSTEM_BYTES, pinned=True),
        physical_cores=cores or CORES[sheet.host],
        disk_free_bytes=DISK_BYTES,
        memlock_bytes=None,
        context_bytes=CUDA_CONTEXT_BYTES,
        workspace_bytes=CUBLAS_WORKSPACE_BYTES,
        resident_bytes=psutil.Process().memory_info().rss,
        library_bytes=CUDA_LIBRARY_BYTES,
    )
    return Machine(torch.device("cuda"), _precision(config, name, sheet.capability), hardware, typical(hardware), compiles=True)


def _words(name: str) -> set[str]:
    return set(name.upper().replace("-", " ").split()) - {"NVIDIA", "GEFORCE", "SXM", "80GB"}


def _nearest(gpu: str, known: Iterable[str]) -> str:
    """The names most like what was asked for: those that share a word, else those that are spelled like it."""
    known = list(known)
    sharing = [name for name in known if _words(name) & _words(gpu) - {"RTX"}]
    spelled = difflib.get_close_matches(gpu.upper(), [name.upper() for name in known], n=3)
    near = sharing or [name for name in known if name.upper() in spelled]
    return f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(known)}"


def _precision(config: Config, name: str, capability: tuple[int, int]) -> str:
    if config.precision == "auto":
        return "bfloat16" if capability >= FIRST_BFLOAT16 else "float32"
    if config.precision == "fp8" and capability < FIRST_CAPABILITY:
        raise ConfigError(f"{config.where('precision')}: the {name} has no fp8 units; set precision: bfloat16")
    return config.precision
