"""Tiny multimodal models: their configurations, as transformers has them."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support import SIZES, SLIDING

MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "patch_size": 4, "image_size": 8, "num_channels": 3,
}  # fmt: skip
QWEN_VISION = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 32, "num_position_embeddings": 4, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
LINEAR = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
LINEAR |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
HALF_MROPE = {
    "rope_parameters": {
        "rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    }
}  # fmt: skip
HEAD_DIM = {"head_dim": 8}

# name -> (class of the model, its arguments for the text, for the rest, and others)
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3.5": (
        "Qwen3_5",
        SIZES | LINEAR | HEAD_DIM | HALF_MROPE
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        QWEN_VISION,
        {},
    ),
    "gemma3": (
        "Gemma3",
        SIZES | SLIDING | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        VISION,
        {"mm_tokens_per_image": 4},
    ),
    "mistral3": ("Mistral3", SIZES | HEAD_DIM, VISION, {}),
    "llama4": (
        "Llama4",
        SIZES | HEAD_DIM
        | {"intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 8},
        VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        {},
    ),
    "qwen3-vl": ("Qwen3VL", SIZES | HEAD_DIM | MROPE, QWEN_VISION, {}),
    "qwen2.5-vl": ("Qwen2_5_VL", SIZES | MROPE, QWEN_VISION | {"fullatt_block_indexes": [1]}, {}),
    "qwen2-vl": (
        "Qwen2VL", SIZES | MROPE,
        {"depth": 3, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}, {},
    ),
    "glm4v": ("Glm4v", SIZES | {"rope_parameters": HALF_MROPE["rope_parameters"]}, QWEN_VISION | {"image_size": 8}, {}),
    "internvl": ("InternVL", SIZES, VISION | {"image_size": [8, 8], "patch_size": [4, 4]}, {}),
    "llava": ("Llava", SIZES, VISION, {}),
    "llava-next": ("LlavaNext", SIZES, VISION, {}),
    "paligemma": ("PaliGemma", SIZES | HEAD_DIM, VISION, {}),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        SIZES | LINEAR | HEAD_DIM | HALF_MROPE
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
           "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16},
        QWEN_VISION,
        {},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        SIZES | HEAD_DIM | MROPE
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        QWEN_VISION, {},
    ),
}  # fmt: skip
TOKENS = {f"{name}_token_id": 90 + i for i, name in enumerate(
    ("image", "video", "vision_start", "vision_end", "boi", "eoi"))} | {"image_token_index": 90}


def multimodal_config(family: str) -> Any:
    name, text, rest, others = MULTIMODAL[family]
    if "layer_types" in text:
        text = text | {"layer_types": text["layer_types"][: text["num_hidden_layers"]]}
    config = getattr(transformers, f"{name}Config")
    default = config()
    return config(
        text_config={"model_type": default.text_config.model_type} | text,
        vision_config={"model_type": default.vision_config.model_type} | rest,
        architectures=[f"{name}ForConditionalGeneration"],
        **TOKENS, **others,
    )
