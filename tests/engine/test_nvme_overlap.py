"""With weights on NVMe the next forward runs beside the update, and sees what was updated: with
few buffers, and lanes of any speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatrain.engine.engine import Engine
from megatrain.errors import MegaTrainError
from megatrain.memory import swap_files
from megatrain.memory.lease import Lease
from megatrain.settings import ALL, Settings
from tests.delays import LANES, delay, sleeper
from tests.drives import few_buffers
from tests.runs import Trace, assert_same, run, train_engine, wait_for_updates
from tests.support import engine_of, full_batches, tiny_config

pytestmark = pytest.mark.timeout(60)  # what hangs is a dead-lock
MORE_STEPS = [full_batches(seed, [(1, 6)] * 3) for seed in range(3)]
STEPS = MORE_STEPS[:2]  # the second forward runs beside the first update
MODES: dict[str, dict[str, Any]] = {
    "clipped": {"clip": 0.5},
    "unclipped": {"clip": None},
    "second backward": {"clip": 0.5, "second": True},
}
IN_TIME_S = 10.0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_files, "PIECE_BYTES", 4096)


def make(
    folder: Path | None, clip: float | None = 0.5, *, layers: int = 4, second: bool = False
) -> Engine:
    """Tied: the first block of a forward is the last to be updated beside backward."""
    settings = Settings(second_backward=second)
    if folder is not None:
        settings = Settings(
            second_backward=second, nvme_folders=(folder,), nvme_blocks=ALL, nvme_arrays="all"
        )
    config = tiny_config("qwen2-tied", num_hidden_layers=layers)
    return engine_of(config, settings=settings, max_grad_norm=clip, precision="bfloat16")


@cache
def in_ram(mode: str) -> Trace:
    return run(make(None, **MODES[mode]), STEPS)


def note_uploads(engine: Engine, patch: pytest.MonkeyPatch) -> dict[int, list[bool]]:
    """For each block, whether it might be read ahead whenever it was asked for."""
    noted: dict[int, list[bool]] = {block.index: [] for block in engine.anatomy.blocks}
    lease = engine.store.lease

    def note(block: int, names: Sequence[str], **how: Any) -> Lease:
        if names == ["weight"]:
            noted[block].append(how["ahead"])
        return lease(block, names, **how)

    patch.setattr(engine.store, "lease", note)
    return noted


@pytest.mark.parametrize("buffers", [2, 5])
def test_layers_run_while_a_later_one_s_update_is_held_up(tmp_path, monkeypatch, buffers):
    few_buffers(monkeypatch, buffers)
    reached, in_time = threading.Event(), []

    def hold_up(block: int) -> None:
        if block == 4:
            in_time.append(reached.wait(IN_TIME_S))

    with make(tmp_path, layers=8) as engine:
        layer = engine.skeleton.layer

        def noted(index: int, *arguments: Any) -> Any:
            if index == 2:  # block 3: all that is updated by now
                reached.set()
            return layer(index, *arguments)

        engine.train_step(STEPS[0])
        wait_for_updates(engine)
        engine.parts.updater.delay = hold_up
        engine.forward_backward(STEPS[1])
        engine.step()
        engine.skeleton.layer = noted  # type: ignore[assignment,method-assign]
        ahead = note_uploads(engine, monkeypatch)
        engine.forward_backward(MORE_STEPS[2])
    assert in_time == [True]
    # in the forward it must not be read before its update, in backward there is none
    assert ahead[4] == [False, True]


@pytest.mark.parametrize(
    ("mode", "buffers"), [*((mode, 1) for mode in MODES), ("clipped", 2), ("unclipped", 3)]
)
def test_slow_lanes_beside_few_buffers_change_no_bit(tmp_path, monkeypatch, mode, buffers):
    few_buffers(monkeypatch, buffers)
    late = delay(make(tmp_path, **MODES[mode]), LANES, longest_s=0.003, seed=buffers)
    assert_same(run(late, STEPS), in_ram(mode))


def between_steps(engine: Engine, folder: Path) -> list[Any]:
    """What those see who read weights right after a step, while blocks may still be updated."""
    seen: list[Any] = []
    with engine:
        for number, step in enumerate(STEPS):
            seen.append(engine.train_step(step).loss)
            if number % 2:
                seen.append(engine.evaluate(STEPS[0]).loss)
            engine.save_pretrained(folder / str(number))
            seen.append((folder / str(number) / "model.safetensors").read_bytes())
            seen += [(name, weight.double().sum().item()) for name, weight in engine.iter_weights()]
    return seen


@pytest.mark.parametrize("mode", ["clipped", "unclipped"])
def test_who_evaluates_saves_or_copies_right_after_a_step_sees_its_update(
    tmp_path, monkeypatch, mode
):
    expected = between_steps(make(None, **MODES[mode]), tmp_path / "ram")
    for buffers in (1, 5):
        few_buffers(monkeypatch, buffers)
        engine = make(tmp_path / "swap", **MODES[mode])
        engine.parts.updater.delay = sleeper(buffers, 0.0, 0.01)
        assert between_steps(engine, tmp_path / f"nvme-{buffers}") == expected


@pytest.mark.parametrize(("mode", "buffers"), [*((mode, 1) for mode in MODES), ("clipped", 5)])
def test_an_update_that_fails_stops_the_forward_beside_it(tmp_path, monkeypatch, mode, buffers):
    few_buffers(monkeypatch, buffers)

    def fail(block: int) -> None:
        time.sleep(0.01)
        if block == 3:
            raise RuntimeError("no such update")

    started = time.perf_counter()
    with make(tmp_path, **MODES[mode]) as engine:
        engine.train_step(STEPS[0])
        engine.parts.updater.delay = fail
        with pytest.raises((RuntimeError, MegaTrainError), match="no such update"):
            train_engine(engine, STEPS)
        with pytest.raises((RuntimeError, MegaTrainError), match="no such update"):
            engine.evaluate(STEPS[0])
    assert time.perf_counter() - started < IN_TIME_S
