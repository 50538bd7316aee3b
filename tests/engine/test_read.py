"""Ranks that read their host's one copy of the weights compute what ranks that gather shares do, in
every bit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.engine.ranks.exchange import shares_weights
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.settings import Settings
from megatrain.world import World
from tests.engine.test_ranks import CHUNK, HOW, arrays_of
from tests.helpers.delays import before_layers
from tests.helpers.support import engine_of, micro_batches

STEPS = [micro_batches(seed, [(2, 9), (1, 6), (1, 5), (2, 7)]) for seed in range(3)]
OFFLOADED = Settings(**CHUNK, offload_activations=True, resident=1, retained=1)
IN_GROUPS: dict[str, Any] = {
    "model": "llama-tied",
    "settings": Settings(**CHUNK, groups=2, group_size=1, sums_on_device=2),
}
TIED = {"model": "llama-tied", "max_grad_norm": None}
EXPERTS = {"model": "mixtral", "router_aux_loss_coef": 0.1}
READ = ["float32", "int8 moments", "half a layer frozen, resident"]
CASES = {
    2: {name: HOW[name] for name in READ} | {"experts": EXPERTS, "tied, unclipped": TIED},
    3: {"tied, in groups": IN_GROUPS, "offloaded, one resident": {"settings": OFFLOADED}},
}
Result = tuple[Any, dict[str, torch.Tensor]]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Compile and import once, before ranks are forked."""
    for how in (HOW["float32"], HOW["int8 moments"], EXPERTS, TIED):
        with opened(World(), "gather", how) as engine:
            trained(engine, STEPS[:1])


def opened(world: World, transport: str, how: dict[str, Any]) -> Engine:
    given = {"model": "llama", "precision": "bfloat16", "settings": Settings(**CHUNK), **how}
    if "family" in given:
        given["model"] = given.pop("family")
    given["settings"] = replace(given["settings"], transport=transport)
    engine = engine_of(given.pop("model"), world=world, **given)
    assert (engine.store.shared is None) == (transport == "gather" or all_are_resident(engine))
    return engine


def all_are_resident(engine: Engine) -> bool:
    return engine.store.resident >= len(engine.anatomy.blocks)


def trained(engine: Engine, steps: Sequence[Any] = STEPS[:2]) -> Result:
    world = engine.world
    mine = [step[world.rank :: world.size] for step in steps]
    found = [engine.train_step(each) for each in mine]
    told = [(one.loss, one.grad_norm) for one in found]
    logits = engine.logits(STEPS[0][0]["input_ids"])
    return (told, engine.evaluate(mine[0]).loss, logits), arrays_of(engine)


def differences(ours: Result, theirs: Result) -> list[str]:
    (told, held_out, logits), arrays = ours
    (their_told, their_held_out, their_logits), their_arrays = theirs
    names = ["results"] * ((told, held_out) != (their_told, their_held_out))
    names += ["logits"] * (not torch.equal(logits, their_logits))
    return names + [name for name in arrays if not torch.equal(arrays[name], their_arrays[name])]


def both_ways(world: World, cases: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    found = {}
    for name, how in cases.items():
        results = []
        for transport in ("gather", "read"):
            with opened(world, transport, how) as engine:
                results.append(trained(engine))
        found[name] = differences(*results)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_reading_changes_no_bit(ranks, on_ranks):
    for found in on_ranks(ranks, partial(both_ways, cases=CASES[ranks])):
        assert found == {name: [] for name in CASES[ranks]}


SLOW = ("upload", "download", "exchange", "update", "compute")
MANY = [micro_batches(seed, [(1, 6), (1, 5)]) for seed in range(2 * len(SLOW))]
AT_ONCE: dict[str, dict[str, Any]] = {
    "unclipped": {"max_grad_norm": None},
    "two backward passes": {"settings": Settings(**CHUNK, second_backward=True)},
}


def slowed(engine: Engine) -> Result:
    """Many steps, in each of which a lane of one rank is slow, or its computation."""
    slow, rank = "", engine.world.rank

    def sleep_if(name: str) -> None:
        if name == slow:
            time.sleep(0.004)

    for name, lane in engine.parts.lanes.items():
        lane.delay = partial(sleep_if, name)
    engine.parts.updater.delay = lambda _: sleep_if("update")
    before_layers(engine, partial(sleep_if, "compute"))
    told = []
    for number, step in enumerate(MANY):
        late, lane_of = divmod(number, len(SLOW))
        slow = SLOW[lane_of] if rank == late else ""
        told.append(engine.train_step(step[rank :: engine.world.size]).grad_norm)
    return (told, 0.0, torch.zeros(0)), arrays_of(engine)


def slowly(world: World, how: dict[str, Any]) -> list[str]:
    """If gradients are applied before all are there, a slow rank could still have to read what
    others write."""
    results = []
    for transport in ("gather", "read"):
        with opened(world, transport, how) as engine:
            results.append(slowed(engine))
    return differences(*results)


@pytest.mark.slow
@pytest.mark.parametrize("how", AT_ONCE)
def test_a_slow_lane_of_one_rank_changes_no_bit(how, on_ranks):
    assert on_ranks(2, partial(slowly, how=AT_ONCE[how])) == [[], []]


def ended(world: World) -> str:
    """A lane waits for an update that no other rank will do."""
    with opened(world, "read", {}) as engine:
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
