"""Engines with Muon, which updates whole tensors: the plain loop; however memory and work are
divided; with late lanes; resumed."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from megatrain.memory import sizes
from megatrain.models.anatomy import decaying
from megatrain.optim import Muon
from megatrain.optim.muon import HostWorkspace
from megatrain.settings import ALL, Settings
from tests.helpers.compare import distance
from tests.helpers.delays import LANES, delay
from tests.helpers.plain import DECAY, MAX_NORM, train_plain
from tests.helpers.runs import Trace, assert_same, cosine, run, train_engine, train_with_a_break
from tests.helpers.support import engine_of, micro_batches, plain_model, tiny_config

MUON = Muon(lr=2e-3, weight_decay=DECAY, adamw_lr=1e-3)
STEPS = [micro_batches(seed) for seed in range(6)]


def plain_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's own. Hidden is what the model's layers hold as matrices."""
    made: list[torch.optim.Optimizer] = []
    decay = decaying(model)
    for name, parameter in model.named_parameters():
        options: dict[str, Any] = {"weight_decay": DECAY if name in decay else 0.0}
        if ".layers." in name and parameter.ndim == 2:
            made.append(
                torch.optim.Muon([parameter], lr=MUON.lr, adjust_lr_fn="match_rms_adamw", **options)
            )
        else:
            made.append(torch.optim.AdamW([parameter], lr=MUON.adamw_lr or MUON.lr, **options))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
def test_training_equals_a_plain_loop(family):
    model, rates = plain_model(tiny_config(family)), cosine(len(STEPS), MUON.lr)
    plain = train_plain(model, STEPS, rates, plain_optimizers(model))
    with engine_of(family, optimizer=MUON) as engine:
        ours = train_engine(engine, STEPS, rates)
    assert ours.losses == pytest.approx(plain.losses, rel=2e-3)  # Muon iterates in bfloat16
    for name, expected in plain.weights.items():
        assert distance(ours.weights[name], expected) <= 5e-3, name


STRAIGHT = Settings(head_chunk_tokens=7)
SETTINGS = {
    "groups": Settings(head_chunk_tokens=7, groups=3),
    "sums that stay": Settings(head_chunk_tokens=7, groups=3, sums_on_device=2),
    "resident": Settings(head_chunk_tokens=7, resident=2),
    "resident with groups": Settings(head_chunk_tokens=7, resident=ALL, groups=3),
    "threads": Settings(head_chunk_tokens=7, update_threads=5),
    "offload": Settings(head_chunk_tokens=7, offload_activations=True),
}


def trained(
    family: str,
    settings: Settings = STRAIGHT,
    *,
    max_norm: float | None = MAX_NORM,
    longest_s: float = 0.0,
) -> Trace:
    """The state after two steps."""
    options: Any = {"precision": "bfloat16", "max_grad_norm": max_norm}
    with engine_of(family, optimizer=MUON, settings=settings, **options) as engine:
        assert engine.store.is_on_nvme("remainder", 1) == bool(settings.nvme_blocks)
        if longest_s:
            delay(engine, LANES, longest_s)
        return run(engine, STEPS[:2])


straight = cache(trained)  # the runs that others are compared with


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_dials_change_no_bit(name):
    assert_same(trained("llama", SETTINGS[name]), straight("llama"), losses=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [MAX_NORM, None])
def test_nor_does_state_on_nvme(max_norm, tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "STATE_STAGES", 1)
    settings = replace(STRAIGHT, nvme_folders=(tmp_path,), nvme_blocks=ALL)
    found = trained("qwen2-tied", settings, max_norm=max_norm)
    assert_same(found, straight("qwen2-tied", max_norm=max_norm))


def test_without_clipping_blocks_are_updated_during_backward():
    assert_same(trained("qwen2-tied", max_norm=None), straight("qwen2-tied", max_norm=1e9))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_same_bits(precision, tmp_path):
    def make():
        return engine_of("llama", optimizer=MUON, precision=precision)

    assert_same(train_with_a_break(make, STEPS[:2], tmp_path), run(make(), STEPS[:2]))


def test_what_stops_a_piece_reaches_whoever_waits(monkeypatch):
    def broken() -> None:
        raise ZeroDivisionError("in a thread of the pool")

    with engine_of("llama", optimizer=MUON) as engine:
        monkeypatch.setattr(Muon, "stages", lambda *_, **__: iter([[broken]]))
        engine.forward_backward(STEPS[0])
        engine.step()
        with pytest.raises(ZeroDivisionError, match="thread of the pool"):
            engine.wait_ready(0)


def test_the_thread_of_products_takes_what_their_library_keeps_before_the_first_step(monkeypatch):
    calls: list[tuple[str, threading.Thread]] = []
    for name in ("take_libraries", "replace"):
        real = getattr(HostWorkspace, name)

        def noted(*arguments: Any, name: str = name, real: Any = real) -> None:
            calls.append((name, threading.current_thread()))
            real(*arguments)

        monkeypatch.setattr(HostWorkspace, name, noted)
    with engine_of("llama", optimizer=MUON) as engine:
        before = list(calls)
        train_engine(engine, STEPS[:1])
        assert [name for name, _ in before] == ["take_libraries"]
        assert {name for name, _ in calls[len(before) :]} == {"replace"}
        assert {thread for _, thread in calls} == {engine.parts.updater.lane._thread}
