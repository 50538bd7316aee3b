"""What the planner is asked, and what it chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from megatrain.schedule import UNCHANGED, Level
from megatrain.settings import Chosen, Settings

MOST_PADDING, MEAN_PADDING = 0.75, 0.5  # of a step's tokens, where few micro-batches hold them
State = tuple[tuple[str, float], ...]  # an optimizer's arrays: name, bytes per parameter


@dataclass(frozen=True)
class WholeUpdate:
    """Memory and work of an optimizer of whole tensors, which differ from block to block.

    Attributes:
        state_bytes: the optimizer's arrays: name, bytes of every block.
        product_flops: of the matmuls in every block's update.
        bytes_per_parameter: of the arrays, on average.
        passes_bytes: memory traffic per parameter beyond one pass over its state and gradient.
        host_scratch: bytes beside the state while a block in host RAM is updated.
        device_scratch: bytes where matmuls are computed, or a resident block is updated.
    """

    state_bytes: tuple[tuple[str, tuple[int, ...]], ...]
    product_flops: tuple[float, ...]
    bytes_per_parameter: float
    passes_bytes: float
    host_scratch: int
    device_scratch: int

    def of_blocks(self, first: int, stop: int | None = None) -> dict[str, int]:
        """Bytes of each array in the blocks from `first` to before `stop`."""
        return {name: sum(sizes[first:stop]) for name, sizes in self.state_bytes}


class StepTokens(NamedTuple):
    """Padded tokens and micro-batches of a step whose micro-batches hold `micro_batch` tokens."""

    micro_batch: int
    most: int
    mean: float
    most_micro_batches: int
    mean_micro_batches: float


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options that the user sets; None leaves one to the planner. settings.OPTIONS has them all."""

    micro_batch_tokens: int | None = None
    groups: int | None = None
    head_chunk_tokens: int | None = None
    layer_chunk_tokens: int | None = None  # 0 asks for whole layers
    resident: int | None = None
    retained: int | None = None
    cheap_retention: bool | None = None
    offload_activations: bool | None = None
    retained_on_host: int | None = None
    second_backward: bool | None = None
    nvme_blocks: int | None = None
    nvme_arrays: Level | None = None
    update_threads: int | None = None


