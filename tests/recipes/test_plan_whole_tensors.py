"""What `plan` makes of optimizers of whole tensors: their arrays block by block, their scratch, and the seconds of their products."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain.engine.resolved import state_bytes, whole_update
from megatrain.optim import AdamW, Muon
from megatrain.settings import Settings
from tests.commands import Command
from tests.support import engine_of, tiny_config

SHORT = ("train.seq_len=512", "train.tokens_per_step=8192")


def test_the_plan_s_bytes_are_the_store_s() -> None:
    optimizer = Muon()
    with engine_of(tiny_config("qwen2-tied"), optimizer=optimizer, settings=Settings()) as engine:
        whole = whole_update(engine.optimizer, engine.skeleton)
        assert whole is not None
        for name, sizes in whole.state_bytes:
            assert sizes == tuple(
                engine.store.array(name, block.index).nbytes for block in engine.anatomy.blocks
            )
        assert {name for name, _ in whole.state_bytes} == {
            array.name for array in optimizer.state_arrays
        }
        assert (
            whole.host_scratch
            == optimizer.scratch([block.layout for block in engine.anatomy.blocks]).host
        )
        assert state_bytes(optimizer, engine.skeleton) == ()
        assert whole_update(AdamW(), engine.skeleton) is None
        assert [flops > 0 for flops in whole.product_flops] == [0 < b < 4 for b in range(5)]


def test_what_each_optimizer_holds_and_takes(megatrain: Command) -> None:
    plans: dict[str, Any] = {}
    for name in ("adamw", "muon"):
        done = megatrain(
            "plan",
            "qwen2.5-7b",
            "--gpu",
            "H200",
            "--ram",
            "200GiB",
            "--json",
            f"optimizer.name={name}",
            "memory.resident=0",
            *SHORT,
        )
        assert done.code == 0, done.err
        plans[name] = json.loads(done.out)
    host = {name: plan["host"] for name, plan in plans.items()}
    parameters = plans["adamw"]["parameters"]
    assert host["muon"]["exp_avg"] == pytest.approx(4 * parameters, rel=0.01)
    assert host["muon"]["exp_avg_sq"] == pytest.approx(
        4 * 2 * 152064 * 3584, rel=0.01
    )  # embedding and head
    assert "update's scratch" in host["muon"]
    assert "update's scratch" in plans["muon"]["device"]
    assert "update's scratch" not in plans["adamw"]["device"]
    assert plans["muon"]["timing"]["seconds"] > plans["adamw"]["timing"]["seconds"]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("muon", "moments", "bfloat16"),
        ("adamw", "momentum", "0.9"),
    ],
)
def test_a_key_of_another_optimizer_is_refused(
    megatrain: Command, name: str, key: str, value: str
) -> None:
    done = megatrain("plan", "cfg.yaml", f"optimizer.name={name}", f"optimizer.{key}={value}")
    assert done.code == 2
    assert f"command line: optimizer.{key}: {name} has no {key}; remove the key" in done.err
