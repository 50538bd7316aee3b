"""What the ranks of a host sustain with all of them at work: links to the host, updates in its
memory, and what they exchange.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from megatrain.engine.exchange import Exchange
from megatrain.engine.streams import Compute
from megatrain.errors import MegaTrainError, OutOfMemory
from megatrain.machine.hardware import update_threads
from megatrain.machine.profile import interpolate, thread_counts
from megatrain.measure import update
from megatrain.measure.clock import Work
from megatrain.measure.transfers import LinkTest
from megatrain.memory.layout import FlatLayout
from megatrain.world import World

ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 22}  # that are exchanged: those of a 7B model's layer
SENT = {"cuda": 1 << 25, "cpu": 1 << 22}  # the same between hosts
SAMPLES = 5
SAMPLE_S = 0.02
PRODUCT, PRODUCTS = 8192, 20  # matmuls beside collectives: their width, and how many
BESIDE = 0.8  # of the matmuls' time, which collectives fill
LONGEST_S = 300.0  # until all processes have measured

Figures = dict[str, Any]  # of megatrain.machine.together.TOGETHER


class Together:
    """Times work that all ranks do at once, by the slowest. All call it in the same order."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device

    def seconds(self, work: Work) -> float:
        """Median duration of one call of `work`, of which all ranks make as many."""
        work()  # compiles, connects, wakes the clocks
        once = max(self.world.every(self._elapsed(work, 1)))
        calls = max(1, round(SAMPLE_S / max(1e-7, once)))
        samples = [self._elapsed(work, calls) for _ in range(SAMPLES)]
        return max(self.world.every(median(samples) / calls))

    def _elapsed(self, work: Work, calls: int) -> float:
        self._finish()
        self.world.every(None)  # all begin at once
        started = time.perf_counter()
        for _ in range(calls):
            work()
        self._finish()
        return time.perf_counter() - started

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_together(world: World, device: torch.device, cores: int) -> Figures:
    """What each rank reaches. All call it, with nothing else at work.

    cores: of a rank.

    Raises OutOfMemory: a GPU has no room for 4 GiB, or memory could not be pinned.
    """
    clock = Together(world, device)
    try:
        found = _links_and_update(clock, cores)
        return {"ranks": world.local_size, **found, **_exchanged(clock)}
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            "a GPU has no room for the 4 GiB that measuring takes; close other programs on it"
        ) from error
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _links_and_update(clock: Together, cores: int) -> Figures:
    """PCIe, the host's update, and the update while all links are busy."""
    chosen = update_threads(cores)
    with ExitStack() as stack:
        link = None
        if clock.device.type == "cuda":
            link = stack.enter_context(LinkTest(clock.device))
        work = stack.enter_context(update.HostUpdate(update.parameters_for(cores), cores))
        rates = tuple((threads, work.rate(threads, clock)) for threads in thread_counts(cores))
        if link is None:
            none = dict.fromkeys(("upload", "download", "both", "both_busy"), 0.0)
            return {**none, "update": rates, "update_busy": interpolate(rates, chosen)}
        figures = link.rates(clock)
        with link.busy() as both_busy:
            busy = work.rate(chosen, clock)
        slowest = min(clock.world.every(both_busy()))
        return {**figures, "update": rates, "update_busy": busy, "both_busy": slowest}


def _exchanged(clock: Together) -> Figures:
    """Gathers of weights and ordered sums of a host's ranks, as the engine has them, and what
    matmuls lose."""
    world, device = clock.world.here(), clock.device
    layout = FlatLayout((), ELEMENTS[device.type])
    with closing(Exchange(world, [layout], Compute(device))) as exchange:
        whole = torch.zeros(exchange.padded(0), dtype=torch.bfloat16, device=device)
        share = torch.zeros(exchange.shares[0], dtype=torch.bfloat16, device=device)
        total = torch.zeros(exchange.padded(0), device=device)
        works: dict[str, tuple[Work, torch.Tensor]] = {
            "gather": (lambda: exchange.gather(whole, share), whole),
            "reduce": (lambda: exchange.summed(total), total),
        }
        found: Figures = {}
        for name, (work, array) in works.items():
            seconds = clock.seconds(work)
            found[name] = array.nbytes * (world.size - 1) / world.size / seconds
            lost = _lost(clock, work, seconds) if device.type == "cuda" else 0.0
            found[f"{name}_loss"] = lost
        return found


