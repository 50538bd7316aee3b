"""The planner: what a run will hold on which tier, and what it chooses where the user left the choice. Arithmetic only.

Model shape, hardware and job go in; a `Plan` comes out, a table of bytes by tier and array. Nothing is allocated, no weight is
read and no device is asked. The engine allocates what the plan says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from megatrain.errors import PlanError
from megatrain.hardware import GIB, MIB, Hardware, update_threads

if TYPE_CHECKING:
    from rich.console import Console

    from megatrain.models.shape import ModelShape

WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}
REMAINDER_BYTES = {"bfloat16": 2, "float32": 0}  # float32's weight is the master itself
INPUT_BYTES = 24  # of a token: its id, its position among the targets and its label, int64 each
SUM_BYTES = 4  # gradients are summed in fp32 whatever the precision

HUGE_PAGE_BYTES = 2 << 20  # the store's slabs are whole huge pages
LAYER_SLOTS = 2  # one computes while the other is filled
TRAVELLING_SUMS = 2  # of gradient sums that wait on the host between groups, one is added to while another leaves
GRADIENT_STAGES = 2  # one is copied to the host while the other is filled
HOST_STAGES = 3  # without a stored gradient: one arrives, one waits, one is used by the update

# Measured on an H200: layers of 7B to 32B models run as fast at 2k to 16k tokens as at 32k, and a 1.8B layer is fastest at 16k.
AUTO_MICRO_BATCH_TOKENS = {"cuda": 16_384, "cpu": 2_048}
TIER_WORDS = {"gpu": "GPU memory", "host": "host RAM", "disk": "disk space"}
SMALLEST_HEAD_CHUNK_TOKENS = 256
# What torch's caching allocator reserves and does not use: it grows with the working set, where tensors of many sizes come and go.
# H200 with expandable segments: 37 to 83 MiB for working sets of 0.2 to 1.4 GiB, 300 for 4.9 GiB (benchmarks/plan_check.py).
ALLOCATOR_SLACK_BYTES, ALLOCATOR_SLACK_SHARE = 32 * MIB, 0.05
NOT_ALLOCATED = ("allocator slack", "CUDA context")  # rows of the device that the driver counts and PyTorch does not


@dataclass(frozen=True)
class Job:
    """What the user asks for, as far as memory is concerned. None leaves the choice to the planner."""

    precision: str  # "bfloat16" (split fp32 master) or "float32"
    tokens_per_step: int
    seq_len: int
    clipping: bool = True  # exact global-norm clipping keeps every gradient until the norm is known
    state_bytes: tuple[tuple[str, int], ...] = (("exp_avg", 4), ("exp_avg_sq", 4))  # the optimizer's arrays, bytes per parameter
    micro_batch_tokens: int | None = None
    groups: int | None = None
    update_threads: int | None = None
    padded_tokens_per_step: int | None = None  # with padding; None: as tokens_per_step
    checkpoints_kept: int = 2
    keeps_best: bool = True  # `best` can hold on to one checkpoint more
    checkpoints_written: int | None = None  # in the whole run, if known


@dataclass(frozen=True)
class Choices:
    """The dials that the planner turns."""

    micro_batch_tokens: int
    groups: int
    gradient_sums: str  # where micro-batches' gradients are summed: "ring" (a block at a time), "device" or "host" (all blocks)
    head_chunk_tokens: int
    update_threads: int


@dataclass(frozen=True)
class Budget:
    """Bytes that the run may use; `gpu` is None when it trains on the CPU."""

    gpu: int | None
    host: int
    disk: int


@dataclass(frozen=True)
class Plan:
    """What the run will hold, and what it may. Tables map arrays to bytes."""

    choices: Choices
    reasons: tuple[tuple[str, str], ...]  # (what, why it is so), for the reader
    device: dict[str, int]  # where it computes: the GPU, or host RAM when training on the CPU
    host: dict[str, int]
    disk: dict[str, int]
    working_sets: dict[str, int]  # the parts of which device["working set"] is the largest
    budget: Budget
    job: Job
    parameters: int
    fix: str | None  # what would make it fit, if it does not

    @property
    def boundary_bytes(self) -> int:
        """The boundary activations: the part of the device's memory that grows with depth."""
        return self.device["boundary activations"]

    @property
    def allocated_bytes(self) -> int:
        """Peak of what PyTorch itself allocates where it computes (on CUDA, torch.cuda.max_memory_allocated)."""
        return sum(size for name, size in self.device.items() if name not in NOT_ALLOCATED)

    @property
    def gpu_bytes(self) -> int:
        """Peak GPU memory as the driver sees it; 0 when training on the CPU."""
        return 0 if self.budget.gpu is None else sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Peak resident memory of the process; on the CPU the device's arrays live there too."""
        return sum(self.host.values()) + (sum(self.device.values()) if self.budget.gpu is None else 0)

    @property
    def disk_bytes(self) -> int:
        """Peak disk space of the run folder's checkpoints."""
        return sum(self.disk.values())

    @property
    def tiers(self) -> tuple[tuple[str, int, int], ...]:
        """(name, bytes needed, bytes to be had) of every tier in use."""
        gpu = () if self.budget.gpu is None else (("gpu", self.gpu_bytes, self.budget.gpu),)
        return (*gpu, ("host", self.host_bytes, self.budget.host), ("disk", self.disk_bytes, self.budget.disk))

    @property
    def short(self) -> tuple[str, ...]:
        """The tiers that are too small."""
        return tuple(name for name, need, have in self.tiers if need > have)

    @property
    def fits(self) -> bool:
        return not self.short

    def check(self) -> None:
        """Raise PlanError, naming need, budget and the cheapest fix, if a tier is too small."""
        if self.fits:
            return
        lacks = [
            f"{need / GIB:.2f} GiB of {TIER_WORDS[name]}, where {have / GIB:.2f} GiB can be had"
            for name, need, have in self.tiers
            if name in self.short
        ]
        raise PlanError(f"the run does not fit: it needs {' and '.join(lacks)}; {self.fix}")

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able values, for plan.json and `plan --json`. Bytes throughout."""
        totals = {name: {"need": need, "have": have, "fits": need <= have} for name, need, have in self.tiers}
        return asdict(self) | {"reasons": dict(self.reasons), "totals": totals, "fits": self.fits}

    def render(self, console: Console) -> None:
        """Print the plan as tables: bytes per tier and array, choices and what decided them."""
        from megatrain.planner_view import render

        render(self, console)


def make_plan(job: Job, shape: ModelShape, hardware: Hardware, *, gpu_limit: int | None = None, host_limit: int | None = None) -> Plan:
    """Choose what `job` leaves open and lay out the bytes. Never raises for lack of memory: `Plan.check` does.

    gpu_limit, host_limit: the user's own budgets in bytes (memory.gpu, memory.host); None takes what the machine has. A host budget
    above what the machine shows is taken at its word: some virtual machines show more RAM only as it is used.
    """
    budget = Budget(
        gpu=None if hardware.gpu is None else min(gpu_limit or hardware.gpu.free_bytes, hardware.gpu.free_bytes),
        host=host_limit or hardware.host_available_bytes,
        disk=hardware.disk_free_bytes,
    )
    plan = _first_fit(job, shape, hardware, budget)
    return plan if plan.fits else replace(plan, fix=_cheapest_fix(plan, shape, hardware))


# -- choosing -----------------------------------------------------------------------------------------------------------------------


def _first_fit(job: Job, shape: ModelShape, hardware: Hardware, budget: Budget) -> Plan:
    """The first candidate, in order of preference, whose memory fits; if none does, the one that is nearest to it."""
    tried = []
    for choices in _candidates(job, shape, hardware):
        plan = lay_out(choices, job, shape, hardware, budget)
        if set(plan.short) <= {"disk"}:  # no choice made here changes the disk's share
            return plan
        tried.append(plan)
    return min(tried, key=lambda plan: max(need / max(have, 1) for name, need, have in plan.tiers if name != "disk"))


def _candidates(job: Job, shape: ModelShape, hardware: Hardware) -> Iterator[Choices]:
    """Few groups before large micro-batches: a group more sends every weight over PCIe again, and sums gradients of all blocks."""
    threads = job.update_threads or update_threads(hardware.physical_cores)
    sizes = [job.micro_batch_tokens] if job.micro_batch_tokens else _micro_batch_sizes(job, shape, hardware)
    places = ("device", "host") if hardware.gpu else ("device",)  # on the CPU they are one
    for groups in _group_counts(job, min(sizes)):
        for tokens in sizes:
            chunk = _head_chunk(tokens, job, shape)
            for sums in ("ring",) if groups == 1 else places:
                yield Choices(tokens, groups, sums, chunk, threads)


def _micro_batch_sizes(job: Job, shape: ModelShape, hardware: Hardware) -> list[int]:
    """Sizes worth trying, largest first: those that were dry-run, up to the cap and to a step's tokens, and one row at least."""
    cap = min(AUTO_MICRO_BATCH_TOKENS["cuda" if hardware.gpu else "cpu"], _step_tokens(job))
    sizes = [n for n in shape.layer.sizes if job.seq_len <= n <= cap]
    return sorted(sizes, reverse=True) or [job.seq_len]


