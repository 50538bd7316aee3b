"""Limits on code that comes with a model: chat templates may loop for ever, or fill memory."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

LONGEST_S = 10.0  # of one rendering; real ones take under a millisecond
LARGEST_CHARACTERS = 64 << 20  # of a conversation as text
LARGEST_CONSTANT = 1 << 20  # characters, or binary digits
CHECKS_PER_LIMIT = 10
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # transformers' own tag


class TooLong(Exception):
    """A rendering took longer than LONGEST_S."""

    def __str__(self) -> str:
        return f"it takes more than {LONGEST_S:g} s"


class _Watch:
    """One thread that looks at all renderings; it raises TooLong in the thread of a late one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.begun: dict[int, float] = {}  # thread -> when its rendering began
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        with self.lock:
            if self._thread is None or not self._thread.is_alive():  # not so after a fork
                self._thread = threading.Thread(target=self._look, name="renderings", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(LONGEST_S / CHECKS_PER_LIMIT)
            with self.lock:
                now = time.monotonic()
                for thread in [one for one, since in self.begun.items() if now - since > LONGEST_S]:
                    del self.begun[thread]
                    _raise_in(thread, TooLong)


_watch = _Watch()


def _watch_anew() -> None:
    """In a forked process: another thread may have held the lock."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_watch_anew)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have a thread raise `error` at its next instruction of Python; None takes that back."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


@contextmanager
def limited() -> Iterator[None]:
    """Inside, code of a template is stopped after LONGEST_S. Raises TooLong."""
    _watch.start()
    thread = threading.get_ident()
    _watch.begun[thread] = time.monotonic()
    try:
        yield
    finally:
        with _watch.lock:
            late = _watch.begun.pop(thread, None) is None
        if late:  # it may not have been raised yet, and has nothing to say to what follows
            _raise_in(thread, None)


@lru_cache(maxsize=16)
def check_constants(source: str) -> None:
    """Jinja computes constant products while it compiles, where nothing can stop it.

    Raises ValueError for one that is too large, and what Jinja raises on other code.
    """
    from jinja2 import Environment, nodes

    def value(node: Any) -> int | str | None:
        """Of a product or power of constants; None: of anything else."""
        if isinstance(node, nodes.Const):
            return node.value if isinstance(node.value, str | int) else None
        if not isinstance(node, nodes.Mul | nodes.Pow):
            return None
        one, other = value(node.left), value(node.right)
        if isinstance(node, nodes.Mul) and isinstance(other, str):
            one, other = other, one  # 3 * "a"
        if one is None or not isinstance(other, int):
            return None
        if isinstance(node, nodes.Pow):
            if isinstance(one, str):
                return None
            within(one.bit_length() * other)
            return int(one**other)
        within(len(one) * other if isinstance(one, str) else one.bit_length() + other.bit_length())
        return one * other

    def within(size: int) -> None:
        if size > LARGEST_CONSTANT:
            raise ValueError("it computes a constant of more than a million characters")

    parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", source))
    for node in parsed.find_all((nodes.Mul, nodes.Pow)):
        value(node)
