"""Ranks that share sequences compute what one rank computes, up to the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.engine.ranks.context_parallel import ContextParallel
from megatrain.errors import ConfigError, DataError
from megatrain.recipes.api import plan
from megatrain.settings import ALL, Settings
from megatrain.world import World
from tests.engine.test_ranks import assert_one, joined
from tests.helpers.compare import differing
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
    "attention kept": {"settings": Settings(**CHUNK, keep_attention=ALL, offload_activations=True)},
    "chunked layers, unclipped": {
        "settings": Settings(**CHUNK, layer_chunk_tokens=2),
        "max_grad_norm": None,
    },
}


SEVERAL = [micro_batches(seed, [(2, 10), (1, 7), (1, 6)]) for seed in range(2)]


def given_for(how: str) -> dict[str, Any]:
    plain = {"steps": STEPS, "settings": Settings(**CHUNK), "precision": "float32"}
    return {**plain, **HOW[how], "exact": False, "sharing": 2}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_two_ranks_that_share_sequences_are_one(how, on_ranks):
    assert_one(on_ranks, 2, **given_for(how))


@pytest.mark.slow
def test_a_slow_lane_of_one_rank_changes_no_bit(on_ranks):
    given = given_for("three heads to a group")
    found, _ = assert_one(on_ranks, 2, **given)
    late, _ = assert_one(on_ranks, 2, **given, slow=(1, "exchange"))
    assert differing(*(joined([each[2] for each in of]) for of in (late, found))) == []


@pytest.mark.slow
def test_teams_have_micro_batches_of_their_own(on_ranks):
    """Three micro-batches are two and one; of one, the other group has none."""
    steps = [*SEVERAL, SEVERAL[0][:1]]
    assert_one(on_ranks, 4, exact=False, steps=steps, sharing=2, precision="float32")


# -- what is not in pieces -------------------------------------------------------------------------


def mixed_up(world: World) -> str:
    sharing = world.sharing_sequences(2)
    with engine_of("llama", world=sharing) as engine, pytest.raises(DataError) as told:
        engine.train_step(STEPS[world.rank])
    return str(told.value)


def test_ranks_that_share_sequences_cannot_be_given_others(on_ranks):
    assert all("got different micro-batches" in told for told in on_ranks(2, mixed_up))


def sharing(size: int) -> ContextParallel:
    world = World(0, size, 0, size, cp_size=size)
    return ContextParallel(world, tiny_config("llama"), lambda *_: None)


def test_padding_that_the_model_cannot_read_is_refused():
    (batch,) = micro_batches(0, [(1, 13)])
    with pytest.raises(DataError, match="13 tokens is padded to 14 for 2 ranks that share it, but"):
        sharing(2).lengthened(batch, 13)
    square = batch | {"attention_mask": torch.ones(1, 1, 13, 13)}
    with pytest.raises(DataError, match=r"attention_mask must be \[rows, tokens\]"):
        sharing(2).lengthened(square)
    assert sharing(13).lengthened(square, 13) is square


SHARED, DYNAMIC = World(0, 2, 0, 2, cp_size=2), {"rope_type": "dynamic", "factor": 2.0}
OF_LENGTH = "rotary factors that follow the length"
NOT_IN_PIECES: dict[str, tuple[dict[str, Any], str]] = {
    "compiled": ({"settings": Settings(compile=True)}, "compiled layers"),
    "balanced": ({"model": "mixtral", "router_aux_loss_coef": 0.1}, "router_aux_loss_coef: 0"),
    "dropout": ({"model": tiny_config("gpt2", resid_pdrop=0.1)}, "dropout"),
    "dynamic": ({"model": tiny_config("llama", rope_parameters=DYNAMIC)}, OF_LENGTH),
    "attention of its own": ({"model": "falcon-7b"}, "mix tokens outside of attention"),
    "recurrent": ({"model": "bamba"}, "mix tokens outside of attention"),
    "linear": ({"model": "qwen3-next"}, "mix tokens outside of attention"),
}


@pytest.mark.parametrize("what", NOT_IN_PIECES)
def test_what_is_not_computed_in_pieces_is_refused(what):
    options, words = NOT_IN_PIECES[what]
    with pytest.raises(ConfigError, match=f"context_parallel: 2 does not work with .*{words}"):
        engine_of(**{"model": "llama", "world": SHARED, **options})


def test_a_plan_refuses_them_too(tmp_path):
    tiny_config("falcon-7b").save_pretrained(tmp_path)
    asked: Any = {"gpus": 2, "tokens_per_step": 64, "train": {"context_parallel": 2}}
    with pytest.raises(ConfigError, match="2 does not work with a falcon model"):
        plan(tmp_path, gpu="H100", ram="128GiB", seq_len=32, **asked)
