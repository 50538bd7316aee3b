"""From a config to a plan and an engine: model, machine, optimizer and options are wired here."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from typing import Any, Literal

import torch

from megatrain.config import Config
from megatrain.engine.build import (
    bound_heap_if_short,
    check_positions,
    hold_to_budget,
)
from megatrain.engine.engine import Engine
from megatrain.engine.objective import AnyLoss
from megatrain.engine.placement import PRECISIONS
from megatrain.engine.resolved import (
    Machine,
    Resolved,
    Weights,
    least_tokens,
    make_job,
    resolve,
)
from megatrain.engine.routing import check_groups, coefficient_of
from megatrain.errors import ConfigError, OutOfMemory
from megatrain.losses import LOSSES, SequenceLoss
from megatrain.machine.datasheets import board_power_w
from megatrain.machine.hardware import Hardware, keep_caches_small
from megatrain.methods import METHODS
from megatrain.models.pretrained import resolve_source
from megatrain.models.skeleton import Skeleton
from megatrain.planner.job import StepTokens
from megatrain.planner.memory import disk_bytes
from megatrain.planner.plan import Plan, make_plan
from megatrain.recipes.day import day_of
from megatrain.recipes.model import Model, read_model, suited
from megatrain.recipes.nvme import least, nvme_room
from megatrain.recipes.optimizers import make_optimizer
from megatrain.recipes.ranks.context_parallel import check_divides, check_shared
from megatrain.recipes.remarks import (
    say_if_config_has_another,
    say_if_without_bfloat16,
    say_what_takes_several,
)
from megatrain.recipes.this_machine import find_machine
from megatrain.reporting.energy import Economy, Prices, planned_economy, planned_power
from megatrain.reporting.words import human_bytes
from megatrain.settings import contradiction
from megatrain.world import ALONE, World

logger = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Parts:
    """A run before anything is allocated: what is asked for, and what that comes to here.

    Attributes:
        day: told to chat templates that ask for the time.
        step_tokens, trained_share: as in `planner.job.Job`, once the rows were read.
        kept: options by field that the config leaves open and a run goes on with.
    """

    config: Config
    model: Model
    resolved: Resolved
    day: date
    step_tokens: tuple[StepTokens, ...] = ()
    trained_share: float = 1.0
    kept: Mapping[str, Any] = field(default_factory=dict)

    @property
    def machine(self) -> Machine:
        return self.resolved.machine


def prepare(
    config: Config,
    model: Model | None = None,
    machine: Machine | None = None,
    *,
    may_measure: bool = False,
    world: World = ALONE,
) -> Parts:
    """Take the model apart for this machine. Raises ModelError and ConfigError.

    Args:
        model: another than the config's, which is read by default.
        machine: another than this one.
        may_measure: measure unknown rates of a machine, for seconds, instead of guessing them.
        world: the ranks that share this machine.
    """
    keep_caches_small()
    model = suited(model or read_model(config), config)
    machine = machine or find_machine(config, may_measure=may_measure, world=world)
    check_divides(config, machine.ranks)
    say_if_without_bfloat16(machine)
    say_what_takes_several(config, machine)
    train, source, loss = config.train, config.model, make_loss(config)
    skeleton = Skeleton(
        model.config,
        attention=config.attention,
        dtype=PRECISIONS[machine.precision],
        trust_remote_code=source.trust_remote_code,
    )
    skeleton.freeze(train.freeze, config.where("train.freeze"))
    check_positions(skeleton, train.seq_len, config.where("train.seq_len"))
    packing = packing_of(config, skeleton, machine)
    name, groups = config.where("train.router_aux_loss_coef"), unless_auto(train.groups)
    coefficient = coefficient_of(skeleton, train.router_aux_loss_coef, name)
    check_groups(coefficient, groups, "train.", config.where("train.groups"))
    say_if_config_has_another(coefficient, train.router_aux_loss_coef, model.config)
    weights = None if source.init == "random" else source.source
    resolved = resolve(
        skeleton,
        machine,
        optimizer=make_optimizer(config),
        max_grad_norm=train.max_grad_norm,
        router_aux_loss_coef=coefficient,
        seq_len=train.seq_len,
        weights=Weights(weights, source.revision, source.trust_remote_code),
        packing=packing,
        compile=config.compile,
        micro_batch_tokens=micro_batch_tokens(config, least_tokens(loss, train.seq_len)),
        loss=loss,
        layer_chunk_tokens=train.layer_chunk_tokens,
        seed=train.seed,
        attention=config.attention,
        nvme_folders=config.memory.nvme or (),
        gpu_limit=unless_auto(config.memory.gpu),
        pieces=train.context_parallel,
    )
    check_shared(config, resolved)
    return Parts(config, model, resolved, machine.world.told(day_of(config)))


def packing_of(
    config: Config, skeleton: Skeleton, machine: Machine
) -> bool | Literal["auto"] | None:
    """Whether examples are packed; None: rows are whole documents. Raises ConfigError."""
    packing = None if METHODS[config.method].whole_documents else config.data.packing
    if packing is True and not skeleton.separates_documents(machine.device):
        why = skeleton.why_together(machine.device) if machine.device.type != "cpu" else ""
        raise ConfigError(
            f"{config.where('data.packing')}: a {skeleton.anatomy.family} model does not keep "
            f"examples apart that are packed into one sequence{f' ({why})' if why else ''}; "
            "set data.packing: false"
        )
    return packing


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


# -- plan ------------------------------------------------------------------------------------------


def make_run_plan(
    parts: Parts,
    checkpoints_written: int | None = None,
    steps: int | None = None,
    suggest: bool = False,
) -> Plan:
    """Decide what the config leaves open, and lay out memory and step.

    Never raises for lack of memory: `Plan.check` does.

    Args:
        checkpoints_written: by the run, if known.
        steps: of the whole run, if known.
        suggest: find out what would make it faster, too.
    """
    config, resolved, machine = parts.config, parts.resolved, parts.machine
    train, asked = config.train, config.asked() | dict(parts.kept)
    given = asked | {"compile": resolved.compile, "nvme_folders": resolved.nvme_folders}
    if found := contradiction(given, in_config=True):  # `compile: auto` is settled only here
        raise ConfigError(f"{config.where(found[0])}: {found[1]}")
    job = make_job(
        resolved,
        tokens_per_step=train.tokens_per_step or (train.rows_per_step or 1) * train.seq_len,
        rows_per_step=train.rows_per_step,
        step_tokens=parts.step_tokens,
        trained_share=parts.trained_share,
        activations=config.memory.activations,
        transport=transport_of(config, machine),
        wire=train.wire,
        checkpoints_kept=config.checkpoint.keep,
        keeps_best=config.data.eval is not None,
        checkpoints_written=checkpoints_written,
        **asked,
    )
    room = nvme_room(config, machine.hardware, disk_bytes(job, resolved.shape))
    plan = make_plan(
        job,
        resolved.shape,
        machine.hardware,
        machine.profile,
        suggest=suggest,
        gpu_limit=resolved.gpu_limit,
        host_limit=unless_auto(config.memory.host),
        nvme_limit=least(machine.world.every(room)),
    )
    economy = predicted_economy(config, machine.hardware, plan, steps) if plan.fits else None
    return replace(
        plan,
        economy=economy,
        steps=steps,
        drives_assumed=tuple(map(str, machine.drives_assumed)),
        ranks_assumed=machine.together_assumed,
        made_of=resolved,
    )


def transport_of(config: Config, machine: Machine) -> str:
    """How weights come to a host's GPUs: the config's choice, or what these can do."""
    if config.memory.transport != "auto":
        return config.memory.transport
    return "gather" if machine.peers or machine.hosts > 1 else "read"


def predicted_economy(config: Config, hardware: Hardware, plan: Plan, steps: int | None) -> Economy:
    """Time, energy and cost of the run's steps, or of one if their number is not known."""
    given, timing = config.economy, plan.timing
    gpu = (board_power_w(hardware.gpu.name), given.gpu_power_w) if hardware.gpu else (None, None)
    power = planned_power(timing.busy, *gpu, given.host_power_w)
    power = power.of_all(plan.job.size, plan.job.hosts)
    seconds = (steps or 1) * timing.seconds
    tokens = round(seconds * timing.tokens_per_s)
    return planned_economy(tokens, seconds, power, prices_of(config).times(plan.job.hosts))