def network_rate(world: World, device: torch.device) -> float:
    """Bytes/s that each of several hosts gets from the others while all do, of weights and of sums
    as a step has them, to two digits. All ranks call it, with nothing else at work."""
    layout = FlatLayout((), SENT[device.type])
    with closing(Exchange(world, [layout], Compute(device))) as exchange:
        whole = torch.zeros(exchange.padded(0), dtype=torch.bfloat16, device=device)
        share = torch.zeros(exchange.shares[0], dtype=torch.bfloat16, device=device)
        total, received = torch.zeros(2, len(exchange.part(whole)), device=device)
        clock = Together(world, device)
        seconds = clock.seconds(lambda: exchange.gather_across(whole, share))
        seconds += clock.seconds(lambda: exchange.summed_across(total, received))
        # each of a host's ranks gets its part but for its own share, of weights and of sums
        sent = world.local_size * (exchange.part(whole).nbytes + total.nbytes)
        return float(f"{sent * (world.hosts - 1) / world.hosts / seconds:.1e}")


def _lost(clock: Together, collective: Work, seconds: float) -> float:
    """Seconds of matmuls that are lost for each one of a collective beside them."""
    left, right = (
        torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device=clock.device) for _ in range(2)
    )
    lane = torch.cuda.Stream(clock.device)  # type: ignore[no-untyped-call]

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right)

    alone = clock.seconds(products)
    times = max(1, int(BESIDE * alone / seconds))

    def beside() -> None:
        with torch.cuda.stream(lane):
            for _ in range(times):
                collective()
        products()

    return max(0.0, (clock.seconds(beside) - alone) / (times * seconds))


# -- in processes of their own ---------------------------------------------------------------------


def measure_processes(ranks: int, device: str, cores: int) -> Figures:
    """`measure_together` in as many new processes, each with a GPU, or on the CPU.

    cores: of the host. Raises MegaTrainError with what one of them said.
    """
    context: Any = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="megatrain-") as folder:
        meeting, each = Path(folder) / "meeting", max(1, cores // ranks)
        ends, processes = [], []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                given = rank, ranks, meeting, device, each, theirs
                processes.append(context.Process(target=_rank, args=given, daemon=True))
                processes[-1].start()
                theirs.close()
                ends.append(ours)
            return _first_told(ends)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _first_told(ends: Sequence[Connection]) -> Figures:
    """What the first process found, once all have told. Raises what the first to fail has said."""
    found: dict[Connection, Figures] = {}
    until = time.monotonic() + LONGEST_S
    while len(found) < len(ends):
        there = wait([end for end in ends if end not in found], until - time.monotonic())
        if not there:
            raise MegaTrainError(f"the ranks have measured nothing for {LONGEST_S:.0f} s")
        for rank, end in enumerate(ends):
            if end in there:
                found[end] = _told(end, rank)
    return found[ends[0]]


def _told(end: Connection, rank: int) -> Figures:
    try:
        told = pickle.loads(end.recv_bytes())
    except EOFError:
        raise MegaTrainError(f"rank {rank} died while it measured") from None
    if isinstance(told, MegaTrainError):
        raise told
    assert isinstance(told, dict)
    return told


def _rank(rank: int, ranks: int, meeting: Path, device: str, cores: int, end: Connection) -> None:
    torch.set_num_threads(cores)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    found: Figures | MegaTrainError
    try:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        distributed.init_process_group(
            backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks
        )
        found = measure_together(World.joined(where), where, cores)
    except MegaTrainError as error:
        found = error
    except Exception as error:  # noqa: BLE001  the process that waits says it
        found = MegaTrainError(f"rank {rank} could not measure: {type(error).__name__}: {error}")
    end.send_bytes(pickle.dumps(found))
