"""Ranks that read their host's one copy of the weights, or keep whole weights of blocks, compute
what ranks do that gather shares at every visit, in every bit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.engine.ranks.exchange import shares_weights
from megatrain.engine.streamer import Slot
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.settings import ALL, Settings
from megatrain.world import World
from tests.engine.test_ranks import CHUNK, HOW, arrays_of
from tests.helpers.delays import before_layers
from tests.helpers.support import engine_of, micro_batches

STEPS = [micro_batches(seed, [(2, 9), (1, 6), (1, 5), (2, 7)]) for seed in range(2)]
GROUPS: dict[str, Any] = {"groups": 2, "group_size": 1, "sums_on_device": 2}
UNCLIPPED: dict[str, Any] = {"max_grad_norm": None}
READ: dict[str, Any] = {"transport": "read"}


@dataclass(frozen=True)
class Case:
    """Ranks that read one copy, or keep whole blocks, beside ranks that gather shares."""

    ranks: int
    model: str
    changes: dict[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


INT8, HALF = (HOW[how] for how in ("int8 moments", "half a layer frozen, resident"))
OFFLOADED: dict[str, Any] = {"offload_activations": True, "resident": 1, "retained": 1}
CASES = {
    "float32": Case(2, "llama", READ, {}, {"precision": "float32"}),
    "int8 moments": Case(2, "llama", READ, {}, INT8),
    "half frozen": Case(2, "llama", READ, {"resident": 3}, {"freeze": HALF["freeze"]}),
    "experts": Case(2, "mixtral", READ, {}, {"router_aux_loss_coef": 0.1}),
    "tied, unclipped": Case(2, "llama-tied", READ, {}, UNCLIPPED),
    "tied, in groups": Case(3, "llama-tied", READ, GROUPS),
    "offloaded, one resident": Case(3, "llama", READ, OFFLOADED),
}
KEPT = {
    "tied, in groups": Case(2, "qwen2-tied", {"replicated": 1}, GROUPS),
    "resident, in groups": Case(2, "llama", {"replicated": 4}, {"resident": 3, **GROUPS}),
    "all resident": Case(2, "llama", {"replicated": ALL}, {"resident": ALL}, UNCLIPPED),
    "twice": Case(2, "llama", {"replicated": 2}, {"second_backward": True}),
    "read": Case(2, "llama", {"replicated": 2}, READ, {"freeze": HOW["frozen"]["freeze"]}),
    "read, unclipped": Case(2, "llama-tied", {"replicated": ALL}, READ, UNCLIPPED),
}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Compile and import once, before ranks are forked."""
    for case in CASES.values():
        with opened(World(), case, {}) as engine:
            engine.train_step(STEPS[0])


def opened(world: World, case: Case, changes: dict[str, Any]) -> Engine:
    settings = Settings(**CHUNK, **{"transport": "gather", **case.settings, **changes})
    options = {"precision": "bfloat16", **case.options}
    engine = engine_of(case.model, world=world, settings=settings, **options)
    reads = settings.transport == "read" and not world.is_alone
    assert (engine.store.shared is not None) == reads
    return engine


def used(engine: Engine) -> tuple[dict[str, Any], list[Counter[int]]]:
    """Results of steps and of reading between them, and the fetches of each block's weights
    meanwhile: from a change of the weights to the next."""
    fetched: list[Counter[int]] = [Counter()]
    source, rank = engine.parts.streamer.source, engine.world.rank
    fetch = source.fetch

    def counted(block: int, slot: Slot) -> None:
        fetched[-1][block] += 1
        fetch(block, slot)

    source.fetch = counted  # type: ignore[method-assign]
    prompt, told = STEPS[0][0]["input_ids"], list[Any]()
    for step in STEPS:
        mine = step[rank :: engine.world.size]
        found = engine.train_step(mine)
        fetched.append(Counter())
        told.append((found.loss, found.grad_norm, engine.evaluate(mine[:1]).loss))
    told += [
        engine.logits(prompt).tolist(),
        engine.generate(prompt[:1].tolist(), max_new_tokens=1)[0].ids,
    ]
    source.fetch = fetch  # type: ignore[method-assign]
    weights = {name: tensor.float().tolist() for name, tensor in engine.iter_weights()}
    arrays = {name: array.tolist() for name, array in arrays_of(engine).items()}
    return {"told": told, **weights, **arrays}, fetched


