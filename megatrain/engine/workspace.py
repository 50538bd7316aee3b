"""Memory for the directions of whole-tensor updates, and a device for their matmuls.

Orthogonalising takes some hundred operations an element, which no host can spare. So where there is
a GPU, directions of blocks in host RAM go up as bfloat16, are orthogonalised on a stream of their
own and come down: 4 bytes a parameter on the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.memory.slab import Slab
from megatrain.optim.muon import DIRECTION_BYTES, TensorState


class InPlace:
    """For blocks on the device: on its current stream, in memory of its allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def directions(self, tensor: TensorState) -> Tensor:
        return torch.empty(tensor.spec.numel, dtype=torch.bfloat16, device=self._device)

    def replace(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(function(tensor))


class HostWorkspace:
    """For blocks in host RAM, one after another.

    Args:
        nbytes: of the largest block's directions.
        device: computes the matmuls; without a GPU the calling thread does, with torch's own.
        threads: number of threads for the first touch of the memory.
    """

    def __init__(self, nbytes: int, device: torch.device, threads: int) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda" and nbytes:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # tests inject sleeps here: on the stream, before every tensor
        self.delay: Callable[[], None] | None = None
        self._slab: Slab | None = None
        if nbytes:
            pinned = self._stream is not None
            self._slab = Slab("directions of the update", nbytes, pinned=pinned, threads=threads)
        self._taken = 0  # bytes

    def take_libraries(self) -> None:
        """Let cuBLAS take its workspace for this stream and the calling thread now.

        To be called in the thread that will call `replace`. Taken in the first step it would lie
        amid the activations (`context.take_workspaces`).
        """
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                ones = torch.ones(1, 64, 64, dtype=torch.bfloat16, device=self._device)
                torch.bmm(ones, ones)

    def reset(self) -> None:
        """The block before is complete: its directions may be overwritten."""
        self._taken = 0

    def directions(self, tensor: TensorState) -> Tensor:
        assert self._slab is not None
        start, self._taken = self._taken, self._taken + DIRECTION_BYTES * tensor.spec.numel
        return self._slab.bytes[start : self._taken].view(torch.bfloat16)

    def replace(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> None:
        """Returns when they are computed and, with a GPU, have come down."""
        if self._stream is None:
            for tensor in tensors:
                tensor.copy_(function(tensor))
            return
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                if self.delay is not None:
                    self.delay()
                arrived = tensor.to(self._device, non_blocking=True)
                # on one stream: the upload has read the tensor before this overwrites it
                tensor.copy_(function(arrived), non_blocking=True)
        self._stream.synchronize()  # wait: the host reads next what comes down

    def close(self) -> None:
        if self._slab is not None:
            self._slab.close()
