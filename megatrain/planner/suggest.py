"""Suggestions: the cheapest change that makes a plan fit, how much memory it lacks, and the changes
that would make it faster. Arithmetic only.

A new way to save memory or time is one row of `REMEDIES`, placed by what it costs in exactness.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, NamedTuple

from megatrain.errors import number_of
from megatrain.machine.hardware import GIB
from megatrain.planner.cost.shape import ModelShape
from megatrain.planner.job import Choices, Job
from megatrain.planner.memory import disk_bytes
from megatrain.planner.search import Search
from megatrain.planner.simulation import WORTH_NAMING, Timing
from megatrain.planner.timing import StepCosts
from megatrain.schedule import UNCHANGED
from megatrain.settings import OPTIONS

EXACT = "exact"
TIER_WORDS = {"gpu": "GPU memory", "host": "host RAM", "nvme": "NVMe space", "disk": "disk space"}
PRECISION_GIB = 0.1  # to which missing memory is found
MOST_GIB = 16_384
WORTH_SAYING = 1.03  # times as fast: predictions are not known much better
NEARLY = 0.9  # share of a remedy's best gain that a milder setting must have
MOST_SUGGESTIONS = 3
MUCH_HELD = 4 * GIB  # of RAM by others, beyond what a system always takes
MORE_RAM = (1.5, 2.0)  # times what there is

Offers = dict[str, dict[str, Any]]  # config keys as words -> fields of the job; mildest first


@dataclass(frozen=True)
class Change:
    """Another job, the words that ask for it, and what it costs in exactness."""

    words: str
    cost: str
    job: Job


class Remedy(NamedTuple):
    """One kind of setting, for a job that lacks memory or speed."""

    cost: str  # in exactness, in a word or two
    smaller: Callable[[Job], Offers] = lambda job: {}  # those that need less memory
    faster: Callable[[Job], Offers] = lambda job: {}  # those that may take less time per token
    needs_gpu: bool = False  # only a GPU is faster with them


def _instead(key: str, before: str, now: str) -> Callable[[Job], Offers]:
    """The config's `key` changed to `now`, for jobs in which it is `before`."""
    field = key.rpartition(".")[2]
    return lambda job: {f"{key}: {now}": {field: now}} if getattr(job, field) == before else {}


def _moments(job: Job) -> Offers:
    return {
        f"optimizer.moments: {moments}": {"state_bytes": state, "update_arithmetic": arithmetic}
        for moments, state, arithmetic in job.lighter_moments
    }


def _unclipped(job: Job) -> Offers:
    words, fields = "train.max_grad_norm: null", {"clipping": False}
    if job.clipping and job.second_backward:  # which exists for the norm alone
        return {f"{words} and memory.second_backward: auto": {**fields, "second_backward": None}}
    return {words: fields} if job.clipping else {}


