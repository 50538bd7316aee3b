"""Attention with sinks, fused and in blocks, against transformers' eager one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM

from megatrain.models.implementations import NAME, use_fused_sinks
from tests.support import tiny_config

WINDOW = 4


def models() -> tuple[Any, Any]:
    """The same model with transformers' eager attention and with ours."""
    both = []
    for _ in range(2):
        torch.manual_seed(0)
        config: Any = tiny_config("gpt-oss", sliding_window=WINDOW)
        model = GptOssForCausalLM._from_config(config, attn_implementation="eager")
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=2.0)
        both.append(model)
    use_fused_sinks(both[1])
    assert both[1].config._attn_implementation == NAME
    return both[0], both[1]


def packed(tokens: int) -> dict[str, torch.Tensor]:
    half = tokens // 2
    return {"position_ids": torch.cat([torch.arange(half), torch.arange(tokens - half)])[None]}


def padded(tokens: int) -> dict[str, torch.Tensor]:
    return {"attention_mask": (torch.arange(tokens) >= 2).long()[None].repeat(2, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [3, WINDOW, WINDOW + 1, 3 * WINDOW, 3 * WINDOW + 2])
@pytest.mark.parametrize("rows_of", [lambda tokens: {}, packed, padded])
def test_logits_and_gradients_are_those_of_eager_attention(tokens, rows_of):
    given = rows_of(tokens)
    rows = len(next(iter(given.values()), "12"))
    ids = torch.randint(64, (rows, tokens), generator=torch.Generator().manual_seed(1))
    seen = given.get("attention_mask", torch.ones_like(ids)).bool()
    found = []
    for model in models():
        logits = model(input_ids=ids, use_cache=False, **given).logits[seen]
        logits.square().sum().backward()
        found.append((logits, {name: p.grad for name, p in model.named_parameters()}))
    (expected, gradients), (logits, ours) = found
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def test_a_window_is_computed_in_blocks():
    from torch.utils.flop_counter import FlopCounterMode

    _, model = models()
    flops = []
    for tokens in (64, 128):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.model.layers[0](
                torch.zeros(1, tokens, model.config.hidden_size),
                position_embeddings=model.model.rotary_emb(
                    torch.zeros(1, tokens, 1), torch.arange(tokens)[None]
                ),
                attention_mask=None,
            )
        flops.append(counter.get_total_flops())
    assert flops[1] == pytest.approx(2 * flops[0], rel=0.05), "linear in the tokens"
