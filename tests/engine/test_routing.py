"""The routers' balancing loss over a step, against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatrain as mt
from megatrain.data.micro_batches import collate
from megatrain.engine.routing import coefficient_of, find_routers
from megatrain.engine.verify import gradients_of, weights_of
from megatrain.errors import ConfigError
from megatrain.models.skeleton import Skeleton
from megatrain.settings import ROUTER_AUX_LOSS_COEF, Settings
from tests.data.test_loader import fake_rows
from tests.helpers.support import (
    Batch,
    engine_of,
    full_batches,
    micro_batches,
    plain_model,
    tiny_config,
)

COEFFICIENT = 0.1  # large, so that a wrong gradient shows
MODES = {
    "recomputed": Settings(head_chunk_tokens=7),
    "retained": Settings(head_chunk_tokens=7, retained=9),
    "retained on host": Settings(offload_activations=True, retained=1, retained_on_host=1),
    "in chunks": Settings(layer_chunk_tokens=6, retained=1),
}


def of_transformers(
    family: str, batch: Batch, coefficient: float = COEFFICIENT
) -> tuple[Any, float, float]:
    """A plain model after its own backward, its loss with the balancing loss, and that alone."""
    model: Any = plain_model(tiny_config(family))
    model.router_aux_loss_coef = coefficient
    output = model(**batch, output_router_logits=True, use_cache=False)
    output.loss.backward()
    return model, float(output.loss.detach()), float(output.aux_loss.detach())


def worst(found: dict[str, torch.Tensor], model: torch.nn.Module) -> float:
    """The largest share of its norm by which a gradient is off."""
    plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(grad.norm()) for grad in plain.values())
    return max(
        float((found[name] - grad).norm()) / (float(grad.norm()) + 1e-3 * largest)
        for name, grad in plain.items()
    )


def rows_of(batch: Batch) -> list[Batch]:
    """Each row as a micro-batch of its own."""
    count = len(batch["input_ids"])
    return [{name: value[i : i + 1] for name, value in batch.items()} for i in range(count)]


def computed(
    family: str, batches: list[Batch], *, settings: Settings | None = None, **options: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    options = {"router_aux_loss_coef": COEFFICIENT, **options}
    with engine_of(family, settings=settings, **options) as engine:
        result = engine.forward_backward(batches)
        return result, gradients_of(engine)


WHOLE, AT_END, AT_START = (
    full_batches(3, [(3, 11)]),
    *(micro_batches(3, [(3, 11)], pad_left=left) for left in (False, True)),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "batches", "mode"),
    [
        ("qwen3-moe", WHOLE, None),
        ("qwen3-moe", AT_END, None),
        ("mixtral", AT_START, None),
        ("qwen3-next", AT_END, None),
        ("gpt-oss", AT_START, None),
        ("olmoe", WHOLE, None),
        *(("qwen3-moe", AT_END, mode) for mode in MODES),
        ("gpt-oss", AT_END, "in chunks"),
    ],
)
def test_loss_and_gradients_are_those_of_transformers(family, batches, mode, device):
    (batch,) = batches
    model, loss, aux_loss = of_transformers(family, batch)
    for cut in ([batch], rows_of(batch)):
        settings = None if mode is None else MODES[mode]
        result, gradients = computed(family, cut, settings=settings, device=device)
        assert result.aux_loss == pytest.approx(aux_loss, rel=1e-6)
        assert result.loss + COEFFICIENT * result.aux_loss == pytest.approx(loss, rel=1e-6)
        assert worst(gradients, model) < 2e-5


def test_the_padding_of_packed_rows_counts_as_little_as_that_of_padded_ones():
    rows = fake_rows(np.array([7, 5, 4, 3, 2]))
    separate = collate(rows, [[row] for row in range(5)], pad_id=0)
    packed = collate(rows, [[0, 1], [2, 3, 4]], pad_id=0, pack_to=15)
    model, _, aux_loss = of_transformers("mixtral", separate)
    for batch in (separate, packed):
        result, gradients = computed("mixtral", [batch])
        assert result.aux_loss == pytest.approx(aux_loss, rel=1e-6)
        assert worst(gradients, model) < 1e-4


def test_a_second_backward_pulls_as_the_first():
    steps = [full_batches(seed) for seed in range(3)]
    weights = []
    for settings in (Settings(), Settings(second_backward=True)):
        with engine_of("mixtral", settings=settings, router_aux_loss_coef=COEFFICIENT) as engine:
            results = [engine.train_step(step) for step in steps]
            assert all(result.expert_load_max for result in results)
            weights.append(weights_of(engine))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.usefixtures("no_code_is_generated")
def test_compiled_layers_count_and_pull_without_a_break():
    from torch._dynamo.utils import counters

    counters.clear()
    (batch,) = micro_batches(5, [(3, 11)])
    model, _, aux_loss = of_transformers("mixtral", batch)
    settings = Settings(compile=True, retained=1)
    result, gradients = computed("mixtral", [batch], settings=settings)
    assert result.aux_loss == pytest.approx(aux_loss, rel=1e-6)
    assert worst(gradients, model) < 2e-5
    assert not counters["graph_break"]


def test_the_load_is_that_of_the_busiest_expert_of_any_layer():
    (batch,) = micro_batches(5, [(3, 11)])
    model: Any = plain_model(tiny_config("mixtral"))
    with torch.no_grad():
        logits = model(**batch, output_router_logits=True, use_cache=False).router_logits
    real = batch["attention_mask"].flatten() == 1
    counts = [layer[real].topk(2).indices.flatten().bincount(minlength=4) for layer in logits]
    loads = [float(count.max() / count.float().mean()) for count in counts]
    result, _ = computed("mixtral", rows_of(batch))
    assert result.expert_load_max == pytest.approx(max(loads))
    assert max(loads) > min(loads)


def test_evaluation_counts_nothing_and_a_step_begins_anew():
    batches, others = full_batches(1), full_batches(2)
    with engine_of("mixtral", router_aux_loss_coef=COEFFICIENT) as engine:
        first = engine.forward_backward(batches)
        balancer = engine.parts.balancer
        assert balancer is not None
        engine.evaluate(others)
        engine.logits(others[0]["input_ids"])
        again = {"aux_loss": first.aux_loss, "expert_load_max": first.expert_load_max}
        assert balancer.read() == again
        assert not balancer.sweep


# -- which models, and which options ---------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "granitemoehybrid", "llama"])
def test_the_default_is_for_mixtures_alone(family):
    skeleton = Skeleton(tiny_config(family), dtype=torch.float32)
    expected = 0.0 if family == "llama" else ROUTER_AUX_LOSS_COEF
    assert coefficient_of(skeleton, "auto") == expected
    assert coefficient_of(skeleton, 0) == 0.0


def test_what_does_not_reach_the_layers_output_is_no_carrier():
    """Unless a part of the router's output has a gradient, there is nothing to attach to."""
    skeleton = Skeleton(tiny_config("mixtral"), dtype=torch.float32)
    routers = find_routers(skeleton)
    assert routers is not None and routers.place == (0, 1)
    for _, module in routers.modules:
        module.register_forward_hook(lambda m, args, out: tuple(x.detach() for x in out))
    assert find_routers(skeleton) is None


