"""Arrays on NVMe change no bit, whichever they are, of whichever blocks, however slow the drive
is, and whatever fails between."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatrain.engine.engine import Engine
from megatrain.errors import MegaTrainError, StorageError
from megatrain.memory import nvme_store
from megatrain.memory.sizes import blocks_on_nvme
from megatrain.optim import Muon
from megatrain.settings import ALL, Settings
from tests.helpers.delays import failing
from tests.helpers.drives import few_buffers, quick_drive, slow_drive
from tests.helpers.runs import (
    Trace,
    assert_same,
    run,
    train_engine,
    train_with_a_break,
)
from tests.helpers.support import engine_of, full_batches, tiny_config

MORE_STEPS = [full_batches(seed, [(1, 6)] * 3) for seed in range(3)]
STEPS = MORE_STEPS[:2]  # the second reads what the first one has written
MODES: dict[str, dict[str, Any]] = {
    "one group": {},
    "two groups, sums travel": {"groups": 2},
    "front resident, end retained": {"resident": 2, "retained": 2},
    "second backward": {"second_backward": True},
    "second backward through a layer": {"second_backward": 1},
}
CLIPS = pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(nvme_store, "PIECE_BYTES", 4096)


def make(
    folder: Path | None,
    blocks: int = ALL,
    clip: float | None = 0.5,
    mode: str = "one group",
    **more: Any,
) -> Engine:
    """With the state of these blocks in a folder on NVMe, or all of it in RAM."""
    settings = Settings(**MODES[mode])
    if folder is not None:
        settings = Settings(**MODES[mode], nvme_folders=(folder,), nvme_blocks=blocks)
    options: Any = {"max_grad_norm": clip, "precision": "bfloat16", **more}
    return engine_of(tiny_config("llama", num_hidden_layers=4), settings=settings, **options)


@cache
def in_ram(mode: str = "one group", clip: float | None = 0.5, **more: Any) -> Trace:
    return run(make(None, clip=clip, mode=mode, **more), STEPS)


WITH_ADAMW = [
    (0.5, "one group", 3),
    (None, "one group", 1),
    (0.5, "two groups, sums travel", 1),
    (None, "front resident, end retained", 3),
    (0.5, "second backward", 2),
]
CASES: list[Any] = [(*case, {}) for case in WITH_ADAMW]
CASES += [(clip, "one group", 1, {"optimizer": Muon()}) for clip in (0.5, None)]
SLOW_CALLS: list[tuple[float | None, tuple[str, ...]]]
SLOW_CALLS = [(0.5, ("preadv",)), (None, ("pwritev",)), (0.5, ("preadv", "pwritev"))]
CASES += [(clip, "one group", 2, {"slow": slow}) for clip, slow in SLOW_CALLS]
CASES += [pytest.param(*case, {"device": "cuda"}, marks=pytest.mark.cuda) for case in WITH_ADAMW]


@pytest.mark.slow
@pytest.mark.parametrize(("clip", "mode", "buffers", "more"), CASES)
def test_training_from_nvme_is_training_from_ram(tmp_path, monkeypatch, clip, mode, buffers, more):
    more = dict(more)
    few_buffers(monkeypatch, buffers)
    if slow := more.pop("slow", ()):
        monkeypatch.setattr(nvme_store, "PIECE_BYTES", 1 << 20)
        slow_drive(monkeypatch, slow, 0.004)
    engine = make(tmp_path, ALL, clip, mode, **more)
    assert engine.store.is_on_nvme("remainder", 3)
    assert_same(run(engine, STEPS), in_ram(mode, clip, **more))


@pytest.mark.parametrize("blocks", [1, 3])
def test_some_blocks_may_lie_on_nvme(tmp_path, blocks):
    with make(tmp_path, blocks) as engine:
        there = [block for block in range(6) if engine.store.is_on_nvme("exp_avg", block)]
        assert there == list(blocks_on_nvme(6, 0, blocks))
        assert_same(run(engine, STEPS), in_ram())


def test_what_is_on_nvme_is_not_in_ram(tmp_path, monkeypatch):
    few_buffers(monkeypatch, 1)
    monkeypatch.setattr("megatrain.memory.sizes.HUGE_PAGE", 4096)
    with make(None) as ours, make(tmp_path) as theirs:
        numel = [layout.numel for layout in ours.store.layouts]
        assert theirs.store.nbytes <= sum(numel) * 4 + max(numel) * 10 + 6 * 4096
        assert ours.store.nbytes >= sum(numel) * 14


@pytest.mark.slow
def test_waiting_for_the_drive_has_a_name_of_its_own(tmp_path, monkeypatch):
    few_buffers(monkeypatch, 1)
    quick_drive(monkeypatch)
    with make(tmp_path) as engine:
        engine.train_step(STEPS[0])
        slow_drive(monkeypatch, ("preadv",), 0.01, 0.01)
        monkeypatch.setattr(nvme_store, "PIECE_BYTES", 1 << 20)
        engine.train_step(STEPS[1])
        stalls = engine.train_step(MORE_STEPS[2]).stalls_s
        assert stalls["wait_nvme"] > max(0.03, 2 * stalls["wait_update"])


# -- saving, resuming, failing ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "there",
    [(True, True), (True, False), (False, True)],
    ids=["nvme-nvme", "nvme-ram", "ram-nvme"],
)
def test_a_run_saved_from_one_tier_goes_on_from_another(tmp_path, monkeypatch, there):
    few_buffers(monkeypatch, 2)
    tiers: Iterator[Path | None] = iter([tmp_path / "swap" if nvme else None for nvme in there])
    found = train_with_a_break(lambda: make(next(tiers)), STEPS, tmp_path / "run")
    assert_same(found, in_ram())


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_step_that_fails_in_its_passes_leaves_the_engine_usable(tmp_path, monkeypatch, buffers):
    few_buffers(monkeypatch, buffers)
    with make(tmp_path) as engine:
        sink = engine.parts.sink
        once = failing(sink.take, 3, RuntimeError("in the middle of backward"))
        monkeypatch.setattr(sink, "take", once)
        with pytest.raises(RuntimeError, match="middle of backward"):
            engine.forward_backward(STEPS[0])
        assert_same(run(engine, STEPS), in_ram())


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@CLIPS
def test_a_drive_that_fails_stops_the_run_and_nothing_is_saved(tmp_path, monkeypatch, call, clip):
    few_buffers(monkeypatch, 2)
    engine = make(tmp_path / "swap", clip=clip)
    engine.train_step(STEPS[0])

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, broken)
    started = time.perf_counter()
    with pytest.raises(StorageError, match=rf"swap: cannot .*errno {errno.EIO}"):
        train_engine(engine, STEPS * 2)
    with pytest.raises(MegaTrainError):
        engine.save_pretrained(tmp_path / "out")
    monkeypatch.undo()
    engine.close()
    assert time.perf_counter() - started < 60
    assert not (tmp_path / "out").exists()
