"""What whole-tensor updates borrow: memory beside the weights, and, for matrix products, the device.

Orthogonalising takes some hundred operations an element, which no host has to spare. So where there is a GPU, directions of blocks in host
RAM go up as bfloat16, are orthogonalised on a stream of their own, and come down: 4 bytes a parameter on the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.memory.slab import Slab


class InPlace:
    """For blocks that live on the device: on its current stream, in memory that its allocator lends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def directions(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=torch.bfloat16, device=self._device)

    def replace(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(function(tensor))


class HostWorkspace:
    """For blocks in host RAM, one after another.

    Args:
        nbytes: of the largest block's directions.
        device: a GPU computes the products there; on the CPU, this thread and torch's own do.
        threads: for the first touch.
    """

    def __init__(self, nbytes: int, device: torch.device, threads: int) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda" and nbytes:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.delay: Callable[[], None] | None = None  # tests inject sleeps here: on the stream, before every tensor
        self._slab = Slab("directions of the update", nbytes, pinned=self._stream is not None, threads=threads) if nbytes else None
        self._taken = 0

    def take_libraries(self) -> None:
        """In the thread that will call `replace`: let cuBLAS take its workspace for that thread and this stream now, and not amid the first
        step's activations (as `computing.take_workspaces` does for the computing stream)."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                ones = torch.ones(1, 64, 64, dtype=torch.bfloat16, device=self._device)
                torch.bmm(ones, ones)

    def reset(self) -> None:
        """The block before is complete: its directions may be overwritten."""
        self._taken = 0

    def directions(self, numel: int) -> Tensor:
        assert self._slab is not None
        start, self._taken = self._taken, self._taken + 2 * numel
        return self._slab.bytes[start : self._taken].view(torch.bfloat16)

    def replace(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> None:
        """Returns when they are computed and, on CUDA, have come down."""
        if self._stream is None:
            for tensor in tensors:
                tensor.copy_(function(tensor))
            return
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                if self.delay is not None:
                    self.delay()
                arrived = tensor.to(self._device, non_blocking=True)
                tensor.copy_(function(arrived), non_blocking=True)  # behind the upload on the same stream, which has read it by then
        self._stream.synchronize()  # wait: the host reads next what comes down

    def close(self) -> None:
        if self._slab is not None:
            self._slab.close()
