"""The link between host and GPU: pinned memory to the device and back, alone and both at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from megatrain.heartbeat import beside
from megatrain.memory.slab import Slab

Work = Callable[[], object]


MOST_SAMPLES = 7
FEWEST_SAMPLES = 3  # where one takes long


@dataclass(frozen=True)
class Clock:
    """Times work on `device`: by CUDA's events, as calls only enqueue there, else by the wall."""

    device: torch.device
    sample_s: float = 0.02  # work is repeated until a sample takes about this long
    budget_s: float = 0.25  # of all samples, unless the fewest take longer

    def seconds(self, work: Work) -> float:
        """Median duration of one call of `work`."""
        work()  # compiles, allocates, wakes the clocks
        once = self._elapsed(work, 1)
        calls = max(1, round(self.sample_s / max(1e-7, once)))
        samples = [once] if calls == 1 else []
        while len(samples) < FEWEST_SAMPLES or (
            len(samples) < MOST_SAMPLES and sum(samples) < self.budget_s
        ):
            samples.append(self._elapsed(work, calls))
        return median(samples) / calls

    def seconds_if_possible(self, work: Work) -> float | None:
        """The same, or None where this device or this PyTorch lacks the operation."""
        try:
            return self.seconds(work)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError):
            return None

    def _elapsed(self, work: Work, calls: int) -> float:
        return (self._on_cuda if self.device.type == "cuda" else on_the_wall)(work, calls)

    def _on_cuda(self, work: Work, calls: int) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        for _ in range(calls):
            work()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000


def on_the_wall(work: Work, calls: int) -> float:
    """Seconds that `calls` calls take this thread."""
    started = time.perf_counter()
    for _ in range(calls):
        work()
    return time.perf_counter() - started


PIECE_BYTES = 256 << 20  # a decoder layer's size
PIECES_AT_ONCE = 4  # each way, so that the slower way's last piece counts for little
TOUCH_THREADS = 8


class LinkTest(AbstractContextManager["LinkTest"]):
    """A host and a device buffer of one piece for each direction. Use as a context manager."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slabs = [
            Slab(f"transfers {way}", PIECE_BYTES, pinned=True, threads=TOUCH_THREADS)
            for way in ("up", "down")
        ]
        self._host = [slab.bytes[:PIECE_BYTES] for slab in self._slabs]
        self._device = [torch.zeros_like(piece, device=device) for piece in self._host]
        self._streams = [torch.cuda.Stream(device) for _ in self._host]  # type: ignore[no-untyped-call]

    def rates(self, clock: Clock) -> dict[str, float]:
        """Bytes/s: `upload` and `download` alone, `both` their sum at once."""
        return {
            "upload": PIECE_BYTES / clock.seconds(self.up),
            "download": PIECE_BYTES / clock.seconds(self.down),
            "both": 2 * PIECES_AT_ONCE * PIECE_BYTES / clock.seconds(self.both),
        }

    def up(self) -> None:
        self._device[0].copy_(self._host[0], non_blocking=True)

    def down(self) -> None:
        self._host[1].copy_(self._device[1], non_blocking=True)

    def both(self) -> None:
        """Enqueue several pieces each way at once."""
        current = torch.cuda.current_stream(self.device)
        for stream, copy in zip(self._streams, (self.up, self.down), strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(PIECES_AT_ONCE):
                    copy()
        for stream in self._streams:
            current.wait_stream(stream)  # wait: a timing ends when all pieces have arrived

    @contextmanager
    def busy(self) -> Iterator[Callable[[], float]]:
        """Keep both directions busy until the block ends. Yields what then tells their bytes/s."""
        stop, ends = threading.Event(), [time.perf_counter()]

        def work() -> None:
            while not stop.is_set() or len(ends) == 1:
                self.both()
                torch.cuda.current_stream(self.device).synchronize()
                ends.append(time.perf_counter())

        def rate() -> float:
            seconds = median(end - begin for begin, end in pairwise(ends))
            return 2 * PIECES_AT_ONCE * PIECE_BYTES / seconds

        with beside(work, stop, "busy-link"):
            yield rate

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self.device)  # pinned memory goes only when no copy reads it
        for slab in self._slabs:
            slab.close()
