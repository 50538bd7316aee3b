"""Predicted seconds of an optimizer step: what each block asks of each part of the machine, and how the engine's order overlaps it.

Rates are those of a machine profile (machine.py), work is the model's (models/work.py), the order is the engine's (simulation.py).
tests/test_timing.py holds all of it to measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatrain import simulation
from megatrain.activations import UNCHANGED
from megatrain.machine import UPDATE_BYTES, MachineProfile, interpolate
from megatrain.planner_bytes import (
    SUM_BYTES,
    WEIGHT_BYTES,
    boundary_row_bytes,
    far_arrays,
    far_blocks,
    far_inputs,
    graph_bytes,
    sent_row_bytes,
    state_bytes_per_parameter,
)
from megatrain.planner_job import Choices, Job
from megatrain.retention import Where, graphs_of_layers
from megatrain.simulation import BlockTasks, Course, Dials

if TYPE_CHECKING:
    from megatrain.models.shape import ModelShape
    from megatrain.models.work import LayerWork, Pass

# Held to layers of 2B to 14B on an H200 (tests/test_timing.py).
CPU_PRODUCTS_SHARE = 0.91  # of a lone matrix product's rate that a layer's products reach on a CPU; on an H200 it was all of it
# With fp8 products, whose lone rate layers reach: what quantising the weights moves, in bytes a parameter of every micro-batch (half of it
# forward), and how much more than in bf16 moves between products. From two steps of a 7.6B model with micro-batches of 4k and 8k tokens,
# before gradients had kernels of their own; with them the prediction is right to 4%.
FP8_WEIGHT_BYTES = 35.0
FP8_TRAFFIC = 1.45
# How much longer a GPU's eager kernels take than what they read and write does at the rate of its memory: many change a type, broadcast
# or turn round what lies across. Traces of seven steps of 0.2B to 0.8B models on an H200: 1.5 (float32) to 1.9; a 7.6B model's step: 1.5.
EAGER_TRAFFIC = 1.6
# The same on a CPU, at the rate of writing to memory fresh from the kernel, where every larger tensor lies (hardware.keep_heap_small), but
# not all that is read: ten steps in float32, 0.3 to 1.1, mostly 0.7 to 0.9.
CPU_TRAFFIC = 0.8
# A kernel of a layer costs the host so many bare launches, with the module around it or the compiled graph, which has fewer kernels but
# guards, and wrappers of autograd's. On an H100's host a compiled layer of 37 kernels took 3.3 ms, forward and backward, a launch 8 us.
# Steps of 10,500 eager kernels took 0.35 to 0.46 s where a launch takes 6.9 to 10 us; layers alone, without an engine and updates beside, a
# fifth less.
LAUNCHES_PER_KERNEL = {"eager": 4.6, "compiled": 10.0}
# Of the bus's rate, for what leaves in forward while the host updates as fast as their common memory lets it: a 14.8B model's step waited
# 0.29 s for the graphs of ten layers.
BESIDE_UPDATE = 0.75
ATTENTION_FORWARD_SHARE = 2 / 7  # of attention's time: two products a pair forward, five backward
ROUNDING = 1e-9  # of a quotient that is whole but for floating point
WORTH_NAMING = 0.05  # a phase is bound by what it waits for if it waits this share of its time


@dataclass(frozen=True)
class Timing:
    """A steady step, predicted. Seconds unless said otherwise."""

    seconds: float
    phases: dict[str, float]  # update (resident blocks, on the device), forward, head, backward, second backward; they add up to the step
    waits: dict[str, float]  # of the computation, by what it waits for: upload, update, download, nvme
    bound_by: dict[str, str]  # what each phase spends its time on: compute, upload, update, download or nvme
    tokens_per_s: float  # of the data, without padding
    tflops: float  # 6 x all parameters x these, in TFLOP/s

    @property
    def busy(self) -> float:
        """Share of the step in which the device computes."""
        return 1 - sum(self.waits.values()) / self.seconds


def predict(choices: Choices, job: Job, shape: ModelShape, machine: MachineProfile) -> Timing:
    """Play one steady step through. Deterministic arithmetic: no device is asked."""
    blocks, dials = block_tasks(choices, job, shape, machine), _dials(choices, job, shape)
    course = (simulation.overlapped if machine.upload else simulation.in_turn)(blocks, dials)
    seconds = course.seconds
    tokens_per_s = job.trained_tokens(choices.micro_batch_tokens) / seconds
    return Timing(
        seconds=seconds,
        phases=course.phases,
        waits={wait: sum(waits[wait] for waits in course.waits.values()) for wait in simulation.WAITS},
        bound_by={phase: _bound(course, phase) for phase in course.phases},
        tokens_per_s=tokens_per_s,
        tflops=6 * shape.parameters * tokens_per_s / 1e12,
    )


def at_least(choices: Choices, job: Job, shape: ModelShape, machine: MachineProfile) -> float:
    """Seconds that `predict` cannot fall below, found in a fraction of its time."""
    blocks, dials = block_tasks(choices, job, shape, machine), _dials(choices, job, shape)
    return simulation.at_least(blocks, dials) if machine.upload else simulation.in_turn(blocks, dials).seconds


def _dials(choices: Choices, job: Job, shape: ModelShape) -> Dials:
    return Dials(
        groups=choices.groups,
        micro_batches=micro_batches(choices, job),
        resident=choices.resident,
        sums_on_device=choices.sums_on_device,
        clipping=job.clipping,
        tied=shape.tied,
        second_backward=choices.second_backward,
        graphs_on_host=choices.retained_on_host,
    )


def micro_batches(choices: Choices, job: Job) -> float:
    """Micro-batches of a group, on average."""
    return job.mean_micro_batches(choices.micro_batch_tokens) / choices.groups


def tokens_of_one(choices: Choices, job: Job) -> float:
    """Tokens of a micro-batch, on average."""
    most = choices.micro_batch_tokens
    return min(most, job.computed_tokens(most) / job.mean_micro_batches(most))


def _bound(course: Course, phase: str) -> str:
    waits = course.waits[phase]
    worst = max(waits, key=lambda name: waits[name])
    return worst if waits[worst] > WORTH_NAMING * course.phases[phase] else "compute"


# -- what each block asks -----------------------------------------------------------------------------------------------------------


def block_tasks(choices: Choices, job: Job, shape: ModelShape, machine: MachineProfile) -> list[BlockTasks]:
    """The tasks of every block for a group of micro-batches."""
    costs = _Costs(choices, job, shape, machine)
    middle = [costs.layer(block) for block in range(1, len(shape.block_numel) - 1)]
    return [costs.embedding(), *middle, costs.head()]


class _Costs:
    """Seconds of one job's parts on one machine, under given choices."""

    def __init__(self, choices: Choices, job: Job, shape: ModelShape, machine: MachineProfile) -> None:
        self.choices, self.job, self.shape, self.machine = choices, job, shape, machine
        self.weight = WEIGHT_BYTES[job.precision]
        self.on_gpu = machine.upload > 0
        self.far = frozenset(far_blocks(choices, shape))
        self.fp8_share = job.fp8_share if job.precision == "fp8" and machine.fp8 else 0.0
        self.layer_traffic = 1 + self.fp8_share * (FP8_TRAFFIC - 1)
        self.micro_batches = micro_batches(choices, job)
        self.tokens = tokens_of_one(choices, job)
        self.graphs = graphs_of_layers(len(shape.block_numel) - 2, choices.retained, choices.retained_on_host)
        self.kept_bytes = self._kept_bytes()
        self.far_share = far_inputs(choices, shape) / max(1, self.graphs.count("nowhere"))  # of a recomputed layer's input
        self.disk_read, self.disk_write = (max(1.0, job.nvme_drives * rate) for rate in (machine.disk_read, machine.disk_write))
        self.host_update_rate, self.update_in_memory = self._host_update_rate()
        self.device_update_rate = machine.device_update * self._update_scale if self.on_gpu else self.host_update_rate
        self.up, self.down = self._transfer_rates()
        self.leaving = self._leaving_rate()
        self._known: dict[tuple[int, int, Where, float, bool, bool], BlockTasks] = {}

    # -- computation, of one micro-batch ---------------------------------------------------------------------------------------

    def layer(self, number: int) -> BlockTasks:
        """Recomputation leaves out the products whose value no gradient needs, cheap retention repeats what lies between products."""
        work, tokens, graph = self.shape.work.layers[number - 1], self.tokens, self.graphs[number - 1]
        kept = self.kept_bytes[number - 1]
        key = (id(work), self.shape.block_numel[number], graph, kept, number < self.choices.resident, number in self.far)
        if key not in self._known:  # layers are mostly of one kind
            numel, chunk = self.shape.block_numel[number], self.choices.layer_chunk_tokens or tokens
            rate, quantising = self._layer_rate(min(tokens, chunk)), self._quantising(numel)
            adding = (math.ceil(tokens / chunk - ROUNDING) - 1) * self._adding(numel)
            forward, backward = (seconds + quantising for seconds in self._forward_and_backward(work, tokens, rate, self.layer_traffic))
            again = forward - work.skippable_flops * tokens / rate if graph == "nowhere" else self._again(work, tokens)
            gathering = 2 * kept / self.machine.memory if graph == "host" else 0.0
            coding = self._coding() if graph == "nowhere" else 0.0
            offloaded = kept if self.choices.offload else 0.0
            block = self._block(number, forward + gathering + coding, backward + again + adding + coding, offloaded)
            self._known[key] = self._with_drive(block, offloaded) if graph == "nowhere" else block
        return self._known[key]

    def _again(self, work: LayerWork, tokens: float) -> float:
        """What a retained layer's backward computes once more."""
        return work.cheap_bytes * tokens / self.machine.memory if self.choices.cheap_retention else 0.0

    def _coding(self) -> float:
        """Keeping a layer's input in fewer bits, or bringing it back: one form is read, the other written."""
        if self.job.activations == UNCHANGED:
            return 0.0
        both = self.shape.hidden_size * self.weight + boundary_row_bytes(self.job, self.shape)
        return self.tokens * both / self.machine.memory

    def embedding(self) -> BlockTasks:
        """In backward it runs once more: nothing of it is kept."""
        forward, backward = self._forward_and_backward(self.shape.work.embed, self.tokens, self._matmul_rate(0))
        return self._block(0, forward, forward + backward)

    def head(self) -> BlockTasks:
        """Forward and backward at once, chunk by chunk, each of which adds up its gradient of the weights."""
        chunk = min(self.choices.head_chunk_tokens, self.tokens)
        chunks = self.tokens / chunk
        adding = self._adding(self.shape.block_numel[-1] + (self.shape.block_numel[0] if self.shape.tied else 0))
        both = chunks * sum(self._forward_and_backward(self.shape.work.head, chunk, self._matmul_rate(chunk))) + (chunks - 1) * adding
        return self._block(len(self.shape.block_numel) - 1, 0.0, both)

    def _forward_and_backward(self, work: LayerWork, tokens: float, rate: float, traffic: float = 1.0) -> tuple[float, float]:
        """Seconds of `tokens` at once, with matrix products at `rate` FLOP/s and `traffic` times the bytes of bf16 between them."""
        attention = 3 * work.forward.attention_flops * tokens / interpolate(self.machine.attention, self.job.seq_len)
        return (
            self._pass(work.forward, tokens, rate, traffic, attention * ATTENTION_FORWARD_SHARE),
            self._pass(work.backward, tokens, rate, traffic, attention * (1 - ATTENTION_FORWARD_SHARE)),
        )

    def _pass(self, work: Pass, tokens: float, rate: float, traffic: float, attention: float) -> float:
        """Seconds of one direction. A GPU computes while the host launches the next kernels; a CPU does one after the other."""
        kind = "compiled" if self.job.compiled else "eager"
        moved, kernels = (work.compiled_bytes, work.compiled_kernels) if self.job.compiled else (work.eager_bytes, work.eager_kernels)
        if not self.job.compiled:
            traffic *= EAGER_TRAFFIC if self.on_gpu else CPU_TRAFFIC
        memory = self.machine.memory if self.on_gpu else self.machine.fresh
        computing = attention + work.matmul_flops * tokens / rate + traffic * moved * tokens / memory
        launching = kernels * LAUNCHES_PER_KERNEL[kind] * self.machine.launch
        return max(computing, launching) if self.on_gpu else computing + launching

    def _layer_rate(self, tokens: float) -> float:
        """FLOP/s of the layers' products over so many tokens."""
        rate = self._matmul_rate(tokens)
        return 1 / (self.fp8_share / self.machine.fp8 + (1 - self.fp8_share) / rate) if self.fp8_share else rate

    def _quantising(self, numel: int) -> float:
        """Finding the fp8 form of a layer's weights, forward or backward."""
        return self.fp8_share * numel * FP8_WEIGHT_BYTES / 2 / self.machine.memory

    def _matmul_rate(self, tokens: float) -> float:
        rates = self.machine.matmul_fp32 if self.job.precision == "float32" else self.machine.matmul
        return (1.0 if self.on_gpu else CPU_PRODUCTS_SHARE) * interpolate(rates, tokens)

    def _adding(self, numel: int) -> float:
        """Adding a gradient to its fp32 sum: one is read, the other read and written."""
        return numel * (self.weight + 2 * SUM_BYTES) / self.machine.memory

    # -- all of a block --------------------------------------------------------------------------------------------------------

    def _block(self, number: int, forward: float, backward: float, offloaded: float = 0.0) -> BlockTasks:
        """The tasks of a block whose computation takes so long for one micro-batch, of which so many bytes go to the host and return."""
        numel, dials = self.shape.block_numel[number], self.choices
        backward += self._adding(numel)
        streamed, resident = (0, numel) if number < dials.resident else (numel, 0)
        offloaded *= self.micro_batches
        return BlockTasks(
            forward=self.micro_batches * forward,
            backward=self.micro_batches * backward,
            finish=numel * (SUM_BYTES + 2 * self.weight) / self.machine.memory,  # read the sum, write the gradient and measure it
            upload=streamed * self.weight / self.up,
            download=streamed * self.weight / self.down,
            sum_up=numel * SUM_BYTES / self.up,
            sum_down=numel * SUM_BYTES / self.down,
            boundary_down=offloaded / self.leaving,
            boundary_up=offloaded / self.up,
            host_update=streamed / self.host_update_rate + (self._products(number, travelling=True) if streamed else 0.0),
            device_update=resident / self.device_update_rate + (self._products(number) if resident or self.on_gpu else 0.0),
            **(self._nvme(number) if number in self.far else {}),
        )

    def _with_drive(self, block: BlockTasks, offloaded: float) -> BlockTasks:
        """And of so many bytes that go to the host, those that go on to NVMe."""
        nbytes = self.far_share * self.micro_batches * offloaded
        return replace(block, boundary_write=nbytes / self.disk_write, boundary_read=nbytes / self.disk_read)

    def _products(self, number: int, travelling: bool = False) -> float:
        """Of the products in a block's update. Those of blocks in host RAM are a GPU's too: what they multiply goes up, and comes down, in
        bfloat16, and they take the device's time from the computation."""
        flops = self.job.whole_update.product_flops[number] if self.job.whole_update is not None else 0.0
        if not flops:
            return 0.0
        moved = 2.0 * self.shape.block_numel[number] * (1 / self.up + 1 / self.down) if travelling and self.on_gpu else 0.0
        return flops / interpolate(self.machine.matmul, self.shape.hidden_size) + moved

    def _nvme(self, number: int) -> dict[str, float]:
        """Reading and writing what such a block keeps on NVMe, at the rates of as many drives as there are."""
        sizes = far_arrays([number], sum, self.choices, self.job, self.shape)
        read, write = self.disk_read, self.disk_write
        grad, weight = sizes.get("grad", 0.0), sizes.get("weight", 0.0)
        return {
            "nvme_read": sum(sizes.values()) / read,
            "nvme_write": (sum(sizes.values()) - grad) / write,
            "nvme_gradient": grad / write,
            "nvme_weight": weight / read,
        }

    def _kept_bytes(self) -> list[float]:
        """What may be sent away of one micro-batch in each layer: its input, and what its graph saved."""
        tokens, job = self.tokens, self.job
        whole, coded = tokens * sent_row_bytes(self.choices, job, self.shape), tokens * boundary_row_bytes(job, self.shape)
        full = tokens / self.choices.micro_batch_tokens
        sent = iter(graph_bytes(self.choices, job, self.shape) if self.choices.retained_on_host else ())
        return [whole + full * next(sent) if graph == "host" else coded if graph == "nowhere" else 0.0 for graph in self.graphs]

    # -- rates -----------------------------------------------------------------------------------------------------------------

    @property
    def _update_scale(self) -> float:
        """Parameters of this job's kind that are updated in the time of one of the profile's: it is a matter of bytes."""
        again = self.job.whole_update.passes_bytes if self.job.whole_update is not None else 0.0
        return UPDATE_BYTES / (2 * state_bytes_per_parameter(self.job) + self.weight + again)

    def _host_update_rate(self) -> tuple[float, float]:
        """Parameters/s, between the rates alone and beside a bus that is busy, for weights on their way use the same memory; and the share
        that this is of what memory would let through."""
        alone = interpolate(self.machine.update, self.choices.update_threads)
        busy = min(alone, self.machine.update_busy)
        directions = 1 if self.choices.stores_gradients(self.job) else 2  # else gradients come down meanwhile
        share = min(1.0, directions * self.weight * alone / self.machine.both) if self.on_gpu else 0.0
        bounded_by_memory = (alone - (alone - busy) * share) * self._update_scale
        limit = self.job.update_arithmetic
        rate = bounded_by_memory if limit is None else min(bounded_by_memory, self.choices.update_threads * limit * self.machine.arithmetic)
        return rate, rate / bounded_by_memory

    def _transfer_rates(self) -> tuple[float, float]:
        """Bytes/s up and down; where there is no bus, of a copy in memory, which is read and written."""
        if not self.on_gpu:
            return self.machine.memory / 2, self.machine.memory / 2
        share = min(1.0, self.machine.both / (self.machine.upload + self.machine.download))
        return share * self.machine.upload, share * self.machine.download

    def _leaving_rate(self) -> float:
        """Bytes/s of what leaves in forward: weights come up on the same bus meanwhile, and the host may update in the same memory."""
        nbytes = self.micro_batches * sum(self.kept_bytes)
        if not (self.on_gpu and self.choices.offload and nbytes):
            return self.down
        alone, streamed = self.machine.download, sum(self.shape.block_numel[self.choices.resident :])
        seconds = nbytes / alone
        slower = (1 - self.down / alone) * min(1.0, streamed * self.weight / self.machine.upload / seconds)
        if self.choices.stores_gradients(self.job) and self.choices.groups == 1:
            slower += (1 - BESIDE_UPDATE) * self.update_in_memory * min(1.0, streamed / self.host_update_rate / seconds)
        return alone * (1 - slower)
