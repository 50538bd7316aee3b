"""What the user sees of a run: a live panel on a terminal, else plain lines; and `train.log`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path

from rich import progress as rich_progress
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megatrain.errors import MegaTrainError
from megatrain.reporting.metrics import (
    APPENDED,
    RECENT_STEPS,
    StepMetrics,
    StepTime,
    cannot_be_written,
)
from megatrain.reporting.words import bound_in_words, human_bytes, human_seconds

LOG_FILE = "train.log"
ON_PANEL = "on_panel"  # marks log records that a terminal shows as the panel
IN_FILE = "in_file"  # marks log records for train.log alone
ADVICE_AFTER_STEPS = 5  # of a process: the first steps compile and warm up
REDRAWS_PER_S = 2

PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: "}

logger = logging.getLogger("megatrain")


@contextmanager
def logging_to(run_dir: str | Path, console: Console) -> Iterator[None]:
    """Send the package's log to `train.log` of the run folder and to the console, stderr's.

    An error that ends the block is written to `train.log`, with its traceback unless it is ours.
    Raises StorageError.
    """
    path = Path(run_dir) / LOG_FILE
    with cannot_be_written(path):
        file = _LogFile(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    with logging_on(console, file):
        try:
            yield
        except Exception as error:  # which the caller shows
            trace = not isinstance(error, MegaTrainError)
            logger.error(str(error), exc_info=trace, extra={IN_FILE: True})
            raise


@contextmanager
def logging_on(console: Console, *others: logging.Handler) -> Iterator[None]:
    """Send the package's log to the console, and to `others`, which are closed at the end."""
    handlers = [_ConsoleHandler(console), *others]
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
        logger.propagate = propagate


class _LogFile(WatchedFileHandler):
    """On a full disk lines wait for room until the file is closed, and the run goes on.

    A removed file is written anew once its folder is there.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def _open(self) -> TextIOWrapper:
        fd = os.open(self.baseFilename, APPENDED, 0o600)  # not through a link
        return open(fd, self.mode, encoding=self.encoding)  # type: ignore[return-value]

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _ConsoleHandler(logging.Handler):
    """Prints through the panel's console, so that lines appear above the panel."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        on_panel = self.console.is_interactive and getattr(record, ON_PANEL, False)
        if on_panel or getattr(record, IN_FILE, False):
            return
        style = "bold yellow" if record.levelno >= logging.WARNING else ""
        prefix = PREFIXES.get(record.levelno, "")
        # A pipe has no width to wrap at: one record is one line, whatever its length.
        self.console.print(Text(prefix + record.getMessage(), style=style), soft_wrap=True)


