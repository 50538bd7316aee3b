"""From what users have (a checkpoint or a configuration, and a few choices) to the arguments of an engine."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megatrain.engine.placement import PRECISIONS
from megatrain.engine.resolved import (
    Machine,
    Resolved,
    Weights,
    make_job,
    resolve,
    room_on_drives,
)
from megatrain.errors import ConfigError, PlanError
from megatrain.machine.hardware import (
    bf16_is_fast,
    disk_free,
    keep_heap_small,
    read_hardware,
    update_threads,
)
from megatrain.machine.profile import fingerprint, known_or_typical, with_drives
from megatrain.machine.sizes import parse_size
from megatrain.models.pretrained import read_model_config, resolve_source
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.fp8 import fp8_supported
from megatrain.optim import AdamW, Optimizer
from megatrain.planner.plan import Plan, make_plan
from megatrain.settings import Settings

logger = logging.getLogger("megatrain")


def choose_device(device: str) -> torch.device:
    """`auto` is the first GPU, or the CPU where there is none. Raises ConfigError for a device that is unknown or not there."""
    # Memory segments that grow, instead of new ones beside them: torch then holds little more than it uses. Read at the first allocation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault(
        "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
    )  # as the driver counts GPUs, of which the plan asks; read when CUDA is started
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device: {device!r} is unknown; choose auto, cpu, cuda or cuda:N")
    chosen = torch.device(device)
    if chosen.type == "cpu":
        return chosen
    index, count = chosen.index or 0, torch.cuda.device_count()
    if index >= count:
        seen = (
            f"PyTorch sees {count} CUDA devices"
            if count
            else "PyTorch sees no CUDA device; install its CUDA build or set device: cpu"
        )
        raise ConfigError(f"device: {device} was asked for, but {seen}")
    return torch.device("cuda", index)


def choose_precision(precision: str, device: torch.device) -> str:
    """`auto` is bfloat16 with fp32 master weights where the hardware is fast at it, else float32. Raises ConfigError."""
    if precision == "auto":
        return "bfloat16" if bf16_is_fast(device.type) else "float32"
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision: {precision!r} is not built; choose one of auto, {', '.join(PRECISIONS)}"
        )
    if precision == "fp8" and device.type == "cuda" and not fp8_supported(device):
        raise ConfigError(
            "precision: fp8 needs a GPU of compute capability 8.9 (Ada) or newer; set precision: bfloat16"
        )
    return precision


@dataclass(frozen=True)
class Prepared:
    """The arguments of an engine."""

    skeleton: Skeleton
    optimizer: Optimizer
    precision: str
    max_grad_norm: float | None
    device: torch.device
    settings: Settings
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """For `Engine(**prepared.arguments())`."""
        return dict(vars(self))


def prepare(
    config: Any,
    *,
    optimizer: Optimizer | None = None,
    precision: str = "auto",
    attention: str = "auto",
    max_grad_norm: float | None = 1.0,
    device: str = "auto",
    seed: int = 0,
    tokens_per_step: int | None = None,
    seq_len: int | None = None,
    settings: Settings | Literal["auto"] = "auto",
    memory: Mapping[str, Any] | None = None,
    weights: Weights,
) -> Prepared:
    """Decide what an engine for a transformers configuration is made of; allocates nothing.

    Args and errors as of `Engine.from_pretrained`.
    """
    _check_types(optimizer, settings, seed, max_grad_norm)
    where = choose_device(str(device))
    chosen = choose_precision(precision, where)
    skeleton = Skeleton(
        config,
        attention=attention,
        dtype=PRECISIONS[chosen],
        trust_remote_code=weights.trust_remote_code,
    )
    optimizer = optimizer or AdamW()
    if isinstance(settings, Settings):
        if memory or tokens_per_step or seq_len:
            raise ConfigError(
                "tokens_per_step, seq_len and memory are for settings='auto'; your settings say what lies where"
            )
    elif tokens_per_step is None or seq_len is None:
        if memory or tokens_per_step or seq_len:
            raise ConfigError("settings='auto': a plan needs both tokens_per_step and seq_len")
        logger.warning(
            "no plan is made without tokens_per_step and seq_len: everything is streamed and recomputed, "
            "uncompiled; give both, and the engine is planned as `megatrain train` plans"
        )
        settings = Settings(update_threads=update_threads())
    else:
        return prepare_planned(
            _plan(
                skeleton,
                where,
                chosen,
                optimizer=optimizer,
                max_grad_norm=max_grad_norm,
                seed=seed,
                attention=attention,
                tokens_per_step=_positive("tokens_per_step", tokens_per_step),
                seq_len=_positive("seq_len", seq_len),
                tiers=_Tiers.of(memory),
                weights=weights,
            )
        )
    return Prepared(skeleton, optimizer, chosen, max_grad_norm, where, settings, seed)


def _plan(
    skeleton: Skeleton,
    device: torch.device,
    precision: str,
    *,
    optimizer: Optimizer,
    max_grad_norm: float | None,
    seed: int,
    attention: str,
    tokens_per_step: int,
    seq_len: int,
    tiers: _Tiers,
    weights: Weights,
) -> Plan:
    """The plan of steps of full rows on this machine, without checkpoints."""
    keep_heap_small()
    check_positions(skeleton, seq_len, "seq_len")
    machine = this_machine(device, precision, tiers.nvme)
    resolved = resolve(
        skeleton,
        machine,
        optimizer=optimizer,
        max_grad_norm=max_grad_norm,
        seq_len=seq_len,
        weights=weights,
        seed=seed,
        attention=attention,
        nvme_folders=tiers.nvme,
        gpu_limit=tiers.gpu,
    )
    job = make_job(resolved, {}, tokens_per_step=tokens_per_step, checkpoints_written=0)
    plan = make_plan(
        job,
        resolved.shape,
        machine.hardware,
        machine.profile,
        gpu_limit=tiers.gpu,
        host_limit=tiers.host,
        nvme_limit=room_on_drives(tiers.nvme, disk_free, None),
    )
    assumed = tuple(map(str, machine.drives_assumed))
    return replace(plan, drives_assumed=assumed, made_of=resolved)


def prepare_planned(plan: Plan) -> Prepared:
    """The engine that a plan describes.

    Raises:
        PlanError: it does not fit, was made for another machine, or was read from a file.
    """
    resolved = plan.made_of
    if not isinstance(resolved, Resolved):
        raise PlanError(
            "from_plan: this plan does not say what it was made of; make it with mt.plan"
        )
    plan.check()
    machine = resolved.machine
    here = read_hardware(".", machine.device.type) if _has(machine.device) else None
    if not machine.here or here is None or fingerprint(here) != fingerprint(machine.hardware):
        gpu = machine.hardware.gpu
        raise PlanError(
            f"from_plan: the plan was made for another machine ({gpu.name if gpu else 'without a GPU'}); "
            "make one for this machine: leave out gpu and ram"
        )
    hold_to_budget(machine, resolved.gpu_limit)
    skeleton = Skeleton(  # a plan may open several engines, and each binds its own
        resolved.skeleton.config,
        attention=resolved.attention,
        dtype=PRECISIONS[machine.precision],
        trust_remote_code=resolved.weights.trust_remote_code,
    )
    return Prepared(
        skeleton,
        resolved.optimizer,
        machine.precision,
        resolved.max_grad_norm,
        machine.device,
        plan.choices.settings(plan.job, resolved.nvme_folders),
        resolved.seed,
    )


def this_machine(
    device: torch.device, precision: str, nvme_folders: Sequence[Path] = ()
) -> Machine:
    """This machine with the rates of its cached profile, or of data sheets."""
    hardware = read_hardware(".", device.type)
    profile, assumed = with_drives(known_or_typical(hardware), nvme_folders, hardware)
    return Machine(device, precision, hardware, profile, drives_assumed=assumed)


def check_positions(skeleton: Skeleton, seq_len: int, name: str) -> None:
    """Raise ConfigError if sequences are longer than the model can read. `name`: of what says so."""
    longest = skeleton.anatomy.max_positions
    if longest is not None and seq_len > longest:
        raise ConfigError(
            f"{name}: {seq_len} exceeds the {longest} positions of this model; set "
            f"{name.rpartition(' ')[2]}: {longest}"
        )


def hold_to_budget(machine: Machine, gpu_limit: int | None) -> None:
    """Let PyTorch take no more of the GPU than `gpu_limit` bytes, however much there is."""
    gpu, hardware = machine.hardware.gpu, machine.hardware
    if machine.device.type == "cuda" and gpu is not None:
        limit = gpu.total_bytes if gpu_limit is None else gpu_limit - hardware.context_bytes
        share = min(1.0, max(0.0, limit / gpu.total_bytes))
        torch.cuda.set_per_process_memory_fraction(share, machine.device)


def read_config(config: Any, trust_remote_code: bool) -> Any:
    """A transformers configuration, or that of a folder or hub id. Raises ModelError, ConfigError."""
    if isinstance(config, (str, Path)):
        return read_model_config(resolve_source(config, None, weights=False), trust_remote_code)
    if not hasattr(config, "model_type"):
        raise ConfigError(
            f"config: {type(config).__name__} is neither a transformers configuration nor a folder or hub id"
        )
    return config


@dataclass(frozen=True)
class _Tiers:
    """The keyword `memory`: bytes of GPU memory and host RAM to use, and folders on NVMe."""

    gpu: int | None = None
    host: int | None = None
    nvme: tuple[Path, ...] = ()

    @classmethod
    def of(cls, memory: Mapping[str, Any] | None) -> _Tiers:
        """Raises ConfigError for an unknown key or a size that is none."""
        given = dict(memory or {})
        folders = given.pop("nvme", None) or ()
        folders = [folders] if isinstance(folders, (str, Path)) else folders
        sizes: dict[str, int | None] = {"gpu": None, "host": None}
        for name, value in given.items():
            size = None if value == "auto" else parse_size(value)
            if name not in sizes:
                raise ConfigError(f"memory: {name!r} is unknown; choose from gpu, host and nvme")
            if size is not None and (type(size) is not int or size <= 0):
                raise ConfigError(f"memory: {name} must be a size such as '80GiB', not {value!r}")
            sizes[name] = size
        return cls(**sizes, nvme=tuple(Path(folder).expanduser() for folder in folders))


def _positive(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name}: {value!r} is out of range; give a whole number of at least 1")
    return value


def _check_types(optimizer: object, settings: object, seed: object, max_grad_norm: object) -> None:
    if optimizer is not None and (
        isinstance(optimizer, type) or not isinstance(optimizer, Optimizer)
    ):
        raise ConfigError(
            f"optimizer: {optimizer!r} is none; give one such as mt.AdamW(lr=1e-5), or None for AdamW"
        )
    if not isinstance(settings, Settings) and settings != "auto":
        raise ConfigError(f"settings: {settings!r} is neither 'auto' nor an mt.Settings")
    if type(seed) is not int:
        raise ConfigError(f"seed: {seed!r} is not a whole number")
    number = isinstance(max_grad_norm, (int, float)) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (number and 0 < max_grad_norm <= math.inf):  # type: ignore[operator]
        raise ConfigError(
            f"max_grad_norm: {max_grad_norm!r} is out of range; give a number above 0, or None for no "
            "clipping"
        )


def _has(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.device_count() > (device.index or 0)
