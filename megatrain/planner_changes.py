"""What a user may ask for instead, where a plan does not fit or could be faster: a table of settings and what each costs in exactness.

A new way to save memory or time is one row of `DIALS`, at the place that its cost gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatrain.activations import UNCHANGED
from megatrain.planner_job import Job

# Keys of the config that leave less choice, and their names in a job: where things are kept, and how a step is cut.
PLACING = {
    "memory.resident": "resident",
    "train.retained": "retained",
    "train.cheap_retention": "cheap_retention",
    "memory.offload_activations": "offload",
    "memory.retained_on_host": "retained_on_host",
    "memory.second_backward": "second_backward",
    "memory.nvme_blocks": "nvme_blocks",
    "memory.nvme_arrays": "nvme_arrays",
    "memory.nvme_activations": "nvme_activations",
}
CUTTING = {
    "train.micro_batch_tokens": "micro_batch_tokens",
    "train.groups": "groups",
    "train.head_chunk_tokens": "head_chunk_tokens",
    "train.layer_chunk_tokens": "layer_chunk_tokens",
}
EXACT = "exact"

Settings = dict[str, dict[str, Any]]  # the words that ask for it -> fields of the job that it sets; mildest first


def _nothing(job: Job) -> Settings:
    return {}


@dataclass(frozen=True)
class Dial:
    """Settings of one kind. `smaller` are those that need less memory, `faster` those that may take less time for a token."""

    cost: str  # in exactness, in a word or two
    smaller: Callable[[Job], Settings] = _nothing
    faster: Callable[[Job], Settings] = _nothing
    needs_gpu: bool = False  # to be faster


@dataclass(frozen=True)
class Change:
    """Another job, the words that ask for it, and what it costs in exactness."""

    words: str
    cost: str
    job: Job


def _fewer_tokens(job: Job) -> Settings:
    return _of_sizes(job, [max(job.seq_len, job.tokens_per_step // divisor) for divisor in (2, 4, 8)])


def _more_tokens(job: Job) -> Settings:
    return _of_sizes(job, [n * job.tokens_per_step for n in (2, 4)])


def _of_sizes(job: Job, sizes: list[int]) -> Settings:
    """Steps of so many tokens, in the key that the user set. Of their rows nothing is known."""
    sizes = [size for size in sizes if size != job.tokens_per_step]
    if job.rows_per_step is None:
        return {f"train.tokens_per_step: {size}": {"tokens_per_step": size, "step_tokens": ()} for size in sizes}
    counts = [max(1, size // job.seq_len) for size in sizes]
    return {f"train.rows_per_step: {n}": {"rows_per_step": n, "tokens_per_step": n * job.seq_len, "step_tokens": ()} for n in counts}


def _to_bfloat16(job: Job) -> Settings:
    return {"precision: bfloat16": {"precision": "bfloat16"}} if job.precision == "float32" else {}


def _to_fp8(job: Job) -> Settings:
    return {"precision: fp8": {"precision": "fp8"}} if job.precision == "bfloat16" else {}


def _smaller_moments(job: Job) -> Settings:
    return {
        f"optimizer.moments: {moments}": {"state_bytes": state, "update_arithmetic": arithmetic}
        for moments, state, arithmetic in job.lighter_moments
    }


def _smaller_activations(job: Job) -> Settings:
    return {"memory.activations: int8": {"activations": "int8"}} if job.activations == UNCHANGED else {}


def _unclipped(job: Job) -> Settings:
    if not job.clipping:
        return {}
    if job.second_backward:
        return {"train.max_grad_norm: null and memory.second_backward: auto": {"clipping": False, "second_backward": None}}
    return {"train.max_grad_norm: null": {"clipping": False}}


# From costly to harmless: the last is tried first, the first only where all others together do not suffice.
DIALS = (
    Dial("does not clip", smaller=_unclipped, faster=_unclipped),
    Dial("rounds kept activations to 8 bits", smaller=_smaller_activations),
    Dial("rounds the moments", smaller=_smaller_moments, faster=_smaller_moments),
    Dial("rounds products to 8 bits", faster=_to_fp8, needs_gpu=True),
    Dial("computes in bf16", smaller=_to_bfloat16, faster=_to_bfloat16),
    Dial("changes the batch", smaller=_fewer_tokens, faster=_more_tokens),
)


def left_open(job: Job) -> Iterator[Change]:
    """The same job with fewer dials set by hand: the result is the same, up to the order in which sums are rounded."""
    asked: list[str] = []
    for dials in (PLACING, CUTTING):
        found = [key for key, name in dials.items() if getattr(job, name) is not None]
        asked += found
        if found:
            auto: dict[str, Any] = dict.fromkeys(dials.values())
            job = replace(job, **auto)
            yield Change(" and ".join(f"{key}: auto" for key in asked), EXACT, job)


def smaller_jobs(job: Job) -> Iterator[Change]:
    """Jobs that need less memory, in rising order of what they cost."""
    opened = list(left_open(job))
    yield from opened
    for combined in product(*([None, *dial.smaller(job).items()] for dial in DIALS)):
        settings = [(dial.cost, *setting) for dial, setting in zip(DIALS, combined, strict=True) if setting is not None][::-1]
        if settings:
            words, costs = " and ".join(words for _, words, _ in settings), ", ".join(cost for cost, _, _ in settings)
            fields: dict[str, Any] = {name: value for _, _, values in settings for name, value in values.items()}
            yield Change(words, costs, replace(job, **fields))
            for change in opened:
                yield Change(f"{change.words} and {words}", costs, replace(change.job, **fields))


def with_nvme(job: Job) -> Iterator[Change]:
    """The same job with room on a drive, if it has none: exact, and slower than anything else."""
    if not job.nvme_drives:
        yield Change("memory.nvme: FOLDER", EXACT, replace(job, nvme_drives=1))


def faster_jobs(job: Job, *, on_gpu: bool) -> Iterator[Change]:
    """Jobs that may take less time for a token: one setting each, in rising order of what they cost."""
    yield from left_open(job)
    for dial in reversed(DIALS):
        if on_gpu or not dial.needs_gpu:
            for words, fields in dial.faster(job).items():
                yield Change(words, dial.cost, replace(job, **fields))
