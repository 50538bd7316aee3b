"""Boundary activations on NVMe change no bit, however few pieces they pass through, however slow drive and lanes are, whatever fails."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatrain import nvme_tier
from megatrain.engine.boundaries import Offload
from megatrain.engine.engine import Engine
from megatrain.engine.far_boundaries import FarBoundaries
from megatrain.engine.settings import ALL, Settings
from megatrain.errors import ConfigError, StorageError
from megatrain.memory import slab, swap_files
from megatrain.memory.layout import round_up
from megatrain.nvme_tier import PAGE
from megatrain.optim import Muon
from tests.drives import quick_drive, rooms_for_inputs, slow_drive
from tests.support import LANES, State, Trace, delay, differing, engine_of, full_batches, state_of, tiny_config, train_engine

STEPS = [full_batches(seed, [(8, 40), (8, 40), (1, 40)]) for seed in range(2)]  # in bf16 5 pages, and the last one most of a page
IN_RAM = Settings(offload=True, head_chunk=7)
MODES: dict[str, Settings] = {
    "one group": IN_RAM,
    "two groups, sums travel": replace(IN_RAM, groups=2),
    "second backward": replace(IN_RAM, second_backward=True),
    "a codec": replace(IN_RAM, activations="int8"),
    "front resident, end retained": replace(IN_RAM, resident=2, retained=1),
    "graphs on the host": replace(IN_RAM, retained=1, retained_on_host=1),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(nvme_tier, "BOUNDARY_PIECE_BYTES", PAGE)
    monkeypatch.setattr(nvme_tier, "BOUNDARY_PIECES", 3)
    monkeypatch.setattr(swap_files, "PIECE_BYTES", PAGE)


def make(
    folder: Path | None,
    mode: str = "one group",
    clip: float | None = 0.5,
    family: str = "llama",
    layers: int = ALL,
    largest_group: tuple[int, ...] = (),
    **options: Any,
) -> Engine:
    far: Any = {} if folder is None else {"nvme_folders": (folder,), "nvme_activations": layers, "largest_group": largest_group}
    settings = replace(MODES[mode], **far)
    options = {"precision": "bfloat16", **options}
    return engine_of(tiny_config(family, num_hidden_layers=4), settings=settings, max_grad_norm=clip, **options)


def run(engine: Engine, steps: Any = STEPS) -> tuple[Trace, State]:
    with engine:
        return train_engine(engine, steps), state_of(engine)


@cache
def in_ram(mode: str = "one group", clip: float | None = 0.5) -> tuple[Trace, State]:
    return run(make(None, mode, clip))


def same(found: tuple[Trace, State], expected: tuple[Trace, State]) -> None:
    assert (found[0].losses, found[0].norms) == (expected[0].losses, expected[0].norms)
    assert differing(found[0].weights, expected[0].weights) == []
    assert differing(found[1], expected[1]) == []


def far_of(engine: Engine) -> FarBoundaries:
    keeper = engine._boundaries
    assert isinstance(keeper, Offload)
    assert keeper._far is not None
    return keeper._far


def count_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that the drive moves, by call."""
    moved = {"preadv": 0, "pwritev": 0}
    for call in moved:
        real = getattr(os, call)

        def shim(*arguments: Any, real: Callable[..., int] = real, call: str = call) -> int:
            count = real(*arguments)
            moved[call] += count
            return count

        monkeypatch.setattr(os, call, shim)
    return moved


# -- the same bits ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "clip", "pieces"),
    [
        *((mode, 0.5, 1) for mode in MODES),
        ("one group", None, 1),
        ("two groups, sums travel", None, 2),
        ("second backward", 0.5, 3),
        ("graphs on the host", 0.5, 3),
    ],
)
def test_training_with_inputs_on_nvme_is_training_with_them_in_ram(tmp_path, monkeypatch, mode, clip, pieces):
    monkeypatch.setattr(nvme_tier, "BOUNDARY_PIECES", pieces)
    same(run(make(tmp_path, mode, clip)), in_ram(mode, clip))


