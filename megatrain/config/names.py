"""Names from other trainers: those that mean one of our keys, and those that cannot be honoured.
Those that need no arithmetic stand in names.toml.

Aliases are accepted at the top level and inside `train`, where a list of training arguments stands.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from megatrain.config.values import did_you_mean, shown

T = TypeVar("T")
Key = tuple[str, ...]  # ("train", "seq_len"), or ("output",) at the top level

# Keys that exist only until both halves are known: rows per step = rows per device x accumulated
# micro-batches; betas = (beta1, beta2).
ROWS_PER_DEVICE: Key = ("train", "per_device_train_batch_size")
ACCUMULATION: Key = ("train", "gradient_accumulation_steps")
BETA1: Key = ("optimizer", "betas.0")
BETA2: Key = ("optimizer", "betas.1")
ADAM_BETAS = (0.9, 0.999)  # Hugging Face's defaults of the two


@dataclass(frozen=True)
class Alias:
    """Another name of `key`. `convert` turns the value into ours, or raises ValueError."""

    key: Key
    convert: Callable[[object], object] = lambda value: value


@dataclass(frozen=True)
class Refusal:
    """A name that cannot be honoured. Its `harmless` values ask for what is done anyway.

    Attributes:
        teaches: what the name asks for would make other weights: an import without it is no import.
    """

    reason: str
    harmless: tuple[object, ...] = (False, None)
    teaches: bool = False


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other  # 1 is not true here


def _one_of(*pairs: tuple[object, object], **texts: str) -> Callable[[object], object]:
    """The value must be the first of a pair, which means the second. texts: further pairs."""
    known = (*pairs, *texts.items())

    def convert(value: object) -> object:
        for theirs, ours in known:
            if _same(theirs, value):
                return ours
        names = ", ".join(shown(theirs) for theirs, _ in known)
        hint = did_you_mean(value, texts)
        raise ValueError(f"{shown(value)} cannot be honoured; known are {names}{hint}")

    return convert


def but(theirs: object, ours: object) -> Callable[[object], object]:
    """`theirs` means `ours`; other values are the same."""
    return lambda value: ours if _same(theirs, value) else value


NOTHING = object()  # what an alias's value asks for is done anyway


def _evaluation(value: object) -> object:
    if _same("steps", value) or value is None:
        return NOTHING
    if _same("no", value) or value is False:
        return None
    ways = "set train.eval_every to steps, a share of an epoch or epoch; `no` for no evaluation"
    raise ValueError(f"{shown(value)} cannot be honoured: {ways}")


def _count(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(f"must be a whole number of at least 1, not {shown(value)}")


def _per_epoch(value: object) -> object:
    if _same(0, value) or value is None:
        return None
    times = _count(value)
    return "epoch" if times == 1 else 1 / times  # type: ignore[operator]


def _share(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
        return value
    raise ValueError(f"must be a share of all steps, at least 0 and below 1, not {shown(value)}")


# Of these, `no` asks for no evaluation.
STRATEGIES = ("eval_strategy", "evaluation_strategy")

_dtype = _one_of(
    bfloat16="bfloat16", bf16="bfloat16", float32="float32", fp32="float32", auto="auto"
)
_schedule = _one_of(
    constant="constant",
    constant_with_warmup="constant",
    linear="linear",
    cosine="cosine",
    warmup_stable_decay="wsd",
)
_ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_known_optimizer = _one_of(**dict.fromkeys(_ADAMW, "adamw"), lion="lion", lion_32bit="lion")


def _optimizer(value: object) -> object:
    if _same("adafactor", value):
        instead = (
            "Lion (optimizer.name: lion), or AdamW with int8 moments (optimizer.moments: int8)"
        )
        raise ValueError(f"adafactor is not offered; use {instead}")
    return _known_optimizer(value)


def _figure(value: object) -> object:
    if isinstance(value, str) and not value.startswith("eval_"):
        return f"eval_{value}"
    return "eval_loss" if value is None else value


def read_names(path: Path) -> dict[str, Any]:
    """Read a file of names and what is said of them."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def same_as(said: Mapping[str, str]) -> dict[str, Alias]:
    """Aliases whose values are our key's. said: names by key."""
    return {
        name: Alias(tuple(key.split("."))) for key, names in said.items() for name in names.split()
    }


