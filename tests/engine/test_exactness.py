"""What must not change a result (when updates run, how a batch is cut), and steps that must not change the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from megatrain.engine.batches import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.engine.landing import AppliedGradients
from megatrain.errors import DivergedError, MegaTrainError
from megatrain.losses import NextToken, Targets
from megatrain.optim import AdamW
from megatrain.settings import ALL, Settings
from tests.support import (
    Batch,
    Trace,
    count_targets,
    differing,
    distance,
    engine_of,
    full_batches,
    gradients_of,
    micro_batches,
    state_of,
    tiny_config,
    train_engine,
)

STEPS = [micro_batches(seed) for seed in range(5)]
FULL = full_batches(0, [(2, 9), (1, 7)])
GROUPINGS = [Settings(groups=2), Settings(groups=3), Settings(groups=8, sums_on_device=ALL)]


PLACEMENTS = [
    Settings(resident=1, head_chunk_tokens=7),
    Settings(resident=3, retained=1, head_chunk_tokens=7),
    Settings(retained=ALL, head_chunk_tokens=7),
    Settings(resident=ALL, retained=ALL, head_chunk_tokens=7),
    Settings(groups=2, resident=2, retained=2, head_chunk_tokens=7),
    Settings(groups=3, resident=1, sums_on_device=3, head_chunk_tokens=7),
    Settings(groups=8, resident=ALL, retained=ALL, head_chunk_tokens=7),
    Settings(offload_activations=True, head_chunk_tokens=7),
    Settings(groups=2, resident=2, retained=1, offload_activations=True, head_chunk_tokens=7),
]


def run(
    engine: Engine, steps: list[list[Batch]] = STEPS
) -> tuple[Trace, dict[tuple[str, int], Tensor]]:
    with engine:
        return train_engine(engine, steps), state_of(engine)


@cache
def streamed(
    family: str, precision: str = "float32", clip: float | None = 0.5
) -> tuple[Trace, dict[tuple[str, int], Tensor]]:
    """The run that others are compared with: every block streamed, one group, everything recomputed."""
    return run(engine_of(tiny_config(family), precision=precision, max_grad_norm=clip))


def train_serially(engine: Engine, steps: list[list[Batch]]) -> Trace:
    """The same, but nothing else begins before the update is over."""
    trace = Trace()
    for batches in steps:
        trace.losses.append(engine.forward_backward(batches).loss)
        trace.norms.append(engine.step())
        for block in engine.anatomy.blocks:
            engine.wait_ready(block.index)
    return trace


# -- when and how -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
def test_the_deferred_update_equals_the_serial_one_bit_for_bit(family, precision):
    deferred, state = streamed(family, precision)
    with engine_of(tiny_config(family), precision=precision) as engine:
        serial = train_serially(engine, STEPS)
        assert (deferred.losses, deferred.norms) == (serial.losses, serial.norms)
        assert differing(state, state_of(engine)) == []


def test_the_same_seed_gives_the_same_bits_twice():
    config = tiny_config("gpt-neox", hidden_dropout=0.2, attention_dropout=0.2)
    (first, state), (second, again) = (run(engine_of(config, seed=7)) for _ in range(2))
    assert first.losses == second.losses
    assert differing(state, again) == []


@pytest.mark.parametrize("settings", GROUPINGS, ids=str)
def test_groups_change_no_bit_where_embeddings_are_not_tied(settings):
    whole, state = streamed("mistral-sliding")
    grouped, again = run(
        engine_of(tiny_config("mistral-sliding"), settings=replace(settings, head_chunk_tokens=7))
    )
    assert grouped.losses == pytest.approx(whole.losses, rel=1e-6)
    assert grouped.norms == whole.norms
    assert differing(state, again) == []


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("settings", PLACEMENTS, ids=str)
def test_where_state_lives_and_what_is_retained_change_no_bit(settings, clip, precision):
    whole, state = streamed("mistral-sliding", precision, clip)
    placed, again = run(
        engine_of(
            tiny_config("mistral-sliding"),
            precision=precision,
            max_grad_norm=clip,
            settings=settings,
        )
    )
    assert placed.losses == pytest.approx(whole.losses, rel=1e-6)
    assert placed.norms == whole.norms
    assert differing(state, again) == []


@pytest.mark.parametrize(
    "settings",
    [
        Settings(resident=1, head_chunk_tokens=7),
        Settings(resident=ALL, retained=ALL, head_chunk_tokens=7),
    ],
    ids=str,
)
def test_nor_do_they_where_embeddings_are_tied_and_units_drop_out(settings):
    for family, changes in (
        ("qwen2-tied", {}),
        ("gpt-neox", {"hidden_dropout": 0.2, "attention_dropout": 0.2}),
    ):
        config = tiny_config(family, **changes)
        whole, state = run(engine_of(config))
        placed, again = run(engine_of(config, settings=settings))
        assert (placed.losses, placed.norms) == (whole.losses, whole.norms)
        assert differing(state, again) == []


def test_resident_blocks_take_no_host_memory():
    config = tiny_config("llama")
    with engine_of(config) as streamed, engine_of(config, settings=Settings(resident=2)) as mixed:
        blocks = len(streamed.anatomy.blocks)
        here = sum(layout.numel for layout in mixed.store.layouts[:2])
        assert (
            mixed.store.device.nbytes == 4 * here * 4
        )  # weight, two moments and the gradient, fp32
        assert streamed.store.nbytes - mixed.store.nbytes == pytest.approx(
            4 * here * 4, abs=4 * (2 << 20)
        )
        assert {mixed.store.is_resident(block) for block in range(2, blocks)} == {False}
    with engine_of(config, settings=Settings(resident=ALL)) as whole:
        assert whole.store.nbytes == 0


def test_a_step_of_more_micro_batches_than_planned_has_more_groups_not_larger_ones(monkeypatch):
    config = tiny_config("llama")
    _, state = run(engine_of(config), STEPS[:1])
    with engine_of(
        config, settings=Settings(groups=2, group_size=1, head_chunk_tokens=7)
    ) as engine:
        begun: list[int] = []
        monkeypatch.setattr(
            engine.parts.boundaries, "begin_group", lambda tokens, *_: begun.append(len(tokens))
        )
        engine.train_step(STEPS[0])
        assert begun == [1, 1, 1]
        assert differing(state, state_of(engine)) == []


@pytest.mark.parametrize("settings", GROUPINGS, ids=str)
def test_groups_change_only_summation_order_where_embeddings_are_tied(settings):
    whole, _ = streamed("qwen2-tied")
    grouped, _ = run(engine_of(tiny_config("qwen2-tied"), settings=settings))
    assert grouped.losses == pytest.approx(whole.losses, rel=1e-6)
    for name, weight in whole.weights.items():
        if not name.endswith(
            "k_proj.bias"
        ):  # its gradient is zero but for rounding, which Adam magnifies
            assert distance(grouped.weights[name], weight) < 1e-5, name


@pytest.mark.parametrize("sizes", [(6,), (3, 3), (2, 2, 2), (1, 5), (1,) * 6], ids=str)
def test_the_size_of_micro_batches_changes_only_summation_order(sizes):
    config = tiny_config("llama")
    (whole,) = micro_batches(0, [(6, 11)])
    cut: list[Batch] = [
        dict(zip(whole, parts, strict=True))
        for parts in zip(*(t.split(list(sizes)) for t in whole.values()), strict=True)
    ]
    with engine_of(config) as engine:
        loss = engine.forward_backward([whole]).loss
        expected = gradients_of(engine)
        engine.step()
    with engine_of(config) as engine:
        assert engine.forward_backward(cut).loss == pytest.approx(loss, rel=1e-6)
        ours = gradients_of(engine)
    assert max(distance(ours[name], gradient) for name, gradient in expected.items()) < 1e-5


@pytest.mark.parametrize("chunk", [1, 5, 4096])
def test_the_chunk_of_the_head_changes_only_summation_order(chunk):
    config = tiny_config("qwen2-tied")
    with engine_of(config) as engine:
        loss, expected = engine.forward_backward(STEPS[0]).loss, gradients_of(engine)
    with engine_of(config, settings=Settings(head_chunk_tokens=chunk)) as engine:
        assert engine.forward_backward(STEPS[0]).loss == pytest.approx(loss, rel=1e-6)
        ours = gradients_of(engine)
    largest = max(float(g.norm()) for g in expected.values())
    assert max(float((ours[name] - g).norm()) for name, g in expected.items()) < 1e-5 * largest


@pytest.mark.parametrize(("precision", "threads"), [("float32", 1), ("bfloat16", 5)])
def test_the_number_of_update_threads_changes_no_bit(threads, precision):
    config = tiny_config("llama")
    _, state = run(engine_of(config, precision=precision), STEPS[:2])
    _, again = run(
        engine_of(
            config,
            precision=precision,
            settings=Settings(update_threads=threads, head_chunk_tokens=7),
        ),
        STEPS[:2],
    )
    assert differing(state, again) == []


# -- clipping -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", [Settings(), Settings(groups=2)], ids=str)
def test_updates_during_backward_equal_a_clip_that_never_acts(settings, precision):
    config = tiny_config("qwen2-tied")
    clipped, state = run(
        engine_of(config, max_grad_norm=1e9, settings=settings, precision=precision)
    )
    free, again = run(engine_of(config, max_grad_norm=None, settings=settings, precision=precision))
    assert (clipped.losses, clipped.norms) == (free.losses, free.norms)
    assert differing(state, again) == []


@pytest.mark.parametrize(
    ("precision", "per_parameter", "kept"), [("bfloat16", 12, 2), ("float32", 12, 4)]
)
def test_without_clipping_no_model_sized_gradient_exists(precision, per_parameter, kept):
    config = tiny_config(
        "llama",
        num_hidden_layers=12,
        hidden_size=256,
        intermediate_size=1024,
        num_key_value_heads=4,
    )
    with engine_of(config, precision=precision, max_grad_norm=None) as engine:
        assert "grad" not in engine.store.arrays
        assert engine.store.nbytes == pytest.approx(
            per_parameter * engine.anatomy.parameters, rel=0.1
        )
        assert isinstance(engine.parts.sink, AppliedGradients)
        staging = sum(buffer.nbytes for buffer in engine.parts.sink.ring.buffers)
        assert staging <= 3 * kept * max(layout.numel for layout in engine.store.layouts)
    with engine_of(config, precision=precision) as engine:
        assert engine.store.nbytes == pytest.approx(
            (per_parameter + kept) * engine.anatomy.parameters, rel=0.1
        )


def test_gradients_cannot_be_asked_for_where_they_are_not_kept():
    with (
        engine_of(tiny_config("llama"), max_grad_norm=None) as engine,
        pytest.raises(MegaTrainError, match="use train_step"),
    ):
        engine.forward_backward(STEPS[0])


# -- order of calls -----------------------------------------------------------------------------------------------------------------


def test_forward_backward_twice_is_an_error():
    with engine_of(tiny_config("llama")) as engine:
        engine.forward_backward(STEPS[0])
        with pytest.raises(MegaTrainError, match="called twice"):
            engine.forward_backward(STEPS[1])
        engine.step()
        engine.forward_backward(STEPS[1])


def test_step_alone_is_an_error():
    with (
        engine_of(tiny_config("llama")) as engine,
        pytest.raises(MegaTrainError, match="without forward_backward"),
    ):
        engine.step()


def test_evaluation_and_generation_between_steps_change_nothing():
    config = tiny_config("gpt-neox", hidden_dropout=0.2)
    undisturbed, state = run(engine_of(config))
    with engine_of(config) as engine:
        trace = Trace()
        for batches in STEPS:
            trace.losses.append(engine.train_step(batches).loss)
            engine.evaluate(STEPS[0])
            engine.generate(torch.tensor([[4, 5, 6]]), 2)
        assert trace.losses == undisturbed.losses
        assert differing(state, state_of(engine)) == []


# -- nothing to learn from, or nothing sane -----------------------------------------------------------------------------------------


class Poisoned(NextToken):
    """A loss that is not finite."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, logprobs: Tensor, targets: Targets) -> tuple[Tensor, dict[str, Tensor]]:
        return super().__call__(logprobs, targets)[0] * self.factor, {}


