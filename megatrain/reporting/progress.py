"""A run on the user's screen: a live panel on a terminal, else plain lines; and `train.log`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatrain.errors import MegaTrainError, logger, printable, system_errors, without_secrets
from megatrain.heartbeat import beats, doing, under_way
from megatrain.reporting.metrics import APPENDED, RECENT_STEPS, StepMetrics, StepTime
from megatrain.reporting.streams import every, how_far
from megatrain.reporting.summary import bound_in_words
from megatrain.reporting.words import human_bytes, human_seconds

LOG_FILE = "train.log"
ON_PANEL = "on_panel"  # marks log records that a terminal shows as the panel
IN_FILE = "in_file"  # marks log records for train.log alone
ADVICE_AFTER_STEPS = 5  # of a process: the first steps compile and warm up
REDRAWS_PER_S = 2
LOGGED_EVERY_S, MOST_LOGGED_EVERY_S = 10.0, 60.0  # of long work, where no line can be redrawn
STEP = "step"
BAR_WIDTH = 40
TIME_LEFT = "time left"

Ahead = Callable[[int], Mapping[str, int]]

PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: "}

# Held by rich's thread while it draws a panel, and by a thread that prints a line above that: one
# that knew an older height of the panel would leave a part of it on the screen.
_locks: WeakKeyDictionary[Console, AbstractContextManager[bool]] = WeakKeyDictionary()


@contextmanager
def logging_to(run_dir: str | Path, console: Console, who: str = "") -> Iterator[None]:
    """Send the package's log to `train.log` of the run folder and to the console, stderr's. An
    error that ends the block is written to `train.log`, with its traceback unless it is ours. who:
    in front of every line of a rank that is not the first: its errors alone reach the console, and
    its warnings `train.log`. Raises StorageError."""
    path = Path(run_dir) / LOG_FILE
    with system_errors(path, "write it"):
        file = _LogFile(path, encoding="utf-8")
    file.setFormatter(_Printable(f"%(asctime)s %(levelname)s {who}%(message)s"))
    file.setLevel(logging.WARNING if who else logging.INFO)
    with logging_on(console, file, who=who):
        try:
            yield
        except Exception as error:  # which the caller shows
            trace = not isinstance(error, MegaTrainError)
            logger.error(str(error), exc_info=trace, extra={IN_FILE: True})
            raise


@contextmanager
def logging_on(console: Console, *others: logging.Handler, who: str = "") -> Iterator[None]:
    """Send the package's log to the console, and to `others`, which are closed at the end."""
    handlers = [_ConsoleHandler(console, who), *others]
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in handlers:
        logger.addHandler(handler)
    try:
        with nullcontext() if who or console.is_interactive else every(LOGGED_EVERY_S, log_work()):
            yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
        logger.propagate = propagate


def log_work() -> Callable[[], None]:
    """A function that logs how far long work has come, if it is time: at first soon."""
    logged = 0.0

    def log() -> None:
        nonlocal logged
        work, now = under_way(), time.monotonic()
        if work is None or not work.aloud:
            return
        wait = min(MOST_LOGGED_EVERY_S, max(LOGGED_EVERY_S, (now - work.since) / 4))
        if now - max(work.since, logged) >= wait:
            logged = now
            logger.info(how_far(work))

    return log


