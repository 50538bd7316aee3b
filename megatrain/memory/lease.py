"""The right to use arrays of a block for a while, wherever they lie."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

import torch


class Held(Protocol):
    """Arrays on their way from a drive."""

    def wait(self) -> Mapping[str, torch.Tensor]: ...
    def release(self, *, changed: bool, soon: bool) -> None: ...


class Lease:
    """Arrays of a block by name: at once those in memory, after `wait` those that come from a drive. Valid until `release`.

    As a context manager it waits, and releases at the end: changed, if it was asked for with `changes`.

    Args:
        here: arrays that are in memory anyway.
        there: those that are not.
        changes: the holder writes to them.
        soon: what was changed is written back at once, not only when its buffer is wanted.
    """

    def __init__(self, here: Mapping[str, torch.Tensor], there: Held | None = None, *, changes: bool = False, soon: bool = True) -> None:
        self._here, self._there, self._changes, self._soon = here, there, changes, soon

    def wait(self) -> dict[str, torch.Tensor]:
        """The arrays, once they are in memory. Raises StorageError."""
        return {**self._here, **(self._there.wait() if self._there is not None else {})}

    def release(self, *, changed: bool | None = None) -> None:
        """Give the arrays back, also before they came; twice is once. `changed`: what was written must be kept; default `changes`."""
        there, self._there, self._here = self._there, None, {}
        if there is not None:
            there.release(changed=self._changes if changed is None else changed, soon=self._soon)

    def __enter__(self) -> dict[str, torch.Tensor]:
        try:
            return self.wait()
        except BaseException:
            self.release(changed=False)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
