"""Tiny multimodal models, and the folders that transformers saves of them."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoTokenizer

from megatrain.losses import IGNORE
from megatrain.models.pretrained import with_stops
from megatrain.models.trials.small import plain_model
from tests.helpers.commands import tiny_tokenizer
from tests.helpers.support import SIZES, SLIDING

TEXT = SIZES | {"head_dim": 8}
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "patch_size": 4, "image_size": 8, "num_channels": 3,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 32, "num_position_embeddings": 4, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {"rope_parameters": ROTARY | {"mrope_section": [1, 1, 2]}}
HALF_MROPE: dict[str, Any] = {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
HALF_MROPE = {"rope_parameters": ROTARY | HALF_MROPE}
LINEAR: dict[str, Any] = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
LINEAR |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
LINEAR |= HALF_MROPE | {"layer_types": ["linear_attention", "full_attention"] * 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TILES = {"image_grid_pinpoints": [[16, 8], [8, 16]]}
LLAMA4 = {"intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 8}

# name -> (the class's name without its end, what its text has, what its tower has, and the rest)
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5", TEXT | LINEAR, QWEN_VISION, {}),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        TEXT | LINEAR | MOE | {"shared_expert_intermediate_size": 16},
        QWEN_VISION,
        {},
    ),
    "gemma3": (
        "Gemma3",
        SIZES | SLIDING | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        VISION,
        {},
    ),
    "mistral3": ("Mistral3", TEXT, VISION | {"image_size": 16}, {}),
    "llama4": (
        "Llama4",
        TEXT | LLAMA4,
        VISION | {f"{name}_dim": 16 for name in
                  ("vision_output", "projector_input", "projector_output")},
        {},
    ),
    "qwen3-vl": ("Qwen3VL", TEXT | MROPE, QWEN_VISION, {}),
    "qwen3-vl-moe": ("Qwen3VLMoe", TEXT | MROPE | MOE, QWEN_VISION, {}),
    "qwen2.5-vl": ("Qwen2_5_VL", SIZES | MROPE, QWEN_VISION | {"fullatt_block_indexes": [1]}, {}),
    "qwen2-vl": (
        "Qwen2VL",
        SIZES | MROPE | {"tie_word_embeddings": True},
        {"depth": 3, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
        {},
    ),
    "glm4v": ("Glm4v", SIZES | HALF_MROPE, QWEN_VISION | {"image_size": 8}, {}),
    "internvl": ("InternVL", SIZES, VISION | {"image_size": [16, 16], "patch_size": [4, 4]}, {}),
    "llava": ("Llava", SIZES, VISION, {}),
    "llava-next": ("LlavaNext", SIZES, VISION, TILES),  # a parameter that is no module's
    "llava-onevision": ("LlavaOnevision", SIZES, VISION, TILES),
}  # fmt: skip
OF_IMAGES = ("image", "video", "vision_start", "vision_end", "boi", "eoi")
IMAGE = 90
TOKENS = {f"{name}_token_id": IMAGE + i for i, name in enumerate(OF_IMAGES)}
TOKENS |= {"image_token_index": IMAGE, "mm_tokens_per_image": 4}


def multimodal_config(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model. changes: of its text."""
    name, text, tower, rest = MULTIMODAL[family]
    text = text | changes
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][: text["num_hidden_layers"]]
    of_family = getattr(transformers, f"{name}Config")
    default = of_family()
    settings = {
        "text_config": {"model_type": default.text_config.model_type} | text,
        "vision_config": {"model_type": default.vision_config.model_type} | tower,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "architectures": [f"{name}ForConditionalGeneration"],
    }
    return of_family(**settings | TOKENS | rest)


# -- images ----------------------------------------------------------------------------------------

SIDES = ((4, 4), (2, 4))  # an image's patches down and across, row by row
TEXT_TOKENS = 12  # of a row at least
# What says how many patches to a side become one token, unless it follows from something else.
MERGED_BY = "spatial_merge_size"
MERGES = {"internvl": 2}


