"""A limit on the address space of this process (`ulimit -v`), which counts all mapped memory."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import OutOfMemory

MIB, GIB = 2**20, 2**30
LIMITS, STATUS = Path("/proc/self/limits"), Path("/proc/self/status")
# Mapped later beside a run's arrays: libraries that are loaded late, threads' heaps. Two cores, a
# run of 0.5 GiB: 350 MiB.
SPARE_BYTES = 512 * MIB
STACK_BYTES = 8 * MIB  # of a thread, unless the shell says otherwise
THREADS_PER_CORE = 2  # of matmuls and of the update
_M_ARENA_MAX = -8  # malloc.h
# Words in the errors that libraries raise when they may map no more.
MAPS_NO_MORE = (
    "can't start new thread",
    "could not create a primitive",
    "Could not find/load shared object",
    "failed to map segment",
    "annot allocate memory",
    "DefaultCPUAllocator",
    "bad_alloc",
    "Unable to allocate",
    "Failed to allocate",
)


@dataclass(frozen=True)
class AddressSpace:
    """The limit, and the address space that was taken when it was read."""

    limit_bytes: int
    taken_bytes: int

    def __str__(self) -> str:
        return (
            f"`ulimit -v` lets this process map {self.limit_bytes / GIB:.2f} GiB, of which "
            f"{self.taken_bytes / GIB:.2f} GiB are taken; raise it"
        )

    def left_bytes(self, cores: int) -> int:
        """Bytes that may still be mapped and filled with this many cores; may be below 0."""
        spare = SPARE_BYTES + THREADS_PER_CORE * cores * STACK_BYTES
        return self.limit_bytes - self.taken_bytes - spare


def read_address_space() -> AddressSpace | None:
    """Read the limit of this process; None if there is none."""
    try:  # not by the module `resource`, which may be past loading
        limits, status = LIMITS.read_text().splitlines(), STATUS.read_text().splitlines()
    except OSError:
        return None
    line = next((line for line in limits if line.startswith("Max address space")), "")
    limit = line.removeprefix("Max address space").split()[:1]
    taken = next((line.split()[1] for line in status if line.startswith("VmSize:")), "0")
    return AddressSpace(int(limit[0]), int(taken) << 10) if limit and limit[0].isdigit() else None


def keep_address_space_small() -> None:
    """Under a limit, keep libraries from reserving gigabytes. Call it before rows are read."""
    if read_address_space() is None:
        return
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # mimalloc reserves 1 GiB
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # 64 MiB each, for up to eight threads a core


@contextmanager
def address_space_errors() -> Iterator[None]:
    """Raise OutOfMemory, with the limit, for the errors of libraries that may map no more."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        space, words = read_address_space(), " ".join(str(error).split())
        plain = isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM
        if space is None or not (plain or any(known in words for known in MAPS_NO_MORE)):
            raise
        reason = words[:200] or type(error).__name__
        raise OutOfMemory(f"out of address space: {space} ({reason})") from error
