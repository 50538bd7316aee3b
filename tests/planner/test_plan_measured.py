"""What the engine allocates is what the plan says, storage by storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from megatrain.engine.components import PRECISIONS
from megatrain.engine.constructors import arguments_of
from megatrain.engine.engine import Engine
from megatrain.engine.head import token_logprobs
from megatrain.engine.ranks.context_parallel import AllToAll
from megatrain.engine.ranks.weights import GatheredWeights
from megatrain.engine.request import Request
from megatrain.engine.resolved import scores_on_meta
from megatrain.losses import Reward, next_token
from megatrain.machine.hardware import read_hardware
from megatrain.machine.profile import assumed, typical
from megatrain.models.pretrained import as_classifier
from megatrain.models.skeleton import Skeleton
from megatrain.planner.cost.dry_run import shape_of
from megatrain.planner.cost.footprint import LiveBytes
from megatrain.planner.cost.shape import ModelShape
from megatrain.planner.job import Job
from megatrain.planner.memory import HEAD_COPIES, Layout
from megatrain.planner.plan import Plan
from megatrain.planner.planning import lay_out, make_plan
from megatrain.world import ALONE, World
from tests.helpers.once import engines_are_built_fast

ROW = 64


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    with engines_are_built_fast():
        yield


class AllocatedBytes(LiveBytes):
    """Counts what takes memory; meta tensors take none."""

    def _notice(self, tensor: torch.Tensor, *, counted: bool) -> None:
        super()._notice(tensor, counted=counted and not tensor.is_meta)


@dataclass(frozen=True)
class Case:
    layers: int = 4
    tied: bool = False
    precision: str = "bfloat16"
    clipping: bool = True
    groups: int = 1
    micro_batch_tokens: int = 256
    tokens: int = 512
    vocab: int = 512
    resident: int = 0
    replicated: int = 0
    sums: int = 0
    retained: int = 0
    offload: bool = False
    second_backward: int = 0
    activations: str = "none"
    freeze: tuple[str, ...] = ()
    scores: bool = False
    transport: str = "gather"
    pieces: int = 1

    @property
    def config(self) -> LlamaConfig:
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
        )
        return as_classifier(config, pad_id=0) if self.scores else config

    def plan(self, folder: Path, ranks: int = 1, hosts: int = 1) -> Plan:
        shape = shape_for(
            Case(
                self.layers,
                self.tied,
                self.precision,
                vocab=self.vocab,
                micro_batch_tokens=self.micro_batch_tokens,
                freeze=self.freeze,
                scores=self.scores,
                pieces=self.pieces,
            )
        )
        job = Job(
            self.precision,
            self.tokens,
            ROW // self.pieces,
            self.clipping,
            micro_batch_tokens=self.micro_batch_tokens // self.pieces,
            groups=self.groups,
            resident=self.resident,
            replicated=self.replicated,
            retained=self.retained,
            offload_activations=self.offload,
            second_backward=self.second_backward,
            activations=self.activations,
            ranks=ranks,
            hosts=hosts,
            transport=self.transport,
            pieces=self.pieces,
        )
        hardware = replace(read_hardware(folder, "cpu"), resident_bytes=0, library_bytes=0)
        machine = replace(assumed(typical(hardware), hardware, ranks), network=1e9)
        plan = make_plan(job, shape, hardware, machine)
        choices = replace(plan.choices, sums_on_device=self.sums)
        layout = Layout.of(choices, job, shape, hardware)
        return lay_out(layout, machine, plan.budget)

    def measure(self, plan: Plan, world: World = ALONE) -> tuple[int, int]:
        """(peak bytes where it computes, bytes of the host's arrays) of one training step under
        `plan`, of which a rank has its rows."""
        settings = plan.choices.settings(plan.job)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab, (self.tokens // ROW, ROW), generator=generator)
        world = world.sharing_sequences(self.pieces)
        own = ids[world.dp_rank :: world.dp_size].split(self.micro_batch_tokens // ROW)
        batches = [{"input_ids": rows, "labels": rows} for rows in own]
        with AllocatedBytes() as live:
            request = Request.of_keywords(
                self.config,
                precision=self.precision,
                max_grad_norm=1.0 if self.clipping else None,
                device="cpu",
                settings=settings,
                freeze=self.freeze,
            )
            engine = Engine(**arguments_of(request), world=world)
            live.peak = live.live  # building the modules takes some, but before the buffers exist
            engine.train_step(batches, Reward() if self.scores else next_token)
        source = engine.parts.streamer.source
        kept = source.kept if isinstance(source, GatheredWeights) else None
        stored = engine.store.nbytes + (kept.nbytes if kept else 0)
        engine.close()
        return live.peak, stored


@cache
def shape_for(case: Case) -> ModelShape:
    """case: the model and its micro-batches, whatever else is chosen."""

    def loss(logits: torch.Tensor) -> torch.Tensor:
        if case.scores:
            return scores_on_meta(logits)
        targets = torch.zeros(len(logits), dtype=torch.long, device="meta")
        return token_logprobs(logits, targets).sum()

    skeleton = Skeleton(case.config, dtype=PRECISIONS[case.precision])
    skeleton.freeze(case.freeze)
    tokens, pieces = case.micro_batch_tokens // case.pieces, case.pieces
    trade = AllToAll(0, pieces, lambda *_: None) if pieces > 1 else None
    return shape_of(skeleton, ROW // pieces, [tokens], head_loss=loss, trade=trade)


EMBEDDING, HEAD = ("model.embed_tokens.weight",), ("lm_head.weight",)
FIRST_FOUR = (*EMBEDDING, "model.layers.[0-3].*")
LARGE: dict[str, Any] = {"vocab": 8192, "micro_batch_tokens": 512}
SMALL: dict[str, Any] = {"micro_batch_tokens": 128}
HALVES: dict[str, Any] = {"groups": 2, **SMALL}
CASES = {
    "bf16": Case(),
    "head decides, in chunks": Case(**LARGE),
    "head decides, tied": Case(**LARGE, tied=True),
    "half resident, tied": Case(resident=3, tied=True),
    "some sums travel": Case(resident=1, sums=3, groups=4, **SMALL),
    "all stay": Case(resident=6, sums=6, groups=2, retained=4),
    "all resident, not clipped": Case(resident=6, clipping=False),
    "offloaded": Case(layers=8, offload=True),
    "computed twice, tied": Case(second_backward=True, tied=True, precision="float32"),
    "computed twice, offloaded": Case(layers=8, offload=True, second_backward=True, **SMALL),
    "three layers computed twice, tied": Case(layers=8, second_backward=3, tied=True),
    "three layers computed twice, half retained": Case(
        layers=8, second_backward=3, resident=2, retained=4, **SMALL
    ),
    "offloaded, half retained": Case(layers=8, offload=True, retained=4, **SMALL),
    "kept as int8": Case(layers=8, activations="int8"),
    "kept as int6, in groups": Case(layers=8, activations="int6", precision="float32", **HALVES),
    "embedding frozen, large": Case(freeze=EMBEDDING, **LARGE),
    "head frozen, large": Case(freeze=HEAD, **LARGE),
    "head frozen, large, fp32": Case(freeze=HEAD, **LARGE, precision="float32"),
    "tied and frozen": Case(freeze=HEAD, **LARGE, tied=True),
    "first half frozen, resident": Case(layers=8, freeze=FIRST_FOUR, resident=3),
    "first half frozen, in groups": Case(layers=8, freeze=FIRST_FOUR, **HALVES, sums=7),
    "first half frozen, offloaded": Case(layers=8, freeze=FIRST_FOUR, offload=True),
    "first half frozen, computed twice": Case(layers=8, freeze=FIRST_FOUR, second_backward=True),
    "MLPs frozen": Case(freeze=("*.mlp.*",)),
    "scores, tied, fp32": Case(scores=True, vocab=8192, tied=True, precision="float32"),
    "scores, retained, in groups": Case(scores=True, retained=4, **HALVES, tokens=1024),
    "the head alone": Case(freeze=(*EMBEDDING, "*.layers.*", "*.norm.*")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_device_peak_within_3_percent_and_host_within_2(name, tmp_path):
    plan = CASES[name].plan(tmp_path)
    device_bytes, host_bytes = CASES[name].measure(plan)
    assert plan.allocated_bytes == pytest.approx(device_bytes, rel=0.03)
    beside = ("gradient staging", "activation checkpoints", HEAD_COPIES)  # not in the store
    stored = sum(plan.host.values()) - sum(plan.host.get(name, 0) for name in beside)
    assert stored == pytest.approx(host_bytes, rel=0.02)
