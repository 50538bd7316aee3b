"""On CUDA: the same device memory at any depth, activation checkpoints apart; pinned host memory,
given back in the end."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from megatrain.engine.components import AppliedGradients
from megatrain.engine.engine import Engine
from megatrain.settings import Settings
from tests.helpers.runs import train_engine
from tests.helpers.support import engine_of, full_batches, tiny_config

HIDDEN = 128
SHAPES = [(2, 128), (2, 128)]
BOUNDARY = 4 * 128 * HIDDEN * 2  # bytes of hidden states in bf16, for each layer
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 256, "max_position_embeddings": 128}
MODES: dict[str, dict[str, Any]] = {
    "one group": {},
    "two groups, sums travel": {"settings": Settings(groups=2, head_chunk_tokens=64)},
    "unclipped": {"max_grad_norm": None},
    "gradients twice": {"settings": Settings(second_backward=True, head_chunk_tokens=64)},
}


def make(depth: int, family: str = "llama", **options: Any) -> Engine:
    config = tiny_config(family, num_hidden_layers=depth, **SIZES)
    return engine_of(config, device="cuda", precision="bfloat16", **options)


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@cache
def measure(depth: int, family: str, mode: str) -> tuple[int, int]:
    """(bytes that the engine keeps on the device, peak bytes of a step beyond them)."""
    batches = full_batches(0, SHAPES)
    make(1).close()  # the process's first engine takes cuBLAS's workspaces
    before = allocated()
    with make(depth, family, **MODES[mode]) as engine:
        kept = allocated() - before
        for _ in range(2):  # cuBLAS takes its workspaces, lazily
            engine.train_step(batches)
        start = allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.train_step(batches)
        torch.cuda.synchronize()
        return kept, torch.cuda.max_memory_allocated() - start


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *(("llama", mode) for mode in MODES),
        ("qwen2-tied", "one group"),
        ("qwen2-tied", "gradients twice"),
    ],
)
def test_device_memory_less_boundary_activations_is_the_same_for_any_depth(family, mode):
    kept = {depth: measure(depth, family, mode)[0] for depth in (4, 16)}
    assert kept[4] == kept[16], kept
    boundary = BOUNDARY // 2 if mode == "two groups, sums travel" else BOUNDARY
    peaks = {depth: measure(depth, family, mode)[1] - depth * boundary for depth in (4, 16)}
    # the allocator's rounding, and not one boundary more
    assert abs(peaks[4] - peaks[16]) <= boundary // 4, peaks


def test_a_step_leaves_nothing_behind():
    with make(4) as engine:
        for _ in range(2):
            engine.train_step(full_batches(0, SHAPES))
        before = allocated()
        for seed in range(5):
            engine.train_step(full_batches(seed, SHAPES))
        assert allocated() == before


def test_gradients_that_are_computed_twice_take_no_host_memory_but_their_staging():
    """And on the device only the head's inputs beside what stored ones take."""
    with (
        make(8) as stored,
        make(8, settings=Settings(second_backward=True, head_chunk_tokens=64)) as twice,
    ):
        numel = sum(layout.numel for layout in stored.store.layouts)
        assert stored.store.nbytes - twice.store.nbytes == pytest.approx(2 * numel, abs=4 << 20)
        assert "grad" not in twice.store.arrays
    more = measure(8, "llama", "gradients twice")[1] - measure(8, "llama", "one group")[1]
    assert more <= 2 * BOUNDARY


@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
def test_what_is_transferred_is_pinned_and_the_rest_is_not(clip):
    with make(4, max_grad_norm=clip) as engine:
        for name, spec in engine.store.arrays.items():
            assert engine.store.array(name, 1).is_pinned() == spec.transferred, name
        if isinstance(engine.parts.sink, AppliedGradients):
            assert all(buffer.is_pinned() for buffer in engine.parts.sink.ring.buffers)


def peak(settings: Settings) -> int:
    """Bytes of a step's activations at their most."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 2048}
    config = tiny_config("llama", num_hidden_layers=12, **sizes)
    with engine_of(config, device="cuda", precision="bfloat16", settings=settings) as engine:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train_engine(engine, [full_batches(0, [(1, 2048)] * 4)] * 2)
        return torch.cuda.max_memory_allocated() - before


def test_memory_of_graphs_in_host_ram_is_used_for_others_meanwhile():
    """Twelve layers' graphs: sending eleven away leaves one, and the rings, less than five."""
    offload = Settings(offload_activations=True, head_chunk_tokens=256)
    nothing = peak(offload)
    everything = peak(replace(offload, retained=12)) - nothing
    sent = peak(replace(offload, retained=1, retained_on_host=11)) - nothing
    assert everything > 0
    assert sent < 0.6 * everything
