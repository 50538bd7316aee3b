"""The config: one YAML file, typed, checked before anything is loaded. Imports no torch."""

from megatrain.config.fields import Config
from megatrain.config.load import (
    bench_config,
    config_schema,
    example_config,
    load_config,
    load_run,
    names_config,
)

__all__ = [
    "Config",
    "bench_config",
    "config_schema",
    "example_config",
    "load_config",
    "load_run",
    "names_config",
]
