"""Retained layers keep little, and change no bit. No code is generated of their graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from megatrain.engine.verify import gradients_of
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.compiled import compile_when_run
from megatrain.planner.cost.dry_run import shape_of
from megatrain.settings import Settings
from tests.helpers.compare import apart
from tests.helpers.support import engine_of, full_batches, tiny_config

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of torch.compile's own
    pytest.mark.usefixtures("no_code_is_generated"),
]
ROWS, TOKENS = 2, 16
DYNAMO_S_OWN_LIMIT = 8  # graphs


def kept(skeleton: Skeleton, again: bool) -> int:
    """Bytes that the graph of layer 0 keeps of its own, beyond what it was given and its output."""
    hidden, calls = skeleton.embed({"input_ids": torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)})
    hidden = hidden.detach().requires_grad_()
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = (skeleton.layer_again if again else skeleton.layer)(0, hidden, calls[0])
    given = [
        output,
        hidden,
        *skeleton.layers[0].parameters(),
        *(calls[0].kwargs.get("position_embeddings") or ()),
    ]
    given += [value for value in calls[0].kwargs.values() if isinstance(value, Tensor)]
    return sum(
        size
        for address, size in sizes.items()
        if address not in {t.untyped_storage().data_ptr() for t in given}
    )


@pytest.mark.slow
def test_retained_layers_keep_little_and_recomputed_ones_what_is_fastest() -> None:
    # has no product that recomputation leaves out, so one graph could serve both
    config = tiny_config("gemma2", num_hidden_layers=1)
    shape = shape_of(Skeleton(config), TOKENS, [ROWS * TOKENS], compiled=True)
    expected = [
        shape.retained_bytes(ROWS * TOKENS, 1, compiled=True, cheap=cheap)
        for cheap in (True, False)
    ]
    skeleton = Skeleton(config)
    for block in skeleton.anatomy.blocks[:2]:
        skeleton.bind(block, torch.ones(block.layout.numel, dtype=torch.bfloat16))
    skeleton.find_skippable()
    skeleton.compile_layers(cheap=True)
    assert [kept(skeleton, again) for again in (False, True)] == pytest.approx(expected, rel=0.01)


class Mlp(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + nn.functional.relu(hidden)


@pytest.mark.slow
def test_no_layer_falls_back_to_eager_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more graphs than dynamo's own limit: of any length, here each of its own."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: graph)
    counters.clear()
    with torch._dynamo.config.patch(
        recompile_limit=DYNAMO_S_OWN_LIMIT,
        fail_on_recompile_limit_hit=True,
        automatic_dynamic_shapes=False,
    ):
        (layer,) = compile_when_run([Mlp()], lengths_vary=False, cheap=False)
        for tokens in range(1, 2 * DYNAMO_S_OWN_LIMIT):
            layer(torch.ones(1, tokens, 4))
    assert counters["stats"]["unique_graphs"] > DYNAMO_S_OWN_LIMIT


@pytest.mark.slow
def test_compiled_layers_break_at_their_chunks_and_agree() -> None:
    found = []
    plain = Settings(head_chunk_tokens=7)
    for settings in (plain, replace(plain, compile=True, layer_chunk_tokens=8)):
        with engine_of(tiny_config("llama", num_hidden_layers=1), settings=settings) as engine:
            result = engine.forward_backward(full_batches(0, [(1, 13)]))
            found.append((result.loss, gradients_of(engine)))
    (loss, expected), (other, gradients) = found
    assert other == pytest.approx(loss, rel=1e-6)
    assert apart(gradients, expected, 1e-5) == []
