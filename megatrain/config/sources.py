"""Sources of rows as the config names them: one, or several with weights."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_serializer,
)

from megatrain.config import values as v
from megatrain.config.values import Options, did_you_mean, key, shown, wrong

ONE = "a file, a folder, a glob, a hub id, or {path, weight, split, format}"
SEVERAL = f"{ONE}, or a list of these"
SHARE = "a share of the rows above 0 and below 1, a number of rows"


class SourceOptions(Options):
    """One of several sources. A bare text is short for `{path: text}`."""

    path: v.Source
    weight: v.PositiveOrNull = key(None, "Share of an epoch's rows, relative to other weights.")
    split: v.TextOrNull = key(None, "Split of this source; null: data.split.")
    format: v.Format = key("auto", "Row format of this source; auto: data.format.")

    @model_serializer
    def _short(self) -> str | dict[str, Any]:
        fields = type(self).model_fields
        given = {name: value for name, value in self if value != fields[name].default}
        return self.path if len(given) == 1 else given


def _one(given: object, place: str = "") -> SourceOptions:
    if isinstance(given, SourceOptions):
        return given
    if not isinstance(given, dict | str):
        raise wrong(f"{place}must be {ONE}, not {shown(given)}")
    fields = {"path": given} if isinstance(given, str) else given
    if unknown := next((name for name in fields if name not in SourceOptions.model_fields), None):
        known = ", ".join(SourceOptions.model_fields)
        near = did_you_mean(unknown, SourceOptions.model_fields)
        raise wrong(f"{place}must be {ONE}; {unknown} is none of {known}{near}")
    try:
        return SourceOptions.model_validate(fields)
    except ValidationError as error:
        fault = error.errors()[0]
        if fault["type"] == "missing":
            raise wrong(f"{place}must be {ONE}; path is missing") from None
        inside = "" if isinstance(given, str) else f"{fault['loc'][0]}: "
        raise wrong(f"{place}{inside}{fault['msg']}") from None


def _several(given: object) -> tuple[SourceOptions, ...]:
    if not isinstance(given, list | tuple):
        return (_one(given),)
    if not given:
        raise wrong(f"must be {SEVERAL}, not an empty list")
    found = tuple(_one(one, f"source {n}: ") for n, one in enumerate(given, start=1))
    missing = next((one.path for one in found if one.weight is None), None)
    if missing is not None and any(one.weight is not None for one in found):
        raise wrong(f"{missing} must be given a weight, too: all sources have one, or none has")
    return found


_SHARE: TypeAdapter[float | int | None] = TypeAdapter(v.ShareOrCount)


def _held_out(given: object) -> float | int | tuple[SourceOptions, ...] | None:
    if isinstance(given, str | dict | list | tuple | SourceOptions):
        found = _several(given)
        if weighty := next((one for one in found if one.weight is not None), None):
            raise wrong(
                f"{weighty.path}: a weight is for data.train; every held-out row counts once"
            )
        return found
    try:
        return _SHARE.validate_python(given, strict=True)
    except ValidationError:
        raise wrong(f"must be {SHARE}, null, {SEVERAL}, not {shown(given)}") from None


def _short(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    dumped = [one.model_dump(mode="json") for one in value]
    return dumped[0] if len(dumped) == 1 and isinstance(dumped[0], str) else dumped


_TEXT, _MAPPING = {"type": "string"}, SourceOptions.model_json_schema()
_ANY = [_TEXT, _MAPPING, {"type": "array", "items": {"anyOf": [_TEXT, _MAPPING]}}]
_NUMBERS = [
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "integer", "minimum": 1},
]
Sources = Annotated[
    tuple[SourceOptions, ...],
    PlainValidator(_several),
    PlainSerializer(_short),
    WithJsonSchema({"anyOf": _ANY}),
]
HeldOut = Annotated[
    float | int | tuple[SourceOptions, ...] | None,
    PlainValidator(_held_out),
    PlainSerializer(_short),
    WithJsonSchema({"anyOf": [*_NUMBERS, *_ANY, {"type": "null"}]}),
]
