"""How engines are made: from a checkpoint, a configuration or a plan. Every keyword is spelled out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from megatrain.engine.build import prepare, prepare_planned, read_config
from megatrain.engine.resolved import Weights
from megatrain.models.pretrained import ModelSource, read_model_config, resolve_source
from megatrain.optim import Optimizer
from megatrain.planner.plan import Plan
from megatrain.settings import Settings


class Constructors(ABC):
    """The constructors of `Engine`, whose `__init__` takes what `engine.build.prepare` decides."""

    @abstractmethod
    def load_weights(self, source: ModelSource, trust_remote_code: bool = False) -> None: ...

    @abstractmethod
    def draw_weights(self) -> None: ...

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
        device: str = "auto",
        seed: int = 0,
        tokens_per_step: int | None = None,
        seq_len: int | None = None,
        settings: Settings | Literal["auto"] = "auto",
        memory: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """An engine with the weights of a local folder, a GGUF file or a hub id.

        Args:
            revision: branch, tag or commit of a hub id.
            optimizer: default: AdamW with its own defaults.
            precision: "auto" is bfloat16 where the hardware is fast at it, else float32.
            attention: "auto" is the fastest implementation that honours the family's masks and softcaps.
            device: "auto", "cpu", "cuda" or "cuda:N".
            tokens_per_step, seq_len: of a step and of its rows, which are planned as full ones.
            settings: "auto" plans as the command line does, if the two above are given; without them
                everything is streamed. An mt.Settings is taken at its word.
            memory: gpu, host (sizes such as "80GiB") and nvme (folders), as in the config.

        Raises:
            ConfigError: an argument is out of range or cannot be had here.
            ModelError: the model is broken, or its family cannot be streamed.
            PlanError: it does not fit.
            OutOfMemory: host or GPU memory does not suffice nevertheless.
        """
        found = resolve_source(source, revision)
        prepared = prepare(
            read_model_config(found, trust_remote_code),
            optimizer=optimizer,
            precision=precision,
            attention=attention,
            max_grad_norm=max_grad_norm,
            device=device,
            seed=seed,
            tokens_per_step=tokens_per_step,
            seq_len=seq_len,
            settings=settings,
            memory=memory,
            weights=Weights(str(source), revision, trust_remote_code),
        )
        return cls(**prepared.arguments())._filled(found, trust_remote_code)

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        optimizer: Optimizer | None = None,
        precision: str = "auto",
        attention: str = "auto",
        max_grad_norm: float | None = 1.0,
        device: str = "auto",
        seed: int = 0,
        tokens_per_step: int | None = None,
        seq_len: int | None = None,
        settings: Settings | Literal["auto"] = "auto",
        memory: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """An engine with random weights, by the family's own rule.

        Args:
            config: a transformers configuration, or the folder or hub id of one.
            optimizer, ...: as `from_pretrained`, whose errors this raises, too.
        """
        prepared = prepare(
            read_config(config, trust_remote_code),
            optimizer=optimizer,
            precision=precision,
            attention=attention,
            max_grad_norm=max_grad_norm,
            device=device,
            seed=seed,
            tokens_per_step=tokens_per_step,
            seq_len=seq_len,
            settings=settings,
            memory=memory,
            weights=Weights(None, trust_remote_code=trust_remote_code),
        )
        return cls(**prepared.arguments())._filled(None, trust_remote_code)

    @classmethod
    def from_plan(cls, plan: Plan) -> Self:
        """The engine that a plan of `mt.plan` describes, its weights read or drawn as the plan's job says.

        Raises:
            PlanError: the plan does not fit, or was made for another machine.
        """
        prepared = prepare_planned(plan)
        weights: Weights = plan.made_of.weights
        found = resolve_source(weights.source, weights.revision) if weights.source else None
        return cls(**prepared.arguments())._filled(found, weights.trust_remote_code)

    def _filled(self, source: ModelSource | None, trust_remote_code: bool) -> Self:
        """This engine with the weights of `source`, or random ones; closed if that fails."""
        try:
            if source is None:
                self.draw_weights()
            else:
                self.load_weights(source, trust_remote_code)
        except BaseException:
            self.close()
            raise
        return self