@pytest.mark.parametrize(
    ("factor", "precision"), [(float("nan"), "bfloat16"), (float("inf"), "float32")]
)
@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_a_loss_that_is_not_finite_leaves_the_state_as_it_was(max_grad_norm, precision, factor):
    config = tiny_config("llama-tied")
    with engine_of(config, precision=precision, max_grad_norm=max_grad_norm) as engine:
        engine.train_step(STEPS[0])
        before = state_of(engine)
        result = engine.train_step(STEPS[1], Poisoned(factor))
        assert result.skipped
        assert differing(before, state_of(engine)) == []
        assert (engine.updates, engine.skipped) == (1, 1)
        engine.train_step(STEPS[1])
        expected = state_of(engine)
    with engine_of(config, precision=precision, max_grad_norm=max_grad_norm) as engine:
        train_engine(engine, STEPS[:2])
        assert differing(expected, state_of(engine)) == [], "the skipped step left a trace"


def poison_backward(engine: Engine, layer: int) -> None:
    """Make one layer's incoming gradient infinite, as an overflow in its backward would."""
    backward = engine.parts.passes._backward_layer

    def poisoned(index: int, block: int, mb: MicroBatch) -> None:
        if index == layer:
            assert mb.grad is not None
            mb.grad[0, 0, 0] = float("inf")
        backward(index, block, mb)

    engine.parts.passes._backward_layer = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("layer", [0, 2])  # the last and the first whose gradient arrives
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_leaves_the_state_as_it_was(precision, layer):
    with engine_of(tiny_config("llama-tied"), precision=precision) as engine:
        engine.train_step(STEPS[0])
        before = state_of(engine)
        poison_backward(engine, layer)
        result = engine.train_step(STEPS[1])
        assert result.skipped
        assert differing(before, state_of(engine)) == []
        assert (engine.updates, engine.skipped) == (1, 1)


