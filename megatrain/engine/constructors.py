"""Constructors of engines: from a checkpoint, a configuration or a plan."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch import distributed

from megatrain.engine.components import open_master
from megatrain.engine.request import (
    EngineKeywords,
    Request,
    choose_device,
    choose_precision,
    config_of_source,
    read_config,
    skeleton_of,
    spelled_out,
)
from megatrain.engine.resolved import Machine, Resolved, plan_of, resolve
from megatrain.engine.routing import coefficient_of
from megatrain.errors import ConfigError, PlanError
from megatrain.machine.hardware import (
    bound_heap,
    communicator_bytes,
    communicators,
    read_hardware,
    update_threads,
)
from megatrain.machine.launcher import started_by
from megatrain.machine.profile import fingerprint
from megatrain.memory.store import Store
from megatrain.models.initialize import initialize, new_head
from megatrain.models.pretrained import (
    ModelSource,
    is_classifier,
    read_model_config,
    resolve_source,
)
from megatrain.models.skeleton import Skeleton
from megatrain.planner.plan import Plan
from megatrain.planner.question import Site
from megatrain.settings import Settings
from megatrain.storage.passthrough import NOTHING, Passthrough
from megatrain.storage.safetensors import open_shards
from megatrain.storage.weights import load_weights

logger = logging.getLogger("megatrain")

ROOM_FOR_HOLES = 2  # of a plan: its budget then takes what malloc leaves unused


class Constructors:
    """The constructors of `Engine`, all of which lead to `open_plan` or to explicit settings."""

    skeleton: Skeleton
    store: Store
    device: torch.device
    seed: int
    weights_changed: Callable[[], None]
    close: Callable[[], None]
    source: ModelSource | None = None  # of the weights; None if they were drawn
    trust_remote_code = False
    passthrough: Passthrough = NOTHING  # with the weights
    plan: Plan | None = None  # None: made without one

    @classmethod
    @spelled_out
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        **keywords: Unpack[EngineKeywords],
    ) -> Self:
        """An engine with the weights of a local folder, a GGUF file or a hub id.

        Args:
            revision: branch, tag or commit of a hub id.
            optimizer: default: AdamW with its own defaults.
            precision: "auto" is bfloat16 where the hardware is fast at it, else float32.
            attention: "auto" is the fastest that honours the family's masks and softcaps.
            max_grad_norm: clip the global gradient norm to this (1.0); None: no clipping.
            router_aux_loss_coef: weight of the routers' balancing loss; "auto": 0.001 for a mixture
                for which transformers has that loss, else 0.
            device: "auto", "cpu", "cuda" or "cuda:N".
            seed: of dropout and of random initialisation.
            tokens_per_step, seq_len, loss: that a step is planned for; rows are taken to be full.
            settings: "auto" plans as the command line does, if these are given, else streams all.
            memory: gpu, host (sizes such as "80GiB") and nvme (folders), as in the config.
            freeze: tensors that are not trained, by their names in the source, with wildcards.
            trust_remote_code: run code that comes with the model.

        Raises:
            ConfigError: an argument is out of range or cannot be honoured here.
            ModelError, StorageError: the model is broken, or its family cannot be streamed.
            PlanError, OutOfMemory: it does not fit, as planned or nevertheless.
        """
        found = resolve_source(source, revision)
        config = config_of_source(found, keywords.get("trust_remote_code", False))
        return cls._of_request(Request.of_keywords(config, source, revision, **keywords))

    @classmethod
    @spelled_out
    def from_config(cls, config: Any, **keywords: Unpack[EngineKeywords]) -> Self:
        """An engine with random weights, drawn by the family's own rule.

        Args:
            config: a transformers configuration, or the folder or hub id of one.
            optimizer, ...: as `from_pretrained`, which raises the same errors.
        """
        described = read_config(config, keywords.get("trust_remote_code", False))
        return cls._of_request(Request.of_keywords(described, **keywords))

    @classmethod
    def from_plan(cls, plan: Plan) -> Self:
        """The engine that a plan of `mt.plan` describes, its weights read or drawn as planned.

        Raises PlanError: the plan does not fit, or was made for another machine.
        """
        resolved = plan.made_of
        if not isinstance(resolved, Resolved | Site):
            raise PlanError(
                "from_plan: this plan does not say what it was made of; make it with mt.plan"
            )
        plan.check()
        check_made_here(resolved if isinstance(resolved, Site) else resolved.machine)
        assert isinstance(resolved, Resolved), "a plan of a site alone is not for this machine"
        refuse_ranks()
        # its own: a plan may open several engines
        return cls.open_plan(plan, skeleton_of(resolved.request, resolved.machine.precision))

    @classmethod
    def _of_request(cls, request: Request) -> Self:
        """The engine that keywords ask for: planned, or with the settings that they name."""
        refuse_ranks()
        if request.settings == "auto" and request.seq_len is not None:
            plan = plan_of(resolve(request, Machine.of(request)), checkpoints_written=0)
            plan.check()
            return cls.open_plan(plan)
        source = source_of(request)
        return cls(**arguments_of(request)).filled(source, request.trust_remote_code)

    @classmethod
    def open_plan(
        cls, plan: Plan, skeleton: Skeleton | None = None, *, weights: bool = True
    ) -> Self:
        """The engine of a plan that was made in this process for this machine.

        Args:
            skeleton: another than the plan's own, which only one engine can use.
            weights: read or draw them; false leaves zeros, for a checkpoint to fill.
        """
        resolved: Resolved = plan.made_of
        request, machine = resolved.request, resolved.machine
        # a host's ranks would wait for each other's downloads without a sign of life
        source = machine.world.local_rank0_first(partial(source_of, request)) if weights else None
        hold_to_budget(machine, request.gpu_limit)
        if machine.hardware.gpu or plan.host_bytes * ROOM_FOR_HOLES > plan.budget.host:
            bound_heap()  # a CPU's run may have room for the holes in its heap
        make: Callable[..., Self] = cls
        engine = make(
            skeleton or resolved.skeleton,
            optimizer=request.optimizer,
            precision=machine.precision,
            max_grad_norm=request.max_grad_norm,
            router_aux_loss_coef=resolved.router_aux_loss_coef,
            device=machine.device,
            settings=plan.choices.settings(plan.job, request.nvme_folders),
            seed=request.seed,
            world=machine.world,
        )
        engine.plan = plan
        return engine.filled(source, request.trust_remote_code) if weights else engine

    def filled(self, source: ModelSource | None, trust_remote_code: bool) -> Self:
        """Read all weights, or draw them without a source; a failure closes the engine."""
        anatomy, constants = self.skeleton.anatomy, list(self.skeleton.constants)
        numel = anatomy.parameters + anatomy.frozen_parameters
        if constants:
            logger.info(
                f"{len(constants)} tensors are not trained and stay as they are: {constants[0]} "
                "and others like it"
            )
        try:
            if source is None:
                logger.info(f"drawing {numel:,} weights at random")
                self.draw_weights()
            else:
                logger.info(f"reading {numel:,} weights from {source.path}")
                self.load_weights(source, trust_remote_code)
        except BaseException:
            self.close()
            raise
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what that took on the GPU
        return self

    def load_weights(self, source: ModelSource, trust_remote_code: bool = False) -> None:
        """Read all weights; a classifier's head is drawn where the source is a language model."""
        skeleton, world = self.skeleton, self.store.world

        def read() -> None:
            head = None
            scores = skeleton.anatomy.labels is not None
            if scores and not is_classifier(read_model_config(source, trust_remote_code)):
                head = new_head(skeleton, self.seed)
            given = skeleton.anatomy, self.store, source, skeleton.constants, head
            self.published, self.passthrough = load_weights(*given)

        if source.kind == "gguf":  # all of it is in RAM meanwhile
            world.one_by_one(read)
        else:
            with world.together():
                read()
        self.source, self.trust_remote_code = source, trust_remote_code
        self.weights_changed()

    def draw_weights(self) -> None:
        """Draw all weights by the family's own rule; unused ones are not, so it cannot be saved."""
        initialize(self.skeleton, self.seed, self.device, partial(open_master, self.store))
        self.skeleton.constants.expect({})  # none of a folder's count any longer
        self.weights_changed()


