"""Several ranks compute what one computes with the same micro-batches, to the bit where the order
of sums is the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from megatrain.engine.batches import Batch
from megatrain.engine.engine import Engine
from megatrain.engine.objective import StepResult
from megatrain.losses.sequences import REFERENCE
from megatrain.optim import AdamW, Lion
from megatrain.recipes.loop import evaluated
from megatrain.recipes.signals import StopRequest
from megatrain.settings import ALL, Settings
from megatrain.world import World
from tests.engine.test_images import row_of, steps_of
from tests.engine.test_preference_steps import LOSSES, cut, examples, model_for
from tests.engine.test_preference_steps import joined as joined_rows
from tests.helpers.compare import apart, differing, distance
from tests.helpers.multimodal import multimodal_config
from tests.helpers.support import engine_of, micro_batches, tiny_config

CHUNK: dict[str, Any] = {"head_chunk_tokens": 4096}
SEVERAL = [micro_batches(seed, [(2, 9), (1, 6), (2, 7), (1, 9), (3, 5)]) for seed in range(2)]
STEPS = [micro_batches(seed, [(2, 9), (1, 6)]) for seed in range(3)]
HOW: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "bfloat16": {},
    "int8 moments": {"optimizer": AdamW(lr=1e-3, weight_decay=0.1, moments="int8")},
    "lion": {"optimizer": Lion(lr=1e-4, weight_decay=0.1)},
    "offloaded": {"settings": Settings(**CHUNK, offload_activations=True)},
    "frozen": {"freeze": ("model.embed_tokens.*", "*.layers.1.*proj*")},
    "half a layer frozen, resident": {
        "freeze": ("*.layers.*.mlp.*", "*.layers.0.*"),
        "settings": Settings(**CHUNK, resident=3),
    },
    "dropout": {"family": tiny_config("gpt2", resid_pdrop=0.4)},
    "resident": {"settings": Settings(**CHUNK, resident=ALL)},
    "replicated": {"settings": Settings(**CHUNK, resident=1, replicated=3)},
    "resident, unclipped": {
        "settings": Settings(**CHUNK, resident=3, retained=1),
        "max_grad_norm": None,
    },
    "resident, two backward passes": {
        "settings": Settings(**CHUNK, resident=3, second_backward=True),
    },
    "resident, a layer twice": {"settings": Settings(**CHUNK, resident=1, second_backward=1)},
}


def train(
    world: World,
    steps: Sequence[Sequence[Batch]],
    family: Any = "llama",
    slow: tuple[int, str] | None = None,
    sharing: int = 1,
    **options: Any,
) -> Any:
    """Losses, norms, and this rank's share of every array. slow: a rank, and a lane of its.
    sharing: so many ranks share sequences, unless one is alone."""
    if sharing > 1 and not world.is_alone:
        world = world.sharing_sequences(sharing)
    given = {"precision": "bfloat16", "settings": Settings(**CHUNK), **options}
    with engine_of(family, world=world, **given) as engine:
        if slow and slow[0] == world.rank:
            engine.parts.lanes[slow[1]].delay = partial(time.sleep, 0.01)
        mine = [step[world.dp_rank :: world.dp_size] for step in steps]
        found = [engine.train_step(each) for each in mine]
        held_out = engine.evaluate(mine[0]).loss
        told = [(one.loss, one.grad_norm, one.target_tokens, one.skipped) for one in found]
        return told, held_out, arrays_of(engine)


def arrays_of(engine: Engine) -> dict[str, torch.Tensor]:
    found = {}
    for block in range(len(engine.anatomy.blocks)):
        engine.wait_ready(block)
        for name in engine.store.arrays:
            if name not in ("grad", "grad_sum"):
                found[f"{name} {block}"] = engine.store.lasting(name, block).clone()
    return found


def assert_near(ours: Any, theirs: Any) -> None:
    """Equal up to the order of sums, of `train` on several ranks and on one."""
    told, held_out, arrays = theirs
    for each, held_out_there, _ in ours:
        for found, expected in zip(each, told, strict=True):
            assert found[:2] == pytest.approx(expected[:2], rel=1e-5)
            assert found[2:] == expected[2:]
        assert held_out_there == pytest.approx(held_out, rel=1e-5)
    for name, found in joined([arrays for *_, arrays in ours]).items():
        assert distance(found, arrays[name]) < 1e-4, name


def joined(of_ranks: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([of[name] for of in of_ranks]) for name in of_ranks[0]}


def in_order(ranks: int, hosts: int, found: list[Any]) -> list[Any]:
    """Results of ranks, in the order of the shares that they own."""
    return [found[rank] for rank in World(0, ranks, 0, ranks // hosts).owners]


def assert_one(on_ranks: Any, ranks: int, hosts: int = 1, exact: bool = True, **given: Any) -> Any:
    """Ranks compute what one does: to the bit, or up to the order of sums. Returns their results,
    and that one's."""
    told, held_out, arrays = expected = train(World(), **given)
    found = in_order(ranks, hosts, on_ranks(ranks, partial(train, **given), hosts=hosts))
    if not exact:
        assert_near(found, expected)
        return found, expected
    assert [each[:2] for each in found] == [(told, held_out)] * ranks
    assert differing(joined([arrays for *_, arrays in found]), arrays) == []
    return found, expected


