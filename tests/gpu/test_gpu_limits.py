"""On CUDA: training from memory that may not be pinned, and what the GPU's meters say of energy."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.config.load import bench_config
from megatrain.engine.constructors import hold_to_budget
from megatrain.memory import slab
from megatrain.recipes.doctor import find_machine
from megatrain.reporting.energy import EnergyMeter
from megatrain.reporting.meters import GpuMeter
from megatrain.settings import Settings
from tests.helpers.compare import differing
from tests.helpers.runs import run
from tests.helpers.support import engine_of, full_batches, tiny_config

MODES: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.5},
    "unclipped": {"max_grad_norm": None},
    "groups, sums travel": {"settings": Settings(groups=2, head_chunk_tokens=64)},
    "offloaded": {"settings": Settings(offload_activations=True)},
}


def trained(mode: str) -> dict[str, torch.Tensor]:
    """The weights after three steps."""
    config = tiny_config("llama", num_hidden_layers=4)
    engine = engine_of(config, device="cuda", precision="bfloat16", **MODES[mode])
    return run(engine, [full_batches(seed, [(2, 64)] * 2) for seed in range(3)]).weights


@pytest.mark.parametrize("mode", MODES)
def test_memory_that_may_not_be_pinned_gives_the_same_bits(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinned = trained(mode)
    monkeypatch.setattr(slab, "_cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    with caplog.at_level(logging.WARNING, "megatrain"):
        pageable = trained(mode)
    assert "stays pageable" in caplog.text
    assert differing(pinned, pageable) == []


@pytest.fixture
def unlimited() -> Iterator[None]:
    """Whatever a test limits, later ones have the whole GPU."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("unlimited")
def test_memory_gpu_is_a_limit_that_pytorch_keeps() -> None:
    torch.cuda.empty_cache()
    config, machine = bench_config("tiny", ["memory.gpu=3GiB"]), find_machine(bench_config("tiny"))
    hold_to_budget(machine, int(config.memory.gpu))
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")


def test_a_busy_gpu_takes_energy() -> None:
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    with GpuMeter(device) as gpu:
        if gpu.energy_j() is None:
            pytest.skip("the driver does not count the energy")
        meter, started = EnergyMeter(gpu), time.monotonic()
        while time.monotonic() - started < 1.0:
            a @ a
            torch.cuda.synchronize()
        drawn = meter.read().gpu_j
    assert drawn is not None
    assert 20 < drawn < 2000  # a second of between 20 and 2000 W
