"""The end of a run: what was trained, what it is worth, where it lies, and whether memory was what the plan said."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megatrain.economy import Economy, compared
from megatrain.metrics import StepTime
from megatrain.report import human_bytes, human_seconds, time_in_words


@dataclass(frozen=True)
class Predicted:
    """A figure as the plan predicted it and as the run measured it; None where there is none. Subclasses know its unit."""

    predicted: float | None = None
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """(measured - predicted) / predicted."""
        if not self.predicted or self.measured is None:
            return None
        return (self.measured - self.predicted) / self.predicted

    @staticmethod
    def human(value: float | None) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        if self.error is None:
            return self.human(self.measured)
        return f"{self.human(self.measured)}, planned {self.human(self.predicted)} ({self.error:+.1%})"


@dataclass(frozen=True)
class PredictedBytes(Predicted):
    """A peak of memory, in bytes."""

    predicted: int | None = None
    measured: int | None = None

    @staticmethod
    def human(value: float | None) -> str:
        return human_bytes(None if value is None else int(value))


@dataclass(frozen=True)
class PredictedSeconds(Predicted):
    """The time of a step."""

    @staticmethod
    def human(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g} s"


@dataclass(frozen=True)
class RunSummary:
    """What `megatrain train` and `resume` return and print last."""

    run_dir: Path
    steps: int
    tokens: int
    seconds: float
    eval_loss_before: float | None = None  # held out; None without an evaluation set
    eval_loss_after: float | None = None
    best_step: int | None = None
    final_dir: Path | None = None  # loads in transformers and vLLM; None for a run that was stopped
    prompt: str | None = None
    answer: str | None = None  # what the trained model says to `prompt`
    host: PredictedBytes = PredictedBytes()
    gpu: PredictedBytes = PredictedBytes()
    step_s: PredictedSeconds = PredictedSeconds()
    time: StepTime | None = None  # where the seconds went, summed over the steps
    economy: Economy | None = None  # of the steps
    planned_economy: Economy | None = None
    eval_s: float = 0.0  # between the steps
    save_s: float = 0.0
    advice: str = ""  # the setting most worth changing, or that there is none; empty if no step was made
    skipped: int = 0
    exit_code: int = 0  # 0 done, 75 stopped by a signal with a resumable checkpoint, 130 Ctrl-C after saving

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; a loss that is not finite is null."""
        economies = {"economy": self.economy, "planned_economy": self.planned_economy}
        plain = {name: None if economy is None else economy.to_dict() for name, economy in economies.items()}
        return {name: _plain(value) for name, value in asdict(self).items()} | plain

    def render(self, console: Console) -> None:
        """Print the summary, and how to go on after a stop."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._rows():
            table.add_row(name, Text(value))
        title = "done" if self.final_dir is not None else "stopped"
        console.print(Panel(table, title=title, title_align="left", expand=False))
        if self.answer is not None:
            console.print(Text("prompt  ", style="dim") + Text(self.prompt or "", style="bold"))
            console.print(Text("answer  ", style="dim") + Text(self.answer))
        if self.final_dir is None:
            console.print(Text(f"to go on: megatrain resume {self.run_dir}"))

    def _rows(self) -> list[tuple[str, str]]:
        rate = self.tokens / self.seconds if self.seconds > 0 else 0.0
        trained = f"{self.steps:,} steps, {self.tokens:,} tokens in {human_seconds(self.seconds)} ({rate:,.0f} tokens/s)"
        rows = [("trained", trained if self.steps else "nothing more: the run had come to its end before")]
        if self.eval_loss_before is not None and self.eval_loss_after is not None:
            best = "" if self.best_step is None else f", best at step {self.best_step}"
            rows.append(("held-out loss", f"{self.eval_loss_before:.4f} before, {self.eval_loss_after:.4f} after{best}"))
        if self.step_s.measured is not None:
            rows.append(("step", str(self.step_s)))
        if self.time is not None:
            rows.append(("time", f"{time_in_words(self.time)}; besides, {self._outside()}"))
        rows += compared(self.economy, self.planned_economy)
        if self.advice:
            rows.append(("advice", self.advice))
        if self.host.measured is not None:
            rows.append(("host memory", str(self.host)))
        if self.gpu.measured is not None:
            rows.append(("GPU memory", str(self.gpu)))
        if self.skipped:
            rows.append(("skipped", f"{self.skipped:,} steps without an update (non-finite gradient, or no targets)"))
        rows.append(("run", str(self.run_dir)))
        if self.final_dir is not None:
            rows.append(("model", str(self.final_dir)))
        return rows

    def _outside(self) -> str:
        return f"{human_seconds(self.eval_s)} evaluating and {human_seconds(self.save_s)} saving"


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