_SAID = read_names(Path(__file__).with_name("names.toml"))


def of_each(names: str, meaning: T) -> dict[str, T]:
    """Rows of a table for several names that mean the same."""
    return dict.fromkeys(names.split(), meaning)


_PROCESSES = "dataset_num_proc dataset_processes preprocessing_num_workers"
_TEMPLATE = "chat_template chat_template_path"
_ANSWERS = "assistant_only_loss completion_only_loss"
ALIASES: dict[str, Alias] = {
    **same_as(_SAID["means"]),
    "adam_beta1": Alias(BETA1),
    "adam_beta2": Alias(BETA2),
    **of_each("per_device_train_batch_size micro_batch_size", Alias(ROWS_PER_DEVICE, _count)),
    "gradient_accumulation_steps": Alias(ACCUMULATION, _count),
    # theirs is a share of all steps where it is below 1
    "eval_steps": Alias(("train", "eval_every"), _count),
    "save_steps": Alias(("checkpoint", "every"), _count),
    "evals_per_epoch": Alias(("train", "eval_every"), _per_epoch),
    "saves_per_epoch": Alias(("checkpoint", "every"), _per_epoch),
    "max_steps": Alias(("train", "max_steps"), but(-1, None)),
    **of_each("lr_scheduler_type lr_scheduler", Alias(("train", "schedule"), _schedule)),
    "warmup_ratio": Alias(("train", "warmup"), _share),
    "metric_for_best_model": Alias(("checkpoint", "metric"), _figure),
    "greater_is_better": Alias(("checkpoint", "greater_is_better"), but(None, "auto")),
    "optim": Alias(("optimizer", "name"), _optimizer),
    "bf16": Alias(("precision",), _one_of((True, "bfloat16"), (False, "float32"), auto="auto")),
    "fp8": Alias(("precision",), _one_of((True, "fp8"), (False, "auto"))),
    **of_each("dtype torch_dtype", Alias(("precision",), _dtype)),
    **of_each(_PROCESSES, Alias(("data", "processes"), but(None, "auto"))),
    **of_each(_ANSWERS, Alias(("data", "train_on"), _one_of((True, "assistant"), (False, "all")))),
    "train_on_inputs": Alias(("data", "train_on"), _one_of((True, "all"), (False, "assistant"))),
    **dict.fromkeys(STRATEGIES, Alias(("data", "eval"), _evaluation)),
    "stage": Alias(("method",), _one_of(sft="sft", pt="pretrain")),
    **of_each(_TEMPLATE, Alias(("data", "chat_template"), but("tokenizer_default", None))),
    **of_each("use_cpu no_cuda", Alias(("device",), _one_of((True, "cpu"), (False, "auto")))),
    "report_to": Alias(("track",), lambda value: [] if value in ("none", ["none"]) else value),
}

# Keys of which one excludes the others: each inner tuple is one way to say the same thing.
_TOKENS, _ROWS = ("train", "tokens_per_step"), ("train", "rows_per_step")
RIVALS: tuple[tuple[tuple[Key, ...], ...], ...] = (
    ((_TOKENS,), (_ROWS,), (ROWS_PER_DEVICE, ACCUMULATION)),
    ((("model", "path"),), (("model", "config"),)),
)


REFUSED: dict[str, Refusal] = {}
for _reason, _names in _SAID["refused"].items():
    REFUSED |= of_each(_names, Refusal(_reason))
for _names, (_reason, *_harmless) in _SAID["unless"].items():
    REFUSED |= of_each(_names, Refusal(_reason, (None, *_harmless)))
REFUSED |= {name: replace(REFUSED[name], teaches=True) for name in _SAID["teaches"].split()}


def row_of(table: Mapping[str, T], name: str) -> T | None:
    """The row of a name, or of how it begins; None if there is neither."""
    begun = (one for one in table if one.endswith("*") and name.startswith(one[:-1]))
    return table.get(name) or table.get(next(begun, ""))


def refusal_of(name: str) -> Refusal | None:
    """The refusal for a name of another trainer, or None for an unknown name."""
    return row_of(REFUSED, name)


def is_harmless(refusal: Refusal, value: object) -> bool:
    """True when the value asks for nothing that would not happen anyway."""
    return any(_same(value, harmless) for harmless in refusal.harmless)
