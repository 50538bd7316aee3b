"""Ranks of several hosts, which are groups of one machine's here: sums in two levels, and weights
that cross between hosts once a step."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.engine.ranks.exchange import Exchange
from megatrain.engine.ranks.weights import GatheredWeights
from megatrain.settings import ALL, WIRES, Settings
from megatrain.world import World
from tests.engine.test_ranks import CHUNK, SEVERAL, STEPS, assert_one, in_order, train
from tests.helpers.support import engine_of, tiny_config


def bits(found: list[Any]) -> list[Any]:
    return [
        (told, held_out, {n: a.tolist() for n, a in of.items()}) for told, held_out, of in found
    ]


FOUR_OF_TWO: dict[str, tuple[dict[str, Any], tuple[int, str]]] = {
    "groups": (
        {"settings": Settings(**CHUNK, groups=2, group_size=1, sums_on_device=2)},
        (1, "download"),
    ),
    "unclipped, resident": (
        {"settings": Settings(**CHUNK, resident=2, replicated=3), "max_grad_norm": None},
        (2, "upload"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", FOUR_OF_TWO)
def test_two_hosts_of_two_are_one_up_to_the_order_of_sums_and_always_the_same(how, on_ranks):
    options, slow = FOUR_OF_TWO[how]
    family = tiny_config("qwen2", num_hidden_layers=4)  # layers that take turns in slots
    given = {"steps": SEVERAL, "precision": "float32", "family": family, **options}
    found, _ = assert_one(on_ranks, 4, 2, exact=False, **given)
    again = on_ranks(4, partial(train, **given, slow=slow), hosts=2)
    assert bits(found) == bits(in_order(4, 2, again))


def given_by(rank: int, numel: int) -> torch.Tensor:
    given = torch.randn(4096, generator=torch.Generator().manual_seed(rank))
    return given.repeat(numel // 4096 + 1)[:numel].clone()


def source_of(engine: Engine) -> GatheredWeights:
    source = engine.parts.streamer.source
    assert isinstance(source, GatheredWeights)
    return source


def summed(world: World, wire: str, device: str = "cpu") -> torch.Tensor:
    """This rank's share of the sum of what all have given."""
    pytest.MonkeyPatch().setattr("megatrain.memory.sizes.EXCHANGE_BYTES", 1 << 15)  # in pieces
    with engine_of("llama", world=world, settings=Settings(wire=wire), device=device) as engine:
        there = source_of(engine).exchange
        total = given_by(world.rank, there.padded(1)).to(device)
        return there.summed(total).cpu().clone()


def summed_in_order(hosts: int, ranks: int, wire: str, numel: int) -> torch.Tensor:
    """Sums over each host's ranks, rounded once if there are several hosts, and then over hosts."""
    given = [given_by(rank, numel) for rank in range(ranks)]
    each = ranks // hosts
    of_hosts = [reduce(torch.add, given[i : i + each]) for i in range(0, ranks, each)]
    if hosts > 1:
        of_hosts = [of_host.to(getattr(torch, wire)).float() for of_host in of_hosts]
    return reduce(torch.add, of_hosts)


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_sums_are_of_each_host_and_then_over_hosts(hosts, wire, on_ranks):
    found = on_ranks(4, partial(summed, wire=wire), hosts=hosts)
    whole = torch.cat(in_order(4, hosts, found))
    assert torch.equal(whole, summed_in_order(hosts, 4, wire, len(whole)))


def crossings(
    world: World, groups: int, replicated: int
) -> tuple[list[int], int, int, dict[str, float]]:
    """For each step, and for what follows: bytes of weights that this rank sends to the other host;
    those of its shares, and what the host keeps; and the last step's waits."""
    sent: list[int] = []
    stalls: dict[str, float] = {}
    across = Exchange.gather_across

    def counted(self: Exchange, whole: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        sent[-1] += share.nbytes if share.dtype == torch.bfloat16 else 0
        return across(self, whole, share)

    in_groups = Settings(**CHUNK, groups=groups, group_size=1, sums_on_device=ALL)
    settings = replace(in_groups, replicated=replicated)
    with (
        pytest.MonkeyPatch.context() as patch,
        engine_of("llama", world=world, settings=settings, precision="bfloat16") as engine,
    ):
        patch.setattr(Exchange, "gather_across", counted)
        engine.parts.lanes["exchange"].delay = partial(time.sleep, 0.01)
        for step in SEVERAL:
            sent.append(0)
            stalls = engine.train_step(step[world.rank :: world.size]).stalls_s
        sent.append(0)
        engine.evaluate(SEVERAL[0][:1])
        sent.append(0)
        engine.evaluate(SEVERAL[1][:1])
        source = source_of(engine)
        assert source.kept is not None
        return sent, 2 * sum(source.exchange.shares), source.kept.nbytes, stalls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "groups", "replicated"), [(2, 3, 0), (2, 2, 2), (2, 2, ALL), (4, 2, 0)]
)
def test_weights_cross_once_a_step(ranks, groups, replicated, on_ranks):
    """However many sweeps there are; none where no step was made between."""
    for sent, once, kept, stalls in on_ranks(
        ranks, partial(crossings, groups=groups, replicated=replicated), hosts=2
    ):
        assert sent == [once, once, once, 0]
        if not replicated:
            assert kept >= 2 * once  # this rank's shares, and those of the other host
        assert (kept == 0) == (replicated == ALL)
        assert stalls["wait_network"] > 0
        if ranks == 2:  # nobody else is on this host
            assert stalls["wait_exchange"] < 0.1 * stalls["wait_network"]


def slow_last_sum(world: World) -> float:
    """Seconds that a step is said to wait for the network, whose last job takes 1 s longer."""
    jobs: list[float] = []

    def delay() -> None:
        jobs.append(0.0)
        time.sleep(1.0 if len(jobs) == last else 0.0)

    with engine_of("llama", world=world, precision="bfloat16") as engine:
        last = 0
        engine.train_step(STEPS[0][world.rank :: world.size])
        engine.parts.lanes["exchange"].delay = delay
        engine.train_step(STEPS[1][world.rank :: world.size])
        last = len(jobs)
        jobs.clear()
        return engine.train_step(STEPS[2][world.rank :: world.size]).stalls_s["wait_network"]


@pytest.mark.slow
def test_the_norm_waits_for_the_network(on_ranks):
    """It is accounted for: the sums of the block that comes last cross then."""
    assert min(on_ranks(2, slow_last_sum, hosts=2)) > 0.5  # the lane may begin before
