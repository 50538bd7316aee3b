"""What ranks measure together, on gloo with small arrays; and how processes tell of it."""

from __future__ import annotations

import pickle
from functools import partial
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from megatrain.errors import MegaTrainError, OutOfMemory
from megatrain.machine.profile import typical
from megatrain.machine.together import TOGETHER, joined
from megatrain.measure import ranks, update
from megatrain.measure.ranks import Together, measure_together
from megatrain.world import World
from tests.planned import LAPTOP
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def small(world: World) -> dict[str, Any]:
    update.PARAMETERS, ranks.SAMPLE_S = 1 << 14, 0.0
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
    ranks.SENT["cpu"], ranks.SAMPLE_S = 1 << 12, 0.0
    return ranks.network_rate(world, CPU)


def test_all_hosts_find_the_same_rate(tmp_path):
    found, *others = run_ranks(4, rate_of_the_network, tmp_path, hosts=2)
    assert found > 0 and others == [found] * 3


def calls_of(world: World) -> tuple[float, list[int]]:
    made: list[int] = []
    seconds = Together(world, CPU).seconds(lambda: made.append(world.rank))
    return seconds, [len(made)]


def test_all_ranks_make_as_many_calls(tmp_path):
    """Or collectives would wait for ever."""
    (seconds, calls), other = run_ranks(2, partial(calls_of), tmp_path)
    assert (seconds, calls) == other


def test_the_first_error_is_told():
    ends = [Pipe(duplex=False) for _ in range(3)]
    ends[1][1].send_bytes(pickle.dumps(OutOfMemory("no room")))
    with pytest.raises(OutOfMemory, match="no room"):
        ranks._first_told([ours for ours, _ in ends])
    ends[2][1].close()
    with pytest.raises(MegaTrainError, match="rank 2 died"):
        ranks._first_told([ours for ours, _ in ends])


def test_silence_ends(monkeypatch):
    monkeypatch.setattr(ranks, "LONGEST_S", 0.01)
    ours, _theirs = Pipe(duplex=False)
    with pytest.raises(MegaTrainError, match="have measured nothing"):
        ranks._first_told([ours])
