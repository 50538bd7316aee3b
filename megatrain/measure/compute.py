"""The computing device: matmuls, attention, memory, and what starting an operation costs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.engine.components import fastest_attention
from megatrain.machine.hardware import update_threads
from megatrain.machine.profile import Rates, interpolate
from megatrain.measure.transfers import Clock, LinkTest
from megatrain.memory.layout import GROUP
from megatrain.memory.slab import Slab
from megatrain.optim import AdamW
from megatrain.optim.optimizer import UpdateRange

WIDTH, WIDE = 4096, 14336  # an 8B model's MLP
HEADS, HEAD_SIZE = 32, 128
FLOP_PER_PAIR = 12 * HEAD_SIZE  # of one head: two matmuls forward, four backward
SMALL = 256  # elements: nothing but the cost of starting
FP8_TOKENS = 8192
MODEL, INNER = 2048, 1536  # of a 30B mixture's experts: the first matrix of each
# As many experts as in larger mixtures make rows of all lengths; few rows in all take no memory.
MOST_EXPERTS, MOST_ROWS = 64, 32_768
HEAT_FOR_S, LONGEST_HEATING_S = 0.5, 6.0
SETTLED = 0.995  # a second's work, of that in the second before


class Device:
    """Times what training does on the clock's device, with random numbers of its own generator."""

    def __init__(self, clock: Clock) -> None:
        self.device = clock.device
        self._clock = clock
        self._generator = torch.Generator(self.device).manual_seed(0)

    def matmul(self, sizes: Sequence[int], dtype: torch.dtype) -> Rates:
        """(tokens, FLOP/s) of [tokens, 4096] x [4096, 14336]."""
        weight = self._random((WIDE, WIDTH), dtype)
        if dtype == torch.bfloat16:  # float32 matmuls draw less power
            self._heat(self._random((max(sizes), WIDTH), dtype), weight)

        def rate(tokens: int) -> float:
            rows = self._random((tokens, WIDTH), dtype)
            seconds = self._clock.seconds(lambda: functional.linear(rows, weight))
            return 2 * tokens * WIDTH * WIDE / seconds

        return tuple((tokens, rate(tokens)) for tokens in sizes)

    def _heat(self, rows: Tensor, weight: Tensor) -> None:
        """Work until a GPU slows down no more: a cool one exceeds for seconds what its power limit
        lets it sustain (an H100 at first 748 TFLOP/s, then 680)."""
        if self.device.type != "cuda":
            return
        functional.linear(rows, weight)  # loads the kernel: it is no part of what a GPU does cool
        torch.cuda.synchronize(self.device)
        calls: list[int] = []
        while len(calls) * HEAT_FOR_S < LONGEST_HEATING_S:
            calls.append(0)
            until = time.perf_counter() + HEAT_FOR_S
            while time.perf_counter() < until:
                functional.linear(rows, weight)
                torch.cuda.synchronize(self.device)
                calls[-1] += 1
            if len(calls) > 3 and sum(calls[-2:]) >= SETTLED * sum(calls[-4:-2]):
                return

    def attention(self, lengths: Sequence[int], tokens: int, dtype: torch.dtype) -> Rates:
        """(sequence length, FLOP/s) of causal attention, forward and backward. tokens: of a call,
        or one sequence where that is longer."""

        def rate(length: int) -> float:
            rows = max(1, tokens // length)
            query, key, value, grad = (
                self._random((rows, HEADS, length, HEAD_SIZE), dtype) for _ in range(4)
            )
            inputs = tuple(tensor.requires_grad_() for tensor in (query, key, value))

            def work() -> None:
                output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
                torch.autograd.grad(output, inputs, grad)

            pairs = rows * HEADS * (length * (length + 1) // 2)
            return FLOP_PER_PAIR * pairs / self._clock.seconds(work)

        with fastest_attention(self.device):
            return tuple((length, rate(length)) for length in lengths)

    def grouped(self, sizes: Sequence[int]) -> Rates | None:
        """(rows an expert, FLOP/s) of matmuls in bf16 whose rows are divided among experts at
        random, forward and backward; None where this PyTorch has none for this device."""

        def rate(size: int) -> float | None:
            experts = min(MOST_EXPERTS, MOST_ROWS // size)
            rows = self._random((size * experts, MODEL), torch.bfloat16).requires_grad_()
            matrices = self._random((experts, INNER, MODEL), torch.bfloat16).requires_grad_()
            grad = self._random((size * experts, INNER), torch.bfloat16)
            chosen = torch.empty(len(rows), dtype=torch.int64, device=self.device)
            chosen.random_(experts, generator=self._generator)
            ends = torch.bincount(chosen, minlength=experts).cumsum(0).to(torch.int32)

            def work() -> None:
                output = functional.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)
                torch.autograd.grad(output, (rows, matrices), grad)

            seconds = self._clock.seconds_if_possible(work)
            return None if seconds is None else 3 * 2 * len(rows) * MODEL * INNER / seconds

        rates = {size: rate(size) for size in sizes}
        found = tuple((size, reached) for size, reached in rates.items() if reached is not None)
        return found if len(found) == len(rates) else None

    def memory(self, nbytes: int) -> float:
        """Bytes/s, read and written, of an addition over an array of `nbytes`."""
        source = torch.zeros(nbytes // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._clock.seconds(lambda: torch.add(source, 1.0, out=target))

    def fresh(self, nbytes: int) -> float:
        """The same into pages just mapped by malloc (hardware.bound_heap): first touch."""
        source = torch.zeros(nbytes // 4, device=self.device)
        return 2 * source.nbytes / self._clock.seconds(lambda: torch.add(source, 1.0))

    def launch(self) -> float:
        """Seconds that starting a small operation costs the host; the device is done sooner."""
        small = torch.zeros(SMALL, device=self.device)
        return self._clock.seconds(lambda: small.add_(1.0))

    def fp8(self) -> float:
        """FLOP/s of fp8 matmuls with a scale per row and column; 0.0 without such units."""
        if self.device.type != "cuda":
            return 0.0
        rows = self._random((FP8_TOKENS, WIDTH), torch.bfloat16).to(torch.float8_e4m3fn)
        weight = self._random((WIDE, WIDTH), torch.bfloat16).to(torch.float8_e4m3fn)
        scales = [torch.ones(shape, device=self.device) for shape in ((FP8_TOKENS, 1), (1, WIDE))]
        multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
        seconds = self._clock.seconds_if_possible(lambda: multiply(rows, weight.T, *scales))
        return 0.0 if seconds is None else 2 * FP8_TOKENS * WIDTH * WIDE / seconds

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Normal values: matmuls of zeros draw less power and look faster than they are."""
        return torch.empty(shape, device=self.device).normal_(generator=self._generator).to(dtype)


# -- the optimizer's update -----------------------------------------------------------------------

PARAMETERS = 1 << 26  # 0.9 GiB of state: more than twice the largest caches of processors
CORES_KEPT_BUSY = 16  # by so many; hosts with more cores update more, up to four times as many
# Each piece takes Python's lock: 56 threads with pieces of 0.3 million, 19,000 a second, reached
# three quarters of what two processes did.
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
    with no more threads than leave Python's lock and the caches out of it."""
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


class HostUpdate(AbstractContextManager["HostUpdate"]):
    """AdamW in bfloat16 precision over `parameters` in host RAM. Use as a context manager. threads:
    that touch the memory first, while the caller's loads or compiles the kernel."""

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

    def rate(self, threads: int, clock: Clock) -> float:
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

    def __exit__(self, *_: object) -> None:
        del self._update  # it holds views
        self._arrays.clear()
        for slab in self._slabs.values():
            slab.close()


def links_and_update(
    device: torch.device, cores: int, counts: Sequence[int], on_host: Clock, on_device: Clock
) -> dict[str, Any]:
    """Measure the host's update by `counts` of threads and, with a GPU, its links alone and beside
    the update. The clocks time work on the host and on the device."""
    chosen = update_threads(cores)
    with ExitStack() as stack, ThreadPoolExecutor(1) as aside:
        # enough to keep all cores busy
        parameters = PARAMETERS * max(1, min(4, cores // CORES_KEPT_BUSY))
        preparing = aside.submit(HostUpdate, parameters, cores)
        link = None
        if device.type == "cuda":  # meanwhile: pinning takes as long
            link = stack.enter_context(LinkTest(device))
        work = stack.enter_context(preparing.result())
        rates = tuple((threads, work.rate(threads, on_host)) for threads in counts)
        if link is None:
            return {"update": rates, "update_busy": interpolate(rates, chosen)}
        figures = link.rates(on_device)
        with link.busy() as both_busy:
            busy = work.rate(chosen, on_host)
        return {**figures, "update": rates, "update_busy": busy, "both_busy": both_busy()}


def touch(slab: Slab, pool: ThreadPoolExecutor) -> None:
    """Have the pool write to every page. By numpy: torch would start a thread team in each one."""
    pages = slab.bytes.numpy()
    for start in range(0, slab.nbytes, TOUCH_BYTES):
        pool.submit(pages[start : start + TOUCH_BYTES].fill, TOUCH_VALUE)
