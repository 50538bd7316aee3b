"""Models that have a name and no files, and the config of a run over random tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatrain.config import Config, load_config, names_config
from megatrain.models.pretrained import read_model_config, resolve_source
from megatrain.models.shapes import SHAPES, set_depth
from megatrain.recipes.model import Model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# random tokens need none
NO_TOKENIZER: Any = SimpleNamespace(pad_token_id=None, eos_token_id=None)


def bench_config(target: str, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """The config of a benchmark, whose weights start at random whatever a file says.

    target: a config file, or a model folder, hub id or named shape, for which defaults are taken.

    Raises ConfigError.
    """
    full_rows = {  # pre-training of the model on rows of full length
        "model": {"config": target, "init": "random"},
        "method": "pretrain",
        "data": {"train": "random tokens", "eval": None},
    }
    config = load_config(target if names_config(target) else full_rows, overrides)
    if config.model.init == "random":
        return config
    drawn = {"model.path": None, "model.config": config.model.source, "model.init": "random"}
    return config.with_values(drawn)


def shape_model(config: Config, layers: int | None = None) -> Model:
    """A model that has a configuration, but no files. Raises ModelError."""
    return Model(shape_config(config, layers), NO_TOKENIZER, None)


def shape_config(config: Config, layers: int | None = None) -> PretrainedConfig:
    """transformers' configuration of the config's model. A folder of a shape's name wins.

    layers: another depth than the model's own.

    Raises ModelError.
    """
    from transformers import AutoConfig

    model = config.model
    if model.source in SHAPES and not Path(model.source).exists():
        described: PretrainedConfig = AutoConfig.for_model(**SHAPES[model.source])
        longest = max(described.max_position_embeddings, config.train.seq_len)
        described.max_position_embeddings = longest  # random weights know no position
    else:
        found = resolve_source(model.source, model.revision, weights=False)
        described = read_model_config(found, model.trust_remote_code)
    if layers is not None:
        set_depth(described, layers)
    return described