def _group_counts(job: Job, micro_batch_tokens: int) -> list[int]:
    if job.groups:
        return [job.groups]
    most = max(1, -(-_step_tokens(job) // micro_batch_tokens))
    doubling = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*doubling, most]


def _head_chunk(micro_batch_tokens: int, job: Job, shape: ModelShape) -> int:
    """The largest chunk whose working set is no larger than what the layers need anyway."""

    def need(chunk: int) -> int:
        return head_bytes(chunk, micro_batch_tokens, job, shape)

    room = max(shape.layer.at(micro_batch_tokens), shape.embed.at(micro_batch_tokens), need(SMALLEST_HEAD_CHUNK_TOKENS))
    return max((chunk for chunk in shape.head.sizes if chunk <= micro_batch_tokens and need(chunk) <= room), default=shape.head.sizes[0])


def _step_tokens(job: Job) -> int:
    return job.padded_tokens_per_step or job.tokens_per_step


# -- bytes --------------------------------------------------------------------------------------------------------------------------


def lay_out(choices: Choices, job: Job, shape: ModelShape, hardware: Hardware, budget: Budget) -> Plan:
    """The bytes that `choices` make, whether they fit or not."""
    sets = {
        "layer, one micro-batch": shape.layer.at(choices.micro_batch_tokens),
        "embedding, one micro-batch": shape.embed.at(choices.micro_batch_tokens),
        "head, one chunk": head_bytes(choices.head_chunk_tokens, choices.micro_batch_tokens, job, shape),
    }
    return Plan(
        choices=choices,
        reasons=_reasons(choices, job, sets),
        device=device_bytes(choices, job, shape, hardware, max(sets.values())),
        host=host_bytes(choices, job, shape, hardware),
        disk=disk_bytes(job, shape),
        working_sets=sets,
        budget=budget,
        job=job,
        parameters=shape.parameters,
        fix=None,
    )


def device_bytes(choices: Choices, job: Job, shape: ModelShape, hardware: Hardware, working_set: int) -> dict[str, int]:
    """What lies where the model computes. Only the boundary activations grow with depth (and sums on the device, if chosen)."""
    weight = WEIGHT_BYTES[job.precision]
    embed, *layers, head = shape.block_numel
    largest = max(shape.block_numel)
    in_group = _micro_batches_per_group(choices, job)
    group_tokens = min(in_group * choices.micro_batch_tokens, max(_step_tokens(job), choices.micro_batch_tokens))
    table = {
        "layer slots": min(LAYER_SLOTS, len(layers)) * max(layers) * weight,
        # a tied embedding stays for the head; otherwise the two take turns
        "embedding and head slot": (embed + head if shape.tied else max(embed, head)) * weight,
        "gradient sums": _device_sums(choices, shape) * SUM_BYTES,
        "gradient staging": GRADIENT_STAGES * largest * weight,
        "boundary activations": group_tokens * shape.hidden_size * weight * (len(layers) + 1),
        "token ids and targets": max(_step_tokens(job), group_tokens) * INPUT_BYTES,
        "rotary tables and masks": in_group * shape.calls.at(choices.micro_batch_tokens),
        "working set": working_set,
    }
    if hardware.gpu:
        table |= {
            "cuBLAS workspaces": hardware.workspace_bytes,
            "allocator slack": ALLOCATOR_SLACK_BYTES + int(ALLOCATOR_SLACK_SHARE * working_set),
            "CUDA context": hardware.context_bytes,
        }
    return table


def head_bytes(chunk_tokens: int, micro_batch_tokens: int, job: Job, shape: ModelShape) -> int:
    """A chunk's working set and hidden states, the gradients of the chunk before, and the micro-batch's gradient that the chunks fill."""
    embed, *_, head = shape.block_numel
    weights = embed + head if shape.tied else head
    # the chunk before lets go of its gradients when this one's are there
    previous = chunk_tokens * shape.hidden_size + weights if chunk_tokens < micro_batch_tokens else 0
    rows = (chunk_tokens + micro_batch_tokens) * shape.hidden_size
    return shape.head.at(chunk_tokens) + (rows + previous) * WEIGHT_BYTES[job.precision]


def _device_sums(choices: Choices, shape: ModelShape) -> int:
    """Elements of fp32 gradient sums on the device."""
    if choices.gradient_sums == "device":
        return sum(shape.block_numel)
    embed, *others = shape.block_numel
    buffers = TRAVELLING_SUMS if choices.gradient_sums == "host" else 1
    # a tied embedding's gradient begins at the head and ends at the embedding, so it has sums of its own all the way
    return embed + buffers * max(others) if shape.tied else buffers * max(shape.block_numel)


def host_bytes(choices: Choices, job: Job, shape: ModelShape, hardware: Hardware) -> dict[str, int]:
    """What lies in host RAM: every array of the store, and the process itself."""
    numel = sum(shape.block_numel)
    weight = WEIGHT_BYTES[job.precision]
    table = {"weight": numel * weight, "remainder": numel * REMAINDER_BYTES[job.precision]}
    table |= {name: numel * size for name, size in job.state_bytes}
    table |= {
        "grad": numel * weight if job.clipping else 0,
        "gradient staging": 0 if job.clipping else HOST_STAGES * max(shape.block_numel) * weight,
        "gradient sums": numel * SUM_BYTES if choices.gradient_sums == "host" else 0,
    }
    slabs = {name: -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES for name, size in table.items() if size}
    return slabs | {"the process so far": hardware.resident_bytes, "libraries at work": hardware.library_bytes}


def disk_bytes(job: Job, shape: ModelShape) -> dict[str, int]:
    """Checkpoints at the worst moment: those kept, `best` if it is older, and the one being written (`final` is hard links)."""
    per_parameter = WEIGHT_BYTES[job.precision] + REMAINDER_BYTES[job.precision] + sum(size for _, size in job.state_bytes)
    copies = job.checkpoints_kept + int(job.keeps_best) + 1
    if job.checkpoints_written is not None:
        copies = min(copies, job.checkpoints_written)
    return {f"checkpoint {i + 1}": shape.parameters * per_parameter for i in range(copies)}


def _micro_batches_per_group(choices: Choices, job: Job) -> int:
    micro_batches = -(-_step_tokens(job) // choices.micro_batch_tokens)
    return max(1, -(-micro_batches // choices.groups))


# -- words --------------------------------------------------------------------------------------------------------------------------


def _reasons(choices: Choices, job: Job, sets: dict[str, int]) -> tuple[tuple[str, str], ...]:
    sums = {
        "ring": "one block's sums at a time: all micro-batches pass a block together",
        "device": "all blocks' sums stay on the GPU between groups",
        "host": "all blocks' sums stay in host RAM between groups, for the GPU has no room",
    }
    return (
        ("micro-batch", "as asked" if job.micro_batch_tokens else "the largest that fits and still gains speed"),
        ("groups", "as asked" if job.groups else "the fewest whose boundary activations fit"),
        ("gradient sums", sums[choices.gradient_sums]),
        ("head chunk", "the largest that needs no more than the layers do"),
        ("update threads", "as asked" if job.update_threads else "physical cores less two"),
        ("working set", f"decided by: {max(sets, key=lambda name: sets[name])}"),
    )


def _cheapest_fix(plan: Plan, shape: ModelShape, hardware: Hardware) -> str:
    """For memory and for disk, if too small: the first setting, from harmless to costly, that makes it fit; else what would."""
    fixes = []
    if memory := set(plan.short) - {"disk"}:
        words = " and ".join(TIER_WORDS[tier] for tier in sorted(memory))
        fixes.append(
            _first_that_fits(("gpu", "host"), _smaller_memory(plan.job), plan, shape, hardware)
            or f"no setting frees enough {words}: take a larger machine or a smaller model"
        )
    if "disk" in plan.short:
        fixes.append(
            _first_that_fits(("disk",), _smaller_checkpoints(plan.job), plan, shape, hardware)
            or "free disk space, or set output to a folder on a larger disk"
        )
    return "; ".join(fixes)


def _first_that_fits(
    tiers: tuple[str, ...], jobs: Iterator[tuple[str, Job]], plan: Plan, shape: ModelShape, hardware: Hardware
) -> str | None:
    for words, job in jobs:
        if set(tiers).isdisjoint(_first_fit(job, shape, hardware, plan.budget).short):
            return f"set {words}"
    return None


def _smaller_checkpoints(job: Job) -> Iterator[tuple[str, Job]]:
    """Jobs that need less disk, each with the words that ask for it."""
    if job.checkpoints_kept > 1:
        yield "checkpoint.keep: 1", replace(job, checkpoints_kept=1)


def _smaller_memory(job: Job) -> Iterator[tuple[str, Job]]:
    """Jobs that need less memory, each with the words that ask for it; what changes the result least comes first."""
    if job.micro_batch_tokens or job.groups:
        yield "train.micro_batch_tokens: auto and train.groups: auto", replace(job, micro_batch_tokens=None, groups=None)
    fewer_tokens = [max(job.seq_len, job.tokens_per_step // divisor) for divisor in (2, 4, 8)]
    for unclipped in (False, True) if job.clipping else (False,):
        for precision in dict.fromkeys((job.precision, "bfloat16")):
            for tokens in dict.fromkeys((job.tokens_per_step, *fewer_tokens)):
                words = {
                    f"train.tokens_per_step: {tokens}": tokens != job.tokens_per_step,
                    f"precision: {precision}": precision != job.precision,
                    "train.max_grad_norm: null": unclipped,
                }
                if any(words.values()):
                    padded = job.padded_tokens_per_step if tokens == job.tokens_per_step else None
                    milder = replace(job, tokens_per_step=tokens, padded_tokens_per_step=padded, precision=precision)
                    yield (
                        " and ".join(word for word, used in words.items() if used),
                        replace(milder, clipping=job.clipping and not unclipped),
                    )
