"""Frozen models beside the one that learns: the reference of `beta`, reward models as judges, and
the teacher of `method: distill`.

Each is an engine without optimizer state: its weights lie in host RAM, 2 bytes each in bfloat16,
and pass through the device in sweeps over up to `SWEPT_TOKENS` of a rollout's or a step's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, PretrainedConfig

from megatrain.config import Config
from megatrain.config.fields import is_function, judge_name
from megatrain.config.resuming import CONFIG_FILE
from megatrain.data.micro_batches import MicroBatch, cuts
from megatrain.data.samples import PROMPTS, name_for
from megatrain.engine.components import PRECISIONS
from megatrain.engine.engine import Engine
from megatrain.engine.inference import held_head, last_states
from megatrain.engine.resolved import Resolved, next_token_on_meta, scores_on_meta
from megatrain.errors import ConfigError, DataError, StorageError
from megatrain.heartbeat import TOKENS_SWEPT, doing, may_end_here
from megatrain.losses import divergence_of, find_examples, find_targets
from megatrain.losses.divergence import TEACHER as STATES
from megatrain.losses.divergence import TEACHER_LOGPS
from megatrain.losses.sequences import REFERENCE as ROW_REFERENCE
from megatrain.methods import METHODS
from megatrain.models.anatomy import layouts_of
from megatrain.models.pretrained import digests_of, is_classifier, read_model_config, resolve_source
from megatrain.models.shapes import named_shape
from megatrain.models.skeleton import Skeleton
from megatrain.optim.optimizer import Frozen
from megatrain.planner.activations import WEIGHT_BYTES
from megatrain.planner.cost.dry_run import shape_of
from megatrain.planner.cost.shape import ModelShape
from megatrain.planner.job import Choices, FrozenModel, Job
from megatrain.planner.memory import Layout
from megatrain.planner.search import AUTO_MICRO_BATCH_TOKENS
from megatrain.planner.timing import StepCosts
from megatrain.recipes.model import Model, check_writes, describe_model
from megatrain.recipes.sample import positions_of
from megatrain.schedule import slot_sizes
from megatrain.settings import Settings
from megatrain.storage.run_folder import find_checkpoint

REFERENCE, TEACHER = "reference", "teacher"
SWEPT_TOKENS = 1 << 16  # of a sweep of frozen weights, whose hidden states are on the device
TEACHER_LOGITS = 1024  # targets whose logits a teacher gives at a time, unless the user says more
# Keywords of an engine that reads only.
READS: Any = {"optimizer": Frozen(), "max_grad_norm": None, "router_aux_loss_coef": 0.0}
# tokenizers of one vocabulary may cut it in other ways
PROBE = "The 2 cats' 12345.67 (x+y)\n  if a != b:\n\t\treturn 'ab'\r\n naïve e\u0301 日本語 🙂"


# why: decision 0114
def frozen_engine(source: str | Path, **keywords: Any) -> Engine:
    """An engine that reads only, with no optimizer state in RAM."""
    return Engine.from_pretrained(source, **READS, **{"settings": Settings(), **keywords})


def computing_as(engine: Engine) -> dict[str, Any]:
    """Keywords of a frozen engine that computes as `engine` does, on the same device."""
    names = "compile", "fused_loss", "lengths_vary"
    settings = Settings(**{name: getattr(engine.settings, name) for name in names})
    return {"precision": engine.precision, "device": str(engine.device), "settings": settings}


def checkpoint_of(named: str | Path) -> str | Path:
    """The model that a folder or hub id names: a run folder's final or last checkpoint, else
    itself, as it is written: `./name` is no hub id. Raises ConfigError."""
    path = Path(named)
    is_run = isfile(path / CONFIG_FILE) and not isfile(path / "config.json")
    return find_checkpoint(path) if is_run else named


def digests_of_model(named: str) -> dict[str, str]:
    """Digests of the files of the model that a folder or hub id names."""
    return digests_of(resolve_source(checkpoint_of(named), weights=False))


# -- what they take beside training ----------------------------------------------------------------


def besides(config: Config, resolved: Resolved) -> tuple[FrozenModel, ...]:
    """Memory and time of the config's frozen models. Raises ConfigError and ModelError."""
    dtype = PRECISIONS[resolved.machine.precision]
    teacher = config.distill.teacher_model_name_or_path
    named = [TEACHER] * bool(teacher) + [REFERENCE] * bool(beta_of(config))
    named += map(judge_name, reward_models(config))
    if named and resolved.machine.ranks > 1:
        raise ConfigError(
            f"{config.where('gpus')}: {named[0]}: frozen models beside a run on several GPUs are "
            "not built yet; set gpus: 1, or do without: beta: 0 needs no reference"
        )
    if teacher:
        described: Any = config_of_model(teacher)
        if (top_k := config.distill.teacher_top_k) is None:
            return (_teacher(Skeleton(described, dtype=dtype), resolved),)
        both = described, resolved.skeleton.config
        if top_k > (width := min(one.get_text_config().vocab_size for one in both)):
            where = config.where("distill.teacher_top_k")
            raise ConfigError(f"{where}: {top_k}, and the vocabulary has {width} tokens; set less")
        return ()
    if not named:
        return ()
    steps = config.rollout.steps_per_generation * config.policy.num_iterations
    tokens = config.rollout.generation_batch_size * (resolved.request.seq_len or 0) / steps
    take = partial(_beside, resolved, tokens=tokens, sweeps=1 / steps)
    found = list[FrozenModel]()
    if config.policy.beta:
        found.append(take(REFERENCE, resolved.skeleton, shape=resolved.shape))
    for folder in reward_models(config):
        described = config_of_model(folder)
        check_scores(described, folder, config)
        found.append(take(judge_name(folder), Skeleton(described, dtype=dtype)))
    return tuple(found)