def arguments_of(request: Request) -> dict[str, Any]:
    """The arguments of an engine whose settings are not planned."""
    device, settings = choose_device(request.device), request.settings
    precision = choose_precision(request.precision, device)
    skeleton = skeleton_of(request, precision)
    if settings == "auto":
        logger.warning(
            "no plan is made without tokens_per_step and seq_len: everything is streamed and "
            "recomputed, uncompiled; give both to plan the engine as `megatrain train` does"
        )
        settings = Settings(update_threads=update_threads())
    return {
        "skeleton": skeleton,
        "optimizer": request.optimizer,
        "precision": precision,
        "max_grad_norm": request.max_grad_norm,
        "router_aux_loss_coef": coefficient_of(skeleton, request.router_aux_loss_coef),
        "device": device,
        "settings": settings,
        "seed": request.seed,
    }


def source_of(request: Request) -> ModelSource | None:
    """The source of the weights, downloaded if need be and complete; None if they are drawn."""
    if request.source is None:
        return None
    found = resolve_source(request.source, request.revision)
    if found.kind == "folder":
        open_shards(found.path)
    return found


def check_made_here(machine: Site) -> None:
    """Raise PlanError for a plan that was made for another machine than this one."""
    here, gpu = None, machine.hardware.gpu
    if isinstance(machine, Machine) and machine.here:
        device = machine.device
        if device.type == "cpu" or torch.cuda.device_count() > (device.index or 0):
            here = read_hardware(".", device.type)
    if here is None or fingerprint(here) != fingerprint(machine.hardware):
        raise PlanError(
            "from_plan: the plan was made for another machine "
            f"({gpu.name if gpu else 'without a GPU'}); make one for this machine: leave out gpu "
            "and ram"
        )


def refuse_ranks() -> None:
    """Raise ConfigError in one of several processes of a launcher that have not joined."""
    name, size = started_by(os.environ)
    if size > 1 and not distributed.is_initialized():
        raise ConfigError(
            f"{name} is {size}, but an Engine made in Python trains in one process, and each "
            "of these would train a model of its own; call megatrain.train, which makes them "
            "ranks, or start one process"
        )


def hold_to_budget(machine: Machine, gpu_limit: int | None) -> None:
    """Let PyTorch take no more than `gpu_limit` bytes of the GPU; None: all of it."""
    gpu, hardware = machine.hardware.gpu, machine.hardware
    if machine.device.type == "cuda" and gpu is not None:
        # the user's limit counts the CUDA context and NCCL's buffers, PyTorch does not
        groups = communicators(machine.ranks, machine.hosts, machine.world.cp_size)
        beside = hardware.context_bytes + communicator_bytes(groups, machine.peers)
        limit = gpu.total_bytes if gpu_limit is None else gpu_limit - beside
        share = min(1.0, max(0.0, limit / gpu.total_bytes))
        torch.cuda.set_per_process_memory_fraction(share, machine.device)
