"""From a config to the parts of a run. The only place that wires models, data, plan and engine together."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatrain.config import Config
from megatrain.economy import Economy, Prices, predicted, predicted_power
from megatrain.engine.build import choose_device, choose_precision, randomize
from megatrain.engine.engine import Engine
from megatrain.engine.head import token_logprobs
from megatrain.engine.settings import PRECISIONS, Settings
from megatrain.errors import ConfigError, OutOfMemory
from megatrain.hardware import Hardware, keep_heap_small, probe
from megatrain.machine import MachineProfile, board_power_w
from megatrain.models.fp8 import Fp8Policy
from megatrain.models.pretrained import Source, load_config_and_tokenizer, resolve_source
from megatrain.models.shape import ModelShape, layer_chunks, shape_of
from megatrain.models.skeleton import Skeleton
from megatrain.models.weights import load_weights
from megatrain.planner import AUTO_MICRO_BATCH_TOKENS, Job, Plan, make_plan
from megatrain.planner_bytes import disk_bytes
from megatrain.planner_job import StepTokens
from megatrain.recipes.doctor import measured_or_typical
from megatrain.recipes.nvme import asked_of_nvme, nvme_room, on_nvme, with_drives
from megatrain.recipes.optimizers import make_optimizer, state_bytes, whole_update, with_lighter_moments
from megatrain.report import human_bytes
from megatrain.run_folder import bytes_of_checkpoints

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

# Attention computes what the mask hides, and the mask takes a byte an entry: long sequences of short rows would cost more than padding.
AUTO_PACKED_TOKENS = 4096

logger = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Model:
    """A model as its files describe it: everything but the weights."""

    source: Source
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig | None

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def pad_id(self) -> int:
        """The token that fills rows; any will do, since no real token sees it and it has no target."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in ids if token is not None), 0)


@dataclass(frozen=True)
class Machine:
    """Where the run computes, in what precision, and how fast that is."""

    device: torch.device
    precision: str
    hardware: Hardware
    profile: MachineProfile
    compiles: bool | None = None  # None: if a compiler is found here
    drives_assumed: tuple[Path, ...] = ()  # folders of memory.nvme whose drives nobody measured


@dataclass(frozen=True)
class Parts:
    """What is known of a run before anything is allocated; of its rows only `step_tokens`, as `Job` has them, once they were read."""

    model: Model
    machine: Machine
    skeleton: Skeleton
    shape: ModelShape
    step_tokens: tuple[StepTokens, ...] = ()


def prepare(config: Config, *, may_measure: bool = False) -> Parts:
    """Read the model's description and the machine's. Raises ModelError and ConfigError for what cannot run at all.

    may_measure: a machine whose rates are not known yet may be measured for some seconds; else they are guessed.
    """
    keep_heap_small()
    return assemble(config, read_model(config), find_machine(config, may_measure=may_measure))


def assemble(config: Config, model: Model, machine: Machine) -> Parts:
    """The model taken apart on this machine. Raises ModelError and ConfigError for what cannot run at all."""
    skeleton = make_skeleton(config, model, machine)
    return Parts(model, machine, skeleton, make_shape(config, skeleton, machine))


def read_model(config: Config) -> Model:
    """Configuration and tokenizer of the config's model; of a hub model nothing else is downloaded. Raises ModelError."""
    return describe_model(config.model.source, config.model.revision, config.model.trust_remote_code)


def describe_model(source: str, revision: str | None = None, trust_remote_code: bool = False) -> Model:
    """Configuration and tokenizer of a folder, a GGUF file or a hub id. Raises ModelError."""
    found = resolve_source(source, revision, weights=False)
    return Model(found, *load_config_and_tokenizer(found, trust_remote_code))


