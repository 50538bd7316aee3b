"""On CUDA: layers in chunks agree with whole ones, eager, compiled and fp8, in the memory that their dry run found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from megatrain.engine.graphs import run_for_graph
from megatrain.models.skeleton import Skeleton
from megatrain.planner.cost.shape import shape_of
from megatrain.settings import Settings
from tests.support import distance, engine_of, full_batches, gradients_of, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.compile's own
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
}
CUDA, BF16 = torch.device("cuda"), torch.bfloat16


def gradients(precision: str, **settings: Any) -> dict[str, torch.Tensor]:
    config = tiny_config("llama", num_hidden_layers=2, **SIZES)
    with engine_of(
        config,
        device="cuda",
        precision=precision,
        settings=Settings(head_chunk_tokens=512, **settings),
    ) as engine:
        for seed in range(2):  # the second step runs what the first compiled
            engine.train_step(full_batches(seed, [(1, 3000)]), lr=0.0)
        engine.forward_backward(full_batches(2, [(1, 3000)]))
        return {name: gradient.float() for name, gradient in gradients_of(engine).items()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_as_near_to_exact_ones_as_those_of_whole_layers(
    compiled: bool, precision: str
) -> None:
    exact, whole = gradients("float32"), gradients(precision, compile=compiled)
    chunked = gradients(
        precision, layer_chunk_tokens=1024, compile=compiled, offload_activations=True
    )
    for name, gradient in exact.items():
        assert distance(chunked[name], gradient) < 1.5 * distance(whole[name], gradient) + 1e-4, (
            name
        )


def peak_of(work: Callable[[], object]) -> int:
    work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_7b_layer_of_64k_tokens_takes_what_the_plan_says(compiled: bool) -> None:
    from megatrain.engine.context import fastest_attention

    tokens, chunk = 65_536, 8192
    config = Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4, vocab_size=96, num_hidden_layers=1,
        max_position_embeddings=tokens,
    )  # fmt: skip
    planned = shape_of(
        Skeleton(config), tokens, [tokens], runs_on="cuda", layer_chunks=[chunk]
    ).layer_bytes(tokens, chunk)
    skeleton = Skeleton(config)
    skeleton.chunk_layers(chunk, compiled)
    skeleton.find_skippable()
    if compiled:
        skeleton.compile_layers()
    skeleton.move_buffers(CUDA)
    torch.manual_seed(0)
    for block in skeleton.anatomy.blocks[:2]:
        skeleton.bind(block, torch.randn(block.layout.numel, device=CUDA, dtype=BF16) * 0.02)
    with torch.no_grad():
        hidden, calls = skeleton.embed(
            {"input_ids": torch.randint(0, 96, (1, tokens), device=CUDA)}
        )
    grad, parameters = torch.ones_like(hidden), list(skeleton.layers[0].parameters())

    def work() -> None:
        with fastest_attention(CUDA):
            graph = run_for_graph(skeleton.layer_again, 0, hidden, calls[0])[
                0
            ]  # as in a step, nobody holds on to the output
        graph.gradients(parameters, grad)

    assert 0.6 * planned < peak_of(work) < 1.05 * planned
