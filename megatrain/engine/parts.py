"""The parts of an engine: its memory, threads and buffers, opened together and closed in reverse order."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from megatrain.engine.activations.codecs import CODECS
from megatrain.engine.activations.offload import Offload, OnDevice
from megatrain.engine.context import naming_the_gpu, take_workspaces
from megatrain.engine.gradients import Gradients, GradientSink
from megatrain.engine.landing import AppliedGradients, GradientRing, StoredGradients
from megatrain.engine.placement import PRECISIONS, Placement, open_store
from megatrain.engine.step import Passes
from megatrain.engine.streamer import Streamer
from megatrain.engine.streams import Compute, Lane
from megatrain.engine.update import Updater
from megatrain.memory.store import Store
from megatrain.models.anatomy import layouts_of
from megatrain.models.skeleton import Skeleton
from megatrain.optim import Optimizer
from megatrain.schedule import kept_row_bytes, own_sums
from megatrain.settings import Settings


@dataclass(frozen=True)
class EngineParts:
    """What an engine consists of. `lanes` by name: upload, download, fetch, update; each has a `delay` for tests."""

    store: Store
    compute: Compute
    lanes: Mapping[str, Lane]
    updater: Updater
    sink: StoredGradients | AppliedGradients
    boundaries: OnDevice | Offload
    streamer: Streamer
    gradients: Gradients
    passes: Passes


def open_parts(
    skeleton: Skeleton,
    *,
    optimizer: Optimizer,
    precision: str,
    stores_gradients: bool,
    device: torch.device,
    settings: Settings,
    seed: int,
    resources: ExitStack,
) -> EngineParts:
    """Allocate all memory and start all threads.

    Args:
        stores_gradients: every gradient waits in the store until the global norm is known; else a block is
            updated as soon as its gradient has landed.
        resources: closes everything in reverse order, so that a user is closed before what it uses.

    Raises:
        OutOfMemory: host or GPU memory does not suffice.
    """
    dtype, compute = PRECISIONS[precision], Compute(device)
    placement = Placement.of(settings, len(skeleton.anatomy.blocks))
    with naming_the_gpu("the resident blocks' state"):
        take_workspaces(device, dtype)
        store = open_store(
            layouts_of(skeleton.anatomy),
            optimizer,
            precision,
            placement,
            gradients=stores_gradients,
            device=device,
            threads=settings.update_threads,
        )
        resources.enter_context(store)
    updater, sink = _updates(
        store, optimizer, compute, dtype, stores_gradients, settings, resources
    )
    # Who waits for whom: the note in streams.py.
    download = Lane("download", device)  # gradients and activation checkpoints, GPU to host
    upload = Lane("upload", device)  # weights and fp32 accumulators, host to GPU
    fetch = Lane("fetch", device)  # offloaded activations, back to the GPU
    boundaries = _boundaries(skeleton, settings, dtype, compute, download, fetch)
    resources.callback(boundaries.close)
    release = Lane("release") if store.nvme is not None else None  # NVMe staging behind uploads
    for lane in filter(None, (release, download, upload, fetch)):
        resources.callback(lane.close)
    with naming_the_gpu("the weights' slots and the gradients' accumulators"):
        streamer = Streamer(skeleton.anatomy, store, dtype, compute, upload, updater, release)
        gradients = _gradients(skeleton, store, dtype, placement, compute, upload, download, sink)
        blocks = skeleton.anatomy.blocks
        parameters = [skeleton.bind(block, streamer.flat(block.index)) for block in blocks]
        skeleton.move_buffers(device)
    passes = Passes(skeleton, streamer, gradients, boundaries, parameters, settings, seed)
    lanes = {"upload": upload, "download": download, "fetch": fetch, "update": updater.lane}
    return EngineParts(
        store, compute, lanes, updater, sink, boundaries, streamer, gradients, passes
    )


def _gradients(
    skeleton: Skeleton,
    store: Store,
    dtype: torch.dtype,
    placement: Placement,
    compute: Compute,
    upload: Lane,
    download: Lane,
    sink: GradientSink,
) -> Gradients:
    """The fp32 accumulators: on the device for the whole step, or in turn."""
    own = own_sums(placement.summed, skeleton.anatomy.embed_feeds_head)
    return Gradients(
        store.layouts,
        dtype,
        resident=placement.resident,
        own=range(own),
        compute=compute,
        upload=upload,
        download=download,
        sink=sink,
        host_sums=partial(store.array, "grad_sum") if placement.sums_travel else None,
    )


def _updates(
    store: Store,
    optimizer: Optimizer,
    compute: Compute,
    dtype: torch.dtype,
    stores_gradients: bool,
    settings: Settings,
    resources: ExitStack,
) -> tuple[Updater, StoredGradients | AppliedGradients]:
    """What updates the weights, and what brings it the gradients."""
    ring = None
    if not stores_gradients:
        streamed = store.layouts[store.resident :]
        largest = max((layout.numel for layout in streamed), default=0)
        ring = GradientRing(largest, dtype, pinned=compute.is_cuda)
        resources.callback(ring.close)  # after the updates that read it
    updater = Updater(store, optimizer, settings.update_threads, compute)
    resources.callback(updater.close)
    with naming_the_gpu("the update's workspace"):
        updater.take_libraries()
    if ring is not None:
        return updater, AppliedGradients(store, compute, ring, updater)
    sink = StoredGradients(store, compute, one_group=settings.groups == 1)
    resources.callback(sink.close)
    return updater, sink


def _boundaries(
    skeleton: Skeleton,
    settings: Settings,
    dtype: torch.dtype,
    compute: Compute,
    download: Lane,
    fetch: Lane,
) -> OnDevice | Offload:
    """Keeps activation checkpoints between forward and backward."""
    codec = CODECS.get(settings.activations)
    if not settings.offload_activations:
        return OnDevice(codec)
    hidden_size = skeleton.anatomy.hidden_size
    row_bytes = kept_row_bytes(settings.activations, hidden_size, dtype.itemsize)
    return Offload(row_bytes, compute, download, fetch, codec)
