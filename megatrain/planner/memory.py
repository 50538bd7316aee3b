"""Tables of bytes: what a run holds on every tier under given choices. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatrain.machine.hardware import (
    COMMUNICATOR_HOST_BYTES,
    COMPILER_BYTES,
    CUDNN_LIBRARY_BYTES,
    PACKAGES_BYTES,
    PAGE_TABLE_SHARE,
    PINNED_SHARE,
    Hardware,
    communicator_bytes,
)
from megatrain.memory.sizes import (
    BLOCK_ALIGNMENT,
    IN_MEMORY,
    SHARE_BUFFERS,
    blocks_on_nvme,
    exchange_bytes,
    owned,
    padded,
    share,
    shared_bytes,
    slab_bytes,
    stages,
)
from megatrain.planner.activations import SUM_BYTES, WEIGHT_BYTES, Activations
from megatrain.planner.cost.shape import ModelShape
from megatrain.planner.job import Choices, Job
from megatrain.schedule import LANDING_BUFFERS, own_sums, slot_sizes, sum_buffers, summed_blocks
from megatrain.settings import WIRES
from megatrain.storage.hashed_file import SMALL_FILES_BYTES

# Beside the weight in bf16; in float32 the weight is the master itself.
REMAINDER_BYTES = {"bfloat16": 2, "fp8": 2, "float32": 0}
# Host memory with which the driver records GPU memory in use: 20 MiB of 89 GiB, 68 of 125.
GPU_RECORDS_SHARE = 0.4 / 1024
# Rows of the device that the driver counts and PyTorch does not.
COMMUNICATORS = "communicators"
NOT_ALLOCATED = ("allocator slack", "CUDA context", COMMUNICATORS)
# Bytes that a CPU's kernel libraries hold at the peak for each weight of the head, in forms of
# their own: fitted to the host's peak of six runs of 8 and 4 layers with 4 and 25 million weights
# in the head, which it predicts to 1%.
CPU_HEAD_BYTES = {"bfloat16": 4.6, "fp8": 4.6, "float32": 2.6}
Combined = Callable[[Iterable[int]], int]  # sum or max
OTHERS_TABLES = "page tables for other ranks' weights"
HEAD_COPIES, CONSTANTS = "the libraries' forms of the head", "constants"


@dataclass(frozen=True)
class Layout:
    """The memory of a run on every tier under given choices. Tables map arrays to bytes. The
    activations' part does not depend on where blocks are, so layouts that differ only in that share
    it (`moved`); the `choices` of that part may therefore place blocks elsewhere."""

    choices: Choices
    activations: Activations

    @classmethod
    def of(cls, choices: Choices, job: Job, shape: ModelShape, hardware: Hardware) -> Layout:
        return cls(choices, Activations(choices, job, shape, hardware))

    def moved(self, **places: Any) -> Layout:
        """The layout with other choices of where blocks, accumulators and NVMe arrays are."""
        return replace(self, choices=replace(self.choices, **places))

    @property
    def job(self) -> Job:
        return self.activations.job

    @property
    def shape(self) -> ModelShape:
        return self.activations.shape

    @property
    def hardware(self) -> Hardware:
        return self.activations.hardware

    @cached_property
    def stored(self) -> frozenset[int]:
        """Blocks whose gradients wait until the global norm is known."""
        about = self.shape.layers, self.shape.first_trained, self.shape.tied
        return self.choices.stored(*about, self.job.clipping)

    def _owned_of(self, blocks: Iterable[int], stored: bool) -> Iterator[int]:
        """Elements of those whose gradients are stored, or of the others."""
        return (self.owned[block] for block in blocks if (block in self.stored) == stored)

    # -- where it computes -------------------------------------------------------------------------

    @property
    def device(self) -> dict[str, int]:
        """Arrays where the model computes: the GPU, or host RAM when training on the CPU."""
        return self._blocks | self.activations.device

    @cached_property
    def device_bytes(self) -> int:
        return sum(self._blocks.values()) + self.activations.device_bytes

    @cached_property
    def _blocks(self) -> dict[str, int]:
        """The rows of `device` that depend on where blocks and gradient accumulators are."""
        choices, shape, weight = self.choices, self.shape, self.activations.weight
        several = self.job.size > 1
        # of several ranks, each has its share alone of a resident block: all pass through slots
        streamed_from, own = (0, choices.replicated) if several else (choices.resident, 0)
        slots = slot_sizes(self.padded, streamed_from, shape.tied, own)
        sizes = self.padded if several else shape.trained_numel
        # accumulators that stay for the whole step, and the buffers that other blocks' pass through
        own = own_sums(self._summed, shape.tied)
        sums = sum(sizes[:own]) + sum(sum_buffers(sizes[own:], several or choices.groups > 1))
        if several and choices.groups > 1:  # and shares, on their way to the host and back
            sums += sum(sum_buffers([size // self.job.size for size in sizes[own:]], True))
        # a gradient leaves for the host once it is a rank's share
        leaving = share(max(shape.block_numel), self.job.size) if several else max(sizes)
        table = {
            "layer slots": sum(slots.layers) * weight,
            "embedding and head slot": sum(slots.edges) * weight,
            **({"replicated weights": sum(slots.own) * weight} if slots.own else {}),
            "resident state": self._resident_state,
            "gradient sums": sums * SUM_BYTES,
            "gradient staging": leaving * weight,
        }
        for one in self.job.besides:
            table[f"{one.name}'s slots"] = one.device + one.token * choices.micro_batch_tokens
        if several:
            table |= self._exchange
        if shape.constant_bytes:
            table[CONSTANTS] = shape.constant_bytes
        if self.job.whole_update is not None:  # its matmuls run on a stream with its own workspace
            workspace = self.hardware.workspace_bytes if self.hardware.gpu else 0
            table["update's scratch"] = self.job.whole_update.device_scratch + workspace
        return table

    @property
    def padded(self) -> tuple[int, ...]:
        """Elements of every block with whole shares for all ranks."""
        return padded(self.shape.block_numel, self.job.size)

    @property
    def owned(self) -> tuple[int, ...]:
        """Elements of every block's trained tensors that are here: all, or a rank's share."""
        shape = self.shape
        return owned(shape.block_numel, shape.trained_numel, self.job.size)

    @property
    def owned_weights(self) -> tuple[int, ...]:
        """The same of weights, which frozen tensors have, too."""
        return owned(self.shape.block_numel, self.shape.block_numel, self.job.size)

    @cached_property
    def read_blocks(self) -> frozenset[int]:
        """Blocks whose weights a host's ranks have in common, and upload whole."""
        if not self.job.reads:
            return frozenset()
        return frozenset(range(self.choices.resident, len(self.shape.block_numel)))

    @property
    def _exchange(self) -> dict[str, int]:
        """Buffers through which ranks exchange shares."""
        largest = max(self.padded)
        gathered = (n for b, n in enumerate(self.padded) if b not in self.read_blocks)
        norms = largest // BLOCK_ALIGNMENT * SUM_BYTES  # of rows
        table = {"sums of other ranks": exchange_bytes(largest) + norms}
        if share := max(gathered, default=0) // self.job.size:
            table["shares on their way"] = SHARE_BUFFERS * share * self.activations.weight
        if self.hardware.gpu:
            table[COMMUNICATORS] = communicator_bytes(self.job.communicators, self.job.peers)
        return table

    @property
    def crossing(self) -> tuple[int, int]:
        """Bytes that cross between hosts in a step, whoever owns them: of weights, which are
        gathered once, and of sums."""
        choices, whole = self.choices, sum(self.padded)
        applied = (n for b, n in enumerate(self.padded) if b not in self.stored)
        sums = whole + (sum(applied) if choices.second_backward else 0)
        sums += (choices.groups - 1) * sum(self.padded[self._summed :])
        return whole * self.activations.weight, sums * WIRES[self.job.wire]

    @property
    def _summed(self) -> int:
        """Number of blocks, the first ones, whose fp32 accumulators stay between groups."""
        choices, blocks = self.choices, len(self.shape.block_numel)
        return summed_blocks(blocks, choices.groups, choices.resident, choices.sums_on_device)

    @property
    def _resident_state(self) -> int:
        choices, whole = self.choices, self.job.whole_update
        each = state_bytes_per_parameter(self.job)
        # with several groups, whole accumulators that stay on the device hold the gradient already
        gradients = 0
        if choices.groups == 1 or self.job.size > 1:
            stored = self._owned_of(range(choices.resident), stored=True)
            gradients = sum(stored) * self.activations.weight
        numel = sum(self.owned[: choices.resident])
        frozen = sum(self.owned_weights[: choices.resident]) - numel
        beside = frozen * self.activations.weight + gradients
        if whole is None:
            return int(numel * each) + beside
        # arrays that differ from block to block are counted block by block, not on average
        of_blocks = sum(whole.of_blocks(0, choices.resident).values())
        return int(numel * (each - whole.bytes_per_parameter)) + of_blocks + beside

    # -- host RAM ----------------------------------------------------------------------------------

    @cached_property
    def host(self) -> dict[str, int]:
        """Arrays in host RAM: those of the streamed blocks, and the process itself."""
        choices, whole, activations = self.choices, self.job.whole_update, self.activations
        streamed = range(choices.resident, len(self.owned))
        elements = self._elements(streamed, sum)
        table = {name: int(elements(name) * each) for name, each in self.array_bytes.items()}
        if whole is not None:
            table |= whole.of_blocks(choices.resident)
        table = {name: size - self.nvme.get(name, 0) for name, size in table.items()}
        if whole is not None and streamed:
            table["update's scratch"] = whole.host_scratch
        # gradients that are not stored pass through a few buffers, of the largest block each
        landing = LANDING_BUFFERS * max(self._owned_of(streamed, stored=False), default=0)
        # arrays on NVMe pass through buffers of the largest
        largest, count = self.far_arrays(self.far_blocks, max), len(self.far_blocks)
        staged = sum(stages(count) * size for size in largest.values())
        travelling = self.owned[self._summed :] if choices.groups > 1 else ()
        table |= {
            "gradient staging": landing * activations.weight,
            "NVMe staging": int(staged),
            "gradient sums": sum(travelling) * SUM_BYTES,
            **activations.host,
        }
        if self.job.hosts > 1:  # so that weights cross the network once a step
            in_turn = sum(self.padded[choices.replicated :])
            table["weights of all hosts"] = in_turn * activations.weight // self.job.ranks
        table |= {f"{one.name}'s weights": one.host for one in self.job.besides}
        rounded = {name: slab_bytes(size) for name, size in table.items() if size}
        if self.read_blocks:  # one mapping, of which each rank counts an equal part
            numels = [self.shape.block_numel[block] for block in self.read_blocks]
            common = shared_bytes([n * activations.weight for n in numels], self.job.ranks)
            rounded["weight"] = slab_bytes(common) // self.job.ranks
        return rounded | self._process

    @cached_property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def _process(self) -> dict[str, int]:
        """The process at its start, libraries, and what these keep of the device."""
        job, shape, hardware = self.job, self.shape, self.hardware
        libraries = hardware.library_bytes
        libraries += COMPILER_BYTES if job.compiled or job.fused_loss else 0
        if hardware.gpu:
            # attention in float32 loads nothing of cuDNN
            libraries -= CUDNN_LIBRARY_BYTES if job.precision == "float32" else 0
            libraries += int(GPU_RECORDS_SHARE * self.device_bytes)
            libraries += len(job.communicators) * COMMUNICATOR_HOST_BYTES
            libraries += PACKAGES_BYTES if shape.package_kernels else 0
        table = {
            "process at start": hardware.resident_bytes,
            "CUDA and compiler libraries": libraries,
        }
        if self.read_blocks:  # each rank maps what it shares, and has room for tables of its part
            of_others = sum(self.shape.block_numel[block] for block in self.read_blocks)
            of_others -= of_others // job.ranks
            each = PAGE_TABLE_SHARE + (PINNED_SHARE if hardware.gpu else 0)
            table[OTHERS_TABLES] = round(of_others * self.activations.weight * each)
        if hardware.gpu is None:
            table[HEAD_COPIES] = round(CPU_HEAD_BYTES[job.precision] * shape.head_matrix)
        return table

    def _elements(self, blocks: Sequence[int], combined: Combined) -> Callable[[str], int]:
        """Elements of an array in these blocks, combined: only the weight has frozen ones."""
        trained = combined(map(self.owned.__getitem__, blocks))
        weight = trained
        if self.shape.frozen:
            weight = combined(map(self.owned_weights.__getitem__, blocks))
        stored = combined([0, *self._owned_of(blocks, stored=True)])
        numels = {"weight": weight, "grad": stored}
        return lambda array: numels.get(array, trained)

    @cached_property
    def array_bytes(self) -> dict[str, float]:
        """Bytes per element of a streamed block's arrays, without those of `whole_update`."""
        table: dict[str, float] = {
            "weight": self.activations.weight,
            "remainder": REMAINDER_BYTES[self.job.precision],
            **dict(self.job.state_bytes),
            "grad": self.activations.weight if self.stored else 0,
        }
        return {name: each for name, each in table.items() if each}

    # -- NVMe --------------------------------------------------------------------------------------

    @cached_property
    def nvme(self) -> dict[str, int]:
        """Arrays on NVMe."""
        return {name: int(size) for name, size in self.far_arrays(self.far_blocks, sum).items()}

    @cached_property
    def far_blocks(self) -> tuple[int, ...]:
        """Blocks that keep arrays on NVMe."""
        choices = self.choices
        return blocks_on_nvme(len(self.shape.block_numel), choices.resident, choices.nvme_blocks)

    def far_arrays(self, blocks: Sequence[int], combined: Combined) -> dict[str, float]:
        """Bytes of each array on NVMe in these blocks, combined: their sum, or the largest."""
        if not blocks:
            return {}
        elements = self._elements(blocks, combined)
        arrays = {name: elements(name) * each for name, each in self.array_bytes.items()}
        if self.job.whole_update is not None:
            for name, sizes in self.job.whole_update.state_bytes:
                arrays[name] = combined(sizes[block] for block in blocks)
        return {name: size for name, size in arrays.items() if name not in IN_MEMORY}


