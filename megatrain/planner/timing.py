"""Predicted seconds of an optimizer step: what each block takes of each part of the machine, and
how the engine's order overlaps it.

Rates are those of a machine profile (machine/profile.py), work is the model's (cost/work.py), the
order is the engine's (simulation.py). tests/planner/test_timing.py holds all of it to measurements.
"""

from __future__ import annotations

import math
from functools import cached_property

from megatrain.machine.profile import UPDATE_BYTES, MachineProfile, interpolate, interpolate_log
from megatrain.planner.activations import SUM_BYTES
from megatrain.planner.cost.shape import BlockCost, ImageCost, PassCost
from megatrain.planner.memory import Layout, state_bytes_per_parameter
from megatrain.planner.simulation import (
    WAITS,
    BlockTasks,
    ScheduleOptions,
    Timing,
    overlapped,
    serial,
)
from megatrain.schedule import UNCHANGED, Where, graphs_of_layers

# Held to layers of 2B to 14B on an H200 (tests/planner/test_timing.py).
# Share of a lone matmul's rate that a layer's matmuls reach on a CPU; on an H200 it was all of it.
CPU_PRODUCTS_SHARE = 0.91
# With fp8 matmuls, whose lone rate layers reach: bytes per parameter that quantizing the weights
# moves for every micro-batch, half of it forward; and the factor over bf16 of the bytes moved
# between matmuls. From two steps of a 7.6B model with micro-batches of 4k and 8k tokens, before
# gradients had kernels of their own; with them the prediction is right to 4%.
FP8_WEIGHT_BYTES = 35.0
FP8_TRAFFIC = 1.45
# Time of a GPU's eager kernels over that of their reads and writes at the rate of its memory: many
# change a type, broadcast or transpose. Traces of seven steps of 0.2B to 0.8B models on an H200:
# 1.5 (float32) to 1.9; a 7.6B model's step: 1.5.
EAGER_TRAFFIC = 1.6
# The same on a CPU, at the rate of first-touch writes, where every larger tensor is written
# (hardware.bound_heap), but not all that is read: ten steps in float32, 0.3 to 1.1, mostly 0.7
# to 0.9.
CPU_TRAFFIC = 0.8
# Cost on the host of one of a layer's kernels, in bare launches, with the module around it, or with
# the compiled graph, which has fewer kernels but guards and wrappers of autograd's. On an H100's
# host a compiled layer of 37 kernels took 3.3 ms, forward and backward, at 8 us a launch. Steps of
# 10,500 eager kernels took 0.35 to 0.46 s at 6.9 to 10 us a launch; layers alone, without an engine
# and updates, a fifth less.
LAUNCHES_PER_KERNEL = {"eager": 4.6, "compiled": 10.0}
ATTENTION_FORWARD_SHARE = 2 / 7  # of attention's time: two matmuls forward, five backward
ROUNDING = 1e-9  # of a quotient that is whole but for floating point