def test_a_coefficient_that_is_none_is_refused():
    for bad in [-0.1, float("nan"), float("inf"), True, "on", None]:
        with pytest.raises(ConfigError, match=r"router_aux_loss_coef: .* is out of range"):
            engine_of("mixtral", router_aux_loss_coef=bad)


def planned(folder: Path, family: str, **train: Any) -> Any:
    tiny_config(family).save_pretrained(folder)
    return mt.plan(folder, tokens_per_step=64, seq_len=16, device="cpu", train=train)


@pytest.mark.slow
def test_a_plan_of_a_mixture_is_one_group_that_balances(tmp_path):
    plan = planned(tmp_path, "mixtral")
    assert (plan.made_of.router_aux_loss_coef, plan.choices.groups) == (ROUTER_AUX_LOSS_COEF, 1)
    assert planned(tmp_path, "mixtral", router_aux_loss_coef=0, groups=2).choices.groups == 2
    with mt.Engine.from_plan(plan) as engine:
        assert engine.train_step(full_batches(1)).aux_loss


@pytest.mark.parametrize(
    ("family", "train", "problem"),
    [
        ("mixtral", {"groups": 2}, "train.groups: the routers' balancing loss is over a whole"),
        ("llama", {"router_aux_loss_coef": 0.01}, "train.router_aux_loss_coef: transformers has"),
    ],
)
def test_what_cannot_be_balanced_names_the_key(family, train, problem, tmp_path):
    with pytest.raises(ConfigError, match=problem):
        planned(tmp_path, family, **train)
