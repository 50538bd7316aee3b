"""Layers whose token-wise parts run in chunks train as plain layers do, whatever else the engine
does with them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from megatrain.engine.activations import GRAPH
from megatrain.engine.verify import gradients_of
from megatrain.settings import ALL, Settings
from tests.helpers.plain import train_plain
from tests.helpers.runs import Trace, assert_same, run, train_engine
from tests.helpers.support import engine_of, full_batches, micro_batches, plain_model, tiny_config

CHUNK = 8  # of micro-batches of 18, 39 and 6 tokens
IN_CHUNKS = Settings(head_chunk_tokens=7, layer_chunk_tokens=CHUNK)
STEPS, RATES = [micro_batches(seed) for seed in range(2)], [1e-3, 5e-4]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2-tied", "gemma2", "falcon-7b", "gpt2"])
def test_steps_equal_a_plain_loop(family: str) -> None:
    plain = train_plain(plain_model(tiny_config(family)), STEPS, RATES)
    with engine_of(family, settings=IN_CHUNKS) as engine:
        ours = train_engine(engine, STEPS, RATES)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-5)


def trained(precision: str = "bfloat16", **dials: Any) -> Trace:
    settings = replace(IN_CHUNKS, **dials)
    return run(engine_of("llama", precision=precision, settings=settings), STEPS)


without_dials = cache(trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dials"),
    [
        ("bfloat16", {"offload_activations": True}),
        ("fp8", {"retained": ALL}),
        ("bfloat16", {"offload_activations": True, "retained_on_host": 2}),
        ("fp8", {"offload_activations": True, "retained_on_host": 2}),
        ("bfloat16", {"resident": ALL}),
    ],
)
def test_other_dials_change_no_bit(precision: str, dials: dict[str, Any]) -> None:
    assert_same(trained(precision, **dials), without_dials(precision))


def test_a_graph_from_host_ram_is_not_changed_by_what_arrives_beside_it() -> None:
    """Autograd refuses what was written over since it was saved; the ring's next stretches are
    written while a chunk is differentiated."""
    settings = replace(IN_CHUNKS, offload_activations=True, retained_on_host=ALL)
    with engine_of("llama", settings=settings) as engine:
        transfers = []

        def transfer(*_: Any) -> None:
            transfers.append(engine.parts.checkpoints._up[GRAPH].flat[-1:].add_(0))  # type: ignore[union-attr]

        for layer in engine.skeleton.layers:
            layer.mlp.down_proj.register_forward_hook(transfer)  # type: ignore[union-attr]
        train_engine(engine, [full_batches(0, [(1, 16)])])
    assert len(transfers) > 2 * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_compiled_layers_break_there_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: compiled(function, backend=aot_eager)
    )
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **_: compile_module(self, backend=aot_eager)
    )
    torch._dynamo.reset()
    found = []
    for settings in (Settings(head_chunk_tokens=7), replace(IN_CHUNKS, compile=True)):
        with engine_of(tiny_config("llama", num_hidden_layers=1), settings=settings) as engine:
            result = engine.forward_backward(full_batches(0, [(1, 13)]))
            found.append((result.loss, gradients_of(engine)))
    (loss, gradients), (other, others) = found
    assert other == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        atol = 1e-6 * float(gradient.abs().max()) + 1e-7
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=atol)
    torch._dynamo.reset()
