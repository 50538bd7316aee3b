"""Models that cannot be streamed exactly are refused by name, with the reason; others are not."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from megatrain.errors import ModelError
from megatrain.models import skeleton as skeleton_module
from megatrain.models.family import build_model
from megatrain.models.skeleton import Skeleton
from megatrain.models.trials.probe import probe_model
from tests.helpers.support import VOCABULARY, tiny_config
from tests.models import toys
from tests.models.toys import Layer, Toy

# -- refusals of real families ---------------------------------------------------------------------

HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2}
LAYERS = HIDDEN | {"num_attention_heads": 4, "intermediate_size": 64}
DECODER = {"d_model": 32, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "is_decoder": True}
OPT = {"num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.1}
ZAYA = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}

# family -> (configuration class, its arguments, the reason)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": (
        "BertConfig",
        LAYERS | {"is_decoder": True},
        r"decoder\.bias shares its weights with .*predictions\.bias",
    ),
    "pegasus": (
        "PegasusConfig",
        DECODER | {"encoder_layers": 2, "decoder_layers": 2},
        r"embed_positions\.weight and others of embed are frozen or take no part in what",
    ),
    "bart": (
        "BartConfig",
        DECODER | {"encoder_layers": 2, "decoder_layers": 2},
        r"encoder_attn\..* and others of layers\.0 are frozen or take no part in what it returns",
    ),
    "rwkv": ("RwkvConfig", HIDDEN, "computes with what its layers return beside hidden states"),
    "mixtral": (
        "MixtralConfig",
        LAYERS | {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True},
        "output_router_logits asks for the routers' balancing loss, whose weight is",
    ),
    "gemma3": (
        "Gemma3TextConfig",
        HIDDEN | {"intermediate_size": 64, "use_bidirectional_attention": True},
        "use_bidirectional_attention shows every token the one it should predict",
    ),
    "electra": (
        "ElectraConfig",
        LAYERS | {"embedding_size": 32, "is_decoder": False},
        "shows every token the ones it should predict: .* set is_decoder to true in config.json",
    ),
    "opt": ("OPTConfig", HIDDEN | OPT, "layerdrop"),
    "t5": (
        "T5Config",
        {"d_model": 32, "num_layers": 2, "num_heads": 4},
        "model type 't5' is no decoder that transformers can build for text; name a language model",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_right_is_refused_by_name_with_the_reason(family):
    name, sizes, reason = REFUSED[family]
    with pytest.raises(ModelError, match=reason) as refusal:
        Skeleton(getattr(transformers, name)(vocab_size=VOCABULARY, **sizes), dtype=torch.float32)
    assert family in str(refusal.value).lower()


def test_layers_that_hand_on_their_routers_states_are_refused():
    """ZAYA's take None for "first layer", so with None in their place it would train, wrongly."""
    sizes: dict[str, Any] = {**LAYERS, **ZAYA, "vocab_size": VOCABULARY, "num_experts_per_tok": 1}
    model: Any = build_model(transformers.ZayaConfig(**sizes), "auto", torch.float32)
    with pytest.raises(ModelError, match="computes with what its layers return beside hidden"):
        probe_model(model, model.model.layers)


def test_an_unknown_attention_is_refused():
    with pytest.raises(ModelError, match="nonsense"):
        Skeleton(tiny_config("llama"), attention="nonsense")


# -- refusals of made-up models --------------------------------------------------------------------


def of_embedding(toy: Any) -> dict[str, Any]:
    return {"embedding": {"of": toy.embed.weight.sum()}}


def handed_on(toy: Any) -> dict[str, Any]:
    return {"from_before": toy.seen[-1:]}


IN_DICT = "its layers look for what earlier layers have put into a dict"
BESIDE = "it computes with what its layers return beside hidden states"