SEES = multimodal_config("qwen3-vl")
NOTHING = [{**STEPS[0][0], "labels": torch.full_like(STEPS[0][0]["labels"], -100)}]
FP32: dict[str, Any] = {"precision": "float32"}
NEAR: dict[str, Any] = {"exact": False, "steps": SEVERAL, **FP32}


def in_groups(resident: int, sums: int) -> dict[str, Any]:
    """Five micro-batches: one rank has three, in three groups, the other two."""
    more: Any = {"groups": 2, "group_size": 1, "sums_on_device": sums, "resident": resident}
    return {"settings": Settings(**CHUNK, **more)}


QUICK: dict[str, dict[str, Any]] = {
    **{how: {"ranks": 2, **HOW[how]} for how in ("float32", "bfloat16", "resident, unclipped")},
    "groups": {"ranks": 2, **NEAR, **in_groups(0, 0)},
    "groups, sums stay": {"ranks": 2, **NEAR, **in_groups(0, ALL)},
    "groups, resident": {"ranks": 2, **NEAR, **in_groups(2, 3)},
    "balanced routers": {"ranks": 3, **NEAR, "family": "mixtral", "router_aux_loss_coef": 0.1},
    "a skipped step": {"ranks": 2, "steps": [NOTHING]},
    "images": {
        "ranks": 2,
        "exact": False,
        "family": SEES,
        "image_row": row_of(SEES),
        **FP32,
        "steps": [steps_of(SEES)] * 2,
    },
}
SLOW: dict[str, dict[str, Any]] = {
    **{how: {"ranks": 2, **HOW[how]} for how in HOW if how not in QUICK},
    "two hosts": {"ranks": 2, "hosts": 2},
    "two hosts, two backward passes": {
        "ranks": 2,
        "hosts": 2,
        "settings": Settings(**CHUNK, second_backward=True),
    },
    "two hosts, unclipped": {"ranks": 2, "hosts": 2, "max_grad_norm": None},
    "two hosts, frozen": {"ranks": 2, "hosts": 2, **HOW["half a layer frozen, resident"]},
    "tied": {"ranks": 2, **NEAR, "family": "llama-tied"},
    "three": {"ranks": 3, **NEAR, "family": "gemma2"},
    "four": {"ranks": 4, **NEAR, "family": "mixtral"},
    "one without micro-batches": {
        "ranks": 3,
        "exact": False,
        "steps": STEPS[:2],
        "settings": Settings(**CHUNK, offload_activations=True, retained_on_host=1),
        **FP32,
    },
}


@pytest.mark.parametrize(
    "how", [*QUICK, *(pytest.param(how, marks=pytest.mark.slow) for how in SLOW)]
)
def test_ranks_are_one(how, on_ranks):
    given = {"steps": STEPS, **(QUICK | SLOW)[how]}
    _, (told, *_) = assert_one(on_ranks, **given)
    assert [skipped for *_, skipped in told] == [how == "a skipped step"] * len(told)