def seeing_batch(config: Any, seed: int = 0, rows: int = 2) -> dict[str, Tensor]:
    """Rows of text with an image each, and what the model's forward takes of the images.

    Images begin elsewhere in every row, and differ in size where the family lets them. No target is
    an image's, nor one of the first tokens.
    """
    draws = torch.Generator().manual_seed(seed)
    taken = inspect.signature(getattr(transformers, config.architectures[0]).forward).parameters
    sides = torch.tensor(SIDES * rows)[:rows]
    counts, images = images_of(config, taken, sides, draws)
    ids = torch.randint(3, IMAGE, (rows, TEXT_TOKENS + max(counts)), generator=draws)
    labels = ids.clone()
    for row, count in enumerate(counts):
        start = 3 + row % 4
        ids[row, start] = TOKENS["vision_start_token_id"]
        ids[row, start + 1 : start + 1 + count] = IMAGE
        ids[row, start + 1 + count] = TOKENS["vision_end_token_id"]
        labels[row, : start + 2 + count] = IGNORE
    seen = (ids == IMAGE).long()
    images |= {name: seen for name in ("mm_token_type_ids", "token_type_ids") if name in taken}
    return {"input_ids": ids, "labels": labels} | images


def images_of(
    config: Any, taken: Collection[str], sides: Tensor, draws: torch.Generator
) -> tuple[list[int], dict[str, Tensor]]:
    """How many tokens each image becomes, and the images as the model takes them."""
    vision = config.vision_config
    patch, channels = one_of(vision, "patch_size"), one_of(vision, "in_channels num_channels") or 3
    merge = MERGES.get(config.model_type) or one_of(vision, MERGED_BY) or one_of(config, MERGED_BY)
    counts = (sides // (merge or 1)).prod(1).tolist()
    if "image_grid_thw" in taken:
        of_patch = channels * patch**2 * (one_of(vision, "temporal_patch_size") or 1)
        pixels = torch.randn(int(sides.prod(1).sum()), of_patch, generator=draws)
        grid = torch.cat([torch.ones_like(sides[:, :1]), sides], 1)
        return counts, {"pixel_values": pixels, "image_grid_thw": grid}
    side = one_of(vision, "image_size")
    more: dict[str, Tensor] = {}
    tiles: tuple[int, ...] = ()
    if vision.model_type == "pixtral":
        more["image_sizes"] = sides * patch
    else:
        across = side // patch  # all images are squares of one size
        counts = [(across // (merge or 1)) ** 2] * len(sides)
        if hasattr(config, "image_grid_pinpoints"):  # the whole, and two parts above each other
            tiles, more["image_sizes"] = (3,), torch.tensor([[2 * side, side]] * len(sides))
            counts = [count + 2 * across * (across + 1) for count in counts]
    pixels = torch.randn(len(sides), *tiles, channels, side, side, generator=draws)
    return counts, {"pixel_values": pixels} | more


def one_of(config: Any, names: str) -> Any:
    """The first setting of these that a configuration has, one number for both sides of a square;
    None if it has none."""
    found = next((value for name in names.split() if (value := getattr(config, name, None))), None)
    return found[0] if isinstance(found, list | tuple) else found


# -- folders ---------------------------------------------------------------------------------------


def skip_unless_it_reads_text(model: nn.Module) -> None:
    """Llama 4 reads no text in transformers 5.24, whose forward asks for images that are not there;
    the engine refuses it then."""
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long))
    except AttributeError as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")


def save_multimodal(folder: Path, family: str, **changes: Any) -> nn.Module:
    """A random model, which is also saved by transformers, with a tokenizer and the files of a
    processor."""
    model: Any = plain_model(multimodal_config(family, **changes))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    # of the class that it chooses for the model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generation, _ = with_stops(model.config, tokenizer, model.generation_config)
    assert generation is not None
    (folder / "generation_config.json").write_text(generation.to_json_string())
    (folder / "preprocessor_config.json").write_text('{"size": {"height":8}}')
    (folder / "video_preprocessor_config.json").write_text("{}\n")
    (folder / "processor_config.json").write_text('{"processor_class": "AProcessor"}\n')
    return model  # type: ignore[no-any-return]
