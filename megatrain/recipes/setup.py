"""From a config to the parts of a run. The only place that wires models, data, plan and engine together."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.config import Config
from megatrain.data import DataOptions, load_data
from megatrain.data.dataset import Rows
from megatrain.engine.build import choose_device, choose_precision, randomize
from megatrain.engine.engine import PRECISIONS, Engine, Settings
from megatrain.engine.head import token_logprobs
from megatrain.errors import ConfigError
from megatrain.hardware import Hardware, probe
from megatrain.models.pretrained import Source, load_config_and_tokenizer, resolve_source
from megatrain.models.shape import shape_of
from megatrain.models.skeleton import Skeleton
from megatrain.models.weights import load_weights
from megatrain.optim import OPTIMIZERS, Optimizer
from megatrain.plan import AUTO_MICRO_BATCH_TOKENS, Job, Plan, make_plan

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Model:
    """A model as its files describe it: everything but the weights."""

    source: Source
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig | None


@dataclass(frozen=True)
class Machine:
    """Where the run computes, and in what precision."""

    device: torch.device
    precision: str
    hardware: Hardware


def read_model(config: Config) -> Model:
    """Configuration and tokenizer of the config's model. Raises ModelError."""
    source = resolve_source(config.model.source, config.model.revision)
    return Model(source, *load_config_and_tokenizer(source, config.model.trust_remote_code))


def find_machine(config: Config) -> Machine:
    """The device that `device` and `precision` choose, and what the machine has. Raises ConfigError."""
    device = choose_device(config.device)
    return Machine(device, choose_precision(config.precision, device), probe(config.output, device.type))


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
        raise ConfigError(f"{where}: {config.train.seq_len} exceeds the {longest} positions of this model; lower it")
    return skeleton


def make_optimizer(config: Config) -> Optimizer:
    options = config.optimizer
    return OPTIMIZERS[options.name](lr=config.train.learning_rate, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)


def make_run_plan(config: Config, skeleton: Skeleton, machine: Machine, checkpoints_written: int | None = None) -> Plan:
    """Lay out the run's memory. `skeleton` must not be bound yet. Raises nothing for lack of memory: `Plan.check` does."""
    train, seq_len = config.train, config.train.seq_len
    rows_or_tokens = train.tokens_per_step or (train.rows_per_step or 1) * seq_len
    set_by_hand = {"micro_batch_tokens": train.micro_batch_tokens, "groups": train.groups, "threads": config.threads}
    chosen = {name: None if value == "auto" else int(value) for name, value in set_by_hand.items()}
    if chosen["micro_batch_tokens"] is not None and chosen["micro_batch_tokens"] < seq_len:
        where = config.where("train.micro_batch_tokens")
        size = chosen["micro_batch_tokens"]
        raise ConfigError(f"{where}: {size} cannot hold one row of train.seq_len {seq_len} tokens; raise it or lower seq_len")
    job = Job(
        precision=machine.precision,
        tokens_per_step=max(rows_or_tokens, seq_len),
        seq_len=seq_len,
        clipping=train.max_grad_norm is not None,
        state_bytes=tuple((array.name, array.dtype.itemsize) for array in make_optimizer(config).state_arrays),
        micro_batch_tokens=chosen["micro_batch_tokens"],
        groups=chosen["groups"],
        update_threads=chosen["threads"],
        checkpoints_kept=config.checkpoint.keep,
        keeps_best=config.data.eval is not None,
        checkpoints_written=checkpoints_written,
    )
    sizes = micro_batch_sizes(seq_len, machine.device.type, chosen["micro_batch_tokens"])
    shape = shape_of(skeleton, seq_len, sizes, head_loss=next_token_on_meta)
    limits = {name: None if limit == "auto" else int(limit) for name, limit in (("gpu", config.memory.gpu), ("host", config.memory.host))}
    return make_plan(job, shape, machine.hardware, gpu_limit=limits["gpu"], host_limit=limits["host"])


def next_token_on_meta(logits: torch.Tensor) -> torch.Tensor:
    """The loss as the head computes it, for the planner's dry run on logits [n, vocab] without data."""
    return -token_logprobs(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device)).sum()


def micro_batch_sizes(seq_len: int, device_type: str, wanted: int | None) -> Iterable[int]:
    """Sizes whose memory the planner should know: the one asked for, or one row and doublings up to the largest that pays."""
    if wanted is not None:
        return [wanted]
    largest = max(seq_len, AUTO_MICRO_BATCH_TOKENS[device_type])
    return [seq_len << i for i in range((largest // seq_len).bit_length())]


def make_engine(config: Config, model: Model, skeleton: Skeleton, machine: Machine, plan: Plan, *, load: bool = True) -> Engine:
    """The engine that the plan describes, its weights read or drawn; left zero if `load` is false, for a checkpoint to fill."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its first handle is made
        torch.use_deterministic_algorithms(True)
    choices = plan.choices
    engine = Engine(
        skeleton,
        optimizer=make_optimizer(config),
        precision=machine.precision,
        max_grad_norm=config.train.max_grad_norm,
        device=machine.device,
        settings=Settings(
            groups=choices.groups,
            sums_on_device=choices.gradient_sums == "device",
            head_chunk=choices.head_chunk_tokens,
            update_threads=choices.update_threads,
            compile=choose_compile(config, skeleton, machine),
        ),
        seed=config.train.seed,
    )
    try:
        if load and config.model.init == "random":
            randomize(engine)
        elif load:
            load_weights(engine.anatomy, engine.store, model.source)
    except BaseException:
        engine.close()
        raise
    return engine


def choose_compile(config: Config, skeleton: Skeleton, machine: Machine) -> bool:
    """Whether to compile the layers. `auto`: on a GPU with a compiler at hand, if all rows have one length (each compiles anew)."""
    if config.compile != "auto":
        return config.compile
    able = machine.device.type == "cuda" and any(shutil.which(name) for name in ("cc", "gcc", "clang")) and find_spec("triton") is not None
    return able and config.method == "pretrain" and not skeleton.has_dropout


def read_rows(config: Config, model: Model, vocab_size: int, on_progress: Any = None) -> tuple[Rows, Rows | None]:
    """Tokenised training and held-out rows. For `pretrain` documents are packed into rows of seq_len tokens. Raises DataError."""
    data = config.data
    options = DataOptions(
        seq_len=config.train.seq_len,
        train_on=data.train_on,
        format=data.format,
        on_bad_row=data.on_bad_row,
        text_field=data.text_field,
        split=data.split,
        vocab_size=vocab_size,
    )
    pack_to = config.train.seq_len if config.method == "pretrain" else None
    return load_data(data.train, data.eval, model.tokenizer, options, seed=config.train.seed, pack_to=pack_to, on_progress=on_progress)


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills rows; any will do, since no real token sees it and it has no target."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)


def run_folder_of(folder: Path) -> Path:
    """The run folder of a run folder, or of one of its checkpoints. Raises ConfigError if it is neither."""
    for candidate in (folder, folder.resolve(), folder.parent, folder.resolve().parent):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(f"{folder}: is neither a run folder nor one of its checkpoints (no config.yaml)")
