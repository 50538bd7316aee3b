"""The config: one YAML file, typed, checked before anything is loaded. Imports no torch."""

from megatrain.config.fields import Config
from megatrain.config.load import config_schema, example_config, load_config, load_run, names_config

__all__ = ["Config", "config_schema", "example_config", "load_config", "load_run", "names_config"]
