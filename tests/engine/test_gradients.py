"""Sums of gradients: fp32, in micro-batch order, measured before they leave, and complete wherever
they live between groups."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.engine.gradients import Gradient, Gradients, GradientSink, square_sum
from megatrain.engine.ranks.exchange import Exchange
from megatrain.engine.ranks.sums import SharedGradients
from megatrain.engine.streams import Compute, Lane
from megatrain.memory.layout import FlatLayout
from tests.helpers.compare import differing

CPU = torch.device("cpu")
LAYOUTS = [
    FlatLayout.pack([("a", (5, 7), True), ("b", (n,), False)]) for n in (30, 3000, 100, 2000)
]
DTYPES = [torch.float32, torch.bfloat16]
MicroBatchGradients = dict[int, dict[str, Tensor]]  # by block and name


class Landed(GradientSink):
    """Gradients land in given tensors; None leaves a block's in its accumulator."""

    def __init__(self, places: dict[int, Tensor | None]) -> None:
        super().__init__()
        self.places = places

    def place(self, block: int) -> Tensor | None:
        return self.places[block]


class Rig:
    """Gradient sums on the CPU, with everything they write to: of a rank, its shares."""

    def __init__(
        self,
        mode: str,
        dtype: torch.dtype,
        own: Sequence[int],
        resident: int,
        exchange: Exchange | None,
    ) -> None:
        blocks = range(len(LAYOUTS))
        numels = [
            exchange.trained_span(block).numel if exchange else LAYOUTS[block].numel
            for block in blocks
        ]
        self.host = {block: torch.full((numels[block],), 7.0, dtype=dtype) for block in blocks}
        sums = {block: torch.full((numels[block],), 9.0) for block in blocks}
        self.lanes = {name: Lane(name) for name in ("upload", "download")}
        stays = range(resident if mode == "device" else 0)
        self.sink = Landed(
            {block: None if block in stays else host for block, host in self.host.items()}
        )
        make: Any = partial(SharedGradients, exchange) if exchange else Gradients
        self.gradients: Gradients = make(
            LAYOUTS,
            dtype,
            resident=resident,
            own=list(blocks) if mode == "device" else own,
            compute=Compute(CPU),
            upload=self.lanes["upload"],
            download=self.lanes["download"],
            sink=self.sink,
            host_sums=sums.__getitem__ if mode == "host" else None,
        )
        if exchange:
            self.lanes["exchange"] = exchange.lane

    def step(
        self, groups: Sequence[Sequence[MicroBatchGradients]], stop: int | None = None
    ) -> list[Gradient]:
        """One step, visited as the engine visits blocks. stop: abandon it before this group."""
        self.gradients.begin_step()
        self.sink.begin_step()
        for number, group in enumerate(groups[:stop]):
            last = number == len(groups) - 1
            for block in reversed(range(len(LAYOUTS))):
                self.gradients.open(block)
                for micro_batch in group:
                    self.gradients.add(block, [*dict(micro_batch[block]).values()])
                self.gradients.close(block, last_group=last)
            assert len(self.sink.finished) == (len(LAYOUTS) if last else 0)
        return list(self.sink.finished)


@contextmanager
def rig(
    mode: str = "ring",
    dtype: torch.dtype = torch.float32,
    own: Sequence[int] = (),
    resident: int = 0,
    exchange: Exchange | None = None,
) -> Iterator[Rig]:
    made = Rig(mode, dtype, own, resident, exchange)
    yield made
    for lane in made.lanes.values():
        lane.close()


def random_micro_batches(count: int, seed: int = 0) -> list[MicroBatchGradients]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            block: {t.name: torch.randn(t.shape, generator=generator) for t in layout.tensors}
            for block, layout in enumerate(LAYOUTS)
        }
        for _ in range(count)
    ]


def expected_sums(
    micro_batches: list[MicroBatchGradients], dtype: torch.dtype
) -> dict[int, Tensor]:
    """Added one after another in fp32, then rounded once."""
    totals = {block: torch.zeros(layout.numel) for block, layout in enumerate(LAYOUTS)}
    for micro_batch in micro_batches:
        for block, total in totals.items():
            for name, view in LAYOUTS[block].views(total).items():
                view += micro_batch[block][name]
    return {block: total.to(dtype) for block, total in totals.items()}


