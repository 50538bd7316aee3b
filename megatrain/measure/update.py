"""The optimizer's update, by the host and by the device, over arrays much larger than caches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatrain.measure.clock import Clock, Times
from megatrain.memory.layout import GROUP
from megatrain.memory.slab import Slab
from megatrain.optim import AdamW
from megatrain.optim.optimizer import UpdateRange

PARAMETERS = 1 << 26  # 0.9 GiB of state: more than twice the largest caches of processors
CORES_KEPT_BUSY = 16  # by so many; hosts with more cores update more, up to four times as many
# Each piece takes Python's lock: 56 threads with pieces of 0.3 million, 19,000 a second, reached
# three quarters of what two processes did (docs/log/2026-11.md).
MOST_OF_A_PIECE = 1 << 21
PIECES_PER_THREAD = 2  # of each pass, so that no thread is idle for long at the end
# Passes of many threads over the arrays in a timed call, with no wait in between: waking the
# threads and waiting for the last one then count an eighth.
PASSES = 8
TOUCH_BYTES = 16 << 20  # touched by a thread at a time
PIECE = 1 << 19  # parameters of one call, which caches hold for so many threads:
MOST_IN_CACHES = 16
REPEATS = 8
TOUCH_VALUE = 60  # of every byte: bfloat16 and float32 numbers of 0.011 each
ARRAYS = {
    "weight": torch.bfloat16,
    "remainder": torch.int16,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
    "grad": torch.bfloat16,
}
# Moves no number far, however often it is repeated.
UNMOVING: dict[str, Any] = {"lr": 1e-8, "weight_decay": 0.0, "step": 1, "grad_scale": 1.0}


def parameters_for(cores: int) -> int:
    """The number of parameters to update, to keep all cores busy."""
    return PARAMETERS * max(1, min(4, cores // CORES_KEPT_BUSY))


def device_rate(clock: Clock, parameters: int) -> float | None:
    """Parameters/s of AdamW in bfloat16 precision on a GPU; None if its kernel cannot be made."""
    optimizer = AdamW()
    arrays = {
        name: torch.ones(parameters, dtype=dtype, device=clock.device)
        for name, dtype in ARRAYS.items()
    }
    seconds = clock.seconds_if_possible(lambda: optimizer.update(arrays, **UNMOVING))
    return None if seconds is None else parameters / seconds


def arithmetic(threads: int, clock: Clock) -> float:
    """The compute-bound update rate of each of `threads` threads, over `Optimizer.arithmetic`.

    Measured with AdamW's int8 moments, whose arithmetic takes longer than their memory traffic, and
    with no more threads than leave Python's lock and the caches out of it.
    """
    optimizer, threads = AdamW(moments="int8"), min(threads, MOST_IN_CACHES)
    arrays = [_piece(optimizer) for _ in range(threads)]
    updates = [optimizer.updating(own, **UNMOVING) for own in arrays]

    def repeat(update: UpdateRange) -> None:
        for _ in range(REPEATS):
            update(0, PIECE)

    with ThreadPoolExecutor(threads) as pool:
        seconds = clock.seconds(lambda: list(pool.map(repeat, updates)))
    assert optimizer.arithmetic is not None
    return REPEATS * PIECE / seconds / optimizer.arithmetic


def _piece(optimizer: AdamW) -> dict[str, torch.Tensor]:
    """Arrays of PIECE elements, of numbers that look like training's."""
    arrays = {name: torch.full((PIECE,), 0.01, dtype=ARRAYS[name]) for name in ("weight", "grad")}
    arrays["remainder"] = torch.zeros(PIECE, dtype=torch.int16)
    for state in optimizer.state_arrays:
        size = PIECE if state.per == "element" else PIECE // GROUP
        arrays[state.name] = torch.full((size,), TOUCH_VALUE, dtype=torch.uint8)
    return arrays


class HostUpdate:
    """AdamW in bfloat16 precision over `parameters` in host RAM. Use as a context manager.

    threads: that touch the memory first, while the caller's loads or compiles the kernel.
    """

    def __init__(self, parameters: int, threads: int) -> None:
        self.parameters = parameters
        self._slabs = {
            name: Slab(name, parameters * dtype.itemsize, pinned=False, threads=threads)
            for name, dtype in ARRAYS.items()
        }
        self._arrays = {
            name: slab.bytes.view(ARRAYS[name])[:parameters] for name, slab in self._slabs.items()
        }
        with ThreadPoolExecutor(threads) as pool:
            for slab in self._slabs.values():
                touch(slab, pool)
            self._update = AdamW().updating(self._arrays, **UNMOVING)

    def rate(self, threads: int, clock: Times) -> float:
        """Parameters/s; each of `threads` takes pieces until none is left, as in training."""
        size = min(MOST_OF_A_PIECE, -(-self.parameters // (threads * PIECES_PER_THREAD)))
        passes = min(PASSES, threads)
        starts = passes * [*range(0, self.parameters, size)]

        def take(pieces: Iterator[int]) -> None:
            for start in pieces:
                self._update(start, start + size)

        with ThreadPoolExecutor(threads) as pool:
            seconds = clock.seconds(lambda: list(pool.map(take, threads * [iter(starts)])))
        return passes * self.parameters / seconds

    def __enter__(self) -> HostUpdate:
        return self

    def __exit__(self, *_: object) -> None:
        del self._update  # it holds views
        self._arrays.clear()
        for slab in self._slabs.values():
            slab.close()


def touch(slab: Slab, pool: ThreadPoolExecutor) -> None:
    """Have the pool write to every page. By numpy: torch would start a thread team in each one."""
    pages = slab.bytes.numpy()
    for start in range(0, slab.nbytes, TOUCH_BYTES):
        pool.submit(pages[start : start + TOUCH_BYTES].fill, TOUCH_VALUE)
