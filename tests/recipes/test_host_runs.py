"""`train` on two hosts: the run of one rank, in a folder that both see; the network is cut."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from megatrain.engine.verify import verify as check
from megatrain.errors import ConfigError
from megatrain.recipes import session
from megatrain.recipes.ranks import liveness
from megatrain.recipes.session import seen_by_all
from megatrain.world import World
from tests.helpers.commands import wait_for
from tests.helpers.namespaces import TwoHosts, two_hosts
from tests.helpers.ranks import Started, run_ranks
from tests.recipes.test_rank_runs import (
    SOON_S,
    assert_steps_agree,
    looked_after_often,
    silent_soon,
    slowly,
    train,
    trained_to,
)

__all__ = ["looked_after_often", "silent_soon"]  # fixtures


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    monkeypatch.setattr(liveness, "STORE_TIMEOUT", timedelta(seconds=2))
    with two_hosts() as made:
        yield made


@pytest.mark.slow
def test_two_hosts_train_as_one_rank(hosts, project, megatrain, monkeypatch):
    """Each has a cache of its own; a family is checked on the first."""
    monkeypatch.setattr("megatrain.recipes.verify.check", check)

    def first(rank: int) -> None:
        hosts.enter(rank)
        os.environ["MEGATRAIN_CACHE"] = f"cache-{rank}"

    started = Started(2, train("train.max_steps=3"), first=first)
    assert started.wait() == [0, 0], started.said()
    (verdict,) = project.glob("cache-?/verified-*.json")
    assert verdict.parent.name == "cache-0"
    assert json.loads(verdict.read_text())["state"] == "passed"
    megatrain(train("output=alone", "train.max_steps=3"))
    assert_steps_agree(Path("run"), Path("alone"), "loss", "grad_norm", "lr", "target_tokens")


@pytest.mark.slow
def test_when_the_network_is_cut_both_ends_stop_and_say_why(hosts, project, silent_soon):
    def first(rank: int) -> None:
        hosts.enter(rank)
        slowly(rank)

    started = Started(2, train(), first=first)
    wait_for(lambda: trained_to(2))
    hosts.cut()
    cut = time.monotonic()
    assert started.wait(SOON_S) == [1, 1]
    assert time.monotonic() - cut < SOON_S
    one, other = started.errors()
    assert one == ["error: rank 1 on host-1 has said nothing for 2 s"]
    gone = "has died, was stopped, or cannot be reached from host-1"
    assert other == [f"error: rank 0 on host-0 {gone}"]


def looked(world: World, folders: list[Path]) -> str:
    try:
        seen_by_all(folders[world.rank], world)
    except ConfigError as error:
        return str(error)
    return "seen"


def test_a_folder_that_one_host_does_not_see_is_refused_on_all(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "SEEN_WITHIN_S", 0.2)
    (tmp_path / "meetings").mkdir()
    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder in (shared, own):
        folder.mkdir()

    def look(folders: list[Path], hosts: int) -> list[str]:
        job = lambda world: looked(world, folders)  # noqa: E731
        return run_ranks(2, job, tmp_path / "meetings", hosts=hosts)

    assert look([shared, shared], 2) == ["seen", "seen"]
    assert look([shared, own], 1) == ["seen", "seen"]  # of one host nobody asks
    said = look([shared, own], 2)
    assert "shared: rank 1 on " in said[0] and "own: rank 1 on " in said[1]
    assert all("put output on a file system that all hosts share" in each for each in said)
    assert [*shared.iterdir(), *own.iterdir()] == []
