"""Quantised tensors of a model folder, dequantised to bf16 while they are read.

MXFP4, as GPT-OSS's experts have it: two values of 4 bits (E2M1) in a byte, and a power of two for
each 32 of them (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
FP8, as DeepSeek-V3 has it: E4M3, times an fp32 scale for each tile of 128 x 128 values, or for the
whole tensor. The arithmetic is transformers' own, and so are the bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatrain.errors import ModelError
from megatrain.models.pretrained import Quantisation
from megatrain.storage.safetensors import CHUNK_ELEMENTS, StoredTensor, dtype_name

Chunks = Iterator[tuple[int, torch.Tensor]]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and their negatives
GROUP = 32  # values that share a scale
NAN_SCALE, BIAS = 255, 127  # of E8M0
# method -> (suffix of the values' names, of the scales', dtype of the values)
NAMED = {
    "mxfp4": ("_blocks", "_scales", torch.uint8),
    "fp8": ("", "_scale_inv", torch.float8_e4m3fn),
}
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)  # of fp8
SERVED = "activation_scale"  # of fp8 activations, which training does not have


@dataclass(frozen=True)
class Derived:
    """A tensor that no file holds as it is, with the face of a `StoredTensor`: one in memory, or in
    bf16 of values and scales, whose chunks begin and end where a row does, or an expert."""

    name: str
    path: Path  # what it derives from
    where: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[..., Chunks]


def dequantised(
    stored: Mapping[str, StoredTensor], how: Quantisation
) -> tuple[dict[str, Derived], dict[str, StoredTensor]]:
    """(quantised tensors of a folder, those that are read as they are), by the model's names. The
    tensors decide, not `modules_to_not_convert`. Raises ModelError."""
    of_values, of_scales, dtype = NAMED[how.method]
    scales = {n.removesuffix(of_scales): t for n, t in stored.items() if n.endswith(of_scales)}
    values = {
        n.removesuffix(of_values): t
        for n, t in stored.items()
        if n.endswith(of_values) and t.dtype == dtype
    }
    for name in scales.keys() - values.keys():
        raise ModelError(
            f"{scales[name].where} belongs to {name}{of_values}, which is not there or not "
            f"{dtype_name(dtype)}; download the folder again"
        )
    for name in values.keys() - scales.keys():
        raise ModelError(
            f"{values[name].path}: lacks {name}{of_scales}, without which {values[name].name} "
            "cannot be dequantised; download the folder again"
        )
    paired = {n: (values[n], scales[n]) for n in values}
    used = {tensor.name for pair in paired.values() for tensor in pair}
    others = {n: t for n, t in stored.items() if n not in used and not n.endswith(SERVED)}
    for name in paired.keys() & others.keys():
        path = others[name].path
        raise ModelError(f"{path}: holds {name} twice, quantised too; remove one of them")
    if how.method == "mxfp4":
        return {name: _mxfp4(name, *pair) for name, pair in paired.items()}, others
    return {name: _fp8(name, *pair, how.tile) for name, pair in paired.items()}, others


def _mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor) -> Derived:
    if len(blocks.shape) != 4 or blocks.shape[3] * 2 != GROUP:
        raise ModelError(
            f"{blocks.where} has shape {list(blocks.shape)}; MXFP4 has experts, rows, groups and "
            f"{GROUP // 2} bytes"
        )
    experts, rows, groups, _ = blocks.shape
    _check_scales(scales, (torch.uint8,), blocks.shape[:3], scales.shape == blocks.shape[:3])
    shape = (experts, groups * GROUP, rows)  # transformers exchanges rows and columns
    chunks = partial(_read_mxfp4, blocks, scales)
    return Derived(name, blocks.path, blocks.where, torch.bfloat16, shape, chunks)


def _read_mxfp4(
    blocks: StoredTensor, scales: StoredTensor, start: int = 0, stop: int | None = None
) -> Chunks:
    """Whole experts, as the first column of one comes from all its rows."""
    count, rows, groups, width = blocks.shape
    signed = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.bfloat16)
    low, high = signed.repeat(16), signed.repeat_interleave(16)
    of_byte = torch.stack([low, high], 1).view(torch.int32)  # a pair of values, as one element
    each = rows * groups  # scales of an expert
    first = start // (each * GROUP)
    last = count if stop is None else math.ceil(stop / (each * GROUP))
    read = [
        stored.chunks(first * size, last * size, chunk=size)
        for stored, size in ((blocks, each * width), (scales, each))
    ]
    for expert, ((_, packed), (_, biased)) in enumerate(zip(*read, strict=True), first):
        if int(biased.max()) == NAN_SCALE:
            raise ModelError(f"{scales.where} holds NaN; the file is damaged")
        powers = torch.ldexp(torch.ones(biased.shape), biased.int() - BIAS).bfloat16()
        values = of_byte.index_select(0, packed.int()).view(torch.bfloat16).view(each, GROUP)
        values *= powers[:, None]  # exact: bf16 has these powers' range
        yield expert * each * GROUP, values.view(rows, -1).t().reshape(-1)


def _fp8(
    name: str, weight: StoredTensor, scales: StoredTensor, tile: tuple[int, int] | None
) -> Derived:
    if len(weight.shape) < 2 or not weight.numel:
        raise ModelError(f"{weight.where} has shape {list(weight.shape)}: it is not a matrix")
    *matrices, rows, columns = weight.shape
    high, wide = tile or (rows, columns)
    grid = (*matrices, math.ceil(rows / high), math.ceil(columns / wide))
    fits = scales.shape == grid or (tile is None and scales.numel == math.prod(grid))
    _check_scales(scales, SCALES, grid, fits)
    chunks = partial(_read_fp8, weight, scales, grid, high, wide)
    return Derived(name, weight.path, weight.where, torch.bfloat16, weight.shape, chunks)


def _read_fp8(
    weight: StoredTensor,
    scales: StoredTensor,
    grid: tuple[int, ...],
    high: int,
    wide: int,
    start: int = 0,
    stop: int | None = None,
) -> Chunks:
    ((_, stored),) = scales.chunks(chunk=scales.numel)
    stored = stored.float()
    if not torch.isfinite(stored).all():
        raise ModelError(f"{scales.where} holds NaN or infinity; the file is damaged")
    of_tiles = stored.view(-1, grid[-1])
    rows, columns = weight.shape[-2:]
    step = max(1, CHUNK_ELEMENTS // columns)
    end = weight.numel if stop is None else math.ceil(stop / columns) * columns
    start -= start % columns
    for begin, values in weight.chunks(start, end, chunk=step * columns):
        row = torch.arange(begin // columns, (begin + values.numel()) // columns)
        tiles = of_tiles[row // rows * grid[-2] + row % rows // high]
        factors = tiles.repeat_interleave(wide, dim=1)[:, :columns]
        yield begin, values.view(-1, columns).float().mul_(factors).bfloat16().view(-1)


def _check_scales(
    scales: StoredTensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], fits: bool
) -> None:
    if not fits or scales.dtype not in dtypes:
        raise ModelError(
            f"{scales.where} has shape {list(scales.shape)} and is {dtype_name(scales.dtype)}; its "
            f"tensor needs {list(shape)} in {' or '.join(map(dtype_name, dtypes))}"
        )
