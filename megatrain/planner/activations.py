"""Bytes that computing takes where the model computes: a group's activations, the working sets of
the computations that take turns, and what the allocator cannot use. Arithmetic only.

Where blocks, gradient accumulators and NVMe arrays are changes none of it (see memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatrain.machine.hardware import LARGE_BLOCK_BYTES, MIB, Hardware
from megatrain.planner.cost.shape import CompiledSets, ModelShape
from megatrain.planner.job import Choices, Job
from megatrain.schedule import UNCHANGED, graphs_of_layers, kept_row_bytes, rings

WEIGHT_BYTES = {"bfloat16": 2, "fp8": 2, "float32": 4}  # hidden states' too; fp8 is for one matmul
SUM_BYTES = 4  # gradients are accumulated in fp32 whatever the precision
INPUT_BYTES = 24  # per token: its id, its position among the targets and its label, int64 each
BALANCED_BYTES = 4  # and where routers are balanced, whether it is no padding, fp32

# Reserved by torch's caching allocator and not used: it grows with the working set, where tensors
# of many sizes come and go. H200 with expandable segments, eager: 37 to 83 MiB for working sets of
# 0.2 to 1.4 GiB, 300 for 4.9 GiB (benchmarks/plan_check.py). Compiled: recomputed layers and the
# head take turns in one memory with blocks of other sizes, which costs 10 to 41%, mostly 20, of the
# smaller one's need in nine runs, and 60 MiB in the first step. Offloaded activations come back
# among other tensors: 21 to 79 MiB more, in four runs. Holes of a compiled layer come on
# top: gradients of experts lie behind all activations (cost/compiled.py). 10.6 GiB were held for
# 7.1 in GPT-OSS-120B with micro-batches of 16,384 tokens on an H100, where 10.8 are counted.
ALLOCATOR_SLACK_BYTES, ALLOCATOR_SLACK_SHARE = 32 * MIB, 0.05
COMPILED_SLACK_BYTES, COMPILED_SLACK_SHARE = 64 * MIB, 0.2
OFFLOAD_SLACK_BYTES = 64 * MIB
# Micro-batches of ever new shapes leave holes besides that nothing else fills. Host: malloc's heap,
# 24 steps of a 135M model with all layers retained. GPU: 2 GiB that came and went had 0.26 of holes
# after 20 steps. Saved activations are in blocks of mostly twice a micro-batch's hidden states, off
# which torch splits nothing below 1 MiB: at most half of that is lost, 0.9% of them in two runs.
VARIED_ON_GPU, VARIED_ON_HOST = 0.1, 0.4
UNSPLIT_BYTES = MIB // 4  # for each multiple of the hidden states' bytes
# Holes where ranks trade, in multiples of a micro-batch's hidden states, without and with retained
# layers: 1.8 and 5.4 were measured.
TRADED_HOLES, RETAINED_HOLES = 2, 6
# On a CPU, of retained activations: they leave holes in malloc's heap, where most of them are if
# hidden states are small enough; others are mapped. 14 to 22%, and 5 and 8%, in five runs.
HEAP_HOLES_SHARE, MAPPED_HOLES_SHARE = 0.2, 0.05
LAYER_SET, EMBEDDING_SET = "layer, one micro-batch", "embedding, one micro-batch"
HEAD_SET, DRAWN_SET = "head, one chunk", "weights at random, one block"


@dataclass(frozen=True)
class Activations:
    """Bytes that depend on how a step is cut and on what is kept from forward to backward. "Saved
    activations" are a layer's saved tensors beyond its input and output; its input is its
    activation checkpoint. A group is the largest accumulation group."""

    choices: Choices
    job: Job
    shape: ModelShape
    hardware: Hardware

    @cached_property
    def device(self) -> dict[str, int]:
        """The rows of the device's table that computing decides."""
        table = self.kept | {"working set": max(self.working_sets.values())}
        if self.hardware.gpu is not None:
            table["cuBLAS workspaces"] = self.hardware.workspace_bytes
            table["allocator slack"] = self.slack
            table["CUDA context"] = self.hardware.context_bytes
        elif self.job.pads or self.choices.retained:
            table["allocator slack"] = self.slack
        return table

    @cached_property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    # -- counts and rows ---------------------------------------------------------------------------

    @cached_property
    def weight(self) -> int:
        """Bytes of an element of weights and hidden states."""
        return WEIGHT_BYTES[self.job.precision]

    @cached_property
    def group_tokens(self) -> int:
        return self.choices.group_tokens(self.job)

    @cached_property
    def recomputed(self) -> int:
        """Number of recomputed layers."""
        return self.shape.layers_back - self.choices.retained - self.choices.retained_on_host

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's hidden state."""
        return self.shape.hidden_size * self.weight

    @property
    def checkpoint_row_bytes(self) -> int:
        """Bytes of a token's activation checkpoint of a recomputed layer, after the codec."""
        return kept_row_bytes(self.job.activations, self.shape.hidden_size, self.weight)

    @cached_property
    def attention_row_bytes(self) -> int:
        """Bytes of a token that attention keeps in a layer that does."""
        return self.shape.cost.kept_attention_bytes if self.choices.keep_attention else 0

    @property
    def recomputed_row_bytes(self) -> int:
        """Bytes of a token that all recomputed layers keep from forward to backward."""
        attentions = min(self.recomputed, self.choices.keep_attention)
        return self.recomputed * self.checkpoint_row_bytes + attentions * self.attention_row_bytes

    @cached_property
    def sent_row_bytes(self) -> int:
        """Bytes of a token's input, if a layer's saved activations hold it; else 0."""
        eager, compiled, cheap = self.shape.graphs_keep_inputs
        kept = (cheap if self.choices.cheap_retention else compiled) if self.job.compiled else eager
        return self.row_bytes if kept else 0

    # -- saved activations and checkpoints ---------------------------------------------------------

    def _saved_by_last(self, layers: int) -> int:
        """Bytes that the last `layers` layers save of one micro-batch."""
        return self.shape.retained_bytes(
            self.choices.micro_batch_tokens,
            layers,
            compiled=self.job.compiled,
            cheap=self.choices.cheap_retention,
        )

    def _of_group(self, micro_batch_bytes: int) -> int:
        """Bytes of a whole group, whose micro-batches need not be full."""
        return micro_batch_bytes * self.group_tokens // self.choices.micro_batch_tokens

    @cached_property
    def saved_on_host(self) -> tuple[int, ...]:
        """Saved bytes of one micro-batch, of each layer that sends them to host RAM."""
        if not self.choices.retained_on_host:
            return ()
        layers = self.shape.layers
        of_last = [self._saved_by_last(count) for count in range(layers + 1)]
        counts = self.choices.retained, self.choices.retained_on_host
        where = graphs_of_layers(layers, *counts, self.shape.first_trained)
        return tuple(
            of_last[layers - i] - of_last[layers - i - 1]
            for i, place in enumerate(where)
            if place == "host"
        )

    @cached_property
    def _retained(self) -> int:
        """Bytes that a group's retained layers save on the device."""
        retained = self.choices.retained
        return self._of_group(self._saved_by_last(retained)) if retained else 0

    @cached_property
    def _checkpoints(self) -> int:
        """Bytes of a group's activation checkpoints on the device, those on their way included.
        Inputs of retained layers and of the head are whole. The gradient that goes back takes the
        place of the head's input."""
        choices, tokens = self.choices, self.choices.micro_batch_tokens
        here = self.group_tokens * self.recomputed_row_bytes
        if choices.offload_activations:
            graph = 0
            if self.saved_on_host:
                graph = max(self.saved_on_host) + tokens * self.sent_row_bytes
            of_group = choices.micro_batches(self.job), choices.retained_on_host
            largest = self.checkpoint_row_bytes + self.attention_row_bytes
            here = sum(rings(*of_group, tokens * largest, graph))
        # what a second backward begins with: the input, or a gradient, which takes no room where it
        # has the place of a checkpoint that the first has freed
        twice, every = choices.second_backward, max(1, self.shape.layers_back)
        again = twice >= every or (twice > 0 and choices.offload_activations)
        return self.group_tokens * self.row_bytes * (choices.retained + 1 + again) + here

    @property
    def host(self) -> dict[str, int]:
        """The rows of the host's table: a group's offloaded activations. Checkpoints are those of
        recomputed layers, and the inputs that saved activations hold."""
        rows = self.recomputed_row_bytes + self.choices.retained_on_host * self.sent_row_bytes
        offloads, pixels = self.choices.offload_activations, 0
        if self.shape.images is not None:  # of two steps in fp32, and of one as it computes
            tokens = self.job.step(self.choices.micro_batch_tokens).most * self.job.pieces
            share = self.job.images.most * (1 + 2 * SUM_BYTES / self.weight)
            pixels = int(share * tokens * self.shape.images.input_bytes)
        return {
            "activation checkpoints": self.group_tokens * rows if offloads else 0,
            "retained activations": self._of_group(sum(self.saved_on_host)),
            "images": pixels,
        }

    @cached_property
    def kept(self) -> dict[str, int]:
        """Bytes that a group's micro-batches hold on the device from one block to the next."""
        tokens = self.choices.micro_batch_tokens
        # of the whole step, and whole on every rank
        inputs = self.job.pieces * max(self.job.step(tokens).most, self.group_tokens)
        calls = self.choices.micro_batches(self.job) * self.shape.calls.at(tokens)
        each = INPUT_BYTES + (BALANCED_BYTES if self.job.balances_routers else 0)
        return {
            "activation checkpoints": self._checkpoints,
            "retained activations": self._retained,
            "token ids and targets": each * inputs,
            "rotary tables and masks": calls,
            **self._images(inputs),
        }

    def _images(self, tokens: int) -> dict[str, int]:
        """Pixels of so many tokens, of a whole step, and what is kept of them for backward."""
        if self.shape.images is None:
            return {}
        pixels, kept = self.shape.images.input_bytes, self.shape.images.kept_bytes
        nbytes = tokens * pixels + self.group_tokens * kept
        return {"images": int(self.job.images.most * nbytes)}

    # -- working sets ------------------------------------------------------------------------------

    @cached_property
    def working_sets(self) -> dict[str, int]:
        """Bytes of the computations that take turns: the device holds the largest."""
        tokens, chunk = self.choices.micro_batch_tokens, self.choices.head_chunk_tokens
        sets = {
            LAYER_SET: self._layer,
            EMBEDDING_SET: self._embedding,
            HEAD_SET: head_bytes(chunk, tokens, self.job, self.shape, self.hardware),
        }
        if self.job.draws_weights:  # one block after another, before there are activations
            drawn = max(self.shape.block_numel) * SUM_BYTES - sum(self.kept.values())
            sets[DRAWN_SET] = max(0, drawn)
        return sets

    @property
    def _layer(self) -> int:
        """Working set of a recomputed layer, with its decoded input, or what a retained layer needs
        beyond its saved tensors. Without `_compiled`, the eager one less one layer's saved
        activations is the bound for both."""
        choices, sets = self.choices, self._compiled
        tokens, chunk = choices.micro_batch_tokens, choices.layer_chunk_tokens
        decodes = self.job.activations != UNCHANGED and self.recomputed
        decoded = tokens * self.row_bytes if decodes else 0
        if sets is None:
            keeps = choices.retained and not chunk
            saved = self._saved_by_last(choices.retained) // choices.retained if keeps else 0
            return self.shape.layer_bytes(tokens, chunk) + decoded - saved
        # the last layer's checkpoint is freed before other layers are recomputed, unless it is not
        # on the device, or is needed again, or there is none
        again = choices.second_backward >= max(1, self.shape.layers_back - 1)
        kept = choices.retained or choices.retained_on_host or again
        freed = 0 if kept or choices.offload_activations else self.group_tokens
        freed *= self.checkpoint_row_bytes
        # layers are recomputed after all retained ones are done and their activations freed
        recomputed = max(sets.last.at(tokens), sets.recomputed.at(tokens) - freed)
        recomputed += decoded - self._retained
        beyond = sets.beyond_cheap_graph if choices.cheap_retention else sets.beyond_graph
        return max(
            recomputed if self.recomputed else 0, beyond.at(tokens) if choices.retained else 0
        )

    @cached_property
    def _compiled(self) -> CompiledSets | None:
        """As `compiled_sets`; traces know no chunks and no activations back from host RAM."""
        untraced = self.choices.layer_chunk_tokens or self.choices.retained_on_host
        return None if untraced else compiled_sets(self.job, self.shape)

    @property
    def _embedding(self) -> int:
        """The embedding's working set. Its gradient, rows of fp32, is never stored whole: they are
        added to the accumulator where they belong."""
        tokens, width = self.choices.micro_batch_tokens, self.shape.hidden_size
        need, images = self.shape.embed.at(tokens), self.shape.images
        tokens *= self.job.pieces  # of whole sequences, before they are cut
        if images is not None:
            need += int(self.job.images.most * tokens * images.working_bytes)
            need += images.gradient_bytes
        if not self.shape.trains_edges[0]:
            return need
        stored_whole = self.shape.vocab_size * width * self.weight
        return need - stored_whole + tokens * width * SUM_BYTES

    # -- what the allocator cannot use -------------------------------------------------------------

    @property
    def slack(self) -> int:
        """Bytes that the allocator holds and cannot use: PyTorch's on a GPU, malloc's on a CPU."""
        retained, largest = self._retained, max(self.working_sets.values())
        passing, tokens = self._checkpoints + largest, self.choices.micro_batch_tokens
        hidden_states = tokens * self.row_bytes
        if self.hardware.gpu is None:
            if self.job.pads:
                return int(VARIED_ON_HOST * (passing + retained))
            small = hidden_states < LARGE_BLOCK_BYTES
            return int((HEAP_HOLES_SHARE if small else MAPPED_HOLES_SHARE) * retained)
        if self._compiled is None:
            slack = ALLOCATOR_SLACK_BYTES + int(ALLOCATOR_SLACK_SHARE * largest)
        else:  # the blocks of the smaller one lie among those of the larger one
            layer = self._compiled.recomputed.at(tokens) if self.recomputed else 0
            smaller = min(self.working_sets[HEAD_SET], layer)
            slack = COMPILED_SLACK_BYTES + int(COMPILED_SLACK_SHARE * smaller)
        sets = compiled_sets(self.job, self.shape)
        if sets is not None and self.recomputed:
            slack += max(0, sets.holes.at(tokens))
        if self.choices.offload_activations:
            slack += OFFLOAD_SLACK_BYTES
        if self.job.pieces > 1:
            holes = RETAINED_HOLES if retained or self.saved_on_host else TRADED_HOLES
            slack += holes * hidden_states
        if self.job.pads:
            unsplit = min(VARIED_ON_GPU, UNSPLIT_BYTES / hidden_states)
            slack += int(VARIED_ON_GPU * passing + unsplit * retained)
        return slack


def compiled_sets(job: Job, shape: ModelShape) -> CompiledSets | None:
    """Working sets of compiled layers, if known: not of fp8, if only bf16 was traced."""
    sets = shape.compiled if job.compiled else None
    return sets if sets and sets.fp8 == (job.precision == "fp8") else None


def head_bytes(
    chunk_tokens: int, micro_batch_tokens: int, job: Job, shape: ModelShape, hardware: Hardware
) -> int:
    """Bytes of the head's work on one chunk: its working set and hidden states, the gradient of the
    chunk before, and the micro-batch's gradient that the chunks fill. The weights' gradients are
    added to the fp32 accumulators by the matmul itself; of two types, as bf16 products and fp32
    sums, only CUDA has such a matmul, elsewhere the gradient exists as well."""
    direct = hardware.gpu is not None or job.precision == "float32"
    direct = direct and shape.trains_edges[1]  # a frozen matrix has none
    never_stored = shape.head_matrix if direct else 0
    previous = chunk_tokens if chunk_tokens < micro_batch_tokens else 0
    rows = (chunk_tokens + previous + micro_batch_tokens) * shape.hidden_size
    return shape.head.at(chunk_tokens) + (rows - never_stored) * WEIGHT_BYTES[job.precision]
