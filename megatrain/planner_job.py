"""What the planner is asked, and the dials that it turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatrain.activations import UNCHANGED
from megatrain.nvme_tier import Level

MOST_PADDING, MEAN_PADDING = 0.75, 0.5  # of a step's tokens, where few micro-batches hold them


@dataclass(frozen=True)
class WholeUpdate:
    """What an optimizer of whole tensors holds and computes, where blocks differ in it."""

    state_bytes: tuple[tuple[str, tuple[int, ...]], ...]  # the optimizer's arrays, bytes of every block
    product_flops: tuple[float, ...]  # of the matrix products in every block's update
    bytes_per_parameter: float  # of the arrays, on average
    passes_bytes: float  # memory traffic of a parameter beyond one pass over its state and its gradient
    host_scratch: int  # bytes beside the state, while a block in host RAM is updated
    device_scratch: int  # and where matrix products are computed, or a block that lives there is updated

    def of_blocks(self, first: int, stop: int | None = None) -> dict[str, int]:
        """Bytes of each array in some blocks."""
        return {name: sum(sizes[first:stop]) for name, sizes in self.state_bytes}


class StepTokens(NamedTuple):
    """A step's sequences, where micro-batches have so many tokens at most: their tokens, padding included, and their micro-batches."""

    micro_batch: int
    most: int
    mean: float
    most_micro_batches: int
    mean_micro_batches: float


