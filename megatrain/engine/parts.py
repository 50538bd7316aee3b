"""The parts of an engine: memory, threads and buffers, opened together, closed in reverse order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatrain.engine.activations import Checkpoints, Offload, OnDevice
from megatrain.engine.codecs import CODECS
from megatrain.engine.context import naming_the_gpu, take_workspaces
from megatrain.engine.gradient_sinks import AppliedGradients, GradientRing, StoredGradients
from megatrain.engine.gradients import Gradients, GradientSink
from megatrain.engine.peers import Peers
from megatrain.engine.ranks.context_parallel import ContextParallel
from megatrain.engine.ranks.exchange import Exchange, shares_weights
from megatrain.engine.ranks.sums import RankPeers, SharedGradients
from megatrain.engine.ranks.weights import GatheredWeights, HostWeights
from megatrain.engine.routing import Balancer
from megatrain.engine.step import Passes
from megatrain.engine.streamer import StoredWeights, Streamer, WeightSource
from megatrain.engine.streams import Compute, Lane
from megatrain.engine.update import Updater
from megatrain.errors import MegaTrainError
from megatrain.memory.layout import ArraySpec, FlatLayout
from megatrain.memory.sizes import IN_MEMORY, blocks_on_nvme
from megatrain.memory.store import Store
from megatrain.models.anatomy import layouts_of
from megatrain.models.skeleton import Skeleton
from megatrain.optim import Optimizer
from megatrain.optim.split import CHUNK, split_master
from megatrain.schedule import kept_row_bytes, own_sums, summed_blocks
from megatrain.settings import Settings
from megatrain.world import ALONE, World

# the dtype in which weights are stored and transferred
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class EngineParts:
    """All parts of an engine. `lanes` by name: upload, download, fetch, update, exchange."""

    store: Store
    compute: Compute
    lanes: Mapping[str, Lane]  # each has a `delay` for tests
    updater: Updater
    sink: StoredGradients | AppliedGradients
    checkpoints: Checkpoints
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
    checkpoints = _checkpoints(settings, anatomy.hidden_size, dtype, compute, download, fetch)
    resources.callback(checkpoints.close)  # after the lanes, which copy from and to its memory
    kept = None
    if world.across is not None:
        kept = _host_weights(world, layouts, dtype, settings, download)
        resources.callback(kept.close)
    for lane in (download, upload, fetch):
        resources.callback(lane.close)
    with naming_the_gpu("the weights' slots and the gradients' accumulators"):
        streaming = skeleton, store, dtype, settings, compute, upload, download, kept
        streamer, gradients, peers, exchange = _streaming(*streaming, updater, sink, resources)
        skeleton.move_buffers(device)
    # before lanes end, one of which may wait for a rank that does not come
    resources.callback(store.stop_waiting, MegaTrainError("the engine is closed"))
    if balancer is not None:
        balancer.open(skeleton.layers, device, resources)
    passes = Passes(skeleton, streamer, gradients, checkpoints, settings, seed, balancer, peers)
    every = upload, download, fetch, updater.lane, exchange and exchange.lane
    lanes = {lane.name: lane for lane in every if lane}
    return EngineParts(
        store, compute, lanes, updater, sink, checkpoints, streamer, gradients, passes, balancer
    )


def _streaming(
    skeleton: Skeleton,
    store: Store,
    dtype: torch.dtype,
    settings: Settings,
    compute: Compute,
    upload: Lane,
    download: Lane,
    kept: HostWeights | None,
    updater: Updater,
    sink: GradientSink,
    resources: ExitStack,
) -> tuple[Streamer, Gradients, Peers, Exchange | None]:
    """The streamer and the gradients, alone or with other ranks."""
    world, layouts, anatomy = store.world, store.layouts, skeleton.anatomy
    copies = StoredWeights(store, upload, updater)
    source: WeightSource = copies
    exchange, peers = None, Peers()
    if not world.is_alone:
        exchange = Exchange(world, layouts, compute, getattr(torch, settings.wire))
        resources.callback(exchange.close)  # before what its jobs read and write
        source = GatheredWeights(copies, exchange, dtype, settings.replicated, kept)
        peers = RankPeers(world, _context_parallel(world, skeleton, compute, exchange))
    streamer = Streamer(anatomy, store, dtype, compute, source)
    sums = sums_on_device(settings, len(layouts))
    of_gradients: dict[str, Any] = {
        "resident": store.resident,
        "own": range(own_sums(sums, anatomy.embed_feeds_head)),
        "host_sums": partial(store.array, "grad_sum") if "grad_sum" in store.arrays else None,
        "compute": compute,
        "upload": upload,
        "download": download,
        "sink": sink,
    }
    trained = [layout.trained for layout in layouts]
    if exchange is None:
        gradients = Gradients(trained, dtype, **of_gradients)
    else:
        gradients = SharedGradients(trained, dtype, exchange=exchange, **of_gradients)
    return streamer, gradients, peers, exchange


def _context_parallel(
    world: World, skeleton: Skeleton, compute: Compute, exchange: Exchange
) -> ContextParallel | None:
    if world.cp_size == 1:
        return None
    return ContextParallel(world, skeleton.config, compute, exchange.lane)


def _host_weights(
    world: World,
    layouts: Sequence[FlatLayout],
    dtype: torch.dtype,
    settings: Settings,
    download: Lane,
) -> HostWeights:
    """With several hosts, memory for this rank's part of weights that slots hold in turn."""
    first, pinned = settings.replicated, download.stream is not None
    numels = [world.hosts * layout.share(world.size) for layout in layouts[first:]]
    threads = settings.update_threads
    return HostWeights(numels, dtype, download, pinned=pinned, threads=threads, first=first)


