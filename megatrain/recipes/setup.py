"""From a config to the request of an engine and its plan: model, loss, optimizer and options."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import date, datetime
from inspect import signature
from operator import attrgetter
from typing import Any

from megatrain.config import Config
from megatrain.config.sections import EVAL_LOSS
from megatrain.data.build import Expected, load_data
from megatrain.data.encoding import RowOptions
from megatrain.data.loader import Loader
from megatrain.data.rows import MOST_CUT, Counts, Rows, cut_warnings
from megatrain.data.samples import PROMPTS
from megatrain.data.show import describe, warnings
from megatrain.data.streaming import Stream, load_stream
from megatrain.engine.components import PRECISIONS
from megatrain.engine.objective import AnyLoss
from megatrain.engine.request import Request, check_context_parallel
from megatrain.engine.resolved import Machine, Resolved, plan_of, resolve
from megatrain.errors import ConfigError, DataError, OutOfMemory, PlanError, logger
from megatrain.losses import LOSSES, Distillation, SampledDistillation, SequenceLoss
from megatrain.machine.hardware import keep_caches_small, physical_cores
from megatrain.methods import METHODS
from megatrain.optim import OPTIMIZERS, Optimizer
from megatrain.optim.schedules import warmup_steps
from megatrain.planner.plan import Plan
from megatrain.planner.rollout import OF_TRAINING, Writing, with_answers, with_phases
from megatrain.recipes.frozen import TEACHER_LOGITS, besides
from megatrain.recipes.model import Model, parts_in
from megatrain.recipes.planned_site import check_divides, notice, with_economy
from megatrain.recipes.rl.prompts import read_prompt_rows
from megatrain.recipes.rl.rollouts import Rollouts
from megatrain.reporting.words import human_bytes
from megatrain.settings import KEYS
from megatrain.world import World

MOST_PROCESSES = 16  # more wait for the one that reads the rows and writes the tokens
# of the config's data section: options of the rows, too
ROW_KEYS = ("train_on", "format", "on_bad_row", "split", "text_field", "columns", "prompts")

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
    """Make the request of a config. Raises ConfigError. kept: options by field that the config
    leaves open and a resumed run keeps."""
    value = {name: attrgetter(key)(config) for name, key in {**SAME, **SIZES}.items()}
    sizes = {name: None if value[name] == "auto" else int(value[name]) for name in SIZES}
    drawn = config.model.init == "random"
    if model.sight is None and value["freeze"] is None:
        value["freeze"] = ()
    asked, loss = {**config.asked(), **(kept or {})}, make_loss(config)
    if config.method == "distill" and asked.get("head_chunk_tokens") is None:
        asked["head_chunk_tokens"] = TEACHER_LOGITS  # of which there are both sides' logits
    return Request(
        config=model.config,
        image_row=None if model.sight is None else model.sight.row,
        source=None if drawn else config.model.source,
        optimizer=make_optimizer(config),
        loss=loss,
        asked=asked,
        packing=None if METHODS[config.method].whole_documents else config.data.packing,
        nvme_folders=config.memory.nvme or (),
        keeps_best=config.data.eval is not None,
        where=lambda name: config.where(KEY_OF.get(name, name)),
        **{**value, **sizes},
    )


def resolve_run(
    config: Config, model: Model, machine: Machine, kept: Mapping[str, Any] | None = None
) -> Resolved:
    """Resolve what a config asks for on a machine; the notices of both are logged. kept: as in
    `request_of`. Raises ModelError and ConfigError."""
    keep_caches_small()
    check_divides(config, machine.ranks)
    notice(config, machine)
    if config.rollout.vllm_server_base_url is not None:
        where = config.where("rollout.vllm_server_base_url")
        if machine.ranks > 1:
            raise ConfigError(f"{where}: a server writes for one GPU; set gpus: 1, or remove it")
        logger.info(f"{where}: the plan has neither time nor memory of what the server does")
    resolved = resolve(request_of(config, model, kept), machine)
    if (own := other_balance(resolved)) is not None:
        logger.info(
            f"the routers' balancing loss weighs {resolved.router_aux_loss_coef:g}, not {own:g} as "
            "in config.json; set train.router_aux_loss_coef for another weight"
        )
    check_shared(config, resolved)
    if model.sight is not None:  # loaders make pixels ready while the GPU computes
        model.sight.dtype = resolved.skeleton.dtype
    if towers := resolved.skeleton.findings.towers:
        trains = "trains" if config.train.freeze is not None else "is frozen (train.freeze)"
        logger.warning(f"images are read; {towers[0]} and what else sees {trains}")
    return resolved


def other_balance(resolved: Resolved) -> float | None:
    """Weight of the routers' balancing loss in config.json, if another one holds."""
    own = getattr(resolved.request.config.get_text_config(), "router_aux_loss_coef", None)
    asked, weight = resolved.request.router_aux_loss_coef, resolved.router_aux_loss_coef
    return own if weight and asked == "auto" and own != weight else None


