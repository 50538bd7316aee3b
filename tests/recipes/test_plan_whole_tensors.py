"""What `plan` makes of optimizers of whole tensors: their arrays block by block, their scratch, and
the seconds of their products."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine.placement import open_store
from megatrain.engine.resolved import state_bytes, whole_update
from megatrain.memory.layout import ArraySpec
from megatrain.models.anatomy import layouts_of
from megatrain.models.skeleton import Skeleton
from megatrain.optim import AdamW, Muon
from megatrain.settings import Settings
from megatrain.world import World
from tests.support import engine_of, tiny_config

PER = {array.name: array.per for array in Muon().state_arrays}
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


@pytest.mark.parametrize("ranks", [2, 5])
def test_of_several_ranks_the_plan_s_are_those_of_the_one_that_has_most(ranks):
    optimizer, skeleton = Muon(), Skeleton(tiny_config("mixtral"), dtype=torch.bfloat16)
    skeleton.freeze(["*.layers.1.*norm*"])
    whole, layouts = whole_update(optimizer, skeleton, ranks), layouts_of(skeleton.anatomy)
    assert whole is not None
    held, given = [], (layouts, optimizer, "bfloat16", Settings())
    for rank in range(ranks):
        world, device = World(rank, ranks), torch.device("cpu")
        with open_store(*given, gradients=True, device=device, world=world) as store:
            for name, _ in whole.state_bytes:
                sizes = [store.array(name, block).nbytes for block in range(len(layouts))]
                held.append((name, sizes))
    for name, planned in whole.state_bytes:
        found = [sizes for of, sizes in held if of == name]
        assert tuple(map(max, zip(*found, strict=True))) == planned
        in_all = sum(
            layout.of(ArraySpec(name, torch.float32, per=PER[name])).numel for layout in layouts
        )
        assert sum(map(sum, found)) == 4 * in_all
    alone = whole_update(optimizer, skeleton)
    assert alone is not None and not any(alone.gathered_bytes)
    some = [bool(each) for each in whole.gathered_bytes]
    assert some == [flops > 0 for flops in alone.product_flops]
    assert whole.host_scratch == max(whole.gathered_bytes)
    shares = zip(whole.product_flops, alone.product_flops, strict=True)
    assert all(mine < every for mine, every in shares if every)


def test_what_each_optimizer_holds_and_takes(megatrain):
    asked = ("plan qwen2.5-0.5b --gpu H200 --ram 200GiB --json memory.resident=0", *SHORT)
    adamw, muon = (megatrain(*asked, f"optimizer.name={name}").json for name in ("adamw", "muon"))
    assert muon["host"]["exp_avg"] == pytest.approx(4 * adamw["parameters"], rel=0.01)
    # the embedding, which is the head
    assert muon["host"]["exp_avg_sq"] == pytest.approx(4 * 151936 * 896, rel=0.01)
    for tier in ("host", "device"):
        assert "update's scratch" in muon[tier] and "update's scratch" not in adamw[tier]
    assert muon["timing"]["seconds"] > adamw["timing"]["seconds"]


def test_two_gpus_gather_what_each_makes_orthogonal(megatrain):
    line = "plan qwen2.5-0.5b --gpu H200 --ram 200GiB --json memory.resident=0 --gpus"
    one, two = (megatrain(line, str(n), "optimizer.name=muon", *SHORT).json for n in (1, 2))
    layer = 14_912_384  # parameters
    assert two["device"]["gathered directions"] == pytest.approx(3 * layer, rel=0.01)
    assert "gathered directions" not in one["device"]
    assert two["host"]["update's scratch"] == pytest.approx(
        one["host"]["update's scratch"] / 2, rel=0.1
    )
