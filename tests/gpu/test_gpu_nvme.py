"""On CUDA: arrays on NVMe change no bit, with pinned staging and copies that run behind the host's back."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain import schedule
from megatrain.settings import ALL, Settings
from tests.support import (
    LANES,
    State,
    Trace,
    delay,
    differing,
    engine_of,
    full_batches,
    state_of,
    tiny_config,
    train_engine,
)

pytestmark = pytest.mark.usefixtures("deterministic")
STEPS = [full_batches(seed, [(2, 16)] * 3) for seed in range(4)]


def run(
    folder: Path | None,
    clip: float | None,
    arrays: schedule.Level = "all",
    resident: int = 0,
    *,
    slow: bool = False,
) -> tuple[Trace, State]:
    nvme = Settings(resident=resident)
    if folder is not None:
        nvme = Settings(
            resident=resident, nvme_folders=(folder,), nvme_blocks=ALL, nvme_arrays=arrays
        )
    config = tiny_config("llama", num_hidden_layers=6, hidden_size=64, intermediate_size=128)
    with engine_of(
        config, device="cuda", precision="bfloat16", settings=nvme, max_grad_norm=clip
    ) as engine:
        if slow:
            delay(engine, LANES, longest_s=0.003)
        return train_engine(engine, STEPS), state_of(engine)


@pytest.mark.parametrize("slow", [False, True], ids=["as it comes", "delayed"])
@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("arrays", schedule.LEVELS)
def test_training_from_nvme_is_training_from_ram(
    tmp_path, monkeypatch, arrays, clip, buffers, slow
):
    monkeypatch.setattr(schedule, "STATE_STAGES", buffers)
    monkeypatch.setattr(schedule, "STAGES", {"weight": buffers, "grad": buffers})
    expected, state = run(None, clip)
    found, again = run(tmp_path, clip, arrays, slow=slow)
    assert (found.losses, found.norms) == (expected.losses, expected.norms)
    assert differing(state, again) == []


def test_beside_resident_blocks(tmp_path):
    expected, state = run(None, 0.5, resident=2)
    found, again = run(tmp_path, 0.5, resident=2)
    assert found.losses == expected.losses
    assert differing(state, again) == []


def test_staging_of_what_is_transferred_is_pinned(tmp_path):
    settings = Settings(nvme_folders=(tmp_path,), nvme_blocks=2, nvme_arrays="all")
    config = tiny_config("llama", num_hidden_layers=4)
    with (
        engine_of(config, device="cuda", precision="bfloat16", settings=settings) as engine,
        engine.store.lease(4, ["weight", "grad", "exp_avg"]) as arrays,
    ):
        assert [array.is_pinned() for array in arrays.values()] == [True, True, False]