def find_machine(config: Config, *, may_measure: bool = False) -> Machine:
    """The device that `device` and `precision` choose, and what the machine has and can. Raises ConfigError. may_measure: as `prepare`."""
    device = choose_device(config.device)
    hardware = probe(config.output, device.type)
    # what the run's own checkpoints take is the run's to use again: they make room for the next ones
    hardware = replace(hardware, disk_free_bytes=hardware.disk_free_bytes + bytes_of_checkpoints(config.output))
    profile = measured_or_typical(hardware, device, may_measure=may_measure)
    profile, assumed = with_drives(profile, config, hardware, may_measure=may_measure)
    return Machine(device, choose_precision(config.precision, device), hardware, profile, drives_assumed=assumed)


def make_skeleton(config: Config, model: Model, machine: Machine) -> Skeleton:
    """The model without weights. Raises ModelError if its family cannot be streamed, ConfigError if rows are longer than it can read."""
    skeleton = Skeleton(
        model.config,
        attention=config.attention,
        dtype=PRECISIONS[machine.precision],
        trust_remote_code=config.model.trust_remote_code,
    )
    longest = skeleton.anatomy.max_positions
    if longest is not None and config.train.seq_len > longest:
        where = config.where("train.seq_len")
        raise ConfigError(f"{where}: {config.train.seq_len} exceeds the {longest} positions of this model; set train.seq_len: {longest}")
    return skeleton


def make_shape(config: Config, skeleton: Skeleton, machine: Machine) -> ModelShape:
    """What the planner knows of the model. Raises ModelError."""
    device, seq_len = machine.device.type, config.train.seq_len
    sizes = micro_batch_sizes(seq_len, device, micro_batch_tokens(config))
    compiled, packed = choose_compile(config, skeleton, machine), packed_to(config, skeleton, machine) is not None
    # No mask is counted for padded rows: they are padded at their ends, where causal attention needs none, and the engine drops it.
    chunks = layer_chunks(config.train.layer_chunk_tokens, max(sizes))
    like = {"padded": packed, "compiled": compiled, "fp8": machine.precision == "fp8"}
    return shape_of(skeleton, seq_len, sizes, head_loss=next_token_on_meta, runs_on=device, layer_chunks=chunks, **like)


# -- plan ---------------------------------------------------------------------------------------------------------------------------


def make_run_plan(
    config: Config, parts: Parts, checkpoints_written: int | None = None, steps: int | None = None, suggest: bool = False
) -> Plan:
    """Decide what the config leaves open, and lay out memory and step. Raises nothing for lack of memory: `Plan.check` does.

    steps: of the whole run, if known. suggest: find out what would make it faster, too.
    """
    train, optimizer = config.train, make_optimizer(config)
    job = Job(
        precision=parts.machine.precision,
        tokens_per_step=max(train.tokens_per_step or (train.rows_per_step or 1) * train.seq_len, train.seq_len),
        seq_len=train.seq_len,
        rows_per_step=train.rows_per_step,
        clipping=train.max_grad_norm is not None,
        state_bytes=state_bytes(optimizer, parts.skeleton),
        whole_update=whole_update(optimizer, parts.skeleton),
        update_arithmetic=optimizer.arithmetic,
        lighter_moments=tuple(
            (moments, state_bytes(lighter, parts.skeleton), lighter.arithmetic) for moments, lighter in with_lighter_moments(optimizer)
        ),
        fp8_share=Fp8Policy().share(parts.skeleton.layers),
        compiled=choose_compile(config, parts.skeleton, parts.machine),
        step_tokens=parts.step_tokens,
        activations=config.memory.activations,
        draws_weights=config.model.init == "random",
        lengths_vary=lengths_vary(config, parts.skeleton, parts.machine),
        micro_batch_tokens=micro_batch_tokens(config),
        groups=unless_auto(train.groups),
        head_chunk_tokens=unless_auto(train.head_chunk_tokens),
        layer_chunk_tokens=unless_auto(train.layer_chunk_tokens or 0),
        resident=unless_auto(config.memory.resident),
        retained=unless_auto(train.retained),
        cheap_retention=flag_unless_auto(train.cheap_retention),
        offload=flag_unless_auto(config.memory.offload_activations),
        retained_on_host=unless_auto(config.memory.retained_on_host),
        second_backward=flag_unless_auto(config.memory.second_backward),
        **asked_of_nvme(config),
        update_threads=unless_auto(config.threads),
        checkpoints_kept=config.checkpoint.keep,
        keeps_best=config.data.eval is not None,
        checkpoints_written=checkpoints_written,
    )
    limits = {"gpu_limit": unless_auto(config.memory.gpu), "host_limit": unless_auto(config.memory.host)}
    limits["nvme_limit"] = nvme_room(config, parts.machine.hardware, disk_bytes(job, parts.shape))
    plan = make_plan(job, parts.shape, parts.machine.hardware, parts.machine.profile, suggest=suggest, **limits)
    economy, assumed = predicted_economy(config, parts.machine.hardware, plan, steps), tuple(map(str, parts.machine.drives_assumed))
    return replace(plan, economy=economy, steps=steps, drives_assumed=assumed)


