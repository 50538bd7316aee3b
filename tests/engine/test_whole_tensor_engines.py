"""Engines with Muon, which updates whole tensors: the plain loop; however memory and work are divided; with late lanes; resumed."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from megatrain import schedule
from megatrain.engine.update import HostWorkspace
from megatrain.errors import ConfigError
from megatrain.models.anatomy import decays
from megatrain.optim import AdamW, Muon
from megatrain.schedule import LEVELS
from megatrain.settings import ALL, Settings
from megatrain.storage.checkpoint import save_checkpoint
from megatrain.storage.restore import load_checkpoint
from tests.support import (
    LANES,
    State,
    cosine,
    count_targets,
    delay,
    differing,
    distance,
    engine_of,
    micro_batches,
    plain_gradients,
    plain_model,
    state_of,
    tiny_config,
    train_engine,
    train_with_a_break,
)

STEPS, MAX_NORM, DECAY = 8, 0.5, 0.1
MUON = Muon(lr=2e-3, weight_decay=DECAY, adamw_lr=1e-3)
RATES = cosine(STEPS, MUON.lr)


def plain_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's own. Hidden is what the model's layers hold as matrices."""
    made: list[torch.optim.Optimizer] = []
    for name, parameter in model.named_parameters():
        options: dict[str, Any] = {
            "weight_decay": DECAY if decays(name, tuple(parameter.shape)) else 0.0
        }
        if ".layers." in name and parameter.ndim == 2:
            made.append(
                torch.optim.Muon([parameter], lr=MUON.lr, adjust_lr_fn="match_rms_adamw", **options)
            )
        else:
            made.append(torch.optim.AdamW([parameter], lr=MUON.adamw_lr or MUON.lr, **options))
    return made


@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
def test_training_equals_a_plain_loop(family):
    config = tiny_config(family)
    steps = [micro_batches(seed) for seed in range(STEPS)]
    model = plain_model(config)
    theirs = plain_optimizers(model)
    bases = [each.param_groups[0]["lr"] for each in theirs]
    losses = []
    for batches, rate in zip(steps, RATES, strict=True):
        losses.append(plain_gradients(model, batches, count_targets(batches)))
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for each, base in zip(theirs, bases, strict=True):
            each.param_groups[0]["lr"] = base * rate / MUON.lr
            each.step()
        model.zero_grad()
    with engine_of(config, optimizer=MUON, max_grad_norm=MAX_NORM) as engine:
        ours = train_engine(engine, steps, RATES)
    assert ours.losses == pytest.approx(losses, rel=2e-3)  # the iteration of Muon runs in bfloat16
    for name, parameter in model.named_parameters():
        assert distance(ours.weights[name], parameter.detach()) <= 5e-3, name


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
) -> State:
    """What three steps leave."""
    with engine_of(
        tiny_config(family),
        optimizer=MUON,
        precision="bfloat16",
        max_grad_norm=max_norm,
        settings=settings,
    ) as engine:
        assert engine.store.is_on_nvme("remainder", 1) == bool(settings.nvme_blocks)
        if longest_s:
            delay(engine, LANES, longest_s)
        train_engine(engine, [micro_batches(seed) for seed in range(3)])
        return state_of(engine)


straight = cache(trained)  # the runs that others are compared with


@pytest.mark.parametrize("name", SETTINGS)
def test_dials_change_no_bit(name):
    assert differing(straight("llama"), trained("llama", SETTINGS[name])) == []


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("max_norm", [MAX_NORM, None], ids=["clipped", "unclipped"])
def test_nor_do_arrays_on_nvme(level, max_norm, tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "STATE_STAGES", 1)
    settings = replace(STRAIGHT, nvme_folders=(tmp_path,), nvme_blocks=ALL, nvme_arrays=level)
    expected = straight("qwen2-tied", max_norm=max_norm)
    assert differing(expected, trained("qwen2-tied", settings, max_norm=max_norm)) == []


def test_without_clipping_blocks_are_updated_during_backward():
    config, steps = tiny_config("qwen2-tied"), [micro_batches(seed) for seed in range(3)]
    states = []
    for max_norm in (None, 1e9):
        with engine_of(config, optimizer=MUON, max_grad_norm=max_norm) as engine:
            train_engine(engine, steps)
            states.append(state_of(engine))
    assert differing(*states) == []


def test_late_lanes_change_no_bit():
    assert differing(straight("llama"), trained("llama", longest_s=0.02)) == []


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_same_bits(precision, tmp_path):
    config, steps = tiny_config("llama"), [micro_batches(seed) for seed in range(6)]
    with engine_of(config, optimizer=MUON, precision=precision) as engine:
        losses, state = train_engine(engine, steps).losses, state_of(engine)
    resumed, state_after = train_with_a_break(
        lambda: engine_of(config, optimizer=MUON, precision=precision), steps, tmp_path
    )
    assert (resumed, differing(state_after, state)) == (losses, [])


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    config = tiny_config("llama")
    with engine_of(config, optimizer=MUON) as engine:
        train_engine(engine, [micro_batches(0)])
        checkpoint = save_checkpoint(tmp_path, 1, engine, None, {})
    with (
        engine_of(config, optimizer=AdamW()) as engine,
        pytest.raises(ConfigError, match="optimizer"),
    ):
        load_checkpoint(checkpoint, engine)


def test_memory_is_not_wasted():
    config = tiny_config("llama")
    with engine_of(config, optimizer=Muon()) as engine:
        *others, head = engine.anatomy.blocks
        for block in engine.anatomy.blocks:
            have = {spec.name for spec in engine.store.layout("exp_avg_sq", block.index).tensors}
            matrices = {
                spec.name
                for spec in block.layout.tensors
                if len(spec.shape) > 1 and block not in (others[0], head)
            }
            assert have == {spec.name for spec in block.layout.tensors} - matrices


def test_what_stops_a_piece_reaches_whoever_waits(monkeypatch):
    def broken() -> None:
        raise ZeroDivisionError("in a thread of the pool")

    with engine_of(tiny_config("llama"), optimizer=MUON) as engine:
        monkeypatch.setattr(Muon, "stages", lambda *_, **__: iter([[broken]]))
        engine.forward_backward(micro_batches(0))
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
    with engine_of(tiny_config("llama"), optimizer=MUON) as engine:
        before = list(calls)
        train_engine(engine, [micro_batches(0)])
        assert [name for name, _ in before] == ["take_libraries"]
        assert {name for name, _ in calls[len(before) :]} == {"replace"}
        assert {thread for _, thread in calls} == {engine.parts.updater.lane._thread}
