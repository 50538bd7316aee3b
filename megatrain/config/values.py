"""The kinds of value a config key can hold, each with the sentence that says what it wants."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    WrapValidator,
)
from pydantic_core import PydanticCustomError, core_schema

from megatrain.machine.datasheets import parse_size
from megatrain.settings import OPTION

Auto = Literal["auto"]

LARGEST = 2**53  # the last whole number up to which floats count
LONGEST_NAME = 255  # bytes of a file's or folder's name on the usual file systems
MIN_SIZE_BYTES = 2**20  # a smaller budget is a forgotten unit: `gpu: 80`


class Options(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Places:
    """Place of each dotted key, as `cfg.yaml:7: train.seq_len`, and rows that were given in Python,
    by the name that a source has for them; all are equal to each other."""

    by_key: Mapping[str, str] = field(default_factory=dict, compare=False)
    rows: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


def key(default: object, words: str) -> Any:
    """A key with its default and its meaning, as the schema gives it."""
    return Field(default=default, description=words)


def option(field: str) -> Any:
    """A key that leaves an option to the planner unless it is set."""
    return key("auto", OPTION[field].words)


def wrong(reason: str, key: str = "") -> PydanticCustomError:
    """The error of a value. key: the one inside a section, if the whole section was checked."""
    return PydanticCustomError("megatrain", "{reason}", {"reason": reason, "key": key})


def refuse(key: str, reason: str) -> NoReturn:
    """Refuse a section, or the whole config, whose values contradict each other. Raises."""
    raise wrong(reason, key)


def shown(value: object) -> str:
    """A value as a user would write it in YAML, cut to a readable length."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if isinstance(value, bool | None) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(name: str, candidates: Iterable[str], alike: float = 0.6) -> str | None:
    """The candidate most like `name`, or None when none is close. `alike`: 1 only takes equals."""
    spelt = name.lower().replace("-", "_")
    found = difflib.get_close_matches(spelt, list(candidates), n=1, cutoff=alike)
    return found[0] if found else None


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """The end of a refusal that names the text like `value`, or nothing when none is close."""
    near = nearest(value, names) if isinstance(value, str) else None
    return f"; did you mean {near}?" if near else ""


def _whole(value: object) -> object:  # 1e6 tokens is a whole number
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _counted(value: object) -> object:
    """`_whole`, but nothing with which arithmetic would overflow."""
    whole = _whole(value)
    if isinstance(whole, int) and abs(whole) > LARGEST:
        raise wrong(f"is too large a number: {shown(value)}")
    return whole


def as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _expanded(value: object) -> object:
    """A path as a shell would expand it: YAML has none before it. Others as they are."""
    if not isinstance(value, str):
        return value
    path = os.path.expanduser(value)
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise wrong(f"cannot be written as UTF-8: {shown(value)}") from None
    if b"\0" in encoded or max(map(len, encoded.split(b"/"))) > LONGEST_NAME:
        raise wrong(f"cannot be the name of a file: {shown(value)}")
    if path.startswith("~"):
        raise wrong(f"there is no user of the name {path.split('/')[0][1:]}")
    return path


def _as_path(value: object) -> object:
    return Path(str(_expanded(value))) if isinstance(value, str) and value.strip() else value


def _as_folders(value: object) -> object:
    """One folder or a list of them, as a tuple."""
    many = [value] if isinstance(value, str | Path) else value
    return tuple(_as_path(folder) for folder in many) if isinstance(many, list | tuple) else many


def as_texts(value: object) -> object:
    """One text or a list of them, as a tuple without repetitions; null is none."""
    many = [] if value is None else [value] if isinstance(value, str) else value
    if isinstance(many, list | tuple) and all(isinstance(text, str) for text in many):
        return tuple(dict.fromkeys(many))
    return value


def wanted(
    description: str, ready: Callable[[object], object] = lambda value: value
) -> WrapValidator:
    """Validate `ready(value)`; a refusal says what the key wants, not which part of it objected."""

    def check(value: object, handler: Callable[[object], Any]) -> Any:
        try:
            return handler(ready(value))
        except ValidationError:
            raise wrong(f"must be {description}, not {shown(value)}") from None

    return WrapValidator(check)


