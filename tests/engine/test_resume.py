"""Four steps equal two, a checkpoint, and two more in a new engine: bit for bit in every array."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.errors import ConfigError
from megatrain.optim import AdamW, Lion, Muon
from megatrain.settings import ALL, Settings
from megatrain.storage.checkpoint import load_checkpoint, save_checkpoint
from tests.engine.test_same_bits import MUON, OPTIMIZERS
from tests.helpers.runs import assert_same, run, train_with_a_break
from tests.helpers.support import engine_of, full_batches, tiny_config

STEPS = [full_batches(seed, [(1, 8), (2, 5)]) for seed in range(4)]
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
JITTER = tiny_config("mixtral", router_jitter_noise=0.1)
BF16: dict[str, Any] = {"precision": "bfloat16"}
FREE: dict[str, Any] = {"max_grad_norm": None}
BALANCED: dict[str, Any] = {"router_aux_loss_coef": 0.1}
RUNS: list[tuple[Any, dict[str, Any]]] = [
    ("qwen2-tied", {}),
    ("qwen2-tied", BF16 | FREE),
    (tiny_config("gpt-neox", **DROPOUT), BF16),
    (JITTER, BALANCED | BF16),
    (JITTER, BALANCED | FREE),
]
WITH_OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    *(("qwen2-tied", BF16 | {"optimizer": optimizer}) for optimizer in OPTIMIZERS),
    ("llama", MUON),
    ("llama", MUON | BF16),
]
CASES = [("cpu", *case) for case in (*RUNS, *WITH_OPTIMIZERS)]
CASES += [pytest.param("cuda", *case, marks=pytest.mark.cuda) for case in RUNS]  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("device", "model", "options"), CASES)
def test_four_steps_equal_two_and_two(device, model, options, tmp_path):
    def make():
        return engine_of(model, seed=3, device=device, **options)

    assert_same(train_with_a_break(make, STEPS, tmp_path), run(make(), STEPS))


@pytest.mark.usefixtures("deterministic")
def test_a_streamed_run_is_continued_by_a_resident_one(device, tmp_path):
    def make(dial):
        settings = Settings(head_chunk_tokens=7, resident=dial, retained=dial)
        return engine_of("qwen2-tied", device=device, settings=settings, **BF16)

    makes = iter((0, ALL))
    found = train_with_a_break(lambda: make(next(makes)), STEPS, tmp_path)
    assert_same(found, run(make(0), STEPS))


def test_a_checkpoint_is_of_its_optimizer_and_moments(tmp_path):
    int8, others = AdamW(moments="int8"), (AdamW(moments="bfloat16"), Lion(moments="int8"), Muon())
    for saved, refused in ((int8, (AdamW(), *others)), (Muon(), (AdamW(), int8))):
        with engine_of("qwen2-tied", optimizer=saved, **BF16) as engine:
            engine.train_step(STEPS[0])
            path = save_checkpoint(tmp_path / saved.name, 1, engine, None, {})
        for other in refused:
            refuses = pytest.raises(ConfigError, match="was saved with")
            with engine_of("qwen2-tied", optimizer=other, **BF16) as engine, refuses:
                load_checkpoint(path, engine)
