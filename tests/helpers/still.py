"""An engine that stands still, for tests of what is written and read back."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from megatrain.memory.layout import ArraySpec
from megatrain.memory.store import Store
from megatrain.models.anatomy import Anatomy, layouts_of
from megatrain.models.skeleton import Skeleton
from megatrain.optim import AdamW
from megatrain.storage.checkpoint import save_checkpoint
from megatrain.storage.passthrough import NOTHING

SIZES: Any = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32}
COUNTS: Any = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
CONFIG = transformers.LlamaConfig(**SIZES, **COUNTS)
MOMENTS = [("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)]
ARRAYS = {
    "bfloat16": [("weight", torch.bfloat16), ("remainder", torch.int16), *MOMENTS],
    "float32": [("weight", torch.float32), *MOMENTS],
}


class StillEngine:
    """An engine as a checkpoint sees it, without threads.

    `update(n)` is pending for each block until it is waited for.
    """

    optimizer = AdamW()

    def __init__(self, config: Any, skeleton: Skeleton, precision: str) -> None:
        self.precision = precision
        self.hf_config = config
        self.anatomy: Anatomy = skeleton.anatomy
        self.constants = skeleton.constants
        self.published, self.passthrough = self.anatomy.published.tensors, NOTHING
        specs = [ArraySpec(name, dtype) for name, dtype in ARRAYS[precision]]
        specs.append(ArraySpec("grad", torch.bfloat16))
        cpu = torch.device("cpu")
        self.store = Store(layouts_of(self.anatomy), specs, device=cpu, threads=1)
        self.updates = 0
        self.pending: dict[int, int] = {}
        self.lock = threading.Lock()  # several writers may wait for one block
        self.update(0)

    def update(self, number: int) -> None:
        """Every array gets values that tell the update."""
        self.updates = number
        self.pending = {block.index: number for block in self.anatomy.blocks}

    def begin_updates(self) -> None: ...

    def wait_ready(self, block: int) -> None:
        with self.lock:
            self._finish(block)

    def _finish(self, block: int) -> None:
        number = self.pending.pop(block, None)
        if number is None:
            return
        for index, (name, dtype) in enumerate(ARRAYS[self.precision]):
            first = 1000 * number + 100 * block + index
            views = self.anatomy.blocks[block].layout.views(self.store.array(name, block))
            for view in views.values():
                ramp = torch.arange(view.numel()).mul(17).add(first).remainder(30000)
                view.copy_(ramp.view(view.shape).to(dtype))

    def state(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_state(self, state: Mapping[str, int]) -> None:
        self.updates = state["updates"]

    def bits(self) -> str:
        """A digest of all that a checkpoint keeps."""
        digest = hashlib.sha256()
        for block in self.anatomy.blocks:
            self.wait_ready(block.index)
            for name, _ in ARRAYS[self.precision]:
                digest.update(self.store.array(name, block.index).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def still_engine(layers: int = 2, precision: str = "bfloat16", vocab_size: int = 32) -> StillEngine:
    """What is named may differ from the usual."""
    dtype = dict(ARRAYS[precision])["weight"]
    config = config_of(layers, vocab_size)
    return StillEngine(config, skeleton_of(layers, vocab_size, dtype), precision)


def config_of(layers: int, vocab_size: int) -> Any:
    config = copy.deepcopy(CONFIG)
    config.num_hidden_layers, config.vocab_size = layers, vocab_size
    return config


@cache
def skeleton_of(layers: int, vocab_size: int, dtype: torch.dtype) -> Skeleton:
    """From which engines read what the tensors are, and no more."""
    return Skeleton(config_of(layers, vocab_size), dtype=dtype)


def save_steps(run_dir: Path, engine: StillEngine, *steps: int, keep: int) -> Path:
    """Update and save at the given steps one after another; returns the last checkpoint."""
    for step in steps:
        engine.update(step)
        save_checkpoint(run_dir, step, engine, None, {"step": step}, keep)
    return run_dir / f"checkpoint-{steps[-1]}"