def landed(finished: Iterable[Gradient], dtype: torch.dtype) -> dict[int, Tensor]:
    """Values by block, once they have arrived."""
    for gradient in finished:
        gradient.landed.synchronize()
    return {gradient.block: gradient.values.to(dtype) for gradient in finished}


def cut(items: list[MicroBatchGradients], groups: int) -> list[list[MicroBatchGradients]]:
    size = len(items) // groups
    return [items[i : i + size] for i in range(0, len(items), size)]


def test_the_sum_is_fp32_in_micro_batch_order_and_rounded_once():
    ways = [("ring", 1), ("device", 1), ("device", 3), ("host", 1), ("host", 2), ("host", 6)]
    for (mode, groups), own, resident, dtype in product(ways, [(), (0,)], [0, 2, 4], DTYPES):
        with rig(mode, dtype, own, resident) as made:
            for step in range(2):  # the second must not see the first
                micro_batches = random_micro_batches(6, step)
                finished = made.step(cut(micro_batches, groups))
                norm = made.gradients.norm(finished)
                expected = expected_sums(micro_batches, dtype)
                assert [gradient.block for gradient in finished] == [3, 2, 1, 0]
                assert differing(landed(finished, dtype), expected) == []
                whole = torch.cat([gradient.double() for gradient in expected.values()])
                assert norm == pytest.approx(float(whole.norm()), rel=1e-6)


def test_a_tensor_without_gradient_counts_as_zero():
    with rig() as made:
        made.gradients.begin_step()
        for block in range(len(LAYOUTS)):
            made.gradients.open(block)
            made.gradients.add(block, [torch.ones(5, 7), None])
            made.gradients.close(block, last_group=True)
            gradient = made.sink.finished[-1]
            assert gradient is not None
            gradient.landed.synchronize()
            views = LAYOUTS[block].views(made.host[block])
            assert torch.all(views["a"] == 1)
            assert torch.all(views["b"] == 0)
            assert float(gradient.square_sum) == pytest.approx(35)


def test_an_embedding_used_twice_is_opened_by_the_head_and_closed_by_embed():
    with rig(own=(0,)) as made:
        made.gradients.begin_step()
        made.gradients.open(0)
        made.gradients.add(0, [torch.ones(5, 7), None])
        made.gradients.open(1)
        made.gradients.add(1, [None, torch.ones(3000)])
        made.gradients.close(1, last_group=True)
        made.gradients.open(0)
        made.gradients.add(0, [torch.ones(5, 7), None])
        made.gradients.close(0, last_group=True)
        gradient = made.sink.finished[-1]
        gradient.landed.synchronize()
        assert torch.all(LAYOUTS[0].views(made.host[0])["a"] == 2)
        assert float(gradient.square_sum) == pytest.approx(4 * 35)  # counted once, of the whole sum


def test_a_sum_that_arrives_after_its_step_was_abandoned_does_no_harm():
    """It is still on its way up into a buffer that the next step zeroes and uses."""
    (micro_batch,) = random_micro_batches(1)
    with rig("host") as made:
        made.gradients.begin_step()
        for block in (3, 2):
            made.gradients.open(block)
            made.gradients.add(block, [*dict(micro_batch[block]).values()])
            made.gradients.close(block, last_group=False)
        made.lanes["upload"].delay = lambda: time.sleep(0.03)
        made.gradients.open(3)  # the second group, which ends here
        made.gradients.begin_step()
        for block in (3, 2, 1, 0):
            made.gradients.open(block)
            # in the same buffer: what arrives meanwhile must have arrived before
            time.sleep(0.04 if block == 2 else 0)
            made.gradients.add(block, [*dict(micro_batch[block]).values()])
            made.gradients.close(block, last_group=True)
        landed(made.sink.finished, torch.float32)
        assert differing(made.host, expected_sums([micro_batch], torch.float32)) == []


def test_a_failed_download_is_raised_by_the_norm():
    with rig() as made:
        made.sink.places[0] = torch.zeros(3)  # the wrong size: the copy of the last gradient fails
        finished = made.step([random_micro_batches(1)])
        with pytest.raises(RuntimeError, match="size"):
            made.gradients.norm(finished)


def test_the_sum_of_squares_keeps_its_digits():
    for dtype in DTYPES:
        values = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 1e-3).to(dtype)
        expected = float(values.double().square().sum())
        assert float(square_sum(values)) == pytest.approx(expected, rel=1e-6)