def plan_run(config: Config, resolved: Resolved, steps: int | None = None, **known: Any) -> Plan:
    """The plan of a run with the economy of its steps, or of one if their number is not known.
    known: as `plan_of` takes it, which raises the same errors."""
    known["besides"] = besides(config, resolved)
    if METHODS[config.method].kind == PROMPTS:
        plan = plan_with_rollouts(config, resolved, **known)
    else:
        plan = plan_of(resolved, **known)
        if config.distill.lmbda and plan.fits:
            writing = writing_of(config, plan)
            seconds = config.distill.lmbda * writing.seconds(resolved.machine.profile)
            plan = with_answers(plan, writing, seconds)
        else:
            plan = with_phases(plan, {})
    return with_economy(config, plan, plan.made_of.machine, steps)


# What may give way to the keys and values of more answers.
GIVE_WAY: tuple[dict[str, Any], ...] = ({}, {"resident": 0}, {"resident": 0, "sums_on_device": 0})


def plan_with_rollouts(
    config: Config, resolved: Resolved, *, suggest: bool = False, **known: Any
) -> Plan:
    """The plan of steps that also write their answers, each as long as it may be: of those with
    more or less on the GPU the one with the shortest step. Raises PlanError if not one answer has
    room."""
    request, found = resolved.request, list[Plan]()
    if config.rollout.vllm_server_base_url is not None:  # in memory of its own
        return with_phases(plan_of(resolved, suggest=suggest, **known), {})
    for more in GIVE_WAY if resolved.machine.hardware.gpu else GIVE_WAY[:1]:
        if more.keys() <= {name for name, value in request.asked.items() if value is None}:
            asked = replace(request, asked={**request.asked, **more})
            found.append(plan_of(replace(resolved, request=asked), **known))
    written = [(plan, writing_of(config, plan)) for plan in found if plan.fits]
    if not written:
        return found[0]
    able = [(plan, writing) for plan, writing in written if writing.rows]
    if not able:
        raise PlanError(
            f"{config.where(f'{config.method}.max_completion_length')}: one answer's keys and "
            f"values take {human_bytes(written[0][1].row_bytes)}, and there is no room for them; "
            "set less"
        )
    steps = config.rollout.steps_per_generation * config.policy.num_iterations

    def spent(writing: Writing) -> float:
        return writing.seconds(resolved.machine.profile) / steps

    plan, writing = min(able, key=lambda one: one[0].timing.seconds + spent(one[1]))
    plan = plan_of(plan.made_of, suggest=True, **known) if suggest else plan
    return with_answers(plan, writing, spent(writing))