def config_of_model(named: str) -> PretrainedConfig:
    """The configuration of a folder or hub id, or of a named shape, to plan with."""
    if shape := named_shape(named):
        described: PretrainedConfig = AutoConfig.for_model(**shape)
        return described
    return read_model_config(resolve_source(checkpoint_of(named), weights=False))


def _teacher(skeleton: Skeleton, resolved: Resolved) -> FrozenModel:
    """A teacher that sweeps each step's rows, and leaves its last hidden states on the host; its
    layers' working set is larger than the model's where it is wider."""
    request, text = resolved.request, skeleton.config.get_text_config()
    tokens = request.tokens_per_step or (request.rows_per_step or 0) * (request.seq_len or 0)
    itemsize = WEIGHT_BYTES[resolved.machine.precision]
    found = _beside(resolved, TEACHER, skeleton, tokens=tokens, sweeps=1)
    states = tokens * text.hidden_size * itemsize
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    layer = (4 * text.hidden_size + 3 * inner) * itemsize
    chunk = request.asked.get("head_chunk_tokens") or TEACHER_LOGITS
    logits = chunk * text.vocab_size * itemsize
    return replace(found, host=found.host + states, device=found.device + logits, token=layer)


def _beside(
    resolved: Resolved,
    name: str,
    skeleton: Skeleton,
    *,
    tokens: float,
    sweeps: float,
    shape: ModelShape | None = None,
) -> FrozenModel:
    """A frozen model that computes so many `tokens` of a step in so many sweeps of its weights.
    shape: the skeleton's, where it is known."""
    anatomy, machine, seq_len = skeleton.anatomy, resolved.machine, resolved.request.seq_len or 1
    numels = [layout.numel for layout in layouts_of(anatomy)]
    slots, weight = slot_sizes(numels, 0, anatomy.embed_feeds_head), WEIGHT_BYTES[machine.precision]
    device_type, compiled = machine.device.type, resolved.compile is True
    at_once, rows = AUTO_MICRO_BATCH_TOKENS[device_type], round(tokens / sweeps)
    shape = shape or shape_of(
        skeleton,
        seq_len,
        [at_once],
        head_loss=next_token_on_meta if anatomy.labels is None else scores_on_meta,
        runs_on=device_type,
        padded=resolved.packed_to is not None,
        compiled=compiled,
    )
    groups = max(1, -(-rows // SWEPT_TOKENS))
    fused = bool(resolved.compile)
    job = Job(machine.precision, rows, seq_len, compiled=compiled, fused_loss=fused)
    choices = Choices(micro_batch_tokens=at_once, groups=groups, head_chunk_tokens=TEACHER_LOGITS)
    layout = Layout.of(choices, job, shape, machine.hardware)
    seconds = sweeps * StepCosts(layout, machine.profile).forward_alone()
    device = sum((*slots.layers, *slots.edges)) + min(rows, SWEPT_TOKENS) * anatomy.hidden_size
    return FrozenModel(name, weight * sum(numels), weight * device, seconds)


def check_scores(described: Any, folder: str, config: Config) -> None:
    """Raise ConfigError for a model among `rewards.functions` that does not give one score."""
    labels = described.num_labels if is_classifier(described) else 0
    if labels != 1:
        gives = f"{labels} scores" if labels else "no scores"
        what = f"is a {'classifier' if labels else 'language model'}, which gives {gives}"
        where = config.where("rewards.functions")
        raise ConfigError(f"{where}: {folder}: {what}; name one that method: reward has trained")


def beta_of(config: Config) -> float:
    """The weight of the divergence from a reference, of a method that can have one."""
    return float(config.policy.beta) if METHODS[config.method].kind == PROMPTS else 0.0


def reward_models(config: Config) -> tuple[str, ...]:
    """The folders among `rewards.functions`."""
    return tuple(one for one in config.rewards.functions if not is_function(one))


# -- engines ---------------------------------------------------------------------------------------


def first_model(config: Config, **computing: Any) -> Engine:
    """The model that the run begins with. computing: its precision and device, or as of
    `computing_as`."""
    told = {name: getattr(config.model, name) for name in ("revision", "trust_remote_code")}
    return frozen_engine(config.model.source, attention=config.attention, **told, **computing)


def check_reference_and_teacher(config: Config, model: Model) -> None:
    """Raise ConfigError for a reference of random weights, or a teacher with another vocabulary or
    beside a model that sees images; and ModelError for a teacher that is no model."""
    if beta_of(config) and config.model.init == "random":
        where = config.where(f"{config.method}.beta")
        raise ConfigError(f"{where}: random weights are no reference; set 0")
    if (named := config.distill.teacher_model_name_or_path) is None:
        return
    where = config.where("distill.teacher_model_name_or_path")
    if model.sight is not None:
        raise ConfigError(f"{where}: teaches rows of text; set model.images: false")
    theirs, ours = describe_model(checkpoint_of(named)), model.tokenizer.get_vocab()
    check_writes(theirs, named)
    known = theirs.tokenizer.get_vocab()
    for token in (token for token in {**known, **ours} if ours.get(token) != known.get(token)):
        raise ConfigError(
            f"{where}: {named}: has another vocabulary: {token!r} is its token {known.get(token)} "
            f"and the model's {ours.get(token)}; take a teacher of the model's family"
        )
    widths = [one.config.get_text_config().vocab_size for one in (theirs, model)]
    if widths[0] < (met := widths[1] if config.distill.lmbda else max(ours.values()) + 1):
        source = "answers (distill.lmbda)" if config.distill.lmbda else "rows"
        raise ConfigError(
            f"{where}: {named}: has logits of {widths[0]} tokens, and {source} may have any of "
            f"{met}; take another teacher"
        )
    sides = [one.tokenizer(PROBE, add_special_tokens=False).input_ids for one in (theirs, model)]
    if sides[0] != sides[1]:
        raise ConfigError(
            f"{where}: {named}: cuts text into other tokens of the same vocabulary; take a teacher "
            "of the model's family"
        )


def frozen_digest(config: Config) -> str | None:
    """A name of the files of the models that a run's loss is held to, its reference and its
    teacher; None without."""
    named = [config.model.source] * bool(beta_of(config))
    named += [config.distill.teacher_model_name_or_path or ""]
    found = [digests_of_model(one) for one in named if one]
    return name_for({"models": found}) if found else None


def check_frozen(config: Config, state: Mapping[str, Any], digest: str | None) -> None:
    """Raise StorageError where a run that goes on has another reference or teacher than it began
    with. state: of its checkpoint; digest: `frozen_digest` of what it has now."""
    if state.get("frozen") not in (None, digest):
        raise StorageError(
            f"{config.output}: its {REFERENCE} (the model that it began with) or its {TEACHER} has "
            "changed since; bring that model back, or start a new run"
        )


def open_teacher(config: Config, loss: Any, stack: ExitStack, **computing: Any) -> None:
    """Let a loss that has a teacher ask it, which the stack closes. computing: as of
    `computing_as`."""
    if (divergence := divergence_of(loss)) is not None and divergence.kept is None:
        source = checkpoint_of(str(config.distill.teacher_model_name_or_path))
        divergence.teacher = stack.enter_context(frozen_engine(source, **computing))


def sweeps(batches: Iterable[MicroBatch], tokens: int) -> Iterator[list[MicroBatch]]:
    """Consecutive micro-batches together, up to `tokens` padded tokens each."""
    part: list[MicroBatch] = []
    for batch in batches:
        if part and sum(b["input_ids"].numel() for b in [*part, batch]) > tokens:
            yield part
            part = []
        part.append(batch)
    if part:
        yield part


@contextmanager
def taught(loss: Any, batches: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Micro-batches with what a loss needs of a teacher, as they are for others: its tokens from a
    file, its log-probabilities, or its hidden states, and then its head is held inside."""
    if (divergence := divergence_of(loss)) is None:
        yield batches
    elif divergence.top_k is not None:
        yield [{**one, STATES: kept_of(divergence.kept, one)} for one in batches]
    else:
        teacher, sampled = divergence.teacher, divergence is not loss
        with doing("asking the teacher", aloud=False):
            ask = partial(teacher.logprobs, temperature=divergence.temperature)
            ask = ask if sampled else partial(last_states, teacher)
            found = [one for part in sweeps(batches, SWEPT_TOKENS) for one in ask(part)]
        name = TEACHER_LOGPS if sampled else STATES
        given = [{**one, name: its} for one, its in zip(batches, found, strict=True)]
        with nullcontext() if sampled else held_head(teacher) as divergence.project:
            yield given
        divergence.project = None


def kept_of(kept: Any, batch: MicroBatch) -> torch.Tensor:
    """A teacher's likeliest tokens at the targets of a micro-batch, of which `row_reference` says
    where those of each example begin."""
    counts = find_examples(batch, find_targets(batch["labels"])).sizes.tolist()
    begins = batch[ROW_REFERENCE].long().tolist()
    spans = (slice(start, start + count) for start, count in zip(begins, counts, strict=True))
    return torch.from_numpy(np.concatenate([kept[span] for span in spans]))


@dataclass(frozen=True)
class RewardModel:
    """A model that scores answers, in a folder; its name is the folder's."""

    folder: str
    model: Model
    engine: Engine

    @classmethod
    def open(cls, folder: str, config: Config, stack: ExitStack) -> RewardModel:
        """Read a folder's model, which the stack closes. Raises ConfigError for one that gives no
        scores, and ModelError."""
        source = checkpoint_of(folder)
        model = describe_model(source)
        check_scores(model.config, folder, config)
        engine = frozen_engine(source, precision=config.precision, device=config.device)
        return cls(folder, model, stack.enter_context(engine))

    def scores(self, groups: Sequence[Any]) -> list[list[float]]:
        """The score of each group's answers (judges.py: Group), behind their prompts, as TRL gives
        them to one. Raises DataError for one that is longer than the model reads."""
        rows = [self._ids(group, one) for group in groups for one in group.completions]
        found, pad_id = list[float](), self.model.pad_id
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        lengths = [len(rows[number]) for number in order]
        longest = positions_of(self.model) or lengths[0]
        if lengths[0] > longest:
            raise DataError(
                f"{self.folder}: an answer with its prompt has {lengths[0]:,} tokens, and this "
                f"reward model reads {longest:,}; set a smaller max_completion_length"
            )
        spans = cuts(lengths, AUTO_MICRO_BATCH_TOKENS[self.engine.device.type])
        ids = ([torch.tensor(rows[n]) for n in order[slice(*span)]] for span in spans)
        padded = partial(pad_sequence, batch_first=True, padding_value=pad_id)
        batches = ({"input_ids": padded(some)} for some in ids)
        total = sum(lengths) * len(self.engine.skeleton.layers)
        with doing(f"scoring by {self.folder}", total, TOKENS_SWEPT, aloud=False):
            for part in sweeps(batches, SWEPT_TOKENS):
                may_end_here()
                lasts = [_lasts(one["input_ids"], pad_id) for one in part]
                for values, _ in self.engine.score(part, lasts):
                    found += values.tolist()
        scores = iter([score for _, score in sorted(zip(order, found, strict=True))])
        return [[next(scores) for _ in group.completions] for group in groups]

    def _ids(self, group: Any, completion: Any) -> list[int]:
        tokenizer = self.model.tokenizer
        if isinstance(group.prompt, str):
            text = group.prompt + completion
        else:
            turns: Any = [*group.prompt, *completion]
            try:
                text = str(tokenizer.apply_chat_template(turns, tokenize=False))
            except Exception as error:  # noqa: BLE001  whatever a template raises
                raise DataError(
                    f"{self.folder}: no chat template of its own writes these turns ({error}); "
                    "choose a reward model of this model's family"
                ) from None
        return list(tokenizer(text, add_special_tokens=False).input_ids) or [self.model.pad_id]


def _lasts(ids: torch.Tensor, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the last tokens that are no padding in a micro-batch, flat, int64, where
    transformers reads the score, also of a row that ends with such a token; and zeros."""
    within = torch.arange(ids.shape[1]) * (ids != pad_id)
    at = torch.arange(len(ids)) * ids.shape[1] + within.argmax(1)
    return at, torch.zeros_like(at)
