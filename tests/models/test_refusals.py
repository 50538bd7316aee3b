"""Models that cannot be streamed exactly are refused by name, with the reason; others are not."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.models import skeleton as skeleton_module
from megatrain.models.family import build_model
from megatrain.models.probe import probe_model
from megatrain.models.skeleton import Skeleton
from tests.support import VOCABULARY, tiny_config

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
    "minimax": (
        "MiniMaxConfig",
        LAYERS | {"num_key_value_heads": 2, "num_local_experts": 4, "block_size": 128},
        r"diagonal_decay is a buffer of 0\.25 MiB, more than 1% of layers\.1",
    ),
    "bart": (
        "BartConfig",
        DECODER | {"encoder_layers": 2, "decoder_layers": 2},
        r"encoder_attn\..* and others of layers\.0 are frozen or take no part in what it returns",
    ),
    "rwkv": (
        "RwkvConfig",
        HIDDEN,
        r"layer 1 receives \['state'\], which an earlier layer",
    ),
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
    with pytest.raises(ModelError, match=r"layer 1 receives \[0\], which an earlier layer"):
        probe_model(model, model.model.layers)


def test_an_unknown_attention_is_refused():
    with pytest.raises(ModelError, match="nonsense"):
        Skeleton(tiny_config("llama"), attention="nonsense")


# -- refusals of made-up models --------------------------------------------------------------------


class Layer(nn.Module):
    """A decoder layer of a made-up model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, device="meta")

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return self.linear(hidden_states)


