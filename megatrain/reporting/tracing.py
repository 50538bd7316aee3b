"""A step as a timeline of every thread and stream, for Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from megatrain.errors import system_errors

UNWRITABLE = "write the timeline", "choose another file for --profile"
TOP_KERNELS = 25
NAME_WIDTH = 70  # of the table's first column
COPIES = ("Memcpy HtoD", "Memcpy DtoH")  # of the GPU's work, what is not computed


@contextmanager
def record_timeline(
    path: Path, device: torch.device, what: str, show: Callable[[str], object]
) -> Iterator[None]:
    """Record the block on every thread, and on the GPU, and write it to `path` (.json or .json.gz).
    One step is enough; a recorded step is slower, so do not time it. Raises StorageError.

    show: is told which operations took longest, and where the timeline of `what` is."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    # profile_all_threads: the lanes' threads too, not only the caller's
    options = _ExperimentalConfig(profile_all_threads=True)
    # acc_events: without it, it warns of further cycles
    with profile(activities=activities, experimental_config=options, acc_events=True) as profiler:
        yield
        if cuda:
            torch.cuda.synchronize(device)
    table = profiler.key_averages().table(
        sort_by="self_device_time_total" if cuda else "self_cpu_time_total",
        row_limit=TOP_KERNELS,
        max_name_column_width=NAME_WIDTH,
    )
    with system_errors(path, *UNWRITABLE):
        profiler.export_chrome_trace(str(path))
        _name_threads(path)
    show(f"{table}\nthe timeline of {what} is in {path}: open it in ui.perfetto.dev")


def computing_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds for which a GPU runs kernels during `work`, by its own clock; copies do not count."""
    # Not the host's activities, which would slow it down.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
        torch.cuda.synchronize(device)
    kernels = (
        event
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA" and not event.name.startswith(COPIES)
    )
    return covered((event.time_range.start, event.time_range.end) for event in kernels) / 1e6


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, end) spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def claim(path: Path) -> None:
    """Create the file of a timeline to come, to fail before the step. Raises StorageError."""
    with system_errors(path, *UNWRITABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def _name_threads(path: Path) -> None:
    """Name the timeline's rows of this process's threads as these are named."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        trace = json.load(file)
    threads = {thread.native_id: thread.name for thread in threading.enumerate()}
    events = trace["traceEvents"]
    rows = {
        (one["pid"], one["tid"]) for one in events if one["ph"] == "X" and one["tid"] in threads
    }
    named: list[Any] = [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": at, "args": {"name": threads[at]}}
        for pid, at in rows
    ]
    named += [one for one in events if one["name"] != "thread_name" or one["tid"] not in threads]
    with opened(path, "wt") as file:
        json.dump({**trace, "traceEvents": named}, file)
