"""Rates of a host's ranks with all of them at work: links, updates in host memory, exchanges."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.engine.ranks.exchange import Exchange
from megatrain.engine.streams import Compute
from megatrain.errors import OutOfMemory
from megatrain.machine.profile import thread_counts
from megatrain.measure import compute
from megatrain.measure.transfers import Clock, Work, on_the_wall
from megatrain.memory.layout import FlatLayout
from megatrain.world import ALONE, World

ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 22}  # that are exchanged: those of a 7B model's layer
SENT = {"cuda": 1 << 25, "cpu": 1 << 22}  # the same between hosts
PRODUCT, PRODUCTS = 8192, 20  # matmuls beside collectives: their width, and how many
BESIDE = 0.8  # of the matmuls' time, which collectives fill

Figures = dict[str, Any]  # of megatrain.machine.profile.TOGETHER


@dataclass(frozen=True)
class Together(Clock):
    """Times work that all ranks do at once, by the slowest. All call it in the same order."""

    world: World = ALONE

    def _elapsed(self, work: Work, calls: int) -> float:
        self._finish()
        self.world.all_gather(None)  # all begin at once

        def all_calls() -> None:
            for _ in range(calls):
                work()
            self._finish()

        return max(self.world.all_gather(on_the_wall(all_calls, 1)))

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_together(world: World, device: torch.device, cores: int) -> Figures:
    """Rates that each rank reaches. All call it, with nothing else at work. cores: of a rank.
    Raises OutOfMemory: a GPU has no room for 4 GiB, or memory could not be pinned."""
    clock = Together(device, world=world)
    try:
        none = dict.fromkeys(("upload", "download", "both", "both_busy"), 0.0)
        counts = thread_counts(cores)
        found = none | compute.links_and_update(device, cores, counts, clock, clock)
        found["both_busy"] = min(world.all_gather(found["both_busy"]))  # of the slowest rank
        return {"ranks": world.local_size, **found, **_exchanged(clock)}
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            "a GPU has no room for the 4 GiB that measuring takes; close other programs on it"
        ) from error
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _exchanged(clock: Together) -> Figures:
    """Gathers of weights and ordered sums of a host's ranks, as the engine's; what matmuls lose."""
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
        total = torch.zeros(len(exchange.part(whole)), device=device)
        clock = Together(device, world=world)
        seconds = clock.seconds(lambda: exchange.gather_across(whole, share))
        seconds += clock.seconds(lambda: exchange.summed_across(total))
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
