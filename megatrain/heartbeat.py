"""Signs of life: what works calls `beat`; a watchdog and the live panel see how far it has come.

Long work also says where it may be ended: `may_end_here`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WEIGHTS_READ, BYTES_READ, BYTES_WRITTEN = "weights read", "bytes read", "bytes written"

_amounts: Counter[str] = Counter()
_enders: list[Callable[[], None]] = []


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


def beats(what: str = "") -> int:
    """The amount of work done in this process so far."""
    return _amounts[what]


def total() -> int:
    """A number that differs from an earlier one if there was a beat of any kind since."""
    return sum(_amounts.values())
