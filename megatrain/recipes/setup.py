"""From a config to the request of an engine and its plan: model, loss, optimizer and options."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from megatrain.config import Config
from megatrain.engine.objective import AnyLoss
from megatrain.engine.request import Request
from megatrain.engine.resolved import Machine, Resolved, plan_of, resolve
from megatrain.errors import ConfigError, OutOfMemory
from megatrain.losses import LOSSES, SequenceLoss
from megatrain.machine.datasheets import FIRST_BFLOAT16, board_power_w
from megatrain.machine.hardware import keep_caches_small
from megatrain.methods import METHODS
from megatrain.optim import OPTIMIZERS, Optimizer
from megatrain.planner.plan import Plan
from megatrain.recipes.model import Model
from megatrain.recipes.ranks.context_parallel import check_divides, check_shared
from megatrain.reporting.energy import Economy, Prices, planned_economy, planned_power
from megatrain.reporting.summary import human_bytes
from megatrain.settings import KEYS

logger = logging.getLogger("megatrain")

# fields of `Request` that are keys of the config; `auto` stays what it is
SAME = {
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    **{name: name for name in ("precision", "attention", "device", "compile", "output")},
    **{
        name: f"train.{name}"
        for name in (
            *("max_grad_norm", "router_aux_loss_coef", "seed", "tokens_per_step", "rows_per_step"),
            *("seq_len", "freeze", "wire", "context_parallel"),
        )
    },
    **{name: f"memory.{name}" for name in ("activations", "transport")},
    "checkpoints_kept": "checkpoint.keep",
}
SIZES = {  # the same, but `auto` is None
    "gpu_limit": "memory.gpu",
    "host_limit": "memory.host",
    "nvme_limit": "memory.nvme_size",
}
KEY_OF = {**KEYS, **SAME, **SIZES, "packing": "data.packing"}


def request_of(config: Config, model: Model, kept: Mapping[str, Any] | None = None) -> Request:
    """Make the request of a config. Raises ConfigError.

    kept: options by field that the config leaves open and a resumed run keeps.
    """
    value = {name: attrgetter(key)(config) for name, key in {**SAME, **SIZES}.items()}
    sizes = {name: None if value[name] == "auto" else int(value[name]) for name in SIZES}
    drawn = config.model.init == "random"
    return Request(
        config=model.config,
        source=None if drawn else config.model.source,
        optimizer=make_optimizer(config),
        loss=make_loss(config),
        asked={**config.asked(), **(kept or {})},
        packing=None if METHODS[config.method].whole_documents else config.data.packing,
        nvme_folders=config.memory.nvme or (),
        keeps_best=config.data.eval is not None,
        where=lambda name: config.where(KEY_OF.get(name, name)),
        **{**value, **sizes},
    )


def resolve_run(
    config: Config, model: Model, machine: Machine, kept: Mapping[str, Any] | None = None
) -> Resolved:
    """Resolve what a config asks for on a machine; the notices of both are logged.

    kept: as in `request_of`. Raises ModelError and ConfigError.
    """
    keep_caches_small()
    check_divides(config, machine.ranks)
    notice_no_bfloat16(machine)
    notice_no_effect(config, machine)
    resolved = resolve(request_of(config, model, kept), machine)
    notice_other_balance(config, resolved)
    check_shared(config, resolved)
    return resolved


def plan_run(config: Config, resolved: Resolved, steps: int | None = None, **known: Any) -> Plan:
    """The plan of a run with its economy.

    steps: of the whole run, if known. known: as `plan_of` takes it, which raises the same errors.
    """
    plan = plan_of(resolved, **known)
    return replace(plan, economy=planned(config, plan, steps) if plan.fits else None, steps=steps)


def planned(config: Config, plan: Plan, steps: int | None) -> Economy:
    """Time, energy and cost of the run's steps, or of one if their number is not known."""
    options, timing, gpu = config.economy, plan.timing, plan.made_of.machine.hardware.gpu
    of_gpu = (board_power_w(gpu.name), options.gpu_power_w) if gpu else (None, None)
    power = planned_power(timing.busy, *of_gpu, options.host_power_w)
    power = power.of_all(plan.job.size, plan.job.hosts)
    seconds = (steps or 1) * timing.seconds
    tokens = round(seconds * timing.tokens_per_s)
    return planned_economy(tokens, seconds, power, prices_of(config).times(plan.job.hosts))


def prices_of(config: Config) -> Prices:
    options = config.economy
    return Prices(options.price_per_hour, options.price_per_kwh, options.currency)


