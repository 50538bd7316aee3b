"""Asynchronous work: a lane for each direction of transfers and one for updates, the compute
stream, and the events between them.

A lane is a worker thread with a queue. On CUDA its jobs enqueue work on the lane's own stream, on
the CPU they do the work themselves. So the CPU runs in the same asynchronous order as the GPU, and
a missing wait shows there as a wrong number.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from megatrain.heartbeat import beat

# [Note: who waits for whom]
#
# compute runs forward, backward and the updates of resident blocks. It waits for upload (the
#   block's weights have landed in its slot) and for download (a staging buffer has left the GPU).
# upload brings weights and fp32 accumulators up. It waits for update (the block's deferred
#   update: `wait_ready`) and for compute (the slot is no longer read).
# download takes gradients, accumulators and activation checkpoints down, once compute has made
#   them.
# fetch brings offloaded activations back, once they have landed and compute has left their ring.
# update runs one block after another on a pool of threads, once the block's gradient has landed.
#   Updates of whole matrices wait there for a stream of their own, which orthogonalises them.
#
# Lanes of several GPUs are described at `Exchange`. Each wait stands beside its use as a `# wait:`
# line; tests/engine/test_races.py takes waits away one by one and shows that the result changes.


def _cuda_event(timed: bool = False) -> Any:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


class Event:
    """Marks the completion of a piece of work."""

    def __init__(self) -> None:
        self.host = threading.Event()  # set once the work is done (CPU) or enqueued (CUDA)
        self.cuda: Any = None  # a torch.cuda.Event that completes with the work
        self.error: BaseException | None = None  # what stopped the work
        # seconds that its lane waited meanwhile, by cause, for the attribution of stalls
        self.waited: dict[str, float] = {}

    def wait_host(self) -> None:
        """Block this thread until the work is done or enqueued. Raises what stopped it."""
        self.host.wait()
        if self.error is not None:
            raise self.error

    def synchronize(self) -> None:
        """Block this thread until the work is done, on the GPU too."""
        self.wait_host()
        if self.cuda is not None:
            self.cuda.synchronize()

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self.host.set()


# receives its own completion event, to note on it how long it waited for what
Job = Callable[[Event], object]


class Lane:
    """Runs jobs in order on one worker thread, and on a CUDA device on one stream.

    After a job has failed every later one fails with the same error: nothing may compute with what
    did not arrive.
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self.name = name
        self.stream: Any = None
        if device is not None and device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # tests inject sleeps here: before every job, in its thread and on its stream
        self.delay: Callable[[], None] | None = None
        self._queue: queue.SimpleQueue[tuple[Job, Event] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"megatrain-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Event:
        """Queue a job; the event completes with it."""
        event = Event()
        self._queue.put((job, event))
        return event

    def after(self, events: Iterable[Event | None], work: Callable[[], object]) -> Event:
        """Queue `work`, to run once these events are complete."""

        def job(_: Event) -> None:
            for event in events:
                self.wait(event)
            work()

        return self.submit(job)

    def wait(self, event: Event | None) -> None:
        """Let what follows in this lane run after `event`; for jobs."""
        if event is None:
            return
        event.wait_host()
        if event.cuda is not None:
            if self.stream is not None:
                self.stream.wait_event(event.cuda)
            else:
                event.cuda.synchronize()

    def close(self) -> None:
        """Finish what is queued, on the GPU too, and stop the thread. Memory may be freed then."""
        self._queue.put(None)
        self._thread.join()
        if self.stream is not None:
            self.stream.synchronize()

    def _run(self) -> None:
        if self.stream is not None:
            torch.cuda.set_device(self.stream.device)
        while (item := self._queue.get()) is not None:
            job, event = item
            if self._error is None:
                try:
                    self._perform(job, event)
                except BaseException as error:  # noqa: BLE001  carried to the thread that waits
                    self._error = error
            event.finish(self._error)
            beat()
            # or an idle lane would keep alive what its last job used, such as a store
            del item, job, event

    def _perform(self, job: Job, event: Event) -> None:
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            if self.delay is not None:
                self.delay()
            job(event)
            if self.stream is not None:
                event.cuda = _cuda_event()
                event.cuda.record(self.stream)


class Compute:
    """The stream that computes: CUDA's current one, or the calling thread. Accounts for waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._stall_s: dict[str, float] = {}
        self._timed: list[tuple[str, Event, Any, Any]] = []

    def wait(self, event: Event | None, cause: str) -> None:
        """Let what is computed next run after `event`. cause: upload, update ..., for metrics."""
        if event is None:
            return
        with self.blocked(cause, event):
            event.wait_host()
            if self.is_cuda:
                torch.cuda.current_stream(self.device).wait_event(event.cuda)

    @contextmanager
    def blocked(self, cause: str, event: Event) -> Iterator[None]:
        """Account for waits inside under `cause`, but for what `event` has waited for itself."""
        if not self.is_cuda:
            started = time.perf_counter()
            yield
            self._add(cause, event, time.perf_counter() - started)
            return
        stream = torch.cuda.current_stream(self.device)
        before, after = _cuda_event(timed=True), _cuda_event(timed=True)
        # before the host waits: if the work is not even queued yet, the GPU runs dry meanwhile
        before.record(stream)
        yield
        after.record(stream)
        self._timed.append((cause, event, before, after))

    def synchronize(self) -> None:
        """Block this thread until everything computed so far is done."""
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def record(self) -> Event:
        """An event that completes when everything computed so far is done."""
        event = Event()
        if self.is_cuda:
            event.cuda = _cuda_event()
            event.cuda.record(torch.cuda.current_stream(self.device))
        event.finish()
        return event

    def _add(self, cause: str, event: Event, seconds: float) -> None:
        for name, most in (*event.waited.items(), (cause, seconds)):
            part = min(seconds, most)
            seconds -= part
            self._stall_s[f"wait_{name}"] = self._stall_s.get(f"wait_{name}", 0.0) + part

    def take_stalls(self) -> dict[str, float]:
        """Seconds of waiting by cause since the last call; on CUDA the next one has what is not yet
        over. All are over after `synchronize`."""
        timed, self._timed = self._timed, []
        for cause, event, before, after in timed:
            if after.query():
                self._add(cause, event, before.elapsed_time(after) / 1000)
            else:
                self._timed.append((cause, event, before, after))
        stalls, self._stall_s = self._stall_s, {}
        return stalls
