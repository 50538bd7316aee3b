"""The parts of an engine: memory, threads and buffers, opened together, closed in reverse order."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.engine.activations import Checkpoints, Offload, OnDevice
from megatrain.engine.codecs import CODECS
from megatrain.engine.gradients import Gradient, Gradients, GradientSink
from megatrain.engine.objective import Peers
from megatrain.engine.ranks.context_parallel import ContextParallel
from megatrain.engine.ranks.exchange import Exchange, shares_weights
from megatrain.engine.ranks.sums import SharedGradients
from megatrain.engine.ranks.weights import GatheredWeights, HostWeights
from megatrain.engine.routing import Balancer
from megatrain.engine.step import Passes
from megatrain.engine.streamer import StoredWeights, Streamer, WeightSource
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.engine.update import Updater
from megatrain.errors import MegaTrainError, OutOfMemory
from megatrain.memory.layout import ArraySpec, FlatLayout
from megatrain.memory.sizes import IN_MEMORY, blocks_on_nvme
from megatrain.memory.slab import Slab
from megatrain.memory.store import Store
from megatrain.models.anatomy import Anatomy, layouts_of
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.compiled import naming_the_compiler
from megatrain.optim import Optimizer
from megatrain.optim.split import CHUNK, split_master
from megatrain.schedule import (
    LANDING_BUFFERS,
    graphs_of_layers,
    kept_row_bytes,
    own_sums,
    summed_blocks,
)
from megatrain.settings import Settings
from megatrain.world import ALONE, World


def fastest_attention(
    device: torch.device, *, lengths_vary: bool = False
) -> AbstractContextManager[None]:
    """Try attention kernels in the order of their speed inside: cuDNN's first on Hopper and newer,
    flash elsewhere.

    lengths_vary: rows seldom have the same length. cuDNN would plan its kernels for each, which
        takes 0.2 s and 5 MB of host RAM for good.
    """
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    suits = not (lengths_vary or torch.are_deterministic_algorithms_enabled())
    if suits and torch.cuda.get_device_capability(device) >= (9, 0):
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return sdpa_kernel(order, set_priority=True)


@contextmanager
def naming_the_gpu(what: str) -> Iterator[None]:
    """Raise the allocator's failure as OutOfMemory, with what did not fit and what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # let go of activations, so that the caller can try less while it handles the error
        traceback.clear_frames(error.__traceback__)
        raise OutOfMemory(
            f"the GPU has no room for {what}; use smaller micro-batches (in a config: "
            "train.micro_batch_tokens), or keep fewer blocks and activations there (memory.gpu: "
            f"what is free) ({str(error).splitlines()[0]})"
        ) from error


@contextmanager
def computing(device: torch.device, what: str, *, lengths_vary: bool) -> Iterator[None]:
    """Run layers inside: with this device's attention kernels, and with errors that name `what`."""
    with naming_the_gpu(what), naming_the_compiler():
        attention = fastest_attention(device, lengths_vary=lengths_vary)
        # A thread of autograd's own would only be waited for, and the two would pass Python's lock
        # back and forth: 5 to 6% of a step bound by launches.
        with attention, torch.autograd.set_multithreading_enabled(False):
            yield