def both_ways(
    world: World, cases: dict[str, Case], use: Callable[[Engine], Any]
) -> dict[str, tuple[list[str], Any, Any]]:
    """For every case: what differs, and what else `use` returns of either."""
    found = {}
    for name, case in cases.items():
        with opened(world, case, {}) as engine:
            expected, of_gathering = use(engine)
        with opened(world, case, case.changes) as engine:
            results, of_other = use(engine)
        differ = [key for key in expected if results[key] != expected[key]]
        found[name] = differ, of_gathering, of_other
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_reading_one_copy_changes_no_bit(ranks, on_ranks):
    cases = {name: case for name, case in CASES.items() if case.ranks == ranks}
    for found in on_ranks(ranks, partial(both_ways, cases=cases, use=used)):
        assert [name for name, (differ, *_) in found.items() if differ] == []
        assert found.keys() == cases.keys()


def most(fetched: Sequence[Counter[int]], blocks: int) -> int:
    """Fetches of any of the first blocks while weights stayed the same."""
    return max(n for of in fetched for block, n in of.items() if block < blocks)


@pytest.mark.slow
def test_nor_does_keeping_whole_blocks_and_they_come_once_until_they_change(on_ranks):
    for found in on_ranks(2, partial(both_ways, cases=KEPT, use=used)):
        for name, (differ, gathered, kept) in found.items():
            assert differ == [], name
            replicated = KEPT[name].changes["replicated"]
            assert most(gathered, ALL) > 1 == most(kept, replicated), name


SLOW = ("upload", "download", "exchange", "update", "compute")
MANY = [micro_batches(seed, [(1, 6), (1, 5)]) for seed in range(2 * len(SLOW))]
# if gradients are applied before all are there, a slow rank could still have to read what others
# write
AT_ONCE = {
    "unclipped": Case(2, "llama", READ, {}, UNCLIPPED),
    "two backward passes": Case(2, "llama", READ, {"second_backward": True}),
}


def slowed(engine: Engine) -> tuple[dict[str, Any], None]:
    """Many steps, in each of which a lane of one rank is slow, or its computation."""
    slow, rank = "", engine.world.rank

    def sleep_if(name: str) -> None:
        if name == slow:
            time.sleep(0.004)

    for name, lane in engine.parts.lanes.items():
        lane.delay = partial(sleep_if, name)
    engine.parts.updater.lane.delay = partial(sleep_if, "update")
    before_layers(engine, partial(sleep_if, "compute"))
    told = []
    for number, step in enumerate(MANY):
        late, lane_of = divmod(number, len(SLOW))
        slow = SLOW[lane_of] if rank == late else ""
        told.append(engine.train_step(step[rank :: engine.world.size]).grad_norm)
    arrays = {name: array.tolist() for name, array in arrays_of(engine).items()}
    return {"told": told, **arrays}, None


@pytest.mark.slow
def test_a_slow_lane_of_one_rank_changes_no_bit(on_ranks):
    for found in on_ranks(2, partial(both_ways, cases=AT_ONCE, use=slowed)):
        assert found == dict.fromkeys(AT_ONCE, ([], None, None))


def ended(world: World) -> str:
    """A lane waits for an update that no other rank will do."""
    with opened(world, CASES["float32"], READ) as engine:
        waiting = engine.parts.lanes["upload"].submit(lambda _: engine.store.wait_for_others(0, 9))
    with pytest.raises(MegaTrainError) as told:
        waiting.wait_host()
    return str(told.value)


def test_an_engine_that_is_closed_waits_for_no_rank(on_ranks):
    assert on_ranks(2, ended) == ["the engine is closed"] * 2


def test_several_hosts_do_not_read_one_copy():
    settings = Settings(transport="read")
    with pytest.raises(
        ConfigError, match="several hosts cannot read weights from one copy; set transport: gather"
    ):
        engine_of("llama", world=World(0, 4, 0, 2), settings=settings)


@pytest.mark.parametrize(
    ("transport", "world", "reach", "expected"),
    [
        ("auto", World(0, 2, 0, 2), False, True),
        ("auto", World(0, 2, 0, 2), True, False),
        ("auto", World(0, 4, 0, 2), False, False),  # over hosts
        ("gather", World(0, 2, 0, 2), False, False),
        ("read", World(0, 2, 0, 2), True, True),
        ("read", World(), False, False),
    ],
)
def test_who_reads(transport, world, reach, expected, monkeypatch):
    monkeypatch.setattr("megatrain.engine.ranks.exchange.peer_devices", lambda *_: reach)
    settings = Settings(transport=transport)
    assert shares_weights(settings, world, torch.device("cpu")) == expected