def predicted_economy(config: Config, hardware: Hardware, plan: Plan, steps: int | None) -> Economy:
    """Time, energy and cost of so many steps, or of one."""
    options, count = config.economy, steps or 1
    board_w = None if hardware.gpu is None else board_power_w(hardware.gpu.name)
    power = predicted_power(plan.timing.busy, board_w, options.gpu_power_w if hardware.gpu else None, options.host_power_w)
    seconds = count * plan.timing.seconds
    return predicted(round(seconds * plan.timing.tokens_per_s), seconds, power, prices_of(config))


def prices_of(config: Config) -> Prices:
    options = config.economy
    return Prices(options.price_per_hour, options.price_per_kwh, options.currency)


def unless_auto(value: int | str) -> int | None:
    """The number, or None where the planner decides."""
    return None if value == "auto" else int(value)


def flag_unless_auto(value: bool | str) -> bool | None:
    """The flag, or None where the planner decides."""
    return None if value == "auto" else bool(value)


def micro_batch_tokens(config: Config) -> int | None:
    """Padded tokens computed at once, or None where the planner decides. Raises ConfigError if a row would not fit."""
    tokens, seq_len = unless_auto(config.train.micro_batch_tokens), config.train.seq_len
    if tokens is not None and tokens < seq_len:
        where = config.where("train.micro_batch_tokens")
        raise ConfigError(f"{where}: {tokens} cannot hold one row of train.seq_len {seq_len} tokens; raise it or lower seq_len")
    return tokens


def micro_batch_sizes(seq_len: int, device_type: str, wanted: int | None) -> list[int]:
    """Sizes whose memory the planner should know: the one asked for, or one row and doublings up to the largest that pays."""
    if wanted is not None:
        return [wanted]
    largest = max(seq_len, AUTO_MICRO_BATCH_TOKENS[device_type])
    return [seq_len << i for i in range((largest // seq_len).bit_length())]


def next_token_on_meta(logits: torch.Tensor) -> torch.Tensor:
    """The loss as the head computes it, for the planner's dry run on logits [n, vocab] without data."""
    return -token_logprobs(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device)).sum()


# -- engine -------------------------------------------------------------------------------------------------------------------------


def make_engine(config: Config, parts: Parts, plan: Plan, *, load: bool = True) -> Engine:
    """The engine that the plan describes, its weights read or drawn; left zero if `load` is false, for a checkpoint to fill."""
    hold_to_budget(config, parts.machine)
    engine = Engine(
        parts.skeleton,
        optimizer=make_optimizer(config),
        precision=parts.machine.precision,
        max_grad_norm=config.train.max_grad_norm,
        device=parts.machine.device,
        settings=on_nvme(settings_of(plan), plan, config),
        seed=config.train.seed,
    )
    try:
        if load:
            fill(engine, config)
    except BaseException:
        engine.close()
        raise
    return engine


def hold_to_budget(config: Config, machine: Machine) -> None:
    """Let PyTorch take no more of the GPU than memory.gpu leaves it, however much there is."""
    gpu, limit = machine.hardware.gpu, unless_auto(config.memory.gpu)
    if machine.device.type == "cuda" and gpu is not None:
        share = 1.0 if limit is None else (limit - machine.hardware.context_bytes) / gpu.total_bytes
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), machine.device)


