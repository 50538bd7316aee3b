"""What is not trained is found, not streamed, and kept in the dtypes that transformers has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.models.constants import kept_tensors
from megatrain.models.family import build_model
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.fp8 import Fp8Policy
from megatrain.models.trials.probe import probe_model
from tests.helpers.support import CONSTANT, known, tiny_config
from tests.models.toys import Layer, Toy

# -- what is taken for a constant ------------------------------------------------------------------


class IdleLayer(Layer):
    """What one of its parameters makes is dropped by the model, unless a setting says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 1, device="meta")
        self.adds_its_gate = False

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        gate = self.gate(hidden_states)
        return self.linear(hidden_states) + (gate if self.adds_its_gate else 0), gate


class CountingLayer(Layer):
    """Counts how often it is trained."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        if self.training:
            self.count()
        return self.linear(hidden_states)

    def count(self) -> None:
        self.seen += 1


class ReplacingLayer(CountingLayer):
    def count(self) -> None:
        self.seen = self.seen + 1


def test_parameters_without_part_in_what_layers_return_are_found_in_each_kind_of_layer():
    toy: Any = Toy(IdleLayer)
    toy.layers[1].adds_its_gate = True
    found = probe_model(toy, toy.layers)
    assert found.idle == [f"{i}.gate.{leaf}" for i in (0, 2) for leaf in ("weight", "bias")]


def test_a_buffer_that_training_writes_is_no_constant():
    for toy in (Toy(CountingLayer), Toy(ReplacingLayer)):
        with pytest.raises(ModelError, match=r"seen of its layer .* is changed by every"):
            probe_model(toy, toy.layers)


@pytest.mark.slow
@pytest.mark.parametrize("family", known(CONSTANT)[::2])
def test_all_that_a_family_publishes_is_trained_or_a_constant(family):
    config = tiny_config(family)
    skeleton = Skeleton(config, dtype=torch.float32)
    blocks = skeleton.anatomy.blocks
    trained = [spec.name for block in blocks for spec in block.layout.tensors]
    names = [*trained, *(alias for alias, _ in skeleton.anatomy.tied), *skeleton.constants]
    model = build_model(config, "auto", torch.float32)
    assert sorted(names) == sorted(kept_tensors(model))
    buffers = {name for name in names if name not in dict(model.named_parameters())}
    assert set(skeleton.constants) >= buffers
    for block in blocks[1:-1]:
        assert not any(".experts." in spec.name for spec in block.constants.tensors)


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["afmoe", "apertus", "deepseek-v3", "deepseek-v32", "gemma4", "minimax-m2"]
)
def test_they_have_the_dtypes_of_from_pretrained(family, tmp_path):
    config = tiny_config(family)
    build: Any = transformers.AutoModelForCausalLM
    build.from_config(config).save_pretrained(tmp_path)
    loaded = kept_tensors(build.from_pretrained(tmp_path, dtype=torch.bfloat16))
    constants = Skeleton(config, dtype=torch.bfloat16).constants
    found = {name: constants[name].dtype for name in constants}
    assert found == {name: loaded[name].dtype for name in found}


def test_indexers_keep_their_matmuls():
    skeleton = Skeleton(tiny_config("deepseek-v32", hidden_size=64), dtype=torch.bfloat16)
    skeleton.use_fp8(Fp8Policy())
    modules = dict(skeleton.layers[1].named_modules())
    taken = {name for name, m in modules.items() if type(m).__name__ == "Fp8Linear"}
    assert taken
    assert not any("indexer" in name for name in taken)


# -- building --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_experts_beyond_the_ram_are_not_allocated_to_be_built():
    """64 TB of them, which no machine hands out."""
    experts = dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts"), 4096)
    sizes = {**experts, "hidden_size": 1 << 16, "moe_intermediate_size": 1 << 14}
    model = build_model(tiny_config("deepseek-v3", **sizes), "auto", torch.float32)
    assert sum(p.nbytes for p in model.parameters()) > 1 << 45


def test_building_leaves_the_random_state():
    before = torch.get_rng_state()
    build_model(tiny_config("ernie4-5-moe"), "auto", torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
