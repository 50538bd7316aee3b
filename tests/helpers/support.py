"""Tiny models of every family, engines on them, and random batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megatrain.engine.components import open_master
from megatrain.engine.constructors import arguments_of
from megatrain.engine.engine import Engine
from megatrain.engine.request import Request
from megatrain.losses import NextToken, Targets
from megatrain.models.names import Published
from megatrain.models.trials import small
from megatrain.optim import AdamW
from megatrain.settings import Settings
from megatrain.world import ALONE, World

VOCABULARY = 97
PAD = 0
NO_NAMES = Published((), (), {}, {}, "", ())  # of an anatomy without a model
Batch = dict[str, Tensor]

# -- models ----------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NOT_FALCON = ("intermediate_size", "num_key_value_heads", "max_position_embeddings", "pad_token_id")
FALCON = {name: value for name, value in SIZES.items() if name not in NOT_FALCON}
FALCON_7B = FALCON | {"parallel_attn": True, "multi_query": True, "new_decoder_architecture": False}
FALCON_RW = FALCON | {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}
OPT = FALCON | {"ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": PAD}
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT_NEO: dict[str, Any] = {
    "max_position_embeddings": 64, "attention_types": [[["global", "local", "global"], 1]],
    "window_size": 5, "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
BAMBA: dict[str, Any] = {
    "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_expand": 2,
}  # fmt: skip
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SLIDING = {"head_dim": 8, "sliding_window": 5}

# name -> (configuration class, its arguments)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES | UNTIED),
    "llama-tied": ("LlamaConfig", SIZES | TIED),
    "mistral-sliding": ("MistralConfig", SIZES | {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", SIZES | UNTIED),
    "qwen2-tied": ("Qwen2Config", SIZES | TIED),
    "qwen3": ("Qwen3Config", SIZES | UNTIED | {"head_dim": 8}),
    "falcon-7b": ("FalconConfig", FALCON_7B | TIED),
    "falcon-7b-untied": ("FalconConfig", FALCON_7B | UNTIED),
    "falcon-rw": ("FalconConfig", FALCON_RW),
    "falcon-40b": ("FalconConfig", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt-neox": ("GPTNeoXConfig", SIZES | UNTIED),
    "gpt-neox-tied": ("GPTNeoXConfig", SIZES | TIED),
}

# Tried the same way, beyond the families that are promised.
MORE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT | {"attn_pdrop": 0.0}),
    "opt": ("OPTConfig", OPT | {"word_embed_proj_dim": 32}),
    "gemma2": ("Gemma2Config", SIZES | SLIDING),
    "gemma3": (
        "Gemma3TextConfig",
        SIZES | SLIDING | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "phi3": ("Phi3Config", SIZES),
    "olmo2": ("Olmo2Config", SIZES),
    "cohere": ("CohereConfig", SIZES),
    "stablelm": ("StableLmConfig", SIZES),
    "ctrl": ("CTRLConfig", GPT | {"dff": 64}),  # scales the embeddings in place
    "gpt-bigcode": ("GPTBigCodeConfig", GPT | {"attn_pdrop": 0.0, "n_inner": 64}),
    # as the 350m: embeddings narrower than the hidden states, no final norm
    "opt-projected": (
        "OPTConfig",
        OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # returns its attention weights beside the hidden states
    "bloom": ("BloomConfig", FALCON | {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
}

# More that return such, for the few tests that are about this.
WITH_EXTRAS: dict[str, tuple[str, dict[str, Any]]] = {
    "mpt": ("MptConfig", FALCON | {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}),
    "gptj": ("GPTJConfig", GPT | {"attn_pdrop": 0.0, "rotary_dim": 4}),
    "codegen": ("CodeGenConfig", GPT | {"attn_pdrop": 0.0, "rotary_dim": 4}),
    "gpt-neo": ("GPTNeoConfig", FALCON | GPT_NEO),
    "gpt-neox-japanese": (
        "GPTNeoXJapaneseConfig",
        FALCON | {"max_position_embeddings": 64, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    ),
    "bamba": ("BambaConfig", SIZES | BAMBA),
}

EXPERTS = SIZES | {"num_experts_per_tok": 2, "num_local_experts": 4}
QWEN_EXPERTS = SIZES | {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16}
LINEAR = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
LINEAR |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
JAMBA = {f"{part}_layer_{name}": n for part in ("attn", "expert") for name, n in
         (("period", 2), ("offset", 1))}  # fmt: skip

# Of those above, one for each way in which layers, what they are given, or a model's ends differ.
# All families that can be built are tried by benchmarks.families.
KINDS = (
    "llama", "mistral-sliding", "qwen2-tied", "falcon-7b", "falcon-rw", "falcon-40b", "gpt-neox",
    "gpt2", "gemma2", "gemma3", "ctrl", "opt-projected", "mixtral", "bloom",
)  # fmt: skip

# Mixtures of experts, some of them beside recurrent layers.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": MORE_FAMILIES["mixtral"],
    "qwen2-moe": ("Qwen2MoeConfig", QWEN_EXPERTS | SHARED),
    "qwen3-moe": ("Qwen3MoeConfig", QWEN_EXPERTS | {"head_dim": 8, "mlp_only_layers": [0]}),
    "qwen3-next": (
        "Qwen3NextConfig",
        QWEN_EXPERTS | SHARED | LINEAR
        | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "gpt-oss": ("GptOssConfig", EXPERTS | SLIDING | {"rope_parameters": {"rope_type": "default"}}),
    "granitemoe": ("GraniteMoeConfig", EXPERTS),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        EXPERTS | MAMBA | {"layer_types": ["mamba", "attention"] * 2, "mamba_n_groups": 1},
    ),
    "olmoe": ("OlmoeConfig", QWEN_EXPERTS),
    "jamba": ("JambaConfig", QWEN_EXPERTS | JAMBA | {"mamba_dt_rank": 4, "mamba_d_state": 8}),
}  # fmt: skip

# Attention and a recurrence side by side in a layer, or one layer after the other: documents in one
# sequence are kept apart by the masks of the one, not by the state of the other.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-h1": (
        "FalconH1Config",
        SIZES
        | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
        | {"mamba_chunk_size": 8},
    ),
    "recurrent-gemma": (
        "RecurrentGemmaConfig",
        SIZES | {"num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 64},
    ),
}


# With tensors that are not trained: buffers, frozen parameters, indexers without gradients.
ROUTED = SIZES | UNTIED | {
    "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8, "sliding_window": 5,
}  # fmt: skip
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "num_key_value_heads": 4}
INDEXED = ROUTED | LATENT | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
GEMMA4 = ROUTED | {
    "hidden_size_per_layer_input": 0, "global_head_dim": 8, "top_k_experts": 2,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 8,
    "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
MIMO = {f"swa_{name}": n for name, n in
        (("num_attention_heads", 4), ("num_key_value_heads", 2), ("head_dim", 8), ("v_head_dim", 8))
        }  # fmt: skip
MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CONSTANT: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("AfmoeConfig", ROUTED | {"num_dense_layers": 1, "global_attn_every_n_layers": 2}),
    "apertus": ("ApertusConfig", SIZES),
    "axk1": ("AXK1Config", ROUTED | LATENT),
    "axk2": ("AXK2Config", INDEXED),
    "bailing-hybrid": ("BailingHybridConfig", ROUTED | LATENT),
    "beam": ("BeamConfig", ROUTED | LATENT | SPARSE),
    "deepseek-v3": ("DeepseekV3Config", ROUTED | LATENT),
    "deepseek-v32": ("DeepseekV32Config", INDEXED),
    "dots1": ("Dots1Config", ROUTED),
    "ernie4-5-moe": ("Ernie4_5_MoeConfig", ROUTED | {"moe_num_experts": 4, "moe_k": 2}),
    "exaone-moe": ("ExaoneMoeConfig", ROUTED | SPARSE),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4-moe": ("Gemma4TextConfig", GEMMA4 | {"enable_moe_block": True}),
    "gemma4-unified": ("Gemma4UnifiedTextConfig", GEMMA4),
    "glm4-moe": ("Glm4MoeConfig", ROUTED),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", ROUTED | LATENT | SPARSE),
    "glm-moe-dsa": ("GlmMoeDsaConfig", INDEXED | SPARSE | {"indexer_types": ["full"] * 3}),
    "hy-v3": ("HYV3Config", ROUTED),
    "kolibri1": ("Kolibri1Config", ROUTED | LATENT),
    "laguna": (
        "LagunaConfig", ROUTED | SPARSE | SHARED | {"num_attention_heads_per_layer": [4, 4, 4]},
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        ROUTED | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "mimo-v2-flash": ("MiMoV2FlashConfig", ROUTED | MIMO | {"v_head_dim": 8}),
    "minimax": ("MiniMaxConfig", ROUTED | MIXED | {"block_size": 4}),
    "minimax-m2": ("MiniMaxM2Config", ROUTED | {"rotary_dim": 4}),
    "minimax-m3": ("MiniMaxM3VLTextConfig", ROUTED),
    "nemotron-h": ("NemotronHConfig", ROUTED | NEMOTRON),
    "solar-open": ("SolarOpenConfig", ROUTED),
}  # fmt: skip


def known(table: dict[str, tuple[str, dict[str, Any]]]) -> list[str]:
    """The families of a table that this release of transformers has."""
    return [family for family, (name, _) in table.items() if hasattr(transformers, name)]


def tiny_config(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model of one of the families above."""
    tables = (FAMILIES, MORE_FAMILIES, WITH_EXTRAS, MIXTURES, RECURRENT, CONSTANT)
    name, arguments = next(table[family] for table in tables if family in table)
    arguments = {**arguments, **changes}
    if "layer_types" in arguments:
        arguments["layer_types"] = arguments["layer_types"][: arguments["num_hidden_layers"]]
    return getattr(transformers, name)(**arguments)