def prices_of(config: Config) -> Prices:
    given = config.economy
    return Prices(given.price_per_hour, given.price_per_kwh, given.currency)


def unless_auto(value: int | str) -> int | None:
    """The number, or None where the planner decides."""
    return None if value == "auto" else int(value)


def micro_batch_tokens(config: Config, least: int) -> int | None:
    """Padded tokens computed at once; None: the planner decides.

    Raises ConfigError if they do not hold one row, of `least` tokens.
    """
    tokens, seq_len = unless_auto(config.train.micro_batch_tokens), config.train.seq_len
    if tokens is not None and tokens < least:
        where = config.where("train.micro_batch_tokens")
        row = "one row" if least == seq_len else "a pair of rows"
        raise ConfigError(
            f"{where}: {tokens} cannot hold {row} of train.seq_len {seq_len} tokens; raise it or "
            "lower seq_len"
        )
    return tokens


# -- engine ----------------------------------------------------------------------------------------


def make_engine(parts: Parts, plan: Plan, *, load: bool = True) -> Engine:
    """The engine that the plan describes, its weights read or drawn.

    load: false leaves them zero, for a checkpoint to fill.
    """
    resolved, machine = parts.resolved, parts.machine
    hold_to_budget(machine, resolved.gpu_limit)
    bound_heap_if_short(plan)
    engine = Engine(
        resolved.skeleton,
        optimizer=resolved.optimizer,
        precision=machine.precision,
        max_grad_norm=resolved.max_grad_norm,
        router_aux_loss_coef=resolved.router_aux_loss_coef,
        device=machine.device,
        settings=plan.choices.settings(plan.job, resolved.nvme_folders),
        seed=resolved.seed,
        world=machine.world,
    )
    try:
        if load:
            fill(engine, parts.config)
    except BaseException:
        engine.close()
        raise
    return engine


def fill(engine: Engine, config: Config) -> None:
    """Draw the weights at random, or read them, from the hub if need be. Raises ModelError."""
    model, constants = config.model, list(engine.constants)
    weights = engine.anatomy.parameters + engine.anatomy.frozen_parameters
    if constants:
        logger.info(
            f"{len(constants)} tensors are not trained and stay as they are: {constants[0]} and "
            "others like it"
        )
    if model.init == "random":
        logger.info(f"drawing {weights:,} weights at random")
        engine.draw_weights()
    else:
        logger.info(f"reading {weights:,} weights from {model.source}")
        # a host's ranks would wait for each other's downloads without a sign of life
        source = engine.world.in_turn(partial(resolve_source, model.source, model.revision))
        engine.load_weights(source, model.trust_remote_code)
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()  # what that took on the GPU


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


# -- libraries -------------------------------------------------------------------------------------


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
