"""A run from its plan to its end: what it needs, and its position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.data.loader import Loader
from megatrain.data.micro_batches import ReferenceArray
from megatrain.data.rows import Rows
from megatrain.engine.engine import Engine
from megatrain.engine.objective import AnyLoss
from megatrain.engine.resolved import Machine, Resolved
from megatrain.optim.schedules import SCHEDULES, warmup_steps
from megatrain.planner.plan import Plan
from megatrain.recipes.model import Model
from megatrain.recipes.report import LiveReport
from megatrain.recipes.rl.rollouts import Rollouts
from megatrain.recipes.sample import EvalPrompt
from megatrain.reporting.energy import Energy, EnergyMeter
from megatrain.reporting.meters import GpuMeter, LoadMeter
from megatrain.reporting.metrics import MetricsWriter, Spikes, SteadyTime
from megatrain.reporting.mfu import ModelFlops
from megatrain.reporting.progress import Progress
from megatrain.reporting.summary import Facts
from megatrain.storage.beside import Beside
from megatrain.storage.passthrough import Passthrough
from megatrain.storage.push import Uploads
from megatrain.storage.run_folder import RunLock

# The position of a new run; every checkpoint keeps its own.
BEGINNING: dict[str, Any] = {"step": 0, "tokens": 0, "best": {}, "non_finite": 0, "waited": 0}


def steps_between(often: float | str | None, loader: Loader | Rollouts) -> int | None:
    """Steps of a number of them, of a share of an epoch, or of an `epoch`; None: never."""
    if often is None or isinstance(often, int):
        return often
    share = 1.0 if isinstance(often, str) else often
    return max(1, round(share * loader.steps_of_epoch()))


@dataclass(kw_only=True)
class Ready:
    """A run that is known to fit, before anything large is loaded.

    Attributes:
        held_out: rows that evaluations take.
        prompts: that evaluations answer.
        day: the date that chat templates get.
        save_every, eval_every, push_every: steps between checkpoints, evaluations, and uploads;
            None: at the ends alone.
    """

    config: Config
    model: Model
    plan: Plan
    loader: Loader | Rollouts
    held_out: Rows | None
    prompts: Sequence[EvalPrompt]
    day: date
    save_every: int | None
    eval_every: int | None
    push_every: int | None

    @property
    def resolved(self) -> Resolved:
        resolved: Resolved = self.plan.made_of
        return resolved

    @property
    def machine(self) -> Machine:
        return self.resolved.machine

    @property
    def loss(self) -> AnyLoss:
        return self.resolved.request.loss

    @property
    def sweep_tokens(self) -> int:
        """Padded tokens of a rank in a sweep of the weights without training: those of a step's."""
        return self.plan.job.rank_tokens // self.plan.choices.groups


@dataclass
class Saving:
    """A checkpoint that is written, perhaps while training goes on."""

    step: int
    best_before: dict[str, Any]  # which counts again if this is not written
    began: float  # time.perf_counter()
    written: Future[tuple[Path, Passthrough]] = field(init=False)  # while training goes on
    proven: bool = False  # a finite step followed


@dataclass(kw_only=True)
class Run(Ready):
    """A run that has begun: what its loop needs, and its position."""

    engine: Engine
    held_out_references: ReferenceArray | None  # of a method with a reference model
    writer: MetricsWriter
    report: LiveReport
    progress: Progress
    meter: GpuMeter
    energy: EnergyMeter
    work: ModelFlops
    total_steps: int
    facts: Facts  # for the advice, besides times
    lock: RunLock | None  # None: another rank has it
    asked: Mapping[str, Any]  # of the config and of held-out rows, kept with every checkpoint
    step: int  # finished ones, skipped ones included
    tokens: int
    best: dict[str, Any]  # step and figure, by its name, of the best evaluation
    non_finite: int  # steps in a row
    waited: int  # evaluations since the best one
    first_step: int  # where this process began
    first_tokens: int
    recent: Spikes  # of loss and norm
    unproven: Path | None = None  # the last checkpoint, until a step after it was finite
    beside: Beside | None = None  # None: training waits for saves
    saving: Saving | None = None
    uploads: Uploads | None = None
    # newer than the checkpoint asked for: the next save removes them
    abandoned: Sequence[Path] = ()
    spikes: int = 0  # of this process
    trace: Path | None = None  # the file for the timeline of one step
    steady: SteadyTime = field(default_factory=SteadyTime)
    load: LoadMeter = field(default_factory=LoadMeter)
    spent_s: float = 0.0  # in the steps of this process
    spent: Energy = field(default_factory=lambda: Energy(0.0, 0.0))

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        train = self.config.train
        return SCHEDULES[train.schedule](
            self.step,
            base=train.learning_rate,
            total_steps=self.total_steps,
            warmup_steps=warmup_steps(train.warmup, self.total_steps),
            min_ratio=train.min_lr_ratio,
            decay_share=train.decay or 0.0,  # wsd alone has it
        )
