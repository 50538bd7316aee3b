"""Ranks that keep whole weights of blocks compute what ranks do that gather them at every visit, in
every bit, and fetch them once for each version of the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from megatrain.engine.engine import Engine
from megatrain.engine.streamer import Slot
from megatrain.settings import ALL, Settings
from megatrain.world import World
from tests.engine.test_ranks import CHUNK, HOW, arrays_of
from tests.helpers.ranks import run_ranks
from tests.helpers.support import engine_of, micro_batches, tiny_config

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