@dataclass(frozen=True)
class Job(Asked):
    """What decides memory and time of a run besides the model and the machine.

    Attributes:
        precision: "bfloat16" (split fp32 master), "fp8" (the same, with fp8 matmuls in the
            layers) or "float32".
        clipping: to the exact global norm: every gradient is kept until it is known, or is
            computed twice.
        state_bytes: of the optimizer, unless `whole_update` has it.
        update_arithmetic: compute-bound rate of the update, parameters/s of one host thread;
            None: bound by memory alone.
        lighter_moments: values of optimizer.moments that need less, with those two of each.
        fp8_share: share of the layers' matmul work that precision fp8 computes in fp8.
        compiled: the layers' element-wise parts are fused.
        activations: codec of recomputed layers' checkpoints.
        nvme_drives: number of drives that hold what host RAM has no room for.
        draws_weights: at random, on the device.
        lengths_vary: of sequences, so that micro-batches have padding and ever new shapes.
        step_tokens: ascending by micro-batch; empty before the examples are known.
        keeps_best: the best checkpoint is kept beside the `checkpoints_kept` newest.
        checkpoints_written: in the whole run, if known.
        rows_per_step: `tokens_per_step` in rows of `seq_len`, where the user counts in rows.
    """

    precision: str
    tokens_per_step: int
    seq_len: int
    clipping: bool = True
    state_bytes: State = (("exp_avg", 4), ("exp_avg_sq", 4))
    update_arithmetic: float | None = None
    lighter_moments: tuple[tuple[str, State, float | None], ...] = ()
    whole_update: WholeUpdate | None = None
    fp8_share: float = 1.0
    compiled: bool = False
    activations: str = UNCHANGED
    nvme_drives: int = 0
    draws_weights: bool = False
    lengths_vary: bool = False
    step_tokens: tuple[StepTokens, ...] = ()
    checkpoints_kept: int = 2
    keeps_best: bool = True
    checkpoints_written: int | None = None
    rows_per_step: int | None = None

    def padded_tokens(self, micro_batch_tokens: int) -> int:
        """Most tokens, padding included, that a step computes.

        Examples enter micro-batches longest first: the more micro-batches, the less padding.
        Instruction data of 20 to 512 tokens took up to 1.7 times a step's tokens in one or two
        micro-batches, 1.25 in four and 1.12 in eight; on average 1.5, 1.22 and 1.11.
        """
        known = self._known(micro_batch_tokens)
        if known:
            return known.most
        return int(self.tokens_per_step * (1 + MOST_PADDING * self._padding(micro_batch_tokens)))

    def computed_tokens(self, micro_batch_tokens: int) -> float:
        """Mean tokens, padding included, that a step computes."""
        known = self._known(micro_batch_tokens)
        if known:
            return known.mean
        return self.tokens_per_step * (1 + MEAN_PADDING * self._padding(micro_batch_tokens))

    def most_micro_batches(self, micro_batch_tokens: int) -> int:
        """Most micro-batches of a step; examples seldom fill them."""
        known = self._known(micro_batch_tokens)
        full = -(-self.padded_tokens(micro_batch_tokens) // self.filled(micro_batch_tokens))
        return max(1, full, known.most_micro_batches if known else 0)

    def mean_micro_batches(self, micro_batch_tokens: int) -> float:
        """Mean micro-batches of a step, in parts of full ones before the examples are known."""
        known = self._known(micro_batch_tokens)
        full = self.computed_tokens(micro_batch_tokens) / self.filled(micro_batch_tokens)
        return max(full, known.mean_micro_batches if known else 0.0)

    def filled(self, micro_batch_tokens: int) -> int:
        """Tokens of a full micro-batch, which holds whole sequences."""
        if self.lengths_vary:
            return micro_batch_tokens
        return micro_batch_tokens // self.seq_len * self.seq_len or micro_batch_tokens

    def trained_tokens(self, micro_batch_tokens: int) -> float:
        """Non-padding tokens per step; an upper bound until row lengths are known."""
        return min(self.tokens_per_step, self.computed_tokens(micro_batch_tokens))

    def _known(self, micro_batch_tokens: int) -> StepTokens | None:
        """Of micro-batches of this size, or of the next larger ones, which have more padding."""
        if not self.step_tokens:
            return None
        larger = (known for known in self.step_tokens if known.micro_batch >= micro_batch_tokens)
        return next(larger, self.step_tokens[-1])

    def _padding(self, micro_batch_tokens: int) -> float:
        """Amount of padding, from 0 to 1: it falls with the number of micro-batches."""
        return min(1.0, 2 * micro_batch_tokens / self.tokens_per_step) if self.pads else 0.0

    @property
    def pads(self) -> bool:
        """Padding comes on top of a step's tokens; rows count as full until lengths are known."""
        return self.lengths_vary and (self.rows_per_step is None or bool(self.step_tokens))


@dataclass(frozen=True, kw_only=True)
class Choices(Chosen):
    """A value for every option; settings.OPTIONS says what they mean."""

    micro_batch_tokens: int

    def settings(self, job: Job, nvme_folders: Sequence[Path] = ()) -> Settings:
        """The same for the engine. Raises ConfigError where options exclude each other."""
        return Settings(
            **{field.name: getattr(self, field.name) for field in fields(Chosen)},
            group_size=self.micro_batches(job),
            activations=job.activations,
            compile=job.compiled,
            lengths_vary=job.lengths_vary,
            nvme_folders=tuple(nvme_folders),
        )

    def stores_gradients(self, job: Job) -> bool:
        """True if every gradient is kept until the global norm is known."""
        return job.clipping and not self.second_backward

    def micro_batches(self, job: Job) -> int:
        """Micro-batches of the largest group."""
        return -(-job.most_micro_batches(self.micro_batch_tokens) // self.groups)

    def group_tokens(self, job: Job) -> int:
        """Tokens of the largest group."""
        tokens = self.micro_batches(job) * job.filled(self.micro_batch_tokens)
        return min(tokens, max(job.padded_tokens(self.micro_batch_tokens), self.micro_batch_tokens))
