"""Sizes of memory as people write them."""

from __future__ import annotations

import math
import re

# Bare K, M, G and T are binary, as docker, systemd and slurm read them.
_UNIT_BYTES = {"": 1, "B": 1}
_UNIT_BYTES |= {f"{p}B": 1000**n for n, p in enumerate("KMGT", start=1)}
_UNIT_BYTES |= {f"{p}{end}": 1024**n for n, p in enumerate("KMGT", start=1) for end in ("", "IB")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object) -> object:
    """Bytes of a human size (`80GiB`, `512 MB`, `1.5TB`, a plain number); else the value itself."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _UNIT_BYTES:
        return value
    size = float(match[1]) * _UNIT_BYTES[match[2].upper()]
    return int(size) if math.isfinite(size) else value
