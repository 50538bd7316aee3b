"""Ranks that keep whole weights of blocks compute what ranks do that gather them at every visit, in
every bit, and fetch them once for each version of the weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatrain.engine.engine import Engine
from megatrain.engine.streamer import Slot
from megatrain.settings import ALL, Settings
from megatrain.storage.checkpoint import save_checkpoint
from megatrain.storage.restore import load_checkpoint
from megatrain.world import World
from tests.engine.test_ranks import CHUNK, HOW, arrays_of
from tests.ranks import run_ranks
from tests.support import engine_of, micro_batches, tiny_config

STEPS = [micro_batches(seed, [(2, 9), (1, 6), (1, 5)]) for seed in range(2)]
LAYERS = 3  # of which the first and the last take turns in a slot
GROUPS: dict[str, Any] = {"groups": 2, "group_size": 1, "sums_on_device": 2}
UNCLIPPED: dict[str, Any] = {"max_grad_norm": None}
# (family, settings, further options, numbers of blocks that are replicated)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Sequence[int]]] = {
    "tied, in groups": ("qwen2-tied", GROUPS, {}, (1,)),
    "resident, in groups": ("llama", {"resident": 3, **GROUPS}, {}, (4,)),
    "all resident, unclipped": ("llama", {"resident": ALL}, UNCLIPPED, (ALL,)),
    "two backward passes": ("llama", {"second_backward": True}, {}, (2,)),
    "read, frozen": ("llama", {"transport": "read"}, {"freeze": HOW["frozen"]["freeze"]}, (2,)),
    "read, unclipped": ("llama-tied", {"transport": "read"}, UNCLIPPED, (ALL,)),
}
SLOW = ("upload", "download", "exchange", "update")
MANY = [micro_batches(seed, [(1, 6), (1, 5)]) for seed in range(len(SLOW))]


def opened(world: World, case: str, replicated: int, **more: Any) -> Engine:
    name, settings, options, _ = CASES[case]
    family = tiny_config(name, num_hidden_layers=LAYERS)
    given = Settings(**CHUNK, **settings, **more, replicated=replicated)
    return engine_of(family, world=world, precision="bfloat16", settings=given, **options)


def used(engine: Engine) -> tuple[list[Any], list[Counter[int]]]:
    """Results of steps and of reading between them, and the fetches of each block's weights
    meanwhile: from a change of the weights to the next."""
    fetched: list[Counter[int]] = [Counter()]
    source, rank = engine.parts.streamer.source, engine.world.rank
    fetch = source.fetch

    def counted(block: int, slot: Slot) -> None:
        fetched[-1][block] += 1
        fetch(block, slot)

    source.fetch = counted  # type: ignore[method-assign]
    prompt = STEPS[0][0]["input_ids"]
    told: list[Any] = []
    for step in STEPS:
        mine = step[rank :: engine.world.size]
        found = engine.train_step(mine)
        fetched.append(Counter())
        told.append((found.loss, found.grad_norm, engine.evaluate(mine[:1]).loss))
    told += [engine.logits(prompt).tolist(), engine.generate(prompt[:1], max_new_tokens=1)]
    source.fetch = fetch  # type: ignore[method-assign]
    told += [(name, tensor.float().tolist()) for name, tensor in engine.iter_weights()]
    return [*told, {name: array.tolist() for name, array in arrays_of(engine).items()}], fetched


def both_ways(world: World) -> dict[str, Any]:
    """For every case and number: True if the results are those of none, the most fetches of any
    block where none is replicated, and of those that are."""
    found: dict[str, Any] = {}
    for case, (*_, numbers) in CASES.items():
        with opened(world, case, 0) as engine:
            expected, without = used(engine)
        for number in numbers:
            with opened(world, case, number) as engine:
                results, fetched = used(engine)
            most = (
                max(max(of.values(), default=0) for of in each)
                for each in (without, cut(fetched, number))
            )
            found[f"{case} {number}"] = results == expected, *most
    return found


def cut(fetched: Sequence[Counter[int]], number: int) -> list[dict[int, int]]:
    """Fetches of the first `number` blocks."""
    return [{block: n for block, n in of.items() if block < number} for of in fetched]


@pytest.mark.slow
def test_no_bit_changes_and_weights_come_once_until_they_change(tmp_path):
    for found in run_ranks(2, both_ways, tmp_path):
        assert len(found) == len(CASES)
        for name, (equal, without, replicated) in found.items():
            assert equal, name
            assert without > 1 == replicated, name


def slowed(engine: Engine) -> list[Any]:
    """Many steps, in each of which a lane of one rank is slow."""
    slow, world = "", engine.world

    def sleep_if(name: str) -> None:
        if name == slow:
            time.sleep(0.004)

    for name, lane in engine.parts.lanes.items():
        lane.delay = partial(sleep_if, name)
    told: list[Any] = []
    for number, step in enumerate(MANY):
        slow = SLOW[number] if world.rank == number % 2 else ""
        told.append(engine.train_step(step[world.rank :: world.size]).grad_norm)
    return [told, {name: array.tolist() for name, array in arrays_of(engine).items()}]


def saved(world: World, folder: Path) -> list[Any]:
    """The step after a checkpoint: of the engine that goes on, of the same once it is loaded again,
    and of one in which another number of blocks is replicated."""
    *before, after = [step[world.rank :: world.size] for step in STEPS]
    told = []
    with opened(world, "two backward passes", ALL) as engine:
        for step in before:
            engine.train_step(step)
        save_checkpoint(folder, 1, engine, None, {"step": 1})
        told.append(engine.train_step(after).grad_norm)
        engine.evaluate(after)
        load_checkpoint(folder / "last", engine)
        told.append(engine.train_step(after).grad_norm)
    with opened(world, "two backward passes", 1) as engine:
        load_checkpoint(folder / "last", engine)
        told.append(engine.train_step(after).grad_norm)
    return told


def others(world: World, drive: Path, folder: Path) -> dict[str, Any]:
    far: dict[str, Any] = {"nvme_blocks": 4, "nvme_folders": (drive,)}
    found: dict[str, Any] = {"resumed": saved(world, folder)}
    for case, more in (("tied, in groups", {}), ("read, unclipped", far)):
        both = []
        for number in (0, ALL):
            with opened(world, case, number, **more) as engine:
                both.append(slowed(engine))
        found[case] = both
    return found


@pytest.mark.slow
def test_slow_lanes_drives_and_resumes_change_no_bit_either(tmp_path):
    folders = [tmp_path / name for name in ("drive", "run")]
    for folder in folders:
        folder.mkdir()
    for found in run_ranks(2, partial(others, drive=folders[0], folder=folders[1]), tmp_path):
        for name, (expected, *results) in found.items():
            assert results and all(each == expected for each in results), name
