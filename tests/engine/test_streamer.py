"""The slot that each block lands in, the order of fetches, and nothing travels twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import pytest
import torch
from torch import nn

from megatrain.engine.streamer import Slot, StoredWeights, Streamer
from megatrain.engine.streams import Compute, Lane
from megatrain.memory.layout import ArraySpec, FlatLayout
from megatrain.memory.store import Store
from megatrain.models.anatomy import Anatomy
from megatrain.models.constants import Block
from tests.helpers.delays import NoUpdates, failing
from tests.helpers.support import NO_NAMES

CPU = torch.device("cpu")
EMBED, LAYER, HEAD = 3000, 1500, 500  # elements of the blocks, before padding


def anatomy(layers: int, tied: bool = False) -> Anatomy:
    numels = [EMBED, *[LAYER] * layers, HEAD if tied else EMBED + HEAD]
    names = ["embed", *(f"layers.{i}" for i in range(layers)), "head"]
    blocks = tuple(
        Block(i, name, FlatLayout.pack([("w", (n,), True)]))
        for i, (name, n) in enumerate(zip(names, numels, strict=True))
    )
    return Anatomy(blocks, (("head", "embed"),) if tied else (), "test", 8, 8, None, NO_NAMES)


def there_and_back(layers: int) -> list[int]:
    order = list(range(layers + 2))
    return [*order, *reversed(order[:-1])]


class Noted(NoUpdates):
    """Notes whose update is waited for, in that order."""

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks

    def wait_ready(self, block: int) -> None:
        self.blocks.append(block)


class Rig:
    """A streamer over a store whose block i is full of i + 1. `uploads` notes who travelled."""

    def __init__(self, shape: Anatomy, resident: int = 0) -> None:
        spec = ArraySpec("weight", torch.float32)
        self.store = Store(
            [b.layout for b in shape.blocks],
            [spec],
            device=CPU,
            resident=resident,
            resident_arrays=[spec],
        )
        for block in shape.blocks:
            self.store.array("weight", block.index).fill_(block.index + 1)
        self.uploads: list[int] = []
        self.lane = Lane("upload")
        self.source = StoredWeights(self.store, self.lane, Noted(self.uploads))
        self.streamer = Streamer(shape, self.store, torch.float32, Compute(CPU), self.source)

    def visit(self, visits: Sequence[int]) -> Iterator[int]:
        """Sweep, checking at every visit that the block's own weights are there."""
        with closing(self.streamer.sweep(visits)) as sweep:
            for block in sweep:
                assert torch.all(self.streamer.flat(block) == block + 1), f"{block} is not there"
                yield block

    def drain(self, visits: Sequence[int]) -> list[int]:
        self.uploads.clear()
        assert list(self.visit(visits)) == list(visits)
        return list(self.uploads)


@contextmanager
def rig(layers: int, tied: bool = False, resident: int = 0) -> Iterator[Rig]:
    made = Rig(anatomy(layers, tied), resident)
    yield made
    made.lane.close()
    made.store.close()


# -- what travels, and when ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "tied", "resident", "uploads"),
    [
        # the only layer is still there; the embedding made room for the head
        (1, False, 0, [0, 1, 2, 0]),
        (2, False, 0, [0, 1, 2, 3, 0]),
        (4, False, 0, [0, 1, 2, 3, 4, 5, 2, 1, 0]),  # layers 4 and 3 are still there
        (4, True, 0, [0, 1, 2, 3, 4, 5, 2, 1]),  # and so is a tied embedding
        (1, True, 0, [0, 1, 2]),
        (4, False, 1, [1, 2, 3, 4, 5, 2, 1]),  # the head has a slot to itself
        (4, False, 3, [3, 4, 5]),
        (4, True, 3, [3, 4, 5]),
        (4, False, 5, [5]),
        (4, True, 6, []),
    ],
)
def test_a_step_uploads_each_block_that_is_not_there(layers, tied, resident, uploads):
    with rig(layers, tied, resident) as made:
        for _ in range(2):
            made.streamer.invalidate()
            assert made.drain(there_and_back(layers)) == uploads


def test_the_next_block_is_on_its_way_while_one_is_computed():
    with rig(6) as made:
        route = there_and_back(6)
        for position, now in enumerate(made.visit(route)):
            made.lane.submit(lambda _: None).wait_host()  # let what was requested arrive
            for block in (now, *route[position + 1 : position + 2]):
                assert made.streamer.slot_of[block].holds == block
            assert torch.all(made.streamer.flat(now) == now + 1)


def test_an_upload_waits_for_the_update_of_its_block():
    with rig(3) as made:
        updated = threading.Event()

        class Updates(NoUpdates):
            def wait_ready(self, block: int) -> None:
                if block == 2:
                    updated.wait()
                    made.store.array("weight", 2).fill_(-1.0)

        made.source.updates = Updates()
        visits = made.streamer.sweep(range(5))
        assert [next(visits), next(visits)] == [0, 1]  # these need not wait
        updated.set()
        assert next(visits) == 2
        assert torch.all(made.streamer.flat(2) == -1)
        visits.close()


def test_the_first_upload_waits_for_the_slot_to_be_made():
    """On CUDA its zeros are written by the computing stream, which an upload may overtake."""
    with rig(3) as made:
        assert all(slot.free is not None for slot in made.streamer.slots)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_the_head_reads_is_free_only_after_the_head(tied):
    with rig(3, tied=tied) as made:
        visits = made.streamer.sweep(range(5))
        for _ in range(4):
            next(visits)
        before = made.streamer.slot_of[0].free
        visits.close()  # abandoned after the last layer: the head may have been running
        assert made.streamer.slot_of[0].free is before
        made.drain(range(5))
        after = made.streamer.slot_of[0].free
        assert (after is made.streamer.slot_of[4].free) or not tied


def test_an_upload_that_could_not_be_queued_is_not_taken_for_landed():
    with rig(3) as made:
        made.drain(there_and_back(3))
        made.streamer.invalidate()
        once = failing(made.lane.submit, 1, KeyboardInterrupt())
        made.lane.submit = once  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            next(made.streamer.sweep(range(5)))
        made.store.array("weight", 0).fill_(-3.0)
        visits = made.streamer.sweep(range(5))
        next(visits)
        assert torch.all(made.streamer.flat(0) == -3)
        visits.close()


# -- retained graphs -------------------------------------------------------------------------------


def test_a_graph_survives_a_refill_with_the_same_weights():
    slot = Slot(torch.zeros(12))
    weights, others = torch.arange(12.0), torch.randn(12)
    slot.target.copy_(weights)
    parameter = nn.Parameter(slot.flat[:12].view(3, 4))
    inputs = torch.ones(1, 4, requires_grad=True)
    output = nn.functional.linear(inputs, parameter).sum()  # saves the weights
    for values in (others, weights):
        slot.target.copy_(values)
    (found,) = torch.autograd.grad(output, inputs)
    assert torch.equal(found, weights.view(3, 4).sum(0, keepdim=True))
