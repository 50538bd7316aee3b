"""The premise of tests of races on CUDA: the host runs ahead of the GPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.settings import Settings
from tests.helpers.delays import before_layers
from tests.helpers.support import engine_of, full_batches, tiny_config

STEPS = [full_batches(seed, [(2, 8)] * 3) for seed in range(2)]
pytestmark = pytest.mark.usefixtures("deterministic")


def make(groups: int) -> Engine:
    config, settings = tiny_config("qwen2-tied", num_hidden_layers=4), Settings(groups=groups)
    return engine_of(config, device="cuda", precision="bfloat16", settings=settings)


def test_the_host_runs_ahead_of_the_gpu():
    """When the host asks for a layer, the GPU has not finished the one before."""
    with make(groups=1) as engine:
        engine.train_step(STEPS[0])
        marks: list[Any] = []
        unfinished: list[bool] = []

        def note() -> None:
            if marks:
                unfinished.append(not marks[-1].query())
            torch.cuda._sleep(20_000_000)
            marks.append(torch.cuda.Event())
            marks[-1].record()

        before_layers(engine, note)
        engine.train_step(STEPS[1])
        assert sum(unfinished) > len(unfinished) // 2, unfinished


def test_a_step_waits_for_the_gpu_only_when_all_is_computed():
    """Whoever waits in between lets the GPU run dry."""
    with make(groups=2) as engine:
        engine.train_step(STEPS[0])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                engine.train_step(STEPS[1])
            finally:
                torch.cuda.set_sync_debug_mode("default")
    waits = [Path(w.filename).name for w in seen if "called a synchronizing" in str(w.message)]
    assert waits == ["sequences.py", "streams.py"]  # the loss is read, then the norm
