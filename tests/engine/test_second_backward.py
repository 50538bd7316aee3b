"""However many layers are computed twice: the same bits, in as much memory as the plan says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.settings import ALL, Settings
from tests.engine.test_images import row_of, steps_of
from tests.helpers.multimodal import multimodal_config
from tests.helpers.runs import Trace, assert_same, run
from tests.helpers.support import engine_of, micro_batches, tiny_config

LAYERS = 4
STORED = Settings(head_chunk_tokens=7)
BF16: dict[str, Any] = {"precision": "bfloat16"}
# model, settings, options; settings of the stored gradients that they equal
pytestmark = pytest.mark.usefixtures("deterministic")
CASES: dict[str, tuple[str, Settings, dict[str, Any], dict[str, Any]]] = {
    "dense": ("llama", STORED, BF16, {}),
    "in groups": ("llama", STORED, {}, {"groups": 2}),
    "tied": ("qwen2-tied", STORED, BF16, {}),
    "tied, resident": ("qwen2-tied", replace(STORED, resident=3), BF16, {"resident": 0}),
    "offloaded": ("gemma2", replace(STORED, offload_activations=True), BF16, {}),
    "mixture": ("mixtral", STORED, {"router_aux_loss_coef": 0.1}, {}),
    "retained": ("llama", replace(STORED, retained=1), BF16, {"retained": 0}),
    "frozen": ("llama", STORED, {"freeze": ("model.embed*", "*.layers.0.*")}, {}),
    "images": ("qwen3-vl", STORED, {}, {}),
}


def make(case: str, **changed: Any) -> Engine:
    model, settings, options, _ = CASES[case]
    if case == "images":
        config: Any = multimodal_config(model)
        options = {**options, "image_row": row_of(config)}
    else:
        config = tiny_config(model, num_hidden_layers=LAYERS)
    return engine_of(config, settings=replace(settings, **changed), **options)


def steps(case: str) -> list[list[dict[str, Any]]]:
    if case == "images":
        return [steps_of(multimodal_config("qwen3-vl"))] * 2
    return [micro_batches(seed) for seed in range(2)]


@cache
def once(case: str) -> Trace:
    return run(make(case, **CASES[case][3]), steps(case))


@pytest.mark.parametrize("twice", [0, 1, 3, ALL])
@pytest.mark.parametrize("case", CASES)
def test_the_number_of_layers_computed_twice_changes_no_bit(case, twice):
    with make(case) as engine:
        layers = len(engine.anatomy.blocks) - 2
    if case == "retained":
        twice = min(twice, layers - 1)
    engine = make(case, second_backward=twice)
    ends = layers, engine.anatomy.first_trained, engine.anatomy.embed_feeds_head
    kept = {block for name, block in engine.store._arrays if name == "grad"}
    assert kept == engine.settings.stored(*ends)
    assert_same(run(engine, steps(case)), once(case), losses=1e-6)
    assert all(norm > 0.5 for norm in once(case).norms), "it clips"


def test_gradients_take_less_memory_the_more_is_computed_twice():
    bytes_of, sizes = list[int](), list[int]()
    for twice in (0, 1, 2, LAYERS - 1, ALL):
        with make("dense", second_backward=twice) as engine:
            arrays = (a for (name, _), a in engine.store._arrays.items() if name == "grad")
            bytes_of.append(sum(array.nbytes for array in arrays))
            sizes = [2 * layout.numel for layout in engine.store.layouts]
    embed, layer, *_, head = sizes
    below = [0, embed + layer, embed + 2 * layer, embed + 3 * layer, embed + LAYERS * layer + head]
    assert bytes_of == [bytes_of[0] - less for less in below] and bytes_of[-1] == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"second_backward": -1}, "second_backward: -1 is out of range"),
        ({"second_backward": 5}, "second_backward: 5 is out of range: the model has 4 layers"),
        ({"second_backward": 2, "retained": 3}, "spends what retained layers save"),
        ({"second_backward": True, "retained": 1}, "spends what retained layers save"),
    ],
)
def test_numbers_that_the_model_does_not_have_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        make("dense", **settings)
