"""The model that transformers builds for a configuration, and the settings that are refused."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from megatrain.data.micro_batches import Regime, Regimes
from megatrain.errors import ModelError
from megatrain.models.constants import is_below
from megatrain.models.implementations import NAME as FUSED_SINKS
from megatrain.models.implementations import (
    use_fused_sinks,
    use_grouped_rows,
    use_one_kernel_for_images,
)
from megatrain.models.meta import meta_parameters
from megatrain.models.pretrained import is_classifier
from megatrain.models.transforms.kept_attention import attend_once

# How transformers' reason begins for a configuration that it has no class for.
UNKNOWN = "Unrecognized configuration class"
# Prefixes of settings for other heads than the language model's, or for an encoder.
UNUSED = ("classifier", "summary", "encoder")
OURS = ("transformers", "torch", "megatrain")  # packages whose versions say what their code is


# why: decision 0033
def choose_attention(config: Any, attention: str) -> str:
    """The attention implementation to ask transformers for; "auto" is scaled-dot-product attention,
    except where the family caps attention logits, which PyTorch's function cannot do."""
    if attention == FUSED_SINKS:  # ours; transformers' own is eager
        return "eager"
    if attention != "auto":
        return attention
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if capped else "sdpa"


def build_model(
    config: Any, attention: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> nn.Module:
    """A causal LM or classifier in training mode, its parameters on meta, or ModelError."""
    from transformers import AttentionInterface

    config = copy.deepcopy(config)
    config.use_cache = False
    use_grouped_rows(config)
    try:
        with meta_parameters(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # of buffers that are drawn; not CUDA's
            model = causal_lm(config, attention, dtype, trust_remote_code)
            AttentionInterface.register("sdpa", attend_once)
            if attention in ("auto", FUSED_SINKS):
                use_fused_sinks(model)
                use_one_kernel_for_images(model)
            model.tie_weights()
    except Exception as error:  # whatever a family's code does with numbers that it never met
        reason = " ".join(str(error).split()) or type(error).__name__
        if reason.startswith(UNKNOWN):  # a list of all that transformers knows follows
            raise ModelError(
                f"model type {config.model_type!r} is no decoder that transformers can build for "
                "text; name a language model"
            ) from error
        kind = "reward model" if is_classifier(config) else "causal language model"
        raise ModelError(
            f"model type {config.model_type!r} cannot be built as a {kind}: {reason}"
        ) from error
    return model.train()  # type: ignore[no-any-return]


def causal_lm(
    config: Any, attention: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> Any:
    """transformers' causal LM of `config`, or its classifier; or what the family's code raises."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForSequenceClassification if is_classifier(config) else AutoModelForCausalLM
    wanted, named = choose_attention(config, attention), architecture(config)
    from_config: Any = partial(
        auto.from_config, config, dtype=dtype, trust_remote_code=trust_remote_code
    )
    if named is not None:
        from_config = partial(named._from_config, config, dtype=dtype)
    try:
        return from_config(attn_implementation=wanted)
    except ValueError:
        if attention != "auto" or wanted == "eager":
            raise
        # the family has no SDPA, because of sinks, say
        return from_config(attn_implementation="eager")


def architecture(config: Any) -> Any:
    """The class that a configuration names, of a model that is more than text; None for others."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    text_alone = config.get_text_config() is config and config.model_type in CAUSAL
    if text_alone or config.is_encoder_decoder or not config.architectures:
        return None
    named = getattr(transformers, config.architectures[0], None)  # else of the folder's own code
    return named if named is not None and named.can_generate() else None


def layers_in(text: Any) -> int:
    """The number of a language model's layers. Raises ModelError if its configuration has none."""
    count = getattr(text, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise ModelError(
            f"model type {text.model_type!r} says no number of layers (num_hidden_layers) in "
            "config.json; it cannot be streamed yet"
        )
    return count


def layer_configs(text: Any, layers: int) -> list[Any]:
    """Each layer's configuration: the model's, but where it has settings that differ by layer."""
    differ = getattr(text, "is_heterogeneous", False)  # releases before it have none
    return [text.per_layer_config[i] if differ else text for i in range(layers)]


def refuse_what_is_not_built(model: nn.Module, text: Any) -> None:
    """Raise ModelError for settings, of a language model, that would be ignored without a word."""
    family = type(model).__name__
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


def is_foreign(module: nn.Module) -> bool:
    """True if its code came with the model or the program."""
    return type(module).__module__.partition(".")[0] not in OURS


def draws_random_numbers(model: Any, but: Collection[str] = ()) -> bool:
    """True if a transformers model draws random numbers in training, `but` for unused modules."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0 and not is_below(path, but):
            return True
    return any(
        isinstance(value, float) and value > 0 and ("drop" in key or "jitter" in key)
        for key, value in model.config.get_text_config().to_dict().items()
        if not key.startswith(UNUSED)
    )


# -- rotary embeddings whose factors follow the longest sequence -----------------------------------


def regimes_of(config: Any) -> Regimes:
    """At which lengths the factors of a model change; none where they never do."""
    text = config.get_text_config()
    found = set()
    for rope in rope_kinds(text):
        if rope.get("rope_type") == "longrope":
            found.add(Regime(rope["original_max_position_embeddings"]))
        elif "dynamic" in rope.get("rope_type", ""):
            found.add(Regime(text.max_position_embeddings, exact=True))
    return tuple(sorted(found, key=lambda regime: (regime.limit, regime.exact)))


def rope_kinds(text: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a model, or of each type of its layers; empty without any."""
    given = getattr(text, "rope_parameters", None) or {}
    return [given] if "rope_type" in given else [one for one in given.values() if one]


def longest_sequence(text: Any) -> int | None:
    """Positions that a model can read, by stretched factors, too; None: no limit is named."""
    stated: int | None = getattr(text, "max_position_embeddings", None)
    if stated is None:
        return None
    stretched = [stated]
    for rope in rope_kinds(text):
        if rope.get("rope_type") in ("yarn", "linear", "dynamic"):
            trained = rope.get("original_max_position_embeddings") or stated
            stretched.append(int(rope.get("factor", 1.0) * trained))
    return max(stretched)


POSITIONS = "rope_deltas"


def growing(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """(module, layer type or "") of factors that grow with the longest sequence so far, and
    (module, POSITIONS) of those that keep positions of images for rows that are written."""
    found = []
    for module in modules:
        if hasattr(module, POSITIONS):
            found.append((module, POSITIONS))
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            kinds = {"": kinds}
        for layer, kind in (kinds or {}).items():
            if "dynamic" in kind:
                found.append((module, f"{layer}_" if layer else ""))
    return found


def forget_lengths(growing: Iterable[tuple[Any, str]]) -> None:
    """Let the factors follow from the next sequences alone, not from longer ones before them."""
    for module, layer in growing:
        if layer == POSITIONS:
            module.rope_deltas = None
            continue
        module._buffers[f"{layer}inv_freq"] = module._buffers[f"{layer}original_inv_freq"]
        setattr(module, f"{layer}max_seq_len_cached", module.original_max_seq_len)
