"""A machine that is not at hand, for `megatrain plan --gpu "RTX 4090" --ram 128GiB`; and several of
this one's GPUs, or of another's.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from megatrain.config import Config
from megatrain.engine.resolved import Machine
from megatrain.errors import ConfigError
from megatrain.machine.datasheets import FIRST_BFLOAT16, FIRST_FP8
from megatrain.machine.hardware import GIB
from megatrain.machine.hypothetical import DRIVER_BYTES, SYSTEM_BYTES, find_gpu, hypothetical
from megatrain.machine.profile import typical
from megatrain.machine.sizes import parse_size
from megatrain.recipes.ranks.multi_gpu import several
from megatrain.recipes.this_machine import find_machine

logger = logging.getLogger("megatrain")

BYTES_OF_GBIT = 1e9 / 8


def another_machine(
    config: Config,
    *,
    gpus: int | None = None,
    hosts: int | None = None,
    network: float | None = None,
    **other: Any,
) -> Machine:
    """This machine, or the one that `described` is told of, with `gpus` of each of `hosts` like it
    at work.

    network: Gbit/s of each host to the others.

    Raises ConfigError for what cannot be. Its sentences name the command's flags.
    """
    if (hosts or 1) > 1 and network is None:
        raise ConfigError("--hosts needs --network, too: Gbit/s of each host, such as 400")
    if network is not None and not (network > 0 and (hosts or 1) > 1):
        raise ConfigError("--network: Gbit/s of each host, more than 0, for two --hosts or more")
    machine = described(config, gpus=gpus or 1, **other) if other else this_machine(config, gpus)
    if gpus is None and hosts is None:
        return machine
    profile = replace(machine.profile, network=(network or 0.0) * BYTES_OF_GBIT)
    return several(replace(machine, profile=profile), gpus or 1, hosts or 1)


def this_machine(config: Config, gpus: int | None) -> Machine:
    """This one. Raises ConfigError if it has fewer GPUs; ranks on a CPU share its cores."""
    machine, wanted = find_machine(config), gpus or 1
    there = torch.cuda.device_count() if machine.device.type == "cuda" else wanted
    if there < wanted:
        raise ConfigError(
            f"--gpus: {wanted}, but this machine shows {there}; describe another one with --gpu "
            "and --ram"
        )
    return machine


def described(
    config: Config,
    gpu: str | None = None,
    ram: str | None = None,
    cores: int | None = None,
    *,
    gpu_memory: str | None = None,
    gpu_tflops: float | None = None,
    pcie: float | None = None,
    gpus: int = 1,
) -> Machine:
    """A machine with this GPU, RAM ("128GiB") and number of cores (None: the usual host's).

    gpu: a name in machine/datasheets.py, or that of a GPU which is described by its memory
        ("12GiB"), its dense bf16 TFLOP/s and the GB/s each way of its link to the host.
    gpus: of the same kind.

    Raises ConfigError for a GPU that is neither known nor described, a bad size, and a precision
    that the GPU lacks.
    """
    if ram is None or (gpu, gpu_memory, gpu_tflops, pcie) == (None, None, None, None):
        together = "--gpu and --ram belong together, and --cores to them"
        raise ConfigError(f"{together}; give none of them for this machine")
    memory = None
    if gpu_memory is not None:
        memory = _size("--gpu-memory", gpu_memory, DRIVER_BYTES, "12GiB")
    for flag, value in {"--gpu-tflops": gpu_tflops, "--pcie": pcie}.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{flag}: must be more than 0, not {value:g}")
    name, sheet, listed = find_gpu(gpu, memory, gpu_tflops, pcie)
    hardware = hypothetical(name, sheet, _size("--ram", ram, SYSTEM_BYTES, "128GiB"), cores, gpus)
    if not listed:
        logger.warning(
            f"{name} is not in the table of GPUs: assumed are {sheet.memory:,.0f} GB/s of memory, "
            f"{sheet.float32:,.0f} TFLOP/s in float32, no fp8, and a desktop around it"
        )
    precision = _precision(config, name, sheet.capability)
    profile = typical(hardware, sheet)
    return Machine(torch.device("cuda"), precision, hardware, profile, compiles=True, here=False)


def _size(flag: str, text: str, least: int, example: str) -> int:
    size = parse_size(text)
    if not isinstance(size, int) or size <= least:
        wanted = f"a size of more than {least / GIB:.2g} GiB, such as {example}"
        raise ConfigError(f"{flag}: must be {wanted}, not {text!r}")
    return size


def _precision(config: Config, name: str, capability: tuple[int, int]) -> str:
    if config.precision == "auto":
        return "bfloat16" if capability >= FIRST_BFLOAT16 else "float32"
    if config.precision == "fp8" and capability < FIRST_FP8:
        where = config.where("precision")
        raise ConfigError(f"{where}: the {name} has no fp8 units; set precision: bfloat16")
    return config.precision
