"""Ranks that measure together, on gloo with small arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatrain.machine.profile import TOGETHER, joined, typical
from megatrain.measure import compute, ranks
from megatrain.measure.ranks import Together, measure_together
from megatrain.recipes.ranks.liveness import OtherFailed
from megatrain.recipes.ranks.rendezvous import measure_processes
from megatrain.world import World
from tests.helpers.planned import LAPTOP
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


def small(world: World) -> dict[str, Any]:
    compute.PARAMETERS = 1 << 14
    ranks.ELEMENTS["cpu"] = 1 << 12
    return measure_together(world, CPU, cores=2)


def test_all_ranks_find_the_same(tmp_path):
    found, other = run_ranks(2, small, tmp_path)
    assert found == other
    assert sorted(found) == sorted(TOGETHER)
    assert found["ranks"] == 2 and [threads for threads, _ in found["update"]] == [1, 2]
    assert found["gather"] > 0 and found["reduce"] > 0
    assert found["upload"] == found["gather_loss"] == found["reduce_loss"] == 0.0
    alone = typical(LAPTOP)
    profile = joined(alone, alone.__class__(**vars(alone) | found))
    assert profile.gather == found["gather"]
    assert profile.memory == alone.memory / 2


def rate_of_the_network(world: World) -> float:
    ranks.SENT["cpu"] = 1 << 12
    return ranks.network_rate(world, CPU)


def test_all_hosts_find_the_same_rate(tmp_path):
    found, *others = run_ranks(4, rate_of_the_network, tmp_path, hosts=2)
    assert found > 0 and others == [found] * 3


def calls_of(world: World) -> tuple[float, list[int]]:
    made: list[int] = []
    seconds = Together(CPU, world=world).seconds(lambda: made.append(world.rank))
    return seconds, [len(made)]


def test_all_ranks_make_as_many_calls(tmp_path):
    """Or collectives would wait for ever."""
    (seconds, calls), other = run_ranks(2, partial(calls_of), tmp_path)
    assert (seconds, calls) == other


@pytest.mark.slow
def test_processes_of_our_launcher_measure_together(capfd):
    found = measure_processes(2, "cpu")
    assert sorted(found) == sorted(TOGETHER) and found["ranks"] == 2 and found["gather"] > 0
    with pytest.raises(OtherFailed, match="could not measure together") as raised:
        measure_processes(2, "cuda")
    assert raised.value.exit_code == 2
    assert "error: device: cuda was asked for" in capfd.readouterr().err
