"""Large pieces of host memory: anonymous, on huge pages, touched in parallel, and pinned where a GPU will read them.

`cudaHostAlloc` is four times slower than mapping, touching and registering, and rounds sizes up (docs/log.md).
"""

from __future__ import annotations

import logging
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatrain.errors import OutOfMemory
from megatrain.memory.layout import round_up

HUGE_PAGE = 2 << 20
TOUCH_BYTES = 1 << 30  # one thread's share of a first touch
REFUSED_FOR_WANT = (2, 801)  # cudaErrorMemoryAllocation: a limit, or no room; cudaErrorNotSupported: systems that cannot register memory

logger = logging.getLogger("megatrain")


class Slab:
    """`nbytes` of zeroed host memory, owned until `close`.

    Args:
        nbytes: size; rounded up to whole huge pages.
        pinned: register the memory with CUDA, so that copies run asynchronously at full PCIe speed. Where the system does not let CUDA pin
            so much, the slab stays pageable, and says so in the log: CUDA carries such memory through a small pinned buffer of its own,
            and a copy holds up the thread that asks for it. Slower, and the numbers are the same.
        threads: that touch the memory first; the kernel zeroes pages on the touching core.
        touched: take all of the memory now, as pinning does, not when it is first written to.

    Raises:
        OutOfMemory: the mapping was refused, or its registration for another reason than a limit.
    """

    def __init__(self, name: str, nbytes: int, *, pinned: bool, threads: int, touched: bool = False) -> None:
        self.name = name
        self.nbytes = round_up(max(nbytes, 1), HUGE_PAGE)
        self.pinned = False
        self._unpin: weakref.finalize[..., Slab] | None = None
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemory(f"cannot reserve {self.nbytes / 2**30:.1f} GiB of host memory for {name}: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE") and self.nbytes >= HUGE_PAGE:
            self._advise_huge()
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if pinned or touched:
            self._touch(threads)
        if pinned:
            self._register()

    def _advise_huge(self) -> None:
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without transparent huge pages: slower, not wrong
            return

    def _touch(self, threads: int) -> None:
        """Fault every page in, on several cores: a page is zeroed by the core that first writes to it."""
        starts = range(0, self.nbytes, TOUCH_BYTES)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda start: self.bytes[start : start + TOUCH_BYTES].zero_(), starts))

    def _register(self) -> None:
        code = int(_cudart().cudaHostRegister(self.bytes.data_ptr(), self.nbytes, 0))
        if code in REFUSED_FOR_WANT:
            _forget_error()
            logger.warning(
                f"CUDA may not pin {self.nbytes / 2**30:.1f} GiB of host memory for {self.name} (error {code}): it stays pageable, and its "
                "transfers are several times slower; raise the memlock limit (ulimit -l unlimited, docker --ulimit memlock=-1)"
            )
            return
        if code != 0:
            raise OutOfMemory(f"CUDA could not pin {self.nbytes / 2**30:.1f} GiB of host memory for {self.name} (error {code})")
        self.pinned = True
        # also for a slab that nobody closes: pages that go while they are registered stay pinned for as long as the process lives
        self._unpin = weakref.finalize(self, _unregister, self.bytes.data_ptr())
        self._unpin.atexit = False

    def close(self) -> None:
        """Unpin and drop the memory; twice is once. Views that are still held keep the mapping alive until they go."""
        if self._unpin is not None:
            self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)


def _unregister(pointer: int) -> None:
    _cudart().cudaHostUnregister(pointer)


def _forget_error() -> None:
    """CUDA keeps a refusal as its last error, which the next launch would raise."""
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError as error:
        logger.debug(f"forgotten: {error}")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
