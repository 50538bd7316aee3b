"""The parts of an engine: memory, threads and buffers, opened together, closed in reverse order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatrain.engine.activations.codecs import CODECS
from megatrain.engine.activations.offload import Boundaries, Offload, OnDevice
from megatrain.engine.context import naming_the_gpu, take_workspaces
from megatrain.engine.exchange import Exchange
from megatrain.engine.gradients import Gradients
from megatrain.engine.host_weights import HostWeights
from megatrain.engine.landing import AppliedGradients, GradientRing, StoredGradients
from megatrain.engine.placement import PRECISIONS, open_store, sums_on_device
from megatrain.engine.routing import Balancer
from megatrain.engine.step import Passes
from megatrain.engine.streamer import Streamer
from megatrain.engine.streams import Compute, Lane
from megatrain.engine.trade import HeadTrade
from megatrain.engine.update import Updater
from megatrain.errors import MegaTrainError
from megatrain.memory.layout import FlatLayout
from megatrain.memory.store import Store
from megatrain.models.anatomy import layouts_of
from megatrain.models.skeleton import Skeleton
from megatrain.optim import Optimizer
from megatrain.schedule import kept_row_bytes, own_sums
from megatrain.settings import Settings
from megatrain.world import World


@dataclass(frozen=True)
class EngineParts:
    """All parts of an engine. `lanes` by name: upload, download, fetch, update, exchange."""

    store: Store
    compute: Compute
    lanes: Mapping[str, Lane]  # each has a `delay` for tests
    updater: Updater
    sink: StoredGradients | AppliedGradients
    boundaries: Boundaries
    streamer: Streamer
    gradients: Gradients
    passes: Passes
    balancer: Balancer | None


def open_parts(
    skeleton: Skeleton,
    *,
    optimizer: Optimizer,
    precision: str,
    stores_gradients: bool,
    device: torch.device,
    settings: Settings,
    seed: int,
    balancer: Balancer | None,
    world: World,
    resources: ExitStack,
) -> EngineParts:
    """Allocate all memory, start all threads (their waits: streams.py). Raises OutOfMemory.

    Args:
        stores_gradients: until the global norm is known; else a block is updated as it has landed.
        resources: closes everything in reverse order: a user before what it uses.
    """
    anatomy, dtype, compute = skeleton.anatomy, PRECISIONS[precision], Compute(device)
    layouts = layouts_of(anatomy)
    with naming_the_gpu("the resident blocks' state"):
        take_workspaces(device, dtype)
        place = partial(open_store, layouts, optimizer, precision, settings, device=device)
        store = resources.enter_context(place(gradients=stores_gradients, world=world))
    updater, sink = _updates(store, optimizer, compute, stores_gradients, settings, resources)
    download = Lane("download", device)  # gradients and activation checkpoints, GPU to host
    upload = Lane("upload", device)  # weights and fp32 accumulators, host to GPU
    fetch = Lane("fetch", device)  # offloaded activations, back to the GPU
    boundaries = _boundaries(settings, anatomy.hidden_size, dtype, compute, download, fetch)
    resources.callback(boundaries.close)  # after the lanes, which copy from and to its memory
    kept = _kept(world, layouts, dtype, settings, compute, download, resources)
    for lane in (download, upload, fetch):
        resources.callback(lane.close)
    with naming_the_gpu("the weights' slots and the gradients' accumulators"):
        exchange, trade = _exchange(world, layouts, compute, settings, resources)
        ways = upload, updater, exchange, kept, settings.replicated
        streamer = Streamer(anatomy, store, dtype, compute, *ways)
        uses: dict[str, Any] = {"compute": compute, "upload": upload, "download": download}
        gradients = Gradients(
            [layout.trained for layout in layouts],
            dtype,
            resident=store.resident,
            own=range(own_sums(sums_on_device(settings, len(layouts)), anatomy.embed_feeds_head)),
            host_sums=partial(store.array, "grad_sum") if "grad_sum" in store.arrays else None,
            **{**uses, "sink": sink, "exchange": exchange},
        )
        skeleton.move_buffers(device)
    # before lanes end, one of which may wait for a rank that does not come
    resources.callback(store.stop_waiting, MegaTrainError("the engine is closed"))
    if balancer is not None:
        balancer.open(skeleton.layers, device, resources)
    about = settings, seed, balancer, world, trade
    passes = Passes(skeleton, streamer, gradients, boundaries, *about)
    every = upload, download, fetch, updater.lane, exchange and exchange.lane
    lanes = {lane.name: lane for lane in every if lane}
    return EngineParts(
        store, compute, lanes, updater, sink, boundaries, streamer, gradients, passes, balancer
    )


def _exchange(
    world: World,
    layouts: Sequence[FlatLayout],
    compute: Compute,
    settings: Settings,
    resources: ExitStack,
) -> tuple[Exchange | None, HeadTrade | None]:
    if world.is_alone:
        return None, None
    exchange = Exchange(world, layouts, compute, getattr(torch, settings.wire))
    resources.callback(exchange.close)  # before what its jobs read and write
    return exchange, HeadTrade(world, compute, exchange.lane) if world.pieces > 1 else None


def _kept(
    world: World,
    layouts: Sequence[FlatLayout],
    dtype: torch.dtype,
    settings: Settings,
    compute: Compute,
    download: Lane,
    resources: ExitStack,
) -> HostWeights | None:
    """Of several hosts, memory for this rank's part of weights that slots hold in turn."""
    if world.across is None:
        return None
    first = settings.replicated
    numels = [world.hosts * layout.share(world.size) for layout in layouts[first:]]
    threads, pinned = settings.update_threads, compute.is_cuda
    kept = HostWeights(numels, dtype, download, pinned=pinned, threads=threads, first=first)
    resources.callback(kept.close)
    return kept


def _boundaries(
    settings: Settings,
    width: int,
    dtype: torch.dtype,
    compute: Compute,
    download: Lane,
    fetch: Lane,
) -> Boundaries:
    """What keeps activation checkpoints of `width` elements a token."""
    codec = CODECS.get(settings.activations)
    if not settings.offload_activations:
        return OnDevice(codec)
    row_bytes = kept_row_bytes(settings.activations, width, dtype.itemsize)
    return Offload(row_bytes, compute, download, fetch, codec)


def _updates(
    store: Store,
    optimizer: Optimizer,
    compute: Compute,
    stores_gradients: bool,
    settings: Settings,
    resources: ExitStack,
) -> tuple[Updater, StoredGradients | AppliedGradients]:
    """The updater of the weights, and the sink that brings it the gradients."""
    ring = None
    if not stores_gradients:
        streamed = range(store.resident, len(store.layouts))
        largest = max((store.trained_span(block).numel for block in streamed), default=0)
        ring = GradientRing(largest, store.arrays["weight"].dtype, pinned=compute.is_cuda)
        resources.callback(ring.close)  # after the updates that read it
    updater = Updater(store, optimizer, settings.update_threads, compute)
    resources.callback(updater.close)  # after the lanes, opened later: uploads wait for updates
    with naming_the_gpu("the update's workspace"):
        updater.take_libraries()
    if ring is not None:
        return updater, AppliedGradients(store, compute, ring, updater)
    one_group = settings.groups == 1 or not store.world.is_alone
    return updater, StoredGradients(store, one_group=one_group)
