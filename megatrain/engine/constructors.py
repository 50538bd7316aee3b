"""How engines are made and filled: from a checkpoint, a configuration or a plan."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import distributed

from megatrain.engine.build import Prepared, prepare, prepare_planned, read_config
from megatrain.engine.masters import write_master
from megatrain.engine.objective import AnyLoss
from megatrain.engine.resolved import Weights
from megatrain.errors import ConfigError
from megatrain.losses import next_token
from megatrain.machine.launcher import started_by
from megatrain.memory.store import Store
from megatrain.models.classifiers import is_classifier
from megatrain.models.initialize import initialize, new_head
from megatrain.models.pretrained import ModelSource, read_model_config, resolve_source
from megatrain.models.skeleton import Skeleton
from megatrain.optim import Optimizer
from megatrain.planner.plan import Plan
from megatrain.settings import Settings
from megatrain.storage.carried import NOTHING, Carried
from megatrain.storage.manifest import check_description
from megatrain.storage.safetensors_reader import check_shards
from megatrain.storage.weights import load_weights


class Constructors(ABC):
    """The constructors of `Engine`, whose `__init__` takes what `engine.build.prepare` decides."""

    skeleton: Skeleton
    store: Store
    device: torch.device
    seed: int
    source: ModelSource | None = None  # of the weights; None if they were drawn
    trust_remote_code = False
    carried: Carried = NOTHING  # with the weights
    plan: Plan | None = None  # None: made without one

    @abstractmethod
    def weights_changed(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        optimizer: Optimizer | None = None,
        precision: str = "auto",
        attention: str = "auto",
        max_grad_norm: float | None = 1.0,
        router_aux_loss_coef: float | Literal["auto"] = "auto",
        device: str = "auto",
        seed: int = 0,
        tokens_per_step: int | None = None,
        seq_len: int | None = None,
        loss: AnyLoss = next_token,
        settings: Settings | Literal["auto"] = "auto",
        memory: Mapping[str, Any] | None = None,
        freeze: Sequence[str] = (),
        trust_remote_code: bool = False,
    ) -> Self:
        """An engine with the weights of a local folder, a GGUF file or a hub id.

        Args:
            revision: branch, tag or commit of a hub id.
            optimizer: default: AdamW with its own defaults.
            precision: "auto" is bfloat16 where the hardware is fast at it, else float32.
            attention: "auto" is the fastest that honours the family's masks and softcaps.
            router_aux_loss_coef: weight of the routers' balancing loss; "auto": 0.001 for a mixture
                for which transformers has that loss, else 0.
            device: "auto", "cpu", "cuda" or "cuda:N".
            tokens_per_step, seq_len, loss: that a step is planned for; rows are taken to be full.
            settings: "auto" plans as the command line does, if these are given, else streams all.
            memory: gpu, host (sizes such as "80GiB") and nvme (folders), as in the config.
            freeze: tensors that are not trained, by their names in the source, with wildcards.

        Raises:
            ConfigError: an argument is out of range or cannot be had here.
            ModelError, StorageError: the model is broken, or its family cannot be streamed.
            PlanError, OutOfMemory: it does not fit, as planned or nevertheless.
        """
        found = resolve_source(source, revision)
        check_description(found.path, trust_remote_code)
        prepared = prepare(
            read_model_config(found, trust_remote_code),
            optimizer=optimizer,
            precision=precision,
            attention=attention,
            max_grad_norm=max_grad_norm,
            router_aux_loss_coef=router_aux_loss_coef,
            device=device,
            seed=seed,
            tokens_per_step=tokens_per_step,
            seq_len=seq_len,
            loss=loss,
            settings=settings,
            memory=memory,
            freeze=freeze,
            weights=Weights(str(source), revision, trust_remote_code),
        )
        return cls._open(prepared, found, trust_remote_code)

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        optimizer: Optimizer | None = None,
        precision: str = "auto",
        attention: str = "auto",
        max_grad_norm: float | None = 1.0,
        router_aux_loss_coef: float | Literal["auto"] = "auto",
        device: str = "auto",
        seed: int = 0,
        tokens_per_step: int | None = None,
        seq_len: int | None = None,
        loss: AnyLoss = next_token,
        settings: Settings | Literal["auto"] = "auto",
        memory: Mapping[str, Any] | None = None,
        freeze: Sequence[str] = (),
        trust_remote_code: bool = False,
    ) -> Self:
        """An engine with random weights, drawn by the family's own rule.

        Args:
            config: a transformers configuration, or the folder or hub id of one.
            optimizer, ...: as `from_pretrained`, which raises the same errors.
        """
        prepared = prepare(
            read_config(config, trust_remote_code),
            optimizer=optimizer,
            precision=precision,
            attention=attention,
            max_grad_norm=max_grad_norm,
            router_aux_loss_coef=router_aux_loss_coef,
            device=device,
            seed=seed,
            tokens_per_step=tokens_per_step,
            seq_len=seq_len,
            loss=loss,
            settings=settings,
            memory=memory,
            freeze=freeze,
            weights=Weights(None, trust_remote_code=trust_remote_code),
        )
        return cls._open(prepared, None, trust_remote_code)

    @classmethod
    def from_plan(cls, plan: Plan) -> Self:
        """The engine that a plan of `mt.plan` describes, its weights read or drawn as planned.

        Raises PlanError: the plan does not fit, or was made for another machine.
        """
        prepared = prepare_planned(plan)
        weights: Weights = plan.made_of.weights
        found = resolve_source(weights.source, weights.revision) if weights.source else None
        return cls._open(prepared, found, weights.trust_remote_code)

    def load_weights(self, source: ModelSource, trust_remote_code: bool = False) -> None:
        """Read all weights; a classifier's head is drawn where the source is a language model.

        Raises ConfigError, ModelError and StorageError.
        """
        read = partial(self._read_weights, source, trust_remote_code)
        if source.kind == "gguf":  # all of it is in RAM meanwhile
            self.store.world.one_by_one(read)
        else:
            with self.store.world.together():
                read()
        self.source, self.trust_remote_code = source, trust_remote_code
        self.weights_changed()

    def _read_weights(self, source: ModelSource, trust_remote_code: bool) -> None:
        lacks_head = self.skeleton.anatomy.labels is not None and not is_classifier(
            read_model_config(source, trust_remote_code)
        )
        head = new_head(self.skeleton, self.seed) if lacks_head else None
        self.published, self.carried = load_weights(
            self.skeleton.anatomy, self.store, source, self.skeleton.constants, head
        )

    def draw_weights(self) -> None:
        """Draw all weights at random by the family's own rule, from the engine's seed.

        Passengers are not drawn: such an engine trains, but cannot be saved.
        """
        initialize(self.skeleton, self.seed, self.device, partial(write_master, self.store))
        self.skeleton.constants.drawn()
        self.weights_changed()

    @classmethod
    def _open(cls, prepared: Prepared, source: ModelSource | None, trust_remote_code: bool) -> Self:
        """An engine with the weights of `source`, or random ones; closed if that fails."""
        refuse_ranks()
        if source is not None and source.kind == "folder":
            check_shards(source.path)
        engine = cls(**prepared.arguments())
        engine.plan = prepared.plan
        try:
            if source is None:
                engine.draw_weights()
            else:
                engine.load_weights(source, trust_remote_code)
        except BaseException:
            engine.close()
            raise
        return engine


def refuse_ranks() -> None:
    """Raise ConfigError in a process of several that a launcher has started to work together, and
    that have not met: each would train a model of its own."""
    name, size = started_by(os.environ)
    if size > 1 and not distributed.is_initialized():
        raise ConfigError(
            f"{name} is {size}, but an Engine made in Python trains in one process, and each "
            "of these would train a model of its own; call megatrain.train, which makes them "
            "ranks, or start one process"
        )
