"""On CUDA, with deterministic algorithms: the same bits whenever updates run, however groups are cut, and after a resume."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.errors import DivergedError
from megatrain.settings import ALL, Settings
from tests.support import (
    State,
    Trace,
    differing,
    engine_of,
    full_batches,
    state_of,
    tiny_config,
    train_engine,
    train_with_a_break,
)

STEPS = [full_batches(seed, [(2, 8), (1, 8), (2, 8)]) for seed in range(10)]
pytestmark = pytest.mark.usefixtures("deterministic")


def make(
    family: str = "llama",
    precision: str = "bfloat16",
    settings: Settings | None = None,
    clip: float | None = 0.5,
) -> Engine:
    config = tiny_config(family, num_hidden_layers=4)
    settings = settings or Settings(head_chunk_tokens=7)
    return engine_of(
        config, device="cuda", precision=precision, settings=settings, max_grad_norm=clip
    )


def run(engine: Engine, steps: int = 5) -> tuple[Trace, State]:
    with engine:
        return train_engine(engine, STEPS[:steps]), state_of(engine)


PLACEMENTS = [
    Settings(resident=1, head_chunk_tokens=7),
    Settings(resident=3, retained=1, head_chunk_tokens=7),
    Settings(resident=ALL, retained=ALL, head_chunk_tokens=7),
    Settings(groups=3, resident=2, sums_on_device=4, retained=2, head_chunk_tokens=7),
    Settings(groups=2, resident=ALL, retained=ALL, head_chunk_tokens=7),
    Settings(groups=2, retained=1, offload_activations=True, head_chunk_tokens=7),
]
PRECISIONS = pytest.mark.parametrize("precision", ["float32", "bfloat16"])
FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2-tied"])


@FAMILIES
@PRECISIONS
def test_the_same_seed_gives_the_same_bits_twice(family, precision):
    (first, state), (second, again) = (run(make(family, precision)) for _ in range(2))
    assert (first.losses, first.norms) == (second.losses, second.norms)
    assert differing(state, again) == []


@FAMILIES
@PRECISIONS
def test_the_deferred_update_equals_the_serial_one_bit_for_bit(family, precision):
    deferred, state = run(make(family, precision))
    losses = []
    with make(family, precision) as engine:
        for batches in STEPS[:5]:
            losses.append(engine.train_step(batches).loss)
            for block in engine.anatomy.blocks:
                engine.wait_ready(block.index)
            torch.cuda.synchronize()
        assert losses == deferred.losses
        assert differing(state, state_of(engine)) == []


@PRECISIONS
@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
def test_ten_steps_equal_five_and_five_after_a_resume(precision, clip, tmp_path):
    expected, state = run(make("qwen2-tied", precision, clip=clip), steps=10)
    losses, again = train_with_a_break(
        lambda: make("qwen2-tied", precision, clip=clip), STEPS, tmp_path
    )
    assert losses == expected.losses
    assert differing(state, again) == []


@pytest.mark.parametrize(
    "settings",
    [
        Settings(groups=2, head_chunk_tokens=7),
        Settings(groups=3, sums_on_device=ALL, head_chunk_tokens=7),
    ],
    ids=str,
)
@PRECISIONS
def test_groups_change_no_bit_where_embeddings_are_not_tied(precision, settings):
    whole, state = run(make("llama", precision))
    grouped, again = run(make("llama", precision, settings))
    assert grouped.losses == pytest.approx(whole.losses, rel=1e-6)
    assert grouped.norms == whole.norms
    assert differing(state, again) == []


@pytest.mark.parametrize("settings", PLACEMENTS, ids=str)
@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
@PRECISIONS
def test_where_state_lives_and_what_is_retained_change_no_bit(precision, clip, settings):
    streamed, state = run(make("llama", precision, clip=clip))
    placed, again = run(make("llama", precision, settings, clip))
    assert placed.losses == pytest.approx(streamed.losses, rel=1e-6)
    assert placed.norms == streamed.norms
    assert differing(state, again) == []


def test_a_checkpoint_of_a_streamed_run_is_continued_by_a_resident_one_bit_for_bit(tmp_path):
    expected, state = run(make("qwen2-tied"), steps=10)
    engines = iter(
        [
            make("qwen2-tied"),
            make("qwen2-tied", settings=Settings(resident=ALL, retained=ALL, head_chunk_tokens=7)),
        ]
    )
    losses, again = train_with_a_break(lambda: next(engines), STEPS, tmp_path)
    assert losses == expected.losses
    assert differing(state, again) == []


@PRECISIONS
def test_updates_during_backward_equal_a_clip_that_never_acts(precision):
    clipped, state = run(make("llama", precision, clip=1e9))
    free, again = run(make("llama", precision, clip=None))
    assert (clipped.losses, clipped.norms) == (free.losses, free.norms)
    assert differing(state, again) == []


@PRECISIONS
def test_a_gradient_that_is_not_finite_leaves_the_state_as_it_was(precision):
    with make(precision=precision) as engine:
        engine.train_step(STEPS[0])
        before = state_of(engine)
        poison(engine)
        assert engine.train_step(STEPS[1]).skipped
        assert differing(before, state_of(engine)) == []


def test_without_clipping_it_ends_the_run():
    with make(clip=None) as engine:
        engine.train_step(STEPS[0])
        poison(engine)
        with pytest.raises(DivergedError):
            engine.train_step(STEPS[1])
        with pytest.raises(DivergedError):
            list(engine.iter_weights())


def poison(engine: Engine) -> None:
    """Make the output of the first layer's recomputation, and so its gradient, not finite."""
    layer = engine.skeleton.layer

    def poisoned(index, hidden, call):
        output = layer(index, hidden, call)
        return output * float("inf") if index == 0 and torch.is_grad_enabled() else output

    engine.skeleton.layer = poisoned  # type: ignore[method-assign]
