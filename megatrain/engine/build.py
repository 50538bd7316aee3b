"""From a configuration and a few choices, or a plan, to the arguments of an engine."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import expanduser  # leaves `~nobody` as it is, where Path's raises
from pathlib import Path
from typing import Any, Literal

import torch

from megatrain.engine.objective import AnyLoss
from megatrain.engine.placement import PRECISIONS
from megatrain.engine.resolved import Machine, Resolved, Weights, make_job, resolve, room_on_drives
from megatrain.engine.routing import coefficient_of
from megatrain.errors import ConfigError, PlanError
from megatrain.losses import next_token
from megatrain.machine.hardware import (
    bf16_is_fast,
    bound_heap,
    communicator_bytes,
    communicators,
    disk_free,
    keep_caches_small,
    read_hardware,
    update_threads,
)
from megatrain.machine.profile import fingerprint, known_or_typical, with_drives
from megatrain.machine.sizes import parse_size
from megatrain.models.pretrained import read_model_config, resolve_source
from megatrain.models.rotary import regimes_of
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.fp8 import fp8_supported
from megatrain.models.ulysses_trial import why_not_in_pieces
from megatrain.optim import AdamW, Optimizer
from megatrain.planner.plan import Plan, make_plan
from megatrain.settings import Settings
from megatrain.storage.manifest import check_description
from megatrain.world import World

logger = logging.getLogger("megatrain")

PLAN_NEEDS = "settings='auto': a plan needs both tokens_per_step and seq_len"
ROOM_FOR_HOLES = 2  # of a plan: its budget then takes what malloc leaves unused
NO_PLAN = (
    "tokens_per_step, seq_len, loss and memory are for settings='auto'; your settings say what "
    "lies where"
)


def choose_device(device: str) -> torch.device:
    """`auto` is the first GPU, or the CPU where there is none.

    Raises ConfigError for a device that is unknown or not there.
    """
    # Segments of memory grow, so that torch holds little more than it uses. Read at the first
    # allocation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # The order of the driver, which the planner asks about GPUs. Read when CUDA is started.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device: {device!r} is unknown; choose auto, cpu, cuda or cuda:N")
    chosen = torch.device(device)
    if chosen.type == "cpu":
        return chosen
    index, count = chosen.index or 0, torch.cuda.device_count()
    if index >= count:
        seen = f"PyTorch sees {count} CUDA devices"
        if not count:
            seen = "PyTorch sees no CUDA device; install its CUDA build or set device: cpu"
        raise ConfigError(f"device: {device} was asked for, but {seen}")
    return torch.device("cuda", index)


def choose_precision(precision: str, device: torch.device) -> str:
    """`auto` is bfloat16 with fp32 master weights where the hardware is fast at it, else float32.

    Raises ConfigError for one that is unknown or that the device lacks.
    """
    if precision == "auto":
        return "bfloat16" if bf16_is_fast(device.type) else "float32"
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision: {precision!r} is not built; choose one of auto, {', '.join(PRECISIONS)}"
        )
    if precision == "fp8" and device.type == "cuda" and not fp8_supported(device):
        raise ConfigError(
            "precision: fp8 needs a GPU of compute capability 8.9 (Ada) or newer; set precision: "
            "bfloat16"
        )
    return precision


@dataclass(frozen=True)
class Prepared:
    """The arguments of an engine."""

    skeleton: Skeleton
    optimizer: Optimizer
    precision: str
    max_grad_norm: float | None
    router_aux_loss_coef: float
    device: torch.device
    settings: Settings
    seed: int = 0
    plan: Plan | None = None  # that the settings are from

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `Engine`."""
        return {name: value for name, value in vars(self).items() if name != "plan"}


