"""Clipping by the global norm without stored gradients: the same bits as with them, less memory, and nothing half done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.engine.activations.offload import Kept
from megatrain.engine.batches import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, DivergedError, MegaTrainError
from megatrain.losses import NextToken, Targets
from megatrain.planner.cost.footprint import LiveBytes
from megatrain.settings import ALL, Settings
from tests.support import (
    LANES,
    State,
    Trace,
    delay,
    differing,
    engine_of,
    full_batches,
    micro_batches,
    state_of,
    take_staging_at_once,
    tiny_config,
    train_engine,
    train_with_a_break,
)

STEPS = [micro_batches(seed) for seed in range(4)]
TWICE = Settings(head_chunk_tokens=7, second_backward=True)
ONCE = replace(TWICE, second_backward=False)


def make(
    family: str = "llama",
    settings: Settings = TWICE,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Engine:
    return engine_of(tiny_config(family, **(changes or {})), settings=settings, **options)


def run(engine: Engine, steps: Any = STEPS) -> tuple[Trace, State]:
    with engine:
        return train_engine(engine, steps), state_of(engine)


def check_equal(family: str, settings: Settings, steps: Any = STEPS, **options: Any) -> None:
    """That a second backward under `settings` ends where stored gradients do."""
    stored, state = run(make(family, replace(settings, second_backward=False), **options), steps)
    again, found = run(make(family, settings, **options), steps)
    assert (again.losses, again.norms) == (stored.losses, stored.norms)
    assert differing(found, state) == []


# -- the same bits ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "precision", "clip"),
    [
        (TWICE, "float32", 0.5),
        (TWICE, "bfloat16", 1e9),
        (replace(TWICE, offload_activations=True), "bfloat16", 0.5),
        (replace(TWICE, resident=1), "bfloat16", 0.5),
        (replace(TWICE, resident=3, offload_activations=True), "float32", 1e9),
        (replace(TWICE, resident=ALL), "bfloat16", 0.5),
        (replace(TWICE, update_threads=1), "bfloat16", 0.5),
    ],
    ids=[
        "fp32",
        "below the limit",
        "offloaded",
        "embedding resident",
        "half resident",
        "all resident",
        "one thread",
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
def test_it_changes_no_bit(family: str, settings: Settings, precision: str, clip: float) -> None:
    check_equal(family, settings, precision=precision, max_grad_norm=clip)


@pytest.mark.parametrize(
    "family",
    [
        "mistral-sliding",
        "gemma2",
        "gpt-neox-tied",
        "falcon-7b",
        "phi3",
        "mixtral",
        "gpt2",
        "opt-projected",
    ],
)
def test_nor_in_other_families(family: str) -> None:
    check_equal(family, replace(TWICE, offload_activations=True), STEPS[:2], precision="bfloat16")


@pytest.mark.parametrize("offload", [False, True])
def test_nor_where_units_drop_out(offload: bool) -> None:
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    check_equal("gpt-neox", replace(TWICE, offload_activations=offload), changes=dropout)


def test_nor_where_rows_are_padded_on_the_left_and_micro_batches_have_no_targets() -> None:
    steps = [[*micro_batches(0, pad_left=True), *micro_batches(1)] for _ in range(2)]
    steps[1][0] = steps[1][0] | {"labels": torch.full_like(steps[1][0]["labels"], -100)}
    check_equal("llama", replace(TWICE, offload_activations=True), steps)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_nor_where_layers_are_compiled() -> None:
    """By the real compiler, which takes seconds for every graph, and the same for layers that share their code."""
    steps = [full_batches(seed, [(2, 16)] * 2) for seed in range(2)]
    check_equal("llama", replace(TWICE, compile=True), steps, changes={"num_hidden_layers": 2})
    torch._dynamo.reset()


def test_a_run_with_a_break_may_go_on_with_stored_gradients(tmp_path: Any) -> None:
    stored, state = run(make(settings=ONCE, precision="bfloat16"))
    engines = iter([make(precision="bfloat16"), make(settings=ONCE, precision="bfloat16")])
    losses, again = train_with_a_break(lambda: next(engines), STEPS, tmp_path)
    assert losses == stored.losses
    assert differing(again, state) == []


@pytest.mark.parametrize(
    ("family", "settings", "slow"),
    [
        *(("qwen2-tied", replace(TWICE, offload_activations=True), (lane,)) for lane in LANES),
        ("llama", TWICE, LANES),
        ("qwen2-tied", replace(TWICE, resident=2), LANES),
    ],
)
def test_delays_change_no_bit(family: str, settings: Settings, slow: tuple[str, ...]) -> None:
    _, state = run(make(family, replace(settings, second_backward=False), precision="bfloat16"))
    _, again = run(delay(make(family, settings, precision="bfloat16"), slow, longest_s=0.003))
    assert differing(again, state) == []


def test_evaluation_and_forgotten_slots_between_the_two_change_nothing() -> None:
    _, state = run(make("qwen2-tied", ONCE), STEPS[:2])
    with make("qwen2-tied") as engine:
        for batches in STEPS[:2]:
            engine.forward_backward(batches)
            engine.evaluate(STEPS[3])
            engine.weights_changed()
            engine.step()
        assert differing(state_of(engine), state) == []


# -- the tests above can fail -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["dropout", "boundary"])
def test_another_seed_or_boundary_in_the_second_one_would_show(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropout = {"hidden_dropout": 0.2}
    _, state = run(make("gpt-neox", ONCE, dropout), STEPS[:1])
    with make("gpt-neox", TWICE, dropout) as engine:
        engine.forward_backward(STEPS[0])
        if broken == "dropout":
            engine.parts.passes.step += 1
        else:
            taken = engine.parts.boundaries.take

            def another(kept: Kept) -> torch.Tensor:
                return taken(kept) * 1.5

            monkeypatch.setattr(engine.parts.boundaries, "take", another)
        engine.step()
        assert differing(state_of(engine), state)


def test_staging_that_is_taken_before_its_update_is_done_would_show() -> None:
    _, state = run(make(settings=ONCE), STEPS[:1])
    with delay(make(), ["update"], longest_s=0.2, shortest_s=0.2) as engine:
        take_staging_at_once(engine)
        engine.train_step(STEPS[0])
        assert differing(state_of(engine), state)


# -- memory -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "per_parameter"), [("bfloat16", 12), ("float32", 12)])
def test_no_model_sized_gradient_exists(precision: str, per_parameter: int) -> None:
    changes = {
        "num_hidden_layers": 12,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_key_value_heads": 4,
    }
    with make(changes=changes, precision=precision) as engine:
        assert "grad" not in engine.store.arrays
        assert engine.store.nbytes == pytest.approx(
            per_parameter * engine.anatomy.parameters, rel=0.1
        )


def test_what_the_second_one_needs_is_given_back_after_it() -> None:
    with make() as engine:
        engine.train_step(STEPS[0])
        with LiveBytes() as live:
            for batches in STEPS:
                engine.train_step(batches)
            assert live.live == 0
            engine.train_step(STEPS[0], Infinite())
            assert live.live == 0


# -- steps that must not change the model -------------------------------------------------------------------------------------------


class Infinite(NextToken):
    """A loss that is not finite."""

    def __call__(
        self, logprobs: torch.Tensor, targets: Targets
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return super().__call__(logprobs, targets)[0] * float("inf"), {}


def poison(engine: Engine, layer: int, backwards: range) -> None:
    """Make one layer's incoming gradient infinite in these of the backwards from now on, as an overflow would."""
    backward = engine.parts.passes._backward_layer
    seen: list[int] = []

    def poisoned(index: int, block: int, mb: MicroBatch) -> None:
        if index == layer and mb.number == 0:
            seen.append(index)
            if len(seen) - 1 in backwards:
                assert mb.grad is not None
                mb.grad[0, 0, 0] = float("inf")
        backward(index, block, mb)

    engine.parts.passes._backward_layer = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "settings",
    [TWICE, replace(TWICE, resident=3, offload_activations=True)],
    ids=["streamed", "half resident"],
)
@pytest.mark.parametrize("what", ["loss", "gradient", "no target"])
def test_a_step_that_cannot_be_taken_leaves_the_state_as_it_was(
    what: str, settings: Settings
) -> None:
    _, expected = run(make("llama-tied", settings, precision="bfloat16"), STEPS[:2])
    with make("llama-tied", settings, precision="bfloat16") as engine:
        engine.train_step(STEPS[0])
        before = state_of(engine)
        if what == "gradient":
            poison(engine, 0, range(1))
        nothing = [batch | {"labels": torch.full_like(batch["labels"], -100)} for batch in STEPS[2]]
        result = engine.train_step(
            nothing if what == "no target" else STEPS[2],
            Infinite() if what == "loss" else NextToken(),
        )
        assert result.skipped
        assert differing(state_of(engine), before) == []
        assert (engine.updates, engine.skipped) == (1, 1)
        engine.parts.passes.step -= 1
        engine.skipped -= 1
        engine.train_step(STEPS[1])
        assert differing(state_of(engine), expected) == [], "the skipped step left a trace"


