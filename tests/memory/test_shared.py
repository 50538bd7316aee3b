"""One copy of weights, which several processes map, and which is gone with the last of them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.errors import MegaTrainError
from megatrain.memory import shared, slab
from megatrain.memory.layout import FlatLayout
from megatrain.memory.shared import SharedWeights
from megatrain.memory.sizes import slab_bytes
from megatrain.world import World
from tests.memory.test_slab import Cuda
from tests.ranks import run_ranks

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


def pinned_by_all(world: World, folder: Path) -> list[str]:
    """The order in which two ranks touch and register, in a file that both append to."""
    log, cuda = folder / "log", Cuda()
    patch = pytest.MonkeyPatch()

    def note(what: str) -> None:
        with log.open("a") as file:
            file.write(what + "\n")

    touch = slab.SharedSlab.touch

    def touched(self: slab.SharedSlab, parts: Any, threads: int) -> None:
        touch(self, parts, threads)
        note(f"touched {sum(map(len, parts))}")

    def register(pointer: int, nbytes: int, flags: int) -> int:
        note(f"registered {flags}")
        return cuda.register(pointer, nbytes, flags)

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=cuda.unregister)
    patch.setattr(slab.SharedSlab, "touch", touched)
    patch.setattr(slab, "_cudart", lambda: runtime)
    weights = opened(world, pinned=True)
    assert [*cuda.registered.values()] == [2 * weights.nbytes]
    weights.close()
    assert not cuda.registered
    world.all_gather(None)
    return log.read_text().split("\n")[:-1]


def test_all_touch_their_own_share_and_then_register_the_whole(tmp_path):
    spans = [[layout.span(rank, 2).numel for layout in LAYOUTS.values()] for rank in range(2)]
    for lines in run_ranks(2, partial(pinned_by_all, folder=tmp_path), tmp_path):
        assert sorted(lines[:2]) == sorted(f"touched {2 * sum(mine)}" for mine in spans)
        assert lines[2:] == [f"registered {slab.PORTABLE}"] * 2


def number_of(file: Path) -> int:
    with suppress(OSError):  # it was closed
        return file.stat().st_ino
    return 0


def who_maps(inode: int) -> Iterator[int]:
    """Processes that map a memory file, or have it open."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            maps = (folder / "maps").read_text()
            files = [*map(number_of, (folder / "fd").iterdir())]
        except OSError:  # it has ended, or is another user's
            continue
        if inode in files or f" {inode} " in maps.replace("\t", " "):
            yield int(folder.name)


def mapped() -> set[int]:
    """Such files that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "memfd:megatrain-weights" in line}


def killed(world: World, found: Path) -> None:
    before, weights = mapped(), opened(world)
    (inode,) = mapped() - before
    assert world.all_gather(inode) == [inode] * 2
    if world.is_first:
        found.write_text(json.dumps([inode, sorted(who_maps(inode))]))
    pids = world.all_gather(os.getpid())
    assert not world.is_first or json.loads(found.read_text())[1] == sorted(pids)
    world.all_gather(None)
    weights.share(1, LAYOUTS[1]).fill_(1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_of_it_when_all_were_killed(tmp_path):
    found = tmp_path / "found"
    with pytest.raises(AssertionError, match="rank 0 died"):
        run_ranks(2, partial(killed, found=found), tmp_path)
    inode, pids = json.loads(found.read_text())
    assert len(pids) == 2
    assert [*who_maps(inode)] == []


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
