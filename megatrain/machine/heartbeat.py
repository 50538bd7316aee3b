"""Signs of life: what works calls `beat`, and a watchdog sees whether anything has."""

from __future__ import annotations

_count = 0


def beat() -> None:
    """Say that a piece of work was done: a block computed or moved, a piece read or written.

    Threads may lose each other's beats; that any came is what counts.
    """
    global _count
    _count += 1


def beats() -> int:
    """A number that differs from an earlier one if there was a beat since."""
    return _count
