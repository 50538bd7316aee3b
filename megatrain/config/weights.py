"""The config's section on the model: which one, and where its weights start from."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ConfigDict, model_validator

from megatrain.config import choices as c
from megatrain.config import values as v
from megatrain.config.values import Options, key, refuse


def _or_text(schema: dict[str, Any]) -> None:
    """Make the schema of a section also that of a bare text."""
    section = schema.copy()
    schema.clear()
    schema["anyOf"] = [{"type": "string"}, section]


class ModelOptions(Options):
    """Which model, and where its weights start from. A bare text is short for `{path: text}`."""

    model_config = ConfigDict(json_schema_extra=_or_text)

    path: v.SourceOrNull = key(None, "Hub id, local folder or GGUF file that holds the weights.")
    config: v.SourceOrNull = key(
        None, "Folder with the shape (config.json) and the tokenizer; the weights are random."
    )
    init: c.Init = key("pretrained", "pretrained reads weights; random draws them from the seed.")
    revision: v.TextOrNull = key(None, "Branch, tag or commit on the hub.")
    trust_remote_code: v.Flag = key(
        False, "Run code that comes with the weights; no file of the model can ask for it."
    )

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, given: object) -> object:
        if isinstance(given, str):
            return {"path": given}
        if isinstance(given, dict) and given.get("config") is not None:
            return {"init": "random", **given}  # a shape has no weights to read
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.config is None):
            ways = "`path` (weights) or `config` (a shape, weights at random)"
            refuse("config", f"name either {ways}, not both")
        if self.config is not None and self.init == "pretrained":
            refuse("init", "`config` gives a shape and no weights; use `path`, or init: random")
        return self

    @property
    def source(self) -> str:
        """Hub id, folder or file, whichever of `path` and `config` was given."""
        source = self.path or self.config
        assert source is not None
        return source
