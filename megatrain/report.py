"""What the user sees while a run goes on: a live panel on a terminal, one plain line now and then elsewhere, and `train.log`."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatrain.errors import MegaTrainError, StorageError
from megatrain.metrics import RECENT_STEPS, StepMetrics, StepTime

LOG_FILE = "train.log"
ON_PANEL = "on_panel"  # marks log records that a terminal shows as the panel, and only files and pipes as lines
IN_FILE = "in_file"  # marks log records for train.log alone
ADVICE_AFTER_STEPS = 5  # of a process: what compiles and warms up first has nothing to say about the rest

PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: "}

logger = logging.getLogger("megatrain")

# What a share of a step's time is called.
BOUND_WORDS = {
    "compute": "computing",
    "wait_upload": "waiting for weights",
    "wait_update": "waiting for the update",
    "wait_download": "waiting for gradients to leave",
    "wait_nvme": "waiting for NVMe",
    "data": "waiting for data",
}


def bound_in_words(time: StepTime) -> str:
    """What bounds a step, for people: `waiting for the update 32%`."""
    name, share = time.bound()
    return f"{BOUND_WORDS[name]} {share:.0%}"


def time_in_words(time: StepTime) -> str:
    """Every share of at least 1 percent, largest first."""
    shares = {name: share for name, share in time.shares().items() if share >= 0.01}
    ordered = sorted(shares, key=lambda name: shares[name], reverse=True)
    return ", ".join(f"{BOUND_WORDS[name]} {shares[name]:.0%}" for name in ordered)


def human_bytes(count: int | None) -> str:
    """Bytes in the largest binary unit that leaves at least one digit before the point; `-` for an unknown count."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def human_seconds(seconds: float) -> str:
    """Seconds as `8.4s`, `3m12s`, `2h05m` or `1d03h`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if minutes < 60:
        return f"{int(minutes)}m{int(seconds % 60):02d}s"
    if hours < 24:
        return f"{int(hours)}h{int(minutes % 60):02d}m"
    return f"{int(days)}d{int(hours % 24):02d}h"


@contextmanager
def logging_to(run_dir: str | Path, console: Console) -> Iterator[None]:
    """Send the house's log to `train.log` of the run folder and to the console, which should be stderr's.

    An error that ends the block is written to `train.log`, with its traceback if it is none of ours. Raises StorageError.
    """
    path = Path(run_dir) / LOG_FILE
    try:
        file = _LogFile(path, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); free space or choose another output folder") from error
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    with logging_on(console, file):
        try:
            yield
        except Exception as error:
            logger.error(str(error), exc_info=not isinstance(error, MegaTrainError), extra={IN_FILE: True})  # the caller shows it
            raise


@contextmanager
def logging_on(console: Console, *others: logging.Handler) -> Iterator[None]:
    """Send the house's log to the console, and to `others`, which are closed at the end."""
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


class _LogFile(logging.FileHandler):
    """On a disk that is full, lines wait for room until the file is closed: the console has them, and the run goes on."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _ConsoleHandler(logging.Handler):
    """Prints through the console of the live panel, so that lines appear above it instead of tearing it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, IN_FILE, False) or (self.console.is_terminal and getattr(record, ON_PANEL, False)):
            return
        style = "bold yellow" if record.levelno >= logging.WARNING else ""
        prefix = PREFIXES.get(record.levelno, "")
        # A pipe has no width to wrap at: one record is one line, whatever its length.
        self.console.print(Text(prefix + record.getMessage(), style=style), soft_wrap=True)


class Progress:
    """Follows a run on `console`: a panel redrawn in place on a terminal, else one plain line every `log_every` steps.

    ```python
    with logging_to(run_dir, console), Progress(console, total_steps=120, first_step=0, log_every=10) as progress:
        progress.step(metrics)
        progress.evaluated(step, loss, seconds)
        progress.saved(path, seconds)
    ```
    """

    def __init__(self, console: Console, *, total_steps: int | None, first_step: int = 0, log_every: int = 10) -> None:
        """`first_step` is the number of steps done before (a resumed run's); `total_steps` is None if nobody knows."""
        self._total_steps = total_steps
        self._first_step = first_step
        self._log_every = log_every
        self._recent: deque[StepMetrics] = deque(maxlen=RECENT_STEPS)
        self._eval: tuple[int, float] | None = None
        self._skipped = 0
        self.time = StepTime()  # summed over all steps shown
        self.outside_s = {"evaluating": 0.0, "saving": 0.0}  # seconds between the steps
        self._started = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, metrics: StepMetrics) -> None:
        """Show one step."""
        self._recent.append(metrics)
        self._skipped += metrics.skipped
        self.time += metrics.time
        if metrics.step % self._log_every == 0 or metrics.step in (self._first_step + 1, self._total_steps):
            logger.info(self.line(), extra={ON_PANEL: True})
        if metrics.step == self._first_step + ADVICE_AFTER_STEPS:
            logger.info(f"advice: {metrics.advice}", extra={ON_PANEL: True})
        self._redraw()

    def saved(self, path: Path, seconds: float) -> None:
        """Show that a checkpoint was written."""
        self.outside_s["saving"] += seconds
        logger.info(f"saved {path} in {human_seconds(seconds)}")

    def evaluated(self, step: int, eval_loss: float, seconds: float) -> None:
        """Show an evaluation after `step` steps."""
        self._eval = (step, eval_loss)
        self.outside_s["evaluating"] += seconds
        logger.info(f"step {step}: held-out loss {eval_loss:.4f}")
        self._redraw()

    def traced(self, step: int, path: Path, table: str) -> None:
        """Show what took longest in a step that was watched, and where its timeline lies."""
        logger.info(f"{table}\nthe timeline of step {step} is in {path}: open it in ui.perfetto.dev")

    def line(self) -> str:
        """The newest step as one plain line."""
        done = self._recent[-1]
        of = "" if self._total_steps is None else f"/{self._total_steps}"
        return f"step {done.step}{of}  " + "  ".join(f"{name} {value}" for name, value in self._figures())

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

    def _redraw(self) -> None:
        if self._live is not None and self._recent:
            self._live.update(self._panel(), refresh=True)

    def _panel(self) -> Panel:
        newest = self._recent[-1]
        figures = self._figures()
        if self._eval is not None:
            figures.insert(1, ("held-out loss", f"{self._eval[1]:.4f} (step {self._eval[0]})"))
        rows = Table.grid(padding=(0, 1), expand=False)
        half = (len(figures) + 1) // 2
        for left, right in zip(figures[:half], [*figures[half:], ("", "")], strict=False):
            rows.add_row(Text(left[0], style="dim"), Text(left[1]), Text("   " + right[0], style="dim"), Text(right[1]))
        body = Table.grid()
        if self._total_steps is not None:
            body.add_row(ProgressBar(total=self._total_steps, completed=newest.step, width=60))
        body.add_row(rows)
        body.add_row(Text(newest.advice, style="dim"))
        of = "" if self._total_steps is None else f" of {self._total_steps}"
        elapsed = human_seconds(time.monotonic() - self._started)
        return Panel(body, title=f"step {newest.step}{of}, epoch {newest.epoch:.2f}, {elapsed}", title_align="left", expand=False)
