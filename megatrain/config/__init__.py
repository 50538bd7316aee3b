"""The config: one YAML file, typed, checked before anything is loaded. Imports neither torch nor transformers."""

from megatrain.config.example import config_schema, example_config
from megatrain.config.fields import (
    CheckpointOptions,
    Config,
    DataOptions,
    MemoryOptions,
    ModelOptions,
    OptimizerOptions,
    TrainOptions,
)
from megatrain.config.load import load_config, names_config

__all__ = [
    "CheckpointOptions",
    "Config",
    "DataOptions",
    "MemoryOptions",
    "ModelOptions",
    "OptimizerOptions",
    "TrainOptions",
    "config_schema",
    "example_config",
    "load_config",
    "names_config",
]
