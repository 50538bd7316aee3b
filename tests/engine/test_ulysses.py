"""Ranks that share sequences compute what one rank computes, up to the order of sums."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch

from megatrain.engine.ranks.context_parallel import ContextParallel
from megatrain.engine.streams import Compute, Lane
from megatrain.errors import ConfigError, DataError
from megatrain.settings import Settings
from megatrain.world import World
from tests.engine.test_ranks import arrays_of, assert_near, joined
from tests.helpers.ranks import run_ranks
from tests.helpers.support import engine_of, micro_batches, tiny_config

CHUNK: dict[str, Any] = {"head_chunk_tokens": 5}
STEPS = [micro_batches(seed, [(2, 10), (1, 7)]) for seed in range(3)]
ODD = {"num_attention_heads": 6, "hidden_size": 48}  # three heads to a group


def packed(seed: int, shapes: Any) -> list[dict[str, torch.Tensor]]:
    """Rows of 4, 3 and more tokens in each sequence."""
    found = []
    for batch in micro_batches(seed, shapes):
        tokens = batch["input_ids"].shape[1]
        positions = torch.cat([torch.arange(4), torch.arange(3), torch.arange(tokens - 7)])
        labels = batch["labels"].masked_fill(positions == 0, -100)
        ids = batch["input_ids"]
        found.append(
            {"input_ids": ids, "labels": labels, "position_ids": positions.expand_as(ids).clone()}
        )
    return found


PACKED = [packed(seed, [(2, 11)]) for seed in range(3)]
HOW: dict[str, dict[str, Any]] = {
    "three heads to a group": {"family": tiny_config("llama", **ODD)},
    "heads that cannot be dealt evenly": {
        "family": tiny_config("qwen3", num_attention_heads=3, num_key_value_heads=3)
    },
    "tied, in groups": {
        "family": "llama-tied",
        "settings": Settings(**CHUNK, groups=2, group_size=1),
    },
    "windows": {"family": "mistral-sliding"},
    "two kinds of layers": {"family": "gemma3"},
    "capped, eager": {"family": "gemma2"},
    "sinks": {"family": tiny_config("gpt-oss", num_attention_heads=6)},
    "experts": {"family": "mixtral"},
    "packed, windows": {"steps": PACKED, "family": "mistral-sliding"},
    "padded on the left": {
        "steps": [micro_batches(seed, [(2, 10), (2, 7)], pad_left=True) for seed in range(3)]
    },
    "retained, partly frozen": {
        "settings": Settings(**CHUNK, retained=2),
        "freeze": ("model.embed_tokens.*", "*.layers.0.*", "*.layers.1.*proj*"),
    },
    "retained on the host": {
        "settings": Settings(**CHUNK, retained=1, offload_activations=True, retained_on_host=1)
    },
    "two backward passes": {"settings": Settings(**CHUNK, second_backward=True)},
    "chunked layers, unclipped": {
        "settings": Settings(**CHUNK, layer_chunk_tokens=2),
        "max_grad_norm": None,
    },
}


def train(world: World, late: str | None = None, **given: Any) -> Any:
    """As `test_ranks.train`, of ranks that share sequences or one alone. late: a lane that is slow
    on the last rank."""
    steps, family = given.pop("steps", STEPS), given.pop("family", "llama")
    options = {"settings": Settings(**CHUNK), **given}
    with engine_of(family, world=world, **options) as engine:
        if late and world.rank == world.size - 1:
            engine.parts.lanes[late].delay = partial(time.sleep, 0.005)
        mine = [step[world.dp_rank :: world.dp_size] for step in steps]
        found = [engine.train_step(each) for each in mine]
        held_out = engine.evaluate(mine[0]).loss
        told = [(one.loss, one.grad_norm, one.target_tokens, one.skipped) for one in found]
        return told, held_out, arrays_of(engine)


def all_of(world: World) -> Any:
    """Two ranks' results, in one go: they are slow to start."""
    world = world.sharing_sequences(2)
    found = {how: train(world, **HOW[how]) for how in HOW}
    found["late"] = train(world, late="exchange", **HOW["three heads to a group"])
    return found | {"refused": mixed_up(world)}


