"""Our implementations of experts and of attention with sinks, against transformers' own."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from megatrain.models.family import build_model
from megatrain.models.implementations import (
    NAME,
    OF_IMAGES,
    attend_images,
    use_fused_sinks,
    use_grouped_rows,
)
from megatrain.models.meta import on_meta
from tests.helpers.multimodal import multimodal_config
from tests.helpers.support import tiny_config

TOKENS, HIDDEN, EXPERTS, EACH = 24, 32, 6, 3
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "moe_latent_size": None,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "moe_hidden_size": HIDDEN,
    "post_norm_eps": 1e-5,
}
# plain; with biases, matrices the other way round and columns in turns; without a gate
CLASSES: list[Any] = [MixtralExperts, GptOssExperts, NemotronHExperts]
if find_spec(
    "transformers.models.muse_spark"
):  # normed behind the second matrix; of later releases
    muse_spark = import_module("transformers.models.muse_spark.modeling_muse_spark")
    CLASSES.append(muse_spark.MuseSparkExperts)


def computed(kind: Any, dtype: torch.dtype, ours: bool, chosen: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of hidden states, weights and parameters."""
    config = SimpleNamespace(**SIZES, _experts_implementation="eager")
    if ours:
        use_grouped_rows(config)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    experts = kind(config)
    for parameter in experts.parameters():
        parameter.data = drawn(*parameter.shape).detach() / 4
    hidden, weights = drawn(TOKENS, HIDDEN), drawn(TOKENS, EACH)
    out = experts(hidden, chosen, weights)
    leaves = [hidden, weights, *experts.parameters()]
    return [out, *torch.autograd.grad(out, leaves, drawn(TOKENS, HIDDEN).detach())]


def chosen_of(most: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(most, generator=generator)[:EACH] for _ in range(TOKENS)])


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("most", [EXPERTS, EACH])  # the latter leaves experts without a row
def test_outputs_and_gradients_are_those_of_a_loop(kind, most):
    chosen = chosen_of(most)
    found, expected = (computed(kind, torch.float32, ours, chosen) for ours in (True, False))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CLASSES)
def test_bfloat16_is_as_near_to_float32_as_transformers(kind):
    chosen = chosen_of(EXPERTS)
    exact = computed(kind, torch.float32, False, chosen)
    ours, theirs = (computed(kind, torch.bfloat16, which, chosen) for which in (True, False))
    for true, one, other in zip(exact, ours, theirs, strict=True):
        off, usual = (float((x.float() - true).detach().norm()) for x in (one, other))
        assert off <= 1.3 * usual + 1e-3 * float(true.detach().norm())


def test_rows_that_no_grouped_kernel_takes_are_refused_without_data_too():
    rows, matrices = (
        torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((4, 3), (2, 3, 8))
    )
    ends = torch.zeros(2, dtype=torch.int32, device="meta")
    with on_meta(), pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        torch.nn.functional.grouped_mm(rows, matrices, offs=ends)


# -- attention with sinks -------------------------------------------------------------------------

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


# -- attention of images ---------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "has"), [("qwen3-vl", True), ("gemma3", False)])
def test_towers_that_lay_images_end_to_end_have_one_kernel_for_all(family, has):
    model: Any = build_model(multimodal_config(family), "auto", torch.float32)
    found = {one.config._attn_implementation for one in model.modules() if hasattr(one, "config")}
    assert (OF_IMAGES in found) == has
    assert model.config.get_text_config()._attn_implementation == "sdpa"


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_images_see_themselves_alone(device, scaling):
    dtype, ends = torch.float32 if device == "cpu" else torch.bfloat16, [0, 5, 6, 40]
    shape = 3, 1, 2, 40, 72
    given = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0))
    ours, plain = (given.to(kind).unbind() for kind in (dtype, torch.float64))
    for states in (*ours, *plain):
        states.requires_grad_()
    told: Any = {"cu_seq_lens_q": torch.tensor(ends, device=device), "max_length_q": 34}
    q, k, v = ours
    found, _ = attend_images(torch.nn.Module(), q, k, v, None, scaling=scaling, **told)
    parts: Any = [[states[:, :, a:b] for states in plain] for a, b in pairwise(ends)]
    attend: Any = F.scaled_dot_product_attention
    expected = torch.cat([attend(*p, scale=scaling) for p in parts], 2)
    near: Any = dict.fromkeys(("rtol", "atol"), 1e-5 if device == "cpu" else 0.03)
    torch.testing.assert_close(found.transpose(1, 2).double(), expected, **near)
    both = (torch.autograd.grad(out.sum(), of) for out, of in ((found, ours), (expected, plain)))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one.double(), other, **near)
