"""What `plan` makes of optimizers of whole tensors: their arrays block by block, their scratch, and
the seconds of their products."""

from __future__ import annotations

import pytest

from megatrain.engine.resolved import state_bytes, whole_update
from megatrain.optim import AdamW, Muon
from megatrain.settings import Settings
from tests.support import engine_of, tiny_config

SHORT = ("train.seq_len=512", "train.tokens_per_step=8192")


def test_the_plan_s_bytes_are_the_store_s():
    optimizer = Muon()
    with engine_of(tiny_config("qwen2-tied"), optimizer=optimizer, settings=Settings()) as engine:
        blocks, whole = engine.anatomy.blocks, whole_update(engine.optimizer, engine.skeleton)
        assert whole is not None
        for name, sizes in whole.state_bytes:
            stored = tuple(engine.store.array(name, block.index).nbytes for block in blocks)
            assert sizes == stored
        assert {*dict(whole.state_bytes)} == {array.name for array in optimizer.state_arrays}
        assert whole.host_scratch == optimizer.scratch([block.layout for block in blocks]).host
        assert state_bytes(optimizer, engine.skeleton) == ()
        assert whole_update(AdamW(), engine.skeleton) is None
        assert [flops > 0 for flops in whole.product_flops] == [0 < b < 4 for b in range(5)]


@pytest.mark.slow
def test_what_each_optimizer_holds_and_takes(megatrain):
    asked = ("plan qwen2.5-0.5b --gpu H200 --ram 200GiB --json memory.resident=0", *SHORT)
    adamw, muon = (megatrain(*asked, f"optimizer.name={name}").json for name in ("adamw", "muon"))
    assert muon["host"]["exp_avg"] == pytest.approx(4 * adamw["parameters"], rel=0.01)
    # the embedding, which is the head
    assert muon["host"]["exp_avg_sq"] == pytest.approx(4 * 151936 * 896, rel=0.01)
    for tier in ("host", "device"):
        assert "update's scratch" in muon[tier] and "update's scratch" not in adamw[tier]
    assert muon["timing"]["seconds"] > adamw["timing"]["seconds"]


def test_several_gpus_refuse_an_optimizer_of_whole_matrices(megatrain):
    line = "plan qwen2.5-0.5b --gpu H200 --ram 200GiB --gpus 2"
    refused = megatrain(line, "optimizer.name=muon", *SHORT, code=2).err
    assert "optimizer.name: muon needs whole matrices" in refused
    assert "use adamw or lion, or one GPU" in refused
