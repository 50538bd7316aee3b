"""How long a sequence a model can read, where its rotary factors are stretched."""

from __future__ import annotations

import pytest

from megatrain.models.family import longest_sequence
from tests.support import tiny_config


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "dynamic", "factor": 3.0}, 192),
    ],
)
def test_stretched_positions_count(rope, positions):
    changes = {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4, **rope}}
    assert longest_sequence(tiny_config("llama", **changes)) == positions


def test_a_model_without_rotary_embeddings_states_its_own():
    assert longest_sequence(tiny_config("gpt2", n_positions=48)) == 48