def prepare(
    config: Any,
    *,
    optimizer: Optimizer | None = None,
    precision: str = "auto",
    attention: str = "auto",
    max_grad_norm: float | None = 1.0,
    router_aux_loss_coef: float | Literal["auto"] = "auto",
    device: str = "auto",
    seed: int = 0,
    tokens_per_step: int | None = None,
    seq_len: int | None = None,
    loss: AnyLoss = next_token,
    settings: Settings | Literal["auto"] = "auto",
    memory: Mapping[str, Any] | None = None,
    freeze: Sequence[str] = (),
    weights: Weights,
) -> Prepared:
    """Decide what an engine for a transformers configuration is made of; allocates nothing.

    Args and errors: as `Engine.from_pretrained`.
    """
    _check_types(optimizer, loss, settings, seed, max_grad_norm)
    where = choose_device(str(device))
    chosen = choose_precision(precision, where)
    skeleton = _skeleton(config, attention, chosen, weights, freeze)
    optimizer = optimizer or AdamW()
    coefficient = coefficient_of(skeleton, router_aux_loss_coef)
    if settings == "auto" and tokens_per_step is not None and seq_len is not None:
        _check_sizes(tokens_per_step=tokens_per_step, seq_len=seq_len)
        gpu_limit, host_limit, nvme_folders = _tiers(memory)
        keep_caches_small()
        check_positions(skeleton, seq_len, "seq_len")
        hardware = read_hardware(".", where.type)
        profile, assumed = with_drives(known_or_typical(hardware), nvme_folders, hardware)
        resolved = resolve(
            skeleton,
            Machine(where, chosen, hardware, profile, drives_assumed=assumed),
            optimizer=optimizer,
            max_grad_norm=max_grad_norm,
            router_aux_loss_coef=coefficient,
            seq_len=seq_len,
            weights=weights,
            seed=seed,
            attention=attention,
            nvme_folders=nvme_folders,
            gpu_limit=gpu_limit,
            loss=loss,
        )
        return prepare_planned(_plan(resolved, tokens_per_step, host_limit))
    if memory or tokens_per_step or seq_len or loss is not next_token:
        raise ConfigError(PLAN_NEEDS if settings == "auto" else NO_PLAN)
    if settings == "auto":
        logger.warning(
            "no plan is made without tokens_per_step and seq_len: everything is streamed and "
            "recomputed, uncompiled; give both to plan the engine as `megatrain train` does"
        )
        settings = Settings(update_threads=update_threads())
    return Prepared(skeleton, optimizer, chosen, max_grad_norm, coefficient, where, settings, seed)


def _skeleton(
    config: Any, attention: str, precision: str, weights: Weights, freeze: Sequence[str]
) -> Skeleton:
    skeleton = Skeleton(
        config,
        attention=attention,
        dtype=PRECISIONS[precision],
        trust_remote_code=weights.trust_remote_code,
    )
    skeleton.freeze([freeze] if isinstance(freeze, str) else freeze)
    return skeleton