def writing_of(config: Config, plan: Plan) -> Writing:
    """The rollout of a rank."""
    resolved: Resolved = plan.made_of
    request = resolved.request
    text, budget = request.config.get_text_config(), plan.budget
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    itemsize = PRECISIONS[resolved.machine.precision].itemsize
    stays = sum(size for name, size in plan.device.items() if name not in OF_TRAINING)
    if config.distill.lmbda:
        prompts, count = max(1, plan.job.rank_tokens // plan.job.seq_len), 1
        longest = min(config.distill.max_completion_length, (request.seq_len or 2) - 1)
    else:
        count, longest = config.policy.num_generations, config.policy.max_completion_length
        prompts = config.rollout.generation_batch_size // count
        prompts = -(-prompts // plan.job.size)  # a rank writes whole groups
    return Writing(
        answers=prompts * count,
        prompts=prompts,
        prompt=(request.seq_len or 0) - longest,
        length=longest,
        parameters=plan.active_parameters,
        weight_bytes=itemsize * (plan.parameters + plan.frozen_parameters),
        token_bytes=2 * itemsize * text.num_hidden_layers * heads * head,
        vocabulary=text.vocab_size,
        layers=text.num_hidden_layers,
        room=budget.host // 2 if budget.gpu is None else budget.gpu - stays,
    )


def make_loss(config: Config) -> AnyLoss:
    """The loss of the config's method. Raises ConfigError."""
    given, method = config.of_method, METHODS[config.method]
    # a section also says how answers are rewarded, or who teaches
    of_loss = signature(LOSSES[config.method]).parameters
    given = {name: value for name, value in given.items() if name in of_loss}
    if method.kind == PROMPTS:
        given["temperature"] = config.rollout.temperature
    try:
        loss = LOSSES[config.method](**given)
    except ConfigError as error:
        raise ConfigError(f"{config.where(config.method)}: {error}") from error
    if isinstance(loss, Distillation) and config.distill.signal == "sampled":
        loss = SampledDistillation(temperature=config.distill.temperature, whole=loss)
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
    """The config's optimizer, with its defaults for `auto`. Raises ConfigError for others' keys."""
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


# -- processes -------------------------------------------------------------------------------------


@contextmanager
def memory_errors(plan: Plan) -> Iterator[None]:
    """Raise OutOfMemory, with the plan's figure and a remedy, when host RAM does not suffice. The
    engine does so for the GPU."""
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


# -- sequences shared by ranks ---------------------------------------------------------------------


def sharing(config: Config, world: World) -> World:
    """The world with `train.context_parallel` ranks to a sequence. Raises ConfigError."""
    check_divides(config, world.local_size)
    return world.sharing_sequences(config.train.context_parallel)


def check_shared(config: Config, resolved: Resolved) -> None:
    """Raise ConfigError for what sequences cannot be shared with."""
    pieces, where = config.train.context_parallel, config.where("train.context_parallel")
    if pieces == 1:
        return
    if isinstance(resolved.request.loss, SequenceLoss):
        raise ConfigError(
            f"{where}: {pieces} does not work with method: {config.method}, whose loss is over "
            "whole sequences; set 1"
        )
    balances, compiled = resolved.router_aux_loss_coef > 0, resolved.compile is True
    check_context_parallel(pieces, resolved.skeleton, compiled, balances, where)


def micro_batch_of(config: Config, plan: Plan) -> int:
    """Tokens of a micro-batch's whole sequences, padding included."""
    asked, pieces = config.train.micro_batch_tokens, config.train.context_parallel
    return plan.choices.micro_batch_tokens * pieces if asked == "auto" or pieces == 1 else asked


# -- rows ------------------------------------------------------------------------------------------


def check_cuts(config: Config, counts: Counts, expected: Expected | None = None) -> None:
    """Raise DataError where more than MOST_CUT of all tokens are cut off, and the config says
    neither how rows are cut nor how long they may be. expected: of a run that goes on so."""
    keys, mode = ("data.truncation_mode", "train.seq_len"), config.data.truncation_mode
    by_hand = any(config.where(key) != key for key in keys)
    if counts.cut_share > MOST_CUT and expected is None and not by_hand:
        (said,) = cut_warnings(counts, config.train.seq_len, mode)
        raise DataError(f"{said}; set {' or '.join(keys)} to say what is to be kept")


def check_metric(config: Config, found: Mapping[str, float] | None) -> None:
    """Raise ConfigError if the first evaluation lacks the figure by which the best is chosen."""
    metric = config.checkpoint.metric
    if metric != EVAL_LOSS and metric not in (found or {}):
        known = ", ".join(found or ["none"])
        raise ConfigError(
            f"{config.where('checkpoint.metric')}: evaluations of this run have no {metric}; "
            f"they have {known}"
        )


def open_rows(
    config: Config,
    model: Model,
    day: date | None = None,
    expected: Expected | None = None,
    at_once: bool = True,
) -> tuple[Rows, Rows | None, Stream | None]:
    """Tokenised training and held-out rows, with data.streaming of the first window, and then all
    windows. Raises DataError.

    For `pretrain` documents are packed into rows of seq_len tokens.

    Args:
        day: told to chat templates; None: the config's.
        expected: the rows of a run that goes on.
        at_once: as in `load_stream`.
    """
    data, seq_len = config.data, config.train.seq_len
    method = METHODS[config.method]
    if method.kind == PROMPTS:
        return *read_prompt_rows(config, model, day or day_of(config)), None
    most = min(physical_cores(), MOST_PROCESSES)
    options = RowOptions(
        seq_len,
        processes=data.processes if isinstance(data.processes, int) else most,
        vocab_size=model.vocab_size,
        day=day or day_of(config),
        kind=method.kind,
        sight=model.sight,
        **data.model_dump(include={*ROW_KEYS, "truncation_mode"}),
    )

    more: dict[str, Any] = {
        "seed": config.train.seed,
        "pack_to": seq_len if method.whole_documents else None,
        "expected": expected,
    }

    train, held_out = (
        parts_in(config, given) if isinstance(given, tuple) else given
        for given in (data.train, data.eval)
    )
    if data.streaming:
        return load_stream(train, held_out, model.tokenizer, options, at_once=at_once, **more)
    return (*load_data(train, held_out, model.tokenizer, options, **more), None)


def say_rows(rows: Rows, held_out: Rows | None = None) -> None:
    """Log how many rows and tokens there are, and what was lost or looks wrong."""
    for line in describe(rows):
        logger.info(line)
    for line in warnings(rows, held_out):
        logger.warning(line)


def say_steps(config: Config, loader: Loader | Rollouts) -> None:
    """Warn of steps that cannot be of the size that was asked for, and of a rate never reached."""
    train, rows, steps = config.train, loader.rows, loader.steps_total()
    if train.tokens_per_step and (longer := int((rows.lengths > train.tokens_per_step).sum())):
        logger.warning(
            f"{longer:,} of {len(rows):,} rows are longer than train.tokens_per_step "
            f"{train.tokens_per_step:,}, the longest {int(rows.lengths.max()):,} tokens: a step "
            "takes one row at least, so it is larger there"
        )
    if steps < (warming := warmup_steps(train.warmup, steps)):
        logger.warning(
            f"train.learning_rate {train.learning_rate:g} is never reached: the warm-up takes "
            f"{warming:,} steps and the run {steps:,}; the highest rate is "
            f"{train.learning_rate * steps / warming:.3g}; set a lower train.warmup"
        )


def day_of(config: Config) -> date:
    """The date that chat templates get: the config's, else today in this machine's time zone."""
    if config.data.date == "auto":
        return datetime.now().astimezone().date()
    return date.fromisoformat(config.data.date)
