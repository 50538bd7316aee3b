"""A model without weights computes what the model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.models.family import build_model, choose_attention, longest_sequence
from megatrain.models.skeleton import Skeleton
from tests.helpers.delays import failing
from tests.helpers.support import KINDS, VOCABULARY, engine_of, plain_model, tiny_config

ALL = [*KINDS, "falcon-7b-untied", "mpt", "bamba"]
TIED = {"qwen2-tied", "falcon-7b", "falcon-rw", "falcon-40b", "gpt2", "gemma2", "gemma3", "ctrl"}
TIED |= {"opt-projected", "bloom", "mpt"}


def skeleton_of(family: str, **changes: object) -> Skeleton:
    return Skeleton(tiny_config(family, **changes), dtype=torch.float32)


@pytest.mark.parametrize("family", ALL)
def test_logits_are_those_of_the_model_s_own_forward(family):
    config = tiny_config(family)
    model = plain_model(config).eval()
    ids = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    with engine_of(config, weights=model) as engine:
        torch.testing.assert_close(engine.logits(ids), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ALL)
def test_every_parameter_belongs_to_one_block_under_its_own_name_and_tied_heads_to_embed(family):
    config = tiny_config(family)
    model, shape = plain_model(config), skeleton_of(family).anatomy
    specs = [spec for block in shape.blocks for spec in block.layout.tensors]
    assert {spec.name: spec.shape for spec in specs} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    assert len(specs) == len({spec.name for spec in specs})
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layers == config.num_hidden_layers == 3
    names = [block.name for block in shape.blocks]
    assert names == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert (shape.hidden_size, shape.vocab_size) == (32, VOCABULARY)
    for block in shape.blocks:  # one segment of each kind
        decays = [segment.decay for segment in block.layout.segments()]
        assert decays == sorted(set(decays), reverse=True)
    embed = [spec.name for spec in shape.embed.layout.tensors]
    head = [spec.name for spec in shape.head.layout.tensors]
    assert embed[0].rsplit(".", 2)[1] in ("embed_tokens", "word_embeddings", "embed_in", "wte", "w")
    assert shape.embed_feeds_head == (family in TIED)
    if family in TIED:
        assert [owner for _, owner in shape.tied] == embed[:1]
        assert not any(spec.endswith(("lm_head.weight", "embed_out.weight")) for spec in head)
    else:
        assert {name.split(".")[0] for name in head} & {"lm_head", "embed_out"}


def test_parameters_have_no_memory_and_buffers_do():
    model = build_model(tiny_config("llama"), "auto", torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert model.training


def test_building_takes_no_memory_for_a_large_vocabulary():
    """Embedding and head of this model have 512 MiB."""

    def peak(vocabulary: int) -> int:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        skeleton_of("llama", hidden_size=256, vocab_size=vocabulary)
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])  # KiB

    assert peak(1 << 19) - peak(100) < 64 << 10


def test_bound_parameters_are_the_flat_memory():
    skeleton = skeleton_of("llama-tied")
    for block in skeleton.anatomy.blocks:
        flat = torch.randn(block.layout.numel)
        parameters = skeleton.bind(block, flat)
        views = block.layout.views(flat).values()
        assert all(map(torch.equal, parameters, views))
        flat.zero_()
        assert not any(p.any() for p in parameters)
    owner, leaf = skeleton.owner("lm_head.weight")
    assert owner._parameters[leaf] is skeleton.model.get_input_embeddings().weight  # type: ignore[operator]


def test_a_mode_that_was_interrupted_is_set_again(monkeypatch):
    skeleton = skeleton_of("llama")
    skeleton.set_training(False)
    once = failing(skeleton.layers[1].train, 1, KeyboardInterrupt())
    monkeypatch.setattr(skeleton.layers[1], "train", once)
    with pytest.raises(KeyboardInterrupt):
        skeleton.set_training(True)
    skeleton.set_training(True)
    assert all(layer.training for layer in skeleton.layers)


def test_attention_that_cannot_cap_logits_is_not_chosen():
    assert choose_attention(tiny_config("llama"), "auto") == "sdpa"
    assert choose_attention(tiny_config("gemma2"), "auto") == "eager"
    assert choose_attention(tiny_config("gemma2"), "sdpa") == "sdpa"
    assert skeleton_of("gemma2").config._attn_implementation == "eager"


def test_it_knows_whether_training_draws_random_numbers():
    for family, changes in (
        ("gpt-neox", {"hidden_dropout": 0.1}),
        ("gpt-neox", {"attention_dropout": 0.1}),
        ("mixtral", {"router_jitter_noise": 0.1}),
    ):
        assert skeleton_of(family, **changes).has_dropout
        assert not skeleton_of(family).has_dropout


def test_whether_documents_are_separated_is_known_of_bound_models_too():
    skeleton = skeleton_of("llama")
    skeleton.move_buffers(torch.device("meta"))  # as an engine does, to where the zeros are not
    assert skeleton.separates_documents(torch.device("cpu"))


def test_stretched_positions_of_rotary_embeddings_count():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for rope, positions in (
        ({"rope_type": "default"}, 64),
        (yarn | {"original_max_position_embeddings": 64}, 256),
        (yarn | {"original_max_position_embeddings": 16}, 64),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "dynamic", "factor": 3.0}, 192),
    ):
        changes = {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4, **rope}}
        assert longest_sequence(tiny_config("llama", **changes)) == positions
    assert longest_sequence(tiny_config("gpt2", n_positions=48)) == 48  # it has none