@dataclass(frozen=True)
class Job:
    """What the user asks for, as far as memory and time are concerned. None leaves the choice to the planner."""

    precision: str  # "bfloat16" (split fp32 master), "fp8" (the same, with fp8 products in the layers) or "float32"
    tokens_per_step: int
    seq_len: int
    clipping: bool = True  # exact global-norm clipping keeps every gradient until the norm is known, or computes it again
    state_bytes: tuple[tuple[str, float], ...] = (("exp_avg", 4), ("exp_avg_sq", 4))  # the optimizer's arrays, bytes per parameter
    update_arithmetic: float | None = None  # parameters/s that one thread of the host could update if memory had no limit; None: no bound
    lighter_moments: tuple[tuple[str, tuple[tuple[str, float], ...], float | None], ...] = ()  # optimizer.moments, and those two with it
    whole_update: WholeUpdate | None = None  # of an optimizer of whole tensors, whose arrays are here and not in `state_bytes`
    fp8_share: float = 1.0  # of the layers' products, with precision fp8
    compiled: bool = False  # the layers' element-wise parts are fused
    activations: str = UNCHANGED  # or the codec of recomputed layers' inputs
    micro_batch_tokens: int | None = None
    groups: int | None = None
    head_chunk_tokens: int | None = None
    layer_chunk_tokens: int | None = None  # 0: layers are computed whole
    resident: int | None = None
    retained: int | None = None
    cheap_retention: bool | None = None
    offload: bool | None = None
    retained_on_host: int | None = None
    second_backward: bool | None = None
    update_threads: int | None = None
    nvme_drives: int = 0  # that hold what host RAM has no room for
    nvme_blocks: int | None = None
    nvme_arrays: Level | None = None
    nvme_activations: int | None = None
    draws_weights: bool = False  # at random, on the device
    lengths_vary: bool = False  # of rows, so that micro-batches have padding and ever new shapes
    step_tokens: tuple[StepTokens, ...] = ()  # ascending by micro-batch; none before the rows are known
    checkpoints_kept: int = 2
    keeps_best: bool = True  # `best` can hold on to one checkpoint more
    checkpoints_written: int | None = None  # in the whole run, if known
    rows_per_step: int | None = None  # `tokens_per_step` in rows of `seq_len`, where the user counts in those

    def padded_tokens(self, micro_batch_tokens: int) -> int:
        """Tokens of a step that are computed at most, padding included.

        Rows enter micro-batches longest first: the more micro-batches, the less padding. Instruction rows of 20 to 512 tokens took up to
        1.7 times a step's tokens where one or two micro-batches held them, 1.25 with four and 1.12 with eight; on average 1.5, 1.22, 1.11.
        """
        known = self._known(micro_batch_tokens)
        return known.most if known else int(self.tokens_per_step * (1 + MOST_PADDING * self._padding(micro_batch_tokens)))

    def computed_tokens(self, micro_batch_tokens: int) -> float:
        """Tokens of a step that are computed on average, padding included."""
        known = self._known(micro_batch_tokens)
        return known.mean if known else self.tokens_per_step * (1 + MEAN_PADDING * self._padding(micro_batch_tokens))

    def most_micro_batches(self, micro_batch_tokens: int) -> int:
        """How many a step has at most. Rows seldom fill them."""
        known, full = self._known(micro_batch_tokens), -(-self.padded_tokens(micro_batch_tokens) // self.filled(micro_batch_tokens))
        return max(1, full, known.most_micro_batches if known else 0)

    def mean_micro_batches(self, micro_batch_tokens: int) -> float:
        """And on average, in parts of full ones where rows are not known."""
        known, full = self._known(micro_batch_tokens), self.computed_tokens(micro_batch_tokens) / self.filled(micro_batch_tokens)
        return max(full, known.mean_micro_batches if known else 0.0)

    def filled(self, micro_batch_tokens: int) -> int:
        """Tokens of a micro-batch that holds as many rows as it can: of full rows whole ones, of others so many at most."""
        return micro_batch_tokens if self.lengths_vary else micro_batch_tokens // self.seq_len * self.seq_len or micro_batch_tokens

    def trained_tokens(self, micro_batch_tokens: int) -> float:
        """Tokens of a step without padding, as far as they are known: so many rows may be shorter than full ones."""
        return min(self.tokens_per_step, self.computed_tokens(micro_batch_tokens))

    def _known(self, micro_batch_tokens: int) -> StepTokens | None:
        """Of micro-batches of this size, or of the next larger ones, which have more padding."""
        if not self.step_tokens:
            return None
        return next((known for known in self.step_tokens if known.micro_batch >= micro_batch_tokens), self.step_tokens[-1])

    def _padding(self, micro_batch_tokens: int) -> float:
        """How much there is, from 0 to 1: it falls with the number of micro-batches."""
        return min(1.0, 2 * micro_batch_tokens / self.tokens_per_step) if self.pads else 0.0

    @property
    def pads(self) -> bool:
        """Whether padding comes on top of a step's tokens. So many whole rows are counted as full ones until their lengths are known."""
        return self.lengths_vary and (self.rows_per_step is None or bool(self.step_tokens))


@dataclass(frozen=True)
class Choices:
    """The dials. Blocks are counted in execution order: 0 is the embedding, 1 to L the layers, L + 1 the head."""

    micro_batch_tokens: int
    groups: int  # of micro-batches; each streamed weight crosses to the device once per group and direction
    resident: int  # the first so many blocks keep their whole state on the device
    sums_on_device: int  # with several groups, the first so many blocks keep their fp32 gradient sums on the device between groups
    retained: int  # the last so many layers keep their graphs from forward to backward, so that nothing of them is recomputed
    cheap_retention: bool  # but what lies between their products and attention
    offload: bool  # boundary activations wait in host RAM
    head_chunk_tokens: int
    update_threads: int
    retained_on_host: int = 0  # of the layers that are not retained so many, evenly spread, send their graphs to host RAM
    second_backward: bool = False  # clip without stored gradients: compute them for their norm, and again to apply them
    layer_chunk_tokens: int = 0  # the token-wise parts of a layer are computed so many tokens at a time; 0: a micro-batch at once
    nvme_blocks: int = 0  # so many streamed blocks keep arrays on NVMe, the last layers first
    nvme_arrays: Level = "state"  # which
    nvme_activations: int = 0  # of the recomputed layers' offloaded inputs as much waits there as so many layers' are

    def stores_gradients(self, job: Job) -> bool:
        """Whether every gradient waits for the norm."""
        return job.clipping and not self.second_backward

    def micro_batches(self, job: Job) -> int:
        """Micro-batches of the largest group."""
        return -(-job.most_micro_batches(self.micro_batch_tokens) // self.groups)

    def group_tokens(self, job: Job) -> int:
        """Tokens of the largest group."""
        tokens = self.micro_batches(job) * job.filled(self.micro_batch_tokens)
        return min(tokens, max(job.padded_tokens(self.micro_batch_tokens), self.micro_batch_tokens))

    def largest_group(self, job: Job) -> tuple[int, ...]:
        """Tokens of each of its micro-batches. Where lengths vary, of a full one, and of the others alike."""
        full, tokens, count = job.filled(self.micro_batch_tokens), self.group_tokens(job), self.micro_batches(job)
        if job.lengths_vary:
            return (full, *((max(0, tokens - full) + number) // (count - 1) for number in range(count - 1)))
        return tuple(min(full, tokens - start) for start in range(0, tokens, full))
