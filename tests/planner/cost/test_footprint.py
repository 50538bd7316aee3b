"""What the dry run predicts is what the same layer allocates when it really runs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    FalconConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from megatrain.errors import ModelError
from megatrain.models.meta import blank_call
from megatrain.models.recorder import LayerCall
from megatrain.models.skeleton import Skeleton
from megatrain.planner.cost.footprint import (
    Footprint,
    LiveBytes,
    call_peak_bytes,
)
from tests.helpers.planned import QWEN_SIZES

ROWS, TOKENS, HIDDEN = 2, 128, 64
COMMON: Any = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON["vocab_size"] = 96
LLAMA_LIKE: Any = {**COMMON, "intermediate_size": 176, "num_key_value_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**LLAMA_LIKE),
    "mistral": MistralConfig(**LLAMA_LIKE, sliding_window=64),
    "qwen2": Qwen2Config(**LLAMA_LIKE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**LLAMA_LIKE, head_dim=16),
    "falcon-7b-form": FalconConfig(**COMMON, multi_query=True, parallel_attn=True, alibi=False),
    "falcon-40b-form": FalconConfig(
        **COMMON, new_decoder_architecture=True, num_kv_heads=2, alibi=False
    ),
    "gpt-neox": GPTNeoXConfig(**COMMON, intermediate_size=256),
}


def dry_and_real(
    config: PretrainedConfig, attention: str, dtype: torch.dtype, mask: bool = False, chunk: int = 0
) -> tuple[Footprint, Footprint]:
    skeleton = Skeleton(config, attention=attention, dtype=dtype)
    _, calls = skeleton.dry_call(ROWS, TOKENS)
    kwargs = dict(calls[0].kwargs)
    if mask:
        shape = (ROWS, 1, TOKENS, TOKENS)
        kwargs["attention_mask"] = torch.ones(shape, dtype=torch.bool, device="meta")
    if chunk:
        skeleton.chunk_layers(chunk)
    given = skeleton.layers[0], (ROWS, TOKENS, HIDDEN), dtype, LayerCall(calls[0].args, kwargs)
    dry = call_peak_bytes(*blank_call(*given), fused_attention=attention != "eager")
    real = call_peak_bytes(*blank_call(*given, device="cpu"), fused_attention=False)
    return dry, real


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_dry_run_in_fp32_equals_a_real_run(family):
    dry, real = dry_and_real(CONFIGS[family], "sdpa", torch.float32)
    assert dry == real


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "falcon-40b-form", "gpt-neox"])
def test_a_layer_in_chunks_keeps_and_takes_what_its_dry_run_found(family):
    # of two rows: 24 of each at a time
    dry, real = dry_and_real(CONFIGS[family], "sdpa", torch.float32, chunk=48)
    whole, _ = dry_and_real(CONFIGS[family], "sdpa", torch.float32)
    assert dry == real
    assert dry.saved_bytes < whole.saved_bytes
    assert dry.peak_bytes < whole.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_dry_run_in_bf16_is_within_half_a_percent(family):
    dry, real = dry_and_real(CONFIGS[family], "sdpa", torch.bfloat16)
    # LayerNorm's statistics are fp32 on meta and CUDA, bf16 on the CPU
    assert dry.saved_bytes == pytest.approx(real.saved_bytes, rel=0.005)
    assert dry.peak_bytes == pytest.approx(real.peak_bytes, rel=0.005)


@pytest.mark.parametrize(
    ("family", "dtype", "fused"),
    [
        ("llama", torch.bfloat16, True),
        ("llama", torch.float32, False),
        ("gpt-neox", torch.float32, True),
    ],
)
def test_groups_of_heads_have_no_fused_attention_in_float32_on_cuda(family, dtype, fused):
    skeleton = Skeleton(CONFIGS[family], attention="sdpa", dtype=dtype)
    _, calls = skeleton.dry_call(ROWS, TOKENS)
    arguments = skeleton.layers[0], (ROWS, TOKENS, HIDDEN), dtype, calls[0]
    on_cpu, on_cuda = (
        call_peak_bytes(*blank_call(*arguments), runs_on=device).saved_bytes
        for device in ("cpu", "cuda")
    )
    probabilities = ROWS * 4 * TOKENS * TOKENS * dtype.itemsize
    assert on_cuda == on_cpu if fused else on_cuda >= on_cpu + probabilities


@pytest.mark.parametrize(("heads_sharing", "scratch"), [(1, 2), (7, 4)])
def test_attention_s_backward_takes_what_was_measured_on_a_gpu(heads_sharing, scratch):
    """cuDNN and flash on an H200, 8k to 512k tokens of 28 heads over 4: gradients, and four times
    dquery beside them; 5.30 of it in all."""
    meta: Any = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    query = torch.empty(1, 28, 64, 128, **meta)
    key, value = (torch.empty(1, 28 // heads_sharing, 64, 128, **meta) for _ in range(2))

    def attention() -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )

    on_cuda, on_cpu = (
        call_peak_bytes(attention, [query, key, value], runs_on=device)
        for device in ("cuda", "cpu")
    )
    gradients = query.nbytes + key.nbytes + value.nbytes
    assert on_cuda.peak_bytes - on_cuda.saved_bytes == gradients + scratch * query.nbytes
    assert on_cpu.peak_bytes - on_cpu.saved_bytes == gradients


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-neox"])
def test_a_padding_mask_is_counted(family):
    dry, real = dry_and_real(CONFIGS[family], "sdpa", torch.float32, mask=True)
    without, _ = dry_and_real(CONFIGS[family], "sdpa", torch.float32)
    bias = ROWS * TOKENS * TOKENS * 4  # made of the mask
    assert dry == real
    assert dry.saved_bytes >= without.saved_bytes + bias


def test_a_7b_layer_keeps_what_was_measured_on_a_gpu():
    config: Any = {**QWEN_SIZES["7B"], "vocab_size": 8, "num_hidden_layers": 1}
    layer, rows, tokens = Skeleton(Qwen2Config(**config), attention="sdpa").layers[0], 16, 1024
    rotary = torch.empty(1, tokens, 128, dtype=torch.bfloat16, device="meta")
    kwargs = {"attention_mask": None, "position_embeddings": (rotary, rotary), "use_cache": False}
    call = LayerCall((), kwargs)
    footprint = call_peak_bytes(*blank_call(layer, (rows, tokens, 3584), torch.bfloat16, call))
    assert footprint.saved_bytes == 232_568 * rows * tokens  # eager and flash, H200
    # torch.cuda.max_memory_allocated, H200
    assert footprint.peak_bytes == pytest.approx(4948 * 2**20, rel=0.001)


def test_freed_bytes_are_given_back():
    with LiveBytes() as live:
        a = torch.empty(1000, dtype=torch.uint8, device="meta")
        view = a[10:20]
        assert live.live == 1000
        del a
        assert live.live == 1000  # the view keeps the storage
        del view
        assert live.live == 0
        torch.empty(10, dtype=torch.uint8, device="meta")
    assert live.peak == 1000


class NeedsValues(nn.Module):
    """A layer whose shapes depend on the data, as unrolled experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device="meta"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[hidden.sum(-1) > 0] * self.weight


def test_a_layer_that_needs_values_is_refused_by_name():
    with pytest.raises(ModelError, match="NeedsValues: its memory cannot be found without data"):
        call_peak_bytes(
            *blank_call(NeedsValues(), (1, 2, 4), torch.float32, LayerCall((), {})),
            what="NeedsValues",
        )
