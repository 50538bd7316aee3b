"""Attention of recomputed layers is computed once, and its memory is what the planner counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.engine.activations import Offload
from megatrain.errors import ConfigError
from megatrain.machine.profile import typical
from megatrain.models.skeleton import Skeleton
from megatrain.planner.cost.dry_run import shape_of
from megatrain.planner.timing import ATTENTION_FORWARD_SHARE, StepCosts
from megatrain.settings import ALL, Settings
from tests.helpers.planned import ALL_STREAMED, H200, JOB_7B, QWEN_7B, layout
from tests.helpers.support import engine_of, full_batches, tiny_config

KERNELS = "_scaled_dot_product_flash_attention_for_cpu", "attention"


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("settings", [Settings(), Settings(offload_activations=True, groups=2)])
def test_a_recomputed_layer_that_keeps_its_attention_computes_it_once(settings):
    config, batches = tiny_config("llama", num_hidden_layers=4), full_batches(0, [(2, 8)] * 3)
    for retained, kept, again in ((0, 0, 4), (0, 1, 3), (0, ALL, 0), (3, ALL, 0), (4, ALL, 0)):
        dials = replace(settings, retained=retained, keep_attention=kept)
        with engine_of(config, settings=dials) as engine, Calls() as calls:
            engine.train_step(batches)
        forwards = sum(calls.found[name] for name in KERNELS)
        assert forwards == 3 * (4 + again), (retained, kept)


def test_what_attention_keeps_is_planned_and_taken():
    config, batches = tiny_config("llama"), full_batches(0, [(2, 16)] * 3)
    shape = shape_of(Skeleton(config, dtype=torch.float32), 16, [32])
    heads, hidden = config.num_attention_heads, config.hidden_size
    row = shape.cost.kept_attention_bytes
    assert row == 4 * hidden + 4 * heads  # an output as wide as hidden states, a sum for each head
    held = []
    for kept in (0, 1, ALL):
        dials = Settings(offload_activations=True, keep_attention=kept)
        with engine_of(config, settings=dials) as engine:
            engine.train_step(batches)
            assert isinstance(engine.parts.checkpoints, Offload)
            held.append(engine.parts.checkpoints._rooms["checkpoint"]._used)
    assert held[1] - held[0] == 96 * row
    assert held[2] - held[0] == 96 * row * config.num_hidden_layers


def test_a_plan_counts_what_is_kept_and_what_is_not_computed_again():
    row, layers = 7168 + 28 * 4, QWEN_7B.cost.layers
    cost = replace(QWEN_7B.cost, layers=(replace(layers[0], kept_attention_bytes=row),) * 28)
    shape, tokens = replace(QWEN_7B, cost=cost), 131_072
    job = replace(JOB_7B, seq_len=tokens, tokens_per_step=tokens)
    again = replace(ALL_STREAMED, micro_batch_tokens=tokens, offload_activations=True)
    before, after = (
        StepCosts(layout(choices, shape, job, H200), typical(H200))
        for choices in (again, replace(again, keep_attention=21))
    )
    more = [one.layout.host["activation checkpoints"] for one in (before, after)]
    assert more[1] - more[0] == 21 * tokens * row
    attention = ATTENTION_FORWARD_SHARE * before._attention(layers[0], tokens)
    assert before.computing - after.computing == pytest.approx(21 * attention)


def test_attention_that_cannot_be_kept_is_refused():
    with pytest.raises(ConfigError, match="no layer of this model has attention that can be kept"):
        engine_of("llama", settings=Settings(keep_attention=1), attention="eager")
    with pytest.raises(ConfigError, match="set activations=none as well"):
        Settings(keep_attention=1, activations="int8")
