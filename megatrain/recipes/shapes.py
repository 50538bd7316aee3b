"""Models that have a name and no files, for `megatrain bench`, and the config of a run over random tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config, load_config, names_config
from megatrain.models.shapes import SHAPES, set_depth

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megatrain.recipes.setup import Model

NOTHING_TO_READ: Any = None  # random tokens need no tokenizer, random weights no files


def bench_config(target: str, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """The config of a benchmark: a user's own (`target` names a config), or the defaults for a model folder, hub id or named shape.

    Whatever the file says, the weights start at random. Raises ConfigError.
    """
    if names_config(target):
        config = load_config(target, overrides)
    else:
        config = _defaults(target, overrides)
    if config.model.init == "random":
        return config
    return config.with_values(
        {"model.path": None, "model.config": config.model.source, "model.init": "random"}
    )


def _defaults(model: str, overrides: Sequence[str] | Mapping[str, Any]) -> Config:
    """Pre-training of `model` on rows of full length: what nothing but random tokens needs."""
    given = {
        "model": {"config": model, "init": "random"},
        "method": "pretrain",
        "data": {"train": "random tokens", "eval": None},
    }
    return load_config(given, overrides)


def shape_model(config: Config, layers: int | None = None) -> Model:
    """A model of which nothing but its configuration is there. Raises ModelError."""
    from megatrain.recipes.setup import Model

    return Model(NOTHING_TO_READ, shape_config(config, layers), NOTHING_TO_READ, None)


def shape_config(config: Config, layers: int | None = None) -> PretrainedConfig:
    """transformers' configuration of the config's model, with another number of layers if asked for. A folder of a shape's name wins.

    Raises ModelError.
    """
    from transformers import AutoConfig

    from megatrain.models.pretrained import read_model_config, resolve_source

    model = config.model
    if model.source in SHAPES and not Path(model.source).exists():
        described: PretrainedConfig = AutoConfig.for_model(**SHAPES[model.source])
        described.max_position_embeddings = max(
            described.max_position_embeddings, config.train.seq_len
        )  # random weights know no position
    else:
        described = read_model_config(
            resolve_source(model.source, model.revision, weights=False), model.trust_remote_code
        )
    if layers is not None:
        set_depth(described, layers)
    return described