@pytest.mark.parametrize(("layers", "pages"), [(1, 2), (2, 3), (3, 4), (4, 5)])
def test_a_share_of_every_input_may_go_there(tmp_path, monkeypatch, layers, pages):
    moved = count_calls(monkeypatch)
    same(run(make(tmp_path, layers=layers)), in_ram())
    boundaries = 4 * len(STEPS) * (2 * pages + 1) * PAGE
    assert moved == {"preadv": boundaries, "pwritev": boundaries}


def test_a_second_backward_reads_twice_what_was_written_once(tmp_path, monkeypatch):
    moved = count_calls(monkeypatch)
    run(make(tmp_path, "second backward"))
    assert moved["preadv"] == 2 * moved["pwritev"] == 2 * 4 * len(STEPS) * 11 * PAGE


@pytest.mark.parametrize(("family", "precision"), [("qwen2-tied", "bfloat16"), ("gpt2", "float32"), ("gemma2", "bfloat16")])
def test_in_other_families_and_types(tmp_path, family, precision):
    same(run(make(tmp_path, family=family, precision=precision)), run(make(None, family=family, precision=precision)))


def test_with_an_optimizer_of_whole_tensors(tmp_path):
    same(run(make(tmp_path, optimizer=Muon(lr=1e-3))), run(make(None, optimizer=Muon(lr=1e-3))))


def test_steps_of_other_sizes_find_room(tmp_path):
    steps = [STEPS[0], full_batches(4, [(3, 50)] * 2), full_batches(5, [(1, 4)]), full_batches(6, [(2, 40)] * 5)]
    with make(None) as near, make(tmp_path) as far:
        assert train_engine(near, steps).norms == train_engine(far, steps).norms


def test_room_for_the_largest_group_is_made_at_once_and_grows_for_larger_ones_alone(tmp_path, monkeypatch):
    steps = [full_batches(seed, rows) for seed, rows in enumerate([[(1, 4)], [(3, 40), (1, 40)], [(8, 40)] * 2 + [(1, 40)]])]
    made = rooms_for_inputs(monkeypatch)
    with make(None) as near, make(tmp_path, layers=3, largest_group=(320, 320, 40)) as far:
        assert train_engine(near, steps).norms == train_engine(far, steps).norms
        assert made == [4 * (4 + 4 + 1) * PAGE]
        larger = [full_batches(5, [(8, 41)] * 3)]
        assert train_engine(near, larger).norms == train_engine(far, larger).norms
        assert len(made) == 2


@pytest.mark.parametrize(
    ("mode", "slow"),
    [
        ("one group", ("preadv",)),
        ("one group", ("pwritev",)),
        ("two groups, sums travel", ("preadv", "pwritev")),
        ("second backward", ("preadv", "pwritev")),
    ],
)
def test_a_slow_drive_changes_no_bit(tmp_path, monkeypatch, mode, slow):
    slow_drive(monkeypatch, slow, 0.004)
    same(run(make(tmp_path, mode)), in_ram(mode))


@pytest.mark.parametrize("slow", [("download",), ("fetch",), LANES], ids="+".join)
@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
def test_delays_in_lanes_change_no_bit(tmp_path, monkeypatch, clip, slow):
    monkeypatch.setattr(nvme_tier, "BOUNDARY_PIECES", 1)
    mode = "two groups, sums travel"
    same(run(delay(make(tmp_path, mode, clip), slow, longest_s=0.003)), in_ram(mode, clip))


# -- what it takes ------------------------------------------------------------------------------------------------------------------