def _plan(resolved: Resolved, tokens_per_step: int, host_limit: int | None) -> Plan:
    """The plan of steps of full rows, without checkpoints."""
    machine = resolved.machine
    plan = make_plan(
        make_job(resolved, tokens_per_step=tokens_per_step, checkpoints_written=0),
        resolved.shape,
        machine.hardware,
        machine.profile,
        gpu_limit=resolved.gpu_limit,
        host_limit=host_limit,
        nvme_limit=room_on_drives(resolved.nvme_folders, disk_free, None),
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
    machine, device = resolved.machine, resolved.machine.device
    found = device.type == "cpu" or torch.cuda.device_count() > (device.index or 0)
    here = read_hardware(".", device.type) if machine.here and found else None
    if here is None or fingerprint(here) != fingerprint(machine.hardware):
        gpu = machine.hardware.gpu
        raise PlanError(
            "from_plan: the plan was made for another machine "
            f"({gpu.name if gpu else 'without a GPU'}); make one for this machine: leave out gpu "
            "and ram"
        )
    hold_to_budget(machine, resolved.gpu_limit)
    bound_heap_if_short(plan)
    # its own: a plan may open several engines
    skeleton = _skeleton(
        resolved.skeleton.config,
        resolved.attention,
        machine.precision,
        resolved.weights,
        resolved.skeleton.freezes,
    )
    return Prepared(
        skeleton,
        resolved.optimizer,
        machine.precision,
        resolved.max_grad_norm,
        resolved.router_aux_loss_coef,
        machine.device,
        plan.choices.settings(plan.job, resolved.nvme_folders),
        resolved.seed,
        plan,
    )


def check_positions(skeleton: Skeleton, seq_len: int, name: str) -> None:
    """Raise ConfigError if sequences are longer than the model can read. `name`: of the option."""
    longest = skeleton.anatomy.max_positions
    if longest is not None and seq_len > longest:
        raise ConfigError(
            f"{name}: {seq_len} exceeds the {longest} positions of this model; set "
            f"{name.rpartition(' ')[2]}: {longest}"
        )


def check_settings(settings: Settings, max_grad_norm: float | None) -> None:
    """Raise ConfigError if gradients are to be computed twice for no norm."""
    if settings.second_backward and max_grad_norm is None:
        raise ConfigError(
            "second_backward: without max_grad_norm there is no norm to wait for; set "
            "max_grad_norm, or leave second_backward out"
        )


def check_world(
    world: World,
    skeleton: Skeleton,
    settings: Settings,
    balances: bool = False,
) -> None:
    """Raise ConfigError for what is not built for several ranks. balances: routers."""
    if world.is_alone:
        return
    if settings.transport == "read" and world.hosts > 1:
        raise ConfigError(
            f"{world.size} ranks: weights that several hosts read (set transport: gather) cannot "
            "be had yet; use one rank"
        )
    if world.pieces > 1:
        check_pieces(world.pieces, skeleton, settings.compile, balances)


def check_pieces(
    pieces: int, skeleton: Skeleton, compiled: bool, balances: bool, name: str = "context_parallel"
) -> None:
    """Raise ConfigError for what does not compute pieces of sequences as it does whole ones.

    compiled: layers are. balances: routers are. name: of the option.
    """
    refused = {
        "compiled layers (set compile: loss)": compiled,
        "a balancing loss of routers (set router_aux_loss_coef: 0)": balances,
        "dropout": skeleton.has_dropout,
        "rotary factors that follow the length of sequences": bool(regimes_of(skeleton.config)),
    }
    if found := [what for what, there in refused.items() if there]:
        raise ConfigError(f"{name}: {pieces} cannot be had with {found[0]}; set 1")
    if why := why_not_in_pieces(skeleton):
        family = skeleton.anatomy.family
        raise ConfigError(f"{name}: {pieces} cannot be had with a {family} model ({why}); set 1")


def hold_to_budget(machine: Machine, gpu_limit: int | None) -> None:
    """Let PyTorch take no more than `gpu_limit` bytes of the GPU; None: all of it."""
    gpu, hardware = machine.hardware.gpu, machine.hardware
    if machine.device.type == "cuda" and gpu is not None:
        # the user's limit counts the CUDA context and NCCL's buffers, PyTorch does not
        groups = communicators(machine.ranks, machine.hosts, machine.world.pieces)
        beside = hardware.context_bytes + communicator_bytes(groups, machine.peers)
        limit = gpu.total_bytes if gpu_limit is None else gpu_limit - beside
        share = min(1.0, max(0.0, limit / gpu.total_bytes))
        torch.cuda.set_per_process_memory_fraction(share, machine.device)


def bound_heap_if_short(plan: Plan) -> None:
    """Keep malloc to the plan's bytes, unless a CPU's run has room for the holes in its heap."""
    if plan.made_of.machine.hardware.gpu or plan.host_bytes * ROOM_FOR_HOLES > plan.budget.host:
        bound_heap()


def read_config(config: Any, trust_remote_code: bool) -> Any:
    """A transformers configuration, given or of a folder or hub id.

    Raises ModelError and ConfigError.
    """
    if isinstance(config, (str, Path)):
        found = resolve_source(config, None, weights=False)
        check_description(found.path, trust_remote_code)
        return read_model_config(found, trust_remote_code)
    if not hasattr(config, "model_type"):
        raise ConfigError(
            f"config: {type(config).__name__} is neither a transformers configuration nor a folder "
            "or hub id"
        )
    return config


def _tiers(memory: Mapping[str, Any] | None) -> tuple[int | None, int | None, tuple[Path, ...]]:
    """(gpu, host, nvme) of the keyword `memory`: bytes to use of both, None for auto, and folders.

    Raises ConfigError for an unknown key or a size that is none.
    """
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
    return sizes["gpu"], sizes["host"], tuple(Path(expanduser(folder)) for folder in folders)


def _check_sizes(**sizes: object) -> None:
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            wanted = "give a whole number of at least 1"
            raise ConfigError(f"{name}: {value!r} is out of range; {wanted}")


def _check_types(
    optimizer: object, loss: object, settings: object, seed: object, max_grad_norm: object
) -> None:
    known = isinstance(optimizer, Optimizer) and not isinstance(optimizer, type)
    if optimizer is not None and not known:
        raise ConfigError(
            f"optimizer: {optimizer!r} is none; give one such as mt.AdamW(lr=1e-5), or None for "
            "AdamW"
        )
    if not callable(loss) or isinstance(loss, type):
        raise ConfigError(f"loss: {loss!r} is none; give one such as mt.losses.Dpo()")
    if not isinstance(settings, Settings) and settings != "auto":
        raise ConfigError(f"settings: {settings!r} is neither 'auto' nor an mt.Settings")
    if type(seed) is not int:
        raise ConfigError(f"seed: {seed!r} is not a whole number")
    number = isinstance(max_grad_norm, (int, float)) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (number and 0 < max_grad_norm <= math.inf):  # type: ignore[operator]
        raise ConfigError(
            f"max_grad_norm: {max_grad_norm!r} is out of range; give a number above 0, or None for "
            "no clipping"
        )