@pytest.fixture(scope="module")
def of_one() -> dict[str, Any]:
    return {how: train(World(), **HOW[how]) for how in HOW}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory, of_one: dict[str, Any]) -> list[Any]:
    """After `of_one`: what was imported and found out of the models then is there for both."""
    return run_ranks(2, all_of, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_two_ranks_that_share_sequences_are_one(how, of_ranks, of_one):
    assert_near([found[how] for found in of_ranks], of_one[how])


@pytest.mark.slow
def test_a_slow_lane_of_one_rank_changes_no_bit(of_ranks):
    of_both = ("late", "three heads to a group")
    found, expected = (joined([found[how][2] for found in of_ranks]) for how in of_both)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


SEVERAL = [micro_batches(seed, [(2, 10), (1, 7), (1, 6)]) for seed in range(2)]


def teams(world: World) -> Any:
    return train(world.sharing_sequences(2), steps=[*SEVERAL, SEVERAL[0][:1]])


@pytest.mark.slow
def test_teams_have_micro_batches_of_their_own(tmp_path):
    """Three micro-batches are two and one; of one, the other group has none."""
    expected = train(World(), steps=[*SEVERAL, SEVERAL[0][:1]])
    assert_near(run_ranks(4, teams, tmp_path), expected)


# -- what is not in pieces -------------------------------------------------------------------------


def mixed_up(world: World) -> str:
    with engine_of("llama", world=world) as engine, pytest.raises(DataError) as told:
        engine.train_step(STEPS[world.rank])
    return str(told.value)


@pytest.mark.slow
def test_ranks_that_share_sequences_cannot_be_given_others(of_ranks):
    assert all("got different micro-batches" in found["refused"] for found in of_ranks)


def sharing(size: int) -> ContextParallel:
    world, lane = World(0, size, 0, size, cp_size=size), Lane("exchange")
    return ContextParallel(world, tiny_config("llama"), Compute(torch.device("cpu")), lane)


def test_padding_that_the_model_cannot_read_is_refused():
    (batch,) = micro_batches(0, [(1, 13)])
    with pytest.raises(DataError, match="13 tokens is padded to 14 for 2 ranks that share it, but"):
        sharing(2).lengthened(batch, 13)
    square = batch | {"attention_mask": torch.ones(1, 1, 13, 13)}
    with pytest.raises(DataError, match=r"attention_mask must be \[rows, tokens\]"):
        sharing(2).lengthened(square)
    assert sharing(13).lengthened(square, 13) is square


SHARED = World(0, 2, 0, 2, cp_size=2)
NOT_IN_PIECES: dict[str, tuple[dict[str, Any], str]] = {
    "compiled": ({"settings": Settings(compile=True)}, "compiled layers"),
    "balanced": ({"model": "mixtral", "router_aux_loss_coef": 0.1}, "router_aux_loss_coef: 0"),
    "dropout": ({"model": tiny_config("gpt2", resid_pdrop=0.1)}, "dropout"),
    "dynamic": (
        {"model": tiny_config("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0})},
        "rotary factors that follow the length",
    ),
    "attention of its own": ({"model": "falcon-7b"}, "mix tokens outside of attention"),
    "recurrent": ({"model": "bamba"}, "mix tokens outside of attention"),
    "linear": ({"model": "qwen3-next"}, "mix tokens outside of attention"),
}


@pytest.mark.parametrize("what", NOT_IN_PIECES)
def test_what_is_not_computed_in_pieces_is_refused(what):
    options, words = NOT_IN_PIECES[what]
    with pytest.raises(ConfigError, match=f"context_parallel: 2 does not work with .*{words}"):
        engine_of(**{"model": "llama", "world": SHARED, **options})
