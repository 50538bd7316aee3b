"""Ten steps equal five, a checkpoint, and five more in a new engine: bit for bit in every array."""

from __future__ import annotations

import pytest

from tests.support import (
    differing,
    engine_of,
    full_batches,
    state_of,
    tiny_config,
    train_engine,
    train_with_a_break,
)

STEPS = [full_batches(seed, [(1, 8), (2, 5)]) for seed in range(10)]


@pytest.mark.parametrize(
    ("precision", "clip"), [("float32", 0.5), ("bfloat16", 0.5), ("bfloat16", None)]
)
@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2-tied", {}), ("gpt-neox", {"hidden_dropout": 0.2, "attention_dropout": 0.2})],
)
def test_ten_steps_equal_five_and_five_after_a_resume(family, changes, precision, clip, tmp_path):
    config = tiny_config(family, **changes)

    def make(seed=3):
        return engine_of(config, precision=precision, max_grad_norm=clip, seed=seed)

    with make() as engine:
        expected, state = train_engine(engine, STEPS).losses, state_of(engine)
    losses, again = train_with_a_break(make, STEPS, tmp_path)
    assert losses == expected
    assert differing(state, again) == []


def test_a_resumed_run_remembers_its_skipped_steps(tmp_path):
    config = tiny_config("gpt-neox", hidden_dropout=0.2)
    empty = [
        {**batch, "labels": batch["labels"].new_full(batch["labels"].shape, -100)}
        for batch in STEPS[0]
    ]
    steps = [empty, *STEPS[1:4]]  # the first is skipped, and dropout's seeds go on all the same
    with engine_of(config) as engine:
        expected, state = train_engine(engine, steps).losses, state_of(engine)
        counters = engine.state()
    losses, again = train_with_a_break(lambda: engine_of(config), steps, tmp_path)
    assert counters["skipped"] == 1
    assert losses == expected
    assert differing(state, again) == []
