"""MegaTrain: full-precision training of large language models on one GPU, streamed from host RAM.

The names below load what they need on first use, so that `import megatrain` and the command line's
`--help` stay instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatrain.version import VERSION

if TYPE_CHECKING:
    from megatrain import errors as errors
    from megatrain import losses as losses
    from megatrain import rewards as rewards
    from megatrain.config import Config as Config
    from megatrain.config import load_config as load_config
    from megatrain.engine.engine import Engine as Engine
    from megatrain.engine.objective import StepResult as StepResult
    from megatrain.optim import AdamW as AdamW
    from megatrain.optim import Lion as Lion
    from megatrain.optim import Muon as Muon
    from megatrain.recipes.api import evaluate as evaluate
    from megatrain.recipes.api import export as export
    from megatrain.recipes.api import plan as plan
    from megatrain.recipes.api import push as push
    from megatrain.recipes.api import resume as resume
    from megatrain.recipes.api import train as train
    from megatrain.settings import Settings as Settings

__version__ = VERSION

_NAMES = {
    "megatrain.config": ("Config", "load_config"),
    "megatrain.engine.engine": ("Engine",),
    "megatrain.engine.objective": ("StepResult",),
    "megatrain.optim": ("AdamW", "Lion", "Muon"),
    "megatrain.recipes.api": ("evaluate", "export", "plan", "push", "resume", "train"),
    "megatrain.settings": ("Settings",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_MODULES = ("errors", "losses", "rewards")

__all__ = [*_HOMES, *_MODULES]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"megatrain.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