def test_what_is_on_nvme_is_not_in_ram_and_its_space_is_reserved_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(slab, "HUGE_PAGE", PAGE)
    reserved = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _, start, nbytes: reserved.append(nbytes))
    with make(None) as near, make(tmp_path, layers=3) as far:
        near.train_step(STEPS[0])
        monkeypatch.setattr(FarBoundaries, "take", lambda *_: pytest.fail("before the first layer all is known"))
        with pytest.raises(pytest.fail.Exception):
            far.train_step(STEPS[0])
        assert reserved == [4 * (4 + 4 + 1) * PAGE]
        assert isinstance(near._boundaries, Offload)
        assert isinstance(far._boundaries, Offload)
        assert near._boundaries._boundaries.nbytes == round_up(4 * (8 + 8 + 1) * 40 * 64, PAGE)
        assert far._boundaries._boundaries.nbytes == 4 * (1 + 1 + 0) * PAGE
        assert far_of(far).nbytes == 3 * PAGE


def test_waiting_for_the_drive_has_a_name_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(nvme_tier, "BOUNDARY_PIECES", 1)
    quick_drive(monkeypatch)
    slow_drive(monkeypatch, ("preadv",), 0.005, 0.005)
    with make(tmp_path) as engine:
        stalls = engine.train_step(STEPS[0]).stalls_s
        assert stalls["wait_nvme"] > max(0.1, 2 * stalls["wait_upload"])


