"""A step as a timeline: which thread and which stream did what, and when. The file opens in Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

import gzip
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatrain.errors import StorageError

TOP_KERNELS = 25
NAME_WIDTH = 70  # of the table's first column
# What a stream of the GPU is called, by the start of the names of what it mostly does; a stream that does anything else computes.
COPIES = {"Memcpy HtoD": "upload", "Memcpy DtoH": "download"}
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Trace:
    """What `tracing` saw, once its block is left."""

    table: str = ""  # the operations that took the longest


@contextmanager
def tracing(path: Path, device: torch.device) -> Iterator[Trace]:
    """Record what the block does on every thread, and on the GPU if it has one, and write it to `path` (.json, or .json.gz for a tenth).

    One step is enough, and much more is too large to look at. The step is slower while it is watched: do not time it.
    Raises StorageError.
    """
    from torch._C._profiler import _ExperimentalConfig  # the lanes' threads are traced with it, not only the caller's
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    trace = Trace()
    options = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=options, acc_events=True) as profiler:  # else it warns of further cycles
        yield trace
        if cuda:
            torch.cuda.synchronize(device)
    averages = profiler.key_averages()
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    trace.table = averages.table(sort_by=order, row_limit=TOP_KERNELS, max_name_column_width=NAME_WIDTH)
    try:
        profiler.export_chrome_trace(str(path))
        rename_rows(path, {thread.native_id: thread.name for thread in threading.enumerate()})
    except OSError as error:
        raise unwritable(path, error) from error


def computing_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds for which a GPU computes while `work` runs, by its own clock: kernels on whichever stream count once, transfers do not."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:  # not the host's side, which would slow it down
        work()
        torch.cuda.synchronize(device)
    kernels = (event for event in profiler.events() or () if event.device_type.name == "CUDA" and not event.name.startswith(tuple(COPIES)))
    return covered((event.time_range.start, event.time_range.end) for event in kernels) / 1e6


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, end) spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def claim(path: Path) -> None:
    """Create the file of a timeline to come. Raises StorageError if that is impossible: better now than after the step."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: the timeline cannot be written ({error.strerror}); choose another file for --profile")


def rename_rows(path: Path, threads: dict[int | None, str]) -> None:
    """Give the timeline's rows names: threads those of `threads` (by the system's number), streams what they mostly do."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        trace = json.load(file)
    events = trace["traceEvents"]
    rows = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    names = {row: threads[row[1]] for row in rows if row[1] in threads} | stream_names(events)
    kept = [event for event in events if event["name"] != "thread_name" or (event["pid"], event["tid"]) not in names]
    given = [{"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}} for (pid, tid), name in names.items()]
    with opened(path, "wt") as file:
        json.dump({**trace, "traceEvents": [*given, *kept]}, file)


def stream_names(events: list[dict[str, Any]]) -> dict[tuple[Any, Any], str]:
    """(process, row) of every GPU stream -> its name, from what takes most of its time."""
    time: dict[tuple[Any, Any], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event.get("cat") in GPU_WORK:
            kind = next((name for start, name in COPIES.items() if event["name"].startswith(start)), "compute")
            time[event["pid"], event["tid"]][kind] += event["dur"]
    return {row: f"stream {row[1]}: {max(kinds, key=lambda kind: kinds[kind])}" for row, kinds in time.items()}
