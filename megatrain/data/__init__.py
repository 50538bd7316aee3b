"""From rows in files to batches of tokens. The recipe calls `load_data` and iterates over a `Loader`."""

from megatrain.data.build import DataOptions, load_data
from megatrain.data.loader import Loader, held_out_batches

__all__ = ["DataOptions", "Loader", "held_out_batches", "load_data"]
