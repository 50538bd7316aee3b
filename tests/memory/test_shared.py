"""One copy of weights, which several processes map, and which is gone with the last of them."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import pytest
import torch

from megatrain.errors import MegaTrainError
from megatrain.memory import shared
from megatrain.memory.layout import FlatLayout
from megatrain.memory.shared import SharedWeights
from megatrain.memory.sizes import slab_bytes
from megatrain.world import World
from tests.helpers.ranks import run_ranks

LAYOUTS = {
    1: FlatLayout.pack([("a", (3, 700), True)]),
    4: FlatLayout.pack([("b", (90, 900), True), ("c", (5,), False)]),
}


def opened(world: World = World(), *, pinned: bool = False) -> SharedWeights:  # noqa: B008
    return SharedWeights(LAYOUTS, torch.bfloat16, world, pinned=pinned, threads=2)


def seen(world: World) -> list[Any]:
    weights = opened(world)
    for block, layout in LAYOUTS.items():
        assert not weights.whole[block].any()
        world.all_gather(None)
        weights.share(block, layout).fill_(world.rank + 1)
        weights.say_updated(block)
    weights.say_updated(3)  # not here
    for block in (1, 3, 4):
        weights.wait_for_others(block, 1)
    found: list[Any] = [weights.whole[block].tolist() for block in LAYOUTS]
    found.append(weights.nbytes)
    world.all_gather(None)
    weights.close()
    weights.close()
    return found


def test_every_rank_sees_what_each_has_written(tmp_path):
    first, *others = run_ranks(3, seen, tmp_path)
    assert others == [first, first]
    for values, layout in zip(first, LAYOUTS.values(), strict=False):
        spans = [layout.span(rank, 3) for rank in range(3)]
        assert values == [rank + 1 for rank, span in enumerate(spans) for _ in range(span.numel)]
    assert 3 * first[-1] == pytest.approx(slab_bytes(200_000), abs=3)


def test_waiting_ends_with_the_update_or_with_the_memory():
    weights, ends = opened(), []

    def wait(updates: int) -> None:
        try:
            weights.wait_for_others(4, updates)
            ends.append("")
        except MegaTrainError as error:
            ends.append(str(error))

    for act, expected in (
        (lambda: weights.say_updated(4), ""),
        (weights.close, "the weights' memory is closed"),
    ):
        thread = threading.Thread(target=wait, args=(len(ends) + 1,))
        thread.start()
        thread.join(0.01)
        assert thread.is_alive()
        act()
        thread.join(5)
        assert ends[-1] == expected
    with pytest.raises(MegaTrainError, match="closed"):
        weights.wait_for_others(4, 9)


def refused(world: World, how: str) -> str:
    patch = pytest.MonkeyPatch()
    if world.rank == 1 and how == "open":
        patch.setattr(os, "open", no_permission)
    elif world.rank == 1:
        patch.setattr(shared, "_mapped", partial(of_another, mapped=shared._mapped))
    with pytest.raises(MegaTrainError) as told:
        opened(world)
    return str(told.value)


def no_permission(*_: Any) -> int:
    raise PermissionError(13, "Permission denied")


def of_another(name: str, nbytes: int, path: str, file: int, mapped: Any) -> Any:
    """As in a container with process numbers of its own."""
    return mapped(name, nbytes, path, file + 1)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("open", "cannot open the weights of all ranks ([Errno 13] Permission denied"),
        ("other", "ranks do not see each other's processes"),
    ],
)
def test_a_rank_that_cannot_open_it_ends_all_with_a_remedy(how, words, tmp_path):
    for said in run_ranks(2, partial(refused, how=how), tmp_path):
        assert said.startswith(words)
        assert said.endswith("; set memory.transport: gather")
