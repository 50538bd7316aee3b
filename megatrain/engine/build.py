"""Engines from what users have: a checkpoint or a configuration, and a few choices."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import torch

from megatrain.engine.engine import Engine
from megatrain.engine.settings import PRECISIONS, Settings
from megatrain.errors import ConfigError
from megatrain.hardware import bf16_is_fast, update_threads
from megatrain.models.fp8 import fp8_supported
from megatrain.models.initialize import initialize
from megatrain.models.pretrained import load_config, resolve_source
from megatrain.models.skeleton import Skeleton
from megatrain.models.weights import load_weights
from megatrain.optim import AdamW, Optimizer
from megatrain.optim.split import CHUNK, split_master


def choose_device(device: str) -> torch.device:
    """`auto` is the first GPU, or the CPU where there is none. Raises ConfigError for a device that is unknown or not there."""
    # Memory segments that grow, instead of new ones beside them: torch then holds little more than it uses. Read at the first allocation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as the driver counts GPUs, of which the plan asks; read when CUDA is started
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device: {device!r} is unknown; choose auto, cpu, cuda or cuda:N")
    chosen = torch.device(device)
    if chosen.type == "cpu":
        return chosen
    index, count = chosen.index or 0, torch.cuda.device_count()
    if index >= count:
        seen = f"PyTorch sees {count} CUDA devices" if count else "PyTorch sees no CUDA device; install its CUDA build or set device: cpu"
        raise ConfigError(f"device: {device} was asked for, but {seen}")
    return torch.device("cuda", index)


def choose_precision(precision: str, device: torch.device) -> str:
    """`auto` is bfloat16 with fp32 master weights where the hardware is fast at it, else float32. Raises ConfigError."""
    if precision == "auto":
        return "bfloat16" if bf16_is_fast(device.type) else "float32"
    if precision not in PRECISIONS:
        raise ConfigError(f"precision: {precision!r} is not built; choose one of auto, {', '.join(PRECISIONS)}")
    if precision == "fp8" and device.type == "cuda" and not fp8_supported(device):
        raise ConfigError("precision: fp8 needs a GPU of compute capability 8.9 (Ada) or newer; set precision: bfloat16")
    return precision


def build(
    config: Any,
    *,
    optimizer: Optimizer | None = None,
    precision: str = "auto",
    attention: str = "auto",
    max_grad_norm: float | None = 1.0,
    device: str | torch.device = "auto",
    seed: int = 0,
    settings: Settings | None = None,
    trust_remote_code: bool = False,
) -> Engine:
    """An engine for a transformers configuration, its weights still zero. The arguments are those of `Engine`, with `auto` allowed.

    Raises:
        ConfigError: an option is out of range or cannot be had here.
        ModelError: the family cannot be streamed.
        OutOfMemory: host or GPU memory does not suffice.
    """
    if max_grad_norm is not None and not 0 < max_grad_norm <= math.inf:
        raise ConfigError(f"max_grad_norm: {max_grad_norm!r} is out of range; give a number above 0, or None for no clipping")
    where = choose_device(str(device))
    resolved = choose_precision(precision, where)
    skeleton = Skeleton(config, attention=attention, dtype=PRECISIONS[resolved], trust_remote_code=trust_remote_code)
    return Engine(
        skeleton,
        optimizer=optimizer or AdamW(),
        precision=resolved,
        max_grad_norm=max_grad_norm,
        device=where,
        settings=settings or Settings(update_threads=update_threads()),
        seed=seed,
    )


def from_pretrained(source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False, **options: Any) -> Engine:
    """An engine with the weights of a local folder, a GGUF file or a hub id. Options as for `build`."""
    resolved = resolve_source(source, revision)
    engine = build(load_config(resolved, trust_remote_code), trust_remote_code=trust_remote_code, **options)
    try:
        load_weights(engine.anatomy, engine.store, resolved)
    except BaseException:
        engine.close()
        raise
    return engine


def from_config(config: Any, *, trust_remote_code: bool = False, **options: Any) -> Engine:
    """An engine with random weights, by the family's own rule, for a transformers configuration or the folder of one."""
    if isinstance(config, (str, Path)):
        config = load_config(resolve_source(config, None), trust_remote_code)
    engine = build(config, trust_remote_code=trust_remote_code, **options)
    try:
        randomize(engine)
    except BaseException:
        engine.close()
        raise
    return engine


def randomize(engine: Engine) -> None:
    """Draw all weights by the family's own rule, from the engine's seed."""

    def write(block: int, master: torch.Tensor) -> None:
        write_master(engine, block, master)

    initialize(engine.skeleton, engine.seed, engine.device, write)
    engine.weights_changed()


def write_master(engine: Engine, block: int, master: torch.Tensor) -> None:
    """Set a block's weights from a flat fp32 tensor on any device, piece by piece: on a GPU its halves would need as much again."""
    if engine.precision == "float32":
        with engine.store.lease(block, ["weight"], changes=True) as arrays:
            arrays["weight"].copy_(master)
        return
    with engine.store.lease(block, ["weight", "remainder"], changes=True) as arrays:
        targets = [torch.split(array, CHUNK) for array in arrays.values()]
        for piece, *into in zip(torch.split(master, CHUNK), *targets, strict=True):
            for target, half in zip(into, split_master(piece), strict=True):
                target.copy_(half)
