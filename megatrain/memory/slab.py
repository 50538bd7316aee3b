"""Large pieces of host memory: anonymous, on huge pages, touched in parallel, pinned for a GPU.

`cudaHostAlloc` is four times slower than mapping, touching and registering, and rounds sizes
up.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from megatrain.errors import OutOfMemory, logger
from megatrain.memory.sizes import HUGE_PAGE, PAGE, slab_bytes

# Larger mappings register no faster, and one failure should name an amount that is easy to picture.
SLAB_BYTES = 16 << 30
TOUCH_BYTES = 1 << 30  # one thread's share of a first touch
# cudaErrorMemoryAllocation: a limit, or no room; cudaErrorNotSupported: no system for registering
REFUSED_FOR_WANT = (2, 801)
PORTABLE = 1  # cudaHostRegisterPortable


class Slab:
    """`nbytes` of zeroed host memory, owned until `close`.

    Args:
        nbytes: size; rounded up to whole huge pages.
        pinned: register the memory with CUDA, so that copies run asynchronously at full PCIe speed.
            Where the system does not let CUDA pin that much, the slab stays pageable, and a warning
            is logged: CUDA then copies through a small pinned buffer of its own, and a copy blocks
            the thread that starts it. Slower; the numbers are the same.
        threads: number of threads that touch the memory first; the kernel zeroes a page on the core
            that touches it.
        touched: take all of the memory now, as pinning does, not when it is first written to.
        descriptor: of a file of whole huge pages, whose memory all that map it have in common.

    Raises:
        OutOfMemory: the mapping was refused, or its registration for another reason than a limit.
    """

    def __init__(
        self,
        name: str,
        nbytes: int,
        *,
        pinned: bool = False,
        threads: int = 1,
        touched: bool = False,
        descriptor: int | None = None,
    ) -> None:
        self.name = name
        self.nbytes = slab_bytes(nbytes)
        self.pinned = False
        self._unpin: weakref.finalize[..., Slab] | None = None
        alone = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        flags, descriptor = (alone, -1) if descriptor is None else (mmap.MAP_SHARED, descriptor)
        try:
            self._map = mmap.mmap(descriptor, self.nbytes, flags=flags)
        except OSError as error:
            raise OutOfMemory(f"cannot reserve {self._size}: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE") and self.nbytes >= HUGE_PAGE:
            with suppress(OSError):  # a kernel without transparent huge pages: slower, not wrong
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if pinned or touched:  # several threads are faster than pinning alone
            self.touch([self.bytes], threads)
        if pinned:
            self.pin()

    @property
    def _size(self) -> str:
        return f"{self.nbytes / 2**30:.1f} GiB of host memory for {self.name}"

    def touch(self, parts: Sequence[torch.Tensor], threads: int) -> None:
        """Fault all pages of these bytes in, on several cores: the first write to one zeroes it."""
        pieces = [piece for part in parts for piece in torch.split(part, TOUCH_BYTES)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(torch.Tensor.zero_, pieces))

    def pin(self, flags: int = 0) -> None:
        """Register the memory with CUDA. Raises OutOfMemory."""
        if hasattr(mmap, "MADV_DONTFORK"):  # a fork would copy what is pinned, and need as much
            self._map.madvise(mmap.MADV_DONTFORK)
        code = int(_cudart().cudaHostRegister(self.bytes.data_ptr(), self.nbytes, flags))
        if code in REFUSED_FOR_WANT:
            _forget_error()
            logger.warning(
                f"CUDA may not pin {self._size} (error {code}): it stays pageable, and its "
                "transfers are several times slower; raise the memlock limit (ulimit -l unlimited, "
                "docker --ulimit memlock=-1)"
            )
            return
        if code != 0:
            raise OutOfMemory(f"CUDA could not pin {self._size} (error {code})")
        self.pinned = True
        # also for a slab that nobody closes: memory that is freed while it is registered stays
        # pinned until the process ends
        unregister = _cudart().cudaHostUnregister
        self._unpin = weakref.finalize(self, unregister, self.bytes.data_ptr())
        self._unpin.atexit = False

    def numbers(self, start: int, count: int) -> memoryview:
        """int64 from byte `start`. One that is written is seen by others whole, old or new."""
        return memoryview(self._map)[start : start + 8 * count].cast("q")

    def close(self) -> None:
        """Unpin and drop the memory; a second call does nothing. Views keep the mapping alive."""
        if self._unpin is not None:
            self._unpin()  # first: CUDA must not keep addresses that are unmapped
        self.bytes = torch.empty(0, dtype=torch.uint8)


def slabs_of(
    name: str, sizes: Sequence[int], *, pinned: bool, threads: int, touched: bool
) -> Iterator[tuple[Slab, list[torch.Tensor]]]:
    """Memory for pieces of `sizes` bytes, each on pages of its own: slabs, and what is in each."""
    pages = [-(-size // PAGE) * PAGE for size in sizes]
    start = 0
    while start < len(sizes):
        stop = start + 1
        while stop < len(sizes) and sum(pages[start : stop + 1]) <= SLAB_BYTES:
            stop += 1
        nbytes = sum(pages[start:stop])
        slab = Slab(name, nbytes, pinned=pinned, threads=threads, touched=touched)
        pieces = torch.split(slab.bytes[:nbytes], pages[start:stop])
        yield slab, [piece[:size] for piece, size in zip(pieces, sizes[start:stop], strict=True)]
        start = stop


class StagingBuffer:
    """Brings tensors of at most `nbytes` from a GPU to the CPU, one at a time, through a pinned
    buffer that it reuses: each is valid until the next."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._slab: Slab | None = None  # from the first tensor on that is on a GPU
        self._device: torch.device | None = None

    def on_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself if it is on the CPU, else a copy. Raises OutOfMemory."""
        if tensor.is_cpu:
            return tensor
        if self._slab is None:
            self._device = tensor.device
            with torch.cuda.device(self._device):  # a thread's own is the first GPU
                self._slab = Slab("staging buffers", self._nbytes, pinned=True)
        buffer = self._slab.bytes[: tensor.nbytes]
        return buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def close(self) -> None:
        if self._slab is not None:
            with torch.cuda.device(self._device):
                self._slab.close()


def _forget_error() -> None:
    """Clear CUDA's last error: the refusal, which the next kernel launch would raise."""
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError as error:
        logger.debug(f"forgotten: {error}")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
