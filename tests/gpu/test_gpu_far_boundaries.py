"""On CUDA: boundary activations on NVMe change no bit, through pinned staging and copies that run behind the host's back."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import nvme_tier
from megatrain.engine.boundaries import Offload
from megatrain.engine.engine import Engine
from megatrain.engine.settings import ALL, Settings
from megatrain.nvme_tier import PAGE
from tests.drives import slow_drive
from tests.support import LANES, State, Trace, delay, differing, engine_of, full_batches, sleeper, state_of, tiny_config, train_engine

pytestmark = pytest.mark.usefixtures("deterministic")
STEPS = [full_batches(seed, [(8, 40), (8, 40), (1, 40)]) for seed in range(3)]
IN_RAM = Settings(offload=True)
MODES: dict[str, Settings] = {
    "one group": IN_RAM,
    "two groups": replace(IN_RAM, groups=2),
    "second backward": replace(IN_RAM, second_backward=True),
    "a codec": replace(IN_RAM, activations="int8"),
    "graphs on the host": replace(IN_RAM, retained=1, retained_on_host=2),
}
SPIN_CYCLES = 3_000_000  # some 2 ms of the GPU's clock


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_tier, "BOUNDARY_PIECE_BYTES", 2 * PAGE)
    monkeypatch.setattr(nvme_tier, "BOUNDARY_PIECES", 3)


def make(folder: Path | None, mode: str = "one group", clip: float | None = 0.5, layers: int = ALL) -> Engine:
    settings = MODES[mode] if folder is None else replace(MODES[mode], nvme_folders=(folder,), nvme_activations=layers)
    config = tiny_config("llama", num_hidden_layers=6, hidden_size=64, intermediate_size=128)
    return engine_of(config, device="cuda", precision="bfloat16", settings=settings, max_grad_norm=clip)


def run(engine: Engine) -> tuple[Trace, State]:
    with engine:
        return train_engine(engine, STEPS), state_of(engine)


def check_same(found: tuple[Trace, State], expected: tuple[Trace, State]) -> None:
    assert (found[0].losses, found[0].norms) == (expected[0].losses, expected[0].norms)
    assert differing(found[1], expected[1]) == []


def spin(*_: object) -> None:
    """Keep the current stream busy: what is enqueued behind is late, and the host does not notice."""
    torch.cuda._sleep(SPIN_CYCLES)


@pytest.mark.parametrize("layers", [2, ALL])
@pytest.mark.parametrize(("mode", "clip"), [*((mode, 0.5) for mode in MODES), ("one group", None), ("two groups", None)])
def test_training_with_inputs_on_nvme_is_training_with_them_in_ram(tmp_path: Path, mode: str, clip: float | None, layers: int) -> None:
    check_same(run(make(tmp_path, mode, clip, layers)), run(make(None, mode, clip)))


@pytest.mark.parametrize("slow", ["download", "fetch", "both"])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("mode", ["one group", "two groups", "second backward"])
def test_late_copies_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, pieces: int, slow: str) -> None:
    monkeypatch.setattr(nvme_tier, "BOUNDARY_PIECES", pieces)
    engine = make(tmp_path, mode)
    for name, lane in {"download": engine._download, "fetch": engine._fetch}.items():
        if slow in (name, "both"):
            lane.delay = spin
    check_same(run(engine), run(make(None, mode)))


def test_a_late_computation_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tmp_path)
    layer = engine.skeleton.layer

    def late(*arguments: Any) -> Any:
        spin()
        return layer(*arguments)

    monkeypatch.setattr(engine.skeleton, "layer", late)
    check_same(run(engine), run(make(None)))


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_slow_drive_and_slow_lanes_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    expected = run(make(None))
    slow_drive(monkeypatch, (call,), 0.004)
    check_same(run(delay(make(tmp_path), LANES, longest_s=0.003)), expected)


@pytest.mark.parametrize("verb", ["layer", "layer_again"])
def test_an_abandoned_step_leaves_the_engine_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    expected = run(make(None))
    with make(tmp_path) as engine:
        real, calls = getattr(engine.skeleton, verb), iter(range(1000))

        def fail_once(*arguments: Any) -> Any:
            if next(calls) == 7:
                raise RuntimeError("in the middle")
            return real(*arguments)

        monkeypatch.setattr(engine.skeleton, verb, fail_once)
        engine._download.delay = engine._fetch.delay = spin
        with pytest.raises(RuntimeError, match="in the middle"):
            engine.forward_backward(STEPS[1])
        check_same((train_engine(engine, STEPS), state_of(engine)), expected)


def test_staging_is_pinned_and_what_it_waits_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_tier, "BOUNDARY_PIECES", 1)
    real = os.preadv

    def slowly(*arguments: Any) -> int:
        sleeper(0, 0.01, 0.01)()
        return int(real(*arguments))

    with make(tmp_path) as engine:
        engine.train_step(STEPS[0])
        assert isinstance(engine._boundaries, Offload)
        far = engine._boundaries._far
        assert far is not None
        assert far._slab is not None
        assert far._slab.bytes.is_pinned()
        monkeypatch.setattr(os, "preadv", slowly)
        stalls = engine.train_step(STEPS[1]).stalls_s
        assert stalls["wait_nvme"] > 0.1
