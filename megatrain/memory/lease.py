"""The right to use arrays of a block for a while, on whichever tier they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatrain.memory.nvme_store import NvmeLease


class Lease:
    """Arrays of a block by name, valid until `release`. As a context manager: waits, then releases.

    Args:
        in_memory: arrays on the device or in host RAM.
        on_nvme: the lease of the others, if there are any.
        changes: the holder writes to the arrays.
        soon: changes go to the drive at once, not only when another array needs the buffer.
    """

    def __init__(
        self,
        in_memory: Mapping[str, torch.Tensor],
        on_nvme: NvmeLease | None = None,
        *,
        changes: bool = False,
        soon: bool = True,
    ) -> None:
        self._in_memory, self._on_nvme = in_memory, on_nvme
        self._changes, self._soon = changes, soon

    def wait(self) -> dict[str, torch.Tensor]:
        """The arrays, once they are in memory. Raises StorageError."""
        return {**self._in_memory, **(self._on_nvme.wait() if self._on_nvme is not None else {})}

    def release(self, *, changed: bool | None = None) -> None:
        """Give the arrays back, even before they arrived; a second call does nothing.

        `changed`: the arrays were written to, and the new values are kept; default: `changes`.
        """
        on_nvme, self._on_nvme, self._in_memory = self._on_nvme, None, {}
        if on_nvme is not None:
            on_nvme.release(changed=self._changes if changed is None else changed, soon=self._soon)

    def __enter__(self) -> dict[str, torch.Tensor]:
        try:
            return self.wait()
        except BaseException:
            self.release(changed=False)  # `__exit__` is not called then
            raise

    def __exit__(self, *_: object) -> None:
        self.release()  # as changed, also after an error: part of the change may have been made
