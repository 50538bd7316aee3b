"""The deferred update: every element once, with its own hyper-parameters; order, waiting, and what
a failure does to the waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.engine.components import AppliedGradients, GradientRing
from megatrain.engine.gradients import Gradient
from megatrain.engine.streams import Compute, Event
from megatrain.engine.update import CHUNK_ELEMENTS, Updater, chunks
from megatrain.errors import DivergedError
from megatrain.memory.layout import ArraySpec, FlatLayout
from megatrain.memory.store import Store
from megatrain.optim import AdamW, Muon
from megatrain.optim.muon import HostWorkspace
from megatrain.schedule import LANDING_BUFFERS
from tests.helpers.support import engine_of, full_batches

NORM = ("norm", (70,), False)
LAYOUTS = [
    FlatLayout.pack([("w", (300, 1000), True), NORM, ("b.bias", (3,), False), ("v", (9, 9), True)]),
    FlatLayout.pack([NORM]),
    FlatLayout.pack([("w", (2, 2), True)]),
]
LARGE = FlatLayout.pack([("w", (3, CHUNK_ELEMENTS), True), ("n", (5,), False)])
ARRAYS = ("weight", "exp_avg", "exp_avg_sq", "grad")
SPECS = [ArraySpec(name, torch.float32) for name in ARRAYS]
CPU = torch.device("cpu")
STEP = full_batches(0, [(1, 8)])
PLAIN: dict[str, Any] = {"lr": 0.1, "step": 1, "grad_scale": 1.0}


def test_chunks_cover_each_element_once_with_its_own_decay():
    for layout in [*LAYOUTS, LARGE]:
        for threads in [1, 2, 3, 16]:
            pieces = chunks(layout, threads, layout.span(0, 1))
            covered = torch.zeros(layout.numel, dtype=torch.int8)
            for start, stop, decay in pieces:
                assert 0 < stop - start <= CHUNK_ELEMENTS
                covered[start:stop] += 1
                inside = [
                    t.decay
                    for t in layout.tensors
                    if t.offset < stop and start < t.offset + t.numel
                ]
                assert set(inside) <= {decay}
            assert torch.all(covered == 1)


def landed() -> Event:
    event = Event()
    event.finish()
    return event


def gradient_of(block: int, values: Tensor, event: Event | None = None) -> Gradient:
    return Gradient(block, values, event or landed(), values.float().square().sum().reshape(1))


def random_gradient(block: int, seed: int = 0, event: Event | None = None) -> Gradient:
    generator = torch.Generator().manual_seed(seed * 10 + block)
    return gradient_of(block, torch.randn(LAYOUTS[block].numel, generator=generator), event)


@contextmanager
def updater(threads: int = 2, weight_decay: float = 0.5) -> Iterator[Updater]:
    with Store(LAYOUTS, SPECS, device=CPU) as store:
        for block in range(len(LAYOUTS)):
            store.array("weight", block).fill_(1.0)
        made = Updater(store, AdamW(weight_decay=weight_decay), threads, Compute(CPU))
        yield made
        made.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_update_is_the_optimizer_s_over_the_whole_block_decay_where_it_applies(threads):
    with updater(threads) as made:
        for step in (1, 2):
            gradient = random_gradient(0, step)
            made.submit(gradient, lr=0.1, step=step, grad_scale=0.3)
            made.wait_ready(0)
        ours = made.store.array("weight", 0).clone()
    alone = {name: torch.zeros(LAYOUTS[0].numel) for name in ARRAYS}
    alone["weight"].fill_(1.0)
    optimizer = AdamW(weight_decay=0.5)
    for step in (1, 2):
        alone["grad"] = random_gradient(0, step).values
        for segment in LAYOUTS[0].segments():
            views = {name: array[segment.start : segment.stop] for name, array in alone.items()}
            decay = 0.5 if segment.decay else 0.0
            optimizer.update(views, lr=0.1, weight_decay=decay, step=step, grad_scale=0.3)
    assert torch.equal(alone["weight"], ours)


def test_blocks_are_updated_in_the_order_of_submission_and_each_wait_is_for_its_own():
    with updater() as made:
        order, release = list[int](), threading.Event()

        def delay() -> None:
            order.append(len(order))
            if order[-1] == 1:
                release.wait()

        made.lane.delay = delay
        for block in (0, 1, 2):
            made.submit(random_gradient(block), **PLAIN)
        made.wait_ready(0)  # does not wait for block 1, which is held up
        assert order in ([0], [0, 1])
        release.set()
        for block in range(3):
            made.wait_ready(block)
        assert order == [0, 1, 2]


def test_a_block_without_tensors_is_updated_at_once():
    """Nothing follows the last layer but a tied head, in some models."""
    empty = FlatLayout.pack([])
    with Store([empty], SPECS, device=CPU) as store:
        made = Updater(store, AdamW(), 2, Compute(CPU))
        made.submit(gradient_of(0, torch.zeros(empty.numel)), **PLAIN)
        done = threading.Thread(target=made.wait_ready, args=(0,), daemon=True)
        done.start()
        done.join(10.0)
        assert not done.is_alive()
        made.close()


def test_an_update_waits_until_its_gradient_has_landed():
    with updater() as made:
        arriving, values = Event(), torch.zeros(LAYOUTS[2].numel)
        made.submit(gradient_of(2, values, arriving), **PLAIN)
        values[:4] = 1.0  # the download, later than the submission
        arriving.finish()
        made.wait_ready(2)
        assert float(made.store.array("exp_avg", 2)[0]) == pytest.approx(0.1)


def test_a_gradient_that_is_not_finite_stops_this_update_and_all_later_ones():
    with updater() as made:
        bad = random_gradient(1)
        bad.values[3] = float("nan")
        made.submit(random_gradient(0), **PLAIN, check_finite=True)
        made.submit(gradient_of(1, bad.values), **PLAIN, check_finite=True)
        made.submit(random_gradient(2), **PLAIN, check_finite=True)
        made.wait_ready(0)
        for block in (1, 2):
            with pytest.raises(DivergedError, match="gradient of block 1 is not finite"):
                made.wait_ready(block)
            assert torch.all(made.store.array("weight", block) == 1)


def test_an_error_of_the_optimizer_reaches_whoever_waits(monkeypatch):
    with updater() as made:

        def broken(*_: object) -> None:
            raise ZeroDivisionError("in a thread of the pool")

        monkeypatch.setattr(AdamW, "updating", lambda *_, **__: broken)
        made.submit(random_gradient(0), **PLAIN)
        with pytest.raises(ZeroDivisionError, match="thread of the pool"):
            made.wait_ready(0)
        monkeypatch.undo()
        made.submit(random_gradient(1), **PLAIN)
        for again in (lambda: made.wait_ready(1), made.check):  # nothing is updated after it
            with pytest.raises(ZeroDivisionError, match="thread of the pool"):
                again()
        assert torch.all(made.store.array("weight", 1) == 1)


# -- staging for updates during backward -----------------------------------------------------------


def test_a_staging_buffer_is_taken_again_only_after_the_update_that_read_it():
    waited: list[int] = []
    ring = GradientRing(LAYOUTS[0].numel, torch.bfloat16, pinned=False)
    with updater() as made:
        made.wait_ready = waited.append  # type: ignore[method-assign,assignment]
        sink = AppliedGradients(made.store, made.compute, ring, made)
        blocks = range(len(LAYOUTS))
        buffers = [buffer for block in blocks if (buffer := sink.place(block)) is not None]
        assert waited == []
        assert [buffer.numel() for buffer in buffers] == [layout.numel for layout in LAYOUTS]
        assert len({buffer.data_ptr() for buffer in buffers}) == LANDING_BUFFERS == len(LAYOUTS)
        again = sink.place(2)
        assert again is not None
        assert waited == [0]
        assert again.data_ptr() == buffers[0].data_ptr()
        sink.place(1)
        assert waited == [0, 1]
        del buffers, again
    ring.close()


# -- of whole tensors ------------------------------------------------------------------------------


def test_what_stops_a_piece_reaches_whoever_waits(monkeypatch):
    def broken() -> None:
        raise ZeroDivisionError("in a thread of the pool")

    with engine_of("llama", optimizer=Muon()) as engine:
        monkeypatch.setattr(Muon, "stages", lambda *_, **__: iter([[broken]]))
        engine.forward_backward(STEP)
        engine.step()
        with pytest.raises(ZeroDivisionError, match="thread of the pool"):
            engine.wait_ready(0)


def test_the_thread_of_products_takes_what_their_library_keeps_before_the_first_step(monkeypatch):
    calls: list[tuple[str, threading.Thread]] = []
    for name in ("take_libraries", "replace"):
        real = getattr(HostWorkspace, name)

        def noted(*arguments: Any, name: str = name, real: Any = real) -> None:
            calls.append((name, threading.current_thread()))
            real(*arguments)

        monkeypatch.setattr(HostWorkspace, name, noted)
    with engine_of("llama", optimizer=Muon()) as engine:
        before = list(calls)
        engine.train_step(STEP)
        engine.wait_ready(1)
        assert [name for name, _ in before] == ["take_libraries"]
        assert {name for name, _ in calls[len(before) :]} == {"replace"}
        assert {thread for _, thread in calls} == {engine.parts.updater.lane._thread}