def _checkpoints(
    settings: Settings,
    width: int,
    dtype: torch.dtype,
    compute: Compute,
    download: Lane,
    fetch: Lane,
) -> Checkpoints:
    """The keeper of activation checkpoints of `width` elements a token."""
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


# -- the store -------------------------------------------------------------------------------------


def sums_on_device(settings: Settings, blocks: int) -> int:
    """Number of blocks, the first ones, whose fp32 accumulators stay there between groups."""
    resident = min(settings.resident, blocks)
    return summed_blocks(blocks, settings.groups, resident, settings.sums_on_device)


def open_store(
    layouts: Sequence[FlatLayout],
    optimizer: Optimizer,
    precision: str,
    settings: Settings,
    *,
    gradients: bool,
    device: torch.device,
    world: World = ALONE,
) -> Store:
    """The arrays of every block, each on the tier where `settings` put it.

    gradients: they are stored until the global norm is known.
    """
    dtype, blocks, several = PRECISIONS[precision], len(layouts), settings.groups > 1
    resident, summed = min(settings.resident, blocks), sums_on_device(settings, blocks)
    kept = [ArraySpec("weight", dtype, transferred=True, whole=True)]
    if dtype == torch.bfloat16:
        kept.append(ArraySpec("remainder", torch.int16))  # the master's other half (optim/split.py)
    kept += [ArraySpec(array.name, array.dtype, per=array.per) for array in optimizer.state_arrays]
    grad = [ArraySpec("grad", dtype, transferred=True)] if gradients else []
    # between groups the other blocks' accumulators wait in host RAM
    travel = several and summed < blocks
    sums = [ArraySpec("grad_sum", torch.float32, transferred=True)] if travel else []
    far = blocks_on_nvme(blocks, resident, settings.nvme_blocks)
    names = [spec.name for spec in kept if spec.name not in IN_MEMORY]
    return Store(
        layouts,
        [*kept, *grad, *sums],
        first={"grad_sum": summed} if sums else {},
        resident=resident,
        # with several groups a resident block's gradient stays in its accumulator, if that is whole
        resident_arrays=kept if several and world.is_alone else [*kept, *grad],
        on_nvme=dict.fromkeys(names, far),
        nvme_folders=settings.nvme_folders,
        device=device,
        threads=settings.update_threads,
        world=world,
        shares_weights=shares_weights(settings, world, device),
    )


def store_master(store: Store, block: int, master: torch.Tensor) -> None:
    """Set a block's weights from flat fp32 values [numel] on any device, of which a rank keeps its
    share; frozen ones have no remainder."""
    master = master[slice(*store.spans[block])]
    names = [name for name in ("weight", "remainder") if name in store.arrays]
    with store.lease(block, names, changes=True) as arrays:
        if "remainder" not in arrays:
            arrays["weight"].copy_(master)
            return
        # piece by piece: on a GPU both halves at once would need as much memory again
        weight, remainder = arrays["weight"], arrays["remainder"]
        for start in range(0, len(master), CHUNK):
            high, low = split_master(master[start : start + CHUNK])
            weight[start : start + CHUNK].copy_(high)
            trained = remainder[start : start + CHUNK]
            trained.copy_(low[: len(trained)])
