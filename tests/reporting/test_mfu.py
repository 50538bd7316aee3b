"""The arithmetic of a step, against counting by hand and against the matmuls that torch runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    MistralConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from megatrain.memory.layout import FlatLayout
from megatrain.models.anatomy import Anatomy
from megatrain.models.constants import Block
from megatrain.models.skeleton import Skeleton
from megatrain.planner.cost.dry_run import shape_of
from megatrain.reporting.mfu import CausalAttention, ModelFlops
from tests.helpers.planned import sizes
from tests.helpers.support import NO_NAMES, plain_model, tiny_config

aten = torch.ops.aten


def anatomy_of(model: LlamaForCausalLM) -> Anatomy:
    """Blocks by name, enough for counting."""
    config = model.config
    names = ["embed", *(f"layers.{i}" for i in range(config.num_hidden_layers)), "head"]
    tensors: dict[str, list[tuple[str, tuple[int, ...], bool]]] = {name: [] for name in names}
    for name, parameter in model.named_parameters():
        kind, number, *_ = name.removeprefix("model.").split(".")
        block = {"layers": f"layers.{number}", "embed_tokens": "embed"}.get(kind, "head")
        tensors[block].append((name, tuple(parameter.shape), True))
    blocks = tuple(Block(i, name, FlatLayout.pack(tensors[name])) for i, name in enumerate(names))
    pair = ("lm_head.weight", "model.embed_tokens.weight")
    tied = (pair,) if config.tie_word_embeddings else ()
    return Anatomy(blocks, tied, "llama", config.hidden_size, config.vocab_size, None, NO_NAMES)


def test_flops_are_those_that_torch_runs():
    for tied in [True, False]:
        layer: Any = {**sizes(32, 80, 4, 2), "vocab_size": 96, "num_hidden_layers": 3}
        config = LlamaConfig(**layer, tie_word_embeddings=tied)
        config._attn_implementation = "eager"
        model = LlamaForCausalLM(config)
        ids = torch.zeros(2, 7, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(ids).logits.sum().backward()
        work = ModelFlops.of(anatomy_of(model), config, idle=0)
        # eager attention multiplies the masked half too
        causal, full = (12 * 32 * 3 * 2 * (7 * 8 // 2), 12 * 32 * 3 * 2 * 7 * 7)
        # transformers forms the angles by a product: noise, and not backward
        rotary = 3 * 2 * 2 * 7 * (config.hidden_size // 4 // 2)
        run = counter.get_total_flops()
        assert work.flops([7, 7]) - causal + full == pytest.approx(run, rel=rotary / run)


@pytest.mark.slow
def test_of_a_mixture_a_token_s_own_experts_count():
    """As torch counts them where transformers computes one expert after another: of the grouped
    matmuls that are faster torch 2.13 counts none."""
    for family in ["qwen2-moe", "qwen3-moe", "gpt-oss"]:
        skeleton = Skeleton(tiny_config(family, num_hidden_layers=2), dtype=torch.float32)
        plain = plain_model(skeleton.config, attention="eager")
        config: Any = plain.config
        config._experts_implementation = "eager"
        ids = torch.arange(14).view(2, 7)
        with FlopCounterMode(display=False) as counter:
            plain(ids).logits.sum().backward()
        products = {aten.mm, aten.addmm}  # attention and rotary angles are batched
        run = sum(
            flops for op, flops in counter.get_flop_counts()["Global"].items() if op in products
        )
        shape = shape_of(skeleton, 8, [8])
        work = ModelFlops.of(skeleton.anatomy, skeleton.config, shape.idle_parameters)
        assert 6 * work.matrix_parameters * 14 == run
        assert work.active_parameters == shape.active_parameters < shape.parameters
        tokens_per_s = 14 / 2.0
        assert work.tflops(14, 2.0) == 6 * shape.active_parameters * tokens_per_s / 1e12


def attention_of(config: Any) -> tuple[CausalAttention, ...]:
    layouts = [FlatLayout.pack([("w", (1, 1), True)])] * (config.num_hidden_layers + 2)
    blocks = tuple(Block(i, str(i), layout) for i, layout in enumerate(layouts))
    anatomy = Anatomy(blocks, (), "any", 8, 8, None, NO_NAMES)
    return ModelFlops.of(anatomy, config, idle=0).attention


def test_layers_without_attention_s_matrices_pay_for_none():
    layers: Any = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    assert [layer.width for layer in attention_of(Qwen3NextConfig(**layers))] == [0, 16 * 256]
    assert [layer.width for layer in attention_of(Mamba2Config(num_hidden_layers=2))] == [0, 0]


def test_7b_by_hand():
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    matrices, layers = 28 * layer + 152064 * 3584, (CausalAttention(28 * 128),) * 28
    work = ModelFlops(active_parameters=7_615_616_512, matrix_parameters=matrices, attention=layers)
    attention = 12 * 28 * 3584 * 64 * (1024 * 1025 // 2)
    flops = 6 * matrices * 65536 + attention
    assert work.flops([1024] * 64) == flops
    assert work.tflops(65536, 6.5) == pytest.approx(460.7, abs=0.1)
    mfu = work.mfu([1024] * 64, 6.5, "NVIDIA H200")
    assert mfu == pytest.approx(flops / 6.5 / 989.4e12)
    assert work.mfu([1024] * 64, 6.5, None) is None


def test_a_sliding_window_is_not_paid_for_outside():
    looks = [[1 if 0 <= query - key < 3 else 0 for key in range(8)] for query in range(8)]
    assert CausalAttention(1, window=3).pairs(8) == sum(map(sum, looks))
    assert CausalAttention(1, window=8).pairs(8) == CausalAttention(1).pairs(8) == 36


SLIDES: Any = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 128}


def test_windows_are_read_off_the_configuration():
    cases: list[tuple[Any, list[int | None]]] = [
        (MistralConfig(num_hidden_layers=2, sliding_window=4096), [4096, 4096]),
        (MistralConfig(num_hidden_layers=2, sliding_window=None), [None, None]),
        (Qwen2Config(num_hidden_layers=3, **SLIDES), [None, None, 128]),
        (LlamaConfig(num_hidden_layers=2), [None, None]),
    ]
    for config, windows in cases:
        assert [layer.window for layer in attention_of(config)] == windows
