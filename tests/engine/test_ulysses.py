"""Ranks that share sequences compute what one rank computes, up to the order of sums; attention is
that of one rank in every bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatrain.errors import ConfigError, DataError
from megatrain.models.ulysses import Around, attend, call_of_piece, piece_of
from megatrain.settings import Settings
from megatrain.world import World
from tests.engine.test_ranks import arrays_of, assert_near
from tests.ranks import run_ranks
from tests.support import engine_of, micro_batches, tiny_config

CHUNK: dict[str, Any] = {"head_chunk_tokens": 5}
STEPS = [micro_batches(seed, [(2, 10), (1, 6), (2, 7)]) for seed in range(3)]
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


PACKED = [packed(seed, [(2, 10), (1, 13)]) for seed in range(3)]
HOW: dict[str, dict[str, Any]] = {
    "llama, three heads to a group": {"family": tiny_config("llama", **ODD)},
    "one group": {"family": tiny_config("llama", num_key_value_heads=1)},
    "heads that cannot be dealt evenly": {
        "family": tiny_config("qwen3", num_attention_heads=3, num_key_value_heads=3)
    },
    "tied": {"family": "llama-tied"},
    "windows": {"family": "mistral-sliding"},
    "two kinds of layers": {"family": "gemma3"},
    "capped, eager": {"family": "gemma2"},
    "sinks": {"family": tiny_config("gpt-oss", num_attention_heads=6)},
    "experts": {"family": "mixtral"},
    "packed": {"steps": PACKED},
    "packed, windows": {"steps": PACKED, "family": "mistral-sliding"},
    "padded on the left": {
        "steps": [micro_batches(seed, [(2, 10), (2, 7)], pad_left=True) for seed in range(3)]
    },
    "retained": {"settings": Settings(**CHUNK, retained=2)},
    "retained on the host": {
        "settings": Settings(**CHUNK, retained=1, offload_activations=True, retained_on_host=1)
    },
    "two backward passes": {"settings": Settings(**CHUNK, second_backward=True)},
    "chunked layers, unclipped": {
        "settings": Settings(**CHUNK, layer_chunk_tokens=2),
        "max_grad_norm": None,
    },
    "partly frozen": {"freeze": ("model.embed_tokens.*", "*.layers.0.*", "*.layers.1.*proj*")},
}


def train(world: World, pieces: int = 1, **given: Any) -> Any:
    steps, family = given.pop("steps", STEPS), given.pop("family", "llama")
    world = world.sharing_sequences(pieces)
    options = {"settings": Settings(**CHUNK), **given}
    with engine_of(family, world=world, **options) as engine:
        mine = [step[world.team :: world.teams] for step in steps]
        found = [engine.train_step(each) for each in mine]
        held_out = engine.evaluate(mine[0]).loss
        told = [(one.loss, one.grad_norm, one.target_tokens, one.skipped) for one in found]
        return told, held_out, arrays_of(engine)


@pytest.mark.parametrize("how", HOW)
def test_two_ranks_that_share_sequences_are_one(how, tmp_path):
    found = run_ranks(2, partial(train, pieces=2, **HOW[how]), tmp_path)
    assert_near(found, train(World(), **HOW[how]))
