"""MegaTrain: full-precision training of large language models on one GPU, streamed from host RAM.

The names below load what they need on first use, so that `import megatrain` and the command line's `--help` stay instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain import losses as losses
    from megatrain.engine.engine import Engine as Engine
    from megatrain.engine.settings import Settings as Settings
    from megatrain.optim import Adafactor as Adafactor
    from megatrain.optim import AdamW as AdamW
    from megatrain.optim import Lion as Lion
    from megatrain.optim import Muon as Muon
    from megatrain.recipes.run import plan as plan
    from megatrain.recipes.run import train as train

__version__ = "0.1.0"

_HOMES = {
    "Adafactor": "megatrain.optim",
    "AdamW": "megatrain.optim",
    "Engine": "megatrain.engine.engine",
    "Lion": "megatrain.optim",
    "Muon": "megatrain.optim",
    "Settings": "megatrain.engine.settings",
    "plan": "megatrain.recipes.run",
    "train": "megatrain.recipes.run",
}
_MODULES = {"losses"}

__all__ = ["Adafactor", "AdamW", "Engine", "Lion", "Muon", "Settings", "losses", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"megatrain.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