def test_a_model_whose_layers_exchange_more_than_hidden_states_is_refused():
    for toy, reason in (
        (Toy(between=lambda hidden: hidden * 1.0), "changes the hidden states between layers"),
        (Toy(extras=of_embedding), r"layer 0 receives .*embedding.*, which needs a gradient"),
        (
            Toy(extras=lambda toy: {"past": toys.DynamicCache()}),
            r"receives a key-value cache \(.*past.*\)",
        ),
        (
            Toy(toys.filling, box=list),
            r"layer 0 puts something into \['box'\], where other layers could find it",
        ),
        (Toy(toys.looking, box=dict), IN_DICT),
        (Toy(toys.asking, box=dict), IN_DICT),
        (Toy(toys.keeping, box=dict, end=lambda toy, h, _: h + toy.box["states"]), BESIDE),
        (
            Toy(end=lambda toy, hidden, embedding: hidden + embedding),
            "what follows its last layer uses more than that layer's output",
        ),
        (Toy(order=(0, 1, 2, 0)), "do not run once each in order"),
        (Toy(order=(0, 1)), "only 2 of its 3 layers ran"),
        (Toy(toys.touching, extras=handed_on), BESIDE),
        (Toy(toys.leaky, end=lambda toy, hidden, _: hidden + toy.seen[0]), BESIDE),
        # no gradient shows this
        (Toy(toys.leaky, end=lambda toy, h, _: h * float(toy.seen[0].detach())), BESIDE),
        (Toy(toys.leaky, end=lambda toy, hidden, _: hidden * 2 if toy.seen[0] else hidden), BESIDE),
        (
            Toy(lambda linear, hidden, **_: (hidden.mean(), linear(hidden))),
            "return neither hidden states nor a tuple that begins with them",
        ),
        (
            Toy(lambda linear, hidden, **_: linear(hidden) if hidden.sum() > 0 else hidden),
            "cannot run without data",
        ),
    ):
        with pytest.raises(ModelError, match=f"^Toy cannot be streamed exactly.*{reason}"):
            probe_model(toy, toy.layers)
        assert all(isinstance(layer, Layer) for layer in toy.layers), "the spies must be gone"


def test_a_later_layer_that_fills_a_container_is_found_though_its_kind_was_tried():
    toy: Any = Toy(box=list)
    toy.layers[2].compute = toys.filling
    with pytest.raises(ModelError, match=r"layer 2 puts something into \['box'\]"):
        probe_model(toy, toy.layers)


def test_a_model_that_keeps_to_the_rules_is_accepted():
    for toy, extras in (
        (Toy(), None),
        (Toy(box=list), None),
        (Toy(toys.keeping, box=dict), None),
        (Toy(toys.keeping, box=UserDict), None),
        (Toy(toys.leaky), 1),
        (Toy(toys.leaky, extras=handed_on), 1),
    ):
        found = probe_model(toy, toy.layers)
        assert (found.extras, found.before, found.after) == (extras, ["embed.weight"], [])
        assert found.idle == []


def share_between_layers(model: Any) -> None:
    layers = model.model.layers
    layers[2].mlp.down_proj.weight = layers[0].mlp.down_proj.weight


def use_a_weight_without_its_module(model: Any) -> None:
    model.other = nn.Linear(32, 32, device="meta")
    embed = model.model.embed_tokens
    embed.register_forward_hook(lambda module, args, out: out @ model.other.weight)


def use_the_embedding_at_both_ends(model: Any) -> None:
    def embed_again(*_: object) -> None:
        model.model.embed_tokens(torch.zeros(1, 1, dtype=torch.long))

    model.model.norm.register_forward_hook(embed_again)


def add_a_second_stack(model: Any) -> None:
    model.model.encoder = nn.ModuleList(nn.Linear(2, 2, device="meta") for _ in range(3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            share_between_layers,
            r"2\.mlp\.down_proj\.weight shares its weights with model\.layers\.0",
        ),
        (
            use_a_weight_without_its_module,
            r"other\.weight is used without its module's own forward",
        ),
        (use_the_embedding_at_both_ends, r"embed_tokens\.weight is used at both ends"),
        (
            add_a_second_stack,
            r"exactly one list of 3 decoder layers, found model\.layers, model\.encoder",
        ),
    ],
)
def test_a_real_model_that_was_changed_is_refused(change, reason, monkeypatch):
    model = build_model(tiny_config("llama"), "auto", torch.float32)
    change(model)
    monkeypatch.setattr(skeleton_module, "build_model", lambda *_: model)
    monkeypatch.setattr(skeleton_module, "probe_model", probe_model)  # not what it found before
    with pytest.raises(ModelError, match=reason):
        Skeleton(model.config, dtype=torch.float32)