def plain_model(
    config: Any,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attention: str = "auto",
    device: str = "cpu",
) -> nn.Module:
    """The family's own model of random values, in training mode."""
    model = small.plain_model(config, seed=seed, attention=attention)
    return model.to(device=device, dtype=dtype).train()


# -- engines ---------------------------------------------------------------------------------------


def engine_of(
    model: Any,
    *,
    weights: nn.Module | None = None,
    settings: Settings | None = None,
    world: World = ALONE,
    **options: Any,
) -> Engine:
    """A float32 CPU engine with clipping and weight decay, unless told otherwise.

    Args:
        model: a family's name, or a configuration.
        weights: a model that has them; default: that of `plain_model`.
    """
    config = tiny_config(model) if isinstance(model, str) else model
    options = {
        "precision": "float32",
        "device": "cpu",
        "optimizer": AdamW(lr=1e-3, weight_decay=0.1),
        "max_grad_norm": 0.5,
        "router_aux_loss_coef": 0.0,
        **options,
    }
    settings = settings or Settings(head_chunk_tokens=7)
    request = Request.of_keywords(config, settings=settings, **options)
    engine = Engine(**arguments_of(request), world=world)
    if weights is None:
        weights = drawn(Drawn(f"{type(config).__name__} {config.to_dict()}", config))
    copy_weights(weights, engine)
    return engine


