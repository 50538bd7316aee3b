"""The end of a run: what was trained, what it is worth, where it lies, and what was planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megatrain.reporting.energy import Economy, compared
from megatrain.reporting.metrics import StepTime, json_able
from megatrain.reporting.streams import as_printed
from megatrain.reporting.words import human_bytes, human_seconds, time_in_words


@dataclass(frozen=True)
class Predicted:
    """A figure as the plan predicted it and as it was measured; None where there is none."""

    predicted: float | None = None
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """(measured - predicted) / predicted."""
        if not self.predicted or self.measured is None:
            return None
        return (self.measured - self.predicted) / self.predicted

    def words(self, human: Callable[[float | None], str]) -> str:
        """`2.1 GiB, planned 2.0 GiB (+1.6%)`; `human` writes a figure with its unit."""
        if self.error is None:
            return human(self.measured)
        return f"{human(self.measured)}, planned {human(self.predicted)} ({self.error:+.1%})"


def step_seconds(value: float | None) -> str:
    """The time of a step: `7.6 s`."""
    return "-" if value is None else f"{value:.3g} s"


def print_rows(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    """Print (name, value) rows in a frame."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(Panel(table, title=title, title_align="left", expand=False))


@dataclass(frozen=True)
class RunSummary:
    """The result of `megatrain train` and `resume`, which they print last."""

    run_dir: Path
    steps: int
    tokens: int
    seconds: float
    eval_loss_before: float | None = None  # held out; None without an evaluation set
    eval_loss_after: float | None = None
    best_step: int | None = None  # of the best evaluation, whose checkpoint is kept
    best_metric: str = "eval_loss"  # by which it is the best
    best_value: float | None = None
    final_dir: Path | None = None  # loads in transformers and vLLM; None for a stopped run
    prompt: str | None = None
    answer: str | None = None  # of the trained model to `prompt`
    host: Predicted = Predicted()  # peak bytes
    gpu: Predicted = Predicted()
    step_s: Predicted = Predicted()
    time: StepTime | None = None  # summed over the steps
    rows: str = ""  # of a set that is streamed, how many were trained on, in words
    economy: Economy | None = None  # of the steps
    planned_economy: Economy | None = None
    eval_s: float = 0.0  # between the steps
    save_s: float = 0.0
    advice: str = ""  # the setting most worth changing, or that there is none; empty without a step
    skipped: int = 0
    spikes: int = 0
    resumable: bool = True  # false: stopped before there was a checkpoint
    exit_code: int = 0  # 0 done, 75 stopped by a signal, 130 by Ctrl-C; what was trained is saved

    def to_dict(self) -> dict[str, Any]:
        economies = {"economy": self.economy, "planned_economy": self.planned_economy}
        given = {name: None if it is None else it.to_dict() for name, it in economies.items()}
        return {**json_able(asdict(self)), **given}

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In a notebook, what `megatrain train` prints at its end."""
        printer.text(as_printed(self.render))

    def render(self, console: Console) -> None:
        """Print the summary, and how to go on after a stop."""
        print_rows(console, "stopped" if self.final_dir is None else "done", self._rows())
        if self.answer is not None:
            console.print(Text("prompt  ", style="dim") + Text(self.prompt or "", style="bold"))
            console.print(Text("answer  ", style="dim") + Text(self.answer))
        if self.final_dir is None:
            again = f"megatrain resume {self.run_dir}" if self.resumable else "start it again"
            console.print(Text(f"to go on: {again}"))

    def _best(self) -> str:
        """The best evaluation; empty if there was none."""
        if self.best_value is None:
            return ""
        where = self.run_dir / f"checkpoint-{self.best_step}"
        return f"best {self.best_value:.4f} at step {self.best_step} in {where}"

    def _rows(self) -> list[tuple[str, str]]:
        rate = self.tokens / self.seconds if self.seconds > 0 else 0.0
        trained = f"{self.steps:,} steps, {self.tokens:,} tokens in {human_seconds(self.seconds)}"
        trained = f"{trained} ({rate:,.0f} tokens/s)"
        nothing = "nothing more: the run had come to its end before"
        if self.final_dir is None:
            nothing = "nothing: it was stopped before its first step"
        rows = [("trained", trained if self.steps else nothing)]
        if self.rows:
            rows.append(("rows", self.rows))
        if self.eval_loss_before is not None and self.eval_loss_after is not None:
            losses = f"{self.eval_loss_before:.4f} before, {self.eval_loss_after:.4f} after"
            best = f", {self._best()}" if self._best() and self.best_metric == "eval_loss" else ""
            rows.append(("held-out loss", losses + best))
        if self._best() and self.best_metric != "eval_loss":
            rows.append((self.best_metric, self._best()))
        if self.step_s.measured is not None:
            rows.append(("step", self.step_s.words(step_seconds)))
        if self.time is not None:
            outside = f"{human_seconds(self.eval_s)} evaluating and {human_seconds(self.save_s)}"
            rows.append(("time", f"{time_in_words(self.time)}; besides, {outside} saving"))
        rows += compared(self.economy, self.planned_economy)
        if self.advice:
            rows.append(("advice", self.advice))
        for name, peak in (("host memory", self.host), ("GPU memory", self.gpu)):
            if peak.measured is not None:
                rows.append((name, peak.words(human_bytes)))
        if self.skipped:
            why = "steps without an update (non-finite gradient, or no targets)"
            rows.append(("skipped", f"{self.skipped:,} {why}"))
        if self.spikes:
            rows.append(
                ("spikes", f"{self.spikes:,} steps with a loss or norm far above the median")
            )
        rows.append(("run", str(self.run_dir)))
        if self.final_dir is not None:
            rows.append(("model", str(self.final_dir)))
        return rows
