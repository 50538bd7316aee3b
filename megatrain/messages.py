"""Messages between ranks as JSON, which does nothing when it is read, as a pickle may.

Besides JSON's own values: tuples, sets, mappings with any keys, bytes, paths, dates, arrays and
tensors, dataclasses and errors of this package.
"""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import fields, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.errors import MegaTrainError

PACKAGE = __name__.partition(".")[0]


def encode(value: object) -> bytes:
    """A value as JSON. Raises TypeError for one that no message may have."""
    return json.dumps(_plain(value)).encode()


def decode(data: bytes) -> Any:
    """The value that `encode` was given. Raises MegaTrainError for anything else."""
    try:
        return _value(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise MegaTrainError(f"a message of another rank is broken: {error}") from error


def _plain(value: Any) -> Any:
    """In JSON's own types; what is none of them as a mapping of one key, its kind."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, list):
        return [*map(_plain, value)]
    if isinstance(value, tuple | set | frozenset):
        return {"tuple" if isinstance(value, tuple) else "set": [*map(_plain, value)]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, date):
        return {"date": value.isoformat()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {"array": [value.dtype.str, [*value.shape], _plain(value.tobytes())]}
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {"tensor": [str(value.dtype)[6:], [*value.shape], _plain(raw.tobytes())]}
    if is_dataclass(value) and not isinstance(value, type):
        held = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"object": [type(value).__module__, type(value).__qualname__, held]}
    if isinstance(value, MegaTrainError):
        held = {name: _plain(one) for name, one in vars(value).items() if name != "__notes__"}
        return {"error": [type(value).__module__, type(value).__qualname__, held, str(value)]}
    raise TypeError(f"a message cannot have a {type(value).__name__}")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [*map(_value, plain)]
    if not isinstance(plain, dict):
        return plain
    ((kind, held),) = plain.items()
    match kind:
        case "tuple" | "set":
            return (tuple if kind == "tuple" else set)(map(_value, held))
        case "dict":
            return {_value(key): _value(one) for key, one in held}
        case "bytes":
            return base64.b64decode(held)
        case "path":
            return Path(held)
        case "date":
            return date.fromisoformat(held)
        case "array":
            dtype, shape, raw = held
            return np.frombuffer(bytearray(_value(raw)), np.dtype(dtype)).reshape(shape)
        case "tensor":
            dtype, shape, raw = held
            flat = torch.tensor(bytearray(_value(raw)), dtype=torch.uint8)
            return flat.view(getattr(torch, dtype)).reshape(shape)
        case "object" | "error":
            module, name, attributes, *said = held
            found = _class(module, name).__new__(_class(module, name), *said)
            for name, one in attributes.items():
                object.__setattr__(found, name, _value(one))
            return found
    raise ValueError(f"{kind} is no kind of value")


def _class(module: str, name: str) -> Any:
    """A dataclass or an error of this package. Raises ValueError for anything else."""
    found: Any = sys.modules[module] if module.partition(".")[0] == PACKAGE else None
    for part in name.split("."):
        found = getattr(found, part)
    if isinstance(found, type) and (is_dataclass(found) or issubclass(found, MegaTrainError)):
        return found
    raise ValueError(f"{name} is no class of messages")
