"""Shapes of known models by name, as transformers' configurations have them: for random weights."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEYS = (
    *("model_type", "rms_norm_eps", "rope_theta", "max_position_embeddings"),
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
_READ = tomllib.loads(Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8"))


def _shape(row: list[Any]) -> dict[str, Any]:
    """The keys of a row of shapes.toml."""
    family, *sizes, more = row
    keys: dict[str, Any] = dict(zip(KEYS, (*_READ["families"][family], *sizes), strict=True))
    keys["tie_word_embeddings"] = False
    keys.update(more)
    return keys


SHAPES: dict[str, dict[str, Any]] = {
    name: _shape(row) if isinstance(row, list) else row for name, row in _READ["models"].items()
}
SHAPES["mistral-7b"]["sliding_window"] = None  # which TOML cannot say


def named_shape(source: str) -> dict[str, Any] | None:
    """The shape of this name, unless a folder has it."""
    return None if Path(source).exists() else SHAPES.get(source)


def set_depth(config: PretrainedConfig, layers: int) -> None:
    """Give the model `layers` layers: its first ones, repeated as often as needed."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)  # only families with several kinds of layers have it
    text.num_hidden_layers = layers
    if kinds:
        text.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
