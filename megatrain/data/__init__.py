"""From rows in files to batches of tokens: call `load_data`, and iterate over a `Loader`."""

from megatrain.data.build import DataOptions, load_data
from megatrain.data.loader import Loader, held_out_batches

__all__ = ["DataOptions", "Loader", "held_out_batches", "load_data"]
