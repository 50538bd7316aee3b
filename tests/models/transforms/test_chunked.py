"""Layers whose token-wise modules run in chunks keep less, and have plain layers' gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatrain.models.meta import blank_call
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms import chunked as module_under_test
from megatrain.models.transforms.chunked import chunks_of
from megatrain.models.transforms.skippable import (
    skippable,
    skipping,
    token_wise,
    treats_tokens_alike,
)
from megatrain.planner.cost.footprint import Footprint, call_peak_bytes
from tests.helpers.support import tiny_config
from tests.models.transforms.test_skippable import HIDDEN, ROWS, TOKENS, gradients, layer_of

SEVERAL = ["qwen3", "gemma2", "falcon-rw", "gpt2", "ctrl", "mixtral"]
NORMS = ("input_layernorm", "post_attention_layernorm")
FOUND = {
    **dict.fromkeys(("llama", "mistral-sliding", "qwen2", "phi3"), ("mlp", *NORMS)),
    **dict.fromkeys(
        ("falcon-7b", "falcon-rw", "falcon-40b", "gpt-neox", "gpt2", "gpt-bigcode", "stablelm"),
        ("mlp",),
    ),
    "qwen3": ("self_attn.q_norm", "self_attn.k_norm", "mlp", *NORMS),
    "gemma2": ("mlp", *NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "cohere": ("mlp", "input_layernorm"),
    "ctrl": ("ffn",),
    "opt": (),  # its two products lie in the layer itself
    "mixtral": ("mlp", *NORMS),  # its experts take whatever tokens come
}


def dtype_of(family: str) -> torch.dtype:
    # torch knows its grouped matmuls on meta in no other
    return torch.bfloat16 if family == "mixtral" else torch.float32


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for name, tensor in expected.items():
        apart = (found[name].float() - tensor.float()).abs().max()
        assert float(apart) <= tolerance * float(tensor.abs().max()), name


@pytest.mark.slow
@pytest.mark.parametrize("family", FOUND)
def test_modules_that_treat_tokens_alike_are_found(family: str) -> None:
    skeleton = Skeleton(tiny_config(family), dtype=torch.bfloat16)
    hidden, calls = skeleton.dry_call(2, 11)
    found = token_wise(skeleton.layers[0], torch.bfloat16, hidden.shape[-1], calls[0])
    assert set(found) == set(FOUND[family])


class Mixes(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


# over all tokens, by a comparison that NaN cannot cross
NORMALISES = Mixes(lambda x: x / x.nan_to_num(0).abs().sum(1, keepdim=True).clamp(min=x.shape[1]))


def test_what_mixes_or_counts_tokens_or_draws_numbers_is_refused() -> None:
    counts = Mixes(lambda x: x + torch.arange(x.shape[1]).view(1, -1, 1))
    shifts = Mixes(lambda x: x + x.roll(1, dims=1))
    for module in (shifts, counts, NORMALISES, nn.Dropout(0.1), nn.Softmax(dim=1)):
        assert not treats_tokens_alike(module.train(), (2, 11, 8), torch.float32)
    scales = Mixes(lambda x: x * x.square().mean(-1, keepdim=True))
    assert treats_tokens_alike(scales, (2, 11, 8), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "chunk"), [*((family, 8) for family in SEVERAL), ("qwen2", 1), ("qwen2", 1000)]
)
def test_gradients_are_those_of_the_whole_layer(family: str, chunk: int) -> None:
    dtype = dtype_of(family)
    (whole, call), (chunked, _) = layer_of(family, dtype), layer_of(family, dtype, chunk)
    assert_close(gradients(chunked, dtype, call), gradients(whole, dtype, call), dtype)


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon-40b", "gpt2"])
def test_chunks_that_nobody_reads_are_left_out(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole, call), (chunked, _) = (layer_of(family, torch.float32, n) for n in (None, 4))
    names = skippable(chunked, (ROWS, TOKENS, HIDDEN), torch.float32, call)
    assert ("mlp" in names) == (family != "gemma2")  # whose norm behind it needs its values
    monkeypatch.setattr(
        module_under_test, "uninitialised", lambda x, *shape: x.new_full(shape, float("nan"))
    )
    found = gradients(chunked, torch.float32, call, names)
    assert_close(found, gradients(whole, torch.float32, call), torch.float32)
    mlp = chunked.get_submodule("mlp")
    chunks = chunks_of(mlp)
    assert chunks is not None
    assert not chunks.absent
    with skipping(chunked, names):
        assert chunks.absent == ("mlp" in names)


def test_a_gradient_of_many_chunks_is_rounded_once() -> None:
    mlp, exact = (
        layer_of("llama", dtype, chunk)[0].get_submodule("mlp")
        for dtype, chunk in ((torch.bfloat16, 1), (torch.float32, None))
    )
    exact.load_state_dict({name: p.detach().float() for name, p in mlp.named_parameters()})
    hidden = torch.randn(1, 512, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, expected = (
        torch.autograd.grad(module(x).sum(), module.get_parameter("up_proj.weight"))[0].float()
        for module, x in ((mlp, hidden), (exact, hidden.float()))
    )
    assert float((found - expected).norm() / expected.norm()) < 0.01


def peak(chunk: int | None, tokens: int, width: int) -> Footprint:
    skeleton = Skeleton(
        tiny_config("llama", intermediate_size=width, max_position_embeddings=tokens)
    )
    if chunk:
        skeleton.chunk_layers(chunk)
    _, calls = skeleton.dry_call(1, tokens)
    given = blank_call(skeleton.layers[0], (1, tokens, HIDDEN), torch.bfloat16, calls[0])
    return call_peak_bytes(*given)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_width_of_the_mlp() -> None:
    tokens, chunk, widths = 4096, 128, (512, 1024)
    narrow, wide = (peak(chunk, tokens, width) for width in widths)
    assert wide.saved_bytes == narrow.saved_bytes
    weights = 3 * HIDDEN * (widths[1] - widths[0])
    in_chunks = wide.peak_bytes - narrow.peak_bytes
    assert in_chunks <= 10 * weights + 12 * 2 * chunk * (widths[1] - widths[0])
    unchunked = peak(None, tokens, widths[1]).peak_bytes - peak(None, tokens, widths[0]).peak_bytes
    assert unchunked > 10 * in_chunks


def test_what_is_chunked_for_a_while_is_whole_again() -> None:
    skeleton = Skeleton(tiny_config("llama"))
    mlp = skeleton.layers[0].get_submodule("mlp")
    with skeleton.chunked(4):
        assert chunks_of(mlp)
    assert not chunks_of(mlp)
