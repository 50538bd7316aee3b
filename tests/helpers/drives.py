"""Drives as tests want them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from megatrain.memory import sizes
from tests.helpers.delays import sleeper


def few_buffers(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """This many of every array on NVMe, so that blocks must take turns."""
    monkeypatch.setattr(sizes, "STATE_STAGES", count)


def quick_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes lie in RAM instead: a transfer takes only as long as the test has it take."""
    files: dict[int, bytearray] = {}
    lock = threading.Lock()

    def of(descriptor: int) -> bytearray:
        found = os.fstat(descriptor)
        return files.setdefault(found.st_ino, bytearray(found.st_size))

    def preadv(descriptor: int, views: list[memoryview], offset: int) -> int:
        (view,) = views
        with lock:
            view[:] = of(descriptor)[offset : offset + len(view)]
        return len(view)

    def pwritev(descriptor: int, views: list[memoryview], offset: int) -> int:
        (view,) = views
        with lock:
            of(descriptor)[offset : offset + len(view)] = view
        return len(view)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwritev", pwritev)


def slow_drive(
    monkeypatch: pytest.MonkeyPatch,
    calls: tuple[str, ...],
    longest_s: float,
    shortest_s: float = 0.0,
) -> None:
    """Every transfer sleeps first."""
    for number, call in enumerate(calls):
        real, sleep = getattr(os, call), sleeper(number, shortest_s, longest_s)

        def shim(
            *arguments: Any, real: Callable[..., Any] = real, sleep: Callable[[], None] = sleep
        ) -> Any:
            sleep()
            return real(*arguments)

        monkeypatch.setattr(os, call, shim)
