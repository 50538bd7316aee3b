"""Models that have a name and no files, for `megatrain bench`, and the config of a run over random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megatrain.config import Config, load_config, names_config
from megatrain.config.document import write_yaml

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megatrain.recipes.setup import Model

NOTHING_TO_READ: Any = None  # random tokens need no tokenizer, random weights no files

QWEN = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768, "tie_word_embeddings": False}
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 8192, "tie_word_embeddings": False}
# As published, but for qwen2.5-1.5b: untied it has 1.8B parameters, and an embedding and a head like its larger sisters.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {**QWEN, "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                     "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2.5-1.5b": {**QWEN, "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2},
    "qwen2.5-7b": {**QWEN, "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                   "num_attention_heads": 28, "num_key_value_heads": 4},
    "qwen2.5-14b": {**QWEN, "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
                    "num_attention_heads": 40, "num_key_value_heads": 8},
    "qwen2.5-32b": {**QWEN, "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
                    "num_attention_heads": 40, "num_key_value_heads": 8},
    "llama-3-8b": {**LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                   "num_attention_heads": 32, "num_key_value_heads": 8},
    "llama-3-70b": {**LLAMA, "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                    "num_attention_heads": 64, "num_key_value_heads": 8},
    "tiny": {**QWEN, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip


def bench_config(target: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a benchmark: a user's own (`target` names a config), or the defaults for a model folder, hub id or named shape.

    Whatever the file says, the weights start at random. Raises ConfigError.
    """
    if names_config(target):
        config = load_config(target, overrides)
    else:
        config = _defaults(target, overrides)
    if config.model.init == "random":
        return config
    return config.with_values({"model.path": None, "model.config": config.model.source, "model.init": "random"})


def _defaults(model: str, overrides: Sequence[str]) -> Config:
    """Pre-training of `model` on rows of full length: what nothing but random tokens needs. It takes a file to give overrides their say."""
    given = {"model": {"config": model, "init": "random"}, "method": "pretrain", "data": {"train": "random tokens", "eval": None}}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "bench.yaml"
        path.write_text(write_yaml(given))
        return load_config(path, overrides)


def shape_model(config: Config, layers: int | None = None) -> Model:
    """A model of which nothing but its configuration is there. Raises ModelError."""
    from megatrain.recipes.setup import Model

    return Model(NOTHING_TO_READ, shape_config(config, layers), NOTHING_TO_READ, None)


def shape_config(config: Config, layers: int | None = None) -> PretrainedConfig:
    """transformers' configuration of the config's model, with another number of layers if asked for. A folder of a shape's name wins.

    Raises ModelError.
    """
    from transformers import AutoConfig

    from megatrain.models.pretrained import load_config as load_model_config
    from megatrain.models.pretrained import resolve_source

    model = config.model
    if model.source in SHAPES and not Path(model.source).exists():
        described: PretrainedConfig = AutoConfig.for_model(**SHAPES[model.source])
        described.max_position_embeddings = max(described.max_position_embeddings, config.train.seq_len)  # random weights know no position
    else:
        described = load_model_config(resolve_source(model.source, model.revision, weights=False), model.trust_remote_code)
    if layers is not None:
        _set_depth(described, layers)
    return described


def _set_depth(config: PretrainedConfig, layers: int) -> None:
    """Cut the model to its first `layers` layers, or repeat them until there are so many."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)  # of those families whose layers are not all alike
    text.num_hidden_layers = layers
    if kinds:
        text.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