@pytest.mark.slow
def test_shares_may_be_on_nvme(tmp_path, on_ranks):
    """Each rank has files of its own in the same folder."""
    far: dict[str, Any] = {"nvme_blocks": 3, "nvme_folders": (tmp_path,)}
    found, _ = assert_one(on_ranks, 2, steps=STEPS, settings=Settings(**CHUNK, **far))
    *_, arrays = train(World(), STEPS)
    assert differing(joined([arrays for *_, arrays in found]), arrays) == []


def read(world: World, step: Sequence[Batch] = STEPS[0]) -> Any:
    with engine_of("llama-tied", world=world) as engine:
        engine.train_step(step[world.rank :: world.size])
        weights = {name: tensor.clone() for name, tensor in engine.iter_weights()}
        prompt = STEPS[0][0]["input_ids"]
        return (
            weights,
            engine.logits(prompt),
            engine.generate(prompt[:1].tolist(), max_new_tokens=3)[0].ids,
        )


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), (4, 2)])
def test_every_rank_reads_the_whole_model(ranks, hosts, on_ranks):
    first = partial(read, step=SEVERAL[0][:ranks])
    weights, logits, answer = first(World())
    for theirs, their_logits, their_answer in on_ranks(ranks, first, hosts=hosts):
        assert apart(theirs, weights, 1e-4) == []
        assert distance(their_logits, logits) < 1e-4
        assert their_answer == answer


def of_answers(world: World, name: str, size: int = 1, **settings: Any) -> Any:
    """Steps, an evaluation in two sweeps and in one, and weights. size: of micro-batches, as `cut`
    has it."""
    loss = LOSSES[name]
    rows: list[Batch] = [{**row, REFERENCE: row[REFERENCE] - 5} for row in examples(loss, 0)]
    batches = [dict(joined_rows(part)) for part in cut(loss, rows, size)]
    mine = batches[world.rank :: world.size]
    with engine_of(model_for(loss), world=world, settings=Settings(**CHUNK, **settings)) as engine:
        results: list[Any] = [engine.train_step(mine, loss) for _ in range(2)]
        tokens = sum(batch["input_ids"].numel() for batch in batches) // (2 * world.size)
        results.append(evaluated(engine, batches, loss, tokens, StopRequest()))
        results.append(engine.evaluate(mine, loss))
        return results, {name: tensor.clone() for name, tensor in engine.iter_weights()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "orpo", "reward", "aot", "kto", "policy"])
def test_losses_over_answers_are_those_of_one_rank(name, on_ranks):
    results, weights = of_answers(World(), name)
    in_two, in_one = results[2:]
    assert in_two.loss == pytest.approx(in_one.loss, rel=1e-6)
    assert in_two.metrics == pytest.approx(in_one.metrics, rel=1e-6)
    for theirs, their_weights in on_ranks(2, partial(of_answers, name=name)):
        for found, expected in zip(theirs, results, strict=True):
            assert found.loss == pytest.approx(expected.loss, rel=2e-5)
            assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
            if isinstance(found, StepResult):
                assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert all(distance(their_weights[name], weights[name]) < 1e-4 for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "twice"), [("kto", 3, False), ("aot", 2, True), ("kto", 2, True)]
)
def test_a_loss_over_a_whole_step_sees_the_rows_of_all_ranks(name, ranks, twice, on_ranks):
    """To the bit, with a micro-batch for each of two: of KTO the second rank has what is not
    trained on, and the third nothing."""
    given: dict[str, Any] = {"name": name, "size": 3 if name == "aot" else 5}
    given["second_backward"] = twice
    results, weights = of_answers(World(), **given)
    for theirs, their_weights in on_ranks(ranks, partial(of_answers, **given)):
        for found, expected in zip(theirs, results, strict=True):
            assert (found.loss, found.metrics) == (expected.loss, expected.metrics)
        assert differing(their_weights, weights) == []
    assert results[0].metrics.get("kl", 1) > 0
