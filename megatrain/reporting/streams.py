"""Standard streams that may be closed, full or broken: what cannot be printed never ends a run."""

from __future__ import annotations

import faulthandler
import io
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from megatrain.errors import printable
from megatrain.heartbeat import BYTES_READ, BYTES_WRITTEN, Work, beats, beside, showing, under_way
from megatrain.machine.launcher import started_by
from megatrain.reporting.words import human_seconds

_RESULTS: ContextVar[TextIO | None] = ContextVar("results", default=None)
PIPE_WIDTH = 120  # columns of tables that do not go to a terminal
FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SHOWN_AFTER_S, REDRAWN_EVERY_S = 0.2, 0.1
TIMED_AFTER_S, TIMED_FROM = 2.0, 0.01  # seconds and share of work from where its end is foreseen
SAID_BYTES = 1 << 27
MOVED = ((BYTES_READ, "read"), (BYTES_WRITTEN, "written"))


class Lasting:
    """A text stream whose first failure ends it: from then on it writes to the null device, and so
    does one made of None, which Python has in place of a closed stream."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or _null_device()
        self.error: OSError | None = None  # what ended it

    def write(self, text: str) -> int:
        with _busy.lock:
            _busy.make_room(text)
            self._guarded(self._stream.write, text)
        return len(text)

    def raw(self, text: str) -> None:
        """Write beside the line that shows that a command works."""
        self._guarded(self._stream.write, text)
        self.flush()

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def _guarded(self, call: Callable[..., object], *args: str) -> None:
        try:
            call(*args)
        except (OSError, ValueError) as error:  # ValueError: closed by somebody
            self.error = error if isinstance(error, OSError) else None
            self._stream = _null_device()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def how_far(work: Work) -> str:
    """`saving 43%, 12.0s left`."""
    share, took = work.share(), time.monotonic() - work.since
    if share is None:
        return work.words
    share, timed = min(1.0, share), share >= TIMED_FROM and took >= TIMED_AFTER_S
    left = f", {human_seconds(took * (1 - share) / share)} left" if timed else ""
    return f"{work.words} {share:.0%}{left}"


@contextmanager
def bars_as_work() -> Iterator[None]:
    """Inside, what libraries show as tqdm's bars is work under way, which we show: their own would
    tear a panel, and fill pipes and logs."""
    from tqdm.std import tqdm

    shown: dict[int, ExitStack] = {}
    display, close = tqdm.display, tqdm.close

    def show(bar: tqdm, *_: object, **__: object) -> None:
        if id(bar) not in shown:
            words, here = str(bar.desc or "working").strip(" :"), weakref.proxy(bar)
            work = Work(words, lambda: here.n / here.total if here.total else None)
            shown[id(bar)] = ExitStack()
            shown[id(bar)].enter_context(showing(work))

    def end(bar: tqdm) -> None:
        bar.leave = False
        close(bar)
        shown.pop(id(bar), ExitStack()).close()

    tqdm.display, tqdm.close = show, end
    try:
        yield
    finally:
        tqdm.display, tqdm.close = display, close


@contextmanager
def every(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Inside, a thread calls this again and again."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(seconds):
            call()

    with beside(look, ended, "busy"):
        yield


class Busy:
    """The last line of a terminal while a command prints nothing: what it does, how far that has
    come, and what it reads or writes. It goes before anything else is printed, and stays away from
    a line that has begun, such as a question or a panel."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held by whoever writes to a standard stream
        self._stream: Lasting | None = None  # a terminal, while the line may be shown
        self._shown, self._free, self._since, self._frame = False, True, 0.0, 0

    @contextmanager
    def on(self, stream: Lasting) -> Iterator[None]:
        """Let the line be shown on `stream`, if that is a terminal that can erase it."""
        alone = started_by(os.environ)[1] == 1  # ranks share a terminal
        if not (alone and stream.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
            yield
            return
        self._stream, self._since, self._free = stream, time.monotonic(), True
        try:
            with every(REDRAWN_EVERY_S, self._draw):
                yield
        finally:
            with self.lock:
                self.make_room("\n")
                self._stream = None

    def make_room(self, text: str) -> None:
        """Erase the line before `text` is written."""
        if self._shown and self._stream is not None:
            self._shown = False
            self._stream.raw("\r\x1b[K")
        if text:
            self._since, self._free = time.monotonic(), text.endswith("\n")

    def _draw(self) -> None:
        with self.lock:
            waited = time.monotonic() - self._since
            if self._stream is None or not self._free or waited < SHOWN_AFTER_S:
                return
            frames = FRAMES if "utf" in str(self._stream.encoding).lower() else "|/-"
            self._frame, self._shown = self._frame + 1, True
            loaded = [name for name in ("torch", "transformers") if name in sys.modules]
            work = under_way()
            before = ("starting", "loading PyTorch", "working")[len(loaded)]
            words = how_far(work) if work else before
            if work is None or work.share() is None:
                words += f" {waited:.0f}s"
            moved = (
                f", {beats(what) / 2**30:.1f} GiB {how}"
                for what, how in MOVED
                if beats(what) > SAID_BYTES
            )
            line = f"{frames[self._frame % len(frames)]} {printable(words)}{''.join(moved)}"
            self._stream.raw(f"\r{line[: width_of(self._stream) - 1]}\x1b[K")


def width_of(stream: Lasting) -> int:
    """Columns of a terminal; 80 where it does not say."""
    with suppress(OSError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


_busy = Busy()


def _null_device() -> TextIO:
    return open(os.devnull, "r+")


@contextmanager
def lasting_streams() -> Iterator[Lasting]:
    """Inside, no print to stdout or stderr fails; yields stdout, which says what it lost."""
    for descriptor in range(3):  # so that no file of the run gets the number of a closed stream
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    # a file that is mapped and then cut short ends the process where it is read: leave the stack
    faulthandler.enable(2)
    before = sys.stdin, sys.stdout, sys.stderr
    out, err = Lasting(before[1]), Lasting(before[2])
    sys.stdin = before[0] or _null_device()
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        with bars_as_work(), _busy.on(err):
            yield out
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
        for ours, theirs in ((out, before[1]), (err, before[2])):
            ours.flush()
            if ours.error is not None and theirs is not None:
                _forget(theirs)


@contextmanager
def results_alone() -> Iterator[None]:
    """Inside, stdout gets `result_stream` alone: what libraries print in Python goes to stderr."""
    token = _RESULTS.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _RESULTS.reset(token)


def result_stream() -> TextIO:
    """The stream that a command's result is printed on."""
    return _RESULTS.get() or sys.stdout


def _forget(stream: TextIO) -> None:
    """Let the interpreter's last flush of a stream that failed go to the null device."""
    with suppress(OSError, ValueError):  # a stream without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class _Spelling(Console):
    """Spells out control characters."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def as_printed(render: Callable[[Console], object]) -> str:
    """The output of `render` in a pipe, as text."""
    stream = io.StringIO()
    render(_Spelling(file=stream, width=PIPE_WIDTH, force_jupyter=False, color_system=None))
    return stream.getvalue().rstrip("\n")


def console_on(stderr: bool = False, **options: Any) -> Console:
    """A rich console on stdout or stderr that never fails, and spells out control characters."""
    stream = sys.stderr if stderr else sys.stdout
    lasting = stream if isinstance(stream, Lasting) else Lasting(stream)
    if not stderr and not lasting.isatty():
        options.setdefault("width", PIPE_WIDTH)
    return _Spelling(file=cast(TextIO, lasting), **options)
