"""What a text never touches is carried along, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llava.modeling_llava import LlavaForConditionalGeneration

from megatrain.engine.verify import Verdict, verify
from megatrain.errors import ModelError
from megatrain.models import skeleton as skeleton_module
from megatrain.models.anatomy import find_layers
from megatrain.models.family import build_model
from megatrain.models.skeleton import Skeleton
from megatrain.models.trials.probe import probe_model
from megatrain.models.trials.small import plain_model
from tests.helpers.multimodal import VISION, multimodal_config, skip_unless_it_reads_text
from tests.helpers.support import SIZES, tiny_config


def skeleton_of(family: str, **changes: Any) -> Skeleton:
    return Skeleton(multimodal_config(family, **changes), dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("qwen3.5", ("model.visual",)),
        ("llama4", ("vision_model", "multi_modal_projector")),
        (
            "llava-next",
            ("model.image_newline", "model.vision_tower", "model.multi_modal_projector"),
        ),
    ],
)
def test_what_is_not_the_language_model_s_is_a_passenger(family, modules):
    config = multimodal_config(family, num_hidden_layers=2)
    config.dtype = torch.bfloat16
    model = plain_model(config)
    skip_unless_it_reads_text(model)
    anatomy = Skeleton(config, dtype=torch.float32).anatomy
    others = [p for name, p in model.named_parameters() if name.startswith(modules)]
    assert anatomy.unused_weights.modules == modules
    assert anatomy.unused_weights.multimodal
    assert anatomy.unused_weights.nbytes == 2 * sum(p.numel() for p in others)
    assert anatomy.parameters == sum(p.numel() for p in model.parameters()) - sum(
        p.numel() for p in others
    )
    assert anatomy.family == config.text_config.model_type


def test_passengers_take_no_memory():
    skeleton = skeleton_of("qwen3-vl")
    skeleton.move_buffers(torch.device("cpu"))
    for name in skeleton.anatomy.unused_weights.names:
        weight = skeleton.model.get_parameter(name)
        assert weight.untyped_storage().nbytes() == weight.element_size()
        assert weight.isnan().all()


def test_a_tower_s_dropout_is_not_the_text_s():
    config = multimodal_config("qwen3-vl")
    for part, draws in (("visual", False), ("language_model", True)):
        model: Any = build_model(config, "auto", torch.float32)
        getattr(model.model, part).extra = nn.Dropout(0.5)
        assert built(config, model).has_dropout is draws


def test_the_decoder_s_list_of_layers_is_taken_though_a_tower_has_as_many():
    config = multimodal_config("internvl")
    assert config.vision_config.num_hidden_layers == config.text_config.num_hidden_layers
    path, stack = find_layers(build_model(config, "auto", torch.float32), 3)
    assert (path, len(stack)) == ("model.language_model.layers", 3)


# -- what is in use is no passenger ----------------------------------------------------------------


def built(config: Any, model: nn.Module) -> Skeleton:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skeleton_module, "build_model", lambda *_: model)
        patch.setattr(skeleton_module, "probe_model", probe_model)  # not what it found before
        return Skeleton(config, dtype=torch.float32)


def changed(change: Any) -> Skeleton:
    """A skeleton of a llama that was changed, `change(model)` says what it embeds besides."""
    config = tiny_config("llama")
    model: Any = build_model(config, "auto", torch.float32)
    model.model.other = nn.Linear(32, 32, bias=False, device="meta")
    add = change(model.model)
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out + add(out))
    return built(config, model)


def use_its_weight(model: Any) -> Any:
    return lambda hidden: hidden @ model.other.weight


def test_what_a_text_computes_with_is_no_passenger():
    with pytest.raises(ModelError, match=r"other\.weight is used without its module's own forward"):
        changed(use_its_weight)


def test_a_module_that_runs_is_trained():
    anatomy = changed(lambda model: model.other).anatomy
    assert anatomy.unused_weights.names == ()
    assert "model.other.weight" in [spec.name for spec in anatomy.embed.layout.tensors]


def test_what_no_text_computes_with_is_a_passenger_of_any_model():
    skeleton = changed(lambda _: lambda hidden: 0)
    assert skeleton.anatomy.unused_weights.names == ("model.other.weight",)
    assert not skeleton.anatomy.unused_weights.multimodal
    assert skeleton.anatomy.parameters == Skeleton(tiny_config("llama")).anatomy.parameters


# -- on a small model ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3.5", "mistral3"])
def test_multimodal_families_pass_the_self_check(family):
    assert verify(skeleton_of(family, vocab_size=95)) == Verdict("passed")


@pytest.mark.slow
def test_a_tower_of_full_size_shrinks_with_its_model():
    tower = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    tower |= {"num_attention_heads": 16, "image_size": 896, "patch_size": 14}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES),
        vision_config={"model_type": "siglip_vision_model"} | VISION | tower,
        architectures=["LlavaForConditionalGeneration"],
    )
    assert verify(Skeleton(config, dtype=torch.float32)) == Verdict("passed")


@pytest.mark.parametrize("trains", [True, False])
def test_a_tower_that_a_text_computes_with_fails_the_self_check(trains, monkeypatch):
    """In training mode alone, where no probe looks, or without a gradient, which it goes by."""
    plain = LlavaForConditionalGeneration.forward

    def forward(model: Any, **inputs: Any) -> Any:
        output, bias = plain(model, **inputs), model.model.multi_modal_projector.linear_1.bias
        if not bias.is_meta and (model.training or not trains):
            output.logits = output.logits + (bias if trains else bias.detach()).mean()
        return output

    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES | {"vocab_size": 93}),
        vision_config={"model_type": "siglip_vision_model"} | VISION,
        architectures=["LlavaForConditionalGeneration"],
    )
    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", forward)
    found = verify(Skeleton(config, dtype=torch.float32))
    assert found.computes_wrongly


# -- which class is built --------------------------------------------------------------------------


def test_the_class_is_the_one_that_the_configuration_names():
    config = multimodal_config("qwen3.5")
    assert type(skeleton_of("qwen3.5").model).__name__ == "Qwen3_5ForConditionalGeneration"
    text = Skeleton(config.text_config, dtype=torch.float32)
    assert type(text.model).__name__ == "Qwen3_5ForCausalLM"
    assert text.anatomy.unused_weights.names == ()
    other = tiny_config("llama", architectures=["LlamaForTokenClassification"])
    assert type(build_model(other, "auto", torch.float32)).__name__ == "LlamaForCausalLM"


def test_what_decodes_no_text_is_refused_in_a_sentence():
    for config in (
        transformers.ViTConfig(architectures=["ViTForImageClassification"]),
        transformers.T5Config(architectures=["T5ForConditionalGeneration"]),
        transformers.CLIPConfig(architectures=["CLIPModel"]),
    ):
        with pytest.raises(ModelError, match=f"type {config.model_type!r} is no decoder that tran"):
            build_model(config, "auto", torch.float32)
