"""Random weights follow the family's own rule, tensor by tensor, and the seed."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

from megatrain.engine.engine import Engine
from megatrain.engine.verify import weights_of
from megatrain.models.initialize import modules_of
from megatrain.models.skeleton import Skeleton
from megatrain.optim.split import join_master
from tests.helpers.compare import differing
from tests.helpers.support import FAMILIES, tiny_config

BIG = {"hidden_size": 128, "num_hidden_layers": 2}


def initialized(family: str, seed: int = 0, precision: str = "float32") -> Engine:
    return Engine.from_config(
        tiny_config(family, **BIG), seed=seed, precision=precision, device="cpu"
    )


def initial_weights(engine: Engine) -> dict[str, Tensor]:
    with engine:
        return weights_of(engine)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_every_tensor_is_distributed_as_in_the_model_s_own_initialisation(family):
    changes = {"n_embd": 128, "n_layer": 2} if family == "gpt2" else BIG
    config = tiny_config(family, **changes)
    torch.manual_seed(3)
    own = dict(
        transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32
        ).named_parameters()
    )
    ours = initial_weights(Engine.from_config(config, precision="float32", device="cpu"))
    assert ours.keys() == own.keys()
    for name, weight in ours.items():
        expected = own[name].detach()
        if expected.std(unbiased=False) == 0:  # norms one, biases zero
            assert torch.equal(weight, expected), name
        else:
            assert float(weight.std()) == pytest.approx(float(expected.std()), rel=0.1), name
            assert abs(float(weight.mean())) < 5 * float(expected.std()) / weight.numel() ** 0.5, (
                name
            )


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    first, again, other = (initial_weights(initialized("llama", seed)) for seed in (1, 1, 2))
    assert differing(first, again) == []
    assert set(differing(first, other)) == {name for name in first if "norm" not in name}


def test_bfloat16_keeps_the_fp32_draw_as_its_master():
    exact = initial_weights(initialized("llama"))
    with initialized("llama", precision="bfloat16") as engine:
        for block in engine.anatomy.blocks:
            master = join_master(
                engine.store.array("weight", block.index),
                engine.store.array("remainder", block.index),
            )
            views = block.layout.views(master)
            assert differing(views, {name: exact[name] for name in views}) == []


def test_modules_are_drawn_from_the_inside_out():
    skeleton = Skeleton(tiny_config("gpt2"))
    paths = modules_of(skeleton, skeleton.anatomy.blocks[1])
    assert "transformer.h.0" in paths
    for place, path in enumerate(paths):
        assert not any(later.startswith(f"{path}.") for later in paths[place:]), path


def test_the_caller_s_random_state_is_left_alone():
    torch.manual_seed(8)
    before = torch.get_rng_state()
    initialized("llama").close()
    assert torch.equal(torch.get_rng_state(), before)