@dataclass(frozen=True)
class Choice:
    """One of the texts of the Literal that it annotates. refused: why others are not offered."""

    refused: Mapping[str, str] = field(default_factory=dict)

    def __get_pydantic_core_schema__(self, literal: object, handler: GetCoreSchemaHandler) -> Any:
        check = partial(self._check, get_args(literal))
        return core_schema.no_info_before_validator_function(check, handler(literal))

    def _check(self, names: tuple[str, ...], value: object) -> object:
        if isinstance(value, str) and value in names:
            return value
        known = ", ".join(names)
        if isinstance(value, str) and (reason := self.refused.get(value.lower())):
            raise wrong(f"{value} is {reason}; choose from {known}")
        raise wrong(f"must be one of {known}, not {shown(value)}{did_you_mean(value, names)}")


_Count = Annotated[int, Field(ge=1)]
_Size = Annotated[int, Field(ge=MIN_SIZE_BYTES, le=LARGEST)]
_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(gt=0, lt=1)]
_Beta = Annotated[float, Field(ge=0, lt=1)]
_Text = Annotated[str, Field(pattern=r"\S")]


def _is_day(value: str) -> str:
    date.fromisoformat(value)
    return value


Day = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$"), AfterValidator(_is_day)]
Flag = Annotated[bool, wanted("true or false")]
FlagOrAuto = Annotated[bool | Auto, wanted("true, false or auto")]
Compile = Annotated[bool | Literal["loss"] | Auto, wanted("true, false, loss or auto")]
DayOrAuto = Annotated[Auto | Day, wanted("a date such as 2026-11-23, or auto")]
Text = Annotated[_Text, wanted("text (in quotes if it looks like a number)")]
Patterns = Annotated[
    tuple[_Text, ...] | None,
    wanted(
        "a tensor's name with wildcards, a list of them, or null",
        lambda value: None if value is None else as_texts(value),
    ),
]
_Function = Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")]
Functions = Annotated[
    tuple[_Function, ...], wanted("FILE.py:NAME, such as rewards.py:check, or a list", as_texts)
]
Source = Annotated[_Text, wanted("a file, a folder or a hub id", _expanded)]
SourceOrNull = Annotated[_Text | None, wanted("a file, a folder, a hub id or null", _expanded)]
TextOrNull = Annotated[_Text | None, wanted("text (in quotes if it looks like a number), or null")]
FolderPath = Annotated[Path, wanted("a folder", _as_path)]
FoldersOrNull = Annotated[
    Annotated[tuple[Path, ...], Field(min_length=1)] | None,
    wanted("a folder, a list of folders, or null", _as_folders),
]
Count = Annotated[_Count, wanted("a whole number of at least 1", _counted)]
CountOrNull = Annotated[_Count | None, wanted("a whole number of at least 1, or null", _counted)]
CountOrAuto = Annotated[_Count | Auto, wanted("a whole number of at least 1, or auto", _counted)]
CountAutoOrNull = Annotated[
    _Count | Auto | None, wanted("a whole number of at least 1, auto, or null", _counted)
]
NumberOrAuto = Annotated[
    Annotated[int, Field(ge=0)] | Auto, wanted("a whole number of at least 0, or auto", _counted)
]
SequenceLength = Annotated[
    Annotated[int, Field(ge=2)], wanted("a whole number of tokens of at least 2", _counted)
]
Seed = Annotated[
    Annotated[int, Field(ge=0, lt=2**63)], wanted("a whole number from 0 to 2^63 - 1", _whole)
]
Positive = Annotated[_Positive, wanted("a number above 0")]
PositiveOrNull = Annotated[_Positive | None, wanted("a number above 0, or null")]
ClipNorm = Annotated[_Positive | None, wanted("a number above 0, or null for no clipping")]
NotNegative = Annotated[Annotated[float, Field(ge=0)], wanted("a number of at least 0")]
BetaOrAuto = Annotated[_Beta | Auto, wanted("a number of at least 0 and below 1, or auto")]
NotNegativeOrAuto = Annotated[
    Annotated[float, Field(ge=0)] | Auto, wanted("a number of at least 0, or auto")
]
PositiveOrAuto = Annotated[_Positive | Auto, wanted("a number above 0, or auto")]
Fraction = Annotated[Annotated[float, Field(ge=0, le=1)], wanted("a number from 0 to 1")]
FractionOrNull = Annotated[
    Annotated[float, Field(gt=0, le=1)] | None, wanted("a share above 0 and at most 1, or null")
]
BetasOrAuto = Annotated[
    tuple[_Beta, _Beta] | Auto,
    wanted("two numbers, each at least 0 and below 1, such as [0.9, 0.999], or auto", as_tuple),
]
SizeOrAuto = Annotated[
    _Size | Auto, wanted("a size of at least 1 MiB such as 80GiB or 512 MB, or auto", parse_size)
]
ShareOrCount = Annotated[_Share | _Count | None, wanted("a share, a number of rows, or null")]
ColumnsOrNull = Annotated[
    dict[str, _Text] | None, wanted("a mapping of our names to columns, or null")
]