def make_loss(config: Config) -> AnyLoss:
    """The loss of the config's method. Raises ConfigError."""
    try:
        loss = LOSSES[config.method](**config.of_method)
    except ConfigError as error:
        raise ConfigError(f"{config.where(config.method)}: {error}") from error
    of_step = isinstance(loss, SequenceLoss) and loss.whole_step
    if of_step and config.train.groups not in ("auto", 1):
        raise ConfigError(
            f"{config.where('train.groups')}: {config.train.groups} groups, but the loss is over a "
            "whole step; remove it, or set 1"
        )
    if config.data.streaming and isinstance(loss, SequenceLoss) and loss.reference:
        raise ConfigError(
            f"{config.where('data.streaming')}: method: {config.method} computes a reference over "
            "all rows before the first step; remove it, or choose a method without a reference"
        )
    return loss


def make_optimizer(config: Config) -> Optimizer:
    """The config's optimizer, with its own defaults for `auto`.

    Raises ConfigError for a key that it does not have.
    """
    made: type[Any] = OPTIMIZERS[config.optimizer.name]
    known = {field.name for field in fields(made)}
    chosen = {key: value for key, value in config.optimizer if key != "name" and value != "auto"}
    for key in chosen:
        if key not in known:
            where = config.where(f"optimizer.{key}")
            raise ConfigError(f"{where}: {config.optimizer.name} has no {key}; remove the key")
    optimizer: Optimizer = made(lr=config.train.learning_rate, **chosen)
    return optimizer


def decided_of_optimizer(config: Config) -> dict[str, Any]:
    """The values of the optimizer's keys that are left to its own defaults."""
    own = vars(make_optimizer(config))
    left = [key for key, value in config.optimizer if value == "auto"]
    return {f"optimizer.{key}": own[key] for key in left if own.get(key) is not None}


# -- notices ---------------------------------------------------------------------------------------


def notice_no_bfloat16(machine: Machine) -> None:
    """Warn of a GPU that has no bf16 units: what that costs, and what to set."""
    gpu = machine.hardware.gpu
    if gpu is not None and gpu.capability < FIRST_BFLOAT16:
        instead = "it computes in float32, several times slower than cards that have them"
        if machine.precision != "float32":
            instead = "it emulates them slowly; set precision: float32"
        logger.warning(f"{gpu.name} has no bf16 units: {instead}")


def notice_no_effect(config: Config, machine: Machine) -> None:
    """Log keys for several GPUs or hosts that have no effect where one trains."""
    several = machine.ranks * machine.hosts
    for key, value, without, others, trains in (
        ("memory.transport", config.memory.transport, ("auto",), machine.ranks, "GPU of a host"),
        ("memory.replicated", config.memory.replicated, ("auto", 0), several, "GPU"),
        ("train.wire", config.train.wire, ("float32",), machine.hosts, "host"),
    ):
        if others == 1 and value not in without:
            logger.info(f"{config.where(key)}: {value} has no effect where one {trains} trains")


def notice_other_balance(config: Config, resolved: Resolved) -> None:
    """Log a weight of the routers' balancing loss that differs from the model's config.json, which
    holds in transformers only with output_router_logits."""
    own = getattr(resolved.request.config.get_text_config(), "router_aux_loss_coef", None)
    weight, asked = resolved.router_aux_loss_coef, config.train.router_aux_loss_coef
    if weight and asked == "auto" and own not in (None, weight):
        logger.info(
            f"the routers' balancing loss weighs {weight:g}, not {own:g} as in config.json; "
            "set train.router_aux_loss_coef for another weight"
        )


# -- processes -------------------------------------------------------------------------------------


@contextmanager
def memory_errors(plan: Plan) -> Iterator[None]:
    """Raise OutOfMemory, with the plan's figure and a remedy, when host RAM does not suffice.

    The engine does so for the GPU.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        of_torch = "DefaultCPUAllocator" in str(error)
        if isinstance(error, RuntimeError) and not of_torch:
            raise
        smaller = max(plan.job.seq_len, plan.choices.micro_batch_tokens // 2) * plan.job.pieces
        reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise OutOfMemory(
            f"out of host memory, although only {human_bytes(plan.host_bytes)} were planned; close "
            f"other programs, or set train.micro_batch_tokens: {smaller} ({reason})"
        ) from error


def quiet_libraries() -> None:
    """Keep the Hugging Face libraries' advice off the terminal; we pass on their errors."""
    import huggingface_hub
    import transformers

    # read when datasets is imported, which only the hub's rows need
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # it warns of every retry
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
