"""Boundary activations kept by a codec: losses are exact, gradients near, and where they wait
changes no bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.engine.codecs import CODECS
from megatrain.engine.engine import Engine
from megatrain.engine.verify import gradients_of
from megatrain.settings import ALL, Settings
from tests.helpers.compare import differing, distance
from tests.helpers.runs import assert_same, run
from tests.helpers.support import engine_of, full_batches

STEPS = [full_batches(seed, [(2, 16), (1, 12)]) for seed in range(2)]
FAR = {"int8": 0.1, "int6": 0.3, "int4": 1.0}  # of a tiny model's gradient, by its norm
PLAIN = Settings(head_chunk_tokens=7)
pytestmark = pytest.mark.usefixtures("deterministic")


def make(
    settings: Settings, family: str = "llama", precision: str = "bfloat16", device: str = "cpu"
) -> Engine:
    return engine_of(family, precision=precision, settings=settings, device=device)


def gradients(settings: Settings) -> tuple[float, torch.Tensor]:
    with make(settings, precision="float32") as engine:
        loss = engine.forward_backward(STEPS[0]).loss
        return loss, torch.cat([gradient.flatten() for gradient in gradients_of(engine).values()])


@pytest.mark.parametrize("name", CODECS)
def test_the_loss_is_exact_and_gradients_are_near(name: str) -> None:
    loss, exact = gradients(Settings())
    with_codec, near = gradients(Settings(activations=name))
    assert with_codec == loss
    assert 0 < distance(near, exact) < FAR[name]


MODELS = [
    ("llama", "bfloat16", PLAIN),
    ("llama", "float32", Settings(groups=2)),
    ("gemma2", "bfloat16", Settings(retained=1, resident=2)),
    ("gpt2", "float32", Settings()),
]
# every codec with one model, and every model with one codec
CASES: list[Any] = [(name, "cpu", *MODELS[0]) for name in CODECS]
CASES += [("int4", "cpu", *model) for model in MODELS[1:]]
CASES += [pytest.param(name, "cuda", *MODELS[0], marks=pytest.mark.cuda) for name in CODECS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device", "family", "precision", "settings"), CASES)
def test_where_they_wait_changes_no_bit(
    name: str, device: str, family: str, precision: str, settings: Settings
) -> None:
    here, there = (
        make(
            replace(settings, activations=name, offload_activations=offload),
            family,
            precision,
            device,
        )
        for offload in (False, True)
    )
    assert_same(run(there, STEPS), run(here, STEPS))


@pytest.mark.parametrize(
    "settings",
    [Settings(retained=ALL), Settings(offload_activations=True, retained_on_host=ALL)],
    ids=["device", "host"],
)
def test_layers_that_are_not_recomputed_stay_exact(settings: Settings) -> None:
    with_codec = run(make(replace(settings, activations="int4")), STEPS)
    assert_same(with_codec, run(make(settings), STEPS))


@pytest.mark.slow
def test_graphs_in_host_ram_travel_beside_them() -> None:
    settings = Settings(offload_activations=True, retained_on_host=1, activations="int6")
    sent, kept = (run(make(replace(settings, retained_on_host=n)), STEPS) for n in (1, 0))
    assert sent.losses[0] == kept.losses[0]
    assert sent.norms != kept.norms  # one layer less is computed from what the codec kept
    assert differing(sent.state, kept.state) != []