# Texts that a key can hold, and the reasons for refusing others that users know.
_NOT_BUILT = "not built yet"
_LOSS_SCALING = "not offered, since it needs loss scaling and bfloat16 does not"
_METHODS = ("ppo", "rloo", "distill", "gkd")
_OPTIMIZERS = ("adam", "sgd", "lamb", "adagrad", "rmsprop", "sophia")
_OTHER_METHODS = dict.fromkeys(_METHODS, _NOT_BUILT)
_OTHER_OPTIMIZERS = dict.fromkeys(_OPTIMIZERS, _NOT_BUILT)
_OTHER_PRECISIONS = dict.fromkeys(("float16", "fp16"), _LOSS_SCALING) | {
    "float8": "called fp8 here"
}

Method = Annotated[
    Literal["sft", "pretrain", "dpo", "orpo", "simpo", "cpo", "kto", "reward", "grpo", "rloo"],
    Choice(_OTHER_METHODS),
]
_PairLoss = Literal["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair"]
_OtherLoss = Literal["sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop"]
_DpoLoss = Literal[_PairLoss, _OtherLoss, "sft", "sigmoid_norm"]
DpoLosses = Annotated[
    tuple[_DpoLoss, ...],
    wanted(f"one of {', '.join(get_args(_DpoLoss))}, or a list of them", as_texts),
]
CpoLoss = Annotated[Literal["sigmoid", "hinge", "ipo"], Choice({"simpo": "a method of its own"})]
_OTHER_POLICY_LOSSES = dict.fromkeys(("sapo", "luspo", "vespo"), _NOT_BUILT)
PolicyLoss = Annotated[
    Literal["dapo", "bnpo", "grpo", "dr_grpo", "cispo"], Choice(_OTHER_POLICY_LOSSES)
]
RatioLevel = Annotated[Literal["token", "sequence"], Choice()]
RatioMode = Annotated[
    Literal["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"], Choice()
]
ScaleRewards = Annotated[Literal["group", "batch", "none"], Choice()]
Aggregation = Annotated[Literal["sum_then_normalize", "normalize_then_sum"], Choice()]
BadReward = Annotated[Literal["refuse", "none"], Choice()]
Init = Annotated[Literal["pretrained", "random"], Choice()]
_PlainRow = Literal["messages", "prompt_completion", "alpaca", "sharegpt", "text"]
_PairRow = Literal["preference", "ranking", "alpaca_ranking", "implicit_prompt"]
Format = Annotated[Literal["auto", _PlainRow, _PairRow], Choice()]
Prompts = Annotated[Literal["text", "chat", "alpaca"], Choice()]
TrainOn = Annotated[Literal["assistant", "all"], Choice()]
BadRow = Annotated[Literal["refuse", "skip"], Choice()]
Truncation = Annotated[Literal["keep_start", "keep_end", "context", "drop"], Choice()]
Final = Annotated[Literal["model", "full", "none"], Choice()]
Schedule = Annotated[Literal["constant", "linear", "cosine", "wsd"], Choice()]
OptimizerName = Annotated[Literal["adamw", "lion", "muon"], Choice(_OTHER_OPTIMIZERS)]
Moments = Annotated[Literal["auto", "float32", "bfloat16", "int8"], Choice()]
AdjustLr = Annotated[Literal["auto", "match_rms_adamw", "original"], Choice()]
Precision = Annotated[Literal["auto", "bfloat16", "float32", "fp8"], Choice(_OTHER_PRECISIONS)]
Attention = Annotated[
    Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"],
    Choice(),
]
Transport = Annotated[Literal["auto", "gather", "read"], Choice()]
Wire = Annotated[Literal["float32", "bfloat16"], Choice()]
Activations = Annotated[Literal["none", "int8", "int6", "int4"], Choice()]
_Tracker = Literal["wandb", "tensorboard", "trackio"]
TRACKERS = get_args(_Tracker)
Trackers = Annotated[
    tuple[_Tracker, ...], wanted("wandb, tensorboard, trackio or a list of them", as_texts)
]
Device = Annotated[Literal["auto", "cpu", "cuda"], Choice()]