def test_without_clipping_a_gradient_that_is_not_finite_ends_the_run_and_is_never_saved():
    with engine_of(tiny_config("llama"), max_grad_norm=None) as engine:
        engine.train_step(STEPS[0])
        poison_backward(engine, 1)
        with pytest.raises(DivergedError, match="not finite"):
            engine.train_step(STEPS[1])
        with pytest.raises(DivergedError):
            list(engine.iter_weights())
        with pytest.raises(DivergedError):
            engine.train_step(STEPS[2])


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_a_step_without_targets_is_counted_and_skipped(max_grad_norm):
    empty = [{**batch, "labels": torch.full_like(batch["labels"], -100)} for batch in STEPS[0]]
    with engine_of(tiny_config("llama"), max_grad_norm=max_grad_norm) as engine:
        engine.train_step(STEPS[1])
        before = state_of(engine)
        result = engine.train_step(empty)
        assert (result.loss, result.target_tokens, result.grad_norm, result.skipped) == (
            0.0,
            0,
            0.0,
            True,
        )
        assert differing(before, state_of(engine)) == []
        assert (engine.updates, engine.skipped) == (1, 1)
        assert engine.evaluate(empty).target_tokens == 0


@pytest.mark.parametrize(
    "settings", [Settings(head_chunk_tokens=7), Settings(groups=3, head_chunk_tokens=7)], ids=str
)
def test_a_micro_batch_without_targets_adds_nothing(settings):
    config = tiny_config("llama-tied")
    empty = {**STEPS[1][0], "labels": torch.full_like(STEPS[1][0]["labels"], -100)}
    with engine_of(config, settings=settings) as engine:
        expected = engine.forward_backward(STEPS[0])
        gradients = gradients_of(engine)
    with engine_of(config, settings=settings) as engine:
        result = engine.forward_backward([*STEPS[0], empty])
        assert (result.loss, result.target_tokens) == (expected.loss, expected.target_tokens)
        assert differing(gradients_of(engine), gradients) == []


