"""Boundary activations kept by a codec: losses are exact, gradients near, and where they wait changes no bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatrain.engine.activations.codecs import CODECS
from megatrain.errors import ConfigError
from megatrain.settings import ALL, Settings
from tests.support import (
    Batch,
    State,
    Trace,
    differing,
    engine_of,
    full_batches,
    micro_batches,
    state_of,
    tiny_config,
    train_engine,
)

STEPS = [full_batches(seed, [(2, 16), (1, 12)]) for seed in range(3)]
FAR = {"int8": 0.1, "int6": 0.3, "int4": 1.0}  # of a tiny model's gradient, by its norm


def run(
    settings: Settings,
    family: str = "llama",
    precision: str = "bfloat16",
    steps: Sequence[Sequence[Batch]] = STEPS,
) -> tuple[Trace, State]:
    with engine_of(tiny_config(family), precision=precision, settings=settings) as engine:
        return train_engine(engine, steps), state_of(engine)


def gradients(settings: Settings) -> tuple[float, torch.Tensor]:
    with engine_of(tiny_config("llama"), precision="float32", settings=settings) as engine:
        loss = engine.forward_backward(STEPS[0]).loss
        finished = engine.parts.sink.finished()
        for gradient in finished:
            gradient.landed.synchronize()
        return loss, torch.cat(
            [g.values.flatten() for g in sorted(finished, key=lambda g: g.block)]
        )


@pytest.mark.parametrize("name", CODECS)
def test_the_loss_is_exact_and_gradients_are_near(name: str) -> None:
    loss, exact = gradients(Settings())
    with_codec, near = gradients(Settings(activations=name))
    assert with_codec == loss
    assert 0 < (near - exact).norm() / exact.norm() < FAR[name]


@pytest.mark.parametrize(
    ("family", "precision", "settings"),
    [
        ("llama", "bfloat16", Settings(head_chunk_tokens=7)),
        ("llama", "float32", Settings(groups=2)),
        ("gemma2", "bfloat16", Settings(retained=1, resident=2)),
        ("gpt2", "float32", Settings()),
    ],
)
@pytest.mark.parametrize("name", CODECS)
def test_where_they_wait_changes_no_bit(
    name: str, family: str, precision: str, settings: Settings
) -> None:
    settings = replace(settings, activations=name)
    here, state = run(settings, family, precision)
    there, again = run(replace(settings, offload_activations=True), family, precision)
    assert (here.losses, here.norms) == (there.losses, there.norms)
    assert differing(state, again) == []


def test_the_same_twice_with_padded_rows_and_steps_of_other_sizes() -> None:
    steps = [
        micro_batches(0),
        full_batches(1, [(2, 16)] * 3),
        full_batches(2, [(3, 20)]),
        full_batches(3, [(1, 4)]),
    ]
    settings = Settings(activations="int4", offload_activations=True)
    first, second = run(settings, steps=steps), run(settings, steps=steps)
    assert (first[0].losses, first[0].norms) == (second[0].losses, second[0].norms)
    assert differing(first[1], second[1]) == []


@pytest.mark.parametrize(
    "settings",
    [Settings(retained=ALL), Settings(offload_activations=True, retained_on_host=ALL)],
    ids=["device", "host"],
)
def test_layers_that_are_not_recomputed_stay_exact(settings: Settings) -> None:
    exact, state = run(settings)
    kept, again = run(replace(settings, activations="int4"))
    assert exact.norms == kept.norms
    assert differing(state, again) == []


def test_graphs_in_host_ram_travel_beside_them() -> None:
    settings = Settings(offload_activations=True, retained_on_host=1, activations="int6")
    sent, state = run(settings)
    kept, again = run(replace(settings, retained_on_host=0))
    assert sent.losses[0] == kept.losses[0]
    assert sent.norms != kept.norms  # one layer less is computed from what the codec kept
    assert differing(state, again) != []


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="activations: 'int5' is unknown; choose one of none, int8, int6, int4"
    ):
        Settings(activations="int5")
