"""On CUDA: cuDNN's attention comes first, but where rows have ever new lengths it would plan a
kernel for each. And a model that has the fast kernels learns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.settings import Settings
from tests.helpers.support import engine_of, full_batches, tiny_config

CUDNN, FLASH = "cudnn", "flash"


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN's attention comes first from Hopper on")


def engine(compiled: bool, vary: bool) -> Engine:
    settings = Settings(lengths_vary=vary, compile=compiled)
    config = tiny_config("llama", max_position_embeddings=256)
    return engine_of(config, device="cuda", precision="bfloat16", settings=settings)


def kernels(work: Callable[[], object]) -> set[str]:
    """The kinds of attention that PyTorch chooses when `work` is done again."""
    work()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        work()
    names = {event.key for event in profile.key_averages()}
    return {
        kind
        for kind in (CUDNN, FLASH)
        if any(name.startswith(f"aten::_scaled_dot_product_{kind}_attention") for name in names)
    }


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("vary", "kind"), [(False, CUDNN), (True, FLASH)])
def test_a_run_has_the_kernel_that_pays(compiled: bool, vary: bool, kind: str) -> None:
    batches = full_batches(0, [(2, 200), (1, 200)])
    with engine(compiled, vary) as trained:
        assert kernels(lambda: trained.evaluate(batches)) == {kind}
        assert kernels(lambda: trained.train_step(batches, lr=1e-3)) == {kind}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_text_that_grows_does_not_choose_for_training(compiled: bool) -> None:
    batches = full_batches(0, [(2, 200)])
    with engine(compiled, vary=False) as trained:
        trained.generate([list(range(20))], max_new_tokens=4)
        assert kernels(lambda: trained.train_step(batches, lr=1e-3)) == {CUDNN}
    assert torch.backends.cuda.cudnn_sdp_enabled()
