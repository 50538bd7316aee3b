"""On CUDA: gradients that are computed twice end in the same bits as stored ones, whatever is slow, and nothing is half done."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.settings import ALL, Settings
from tests.support import (
    LANES,
    State,
    Trace,
    delay,
    differing,
    engine_of,
    full_batches,
    state_of,
    tiny_config,
    train_engine,
)

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore"),  # of torch.compile's own
]
STEPS = [full_batches(seed, [(2, 8), (1, 8), (2, 8)]) for seed in range(4)]
TWICE = Settings(second_backward=True, head_chunk_tokens=7)
SETTINGS = {
    "streamed": TWICE,
    "offloaded": replace(TWICE, offload_activations=True),
    "embedding resident": replace(TWICE, resident=1),
    "half resident, offloaded": replace(TWICE, resident=3, offload_activations=True),
    "all resident": replace(TWICE, resident=ALL),
    "compiled": replace(TWICE, compile=True),
}


def make(family: str, precision: str, settings: Settings, clip: float = 0.5) -> Engine:
    config = tiny_config(family, num_hidden_layers=4, hidden_size=64, intermediate_size=128)
    return engine_of(
        config, device="cuda", precision=precision, settings=settings, max_grad_norm=clip
    )


def run(engine: Engine) -> tuple[Trace, State]:
    with engine:
        return train_engine(engine, STEPS), state_of(engine)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
@pytest.mark.parametrize("clip", [0.5, 1e9], ids=["clipped", "below the limit"])
def test_it_changes_no_bit(family, precision, name, clip):
    stored, state = run(
        make(family, precision, replace(SETTINGS[name], second_backward=False), clip)
    )
    twice, again = run(make(family, precision, SETTINGS[name], clip))
    assert (twice.losses, twice.norms) == (stored.losses, stored.norms)
    assert differing(again, state) == []


def test_nor_with_fp8_products():
    stored, state = run(make("llama", "fp8", replace(TWICE, second_backward=False)))
    twice, again = run(make("llama", "fp8", TWICE))
    assert twice.norms == stored.norms
    assert differing(again, state) == []


@pytest.mark.parametrize("slow", [*((lane,) for lane in LANES), LANES], ids="+".join)
@pytest.mark.parametrize("name", ["streamed", "half resident, offloaded"])
def test_delays_change_no_bit(name, slow):
    _, state = run(make("qwen2-tied", "bfloat16", SETTINGS[name]))
    _, again = run(delay(make("qwen2-tied", "bfloat16", SETTINGS[name]), slow, longest_s=0.003))
    assert differing(again, state) == []


@pytest.mark.parametrize("name", ["streamed", "all resident"])
def test_a_gradient_that_is_not_finite_leaves_the_state_as_it_was(name):
    with make("llama", "bfloat16", SETTINGS[name]) as engine:
        engine.train_step(STEPS[0])
        before = state_of(engine)
        layer = engine.skeleton.layer_again

        def poisoned(index, hidden, call):
            return layer(index, hidden, call) * torch.inf

        engine.skeleton.layer_again = poisoned  # type: ignore[method-assign]
        assert engine.train_step(STEPS[1]).skipped
        assert differing(before, state_of(engine)) == []