def state_bytes_per_parameter(job: Job) -> float:
    """Weight, remainder and the optimizer's arrays."""
    of_tensors = job.whole_update.bytes_per_parameter if job.whole_update is not None else 0.0
    kept = WEIGHT_BYTES[job.precision] + REMAINDER_BYTES[job.precision]
    return kept + sum(size for _, size in job.state_bytes) + of_tensors


def disk_bytes(job: Job, shape: ModelShape) -> dict[str, int]:
    """Checkpoints at the peak: those kept, an older `best`, and the one being written."""
    copies = job.checkpoints_kept + int(job.keeps_best) + 1
    if job.checkpoints_written is not None:
        copies = min(copies, job.checkpoints_written)
    tensors = int(shape.parameters * state_bytes_per_parameter(job)) + shape.constant_bytes
    frozen = 0  # as their source has them, or as they were drawn
    if shape.frozen is not None:
        drawn = shape.frozen.parameters * WEIGHT_BYTES[job.precision]
        frozen = drawn if job.draws_weights else shape.frozen.saved_bytes
    once = {"weights carried along": shape.carried_bytes, "frozen weights": frozen}
    return (
        {f"checkpoint {i + 1}": tensors for i in range(copies)}
        | {name: nbytes for name, nbytes in once.items() if nbytes * copies}
        | {"their other files, at most": copies * SMALL_FILES_BYTES}
    )
