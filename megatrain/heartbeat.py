"""Signs of life: what works calls `beat`; a watchdog and the terminal see how far it has come.

Long work also says what it is, `doing`, and where it may be ended, `may_end_here`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field

WEIGHTS_READ, BYTES_READ, BYTES_WRITTEN = "weights read", "bytes read", "bytes written"
DATA_READ = "data read"  # bytes of files, rows of sets
TOKENS_SWEPT = "tokens swept"  # once for each layer that they went forward through

_amounts: Counter[str] = Counter()
_enders: list[Callable[[], None]] = []
_under_way: list[Work] = []


@dataclass(frozen=True, eq=False)
class Work:
    """A piece of work under way. share: the part of it that is done; None if unknown."""

    words: str
    share: Callable[[], float | None]
    aloud: bool = True  # a log tells of it, too: not of what each step does
    since: float = field(default_factory=time.monotonic)


def beat(what: str = "", amount: int = 1) -> None:
    """Say that a piece of work was done: a block computed or moved, some bytes read or written.
    Threads may lose each other's beats: about how many came is enough."""
    _amounts[what] += amount


def may_end_here() -> None:
    """Called by long work, in whichever thread, where an exception leaves nothing half done."""
    for end in _enders:
        end()


@contextmanager
def ending(end: Callable[[], None]) -> Iterator[None]:
    """Inside, `end` is called wherever work may end; it raises an exception to end it."""
    _enders.append(end)
    try:
        yield
    finally:
        _enders.remove(end)


@contextmanager
def beside(work: Callable[[], object], ended: threading.Event, name: str) -> Iterator[None]:
    """Inside, a thread works, until the end of the block sets `ended`, for which it looks."""
    thread = threading.Thread(target=work, name=f"megatrain-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def doing(
    words: str, total: float | None = None, counted: str = "", *, aloud: bool = True
) -> AbstractContextManager[None]:
    """Say that this is being done, while the block runs. total: how much it takes of what `beat`
    counts as `counted`, if that is known."""
    before = beats(counted)
    return showing(Work(words, lambda: (beats(counted) - before) / total if total else None, aloud))


@contextmanager
def showing(work: Work) -> Iterator[None]:
    """Inside, the work is under way."""
    _under_way.append(work)
    try:
        yield
    finally:
        _under_way.remove(work)


def under_way() -> Work | None:
    """The innermost work."""
    with suppress(IndexError):  # another thread's may end meanwhile
        return _under_way[-1]
    return None


def beats(what: str = "") -> int:
    """The amount of work done in this process so far."""
    return _amounts[what]


def total() -> int:
    """A number that differs from an earlier one if there was a beat of any kind since."""
    return sum(_amounts.values())
