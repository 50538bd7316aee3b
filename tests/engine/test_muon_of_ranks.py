"""Muon on several ranks: wherever state is, and with any lane late, the bits of one rank that has
the same micro-batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatrain.optim import Muon, muon
from megatrain.settings import ALL, Settings
from megatrain.world import World
from tests.engine.test_ranks import CHUNK, SEVERAL, STEPS, assert_near, joined, train
from tests.support import engine_of

OPTIMIZER = Muon(lr=2e-3, adamw_lr=1e-3, weight_decay=0.1)
FAR: dict[str, Any] = {"nvme_blocks": ALL, "nvme_arrays": "all"}
HOW: dict[str, dict[str, Any]] = {
    "experts": {"family": "mixtral", "slow": (1, "exchange")},
    "resident, frozen": {
        "freeze": ("model.embed_tokens.*", "*.layers.1.*proj*"),
        "settings": Settings(**CHUNK, resident=ALL),
    },
    "half resident, unclipped": {
        "family": "llama-tied",
        "settings": Settings(**CHUNK, resident=2),
        "max_grad_norm": None,
        "slow": (1, "update"),
    },
    "two backward passes, replicated": {
        "settings": Settings(**CHUNK, second_backward=True, resident=1, replicated=3),
        "precision": "float32",
    },
    "read from one copy": {"settings": Settings(**CHUNK, transport="read"), "slow": (0, "update")},
    "on NVMe": {"settings": FAR},
}


@pytest.fixture(autouse=True)
def few_experts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks' shares end in some of a tensor's matrices, and between others."""
    monkeypatch.setattr(muon, "AT_ONCE", 1)


@pytest.mark.parametrize("how", HOW)
def test_two_ranks_of_one_micro_batch_are_one_rank_of_two(how, tmp_path, on_ranks):
    given = {"optimizer": OPTIMIZER, "steps": STEPS, **HOW[how]}
    if given.get("settings") is FAR:
        given["settings"] = Settings(**CHUNK, **FAR, nvme_folders=(tmp_path,))
    told, held_out, arrays = train(World(), **given)
    found = on_ranks(2, partial(train, **given))
    assert [theirs[:2] for theirs in found] == [(told, held_out)] * 2
    ours = joined([arrays for *_, arrays in found])
    assert ours.keys() == arrays.keys()
    assert [name for name in arrays if not torch.equal(ours[name], arrays[name])] == []


def test_two_hosts_of_two_are_one_up_to_the_order_of_sums(on_ranks):
    given: dict[str, Any] = {"steps": SEVERAL, "precision": "float32", "optimizer": OPTIMIZER}
    found = on_ranks(4, partial(train, **given), hosts=2)
    owners = World(0, 4, 0, 2).owners
    assert_near([found[rank] for rank in owners], train(World(), **given))


def fails(world: World) -> str:
    """With the first of three blocks' update, before its directions are gathered; and closes."""
    with engine_of("llama", world=world, optimizer=OPTIMIZER) as engine:
        engine.train_step(STEPS[0][world.rank :: 2])
    with engine_of("llama", world=world, optimizer=OPTIMIZER) as engine:
        vars(engine.parts.updater)["delay"] = [].index
        engine.train_step(STEPS[0][world.rank :: 2])
        with pytest.raises(ValueError, match="not in list") as told:
            engine.wait_ready(2)
        return str(told.value)


def test_an_engine_is_closed_whose_updates_wait_or_have_failed(on_ranks):
    assert on_ranks(2, fails) == ["0 is not in list"] * 2
