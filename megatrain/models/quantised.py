"""Quantisation formats of model folders that can be undone while weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import ModelError

METHODS = ("mxfp4", "fp8")  # that `storage/dequantise.py` reads
KEY = "quantization_config"
TILE = (128, 128)  # where config.json has none


@dataclass(frozen=True)
class Quantisation:
    """One of METHODS. tile: the rows and columns that share an fp8 scale; None: all of a tensor."""

    method: str
    tile: tuple[int, int] | None


def quantisation_of(stated: Mapping[str, Any], file: Path) -> Quantisation | None:
    """The quantisation that a configuration, or a part of it, declares. None: they are not
    quantised.

    Raises ModelError for another method than METHODS; `file` is named.
    """
    found = None
    for part in (stated, *(value for value in stated.values() if isinstance(value, dict))):
        for key in filter(part.get, (KEY, "compression_config")):
            settings = part[key]
            if not isinstance(settings, dict):
                settings = {"quant_method": settings}
            method = settings.get("quant_method", "an unknown method")
            if key != KEY or method not in METHODS:
                raise ModelError(
                    f"{file}: the weights are quantised ({method}), which cannot be undone here; "
                    "name the unquantised model in bf16, fp16 or fp32 that they were made from"
                )
            one = Quantisation(method, _tile(settings, file) if method == "fp8" else None)
            if found not in (None, one):
                raise ModelError(f"{file}: states two quantisations; remove the one that is wrong")
            found = one
    return found


def _tile(settings: Mapping[str, Any], file: Path) -> tuple[int, int] | None:
    stated = settings.get("weight_block_size", TILE)
    if stated is None:
        return None
    right = isinstance(stated, (list, tuple)) and len(stated) == 2
    if not right or not all(type(size) is int and size > 0 for size in stated):
        raise ModelError(
            f"{file}: weight_block_size is {stated!r}; it must be two whole numbers above 0, or "
            "null for one scale per tensor"
        )
    return stated[0], stated[1]


def quantisation_in(folder: Path) -> Quantisation | None:
    """As `quantisation_of`, of a folder's config.json. Raises ModelError."""
    file = folder / "config.json"
    try:
        stated = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read ({error}); download it again") from error
    return quantisation_of(stated, file) if isinstance(stated, dict) else None


def forget_quantisation(config: Any) -> None:
    """Remove it from a transformers configuration, whose model is trained without."""
    from transformers import PretrainedConfig

    for part in (config, *vars(config).values()):
        if isinstance(part, PretrainedConfig):
            vars(part).pop(KEY, None)
        elif isinstance(part, dict):  # of a configuration that has no class for it
            part.pop(KEY, None)