def test_a_closed_engine_gives_its_files_back(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with make(tmp_path) as engine:
        engine.train_step(STEPS[0])
        assert len(os.listdir("/proc/self/fd")) > before
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


# -- failures -----------------------------------------------------------------------------------------------------------------------


def fail_in_layer(monkeypatch: pytest.MonkeyPatch, engine: Engine, verb: str, call: int) -> None:
    """The so many-th run of a layer, in forward (`layer`) or again in backward (`layer_again`), fails once."""
    real, calls = getattr(engine.skeleton, verb), iter(range(1000))

    def fail_once(*arguments: Any) -> Any:
        if next(calls) == call:
            raise RuntimeError("in the middle")
        return real(*arguments)

    monkeypatch.setattr(engine.skeleton, verb, fail_once)


@pytest.mark.parametrize(
    ("verb", "call", "slow_s"),
    [("layer", 5, 0.0), ("layer", 11, 0.005), ("layer_again", 0, 0.0), ("layer_again", 0, 0.03), ("layer_again", 4, 0.005)],
)
def test_a_step_that_fails_in_its_passes_leaves_the_engine_usable(tmp_path, monkeypatch, verb, call, slow_s):
    monkeypatch.setattr(nvme_tier, "BOUNDARY_PIECES", 1)
    with make(tmp_path) as engine:
        slow_drive(monkeypatch, ("preadv", "pwritev"), slow_s, slow_s)
        fail_in_layer(monkeypatch, engine, verb, call)
        with pytest.raises(RuntimeError, match="in the middle"):
            engine.forward_backward(STEPS[1])
        same((train_engine(engine, STEPS), state_of(engine)), in_ram())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sent", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_an_interrupt_just_before_or_after_an_input_is_sent_leaves_the_engine_usable(tmp_path, monkeypatch, sent, pieces):
    monkeypatch.setattr(nvme_tier, "BOUNDARY_PIECES", pieces)
    with make(tmp_path) as engine:
        slow_drive(monkeypatch, ("pwritev",), 0.01, 0.01)
        submit, calls = engine._download.submit, iter(range(1000))

        def interrupted(job: Any) -> Any:
            now = next(calls) == 5
            if now and not sent:
                raise KeyboardInterrupt
            event = submit(job)
            if now:
                raise KeyboardInterrupt
            return event

        monkeypatch.setattr(engine._download, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.forward_backward(STEPS[1])
        same((train_engine(engine, STEPS), state_of(engine)), in_ram())


@pytest.mark.parametrize(("verb", "call"), [("layer", 5), ("layer_again", 1)])
def test_an_engine_closes_in_the_middle_of_a_step(tmp_path, monkeypatch, verb, call):
    engine = make(tmp_path)
    slow_drive(monkeypatch, ("preadv", "pwritev"), 0.01, 0.01)
    fail_in_layer(monkeypatch, engine, verb, call)
    with pytest.raises(RuntimeError, match="in the middle"):
        engine.forward_backward(STEPS[1])
    started = time.perf_counter()
    engine.close()
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    ("call", "doing", "clip", "after"),
    [("preadv", "read", 0.5, 0), ("preadv", "read", None, 7), ("pwritev", "write", 0.5, 0), ("pwritev", "write", None, 19)],
)
def test_a_drive_that_fails_stops_the_run_and_its_sentence_is_told(tmp_path, monkeypatch, call, doing, clip, after):
    real, calls = getattr(os, call), iter(range(1000))

    def broken(*arguments: Any) -> int:
        if next(calls) >= after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(real(*arguments))

    started = time.perf_counter()
    engine = make(tmp_path / "swap", clip=clip)
    monkeypatch.setattr(os, call, broken)
    with pytest.raises(StorageError, match=rf"swap: cannot {doing} .*errno {errno.EIO}"):
        train_engine(engine, STEPS)
    engine.close()
    assert time.perf_counter() - started < 20


def test_a_full_drive_is_told_before_the_first_layer(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with make(tmp_path) as engine, pytest.raises(StorageError, match="free space there"):
        engine.train_step(STEPS[0])


def test_it_wants_a_folder_and_offloading(tmp_path):
    with pytest.raises(ConfigError, match="nvme_activations: no folder"):
        Settings(offload=True, nvme_activations=1)
    with pytest.raises(ConfigError, match="offload_activations: true as well"):
        Settings(nvme_activations=1, nvme_folders=(tmp_path,))
    with pytest.raises(ConfigError, match="nvme_activations: -1 is out of range"):
        Settings(offload=True, nvme_activations=-1, nvme_folders=(tmp_path,))


# -- the tests above can fail -------------------------------------------------------------------------------------------------------


def reads_do_not_wait_for_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("megatrain.engine.far_boundaries._Part.written", property(lambda _: True, lambda *_: None), raising=False)


def pieces_are_free_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    write = FarBoundaries._write

    def early(self: FarBoundaries, part: Any, piece: Any) -> None:
        with self._changed:
            self._free.append(piece)
            self._changed.notify_all()
        write(self, part, piece)

    patch.setattr(FarBoundaries, "_write", early)


def parts_are_taken_while_they_are_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("megatrain.engine.far_boundaries._Part.reading", property(lambda _: False, lambda *_: None), raising=False)


def hold_writes(patch: pytest.MonkeyPatch) -> None:
    """The newest write waits until what it writes was read, or another one is asked for."""
    write, read, changed = os.pwritev, os.preadv, threading.Condition()
    asked, read_at = [0], set[int]()

    def late_write(file: int, buffers: Any, offset: int, *more: Any) -> int:
        with changed:
            asked[0] += 1
            number = asked[0]
            changed.notify_all()
            changed.wait_for(lambda: asked[0] > number or offset in read_at, timeout=20)
        return write(file, buffers, offset, *more)

    def seen_read(file: int, buffers: Any, offset: int, *more: Any) -> int:
        count = read(file, buffers, offset, *more)
        with changed:
            read_at.add(offset)
            changed.notify_all()
        return count

    patch.setattr(os, "pwritev", late_write)
    patch.setattr(os, "preadv", seen_read)


def slow_writes(patch: pytest.MonkeyPatch) -> None:
    slow_drive(patch, ("pwritev",), 0.1, 0.1)


def slow_reads(patch: pytest.MonkeyPatch) -> None:
    slow_drive(patch, ("preadv",), 0.1, 0.1)


@pytest.mark.parametrize(
    ("fault", "drive"),
    [
        (reads_do_not_wait_for_writes, hold_writes),
        (pieces_are_free_before_they_are_written, slow_writes),
        (parts_are_taken_while_they_are_read, slow_reads),
    ],
)
def test_without_its_wait_a_slow_drive_changes_the_result(tmp_path, monkeypatch, fault, drive):
    fault(monkeypatch)
    drive(monkeypatch)
    with make(tmp_path) as engine:
        assert train_engine(engine, STEPS).norms != in_ram()[0].norms