def take_workspaces(device: torch.device, dtype: torch.dtype) -> None:
    """Let cuBLAS and cuBLASLt take their workspaces now, at the front of what PyTorch reserves.

    Taken in the first step they would lie amid its activations, and split the room these leave.
    """
    if device.type == "cuda":
        ones = torch.ones(64, 64, dtype=dtype, device=device)
        functional.linear(ones, ones, ones[0])  # with a bias: cuBLASLt's
        torch.mm(ones, ones)  # cuBLAS's


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Run only kernels that repeat bit for bit inside, if wanted."""
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        # cuBLAS reads it when its first handle is made
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# -- where finished gradients go -------------------------------------------------------------------


@final
class StoredGradients(GradientSink):
    """Gradients wait in the store's arrays "grad" until the norm is known.

    rounds_resident: resident blocks' gradients are rounded into the store, too. With several groups
        they stay in their accumulators.
    """

    def __init__(self, store: Store, *, rounds_resident: bool) -> None:
        super().__init__()
        self.store, self._rounds_resident = store, rounds_resident

    def place(self, block: int) -> Tensor | None:
        if self.store.is_resident(block) and not self._rounds_resident:
            return None
        return self.store.array("grad", block)


class GradientRing:
    """A few host buffers in turn, each of `numel` elements: those of the largest streamed block."""

    def __init__(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> None:
        nbytes = LANDING_BUFFERS * numel * dtype.itemsize
        self._slab = Slab("gradient staging", nbytes, pinned=pinned, threads=1)
        self.buffers = list(self._slab.bytes[:nbytes].view(dtype).view(LANDING_BUFFERS, numel))
        self._users: list[int | None] = [None] * LANDING_BUFFERS
        self._turn = 0

    def take(self, block: int) -> tuple[Tensor, int | None]:
        """(the next buffer, the block whose update must be done before it is overwritten)."""
        self._turn = (self._turn + 1) % LANDING_BUFFERS
        user, self._users[self._turn] = self._users[self._turn], block
        return self.buffers[self._turn], user

    def close(self) -> None:
        self.buffers.clear()
        self._slab.close()


@final
class AppliedGradients(GradientSink):
    """Each block is updated as soon as its gradient has landed: without clipping, or in the second
    pass of two-pass clipping, which does not visit blocks whose gradients the first has stored.

    Attributes:
        ring: landing buffers of streamed blocks.
        stored: blocks whose gradients wait in the store's arrays "grad" instead.
        apply: queues the update of a block, with the step's learning rate and clip factor.
    """

    def __init__(
        self,
        store: Store,
        compute: Compute,
        ring: GradientRing,
        updater: Updater,
        stored: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.store, self.compute, self.ring, self.updater = store, compute, ring, updater
        self.stored = stored
        self.apply: Callable[[Gradient], None] | None = None  # set for each step

    def place(self, block: int) -> Tensor | None:
        if block in self.stored:
            return self.store.array("grad", block)
        if self.store.is_resident(block):
            return None  # it is updated where its accumulator is
        buffer, user = self.ring.take(block)
        if user is not None:
            event = Event()
            with self.compute.blocked("update", event):
                # wait: that update still reads this buffer
                event.waited = self.store.timed(lambda: self.updater.wait_ready(user))
        return buffer[: self.store.trained_span(block).numel]

    def take(self, gradient: Gradient) -> None:
        super().take(gradient)  # first: an update that was begun must be known of
        if gradient.block not in self.stored:
            assert self.apply is not None
            self.apply(gradient)


# -- opening ---------------------------------------------------------------------------------------

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
    clips: bool,  # to the global norm, until which gradients are stored; else they are applied
    device: torch.device,
    settings: Settings,
    seed: int,
    balancer: Balancer | None,
    kept_attention: int,  # bytes a token
    world: World,
    resources: ExitStack,  # closes in reverse order: a user before what it uses
) -> EngineParts:
    """Allocate all memory, start all threads (their waits: streams.py). Raises OutOfMemory."""
    anatomy, dtype, compute = skeleton.anatomy, PRECISIONS[precision], Compute(device)
    layouts, ends = layouts_of(anatomy), (anatomy.first_trained, anatomy.embed_feeds_head)
    stored = settings.stored(len(layouts) - 2, *ends, clips)
    with naming_the_gpu("the resident blocks' state"):
        take_workspaces(device, dtype)
        place = partial(open_store, layouts, optimizer, precision, settings, device=device)
        store = resources.enter_context(place(gradients=stored, world=world))
    updater, sink = _updates(store, optimizer, compute, stored, settings, resources)
    download = Lane("download", device)  # gradients and activation checkpoints, GPU to host
    upload = Lane("upload", device)  # weights and fp32 accumulators, host to GPU
    fetch = Lane("fetch", device)  # offloaded activations, back to the GPU
    lanes = compute, download, fetch
    checkpoints = _checkpoints(settings, anatomy, dtype.itemsize, kept_attention, lanes)
    resources.callback(checkpoints.close)  # after the lanes, which copy from and to its memory
    kept = HostWeights(store, settings, dtype, download) if world.across is not None else None
    if kept is not None:
        resources.callback(kept.close)
    for lane in (download, upload, fetch):
        resources.callback(lane.close)
    with naming_the_gpu("the weights' slots and the gradients' accumulators"):
        copies = StoredWeights(store, upload, updater)
        given = skeleton, copies, settings, dtype, compute, kept, resources
        source, peers, make, more = _of_ranks(*given)
        streamer = Streamer(anatomy, store, dtype, compute, source)
        gradients = make(
            [layout.trained for layout in layouts],
            dtype,
            resident=store.resident,
            own=range(own_sums(sums_on_device(settings, len(layouts)), anatomy.embed_feeds_head)),
            compute=compute,
            upload=upload,
            download=download,
            sink=sink,
            host_sums=partial(store.array, "grad_sum") if "grad_sum" in store.arrays else None,
        )
        skeleton.move_buffers(device)
    # before lanes end, one of which may wait for a rank that does not come
    resources.callback(store.stop_waiting, MegaTrainError("the engine is closed"))
    if balancer is not None:
        balancer.open(skeleton.layers, device, resources)
    passes = Passes(skeleton, streamer, gradients, checkpoints, settings, seed, balancer, peers)
    named = {lane.name: lane for lane in (download, upload, fetch, updater.lane, *more)}
    return EngineParts(
        store, compute, named, updater, sink, checkpoints, streamer, gradients, passes, balancer
    )


def _checkpoints(
    settings: Settings,
    anatomy: Anatomy,
    itemsize: int,
    kept_attention: int,
    lanes: tuple[Compute, Lane, Lane],
) -> Checkpoints:
    """The keeper of activation checkpoints. lanes: as `Offload` takes them."""
    codec = CODECS.get(settings.activations)
    if not settings.offload_activations:
        return OnDevice(codec)
    retained = settings.retained, settings.retained_on_host
    where = graphs_of_layers(len(anatomy.blocks) - 2, *retained, anatomy.first_trained)
    row = kept_row_bytes(settings.activations, anatomy.hidden_size, itemsize)
    keeps = zip(where, settings.keeps(where), strict=True)
    rows = [row + keep * kept_attention for place, keep in keeps if place == "nowhere"]
    return Offload(rows, where.count("host"), *lanes, codec)


def _of_ranks(
    skeleton: Skeleton,
    copies: StoredWeights,
    settings: Settings,
    dtype: torch.dtype,
    compute: Compute,
    kept: HostWeights | None,
    resources: ExitStack,
) -> tuple[WeightSource, Peers, Callable[..., Gradients], list[Lane]]:
    """The source of weights, the peers, the class of gradients, and a lane for exchanges."""
    world = copies.store.world
    if world.is_alone:
        return copies, Peers(), Gradients, []
    exchange = Exchange(world, copies.store.layouts, compute, getattr(torch, settings.wire))
    resources.callback(exchange.close)  # before what its jobs read and write
    trades = world, skeleton.config, exchange.swap
    peers = Peers(world, ContextParallel(*trades) if world.cp_size > 1 else None)
    source = GatheredWeights(copies, exchange, dtype, settings.replicated, kept)
    return source, peers, partial(SharedGradients, exchange), [exchange.lane]


def _updates(
    store: Store,
    optimizer: Optimizer,
    compute: Compute,
    stored: Collection[int],  # blocks whose gradients wait for the norm
    settings: Settings,
    resources: ExitStack,
) -> tuple[Updater, StoredGradients | AppliedGradients]:
    """The updater of the weights, and the sink that brings it the gradients."""
    ring, blocks = None, range(len(store.layouts))
    if len(stored) < len(blocks):
        applied = (b for b in blocks if not (store.is_resident(b) or b in stored))
        largest = max((store.trained_span(block).numel for block in applied), default=0)
        ring = GradientRing(largest, store.arrays["weight"].dtype, pinned=compute.is_cuda)
        resources.callback(ring.close)  # after the updates that read it
    updater = Updater(store, optimizer, settings.update_threads, compute)
    resources.callback(updater.close)  # after the lanes, opened later: uploads wait for updates
    with naming_the_gpu("the update's workspace"):
        updater.take_libraries()
    if ring is not None:
        return updater, AppliedGradients(store, compute, ring, updater, stored)
    rounds_resident = settings.groups == 1 or not store.world.is_alone
    return updater, StoredGradients(store, rounds_resident=rounds_resident)


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
    gradients: Collection[int],
    device: torch.device,
    world: World = ALONE,
) -> Store:
    """The arrays of every block, each on its tier. gradients: of blocks where they are stored."""
    dtype, blocks, several = PRECISIONS[precision], len(layouts), settings.groups > 1
    resident, summed = min(settings.resident, blocks), sums_on_device(settings, blocks)
    kept = [ArraySpec("weight", dtype, transferred=True, whole=True)]
    if dtype == torch.bfloat16:
        kept.append(ArraySpec("remainder", torch.int16))  # the master's other half (optim/split.py)
    kept += optimizer.state_arrays
    grad = [ArraySpec("grad", dtype, transferred=True, blocks=gradients)] if gradients else []
    # between groups the other blocks' accumulators wait in host RAM
    travel = several and summed < blocks
    stay = range(summed, blocks)
    sums = [ArraySpec("grad_sum", torch.float32, transferred=True, blocks=stay)] if travel else []
    far = blocks_on_nvme(blocks, resident, settings.nvme_blocks)
    names = [spec.name for spec in kept if spec.name not in IN_MEMORY]
    return Store(
        layouts,
        [*kept, *grad, *sums],
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


def open_master(store: Store, block: int, master: Tensor) -> None:
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
