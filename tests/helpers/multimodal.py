"""Tiny multimodal models, and the folders that transformers saves of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
from tests.helpers.support import GEMMA4, LATENT, ROUTED, SIZES, SLIDING, VOCABULARY

Made = tuple[list[int], dict[str, Tensor]]
TEXT = SIZES | {"head_dim": 8}
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "patch_size": 4, "image_size": 16, "num_channels": 3,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 32, "num_position_embeddings": 4, "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1], "image_size": 8,
}  # fmt: skip
SMALL = VISION | {"image_size": 8}
FOUR = VISION | {"num_patches": 4}
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {"rope_parameters": ROTARY | {"mrope_section": [1, 1, 2]}}
HALF_MROPE: dict[str, Any] = {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
HALF_MROPE = {"rope_parameters": ROTARY | HALF_MROPE}
LINEAR: dict[str, Any] = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
LINEAR |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
LINEAR |= HALF_MROPE | {"layer_types": ["linear_attention", "full_attention"] * 2}
SLIDES = SLIDING | {"layer_types": ["sliding_attention", "full_attention"] * 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = MOE | {"shared_expert_intermediate_size": 16}
LLAMA4 = {"intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 8}
LLAMA4_VISION = VISION | {"intermediate_size": 64, "vision_output_dim": 16}
LLAMA4_VISION |= {"projector_input_dim": 16, "projector_output_dim": 16}
# embeddings of tokens for each layer
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
GEMMA4_VISION = VISION | {"model_type": "gemma4_vision", "head_dim": 8, "num_key_value_heads": 2}
GEMMA4_VISION |= {"pooling_kernel_size": 2, "position_embedding_size": 16}
GOT_VISION = VISION | {"image_size": 32, "output_channels": 16, "mlp_dim": 16, "window_size": 4}
GOT_VISION |= {"global_attn_indexes": [1]}
DOCLING = {"out_hidden_size": 32, "scale_factor": 2, "deepstack_visual_indexes": [0, 1]}
INTERNVL = VISION | {"image_size": [16, 16], "patch_size": [4, 4], "drop_path_rate": 0.0}
KIMI = {"pos_emb_height": 4, "pos_emb_width": 4}
KOSMOS: dict[str, Any] = {"embed_dim": 32, "layers": 3, "ffn_dim": 64, "attention_heads": 4}
KOSMOS |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "dropout": 0.0}
KOSMOS_VISION = VISION | {"patch_embed_hidden_size": 48, "head_dim": 8, "max_num_patches": 16}
PERCEIVER = {"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 2}
PERCEIVER |= {"resampler_n_heads": 2, "resampler_head_dim": 16, "num_key_value_heads": 1}
VQ: dict[str, Any] = {"embed_dim": 8, "num_embeddings": 8, "latent_channels": 32}
VQ |= {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}
VQ |= {"projection_dim": 32, "image_token_embed_dim": 32}
ARIA = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
QUERIES = {"projector_patch_to_query_dict": {16: 4}, "max_value_projector_patch_to_query_dict": 4}
ALIGNED = {"alignment_intermediate_size": 32}
M3 = {"dense_intermediate_size": 64, "shared_intermediate_size": 16}
M3_PROJECTOR = {"projector_hidden_size": 32, "merged_hidden_size": 128}
INSERTED = {"insert_layer_id": 1}  # after this layer of the tower, patches are merged
TILES = {"image_grid_pinpoints": [[16, 8], [8, 16]]}
OVIS: dict[str, Any] = {"hidden_size": 32, "vocab_size": VOCABULARY}
OVIS |= {"visual_indicator_token_ids": [91, 92, 93, 94, 95]}


def built_as(name: str, **rest: Any) -> dict[str, Any]:
    return {"architectures": [name]} | rest


# name -> (the class's name without its end, what its text has, what its tower has, the rest)
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "aria": ("Aria", TEXT | ARIA, VISION, QUERIES),
    "cohere2-vision": ("Cohere2Vision", SIZES | SLIDES, VISION, ALIGNED),
    "cosmos3-edge": ("Cosmos3Edge", TEXT | MROPE, FOUR, {"projector_hidden_size": 32}),
    "cosmos3-omni": ("Cosmos3Omni", TEXT | MROPE, QWEN_VISION, {}),
    "deepseek-vl": ("DeepseekVL", SIZES, SMALL, {}),
    "exaone4.5": ("Exaone4_5_", SIZES | SLIDES, QWEN_VISION | {"num_key_value_heads": 1}, {}),
    "fuyu": ("Fuyu", SIZES, {}, built_as("FuyuForCausalLM", patch_size=4)),  # no tower
    "gemma3": ("Gemma3", SIZES | SLIDES, VISION, {}),
    "gemma4": ("Gemma4", GEMMA4, GEMMA4_VISION, {}),
    "gemma4-e2b": ("Gemma4", GEMMA4 | PER_LAYER, GEMMA4_VISION, {}),
    "glm-ocr": ("GlmOcr", TEXT | HALF_MROPE, QWEN_VISION, {}),
    "glm4.6v": ("Glm46V", SIZES | HALF_MROPE, QWEN_VISION, {}),
    "glm4v": ("Glm4v", SIZES | HALF_MROPE, QWEN_VISION, {}),
    "got-ocr2": ("GotOcr2", SIZES, GOT_VISION, {}),
    "granite-docling": ("GraniteDocling", SIZES, VISION | DOCLING, {}),
    "hyperclovax-vision-v2": ("HyperCLOVAXVisionV2", TEXT, QWEN_VISION, {}),
    "idefics2": ("Idefics2", TEXT, VISION, {"perceiver_config": PERCEIVER}),
    "idefics3": ("Idefics3", TEXT, VISION, {}),
    "internvl": ("InternVL", SIZES, INTERNVL, {}),
    # a generator of images beside the tower
    "janus": ("Janus", SIZES, VISION | {"projection_dim": 32}, {"vq_config": VQ}),
    "kimi-k2.5": ("Kimi_K25", ROUTED | LATENT, VISION | KIMI, {"projection_hidden_size": 16}),
    "kosmos-2.5": ("Kosmos2_5", KOSMOS, KOSMOS_VISION, {"latent_query_num": 4}),
    "lfm2-vl": (
        "Lfm2Vl",
        SIZES | {"layer_types": ["conv", "full_attention"] * 2},
        FOUR,
        {"projector_hidden_size": 32},
    ),
    "lighton-ocr": ("LightOnOcr", TEXT, VISION, {}),
    "llama4": ("Llama4", TEXT | LLAMA4, LLAMA4_VISION, {}),
    "llava": ("Llava", SIZES, VISION, {}),
    "llava-next": ("LlavaNext", SIZES, SMALL, TILES),  # a parameter that is no module's
    "llava-next-video": ("LlavaNextVideo", SIZES, SMALL, TILES),
    "llava-onevision": ("LlavaOnevision", SIZES, SMALL, TILES),
    "minicpm-ocr": ("MiniCPMOcr", TEXT | LINEAR, VISION | INSERTED, INSERTED),
    "minicpm-v4.6": ("MiniCPMV4_6", TEXT | LINEAR, VISION | INSERTED, INSERTED),
    "minicpm-v4.7": ("MiniCPMV4_7", TEXT | LINEAR, VISION | INSERTED, INSERTED),
    "minimax-m3-vl": (
        "MiniMaxM3VL",
        ROUTED | M3,
        VISION,
        built_as("MiniMaxM3SparseForConditionalGeneration", **M3_PROJECTOR),
    ),
    "mistral3": ("Mistral3", TEXT, VISION, {}),
    "ovis2": ("Ovis2", SIZES, VISION | {"vocab_size": 21}, OVIS),
    "paddleocr-vl": ("PaddleOCRVL", TEXT | MROPE, SMALL, {}),
    "pp-chart2table": (
        "PPChart2Table", SIZES, GOT_VISION, built_as("GotOcr2ForConditionalGeneration"),
    ),
    "qianfan-ocr": ("QianfanOCR", TEXT, INTERNVL, {}),
    "qwen2-vl": (
        "Qwen2VL",
        SIZES | MROPE | {"tie_word_embeddings": True},
        {"depth": 3, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
        {},
    ),
    "qwen2.5-vl": ("Qwen2_5_VL", SIZES | MROPE, QWEN_VISION, {}),
    "qwen3-vl": ("Qwen3VL", TEXT | MROPE, QWEN_VISION, {}),
    "qwen3-vl-moe": ("Qwen3VLMoe", TEXT | MROPE | MOE, QWEN_VISION, {}),
    "qwen3.5": ("Qwen3_5", TEXT | LINEAR, QWEN_VISION, {}),
    "qwen3.5-moe": ("Qwen3_5Moe", TEXT | LINEAR | SHARED, QWEN_VISION, {}),
    "shieldgemma2": (
        "ShieldGemma2", SIZES | SLIDES, VISION, built_as("Gemma3ForConditionalGeneration"),
    ),
    "smolvlm": ("SmolVLM", TEXT, VISION, {}),
    "video-llama3": ("VideoLlama3", SIZES, VISION, {}),
    "video-llava": ("VideoLlava", SIZES, VISION, {}),
    "vip-llava": ("VipLlava", SIZES, VISION, {"vision_feature_layer": [-2, -3, 1]}),
}  # fmt: skip
OF_IMAGES = ("image", "video", "vision_start", "vision_end", "boi", "eoi", "audio")
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
    settings: dict[str, Any] = {
        part: {"model_type": getattr(getattr(default, part), "model_type", None)} | values
        for part, values in (("text_config", text), ("vision_config", tower))
        if values
    }
    settings |= built_as(f"{name}ForConditionalGeneration")
    settings["tie_word_embeddings"] = text.get("tie_word_embeddings", False)
    return of_family(**settings | TOKENS | rest)


# -- images ----------------------------------------------------------------------------------------

SIDES = ((4, 4), (2, 4))  # an image's patches down and across, of one row and the next
TEXT_TOKENS = 12  # of a row at least
# What says how many patches on a side become one token, and families where nothing does.
MERGED_BY = (
    "spatial_merge_size merge_kernel_size downsample_factor scale_factor pooling_kernel_size"
)
MERGED = {
    "aria": 2, "gemma3": 2, "got_ocr2": 4, "idefics2": 2, "internvl": 2, "kosmos-2.5": 2,
    "llama4": 2, "minicpmv4_6": 4, "minicpmv4_7": 4, "pp_chart2table": 4, "qianfan_ocr": 2,
    "shieldgemma2": 2, "video_llama_3": 2,
}  # fmt: skip
SEEN = ("mm_token_type_ids", "token_type_ids", "image_embeds_position_mask")


def seeing_batch(config: Any, seed: int = 0, rows: int = 2) -> dict[str, Tensor]:
    """Rows of text with an image each, and what the model's forward takes of the images.

    Images begin elsewhere in every row, and differ in size where the family lets them. No target is
    an image's, nor one of the tokens before it.
    """
    draws = torch.Generator().manual_seed(seed)
    taken = inspect.signature(getattr(transformers, config.architectures[0]).forward).parameters
    pictures = Pictures(config, torch.tensor(SIDES * rows)[:rows], draws)
    counts, images = next(make for key, make in TAKEN.items() if key in taken)(pictures)
    ids = torch.randint(3, IMAGE, (rows, TEXT_TOKENS + max(counts)), generator=draws)
    labels = ids.clone()
    for row, count in enumerate(counts):
        start = 3 + row % 4
        ids[row, start] = TOKENS["vision_start_token_id"]
        ids[row, start + 1 : start + 1 + count] = IMAGE
        ids[row, start + 1 + count] = TOKENS["vision_end_token_id"]
        labels[row, : start + 2 + count] = IGNORE
    images |= {name: (ids == IMAGE).long() for name in SEEN if name in taken}
    return {"input_ids": ids, "labels": labels} | images


class Pictures:
    """One image a row, as families take them: each way returns how many tokens an image becomes,
    and what forward takes."""

    def __init__(self, config: Any, sides: Tensor, draws: torch.Generator) -> None:
        self.config, self.draws, self.rows = config, draws, len(sides)
        self.tower = vision = getattr(config, "vision_config", config)
        own = one_of(vision, MERGED_BY) or one_of(config, MERGED_BY) or 1
        self.merge: int = MERGED.get(config.model_type, own)
        self.sides = sides * max(self.merge // 2, 1)
        self.counts: list[int] = (self.sides // self.merge).prod(1).tolist()
        self.lengths = self.sides.prod(1)
        self.patch: int = one_of(vision, "patch_size")
        self.channels: int = one_of(vision, "in_channels num_channels") or 3
        self.values = self.channels * self.patch**2 * (one_of(vision, "temporal_patch_size") or 1)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draws)

    def packed(self) -> Made:
        """The patches of all images one after the other."""
        pixels = self.draw(int(self.lengths.sum()), self.values)
        if self.config.model_type in ("kimi_k25", "paddleocr_vl"):
            pixels = pixels.view(-1, self.channels, self.patch, self.patch)
        grid = torch.cat([torch.ones_like(self.sides[:, :1]), self.sides], 1)
        made = {"pixel_values": pixels, "image_grid_thw": grid}
        if self.config.model_type == "video_llama_3":
            made["image_merge_sizes"] = torch.full_like(self.lengths, self.merge)
        return self.counts, made

    def strip(self) -> Made:
        """The patches of all images side by side in one image."""
        pixels = self.draw(1, self.channels, self.patch, int(self.lengths.sum()) * self.patch)
        return self.counts, {"pixel_values": pixels, "target_sizes": self.sides}

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each image's patches, filled up to the longest; which are real; and their places down
        and across."""
        places = torch.arange(int(self.lengths.max())).expand(self.rows, -1)
        real, across = places < self.lengths[:, None], self.sides[:, 1:]
        pixels = self.draw(*real.shape, self.values) * real[..., None]
        return pixels, real, torch.stack([places // across, places % across], -1)

    def shaped(self) -> Made:
        pixels, real, _ = self.padded()
        made = {"pixel_values": pixels, "spatial_shapes": self.sides}
        return self.counts, made | {"pixel_attention_mask": real.long()}

    def placed(self) -> Made:
        pixels, real, places = self.padded()
        places = places.flip(-1).masked_fill(~real[..., None], -1)  # across, and down
        return self.counts, {"pixel_values": pixels, "image_position_ids": places}

    def numbered(self) -> Made:
        """A patch's first two values are its place."""
        pixels, real, places = self.padded()
        places = (places + 1) * real[..., None]
        pixels = torch.cat([places.float(), pixels], -1)
        return [self.config.latent_query_num] * self.rows, {"flattened_patches": pixels}

    def plain_patches(self) -> Made:
        return [16] * self.rows, {"pixel_values": self.draw(self.rows, 16, self.values)}

    def squares(self, *tiles: int) -> Made:
        """Images of the tower's size."""
        side: int = one_of(self.tower, "image_size")
        pixels = self.draw(self.rows, *tiles, self.channels, side, side)
        return [(side // self.patch // self.merge) ** 2] * self.rows, {"pixel_values": pixels}

    def masked(self) -> Made:
        """In squares; a mask says where there is an image, or which parts of it there are."""
        counts, made = self.squares(1)
        if self.config.model_type == "granite_docling":
            mask = torch.ones(self.rows, 1, dtype=torch.bool)
        else:
            pixels = torch.arange(made["pixel_values"].shape[-1])
            down, across = (pixels < ends[:, None] * self.patch for ends in self.sides.T)
            mask = down[:, None, :, None] & across[:, None, None]
        return counts, made | {"pixel_attention_mask": mask}

    def sized(self) -> Made:
        """The whole and two parts above each other, with a token at each end of their lines; or an
        image in a square that it need not fill; or else a square."""
        if hasattr(self.config, "image_grid_pinpoints"):
            counts, made = self.squares(3)
            side: int = self.tower.image_size
            lines = 2 * side // self.patch
            made["image_sizes"] = torch.tensor([[2 * side, side]] * self.rows)
            return [count + lines * (lines // 2 + 1) for count in counts], made
        counts, made = self.squares()
        if self.tower.model_type == "pixtral":
            return self.counts, made | {"image_sizes": self.sides * self.patch}
        return counts, made


# by what only they take; the first counts
TAKEN: dict[str, Callable[[Pictures], Made]] = {
    "image_grid_thw": Pictures.packed,
    "target_sizes": Pictures.strip,
    "spatial_shapes": Pictures.shaped,
    "image_position_ids": Pictures.placed,
    "flattened_patches": Pictures.numbered,
    "image_patches": Pictures.plain_patches,
    "pixel_attention_mask": Pictures.masked,
    "image_sizes": Pictures.sized,
    "pixel_values": Pictures.squares,
}


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
