"""The kinds of value a config key can hold, each with the sentence that says what it wants."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from megatrain.machine.datasheets import parse_size
from megatrain.settings import OPTION

Auto = Literal["auto"]

OURS = "megatrain"  # pydantic's type of our errors
LARGEST = 2**53  # the last whole number up to which floats count
LONGEST_NAME = 255  # bytes of a file's or folder's name on the usual file systems
MIN_SIZE_BYTES = 2**20  # a smaller budget is a forgotten unit: `gpu: 80`


class Options(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion, no NaN.

    A value of another kind is refused by the words that its annotation has: a text beside the type,
    or what the type lists.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _explain(
        cls, value: object, handler: Callable[[object], Any], info: ValidationInfo
    ) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            field = cls.model_fields[str(info.field_name)]
            words = _words_of(field.annotation, field.metadata)
            if not words:  # a section or a source, which has its own
                raise
            ours = [fault["msg"] for fault in error.errors() if fault["type"] == OURS]
            raise wrong(ours[0] if ours else _refusal(field, words, value)) from None

    def own(self) -> list[str]:
        """Names of keys that have another value than their default."""
        return [name for name, value in self if value != type(self).model_fields[name].default]


def _words_of(kind: Any, beside: Iterable[object] = ()) -> list[str]:
    """Parts of what a key wants; none of a kind without words. beside: annotations of the type."""
    if said := next((one for one in beside if isinstance(one, str)), ""):
        return [said]
    if get_origin(kind) is Annotated:
        return _words_of(kind.__origin__, kind.__metadata__)
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return [word for part in get_args(kind) for word in _words_of(part)]
    return {bool: ["true", "false"], NoneType: ["null"]}.get(kind, [])


def _refusal(field: FieldInfo, words: list[str], value: object) -> str:
    """The sentence for a value of another kind, one of a list's with the nearest of the list."""
    if get_origin(field.annotation) is Literal:
        known = ", ".join(words)
        reasons = next((one for one in field.metadata if isinstance(one, dict)), {})
        if isinstance(value, str) and (reason := reasons.get(value.lower())):
            return f"{value} is {reason}; choose from {known}"
        return f"must be one of {known}, not {shown(value)}{did_you_mean(value, words)}"
    *first, last = words
    comma = "," if " " in words[0] else ""  # after a phrase
    known = f"{', '.join(first)}{comma} or {last}" if first else last
    return f"must be {known}, not {shown(value)}"


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
    return PydanticCustomError(OURS, "{reason}", {"reason": reason, "key": key})


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


# k and Ki differ as GB and GiB do.
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmM])(i?)")


def _whole(value: object) -> object:
    """The whole number of 1e6 or a text such as 64k, 64Ki or 1.5M; else the value itself."""
    found = _COUNT.fullmatch(value) if isinstance(value, str) else None
    if found is not None:
        number, unit, binary = found.groups()
        value = float(number) * (1024 if binary else 1000) ** " km".index(unit.lower())
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _counted(value: object) -> object:
    """`_whole`, but nothing with which arithmetic would overflow."""
    whole = _whole(value)
    if isinstance(whole, int) and abs(whole) > LARGEST:
        raise wrong(f"is too large a number: {shown(value)}")
    return whole


def _expanded(value: object) -> object:
    """A path as a shell would expand it: YAML has none before it. Others as they are."""
    if not isinstance(value, str):
        return value
    path = os.path.expandvars(os.path.expanduser(value))
    if unset := _VARIABLE.search(path):
        raise wrong(f"there is no environment variable {unset[1]}")
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


