"""Model folders whose weights are quantised, as published ones are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
FP8 = torch.float8_e4m3fn
TILES: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def in_tiles(tensors: Tensors, rows: int = 128, columns: int = 128) -> Tensors:
    """Projections as FP8 and the scale of each tile, which may be cut off at the edges."""
    result = {}
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            result[name] = weight
            continue
        down, across = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales = torch.rand(down, across) * 0.01 + 1e-3
        shrunk = weight.float() / spread(scales, weight.shape, rows, columns)
        most = torch.finfo(FP8).max  # beyond it some releases of PyTorch write NaN
        result[name] = shrunk.clamp(-most, most).to(FP8)
        result[f"{name}_scale_inv"] = scales
    return result


def spread(scales: Tensor, shape: torch.Size, rows: int, columns: int) -> Tensor:
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"}
    )


def config_in(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def state(folder: Path, method: dict[str, Any]) -> None:
    stated = config_in(folder) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(stated))
