"""The planner's question (Job), limits (Budget) and answer (Choices)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatrain.errors import ConfigError, PlanError, number_of
from megatrain.machine.hardware import MIB, communicators
from megatrain.schedule import UNCHANGED
from megatrain.settings import Chosen, Settings, count_layers

MOST_PADDING, MEAN_PADDING = 0.75, 0.5  # of a step's tokens, where few micro-batches hold them
# Of GPU memory and host RAM, what choices for speed leave: the plan is right to 3%, and
# variable-length sequences leave fragments.
# why: decision 0034
SPARE_SHARE, SPARE_BYTES = 0.03, 512 * MIB
State = tuple[tuple[str, float], ...]  # an optimizer's arrays: name, bytes per parameter


@dataclass(frozen=True)
class WholeUpdate:
    """Memory and work of an optimizer of whole tensors, which differ from block to block."""

    state_bytes: tuple[tuple[str, tuple[int, ...]], ...]  # its arrays: name, bytes of every block
    product_flops: tuple[float, ...]  # of the matmuls in the update of every block
    bytes_per_parameter: float  # of the arrays, on average over all blocks
    passes_bytes: float  # traffic per parameter beyond one pass over its state and gradient
    host_scratch: int  # beside the state while a block in host RAM is updated
    device_scratch: int  # where matmuls are computed, or a resident block is updated

    def of_blocks(self, first: int, stop: int | None = None) -> dict[str, int]:
        """Bytes of each array in the blocks from `first` to before `stop`."""
        return {name: sum(sizes[first:stop]) for name, sizes in self.state_bytes}


class StepTokens(NamedTuple):
    """A step whose micro-batches hold `micro_batch` tokens, padding included."""

    micro_batch: int
    most: int  # tokens of any step
    mean: float
    most_micro_batches: int  # sequences seldom fill them
    mean_micro_batches: float


class ImageTokens(NamedTuple):
    """The tokens of a run that are of images."""

    mean: float  # share of all
    most: float  # of any row's
    each: float  # tokens of an image, on average


NO_IMAGES = ImageTokens(0.0, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options that the user sets; None leaves one to the planner. settings.OPTIONS has them all."""

    micro_batch_tokens: int | None = None
    groups: int | None = None
    head_chunk_tokens: int | None = None
    layer_chunk_tokens: int | None = None  # 0 asks for whole layers
    resident: int | None = None
    replicated: int | None = None
    retained: int | None = None
    cheap_retention: bool | None = None
    offload_activations: bool | None = None
    retained_on_host: int | None = None
    keep_attention: int | None = None
    second_backward: int | None = None
    sums_on_device: int | None = None
    nvme_blocks: int | None = None
    update_threads: int | None = None

    def __post_init__(self) -> None:
        count_layers(self)


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model beside the one that learns: bytes of its weights in host RAM, of buffers on
    the device that they pass through, and of a token that it computes with; seconds of a step."""

    name: str
    host: int
    device: int
    seconds: float
    token: int = 0


@dataclass(frozen=True)
class Job(Asked):
    """Everything that decides memory and time of a run besides the model and the machine.

    Of several `ranks` each owns 1/`size` of every block, and computes its part of a step's rows;
    `step_tokens` are then those of the fullest rank. Where `pieces` of them share every sequence,
    rows are pieces, which `seq_len` and all other numbers of tokens are of; only attention is over
    `pieces` times as many.
    """

    precision: str  # "bfloat16" (split fp32 master), "fp8" (with fp8 matmuls), or "float32"
    tokens_per_step: int
    seq_len: int
    clipping: bool = True  # to the exact global norm, for which gradients are kept or repeated
    balances_routers: bool = False  # their loss is over a whole step, which is therefore one group
    whole_step: bool = False  # so is the loss itself
    head_twice: bool = False  # the loss needs whole answers' log-probabilities before any gradient
    refers: bool = False  # it needs those of the model as it begins
    trained_share: float = 1.0  # of a step's tokens with their padding, those that have gradients
    least_tokens: int = 0  # of a micro-batch; 0: one row
    state_bytes: State = (("exp_avg", 4), ("exp_avg_sq", 4))  # but for those of `whole_update`
    update_arithmetic: float | None = None  # parameters/s of a thread; None: bound by memory alone
    # values of optimizer.moments that need less, with their `state_bytes`, `update_arithmetic`
    lighter_moments: tuple[tuple[str, State, float | None], ...] = ()
    whole_update: WholeUpdate | None = None
    fp8_share: float = 1.0  # of the layers' matmul FLOPs, what precision fp8 computes in fp8
    compiled: bool = False  # torch.compile fuses the layers' element-wise parts
    fused_loss: bool = False  # and passes over the logits, whatever layers are
    activations: str = UNCHANGED  # codec of recomputed layers' checkpoints
    nvme_drives: int = 0  # that hold what host RAM has no room for
    draws_weights: bool = False  # they start at random, drawn on the device
    lengths_vary: bool = False  # so micro-batches have padding and new shapes
    step_tokens: tuple[StepTokens, ...] = ()  # measured, by size; empty until rows are known
    images: ImageTokens = NO_IMAGES  # a guess until rows are known
    checkpoints_kept: int = 2
    keeps_best: bool = True  # the best checkpoint beside the newest
    checkpoints_written: int | None = None  # in the whole run, if known
    rows_per_step: int | None = None  # `tokens_per_step` in rows, where the user counts in rows
    besides: tuple[FrozenModel, ...] = ()
    ranks: int = 1  # GPUs of a host that train together
    hosts: int = 1  # with so many GPUs each
    transport: str = "gather"  # of weights in host RAM: shares, or each "read"s the one copy
    wire: str = "float32"  # dtype in which sums cross between hosts
    peers: bool = True  # a host's GPUs reach each other's memory
    pieces: int = 1

    @property
    def reads(self) -> bool:
        """Ranks upload whole blocks from the weights that they have in common."""
        return self.ranks > 1 and self.transport == "read"

    @property
    def size(self) -> int:
        """Ranks of all hosts."""
        return self.ranks * self.hosts

    @property
    def communicators(self) -> list[int]:
        """Members of each group of NCCL's that a rank is in."""
        return communicators(self.ranks, self.hosts, self.pieces)

    @property
    def rank_tokens(self) -> int:
        """Tokens of the fullest rank's part of a step, without padding: it has whole rows."""
        if self.size == 1:
            return self.tokens_per_step
        rows = -(-self.tokens_per_step // self.seq_len)
        return -(-rows // self.size) * self.seq_len

    @property
    def most_ranks(self) -> int | None:
        """Ranks that a step's rows keep busy; None: rows vary in length, and are not counted."""
        if self.lengths_vary and self.rows_per_step is None:
            return None
        row = max(self.seq_len, self.least_tokens)
        return self.rows_per_step or max(1, self.tokens_per_step // row)

    def step(self, micro_batch_tokens: int) -> StepTokens:
        """A rank's part of a step in micro-batches of this size; estimated until the examples are
        known. Examples enter micro-batches longest first, so more micro-batches mean less padding.
        Instruction data of 20 to 512 tokens took up to 1.7 times a step's tokens in one or two
        micro-batches, 1.25 in four and 1.12 in eight; on average 1.5, 1.22 and 1.11."""
        if self.step_tokens:
            # a size that was not measured has no more padding than the next larger one
            measured = (step for step in self.step_tokens if step.micro_batch >= micro_batch_tokens)
            _, most, mean, fewest, average = next(measured, self.step_tokens[-1])
        else:
            share = min(1.0, 2 * micro_batch_tokens / self.rank_tokens) if self.pads else 0.0
            most = int(self.rank_tokens * (1 + MOST_PADDING * share))
            mean = self.rank_tokens * (1 + MEAN_PADDING * share)
            fewest, average = 1, 0.0
        full = self.filled(micro_batch_tokens)
        return StepTokens(
            micro_batch_tokens, most, mean, max(fewest, -(-most // full)), max(average, mean / full)
        )

    def filled(self, micro_batch_tokens: int) -> int:
        """Tokens of a full micro-batch, which holds whole sequences."""
        if self.lengths_vary:
            return micro_batch_tokens
        return micro_batch_tokens // self.seq_len * self.seq_len or micro_batch_tokens

    @property
    def one_group(self) -> bool:
        """A step cannot be cut into groups."""
        return self.balances_routers or self.whole_step

    @property
    def pads(self) -> bool:
        """Padding comes on top of a step's tokens; rows count as full until lengths are known."""
        return self.lengths_vary and (self.rows_per_step is None or bool(self.step_tokens))


@dataclass(frozen=True, kw_only=True)
class Choices(Chosen):
    """A value for every option; settings.OPTIONS says what they mean."""

    micro_batch_tokens: int

    @property
    def chosen(self) -> dict[str, Any]:
        """All but the micro-batch, by field."""
        return {name: value for name, value in vars(self).items() if name != "micro_batch_tokens"}

    def settings(self, job: Job, nvme_folders: Sequence[Path] = ()) -> Settings:
        """The same for the engine. Raises ConfigError where options exclude each other."""
        return Settings(
            **self.chosen,
            group_size=self.micro_batches(job),
            activations=job.activations,
            compile=job.compiled,
            fused_loss=job.fused_loss,
            lengths_vary=job.lengths_vary,
            nvme_folders=tuple(nvme_folders),
            transport=job.transport,
            wire=job.wire,
        )

    def micro_batches(self, job: Job) -> int:
        """Micro-batches of the largest group."""
        return -(-job.step(self.micro_batch_tokens).most_micro_batches // self.groups)

    def group_tokens(self, job: Job) -> int:
        """Tokens of the largest group."""
        tokens = self.micro_batches(job) * job.filled(self.micro_batch_tokens)
        return min(tokens, max(job.step(self.micro_batch_tokens).most, self.micro_batch_tokens))


@dataclass(frozen=True)
class Budget:
    """Bytes that the run may use."""

    gpu: int | None  # None: it trains on the CPU, and everything is in host RAM
    host: int
    disk: int = 0  # for checkpoints, which no choice changes
    nvme: int | None = None  # None: no folder is named

    def less_spare(self) -> Budget:
        """The part that choices for speed may use up."""
        sizes = {"host": self.host} | ({} if self.gpu is None else {"gpu": self.gpu})
        spared = {tier: int(n * (1 - SPARE_SHARE)) - SPARE_BYTES for tier, n in sizes.items()}
        return replace(self, **spared)


def check_job_ranks(job: Job) -> None:
    """Raise PlanError or ConfigError for what several ranks cannot do together."""
    if job.size == 1:
        return
    if job.hosts > 1 and job.reads:
        raise ConfigError(
            "weights that several hosts read are not built yet: set memory.transport: gather"
        )
    rows = job.most_ranks
    if rows is not None and rows < job.size:
        key, least = "tokens_per_step", job.size * max(job.seq_len, job.least_tokens)
        if job.rows_per_step is not None:
            key, least = "rows_per_step", job.size // job.pieces
        found = f"a step of {number_of(rows // job.pieces, 'row')} has"
        raise too_many_ranks(found, rows, job.size, f"raise train.{key} to {least:,}")


def too_many_ranks(why: str, most: int, ranks: int, way_on: str) -> PlanError:
    """The error of a step with work for `most` ranks. way_on: what gives all of them work."""
    return PlanError(
        f"{why} work for at most {number_of(most, 'GPU')}, not for {ranks}: take at most {most} "
        f"(on one host gpus: {most}), or {way_on}"
    )