def settings_of(plan: Plan) -> Settings:
    """The plan's choices as the engine takes them."""
    choices = plan.choices
    return Settings(
        groups=choices.groups,
        group_size=choices.micro_batches(plan.job),
        resident=choices.resident,
        sums_on_device=choices.sums_on_device,
        retained=choices.retained,
        retained_on_host=choices.retained_on_host,
        second_backward=choices.second_backward,
        cheap_retention=choices.cheap_retention,
        offload=choices.offload,
        activations=plan.job.activations,
        head_chunk=choices.head_chunk_tokens,
        update_threads=choices.update_threads,
        compile=plan.job.compiled,
        lengths_vary=plan.job.lengths_vary,
        layer_chunk=choices.layer_chunk_tokens or None,
    )


def lengths_vary(config: Config, skeleton: Skeleton, machine: Machine) -> bool:
    """Whether rows have lengths of their own, so that micro-batches are padded and seldom have the same shape twice."""
    return config.method == "sft" and packed_to(config, skeleton, machine) is None


def packed_to(config: Config, skeleton: Skeleton, machine: Machine) -> int | None:
    """Tokens of the sequences that rows of fine-tuning share; None: every row has its own.

    Raises ConfigError if packing is asked for and the model would let rows see each other.
    """
    wanted, seq_len = config.data.packing, config.train.seq_len
    pays = machine.device.type == "cuda" and seq_len <= AUTO_PACKED_TOKENS
    if config.method != "sft" or wanted is False or (wanted == "auto" and not pays):
        return None
    if skeleton.separates_documents():
        return seq_len
    if wanted is True:
        raise ConfigError(
            f"{config.where('data.packing')}: rows of a {skeleton.anatomy.family} model that share a sequence would see each other; "
            "set data.packing: false"
        )
    return None


def choose_compile(config: Config, skeleton: Skeleton, machine: Machine) -> bool:
    """Whether to compile the layers. `auto`: on a GPU with a compiler at hand, if all rows have one length (each compiles anew)."""
    if config.compile != "auto":
        return config.compile
    found = any(shutil.which(name) for name in ("cc", "gcc", "clang")) and find_spec("triton") is not None
    compilers = found if machine.compiles is None else machine.compiles
    one_length = not lengths_vary(config, skeleton, machine)
    return compilers and machine.device.type == "cuda" and one_length and not skeleton.has_dropout


def fill(engine: Engine, config: Config) -> None:
    """Draw the weights at random, or read them, which downloads them first where the model is the hub's. Raises ModelError."""
    if config.model.init == "random":
        logger.info(f"drawing {engine.anatomy.parameters:,} weights at random")
        randomize(engine)
    else:
        logger.info(f"reading {engine.anatomy.parameters:,} weights from {config.model.source}")
        load_weights(engine.anatomy, engine.store, resolve_source(config.model.source, config.model.revision))
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()  # what that took on the GPU


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Only kernels that repeat bit for bit, if wanted, until the block ends."""
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its first handle is made
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def memory_errors(plan: Plan) -> Iterator[None]:
    """Say what was planned, and what to do, when host RAM does not suffice nevertheless; the engine speaks for the GPU.

    Raises OutOfMemory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):  # how torch says it
            raise
        smaller = max(plan.job.seq_len, plan.choices.micro_batch_tokens // 2)
        raise OutOfMemory(
            f"out of host memory, although only {human_bytes(plan.host_bytes)} were planned; close other programs, or set "
            f"train.micro_batch_tokens: {smaller} ({first_line(error)})"
        ) from error


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -- libraries ----------------------------------------------------------------------------------------------------------------------


def quiet_libraries() -> None:
    """Keep the Hugging Face libraries' advice off the terminal; their errors reach the user through ours."""
    import huggingface_hub
    import transformers

    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when datasets is imported, which only the hub's rows need
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it warns of every retry
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