# why: decision 0110
class StepCosts:
    """Seconds that a layout's blocks take on one machine, and a step of them."""

    def __init__(self, layout: Layout, machine: MachineProfile) -> None:
        assert machine.ranks == layout.job.ranks, "rates of as many ranks: machine/profile.py"
        self.layout, self.machine = layout, machine
        self.choices, self.job, self.shape = layout.choices, layout.job, layout.shape
        self.weight = layout.activations.weight
        self.on_gpu = machine.upload > 0
        self.far = frozenset(layout.far_blocks)
        # bytes/s of all drives together, for one rank
        drives = self.job.nvme_drives / self.job.ranks  # which the host's ranks share
        self.drive_read = max(1.0, drives * machine.disk_read)
        self.drive_write = max(1.0, drives * machine.disk_write)
        self.fp8_share = self.job.fp8_share if self.job.precision == "fp8" and machine.fp8 else 0.0
        step = self.job.step(self.choices.micro_batch_tokens)
        # a group's micro-batches and their tokens, both on average
        self.micro_batches = step.mean_micro_batches / self.choices.groups
        self.tokens = min(step.micro_batch, step.mean / step.mean_micro_batches)
        self.where = graphs_of_layers(
            self.shape.layers,
            self.choices.retained,
            self.choices.retained_on_host,
            self.shape.first_trained,
        )
        self.keeps = self.choices.keeps(self.where)
        self.host_update_rate, self.update_in_memory = self._host_update_rate()
        self.device_update_rate = (
            machine.device_update * self._update_scale if self.on_gpu else self.host_update_rate
        )
        # bytes/s with both directions busy; without a bus, a copy in memory reads and writes
        self.up = self.down = machine.memory / 2
        if self.on_gpu:
            share = min(1.0, machine.both / (machine.upload + machine.download))
            self.up, self.down = share * machine.upload, share * machine.download
        # share of them that is left while the host updates in the same memory
        self.beside_update = 1.0
        if machine.both:
            lost = max(0.0, 1 - machine.both_busy / machine.both)
            self.beside_update -= lost * self.update_in_memory
        self.leaving = self._leaving_rate()

    def predict(self) -> Timing:
        """Simulate one steady step. Deterministic arithmetic: no device is asked."""
        timeline = (overlapped if self.on_gpu else serial)(self.blocks, self.options)
        if self.job.hosts > 1:
            others = (self.job.hosts - 1) / self.job.hosts / self.machine.network
            weights, sums = self.layout.crossing  # beside the forward, and beside the backward
            timeline.at_least_in("forward", others * weights)
            timeline.at_least_in("backward", others * sums)
        # without padding, as far as row lengths are known
        mean = self.job.step(self.choices.micro_batch_tokens).mean
        trained = min(self.job.tokens_per_step, self.job.size * mean)
        ratio = self.machine.over_plan
        tokens_per_s = trained / (ratio * timeline.seconds)
        images = self.job.images
        flops = 6 * self.shape.counted_parameters + self.shape.image_flops(images.mean, images.each)
        return Timing(
            seconds=ratio * timeline.seconds,
            phases={phase: ratio * seconds for phase, seconds in timeline.phases.items()},
            waits={wait: ratio * sum(of[wait] for of in timeline.waits.values()) for wait in WAITS},
            bound_by={phase: timeline.bound_by(phase) for phase in timeline.phases},
            tokens_per_s=tokens_per_s,
            tflops=flops * tokens_per_s / self.job.size / 1e12,
            reference_s=ratio * self.forward_alone() if self.job.refers else 0.0,
        )

    @cached_property
    def computing(self) -> float:
        """Seconds of computation alone."""
        each = sum(block.forward + block.backward for block in self.blocks)
        return self.machine.over_plan * self.options.groups * each

    @property
    def at_least(self) -> float:
        """Seconds that `predict` does not fall below: of computation or of the host's updates."""
        updating = self.machine.over_plan * sum(block.host_update for block in self.blocks)
        return max(self.computing, updating)

    @cached_property
    def options(self) -> ScheduleOptions:
        return ScheduleOptions(
            **self.choices.chosen,
            micro_batches=self.micro_batches,
            clips=self.job.clipping,
            tied=self.shape.tied,
            first_trained=self.shape.first_trained,
            ranks=self.job.size,
            beside_update=self.beside_update,
            gather_loss=self.machine.gather_loss,
            reduce_loss=self.machine.reduce_loss,
        )

    @cached_property
    def blocks(self) -> list[BlockTasks]:
        """The tasks of every block for a group of micro-batches."""
        known: dict[tuple[object, ...], BlockTasks] = {}
        tasks = [self._embedding()]
        for block, work in enumerate(self.shape.cost.layers, start=1):  # mostly of one kind
            where, sent = self.where[block - 1], self.sent_bytes[block - 1]
            resident, far = block < self.choices.resident, block in self.far
            numels = self.shape.block_numel[block], self.shape.trained_numel[block]
            kind = id(work), *numels, where, sent, resident, far
            if kind not in known:
                known[kind] = self._layer(block, work, where, sent)
            tasks.append(known[kind])
        return [*tasks, self._head()]

    # -- computation -------------------------------------------------------------------------------

    def _layer(self, block: int, work: BlockCost, where: Where, sent: float) -> BlockTasks:
        numel, tokens, memory = self.shape.block_numel[block], self.tokens, self.machine.memory
        choices, chunk = self.choices, self.choices.layer_chunk_tokens or tokens
        rate, share = self._matmul_rate(min(tokens, chunk)), self.fp8_share
        if share:
            rate = 1 / (share / self.machine.fp8 + (1 - share) / rate)
        traffic = 1 + share * (FP8_TRAFFIC - 1)
        quantizing = share * numel * FP8_WEIGHT_BYTES / 2 / memory
        # tokens for heads and back: queries, keys, values and output
        traded = 4 * tokens * self.layout.activations.row_bytes * (1 - 1 / self.job.pieces)
        trading = traded / max(1.0, self.machine.gather)
        chunks = max(1, math.ceil(tokens / chunk - ROUNDING))
        forward, backward = (
            seconds + quantizing + trading
            for seconds in self._forward_and_backward(work, tokens, rate, traffic, chunks)
        )
        # each chunk after the first adds its weight gradient to the ones before
        adding = (chunks - 1) * self._adding(self.shape.trained_numel[block])
        # selective checkpointing repeats what is between matmuls
        again = work.cheap_bytes * tokens / memory if choices.cheap_retention else 0.0
        gathering = 2 * sent / memory if where == "host" else 0.0
        coding = 0.0
        if where == "nowhere":
            # recomputation leaves out matmuls whose value no gradient needs
            again = forward - work.skippable_flops * tokens / rate
            if self.keeps[block - 1] and work.kept_attention_bytes:
                attention = ATTENTION_FORWARD_SHARE * self._attention(work, tokens)
                again = max(0.0, again - attention)
            if self.job.activations != UNCHANGED:  # one form of the checkpoint is read, one written
                kept = self.layout.activations
                coding = tokens * (kept.row_bytes + kept.checkpoint_row_bytes) / memory
        offloaded = sent if choices.offload_activations else 0.0
        if where == "unneeded":
            return self._block(block, forward, 0.0)
        return self._block(
            block, forward + gathering + coding, backward + again + adding + coding, offloaded
        )

    def _embedding(self) -> BlockTasks:
        """In backward text's runs once more: nothing of it is saved."""
        forward, backward = self._forward_and_backward(
            self.shape.cost.embed, self.tokens, self._matmul_rate(0)
        )
        backward += forward
        if self.shape.images is not None:
            seeing, back = self._towers(self.shape.images)
            forward, backward = forward + seeing, backward + back
        return self._block(0, forward, 0.0 if self.shape.first_trained else backward)

    def _towers(self, cost: ImageCost) -> tuple[float, float]:
        """Seconds that images take before the first layer, forward and backward, in which layers of
        towers run once more."""
        tokens, work = self.job.images.mean * self.tokens, cost.of_images(self.job.images.each)
        rate = self._matmul_rate(tokens)
        forward, backward = self._forward_and_backward(work, tokens, rate, compiled=False)
        return forward, forward + backward if work.backward.matmul_flops else 0.0

    def _head(self) -> BlockTasks:
        """Forward and backward at once, chunk by chunk, each of which adds its weight gradient."""
        sizes = self.shape.trained_numel
        adding = self._adding(sizes[-1] + (sizes[0] if self.shape.tied else 0))
        chunks, forward, backward = self._head_chunks()
        each = forward + backward + (forward if self.job.head_twice else 0.0)
        return self._block(len(sizes) - 1, 0.0, chunks * each + (chunks - 1) * adding)

    def _head_chunks(self) -> tuple[float, float, float]:
        """Chunks of a micro-batch, and seconds forward and backward of one."""
        chunk = min(self.choices.head_chunk_tokens, self.tokens)
        work, rate = self.shape.cost.head, self._matmul_rate(chunk)
        compiled = self.job.compiled or self.job.fused_loss
        return self.tokens / chunk, *self._forward_and_backward(
            work, chunk, rate, compiled=compiled
        )

    def forward_alone(self) -> float:
        """Seconds of a step's tokens without gradients or updates: weights come up beside it."""
        chunks, forward, _ = self._head_chunks()
        computing = sum(block.forward for block in self.blocks)
        computing += self.micro_batches * chunks * forward
        uploading = sum(block.upload for block in self.blocks)
        return self.choices.groups * max(computing, uploading)

    def _forward_and_backward(
        self,
        work: BlockCost,
        tokens: float,
        rate: float,
        traffic: float = 1.0,
        chunks: int = 1,
        compiled: bool | None = None,
    ) -> tuple[float, float]:
        """Seconds of both directions. rate: of matmuls, FLOP/s. traffic: factor of the bytes moved
        between them in bf16. chunks: in which experts take the tokens. Each reads all of them, and
        writes all gradients. compiled: by default whether layers are."""
        attention = self._attention(work, tokens)
        memory = self.machine.memory if self.on_gpu else self.machine.fresh
        grouped = self._grouped_rate(work, tokens / chunks, rate)
        kind = "compiled" if (self.job.compiled if compiled is None else compiled) else "eager"
        if kind == "eager":
            traffic *= EAGER_TRAFFIC if self.on_gpu else CPU_TRAFFIC

        def seconds(one_way: PassCost, attention: float, products: float) -> float:
            moved, kernels = one_way.compiled if kind == "compiled" else one_way.eager
            of_experts = products * work.expert_flops
            matmuls = (one_way.matmul_flops - of_experts) * tokens / rate
            # with few tokens for each expert, moving their matrices takes longer than computing
            matrices = products * chunks * work.expert_parameters * self.weight
            matmuls += max(of_experts * tokens / grouped, matrices / self.machine.memory)
            computing = attention + matmuls + traffic * moved * tokens / memory
            launching = kernels * LAUNCHES_PER_KERNEL[kind] * self.machine.launch
            # only a GPU computes while the host launches kernels
            return max(computing, launching) if self.on_gpu else computing + launching

        back = 2 - work.frozen_expert_flops / max(1, work.expert_flops)
        return (
            seconds(work.forward, attention * ATTENTION_FORWARD_SHARE, 1),
            seconds(work.backward, attention * (1 - ATTENTION_FORWARD_SHARE), back),
        )

    def _attention(self, work: BlockCost, tokens: float) -> float:
        """Seconds of fused attention, both directions."""
        flops = 3 * work.forward.attention_flops * tokens
        whole = self.job.seq_len * self.job.pieces
        return flops / interpolate(self.machine.attention, min(work.keys or whole, whole))

    def _matmul_rate(self, tokens: float) -> float:
        rates = self.machine.matmul_fp32 if self.job.precision == "float32" else self.machine.matmul
        return (1.0 if self.on_gpu else CPU_PRODUCTS_SHARE) * interpolate(rates, tokens)

    def _grouped_rate(self, work: BlockCost, tokens: float, lone: float) -> float:
        """FLOP/s of experts' matmuls over as many tokens at once. lone: of other matmuls."""
        if not (self.on_gpu and work.expert_flops):
            return lone
        # of each expert, on average
        rows = work.expert_flops / 2 / max(1, work.expert_parameters) * tokens
        if self.job.precision == "float32":  # a loop over experts: no GPU has grouped kernels
            return self._matmul_rate(rows)
        return interpolate_log(self.machine.grouped, rows)

    def _adding(self, numel: int) -> float:
        """Adding a gradient to its fp32 accumulator: one is read, the other read and written."""
        return numel * (self.weight + 2 * SUM_BYTES) / self.machine.memory

    # -- a block's tasks ---------------------------------------------------------------------------

    def _block(
        self, number: int, forward: float, backward: float, offloaded: float = 0.0
    ) -> BlockTasks:
        """A block's tasks for a group of micro-batches. forward, backward: seconds of one.
        offloaded: bytes that it sends to host RAM in forward and gets back in backward."""
        numel, resident = self.shape.trained_numel[number], number < self.choices.resident
        # of several ranks, this one's share alone goes up and down and is updated
        mine = self.layout.owned[number]
        streamed = 0 if resident else mine
        uploaded = 0 if resident else self.layout.owned_weights[number]
        up, read = self.up, number in self.layout.read_blocks
        if read:  # the whole block
            # what updates reach is a rank's part of a host's memory while all use it
            memory = UPDATE_BYTES * max(rate for _, rate in self.machine.update)
            uploaded, up = self.shape.block_numel[number], min(up, memory)
        offloaded *= self.micro_batches
        on_host = on_device = 0.0
        if not resident:
            on_host = mine / self.host_update_rate + self._products(number, travelling=mine)
        if resident or self.on_gpu:
            on_device = (mine - streamed) / self.device_update_rate + self._products(number)
        # each array on NVMe is read and written once
        far = self.layout.far_arrays([number], sum) if number in self.far else {}
        all_far = sum(far.values()) if numel else 0.0
        # read the sum, write the gradient and measure it: of several ranks, in their lane
        finish = mine * (SUM_BYTES + 2 * self.weight) / self.machine.memory
        gather, reduce, ranks = 0.0, 0.0, self.job.ranks
        if ranks > 1:  # all but its own share comes to a rank over its link
            others, padded = (ranks - 1) / ranks, self.layout.padded[number]
            gather = others * (padded * self.weight) / self.machine.gather
            reduce = others * padded * SUM_BYTES / self.machine.reduce
        return BlockTasks(
            forward=self.micro_batches * forward,
            backward=self.job.trained_share * self.micro_batches * (backward + self._adding(numel)),
            finish=finish if self.job.size == 1 else 0.0,
            gather=0.0 if read else gather,
            read=read,
            reduce=(numel > 0) * (reduce + finish) if self.job.size > 1 else 0.0,
            upload=uploaded * self.weight / up,
            download=streamed * self.weight / self.down,
            sum_up=mine * SUM_BYTES / self.up,
            sum_down=mine * SUM_BYTES / self.down,
            boundary_down=offloaded / self.leaving,
            boundary_up=offloaded / self.up,
            host_update=on_host,
            device_update=on_device,
            nvme_read=all_far / self.drive_read,
            nvme_write=all_far / self.drive_write,
            frozen=numel == 0,
        )

    def _products(self, number: int, travelling: int = 0) -> float:
        """Seconds of the matmuls in a block's update. A GPU computes those of blocks in host RAM
        too: so many elements go up and come down in bfloat16, and the model's computation waits."""
        whole = self.job.whole_update
        flops = 0.0 if whole is None else whole.product_flops[number]
        if not flops:
            return 0.0
        seconds = flops / interpolate(self.machine.matmul, self.shape.hidden_size)
        if travelling and self.on_gpu:
            seconds += 2.0 * travelling * (1 / self.up + 1 / self.down)
        return seconds

    @cached_property
    def sent_bytes(self) -> list[float]:
        """Bytes of a micro-batch that each layer may send: its checkpoint, or what it saved."""
        kept, tokens = self.layout.activations, self.tokens
        whole, coded = tokens * kept.sent_row_bytes, tokens * kept.checkpoint_row_bytes
        attended = tokens * kept.attention_row_bytes
        full = tokens / self.choices.micro_batch_tokens
        saved = iter(kept.saved_on_host)
        sent = [coded + keeps * attended for keeps in self.keeps]
        for index, where in enumerate(self.where):
            if where != "nowhere":
                sent[index] = whole + full * next(saved) if where == "host" else 0.0
        return sent

    # -- rates -------------------------------------------------------------------------------------

    @cached_property
    def _stored(self) -> int:
        """Elements of gradients in host RAM that wait for their norm."""
        layout = self.layout
        return sum(layout.owned[b] for b in layout.stored if b >= self.choices.resident)

    @property
    def _update_scale(self) -> float:
        """Parameters of this job updated in the time of one of the profile's, by bytes."""
        again = self.job.whole_update.passes_bytes if self.job.whole_update is not None else 0.0
        return UPDATE_BYTES / (2 * state_bytes_per_parameter(self.job) + self.weight + again)

    def _host_update_rate(self) -> tuple[float, float]:
        """(parameters/s, their share of the memory-bound rate). The rate lies between the one
        measured alone and the one beside a busy bus, as transfers use the same memory."""
        threads, limit = self.choices.update_threads, self.job.update_arithmetic
        alone = interpolate(self.machine.update, threads)
        busy = min(alone, self.machine.update_busy)
        # gradients come down meanwhile unless they are stored; what ranks share, each takes up
        directions: float = self.job.ranks if self.layout.read_blocks else 1
        streamed = max(1, sum(self.layout.owned[self.choices.resident :]))
        directions += 1 - self._stored / streamed
        share = 0.0
        if self.on_gpu:  # saved activations, too, travel while all that is streamed is updated
            ways = zip(self.sent_bytes, self.where, strict=True)
            saved = self.micro_batches * sum(nbytes for nbytes, where in ways if where == "host")
            sent = min(self.machine.download, saved * alone / streamed)
            share = min(1.0, (directions * self.weight * alone + sent) / self.machine.both_busy)
        memory_bound = (alone - (alone - busy) * share) * self._update_scale
        rate = memory_bound
        if limit is not None:
            rate = min(rate, threads * limit * self.machine.arithmetic)
        return rate, rate / memory_bound

    def _leaving_rate(self) -> float:
        """Bytes/s of offloaded activations in forward, while weights come up on the same bus and
        the host may update in the same memory."""
        nbytes = self.micro_batches * sum(self.sent_bytes)
        if not (self.on_gpu and self.choices.offload_activations and nbytes):
            return self.down
        alone = self.machine.download
        first, seconds = self.choices.resident, nbytes / alone
        uploading = sum(self.layout.owned_weights[first:]) * self.weight / self.machine.upload
        slower = (1 - self.down / alone) * min(1.0, uploading / seconds)
        if self.choices.groups == 1:
            updating = min(1.0, self._stored / self.host_update_rate / seconds)
            slower += (1 - self.beside_update) * updating
        return alone * (1 - slower)
