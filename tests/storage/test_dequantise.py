"""Quantised folders: read as transformers dequantises them, and given back in bf16."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from megatrain.engine.engine import Engine
from megatrain.engine.verify import tensors_of, weights_of
from megatrain.errors import ModelError
from megatrain.models.pretrained import quantisation_in
from megatrain.storage.checkpoint import save_checkpoint
from megatrain.storage.dequantise import dequantised
from megatrain.storage.export import export
from megatrain.storage.safetensors import open_shards
from tests.helpers.compare import differing
from tests.helpers.quantised import TILES, Tensors, config_in, in_tiles, rewrite, spread, state
from tests.helpers.support import SIZES, plain_model

BOTH: dict[str, Any] = {**SIZES, "num_hidden_layers": 1, "tie_word_embeddings": False}
WIDE = BOTH | {"hidden_size": 256, "intermediate_size": 128}
EXPERTS: dict[str, Any] = {
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "head_dim": 64,
}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "sliding_window": 5,
}
ONE_SCALE = TILES | {"weight_block_size": None, "activation_scheme": "static"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
UP = "model.layers.0.mlp.up_proj.weight"
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def whole(tensors: Tensors) -> Tensors:
    """One bf16 scale for a tensor, and one for the activations of a model that is served."""
    result = in_tiles(tensors, 1 << 10, 1 << 10)
    for name in [name for name in result if name.endswith("_scale_inv")]:
        result[name] = result[name].bfloat16().reshape(())
        result[name.replace("weight_scale_inv", "activation_scale")] = torch.ones(())
    return result


def in_groups(tensors: Tensors, low: int = 113, high: int = 121) -> Tensors:
    """GPT-OSS's experts as random MXFP4, whose scales are 2^(low - 127) to 2^(high - 127)."""
    result = {}
    for name, weight in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            result[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        result[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        result[f"{name}_scales"] = torch.randint(low, high + 1, shape, dtype=torch.uint8)
    return result


AS_FP8: Any = transformers.FineGrainedFP8Config  # its types do not allow one scale a tensor
AS_MXFP4: Any = transformers.utils.quantization_config.Mxfp4Config
# name -> (configuration, how its config.json has it, quantiser, transformers' own dequantiser)
Case = tuple[Any, dict[str, Any], Callable[[Tensors], Tensors], Any]
CASES: dict[str, Case] = {
    "fp8": (
        transformers.LlamaConfig(**WIDE),
        TILES | {"modules_to_not_convert": ["lm_head"]},
        in_tiles,
        AS_FP8(dequantize=True),
    ),
    "fp8-experts": (
        transformers.Qwen3MoeConfig(**WIDE, **EXPERTS),
        TILES,
        in_tiles,
        AS_FP8(dequantize=True),
    ),
    "fp8-per-tensor": (
        transformers.LlamaConfig(**WIDE),
        ONE_SCALE,
        whole,
        AS_FP8(dequantize=True, weight_block_size=None),
    ),
    "mxfp4": (
        transformers.GptOssConfig(**BOTH | {"hidden_size": 64}, **GPT_OSS),
        MXFP4,
        in_groups,
        AS_MXFP4(dequantize=True),
    ),
    "mxfp4-all-scales": (
        transformers.GptOssConfig(**BOTH | {"hidden_size": 64}, **GPT_OSS),
        MXFP4,
        partial(in_groups, low=0, high=252),
        AS_MXFP4(dequantize=True),
    ),
}


@pytest.fixture
def quantised(tmp_path: Path) -> Callable[..., Path]:
    """Saves a random model in bf16 and quantises the folder."""

    def make(case: str, config: Any = None, **stated: Any) -> Path:
        torch.manual_seed(0)
        usual, method, quantise, _ = CASES[case]
        folder = tmp_path / "in"
        model: Any = plain_model(config or usual, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        rewrite(folder, quantise)
        state(folder, method | stated)
        return folder

    return make


def open_engine(folder: Path, precision: str = "bfloat16") -> Engine:
    return Engine.from_pretrained(folder, precision=precision, device="cpu")


def loaded(folder: Path) -> Tensors:
    with open_engine(folder) as engine:
        return weights_of(engine)


def as_transformers(folder: Path, how: Any) -> Tensors:
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, quantization_config=how, dtype=torch.bfloat16)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "chunk"), [*((case, 5000) for case in CASES), ("fp8", 1 << 22), ("mxfp4", 1 << 22)]
)
def test_weights_are_those_of_transformers(quantised, monkeypatch, case, chunk):
    monkeypatch.setattr("megatrain.storage.dequantise.CHUNK_ELEMENTS", chunk)
    folder = quantised(case)
    ours, theirs = loaded(folder), as_transformers(folder, CASES[case][-1])
    assert all(tensor.dtype == torch.bfloat16 for tensor in theirs.values())
    assert differing(ours, theirs) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_tiles_are_cut_off_at_the_edges(quantised, dtype):
    """transformers takes all of a tensor's tiles to be of one size, or refuses it."""
    config = transformers.LlamaConfig(**WIDE | {"intermediate_size": 200})
    folder = quantised("fp8", config)
    rewrite(folder, lambda t: {n: s.to(dtype) if "_scale_inv" in n else s for n, s in t.items()})
    stored, ours = load_file(folder / "model.safetensors"), loaded(folder)
    names = [name for name in stored if f"{name}_scale_inv" in stored]
    assert {stored[name].shape[0] % 128 for name in names} > {0}
    expected = {}
    for name in names:
        scales = spread(stored[f"{name}_scale_inv"].float(), stored[name].shape, 128, 128)
        expected[name] = (stored[name].float() * scales).bfloat16()
    assert differing({name: ours[name] for name in names}, expected) == []


