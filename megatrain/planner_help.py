"""What would help: the cheapest change that makes a plan fit, how much memory it lacks, and what would make it faster. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatrain import timing
from megatrain.hardware import GIB
from megatrain.planner_bytes import disk_bytes
from megatrain.planner_changes import EXACT, Change, faster_jobs, smaller_jobs, with_nvme
from megatrain.planner_job import Choices
from megatrain.planner_search import Search
from megatrain.timing import Timing

if TYPE_CHECKING:
    from megatrain.planner import Plan

TIER_WORDS = {"gpu": "GPU memory", "host": "host RAM", "nvme": "NVMe space", "disk": "disk space"}
PRECISION_GIB = 0.1  # of what is said to be missing
MOST_GIB = 16_384
WORTH_SAYING = 1.03  # times as fast: predictions are not known much better
NEARLY = 0.9  # of a dial's best gain that a milder setting must have
MOST_SUGGESTIONS = 3
MORE_RAM = (1.5, 2.0)  # times what there is


@dataclass(frozen=True)
class Suggestion:
    """A change that a user may make for speed."""

    words: str
    cost: str  # in exactness, in a word or two
    speedup: float  # of tokens per second, predicted; it may be more, since not every choice is tried anew
    tokens_per_s: float
    why: str  # what changes in the step


# -- to fit -------------------------------------------------------------------------------------------------------------------------


def cheapest_fix(plan: Plan, search: Search) -> str:
    """For memory and for disk, if too small: the first setting, from harmless to costly, that makes it fit; else what would."""
    fixes = []
    if memory := set(plan.short) - {"disk"}:
        words = " and ".join(TIER_WORDS[tier] for tier in sorted(memory))
        milder = (change for change in smaller_jobs(plan.job) if replace(search, job=change.job).fits_somehow())
        found = [change] if (change := next(milder, None)) else []
        if not found or found[0].cost != EXACT:
            found += [change for change in with_nvme(plan.job) if replace(search, job=change.job).fits_somehow()]
        settings = " or, exact but slower, ".join(change.words for change in found)
        instead = f"set {settings}" if found else f"no setting frees enough {words}: take a larger machine or a smaller model"
        lacking = " or ".join(_allowed(search, tier, nbytes) for tier, nbytes in missing(search))
        fixes.append(f"{instead}, or add {lacking}" if lacking else instead)
    if "disk" in plan.short:
        fewer = replace(plan, disk=disk_bytes(replace(plan.job, checkpoints_kept=1), search.shape))
        enough = "disk" not in fewer.short
        fixes.append("set checkpoint.keep: 1" if enough else "free disk space, or set output to a folder on a larger disk")
    return "; ".join(fixes)


def missing(search: Search) -> tuple[tuple[str, int], ...]:
    """(tier, bytes more of it that would make the job fit as it is), of each tier that would do alone; of all together if none would."""

    def enlarged(gpu: float, host: float) -> Search:
        device = None if search.room.device is None else search.room.device + int(gpu * GIB)
        return replace(search, room=replace(search.room, device=device, host=search.room.host + int(host * GIB)))

    lacks = {"host": _least(lambda size: enlarged(0, size).fits_somehow())}
    if search.room.device is not None:
        lacks["gpu"] = _least(lambda size: enlarged(size, 0).fits_somehow())
    if all(size is None for size in lacks.values()):
        both = _least(lambda size: enlarged(MOST_GIB, size).fits_somehow())
        lacks = {"host": both, "gpu": None if both is None else _least(lambda size: enlarged(size, both).fits_somehow())}
    return tuple((tier, int(size * GIB)) for tier, size in lacks.items() if size is not None)


def _least(enough: Callable[[float], bool]) -> float | None:
    """The smallest of all sizes in GiB that are enough, to 0.1 GiB; None if none is."""
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
    """So much more of a tier, and the key that allows it where the machine has it."""
    hardware, room = search.hardware, search.room
    present, budget = hardware.host_available_bytes, room.host
    if tier == "gpu":
        present, budget = (hardware.gpu.free_bytes if hardware.gpu else 0), room.device or 0
    key = f" (the machine has it: memory.{tier}: {-(-(budget + nbytes) // GIB)}GiB)" if present >= budget + nbytes else ""
    return f"{nbytes / GIB:.1f} GiB of {TIER_WORDS[tier]}{key}"


# -- to be faster -------------------------------------------------------------------------------------------------------------------


def faster(plan: Plan, search: Search) -> tuple[Suggestion, ...]:
    """For a plan that fits, the changes with the largest gain, what costs least in exactness first.

    Each is tried about the choices of `plan`, which is quick: a whole search may find some more.
    """
    found: dict[str, list[Suggestion]] = {}
    for change, changed in _alternatives(plan, search):
        # what is given back to the planner may lie far from what was asked for
        candidates = changed.coarse() if change.cost == EXACT else changed.about(plan.choices)
        timed = _fastest(changed, candidates)
        if timed is not None:
            speedup = timed.tokens_per_s / plan.timing.tokens_per_s
            if speedup >= WORTH_SAYING:
                suggestion = Suggestion(change.words, change.cost, speedup, timed.tokens_per_s, _why(plan.timing, timed))
                found.setdefault(change.cost, []).append(suggestion)
    suggestions = [_mildest_of_the_best(of_a_kind) for of_a_kind in found.values()]
    best = sorted(suggestions, key=lambda suggestion: -suggestion.speedup)[:MOST_SUGGESTIONS]
    return tuple(suggestion for suggestion in suggestions if suggestion in best)


def _alternatives(plan: Plan, search: Search) -> Iterator[tuple[Change, Search]]:
    """Other jobs on this machine, and this job on a larger one, in rising order of what they cost in exactness."""
    room = search.room.less_spare()
    for change in faster_jobs(plan.job, on_gpu=search.room.device is not None):
        yield change, replace(search, job=change.job, room=room)
    for times in MORE_RAM:
        more = int(search.room.host * (times - 1)) // GIB * GIB
        words = f"{more // GIB} GiB more host RAM"
        yield Change(words, "a larger machine", plan.job), replace(search, room=replace(room, host=room.host + more))


def _fastest(search: Search, candidates: Iterator[Choices]) -> Timing | None:
    found = search.fastest_of(candidates)
    return None if found is None else timing.predict(found, search.job, search.shape, search.machine)


def _mildest_of_the_best(suggestions: list[Suggestion]) -> Suggestion:
    best = max(suggestion.speedup for suggestion in suggestions) - 1
    return next(suggestion for suggestion in suggestions if suggestion.speedup - 1 >= NEARLY * best)


def _why(before: Timing, after: Timing) -> str:
    """The wait that shrinks most; without one, the computation does."""
    shares = {wait: before.waits[wait] / before.seconds - after.waits[wait] / after.seconds for wait in before.waits}
    wait = max(shares, key=lambda name: shares[name])
    if shares[wait] < 1 - 1 / WORTH_SAYING:
        return "less to compute for a token"
    return f"waits for the {wait} fall from {before.waits[wait] / before.seconds:.0%} to {after.waits[wait] / after.seconds:.0%} of a step"