@pytest.mark.parametrize("padding", ["masked as padding", "seen"])
def test_a_row_without_targets_gives_zero_gradient(padding):
    config = tiny_config("llama")
    (batch,) = micro_batches(0, [(2, 10)])
    row = torch.randint(3, 97, (1, 10), generator=torch.Generator().manual_seed(9))
    extra = {
        "input_ids": row,
        "labels": torch.full_like(row, -100),
        "attention_mask": torch.full_like(row, int(padding == "seen")),
    }
    with engine_of(config) as engine:
        engine.forward_backward([batch])
        expected = gradients_of(engine)
    with engine_of(config) as engine:
        engine.forward_backward([join(batch, extra)])
        ours = gradients_of(engine)
    for name, gradient in expected.items():
        assert distance(ours[name], gradient) < 1e-5, name


def join(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Batch:
    return {name: torch.cat([a[name], b[name]]) for name in a}


def test_the_loss_is_divided_by_all_targets_of_the_step_and_not_by_micro_batch():
    config = tiny_config("llama")
    few, many = full_batches(0, [(1, 3), (4, 12)])
    with engine_of(config, optimizer=AdamW(lr=0.0)) as engine:
        losses = [engine.evaluate([batch]).loss for batch in (few, many)]
        counts = [count_targets([batch]) for batch in (few, many)]
        assert abs(losses[0] - losses[1]) > 0.01
        expected = (losses[0] * counts[0] + losses[1] * counts[1]) / sum(counts)
        result = engine.forward_backward([few, many])
        assert result.loss == pytest.approx(expected, rel=1e-6)
        assert result.target_tokens == sum(counts)


class WithHits(NextToken):
    """Counts the targets that are likelier than one in ten, beside the loss."""

    def __call__(
        self, logprobs: torch.Tensor, targets: Targets
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -logprobs.sum(), {
            "hits": (logprobs > math.log(0.1)).sum(),
            "targets": torch.ones(()),
        }


@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("settings", [Settings(head_chunk_tokens=3), Settings(groups=2)], ids=str)
def test_metrics_of_a_loss_are_summed_over_the_step(settings, clip):
    config = tiny_config("llama")
    with engine_of(config, max_grad_norm=clip, settings=settings) as engine:
        logprobs = [
            torch.log_softmax(engine.logits(batch["input_ids"]).float(), -1)[:, :-1]
            .gather(2, batch["labels"][:, 1:, None].clamp(min=0))
            .squeeze(2)[batch["labels"][:, 1:] != -100]
            for batch in FULL
        ]
        result = engine.train_step(FULL, WithHits())
        assert result.metrics["hits"] == sum(int((p > math.log(0.1)).sum()) for p in logprobs)
        chunks = sum(-(-len(p) // settings.head_chunk_tokens) for p in logprobs)
        assert result.metrics["targets"] == chunks, "once for each chunk of the head"