Day = Annotated[
    str,
    Field(pattern=r"^\d{4}-\d{2}-\d{2}$"),
    AfterValidator(lambda value: str(date.fromisoformat(value))),
    "a date such as 2026-11-23",
]
Text = Annotated[str, Field(pattern=r"\S"), "text (in quotes if it looks like a number)"]
UrlOrNull = Annotated[
    Annotated[str, Field(pattern=r"^https?://[^/\s]+\S*$")] | None,
    "an address such as http://localhost:8000, or null",
]
Patterns = Annotated[
    tuple[Text, ...] | None,
    BeforeValidator(lambda value: None if value is None else as_texts(value)),
    "a tensor's name with wildcards, a list of them, or null",
]
_OneText = Annotated[str, Field(pattern=r"\S")]
_Texts = BeforeValidator(as_texts)
Functions = Annotated[
    tuple[_OneText, ...], _Texts, "FILE.py:NAME, such as rewards.py:check, a folder, or a list"
]
Source = Annotated[
    str, Field(pattern=r"\S"), BeforeValidator(_expanded), "a file, a folder or a hub id"
]
SourceOrNull = Annotated[Source | None, "a file, a folder, a hub id or null"]
FolderPath = Annotated[Path, BeforeValidator(_as_path), "a folder"]
Folders = Annotated[
    tuple[Path, ...],
    Field(min_length=1),
    BeforeValidator(_as_folders),
    "a folder, a list of folders",
]
FROM_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
_Counted = BeforeValidator(_counted)
Count = Annotated[int, Field(ge=1), _Counted, "a whole number of at least 1"]
Number = Annotated[int, Field(ge=0), _Counted, "a whole number of at least 0"]
Group = Annotated[int, Field(ge=2), _Counted, "a whole number of at least 2"]
Often = Annotated[
    Count | Annotated[float, Field(gt=0, lt=1)] | Literal["epoch"],
    "a number of steps, a share of an epoch's steps below 1, or epoch",
]
FileOrCount = Annotated[Count | Source | None, "a file, a whole number of at least 1 or null"]
SequenceLength = Annotated[int, Field(ge=2), _Counted, "a whole number of tokens of at least 2"]
Seed = Annotated[
    int, Field(ge=0, lt=2**63), BeforeValidator(_whole), "a whole number from 0 to 2^63 - 1"
]
Positive = Annotated[float, Field(gt=0), "a number above 0"]
ClipNorm = Annotated[Positive | None, "a number above 0, or null for no clipping"]
NotNegative = Annotated[float, Field(ge=0), "a number of at least 0"]
Beta = Annotated[float, Field(ge=0, lt=1), "a number of at least 0 and below 1"]
Fraction = Annotated[float, Field(ge=0, le=1), "a number from 0 to 1"]
PositiveShare = Annotated[float, Field(gt=0, le=1), "a share above 0 and at most 1"]
Betas = Annotated[
    tuple[Beta, Beta],
    FROM_LIST,
    "two numbers, each at least 0 and below 1, such as [0.9, 0.999]",
]
Size = Annotated[
    int,
    Field(ge=MIN_SIZE_BYTES, le=LARGEST),
    BeforeValidator(parse_size),
    "a size of at least 1 MiB such as 80GiB or 512 MB",
]
Columns = Annotated[dict[str, Text], "a mapping of our names to columns"]

# Texts that a key can hold, and the reasons for refusing others that users know.
_NOT_BUILT = "not built yet"
_LOSS_SCALING = "not offered, since it needs loss scaling and bfloat16 does not"
Method = Annotated[
    Literal[
        "sft", "pretrain", "dpo", "orpo", "simpo", "cpo", "kto", "reward", "grpo", "rloo", "distill"
    ],
    dict.fromkeys(("ppo", "gkd"), _NOT_BUILT),
]
_PairLoss = Literal["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair"]
_OtherLoss = Literal["sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop"]
_DpoLoss = Literal[_PairLoss, _OtherLoss, "sft", "sigmoid_norm"]
DpoLosses = Annotated[
    tuple[_DpoLoss, ...],
    _Texts,
    f"one of {', '.join(get_args(_DpoLoss))}, or a list of them",
]
CpoLoss = Annotated[Literal["sigmoid", "hinge", "ipo"], {"simpo": "a method of its own"}]
PolicyLoss = Annotated[
    Literal["dapo", "bnpo", "grpo", "dr_grpo", "cispo"],
    dict.fromkeys(("sapo", "luspo", "vespo"), _NOT_BUILT),
]
RatioMode = Literal["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"]
Init = Literal["pretrained", "random"]
_PlainRow = Literal["messages", "prompt_completion", "alpaca", "sharegpt", "text"]
_PairRow = Literal["preference", "ranking", "alpaca_ranking", "implicit_prompt"]
Format = Literal["auto", _PlainRow, _PairRow]
TrainOn = Literal["assistant", "all"]
BadRow = Literal["refuse", "skip"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
OptimizerName = Annotated[
    Literal["adamw", "lion", "muon"],
    dict.fromkeys(("adam", "sgd", "lamb", "adagrad", "rmsprop", "sophia"), _NOT_BUILT),
]
Precision = Annotated[
    Literal["auto", "bfloat16", "float32", "fp8"],
    {"float16": _LOSS_SCALING, "fp16": _LOSS_SCALING, "float8": "called fp8 here"},
]
Attention = Literal[
    "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
]
_Tracker = Literal["wandb", "tensorboard", "trackio"]
TRACKERS = get_args(_Tracker)
Trackers = Annotated[tuple[_Tracker, ...], _Texts, "wandb, tensorboard, trackio or a list of them"]
