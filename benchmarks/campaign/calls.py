"""System calls on files, counted in a process that is soon to be killed, or that shall see one of
them fail."""

from __future__ import annotations

import builtins
import io
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.campaign.children import Ended, in_child

# `os` functions that change files: between two of them nothing changes
CHANGES = (
    *("open", "write", "pwrite", "ftruncate", "fsync", "mkdir", "rename", "replace"),
    *("unlink", "rmdir", "symlink", "link", "chmod", "sendfile"),
)
# and those that may fail without changing anything
READS = ("read", "pread", "preadv", "scandir", "listdir", "stat", "lstat", "readlink")
# what `open` and `Path.open` call
OPENERS = (builtins, io)

Before = Callable[[int, str], None]


def watch(before: Before, names: Sequence[str] = CHANGES, within: Path | None = None) -> None:
    """From now on, for the rest of this process's life: call `before(n, name)` before the n-th
    call, counted from 1, of these functions of `os` and of `open`.

    within: count only calls on files below this folder.
    """
    numbers = itertools.count(1)

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any, **named: Any) -> Any:
            if within is None or _is_below(given, within):
                before(next(numbers), name)
            return call(*given, **named)

        return watched

    for name in names:
        setattr(os, name, counted(name, getattr(os, name)))
    opener = counted("open", io.open)
    for module in OPENERS:
        module.open = opener  # type: ignore[attr-defined]


_readlink = os.readlink


def _is_below(given: Sequence[Any], folder: Path) -> bool:
    """Whether a call's first argument, a path or a descriptor, is below `folder`."""
    first: Any = given[0] if given else None
    try:
        path = _readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
    except (OSError, TypeError):
        return False
    return os.path.abspath(os.fsdecode(path)).startswith(f"{folder}/")


def killing(number: int) -> Before:
    """Dies before its `number`th call."""

    def before(count: int, _: str) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def failing(number: int, code: int, ever: bool) -> Before:
    """The `number`th call fails with this errno; `ever`: so do all that follow."""

    def before(count: int, name: str) -> None:
        if count == number or (ever and count > number):
            raise OSError(code, os.strerror(code), name)

    return before


def with_calls(action: Callable[[], object], before: Before, names: Sequence[str]) -> Ended:
    """Run `action` in a child whose system calls are watched."""

    def run() -> None:
        watch(before, names)
        action()

    return in_child(run)


def killed_before(number: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that dies before its `number`th call; False if it has fewer."""
    ended = with_calls(action, killing(number), CHANGES)
    assert ended.code in (0, -signal.SIGKILL), f"the action failed by itself: {ended.words}"
    return ended.code != 0


def count_calls(action: Callable[[], object], names: Sequence[str]) -> int:
    """How many calls `action` makes; it runs in a child."""

    def run() -> None:
        made = []
        watch(lambda number, _: made.append(number), names)
        action()
        print(len(made))

    ended = in_child(run)
    assert ended.code == 0, ended.words
    return int(ended.words.split()[-1])