class ByRows(NextToken):
    """The mean over rows, whether or not they have targets."""

    def denominator(self, batch: Any) -> float:
        return float(len(batch["labels"]))


@pytest.mark.parametrize("settings", [TWICE, ONCE], ids=["twice", "once"])
def test_a_step_without_targets_is_skipped_whatever_its_loss_is_divided_by(
    settings: Settings,
) -> None:
    with make("llama-tied", settings, precision="bfloat16") as engine:
        engine.train_step(STEPS[0], ByRows())
        before = state_of(engine)
        nothing = [batch | {"labels": torch.full_like(batch["labels"], -100)} for batch in STEPS[2]]
        result = engine.train_step(nothing, ByRows())
        assert (result.skipped, result.loss, result.grad_norm) == (True, 0.0, 0.0)
        assert differing(state_of(engine), before) == []
        assert (engine.updates, engine.skipped) == (1, 1)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(
    "settings", [TWICE, replace(TWICE, resident=ALL)], ids=["streamed", "resident"]
)
def test_a_second_gradient_that_alone_is_not_finite_ends_the_run(
    settings: Settings, layer: int
) -> None:
    with make(settings=settings) as engine:
        engine.train_step(STEPS[0])
        poison(engine, layer, range(1, 2))
        with pytest.raises(DivergedError):
            engine.train_step(STEPS[1])
        with pytest.raises(DivergedError):
            list(engine.iter_weights())


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_before_the_first_update_loses_the_step_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, expected = run(make("qwen2-tied", precision="bfloat16"), STEPS[:2])
    with make("qwen2-tied", precision="bfloat16") as engine:
        engine.train_step(STEPS[0])
        engine.forward_backward(STEPS[1])
        with monkeypatch.context() as patch:
            patch.setattr(engine.parts.passes, "_turn", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        with pytest.raises(MegaTrainError, match="without forward_backward"):
            engine.step()
        engine.train_step(STEPS[1])
        assert differing(state_of(engine), expected) == []


def test_an_interrupt_before_the_norm_is_known_leaves_no_second_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = [{**batch, "labels": torch.full_like(batch["labels"], -100)} for batch in STEPS[0]]
    with make() as engine:
        engine.train_step(STEPS[0])
        before = state_of(engine)
        engine.forward_backward(STEPS[1])
        with monkeypatch.context() as patched:
            patched.setattr(engine.parts.gradients, "norm", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert engine.train_step(nothing).skipped
        assert (engine.updates, engine.skipped) == (1, 1)
        assert differing(state_of(engine), before) == []


def test_an_interrupt_between_updates_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as engine:
        engine.forward_backward(STEPS[0])
        monkeypatch.setattr(engine.parts.passes, "_backward_layer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        with pytest.raises(MegaTrainError, match="in the middle of an update"):
            engine.evaluate(STEPS[0])


def test_closed_between_the_two_it_gives_all_back() -> None:
    with make(settings=replace(TWICE, offload_activations=True)) as engine:
        engine.forward_backward(STEPS[0])
        with pytest.raises(MegaTrainError, match="called twice"):
            engine.forward_backward(STEPS[0])


# -- what it cannot do --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "beside",
    [{"groups": 2}, {"retained": 1}, {"retained_on_host": 1, "offload_activations": True}],
    ids=str,
)
def test_groups_and_graphs_beside_it_are_refused(beside: dict[str, Any]) -> None:
    name, value = next(iter(beside.items()))
    needed = {"groups": 1, "retained": 0, "retained_on_host": 0}[name]
    assert value != needed
    with pytest.raises(ConfigError, match=f"second_backward: .* set {name}={needed} as well"):
        Settings(second_backward=True, **beside)


def test_without_clipping_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="second_backward: without max_grad_norm"):
        make(max_grad_norm=None)