class _Printable(logging.Formatter):
    """Control characters spelt out: a log is read on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(super().format(record)))


class _LogFile(WatchedFileHandler):
    """On a full disk lines wait for room until the file is closed; a removed file is made again."""

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

    def __init__(self, console: Console, who: str = "") -> None:
        super().__init__(logging.ERROR if who else logging.INFO)
        self.console, self.who = console, who

    def emit(self, record: logging.LogRecord) -> None:
        on_panel = self.console.is_interactive and getattr(record, ON_PANEL, False)
        if on_panel or getattr(record, IN_FILE, False):
            return
        style = "bold yellow" if record.levelno >= logging.WARNING else ""
        prefix = PREFIXES.get(record.levelno, "") + self.who
        with _locks.get(self.console) or nullcontext():
            # A pipe has no width to wrap at: one record is one line, whatever its length.
            text = Text(prefix + record.getMessage(), style=style)
            self.console.print(text, soft_wrap=not self.console.is_terminal)


class _Shown(NamedTuple):
    """The newest step on the panel."""

    title: str
    step: int = 0
    figures: tuple[tuple[str, str], ...] = ()
    advice: str = ""
    left_s: float | None = None  # to the end of the run, at the time `at`
    at: float = 0.0


class Progress:
    """Follows a run on `console`: a panel on a terminal, else a line every `log_every` steps."""

    def __init__(
        self, console: Console, *, log_every: int = 10, pending: Callable[[], str] = str
    ) -> None:
        """pending: what was asked of the run meanwhile; empty: nothing."""
        self._log_every, self._pending = log_every, pending
        self._total_steps = self._first_step = 0
        self._ahead: Ahead = lambda step: {}
        self.recent: deque[StepMetrics] = deque(maxlen=RECENT_STEPS)  # the newest last
        self._eval: tuple[int, str, float] | None = None
        self._skipped = 0
        self._took: dict[str, float] = {}  # beats of each kind of activity, the last time
        self.time = StepTime()  # summed over all steps shown
        self.outside_s = {"evaluating": 0.0, "saving": 0.0}  # seconds between the steps
        self._times = dict.fromkeys(self.outside_s, 0)  # how often
        self._since, self._shown = time.monotonic(), _Shown("starting")
        self._live: Live | None = None
        if console.is_interactive:
            self._live = Live(
                console=console,
                get_renderable=self._panel,
                refresh_per_second=REDRAWS_PER_S,
                transient=True,
            )
            _locks[console] = self._live._lock

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, total_steps: int, first_step: int = 0, ahead: Ahead = lambda step: {}) -> None:
        """Say what is to come, before the first step. ahead: how often, after a step, something of
        `outside_s` is still to come, by its name."""
        self._total_steps, self._first_step, self._ahead = total_steps, first_step, ahead
        self._shown = self._shown._replace(title=self._title(first_step), step=first_step)

    @contextmanager
    def doing(
        self, kind: str, words: str = "", *, total: float | None = None, counted: str = ""
    ) -> Iterator[None]:
        """Show that this is being done, while the block runs. kind: of which the next takes about
        as many beats. words: for the user; by default `kind`. total: how much it takes of what
        heartbeat.py counts as `counted`, if that is known."""
        before, total = beats(counted), total or self._took.get(kind)
        with doing(words or kind, total, counted, aloud=kind != STEP):
            yield
        self._took[kind] = beats(counted) - before

    def step(self, metrics: StepMetrics) -> None:
        """Show one step."""
        self.recent.append(metrics)
        self._skipped += metrics.skipped
        self.time += metrics.time
        ends = (self._first_step + 1, self._total_steps)
        if metrics.step % self._log_every == 0 or metrics.step in ends:
            logger.info(self.line(), extra={ON_PANEL: True})
        if metrics.step == self._first_step + ADVICE_AFTER_STEPS:
            logger.info(f"advice: {metrics.advice}", extra={ON_PANEL: True})
        self._show()

    def saved(self, path: Path, seconds: float, *, beside: bool = False) -> None:
        """Show that a checkpoint was written. beside: while training went on."""
        self._spent("saving", 0.0 if beside else seconds)
        logger.info(f"saved {path} in {human_seconds(seconds)}{', beside training' * beside}")
        self._show()

    def evaluated(self, step: int, figure: float | None, seconds: float, name: str) -> None:
        """Show an evaluation after `step` steps, by one of its figures; None: it has none."""
        self._spent("evaluating", seconds)
        if figure is not None:
            self._eval = (step, name, figure)
            logger.info(f"step {step}: {name} {figure:.4f}")
        self._show()

    def _spent(self, what: str, seconds: float) -> None:
        self.outside_s[what] += seconds
        self._times[what] += 1

    def line(self) -> str:
        """The newest step as one plain line."""
        figures = [*self._figures(), (TIME_LEFT, human_seconds(self.seconds_left()))]
        words = "  ".join(f"{name} {value}" for name, value in figures)
        return f"{self._title(self.recent[-1].step, '/')}  {words}"

    def _title(self, step: int, of: str = " of ") -> str:
        return f"step {step}{of}{self._total_steps}"

    def _figures(self) -> list[tuple[str, str]]:
        newest = self.recent[-1]
        seconds = sum(step.step_s for step in self.recent)
        rate = sum(step.tokens for step in self.recent) / seconds if seconds > 0 else 0.0
        reward, load = newest.metrics.get("reward"), newest.expert_load_max
        figures = [
            # the loss of answers that were written is near 0
            ("loss", "" if reward is not None else f"{newest.loss:.4f}"),
            ("reward", "" if reward is None else f"{reward:.3f}"),
            ("lr", f"{newest.lr:.2e}"),
            ("gradient norm", "-" if newest.grad_norm is None else f"{newest.grad_norm:.3g}"),
            ("tokens/s", f"{rate:,.0f}"),
            ("TFLOP/s", f"{newest.tflops:.3g}"),
            ("busiest expert", "" if load is None else f"{load:.2f}x"),
            ("MFU", "" if newest.mfu is None else f"{newest.mfu:.1%}"),
            ("host", human_bytes(newest.host_bytes)),
            ("GPU", "" if newest.gpu_peak_bytes is None else human_bytes(newest.gpu_peak_bytes)),
            ("skipped", str(self._skipped or "")),
            ("bound by", bound_in_words(newest.time)),
        ]
        return [(name, words) for name, words in figures if words]

    def seconds_left(self) -> float:
        """To the end of the run, with what is known of evaluations and saves."""
        step = self.recent[-1].step
        mean_step_s = sum(one.step_s for one in self.recent) / len(self.recent)
        outside = sum(
            times * self.outside_s[what] / max(1, self._times[what])
            for what, times in self._ahead(step).items()
        )
        return max(0, self._total_steps - step) * mean_step_s + outside

    def _show(self) -> None:
        """Have the next redraw show the newest step."""
        if self._live is None or not self.recent:
            return
        newest, figures = self.recent[-1], self._figures()
        if self._eval is not None:
            step, name, figure = self._eval
            figures.insert(1, (name, f"{figure:.4f} (step {step})"))
        title = f"{self._title(newest.step)}, epoch {newest.epoch:.2f}"
        left = self.seconds_left(), time.monotonic()
        # one assignment: the thread reads title and figures of the same step
        self._shown = _Shown(title, newest.step, tuple(figures), newest.advice, *left)

    def _panel(self) -> Panel:
        """The newest step's figures under two bars: the run's, and that of what is done now."""
        title, step, shown, advice, left_s, at = self._shown
        work, now = under_way(), time.monotonic()
        bars = Table.grid(padding=(0, 1))
        if self._total_steps:
            bars.add_row(ProgressBar(self._total_steps, step, BAR_WIDTH))
        if work is not None:
            share = work.share()
            total = None if share is None else 1.0
            bar = ProgressBar(total, min(1.0, share or 0.0), BAR_WIDTH, animation_time=now)
            bars.add_row(bar, Text(how_far(work)))
        figures = [*shown]
        if left_s is not None:
            left = max(0.0, left_s - (now - at))
            figures.append((TIME_LEFT, human_seconds(left)))
        rows = Table.grid(padding=(0, 1), expand=False)
        half = (len(figures) + 1) // 2
        for first, second in zip(figures[:half], [*figures[half:], ("", "")], strict=False):
            names = Text(first[0], style="dim"), Text("   " + second[0], style="dim")
            rows.add_row(names[0], Text(first[1]), names[1], Text(second[1]))
        body = Group(bars, rows, Text(advice, style="dim"))
        pending = f" · {words}" if (words := self._pending()) else ""
        title = f"{title}, {human_seconds(now - self._since)}{pending}"
        return Panel(body, title=title, title_align="left", expand=False)
