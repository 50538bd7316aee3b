"""Which tensors a pattern freezes, and the sentences that refuse one."""

from __future__ import annotations

import pytest
import torch

from megatrain.errors import ConfigError
from megatrain.models.freezing import counted_parameters
from megatrain.models.skeleton import Skeleton
from tests.helpers.support import CONSTANT, known, tiny_config


def frozen(family: str, *patterns: str) -> set[str]:
    skeleton = Skeleton(tiny_config(family), dtype=torch.float32)
    skeleton.freeze(patterns, "train.freeze")
    return set(skeleton.anatomy.frozen)


def test_names_are_the_folder_s_or_the_model_s_own():
    for family, pattern, expected in (
        ("llama", "model.embed_tokens.weight", {"model.embed_tokens.weight"}),
        ("llama", "embed_tokens.*", {"model.embed_tokens.weight"}),
        ("llama-tied", "lm_head.weight", {"model.embed_tokens.weight"}),
        ("gpt2", "wte.*", {"transformer.wte.weight"}),
        ("gpt2", "transformer.wpe.weight", {"transformer.wpe.weight"}),
        # as published, and as transformers calls it
        ("gpt-neox", "embed_out.weight", {"lm_head.weight"}),
        ("gpt-neox", "lm_head.weight", {"lm_head.weight"}),
        ("mixtral", "*.1.block_sparse_moe.gate.*", {"model.layers.1.mlp.gate.weight"}),
        ("mixtral", "*.1.mlp.gate.*", {"model.layers.1.mlp.gate.weight"}),
        ("mixtral", "*.1.*.w2.weight", {"model.layers.1.mlp.experts.down_proj"}),
        ("mixtral", "*.1.*.down_proj", {"model.layers.1.mlp.experts.down_proj"}),
    ):
        assert frozen(family, pattern) == expected


def test_a_part_of_a_fused_tensor_is_refused():
    words = (
        r"train\.freeze: takes a part of model\.layers\.0\.mlp\.experts\.\w+, which is trained as "
        r"one tensor, and leaves out model\.layers\.0\.block_sparse_moe\.experts\.\d\.w\d\.weight; "
        r"freeze all of it, as 'model\.layers\.0\.mlp\.experts\.\w+', or none$"
    )
    for pattern in ("*.w1.weight", "*.experts.1.*", "*.experts.[0-2].*"):
        with pytest.raises(ConfigError, match=words):
            frozen("mixtral", pattern)


def test_parts_that_are_the_whole_together_are_taken():
    whole = {f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(3)}
    assert frozen("mixtral", "*.w1.weight", "*.w3.weight") == whole


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (("model.norm",), r"'model\.norm' is the name of no tensor of this model; did you mean "
         r"model\.norm\.weight\?$"),
        (("*.layers.3.*",), r"'\*\.layers\.3\.\*' is the name of no tensor of this model; did "),
        (("*embed*", "*layers*", "*norm*", "lm_head*"), "takes every tensor of the model, which "
         "leaves nothing to train; leave out a pattern, such as"),
    ],
)  # fmt: skip
def test_a_pattern_that_takes_nothing_or_everything_is_refused(patterns, words):
    with pytest.raises(ConfigError, match=f"^train.freeze: {words}"):
        frozen("llama", *patterns)


@pytest.mark.parametrize("family", known(CONSTANT)[:4])
def test_what_does_not_train_anyway_may_be_named(family):
    skeleton = Skeleton(tiny_config(family), dtype=torch.float32)
    before = skeleton.anatomy
    constants = [place.tensor.name for places in before.published.constants for place in places]
    skeleton.freeze(constants)
    assert skeleton.anatomy.frozen == ()
    assert skeleton.anatomy.blocks == before.blocks


def test_published_tensors_move_with_their_own():
    skeleton = Skeleton(tiny_config("mixtral"), dtype=torch.float32)
    skeleton.freeze(["*.self_attn.*", "*.w2.weight"])
    for block, places in zip(
        skeleton.anatomy.blocks, skeleton.anatomy.published.places, strict=True
    ):
        flat = torch.arange(block.layout.numel)
        own = block.layout.views(flat)
        ends = [0]
        for place in places:
            part = place.tensor.view(flat)
            assert set(part.flatten().tolist()) <= set(own[place.own].flatten().tolist())
            assert place.tensor.offset >= ends[-1]
            ends.append(place.tensor.offset + place.tensor.numel)
        for name, place in skeleton.anatomy.published.known.items():
            assert (
                name in own or place.own not in own or place.tensor.numel <= own[place.own].numel()
            )


def test_work_counts_matmuls_by_what_they_are_for():
    def counted(*patterns: str, idle: int = 0) -> int:
        skeleton = Skeleton(tiny_config("llama"), dtype=torch.float32)
        skeleton.freeze(patterns)
        return counted_parameters(skeleton.anatomy, idle)

    anatomy = Skeleton(tiny_config("llama"), dtype=torch.float32).anatomy
    sizes = [block.layout.parameters for block in anatomy.blocks]
    assert counted() == sum(sizes) == anatomy.parameters
    # nothing is multiplied below the first layer but forward
    assert counted("model.embed_tokens.*") == sum(sizes[1:]) + sizes[0] // 3
    # a frozen layer in the middle passes gradients on
    assert counted("*.layers.1.*") == sum(sizes) - sizes[2] + 2 * sizes[2] // 3
    alone = counted("*embed*", "*.layers.*", "*.norm.*")
    assert alone == (sum(sizes[:4]) + 2 * 32 + 3 * (sizes[4] - 32)) // 3
