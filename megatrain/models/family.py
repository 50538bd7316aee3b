"""The causal LM that transformers builds for a configuration, and the settings that are refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from megatrain.errors import ModelError
from megatrain.models.meta import meta_parameters

# Prefixes of settings for other heads than the language model's, or for an encoder.
UNUSED = ("classifier", "summary", "encoder")
# Far beyond any model. A file that says more would have us build modules for hours, or ask for
# memory before the plan.
LARGEST = {
    "num_hidden_layers": 1 << 12,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 16,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
    "max_position_embeddings": 1 << 32,
}


def choose_attention(config: Any, attention: str) -> str:
    """The attention implementation to ask transformers for.

    "auto" is PyTorch's scaled-dot-product attention, except where the family caps attention logits,
    which that function cannot do.
    """
    if attention != "auto":
        return attention
    text = config.get_text_config()
    capped = getattr(text, "attn_logit_softcapping", None) is not None  # few families define it
    return "eager" if capped else "sdpa"


def build_model(
    config: Any, attention: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> nn.Module:
    """A causal LM of `config`, in training mode, with meta parameters of `dtype`.

    Raises:
        ModelError: transformers has no causal LM for this configuration, or refuses the attention
            implementation or a size.
    """
    refuse_sizes(config)
    config = copy.deepcopy(config)
    config.use_cache = False
    try:
        with meta_parameters():
            model = causal_lm(config, attention, dtype, trust_remote_code)
            model.tie_weights()
    except Exception as error:  # whatever a family's code does with numbers that it never met
        raise ModelError(
            f"model type {config.model_type!r} cannot be built as a causal language model: "
            f"{' '.join(str(error).split()) or type(error).__name__}"
        ) from error
    return model.train()  # type: ignore[no-any-return]


def causal_lm(
    config: Any, attention: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> Any:
    """transformers' causal LM of `config`, in which it notes the attention.

    attention: as `choose_attention`; "auto" falls back to eager.

    Raises whatever the family's code does.
    """
    from transformers import AutoModelForCausalLM

    wanted = choose_attention(config, attention)
    from_config: Any = partial(
        AutoModelForCausalLM.from_config, config, dtype=dtype, trust_remote_code=trust_remote_code
    )
    try:
        return from_config(attn_implementation=wanted)
    except ValueError:
        if attention != "auto" or wanted == "eager":
            raise
        # the family has no SDPA, because of sinks, say
        return from_config(attn_implementation="eager")


def refuse_sizes(config: Any) -> None:
    """Raise ModelError for sizes that no model has."""
    text = config.get_text_config()
    for name, largest in LARGEST.items():
        size = getattr(text, name, None)
        if isinstance(size, int | float) and not size <= largest:  # NaN, too
            raise ModelError(f"{name} of {size:.6g} in config.json is more than any model has")


def refuse_what_is_not_built(model: nn.Module, text: Any) -> None:
    """Raise ModelError for weights and settings that would be ignored without a word.

    text: the language model's part of the configuration.
    """
    family = type(model).__name__
    parameters = model.named_parameters(remove_duplicate=False)
    trained = {name for name, p in parameters if p.requires_grad}
    others = [name for name in model.state_dict() if name not in trained]
    if others:  # nothing here would load, keep or save it
        raise ModelError(
            f"{family} has {others[0]}, which belongs to its weights but is not trained; "
            "it cannot be streamed yet"
        )
    settings = text.to_dict()
    reason = ""
    if settings.get("output_router_logits"):
        reason = "output_router_logits asks for the routers' balancing loss, whose weight is "
        reason += "train.router_aux_loss_coef here; set it to false in config.json"
    elif settings.get("use_bidirectional_attention") in (True, "all"):
        reason = "use_bidirectional_attention shows every token the one it should predict; "
        reason += "set it to false"
    elif skipping := [key for key, rate in settings.items() if "layerdrop" in key and rate]:
        reason = f"{skipping[0]} leaves out whole layers at random, which is not built; "
        reason += "set it to 0 in config.json"
    if reason:
        raise ModelError(f"{family}: {reason}")


def draws_random_numbers(model: Any) -> bool:
    """True if any part of a transformers model draws random numbers in training mode."""
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    return any(
        isinstance(value, float) and value > 0 and ("drop" in key or "jitter" in key)
        for key, value in model.config.get_text_config().to_dict().items()
        if not key.startswith(UNUSED)
    )
