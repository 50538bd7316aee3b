"""Layers whose token-wise parts run in chunks train as plain layers do, whatever else the engine does with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from megatrain.errors import ConfigError
from megatrain.models.transforms.chunked import Chunks
from megatrain.settings import ALL, Settings
from tests.support import (
    differing,
    engine_of,
    full_batches,
    gradients_of,
    micro_batches,
    plain_model,
    state_of,
    tiny_config,
    train_engine,
    train_plain,
)

CHUNK = 8  # of micro-batches of 18, 39 and 6 tokens
RATES = [1e-3, 5e-4]


@pytest.mark.parametrize(
    "family", ["llama", "qwen2-tied", "gemma2", "phi3", "falcon-7b", "gpt-neox", "gpt2"]
)
def test_steps_equal_a_plain_loop(family: str) -> None:
    config = tiny_config(family)
    steps = [micro_batches(seed) for seed in range(len(RATES))]
    plain = train_plain(plain_model(config), steps, RATES, weight_decay=0.1, max_norm=0.5)
    with engine_of(
        config, settings=Settings(head_chunk_tokens=7, layer_chunk_tokens=CHUNK)
    ) as engine:
        ours = train_engine(engine, steps, RATES)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-5)


def trained(precision: str = "bfloat16", **dials: Any) -> Any:
    with engine_of(
        tiny_config("llama"),
        precision=precision,
        settings=Settings(head_chunk_tokens=7, layer_chunk_tokens=CHUNK, **dials),
    ) as engine:
        return train_engine(engine, [micro_batches(seed) for seed in range(2)]).norms, state_of(
            engine
        )


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
@pytest.mark.parametrize(
    "dials",
    [
        {"offload_activations": True},
        {"retained": ALL},
        {"offload_activations": True, "retained_on_host": 2},
        {"resident": ALL},
    ],
)
def test_other_dials_change_no_bit(precision: str, dials: dict[str, Any]) -> None:
    norms, state = trained(precision)
    again, others = trained(precision, **dials)
    assert again == norms
    assert differing(others, state) == []


def test_a_graph_from_host_ram_is_not_changed_by_what_arrives_beside_it() -> None:
    """Autograd refuses what was written over since it was saved; the ring's next stretches are written while a chunk is differentiated."""
    settings = Settings(
        head_chunk_tokens=7,
        layer_chunk_tokens=CHUNK,
        offload_activations=True,
        retained_on_host=ALL,
    )
    with engine_of(tiny_config("llama"), settings=settings) as engine:
        transfers = []

        def transfer(*_: Any) -> None:
            transfers.append(engine.parts.boundaries._up.flat[-1:].add_(0))  # type: ignore[union-attr]

        for layer in engine.skeleton.layers:
            layer.mlp.down_proj.register_forward_hook(transfer)  # type: ignore[union-attr]
        train_engine(engine, [full_batches(0, [(1, 16)])])
    assert len(transfers) > 2 * 3


def test_no_chunk_is_longer_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def note(chunks: Chunks, x: torch.Tensor) -> list[slice]:
        parts = slices(chunks, x)
        seen.extend(x.shape[0] * (part.stop - part.start) for part in parts)
        assert [i for part in parts for i in range(part.start, part.stop)] == list(
            range(x.shape[1])
        )
        return parts

    slices = Chunks.slices
    monkeypatch.setattr(Chunks, "slices", note)
    trained()
    assert max(seen) <= CHUNK
    assert len(seen) > 3 * 3 * 6


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
    for settings in (
        Settings(head_chunk_tokens=7),
        Settings(head_chunk_tokens=7, layer_chunk_tokens=CHUNK, compile=True),
    ):
        with engine_of(tiny_config("llama", num_hidden_layers=1), settings=settings) as engine:
            result = engine.forward_backward(full_batches(0, [(1, 13)]))
            found.append((result.loss, gradients_of(engine)))
    (loss, gradients), (other, others) = found
    assert other == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            others[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()) + 1e-7
        )
    torch._dynamo.reset()


@pytest.mark.parametrize("wrong", [0, -1, 2.5])
def test_a_chunk_has_a_token(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="layer_chunk_tokens"):
        Settings(layer_chunk_tokens=wrong)
