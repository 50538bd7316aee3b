"""A machine that is not at hand: a GPU by its name or by description, and RAM."""

from __future__ import annotations

import difflib
from dataclasses import replace

from megatrain.errors import ConfigError
from megatrain.machine import hardware
from megatrain.machine.datasheets import GPUS, PCIE_4, UNKNOWN_GPU, DataSheet, HostLink
from megatrain.machine.hardware import GIB, MIB, Gpu, Hardware, without_tables

DRIVER_BYTES = 600 * MIB  # of the GPU's memory, kept by its driver
SYSTEM_BYTES = 2 * GIB  # of RAM, used by others
PROCESS_BYTES = 856 * MIB  # of a run before its weights, read: H200, torch 2.11 with CUDA 13
DISK_BYTES = 16 << 40  # disks are cheap
EXAMPLE = "--gpu-memory 12GiB --gpu-tflops 60 --pcie 25 (dense bf16; GB/s each way)"


def find_gpu(
    gpu: str | None,
    memory_bytes: int | None = None,
    tflops: float | None = None,
    pcie: float | None = None,
) -> tuple[str, DataSheet, bool]:
    """(name, data sheet, is it listed) of a GPU, by its name in the table, by description, or both.

    A description (memory, dense bf16 TFLOP/s, GB/s each way of the link to the host) replaces the
    row's figures. A card without a row needs all of it: what else a data sheet says is then
    UNKNOWN_GPU's, its rates in proportion to `tflops`.

    Raises ConfigError for a card that is neither listed nor described.
    """
    name = next((row for row in GPUS if gpu and _words(gpu) == _words(row)), None)
    described = {"--gpu-memory": memory_bytes, "--gpu-tflops": tflops, "--pcie": pcie}
    missing = [flag for flag, value in described.items() if value is None]
    if name is not None:
        sheet = GPUS[name]
    elif gpu and len(missing) == len(described):
        nearest = _nearest(gpu)
        raise ConfigError(f"--gpu: {gpu!r} is not known; {nearest} Or describe it: {EXAMPLE}")
    elif missing or tflops is None:
        raise ConfigError(f"a GPU that is not listed needs {' and '.join(missing)}, too: {EXAMPLE}")
    else:
        times, sheet = tflops / UNKNOWN_GPU.bfloat16, UNKNOWN_GPU
        sheet = replace(sheet, float32=times * sheet.float32, memory=times * sheet.memory)
    if memory_bytes is not None:
        sheet = replace(sheet, mebibytes=memory_bytes // MIB)
    if tflops is not None:
        sheet = replace(sheet, bfloat16=tflops)
    if pcie is not None:  # both ways at once: as of PCIe 4.0
        one_way = pcie * 1e9
        sheet = replace(sheet, link=HostLink(one_way, one_way * PCIE_4.both / PCIE_4.one_way))
    return name or gpu or f"GPU of {tflops:g} TFLOP/s", sheet, name is not None


def hypothetical(
    name: str, sheet: DataSheet, host_bytes: int, cores: int | None = None, gpus: int = 1
) -> Hardware:
    """A machine with this GPU and `host_bytes` of RAM. cores: None takes the usual host's. gpus:
    number of them that train together, each with as many cores beside it."""
    total = sheet.mebibytes * MIB
    return Hardware(
        gpu=Gpu(f"NVIDIA {name}", total, total - DRIVER_BYTES, sheet.capability),
        host_total_bytes=host_bytes,
        host_available_bytes=without_tables(host_bytes - SYSTEM_BYTES, pinned=True),
        physical_cores=cores or gpus * sheet.host.cores,
        disk_free_bytes=DISK_BYTES,
        memlock_bytes=None,
        context_bytes=hardware.CUDA_CONTEXT_BYTES,
        workspace_bytes=hardware.CUBLAS_WORKSPACE_BYTES,
        resident_bytes=PROCESS_BYTES,
        library_bytes=hardware.CUDA_LIBRARY_BYTES,
    )


def _words(name: str) -> set[str]:
    return set(name.upper().replace("-", " ").split()) - {"NVIDIA", "GEFORCE", "SXM", "80GB"}


def _nearest(gpu: str) -> str:
    """The rows that share a word with `gpu`, else those spelled like it, else all."""
    sharing = [name for name in GPUS if _words(name) & _words(gpu) - {"RTX"}]
    spelled = difflib.get_close_matches(gpu.upper(), [name.upper() for name in GPUS], n=3)
    near = sharing or [name for name in GPUS if name.upper() in spelled]
    return f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(GPUS)}."
