"""Four steps equal two, a checkpoint, and two more in a new engine: bit for bit in every array."""

from __future__ import annotations

import pytest

from megatrain.settings import ALL, Settings
from tests.helpers.runs import assert_same, run, train_with_a_break
from tests.helpers.support import engine_of, full_batches, tiny_config

STEPS = [full_batches(seed, [(1, 8), (2, 5)]) for seed in range(4)]
pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "precision", "clip"),
    [
        ("qwen2-tied", {}, "float32", 0.5),
        ("qwen2-tied", {}, "bfloat16", None),
        ("gpt-neox", {"hidden_dropout": 0.2, "attention_dropout": 0.2}, "bfloat16", 0.5),
        ("mixtral", {"router_jitter_noise": 0.1}, "bfloat16", 0.5),
        ("mixtral", {"router_jitter_noise": 0.1}, "float32", None),
    ],
)
def test_four_steps_equal_two_and_two(family, changes, precision, clip, device, tmp_path):
    options = {"precision": precision, "max_grad_norm": clip, "seed": 3, "device": device}

    def make():
        weight = 0.1 if family == "mixtral" else 0.0
        return engine_of(tiny_config(family, **changes), router_aux_loss_coef=weight, **options)

    assert_same(train_with_a_break(make, STEPS, tmp_path), run(make(), STEPS))


def test_a_streamed_run_is_continued_by_a_resident_one_bit_for_bit(device, tmp_path):
    settings = [Settings(head_chunk_tokens=7, resident=n, retained=n) for n in (0, ALL)]
    make = [
        lambda dials=dials: engine_of(
            "qwen2-tied", precision="bfloat16", settings=dials, device=device
        )
        for dials in settings
    ]
    makes = iter(make)
    found = train_with_a_break(lambda: next(makes)(), STEPS, tmp_path)
    assert_same(found, run(make[0](), STEPS))
