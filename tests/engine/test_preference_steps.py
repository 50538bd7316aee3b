"""A step of a loss over whole answers is the same however it is cut, kept, offloaded or packed."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from megatrain.engine.batches import Batch
from megatrain.engine.verify import gradients_of, weights_of
from megatrain.errors import ConfigError, DataError
from megatrain.losses import IGNORE, Cpo, Dpo, Kto, Orpo, Policy, Reward, SequenceLoss
from megatrain.losses.sequences import REFERENCE
from megatrain.models.pretrained import as_classifier
from megatrain.settings import Settings
from tests.helpers.support import PAD, VOCABULARY, engine_of, tiny_config

LOSSES: dict[str, SequenceLoss] = {
    "dpo": Dpo(loss_type=("sigmoid", "ipo", "sft")),
    "aot": Dpo(loss_type="aot"),
    "cpo": Cpo(),
    "orpo": Orpo(),
    "kto": Kto(),
    "reward": Reward(0.01),
    "policy": Policy("grpo", beta=0.1, temperature=0.8),
}
PAIRS = 5
# (tokens of the answer to each example, of its prompt)
SIZES = [(3, 4), (5, 4), (7, 2), (2, 2), (4, 6), (6, 6), (3, 3), (3, 3), (8, 2), (1, 2)]
CHUNK: dict[str, Any] = {"head_chunk_tokens": 7}
HOW = {
    "cut": (1, Settings(**CHUNK)),
    "in two": (2, Settings(**CHUNK)),
    "retained": (1, Settings(**CHUNK, retained=1)),
    "graphs on the host": (
        2,
        Settings(**CHUNK, retained=1, retained_on_host=1, offload_activations=True),
    ),
    "offloaded": (2, Settings(**CHUNK, offload_activations=True)),
    "resident": (2, Settings(**CHUNK, resident=3)),
    "two backward passes": (2, Settings(**CHUNK, second_backward=True)),
    "in groups": (1, Settings(**CHUNK, groups=3)),
}


# every loss however it is cut and packed, and of each kind of loss all else
CASES = [
    (name, how)
    for name, loss in LOSSES.items()
    for how, (_, settings) in HOW.items()
    if how in ("cut", "two backward passes") or name in ("dpo", "reward")
    if not (loss.whole_step and settings.groups > 1)  # refused
]


def examples(loss: SequenceLoss, seed: int) -> list[Batch]:
    """Rows of one example each, in order; of KTO each has its mismatch after it."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[Batch] = []
    for number, (answer, prompt) in enumerate(SIZES):
        size = answer + prompt
        ids = torch.randint(3, VOCABULARY, (1, size), generator=generator)
        in_answer = torch.arange(size)[None] >= prompt
        all_of_it = loss.prompts and number % 2 == 0
        row = {
            "input_ids": ids,
            "labels": ids if all_of_it else ids.masked_fill(~in_answer, IGNORE),
            "attention_mask": torch.ones_like(ids),
            REFERENCE: torch.tensor([-4.5 * answer], dtype=torch.float64),
        }
        if loss.of_scores:
            row["row_value"] = torch.tensor([0.2 * (number // 2) if number > 3 else torch.nan])
        if loss.prompts:
            row["token_answer"] = in_answer
        if isinstance(loss, Kto):
            mismatched = number % 2 == 1
            row["row_value"] = torch.tensor([float(number % 4 < 2)])
            row["row_mismatched"] = torch.tensor([mismatched])
        if isinstance(loss, Policy):
            row["row_advantage"] = torch.randn(1, generator=generator)
            for name in ("token_sampled", "token_old", "token_reference"):
                row[name] = torch.randn(1, size, generator=generator) / 4 - 4.5
        rows.append(row)
    return rows


def joined(rows: list[Batch]) -> Batch:
    """Padded on the right, a row for each."""
    width = max(row["input_ids"].shape[1] for row in rows)
    fill = {"labels": IGNORE}

    def padded(name: str, value: torch.Tensor) -> torch.Tensor:
        missing = (0, width - value.shape[1])
        return torch.nn.functional.pad(value, missing, value=fill.get(name, 0))

    return {
        name: torch.cat([r[name] if r[name].ndim == 1 else padded(name, r[name]) for r in rows])
        for name in rows[0]
    }


def packed(rows: list[Batch]) -> Batch:
    """One sequence of all, with positions that begin anew and the number of each one's example."""
    sizes = [row["input_ids"].shape[1] for row in rows]
    of_tokens = [name for name, value in rows[0].items() if value.ndim == 2]
    of_tokens.remove("attention_mask")
    found = {name: torch.cat([row[name] for row in rows], 1) for name in of_tokens}
    starts = [0]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size)
    found["labels"] = found["labels"].clone()
    found["labels"][:, starts] = IGNORE  # the row before would predict it
    found["position_ids"] = torch.cat([torch.arange(size) for size in sizes])[None]
    numbers = [torch.full((size,), number) for number, size in enumerate(sizes)]
    found["row_of"] = torch.cat(numbers)[None]
    found |= {n: torch.cat([r[n] for r in rows]) for n in rows[0] if n.startswith("row_")}
    return found


def cut(loss: SequenceLoss, rows: list[Batch], size: int) -> list[list[Batch]]:
    """`size` pairs at a time, or as many judged rows and then their mismatches."""
    together = [rows]
    if isinstance(loss, Kto):
        together, size = [rows[0::2], rows[1::2]], size
    else:
        size *= 2
    return [part[i : i + size] for part in together for i in range(0, len(part), size)]


def model_for(loss: SequenceLoss) -> Any:
    config = tiny_config("llama")
    return as_classifier(config, PAD) if loss.of_scores else config


def step(loss: SequenceLoss, batches: list[Batch], device: str, **options: Any) -> Any:
    with engine_of(model_for(loss), device=device, **options) as engine:
        result = engine.train_step(batches, loss)
        again = engine.train_step(batches, loss)
        return result, again, weights_of(engine)


@cache
def at_once(name: str, device: str) -> Any:
    """A step of all examples, in the fewest micro-batches."""
    loss = LOSSES[name]
    plain = [joined(part) for part in cut(loss, examples(loss, 0), PAIRS)]
    return step(loss, plain, device, settings=Settings(**CHUNK))


def assert_same_step(expected: Any, found: Any) -> None:
    """The results of `step`."""
    *whole, weights = expected
    *ours, found_weights = found
    for one, other in zip(whole, ours, strict=True):
        assert other.metrics.keys() == one.metrics.keys()
        assert other.loss == pytest.approx(one.loss, rel=2e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert other.target_tokens == one.target_tokens
        for metric, value in one.metrics.items():
            assert other.metrics[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric
    for tensor, weight in weights.items():
        assert float((found_weights[tensor] - weight).norm() / weight.norm()) < 1e-4, tensor


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_step_is_the_same_however_it_is_computed(name, how, device):
    loss, (size, settings) = LOSSES[name], HOW[how]
    rows = examples(loss, 0)
    batches = [joined(part) for part in cut(loss, rows, size)]
    assert_same_step(at_once(name, device), step(loss, batches, device, settings=settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_packed_examples_are_those_of_padded_ones(name, device):
    loss = LOSSES[name]
    parts = cut(loss, examples(loss, 1), 2)
    with engine_of(model_for(loss), device=device) as engine:
        padded = engine.forward_backward([joined(part) for part in parts], loss)
        expected = gradients_of(engine)
        engine.step()
    with engine_of(model_for(loss), device=device) as engine:
        found = engine.forward_backward([packed(part) for part in parts], loss)
        gradients = gradients_of(engine)
    assert found.loss == pytest.approx(padded.loss, rel=1e-5)
    for metric, value in padded.metrics.items():
        assert found.metrics[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric
    for tensor, gradient in expected.items():
        assert float((gradients[tensor] - gradient).norm() / gradient.norm()) < 1e-4, tensor


@pytest.mark.parametrize("name", LOSSES)
def test_an_evaluation_has_the_loss_and_metrics_of_a_step(name, device):
    loss = LOSSES[name]
    batches = [joined(part) for part in cut(loss, examples(loss, 2), 2)]
    with engine_of(model_for(loss), device=device) as engine:
        evaluated = engine.evaluate(batches, loss)
        trained = engine.train_step(batches, loss)
    assert evaluated.loss == pytest.approx(trained.loss, rel=1e-6)
    assert evaluated.metrics == pytest.approx(trained.metrics, rel=1e-5, abs=1e-6)


def test_dropout_is_off(device):
    loss = Dpo()
    batches = [joined(part) for part in cut(loss, examples(loss, 4), PAIRS)]
    config = tiny_config("llama", attention_dropout=0.5)
    with engine_of(config, device=device) as engine:
        assert engine.skeleton.has_dropout
        losses = {engine.forward_backward(batches, loss).loss}
        engine.step(lr=0.0)
        losses.add(engine.forward_backward(batches, loss).loss)
    assert len(losses) == 1


def test_what_a_micro_batch_lacks_is_said():
    rows = examples(Dpo(), 5)
    batch, of_examples = dict(joined(rows[:4])), "row_reference of micro-batch 0, which Dpo needs"
    wrong: list[tuple[Any, str]] = [
        ({name: value for name, value in batch.items() if name != REFERENCE}, of_examples),
        (batch | {REFERENCE: torch.zeros(3)}, of_examples),
        (batch | {"row_of": torch.zeros(2, 2, dtype=torch.long)}, "row_of of micro-batch 0 must"),
        (batch | {"row_of": torch.full_like(batch["labels"], -1)}, "row_of counts from 0"),
        (batch | {"token_answer": torch.zeros(2, 2)}, "token_answer of micro-batch 0 must"),
        (joined(rows[:3]), "3 examples; Dpo needs pairs"),
    ]
    with engine_of("llama") as engine:
        for changed, reason in wrong:
            with pytest.raises(DataError, match=reason):
                engine.forward_backward([changed], Dpo())


def test_a_loss_over_a_whole_step_refuses_groups():
    loss = LOSSES["kto"]
    batches = [joined(part) for part in cut(loss, examples(loss, 7), PAIRS)]
    refused = pytest.raises(ConfigError, match="Kto is computed over a whole step")
    with engine_of("llama", settings=Settings(groups=2)) as engine, refused:
        engine.forward_backward(batches, loss)
