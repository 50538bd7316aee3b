"""On CUDA: graphs that wait in host RAM change no bit, eager and compiled, and their memory is used for others meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatrain.settings import ALL, Settings
from tests.support import differing, engine_of, full_batches, state_of, tiny_config, train_engine

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore"),  # of torch.compile's own
]
STEPS = [full_batches(seed, [(2, 16)] * 3) for seed in range(3)]
SENT = Settings(offload_activations=True, retained=1, retained_on_host=2, head_chunk_tokens=7)


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"compile": True}, {"compile": True, "cheap_retention": True}],
    ids=["eager", "whole", "cheap"],
)
def test_they_change_no_bit(changes, precision):
    results = []
    for settings in (
        replace(SENT, **changes),
        replace(SENT, **changes, retained=ALL, retained_on_host=0),
    ):
        config = tiny_config("llama", num_hidden_layers=4, hidden_size=64, intermediate_size=128)
        with engine_of(config, device="cuda", precision=precision, settings=settings) as engine:
            results.append((train_engine(engine, STEPS), state_of(engine)))
    (sent, state), (kept, again) = results
    assert sent.norms == kept.norms
    assert differing(state, again) == []


def peak(settings: Settings) -> int:
    """Bytes of a step's activations at their most."""
    config = tiny_config(
        "llama",
        num_hidden_layers=12,
        hidden_size=256,
        intermediate_size=1024,
        max_position_embeddings=2048,
    )
    steps = [full_batches(0, [(1, 2048)] * 4)] * 2
    with engine_of(config, device="cuda", precision="bfloat16", settings=settings) as engine:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train_engine(engine, steps)
        return torch.cuda.max_memory_allocated() - before


def test_their_memory_is_used_for_others_meanwhile():
    """Of twelve layers' graphs on the device, sending eleven away leaves one, and the rings: less than those of five."""
    nothing = peak(Settings(offload_activations=True, head_chunk_tokens=256))
    everything = (
        peak(Settings(offload_activations=True, retained=12, head_chunk_tokens=256)) - nothing
    )
    sent = (
        peak(
            Settings(
                offload_activations=True, retained=1, retained_on_host=11, head_chunk_tokens=256
            )
        )
        - nothing
    )
    assert everything > 0
    assert sent < 0.6 * everything
