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


def _one_of(meanings: Mapping[str, str]) -> Callable[[object], object]:
    """The value must be one of theirs, by ours; `true` and `false` are no texts."""
    words = {"true": True, "false": False}
    known = {word: ours for ours, theirs in meanings.items() for word in theirs.split()}

    def convert(value: object) -> object:
        for word, ours in known.items():
            if _same(words.get(word, word), value):
                return ours
        names = ", ".join(shown(words.get(word, word)) for word in known)
        hint = did_you_mean(value, known)
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


def _figure(value: object) -> object:
    if isinstance(value, str) and not value.startswith("eval_"):
        return f"eval_{value}"
    return "eval_loss" if value is None else value


def read_names(path: Path) -> dict[str, Any]:
    """Read a file of names and what is said of them."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def same_as(said: Mapping[str, str]) -> dict[str, Alias]:
    """Aliases whose values are our key's. said: names by key."""
    keys = {name: key for key, names in said.items() for name in names.split()}
    return {name: Alias(tuple(key.split("."))) for name, key in keys.items()}


_SAID = read_names(Path(__file__).with_name("names.toml"))


def of_each(names: str, meaning: T) -> dict[str, T]:
    """Rows of a table for several names that mean the same."""
    return dict.fromkeys(names.split(), meaning)


_PROCESSES = "dataset_num_proc dataset_processes preprocessing_num_workers"
_TEMPLATE = "chat_template chat_template_path"
ALIASES: dict[str, Alias] = same_as(_SAID["means"])
for _names, (_key, _meanings) in _SAID["values"].items():
    ALIASES |= of_each(_names, Alias(tuple(_key.split(".")), _one_of(_meanings)))
_OPTIMIZER = ALIASES["optim"]


def _optimizer(value: object) -> object:
    if _same("adafactor", value):
        instead = "AdamW with int8 moments (optimizer.moments: int8)"
        raise ValueError(f"adafactor is not offered; use Lion (optimizer.name: lion), or {instead}")
    return _OPTIMIZER.convert(value)


ALIASES |= {
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
    "warmup_ratio": Alias(("train", "warmup"), _share),
    "metric_for_best_model": Alias(("checkpoint", "metric"), _figure),
    "greater_is_better": Alias(("checkpoint", "greater_is_better"), but(None, "auto")),
    "optim": replace(_OPTIMIZER, convert=_optimizer),
    **of_each(_PROCESSES, Alias(("data", "processes"), but(None, "auto"))),
    **dict.fromkeys(STRATEGIES, Alias(("data", "eval"), _evaluation)),
    **of_each(_TEMPLATE, Alias(("data", "chat_template"), but("tokenizer_default", None))),
    "report_to": Alias(("track",), lambda value: [] if value in ("none", ["none"]) else value),
}

# Keys of which one excludes the others: each inner tuple is one way to say the same thing.
_TOKENS, ROWS_OF_A_STEP = ("train", "tokens_per_step"), ("train", "rows_per_step")
RIVALS: tuple[tuple[tuple[Key, ...], ...], ...] = (
    ((_TOKENS,), (ROWS_OF_A_STEP,), (ROWS_PER_DEVICE, ACCUMULATION)),
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
