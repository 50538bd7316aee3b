"""Standard streams that may be closed, full or broken: what cannot be printed never ends a run."""

from __future__ import annotations

import faulthandler
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from megatrain.errors import printable

_RESULTS: ContextVar[TextIO | None] = ContextVar("results", default=None)
PIPE_WIDTH = 120  # columns of tables that do not go to a terminal


class Lasting:
    """A text stream whose first failure ends it: from then on it writes to the null device, and so
    does one made of None, which Python has in place of a closed stream."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or _null_device()
        self.error: OSError | None = None  # what ended it

    def write(self, text: str) -> int:
        self._guarded(self._stream.write, text)
        return len(text)

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
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):  # a stream without a descriptor
        pass


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