class LeakyLayer(Layer):
    """Returns a tensor beside its hidden states."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return self.linear(hidden_states), hidden_states.mean()


class SidewaysLayer(Layer):
    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return hidden_states.mean(), self.linear(hidden_states)


class FillingLayer(Layer):
    def forward(self, hidden_states: Tensor, box: Any = None, **_: Any) -> Any:
        box.append(hidden_states)
        return self.linear(hidden_states)


class KeepingLayer(Layer):
    def forward(self, hidden_states: Tensor, box: Any = None, **_: Any) -> Any:
        box["states"] = hidden_states
        return self.linear(hidden_states)


class LookingLayer(Layer):
    def forward(self, hidden_states: Tensor, box: Any = None, **_: Any) -> Any:
        before = box.get("states", 0)
        box["states"] = hidden_states
        return self.linear(hidden_states) + before


class AskingLayer(Layer):
    def forward(self, hidden_states: Tensor, box: Any = None, **_: Any) -> Any:
        return self.linear(hidden_states) * (2 if box else 1)


class ValueDependentLayer(Layer):
    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return self.linear(hidden_states) if hidden_states.sum() > 0 else hidden_states


class DynamicCache:
    """Looks like a key-value cache by its name."""


class Toy(nn.Module):
    """A made-up decoder. What each variant does wrong is in `between` and in `extras`."""

    layer: type[Layer] = Layer

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8, device="meta")
        self.layers = nn.ModuleList(self.layer() for _ in range(layers))

    def extras(self, hidden: Tensor) -> dict[str, Any]:
        return {"mask": None, "positions": torch.arange(hidden.shape[1])}

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def order(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.order():
            output = layer(self.between(hidden), **self.extras(hidden))
            hidden = output[0] if isinstance(output, tuple) else output
        assert isinstance(hidden, Tensor)
        return hidden


class ChangesBetween(Toy):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden * 1.0


class PassesGradient(Toy):
    def extras(self, hidden: Tensor) -> dict[str, Any]:
        return {"embedding": {"of": self.embed.weight.sum()}}


class PassesCache(Toy):
    def extras(self, hidden: Tensor) -> dict[str, Any]:
        return {"past": DynamicCache()}


class PassesBox(Toy):
    """Hands a list to its layers, which put something into it."""

    layer: type[Layer] = FillingLayer

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        self.box: Any = self.empty()
        return super().forward(input_ids, use_cache)

    def empty(self) -> Any:
        return []

    def extras(self, hidden: Tensor) -> dict[str, Any]:
        return {"box": self.box}


class IgnoresItsBox(PassesBox):
    layer = Layer


class PassesDict(PassesBox):
    """What its layers put into a dict is looked at by none."""

    layer: type[Layer] = KeepingLayer

    def empty(self) -> Any:
        return {}


class PassesUserDict(PassesDict):
    def empty(self) -> Any:
        return UserDict[str, Tensor]()


class LooksIntoItsDict(PassesDict):
    layer = LookingLayer


class AsksItsDict(PassesDict):
    layer = AskingLayer


class UsesItsDictAtTheEnd(PassesDict):
    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        hidden: Tensor = super().forward(input_ids, use_cache) + self.box["states"]
        return hidden


class AddsItsInputAtTheEnd(Toy):
    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        embedded: Tensor = self.embed(input_ids)
        hidden = embedded
        for layer in self.layers:
            hidden = layer(hidden)
        return embedded + hidden


class RunsTwice(Toy):
    def order(self) -> list[nn.Module]:
        return [*self.layers, self.layers[0]]


class SkipsOne(Toy):
    def order(self) -> list[nn.Module]:
        return list(self.layers)[:2]


class DropsMore(Toy):
    """Its layers return more than hidden states, which it hands out at most."""

    layer: type[Layer] = LeakyLayer

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden, extra = layer(hidden, **self.extras(hidden))
            self.seen = [*self.seen, extra]
        return self.end(hidden)

    def end(self, hidden: Tensor) -> Tensor:
        return hidden


class TouchingLayer(LeakyLayer):
    def forward(self, hidden_states: Tensor, from_before: Any = (), **_: Any) -> Any:
        return self.linear(hidden_states) + sum(from_before), hidden_states.mean()


class HandsMoreOnUntouched(DropsMore):
    def extras(self, hidden: Tensor) -> dict[str, Any]:
        return {"from_before": self.seen[-1:]}


class HandsMoreOn(HandsMoreOnUntouched):
    layer = TouchingLayer


class AddsMoreAtTheEnd(DropsMore):
    def end(self, hidden: Tensor) -> Tensor:
        added: Tensor = hidden + self.seen[0]
        return added


class UsesItsValues(AddsMoreAtTheEnd):
    """No gradient shows this."""

    def end(self, hidden: Tensor) -> Tensor:
        return hidden * float(self.seen[0].detach())


class AsksForMore(DropsMore):
    def end(self, hidden: Tensor) -> Tensor:
        return hidden * 2 if self.seen[0] else hidden


class HiddenStatesSecond(DropsMore):
    layer = SidewaysLayer


class LooksAtValues(Toy):
    layer = ValueDependentLayer


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (ChangesBetween, "changes the hidden states between layers"),
        (PassesGradient, r"layer 0 receives .*embedding.*, which needs a gradient"),
        (PassesCache, r"receives a key-value cache \(.*past.*\)"),
        (PassesBox, r"layer 0 puts something into \['box'\], where other layers could find it"),
        (LooksIntoItsDict, "its layers look for what earlier layers have put into a dict"),
        (AsksItsDict, "its layers look for what earlier layers have put into a dict"),
        (UsesItsDictAtTheEnd, "it computes with what its layers return beside hidden states"),
        (AddsItsInputAtTheEnd, "what follows its last layer uses more than that layer's output"),
        (RunsTwice, "do not run once each in order"),
        (SkipsOne, "only 2 of its 3 layers ran"),
        (HandsMoreOn, r"layer 1 receives \['from_before'\]\[0\], which an earlier"),
        (AddsMoreAtTheEnd, "it computes with what its layers return beside hidden states"),
        (UsesItsValues, "it computes with what its layers return beside hidden states"),
        (AsksForMore, "it computes with what its layers return beside hidden states"),
        (HiddenStatesSecond, "return neither hidden states nor a tuple that begins with them"),
        (LooksAtValues, "cannot run without data"),
    ],
)
def test_a_model_whose_layers_exchange_more_than_hidden_states_is_refused(model, reason):
    toy = model()
    with pytest.raises(ModelError, match=reason) as refusal:
        probe_model(toy, toy.layers)
    assert str(refusal.value).startswith(f"{model.__name__} cannot be streamed exactly")
    assert all(isinstance(layer, Layer) for layer in toy.layers), "the spies must be gone"


@pytest.mark.parametrize(
    ("model", "extras"),
    [
        (Toy, None),
        (IgnoresItsBox, None),
        (PassesDict, None),
        (PassesUserDict, None),
        (DropsMore, 1),
        (HandsMoreOnUntouched, 1),
    ],
)
def test_a_model_that_keeps_to_the_rules_is_accepted(model, extras):
    toy = model()
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