def copy_weights(model: nn.Module, engine: Engine) -> None:
    """Copy a plain model's weights into the engine's store, under the model's own names."""
    weights = model.state_dict()
    for block in engine.anatomy.blocks:
        master = torch.zeros(block.layout.numel)
        for name, view in block.layout.views(master).items():
            view.copy_(weights[name])
        open_master(engine.store, block.index, master)
    for name in engine.constants:
        engine.constants[name].copy_(weights[name])
    engine.constants.expect({})
    engine.weights_changed()


@dataclass(frozen=True)
class Drawn:
    """Which plain model: configurations cannot be hashed, but their texts can."""

    key: str
    config: Any = field(compare=False)


@lru_cache(maxsize=16)
def drawn(which: Drawn) -> nn.Module:
    """A plain model to copy from, which nobody changes."""
    return plain_model(which.config)


# -- batches ---------------------------------------------------------------------------------------


def micro_batches(
    seed: int,
    shapes: Sequence[tuple[int, int]] = ((2, 9), (3, 13), (1, 6)),
    *,
    pad_left: bool = False,
) -> list[Batch]:
    """Random micro-batches of these (rows, tokens).

    Rows have unequal real lengths, and the first two tokens of each are no targets.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for rows, tokens in shapes:
        ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
        lengths = torch.randint(tokens // 2 + 1, tokens + 1, (rows,), generator=generator)
        lengths[0] = tokens
        mask = (torch.arange(tokens) < lengths[:, None]).long()
        if pad_left:
            mask = mask.flip(1)
        ids[mask == 0] = PAD
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :2] = -100
        batches.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return batches


def full_batches(seed: int, shapes: Sequence[tuple[int, int]] = ((2, 8), (2, 8))) -> list[Batch]:
    """Random micro-batches without padding, every token a target."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCABULARY, shape, generator=generator) for shape in shapes]
    return [{"input_ids": x, "labels": x.clone()} for x in ids]


def without_targets(batches: Sequence[Batch]) -> list[Batch]:
    return [batch | {"labels": torch.full_like(batch["labels"], -100)} for batch in batches]


class Scaled(NextToken):
    """The loss times a factor: one that is not finite makes a step that cannot be taken."""

    def __init__(self, factor: float = float("inf")) -> None:
        self.factor = factor

    def __call__(self, logprobs: Tensor, targets: Targets) -> tuple[Tensor, dict[str, Tensor]]:
        return super().__call__(logprobs, targets)[0] * self.factor, {}