def _steps(job: Job, *factors: float) -> Offers:
    """Steps of other sizes, in the key that the user set; how their rows pad is not known."""
    found: Offers = {}
    least = job.size * job.seq_len
    for tokens in (max(least, int(job.tokens_per_step * factor)) for factor in factors):
        rows, words = None, f"train.tokens_per_step: {tokens}"
        if job.rows_per_step is not None:
            rows = max(1, tokens // job.seq_len)
            tokens, words = rows * job.seq_len, f"train.rows_per_step: {rows}"
        if tokens != job.tokens_per_step:
            found[words] = {"rows_per_step": rows, "tokens_per_step": tokens, "step_tokens": ()}
    return found


BATCH, UNCLIPPED, MOMENTS = "changes the batch", "does not clip", "rounds the moments"
# Where a mixture waits for the host's update, in this order: by how much more it hides.
AGAINST_UPDATE = (BATCH, UNCLIPPED, MOMENTS)
_BFLOAT16 = _instead("precision", "float32", "bfloat16")
_WIRE = _instead("train.wire", "float32", "bfloat16")
# From costly to harmless: the last is tried first, the first only where all others do not suffice.
REMEDIES = (
    Remedy(UNCLIPPED, _unclipped, _unclipped),
    Remedy(
        "rounds activation checkpoints to 8 bits", _instead("memory.activations", UNCHANGED, "int8")
    ),
    Remedy(MOMENTS, _moments, _moments),
    Remedy(
        "rounds matmul operands to 8 bits",
        faster=_instead("precision", "bfloat16", "fp8"),
        needs_gpu=True,
    ),
    Remedy("computes in bf16", _BFLOAT16, _BFLOAT16),
    Remedy(BATCH, lambda job: _steps(job, 1 / 2, 1 / 4, 1 / 8), lambda job: _steps(job, 2, 4)),
    Remedy(
        "rounds each host's sums to bf16 once",
        faster=lambda job: _WIRE(job) if job.hosts > 1 else {},
    ),
)


def left_open(job: Job) -> Iterator[Change]:
    """The same job with fewer options set by hand. Exact up to the order in which sums round."""
    asked: list[str] = []
    for group in ("placing", "cutting"):
        options = [option for option in OPTIONS if option.key and option.group == group]
        found = [option.key for option in options if getattr(job, option.field) is not None]
        if found:
            asked += found
            unset: dict[str, Any] = {option.field: None for option in options}
            job = replace(job, **unset)
            yield Change(" and ".join(f"{key}: auto" for key in asked), EXACT, job)


def smaller_jobs(job: Job) -> Iterator[Change]:
    """Jobs that need less memory, in rising order of what they cost."""
    opened = list(left_open(job))
    yield from opened
    costs = [remedy.cost for remedy in REMEDIES]
    for combined in product(*([None, *remedy.smaller(job).items()] for remedy in REMEDIES)):
        # the cheapest first, as words name them
        chosen = [(c, *offer) for c, offer in zip(costs, combined, strict=True) if offer][::-1]
        if chosen:
            cost = ", ".join(cost for cost, _, _ in chosen)
            words = " and ".join(keys for _, keys, _ in chosen)
            changed = {field: value for *_, fields in chosen for field, value in fields.items()}
            yield Change(words, cost, replace(job, **changed))
            for change in opened:
                yield Change(f"{change.words} and {words}", cost, replace(change.job, **changed))


def faster_jobs(job: Job, *, on_gpu: bool) -> Iterator[Change]:
    """Jobs that may take less time per token: one setting each, in rising order of their cost."""
    yield from left_open(job)
    for remedy in reversed(REMEDIES):
        if on_gpu or not remedy.needs_gpu:
            for words, fields in remedy.faster(job).items():
                yield Change(words, remedy.cost, replace(job, **fields))


# -- to fit ----------------------------------------------------------------------------------------


def cheapest_fix(short: Collection[str], search: Search) -> str:
    """The first change, from harmless to costly, that makes the job fit; else what would. Fixes of
    memory and of the disk are independent."""
    fixes = []
    if memory := sorted({*short} - {"disk"}):
        found = [*islice(_that_fit(search, smaller_jobs(search.job)), 1)]
        if not search.job.nvme_drives and not (found and found[0].cost == EXACT):
            drive = Change("memory.nvme: FOLDER", EXACT, replace(search.job, nvme_drives=1))
            found += _that_fit(search, [drive])
        instead = f"set {' or, exact but slower, '.join(change.words for change in found)}"
        if not found:
            words = " and ".join(TIER_WORDS[tier] for tier in memory)
            instead = f"no setting frees enough {words}: take a larger machine or a smaller model"
        lacking = " or ".join(_allowed(search, tier, nbytes) for tier, nbytes in missing(search))
        fixes.append(f"{instead}, or add {lacking}" if lacking else instead)
    if "disk" in short:
        least = disk_bytes(replace(search.job, checkpoints_kept=1), search.shape)
        fixes.append(
            "set checkpoint.keep: 1"
            if sum(least.values()) <= search.budget.disk
            else "free disk space, or set output to a folder on a larger disk"
        )
    return "; ".join(fixes)


def held_by_others(search: Search, needed: int) -> str:
    """The removable reason for a lack of host RAM, in brackets; empty if there is none. needed:
    bytes of a rank."""
    total = search.hardware.host_total_bytes
    held = search.job.ranks * (total - search.hardware.host_available_bytes)
    if held <= MUCH_HELD or needed > total:
        return ""
    return f" (other programs hold {held / GIB:.1f} GiB of RAM now: this may pass)"


def _that_fit(search: Search, changes: Iterable[Change]) -> Iterator[Change]:
    return (change for change in changes if replace(search, job=change.job).fits_somehow())


def missing(search: Search) -> tuple[tuple[str, int], ...]:
    """(tier, bytes): the least that must be added for the job to fit as it is, to each tier that
    suffices by itself; where none does, to all of them together."""

    def enough(**gib: float) -> bool:
        more = {tier: (getattr(search.budget, tier) or 0) + int(n * GIB) for tier, n in gib.items()}
        return replace(search, budget=replace(search.budget, **more)).fits_somehow()

    lacks = {"host": _least(lambda size: enough(host=size))}
    on_gpu = search.budget.gpu is not None
    if on_gpu:
        lacks["gpu"] = _least(lambda size: enough(gpu=size))
    if on_gpu and not any(lacks.values()):
        host = lacks["host"] = _least(lambda size: enough(host=size, gpu=MOST_GIB))
        if host is not None:
            lacks["gpu"] = _least(lambda size: enough(host=host, gpu=size))
    return tuple((tier, int(size * GIB)) for tier, size in lacks.items() if size is not None)


def _least(enough: Callable[[float], bool]) -> float | None:
    """The smallest size in GiB that is enough, to 0.1 GiB; None if none is."""
    size = 1.0
    while not enough(size):
        size *= 4
        if size > MOST_GIB:
            return None
    low, high = (size / 4 if size > 1 else 0.0), size
    while high - low > PRECISION_GIB:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _allowed(search: Search, tier: str, nbytes: int) -> str:
    """The amount in words, and the key that allows it if the machine has it."""
    hardware, ranks = search.hardware, search.job.ranks if tier == "host" else 1
    words = f"{ranks * nbytes / GIB:.1f} GiB of {TIER_WORDS[tier]}"
    free = {"host": ranks * hardware.host_available_bytes}
    if hardware.gpu is not None:
        free["gpu"] = hardware.gpu.free_bytes
    total = ranks * (getattr(search.budget, tier) + nbytes)
    if free[tier] < total:
        return words
    return f"{words} (the machine has it: memory.{tier}: {-(-total // GIB)}GiB)"


# -- to be faster ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suggestion:
    """A change that a user may make for speed."""

    words: str  # the settings that ask for it
    cost: str  # in exactness, in a word or two
    speedup: float  # factor of tokens per second: at least, since not every choice is tried
    tokens_per_s: float
    why: str  # what changes in the step


def faster(choices: Choices, before: Timing, search: Search) -> tuple[Suggestion, ...]:
    """Changes with the largest gain over a plan that fits, the cheapest in exactness first. Each is
    tried with `choices` and their neighbours: a whole search may find more."""
    found: dict[str, list[Suggestion]] = {}
    for change, changed in _alternatives(search):
        # what is given back to the planner may lie far from what was asked for
        candidates = changed.combined() if change.cost == EXACT else changed.about(choices)
        best = changed.replicated(changed.fastest_of(candidates, changed.placed))
        if best is None:
            continue
        after = StepCosts(best, changed.machine).predict()
        speedup = after.tokens_per_s / before.tokens_per_s
        if speedup >= WORTH_SAYING:
            why = _shorter_wait(before, after) or _less_work(search, choices, changed, best.choices)
            better = Suggestion(change.words, change.cost, speedup, after.tokens_per_s, why)
            found.setdefault(change.cost, []).append(better)
    suggestions = []
    for of_a_kind in found.values():  # the mildest that gains nearly as much as the best
        enough = 1 + NEARLY * (max(one.speedup for one in of_a_kind) - 1)
        suggestions.append(next(one for one in of_a_kind if one.speedup >= enough))
    suggestions.sort(key=lambda one: -one.speedup)
    order = [*found]  # the mildest first
    if bound_by_update(before, search.shape):
        order = [EXACT, *AGAINST_UPDATE, *order]
        suggestions.sort(key=lambda one: min(order.index(one.cost), 1 + len(AGAINST_UPDATE)))
        return tuple(suggestions[:MOST_SUGGESTIONS])
    return tuple(sorted(suggestions[:MOST_SUGGESTIONS], key=lambda one: order.index(one.cost)))


def bound_by_update(timing: Timing, shape: ModelShape) -> bool:
    """True for a mixture whose step waits for the host's update more than for anything else: all
    experts are updated for the work that a few do."""
    seconds = timing.waits["update"]
    most = seconds == max(timing.waits.values()) and seconds > WORTH_NAMING * timing.seconds
    return shape.idle_parameters > 0 and most


def _alternatives(search: Search) -> Iterator[tuple[Change, Search]]:
    """Other jobs on this machine, and this job with more RAM, in rising order of their cost."""
    budget = search.budget.less_spare()
    for change in faster_jobs(search.job, on_gpu=budget.gpu is not None):
        yield change, replace(search, job=change.job, budget=budget)
    for times in MORE_RAM:
        more = int(search.budget.host * (times - 1)) // GIB * GIB
        words = f"{search.job.ranks * more // GIB} GiB more host RAM"
        change = Change(words, "a larger machine", search.job)
        yield change, replace(search, budget=replace(budget, host=budget.host + more))


def _shorter_wait(before: Timing, after: Timing) -> str:
    """The wait that shrinks most; empty if none shrinks by what is worth saying."""
    shares = {
        wait: (seconds / before.seconds, after.waits[wait] / after.seconds)
        for wait, seconds in before.waits.items()
    }
    wait, (was, now) = max(shares.items(), key=lambda item: item[1][0] - item[1][1])
    if was - now < 1 - 1 / WORTH_SAYING:
        return ""
    return f"waits for the {wait} fall from {was:.0%} to {now:.0%} of a step"


def _less_work(search: Search, was: Choices, changed: Search, now: Choices) -> str:
    """The work that the device saves."""
    layers = search.shape.layers_back
    before, after = (max(0, layers - c.retained - c.retained_on_host) for c in (was, now))
    if after < before:
        return f"{number_of(after, 'recomputed layer')} instead of {before}"
    if changed.job.precision != search.job.precision:
        return f"faster matmuls in {changed.job.precision}"
    if was.second_backward > now.second_backward:
        fewer = f"of {number_of(now.second_backward, 'layer')} computed twice"
        return f"gradients {fewer if now.second_backward else 'computed once'}"
    return "less to compute per token"