def test_layers_that_transformers_drops_are_carried_along_dequantised(quantised, tmp_path):
    """DeepSeek-V3's last layer predicts further tokens; releases have it in FP8, too."""
    dense: dict[str, Any] = {"first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 16}
    heads: dict[str, Any] = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    folder = quantised("fp8", transformers.DeepseekV3Config(**WIDE, **dense, **heads))
    name = "model.layers.61.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors | in_tiles({name: torch.randn(200, 256)}))
    stored = load_file(folder / "model.safetensors")
    scales = spread(stored[f"{name}_scale_inv"], stored[name].shape, 128, 128)
    expected = (stored[name].float() * scales).bfloat16()
    with open_engine(folder) as engine:
        engine.save_pretrained(tmp_path / "out")
        save_checkpoint(tmp_path / "run", 1, engine, None, {})
    shutil.rmtree(folder)
    export(tmp_path / "run", tmp_path / "exported")
    for written in ("out", "exported"):
        tensors = tensors_of(tmp_path / written)
        assert torch.equal(tensors[name], expected)
        assert not any(n.endswith("_scale_inv") for n in tensors)
        assert "quantization_config" not in config_in(tmp_path / written)
        assert config_in(tmp_path / written)["dtype"] == "bfloat16"


@pytest.mark.parametrize("case", ["fp8-experts", "mxfp4"])
def test_a_part_is_read_for_itself(quantised, monkeypatch, case):
    """In whole rows or experts, and no more of them."""
    monkeypatch.setattr("megatrain.storage.dequantise.CHUNK_ELEMENTS", 5000)
    folder = quantised(case)
    how = quantisation_in(folder)
    assert how is not None
    for tensor in dequantised(open_shards(folder), how)[0].values():
        whole = torch.cat([piece for _, piece in tensor.chunks()])
        grain = whole.numel() // 2 if case == "mxfp4" else tensor.shape[-1]
        for start, stop in [(0, 1), (grain - 1, grain + 1), (grain, 2 * grain)]:
            pieces = list(tensor.chunks(start, stop))
            (begin, _), found = pieces[0], torch.cat([piece for _, piece in pieces])
            assert begin <= start and stop <= begin + len(found)
            assert begin % grain == len(found) % grain == 0
            assert len(found) <= stop - start + 2 * grain - 2
            assert torch.equal(found, whole[begin : begin + len(found)])


# -- damage ----------------------------------------------------------------------------------------

Change = Callable[[Tensors], Any]


def set_to(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def filled(value: float) -> Callable[[Tensor], Tensor]:
    def fill(tensor: Tensor) -> Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return fill


SCALE = f"{UP}_scale_inv"
DAMAGED: list[tuple[str, Change, str]] = [
    ("fp8", lambda t: t.pop(SCALE), r"lacks .*up_proj\.weight_scale_inv, .*cannot be dequantised"),
    ("fp8", lambda t: t.pop(UP), r"up_proj\.weight_scale_inv belongs to .*up_proj\.weight, which"),
    ("fp8", set_to(UP, Tensor.bfloat16), r"belongs to .*up_proj\.weight, which .*float8_e4m3fn"),
    ("fp8", set_to(SCALE, Tensor.t), r"weight_scale_inv has shape \[2, 1\].*needs \[1, 2\].*float"),
    ("fp8", set_to(SCALE, lambda s: s.to(torch.uint8)), r"weight_scale_inv .*uint8.*float"),
    ("fp8", set_to(SCALE, filled(float("inf"))), r"weight_scale_inv holds NaN or infinity"),
    ("fp8", set_to(UP, lambda w: w[0]), r"up_proj\.weight has shape \[256\].*not a matrix"),
    ("fp8-per-tensor", set_to(SCALE, lambda s: s.repeat(2)), r"weight_scale_inv has shape \[2\]"),
    ("mxfp4", lambda t: t.pop(f"{GATE_UP}_scales"), r"lacks .*gate_up_proj_scales, .*dequantised"),
    ("mxfp4", lambda t: t.pop(f"{GATE_UP}_blocks"), r"gate_up_proj_scales belongs to .*_blocks, w"),
    ("mxfp4", set_to(f"{GATE_UP}_scales", filled(255)), r"gate_up_proj_scales holds NaN"),
    ("mxfp4", set_to(f"{GATE_UP}_scales", lambda s: s[:, 1:]), r"_scales has shape .*needs \[2, 1"),
    ("mxfp4", set_to(f"{GATE_UP}_scales", Tensor.bfloat16), r"_scales .*bfloat16.*uint8"),
    ("mxfp4", set_to(f"{GATE_UP}_blocks", lambda b: b[..., :8]), r"_blocks has shape .*16 bytes"),
    ("mxfp4", lambda t: t.update({GATE_UP: torch.ones(2, 64, 128)}), r"gate_up_proj twice"),
]


@pytest.mark.slow
def test_damaged_scales_are_refused_by_name(quantised):
    for case, change, words in DAMAGED:
        folder = quantised(case)

        def damage(tensors: Tensors, change: Change = change) -> Tensors:
            change(tensors)
            return tensors

        rewrite(folder, damage)
        with pytest.raises(ModelError, match=words):
            loaded(folder)


def test_tiles_that_are_none_are_refused(quantised):
    for tile in [[128], [0, 128], "128", [128.0, 128]]:
        with pytest.raises(ModelError, match=r"config\.json: weight_block_size .*two numbers"):
            loaded(quantised("fp8", weight_block_size=tile))