class Progress:
    """Follows a run on `console`: a panel on a terminal, else a line every `log_every` steps.

    ```python
    with logging_to(run_dir, console), Progress(console, total_steps=120) as progress:
        progress.step(metrics)
        progress.evaluated(step, loss, seconds)
        progress.saved(path, seconds)
    ```
    """

    def __init__(
        self, console: Console, *, total_steps: int | None, first_step: int = 0, log_every: int = 10
    ) -> None:
        """`first_step`: steps done before, in a resumed run. `total_steps`: None if unknown."""
        self._total_steps = total_steps
        self._first_step = first_step
        self._log_every = log_every
        self._recent: deque[StepMetrics] = deque(maxlen=RECENT_STEPS)
        self._eval: tuple[int, float] | None = None
        self._skipped = 0
        self.time = StepTime()  # summed over all steps shown
        self.outside_s = {"evaluating": 0.0, "saving": 0.0}  # seconds between the steps
        self._panel = (
            _LivePanel(console, total_steps, first_step) if console.is_interactive else None
        )

    def __enter__(self) -> Progress:
        if self._panel is not None:
            self._panel.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._panel is not None:
            self._panel.stop()

    def step(self, metrics: StepMetrics) -> None:
        """Show one step."""
        self._recent.append(metrics)
        self._skipped += metrics.skipped
        self.time += metrics.time
        ends = (self._first_step + 1, self._total_steps)
        if metrics.step % self._log_every == 0 or metrics.step in ends:
            logger.info(self.line(), extra={ON_PANEL: True})
        if metrics.step == self._first_step + ADVICE_AFTER_STEPS:
            logger.info(f"advice: {metrics.advice}", extra={ON_PANEL: True})
        self._show()

    def saved(self, path: Path, seconds: float) -> None:
        """Show that a checkpoint was written."""
        self.outside_s["saving"] += seconds
        logger.info(f"saved {path} in {human_seconds(seconds)}")

    def evaluated(self, step: int, eval_loss: float, seconds: float) -> None:
        """Show an evaluation after `step` steps."""
        self._eval = (step, eval_loss)
        self.outside_s["evaluating"] += seconds
        logger.info(f"step {step}: held-out loss {eval_loss:.4f}")
        self._show()

    def traced(self, step: int, path: Path, table: str) -> None:
        """Show the slowest operations of a step, and where its timeline lies."""
        where = f"the timeline of step {step} is in {path}: open it in ui.perfetto.dev"
        logger.info(f"{table}\n{where}")

    def line(self) -> str:
        """The newest step as one plain line."""
        of = "" if self._total_steps is None else f"/{self._total_steps}"
        figures = "  ".join(f"{name} {value}" for name, value in self._figures())
        return f"step {self._recent[-1].step}{of}  {figures}"

    def _figures(self) -> list[tuple[str, str]]:
        newest = self._recent[-1]
        figures = [
            ("loss", f"{newest.loss:.4f}"),
            ("lr", f"{newest.lr:.2e}"),
            ("gradient norm", "-" if newest.grad_norm is None else f"{newest.grad_norm:.3g}"),
            ("tokens/s", f"{self._tokens_per_s():,.0f}"),
            ("TFLOP/s", f"{newest.tflops:.3g}"),
            ("time left", self._time_left()),
            ("host", human_bytes(newest.host_bytes)),
        ]
        if newest.gpu_peak_bytes is not None:
            figures.append(("GPU", human_bytes(newest.gpu_peak_bytes)))
        if self._skipped:
            figures.append(("skipped", str(self._skipped)))
        figures.append(("bound by", bound_in_words(newest.time)))
        return figures

    def _tokens_per_s(self) -> float:
        seconds = sum(step.step_s for step in self._recent)
        return sum(step.tokens for step in self._recent) / seconds if seconds > 0 else 0.0

    def _time_left(self) -> str:
        if self._total_steps is None:
            return "-"
        mean_step_s = sum(step.step_s for step in self._recent) / len(self._recent)
        return human_seconds(max(0, self._total_steps - self._recent[-1].step) * mean_step_s)

    def _show(self) -> None:
        if self._panel is None or not self._recent:
            return
        figures = self._figures()
        if self._eval is not None:
            figures.insert(1, ("held-out loss", f"{self._eval[1]:.4f} (step {self._eval[0]})"))
        self._panel.show(self._recent[-1], figures)


class _LivePanel(rich_progress.Progress):
    """The newest step's figures under a bar. rich's own thread redraws it until `stop`."""

    def __init__(self, console: Console, total_steps: int | None, first_step: int) -> None:
        self._since = time.monotonic()
        self._of = "" if total_steps is None else f" of {total_steps}"
        self._shown: tuple[str, Group] = (f"step {first_step}{self._of}", Group())
        super().__init__(
            rich_progress.BarColumn(60),
            console=console,
            transient=True,
            refresh_per_second=REDRAWS_PER_S,
        )
        self._bar = self.add_task(
            "", total=total_steps, completed=first_step, visible=total_steps is not None
        )

    def show(self, newest: StepMetrics, figures: list[tuple[str, str]]) -> None:
        """Have the next redraw show this step."""
        rows = Table.grid(padding=(0, 1), expand=False)
        half = (len(figures) + 1) // 2
        for left, right in zip(figures[:half], [*figures[half:], ("", "")], strict=False):
            names = Text(left[0], style="dim"), Text("   " + right[0], style="dim")
            rows.add_row(names[0], Text(left[1]), names[1], Text(right[1]))
        title = f"step {newest.step}{self._of}, epoch {newest.epoch:.2f}"
        # one assignment: the thread reads title and figures of the same step
        self._shown = title, Group(rows, Text(newest.advice, style="dim"))
        self.update(self._bar, completed=newest.step)

    def get_renderables(self) -> Iterator[Panel]:
        title, figures = self._shown
        elapsed = human_seconds(time.monotonic() - self._since)
        body = Group(self.make_tasks_table(self.tasks), figures)
        yield Panel(body, title=f"{title}, {elapsed}", title_align="left", expand=False)
