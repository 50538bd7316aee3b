"""How the planner chooses: every combination of the dials that fits, the fastest of them by prediction. Arithmetic only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from megatrain import timing
from megatrain.hardware import MIB, Hardware, update_threads
from megatrain.machine import MachineProfile
from megatrain.nvme_tier import LEVELS
from megatrain.planner_bytes import block_bytes, compiled_sets, device_bytes, head_bytes, host_bytes, nvme_bytes, nvme_traffic
from megatrain.planner_job import Choices, Job

if TYPE_CHECKING:
    from megatrain.models.shape import ModelShape

# Micro-batches beyond these gain nothing: layers of 7B to 32B models run as fast at 2k to 16k tokens as at 32k on an H200, and a 1.8B
# layer is fastest at 16k.
AUTO_MICRO_BATCH_TOKENS = {"cuda": 16_384, "cpu": 2_048}
SMALLEST_HEAD_CHUNK_TOKENS = 256
RETAINED_STEPS = 8  # so many numbers of retained layers are tried first, and those between two of them where it pays
ON_HOST_STEPS = 8  # and of those that wait in host RAM
TIE = 0.005  # predictions are not known better: within it the simpler choice is taken
# What speed may not use up, of each tier: the plan is right to 3%, and rows of many lengths leave fragments
SPARE_SHARE, SPARE_BYTES = 0.03, 512 * MIB

Table = Callable[[Choices, Job, "ModelShape", Hardware], dict[str, int]]  # of planner_bytes: bytes of a tier by what they are for


@dataclass(frozen=True)
class Room:
    """Bytes that may be used; `device` is None when training on the CPU, where all is host RAM."""

    device: int | None
    host: int
    nvme: int | None = None  # None: whatever it takes

    def less_spare(self) -> Room:
        """The room that choices for speed leave."""
        return Room(None if self.device is None else _less_spare(self.device), _less_spare(self.host), self.nvme)


def _less_spare(size: int) -> int:
    return int(size * (1 - SPARE_SHARE)) - SPARE_BYTES


@dataclass(frozen=True)
class Search:
    """The choices that a job leaves open, on one machine."""

    job: Job
    shape: ModelShape
    hardware: Hardware
    machine: MachineProfile
    room: Room

    # -- choosing -------------------------------------------------------------------------------------------------------------

    def fastest(self) -> Choices:
        """The fastest choices that leave some room; else that fit at all; else those that are nearest to fitting."""
        found = replace(self, room=self.room.less_spare()).fastest_that_fits()
        if found is None or self.strains(found):
            candidates = [found, self.fastest_that_fits()]
            if self.job.nvme_drives and not (self.job.nvme_blocks or self.job.nvme_activations):
                candidates.append(replace(self, job=replace(self.job, nvme_drives=0)).fastest_that_fits())
            found = min(filter(None, candidates), key=self.cost, default=None)  # the first of equal ones: room to spare is worth something
        return found or min(self.lean(), key=self.shortage)

    def strains(self, choices: Choices) -> int:
        """What memory costs that nobody asked for and room to spare is not worth: gradients computed twice, and use of a drive."""
        on_nvme = choices.nvme_blocks > (self.job.nvme_blocks or 0) or choices.nvme_activations > (self.job.nvme_activations or 0)
        return (choices.second_backward and not self.job.second_backward) + on_nvme

    def cost(self, choices: Choices) -> tuple[int, float]:
        """Strains, then seconds, which may differ by much where a drive is used."""
        seconds = timing.predict(choices, self.job, self.shape, self.machine).seconds if self.job.nvme_drives else 0.0
        return self.strains(choices), seconds

    def fastest_that_fits(self) -> Choices | None:
        found = self.fastest_of(self.coarse())
        if found is not None:
            found = self.fastest_of([found, *self.more_or_less_retained(found)]) or found
            found = self.fastest_of([found, *self.more_or_less_on_host(found)]) or found
            found = self.fastest_of([found, *self.larger_head_chunks(found)]) or found
        return found

    def fits_somehow(self) -> bool:
        return any(self.fits(choices) for choices in self.lean())

    def fastest_of(self, candidates: Iterator[Choices] | Sequence[Choices]) -> Choices | None:
        """The fastest of those that fit; of equal ones the simplest."""
        bounds = {choices: timing.at_least(choices, self.job, self.shape, self.machine) for choices in candidates if self.fits(choices)}
        seconds: dict[Choices, float] = {}
        best = float("inf")
        for choices in sorted(bounds, key=lambda choices: bounds[choices]):
            if bounds[choices] > best * (1 + TIE):
                break
            seconds[choices] = timing.predict(choices, self.job, self.shape, self.machine).seconds
            best = min(best, seconds[choices])
        tied = [choices for choices in seconds if seconds[choices] <= best * (1 + TIE)]
        return min(tied, key=self.complexity, default=None)

    def complexity(self, choices: Choices) -> tuple[bool, int, int, int, bool, bool, bool, bool, int]:
        """What speaks against choices that are equally fast."""
        layers = choices.retained_on_host > 0, choices.cheap_retention, choices.layer_chunk_tokens > 0
        on_nvme = choices.nvme_blocks, choices.nvme_activations
        return choices.second_backward, *on_nvme, choices.groups, choices.offload, *layers, self.bytes(choices)

    # -- candidates -----------------------------------------------------------------------------------------------------------

    def coarse(self) -> Iterator[Choices]:
        """Combinations over the whole range of every dial that is left open, each with as much resident as there is room for."""
        yield from self.combined(self.retained_counts())

    def lean(self) -> Iterator[Choices]:
        """Those of them that need the least memory."""
        yield from self.combined(self.retained_counts()[:1])

    def about(self, found: Choices) -> Iterator[Choices]:
        """Combinations with the micro-batch found, in one group, as many groups as found, half or twice as many."""
        tokens = self.job.micro_batch_tokens or min(found.micro_batch_tokens, self.micro_batch_sizes()[-1])
        chunk = self.job.head_chunk_tokens or min(found.head_chunk_tokens, tokens)
        counts = {self.job.groups} if self.job.groups else {1, max(1, found.groups // 2), found.groups, 2 * found.groups}
        for groups in sorted(counts):
            for retained in self.retained_counts():
                yield from self.placed(tokens, groups, retained, chunk)

    def combined(self, retained_counts: Sequence[int]) -> Iterator[Choices]:
        for tokens in self.micro_batch_sizes():
            for groups in self.group_counts(tokens):
                for retained in retained_counts:
                    yield from self.placed(
                        tokens, groups, retained, self.job.head_chunk_tokens or head_chunk(tokens, self.job, self.shape, self.hardware)
                    )

    def more_or_less_retained(self, found: Choices) -> Iterator[Choices]:
        """What `coarse` left out next to the choices found."""
        if self.job.retained is None and not found.second_backward:
            step = -(-self.layers // RETAINED_STEPS)
            for retained in range(max(0, found.retained - step + 1), min(self.layers, found.retained + step - 1) + 1):
                if retained != found.retained:
                    yield from self.placed(found.micro_batch_tokens, found.groups, retained, found.head_chunk_tokens)

    def more_or_less_on_host(self, found: Choices) -> Iterator[Choices]:
        """Numbers of graphs in host RAM that `coarse` left out next to the one found."""
        if self.job.retained_on_host is None and found.retained_on_host:
            step = -(-(self.layers - found.retained) // ON_HOST_STEPS)
            most = min(self.layers - found.retained, found.retained_on_host + step - 1)
            for count in range(max(0, found.retained_on_host - step + 1), most + 1):
                if count != found.retained_on_host and self.leaves_inputs(found.retained, count):
                    yield self.filled(replace(found, retained_on_host=count))

    def larger_head_chunks(self, found: Choices) -> Iterator[Choices]:
        """Larger ones run faster, and take room from other things."""
        sizes = () if self.job.head_chunk_tokens else self.shape.head.sizes
        for chunk in sizes:
            if found.head_chunk_tokens < chunk <= found.micro_batch_tokens:
                yield self.filled(replace(found, head_chunk_tokens=chunk))

    @property
    def layers(self) -> int:
        return len(self.shape.block_numel) - 2

    def micro_batch_sizes(self) -> list[int]:
        """Those that were dry-run, up to the cap and to a step's tokens, and one row at least."""
        if self.job.micro_batch_tokens:
            return [self.job.micro_batch_tokens]
        cap = min(AUTO_MICRO_BATCH_TOKENS["cuda" if self.hardware.gpu else "cpu"], self.job.tokens_per_step)
        return [n for n in self.shape.layer.sizes if self.job.seq_len <= n <= cap] or [self.job.seq_len]

    def group_counts(self, micro_batch_tokens: int) -> list[int]:
        if self.job.groups or self.job.second_backward:
            return [self.job.groups or 1]
        most = self.job.most_micro_batches(micro_batch_tokens)
        return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]

    def retained_counts(self) -> list[int]:
        if self.job.retained is not None or self.job.second_backward:
            return [min(self.job.retained or 0, self.layers)]
        return [*range(0, self.layers, -(-self.layers // RETAINED_STEPS)), self.layers]

    def cheap_retentions(self) -> list[bool]:
        """Only compiled layers can keep less than their graphs."""
        if self.job.cheap_retention is not None:
            return [self.job.cheap_retention]
        return [False, True] if self.job.compiled else [False]

    def offloads(self) -> list[bool]:
        if self.job.offload is not None or self.job.retained_on_host or self.job.nvme_activations:
            return [bool(self.job.offload or self.job.retained_on_host or self.job.nvme_activations)]
        return [False, True] if self.hardware.gpu else [False]  # on the CPU they would only be copied

    def on_host(self, groups: int, retained: int, cheap: bool, offload: bool) -> list[int]:
        """Numbers of graphs in host RAM. With several groups there is more room on the device, and less time to send them."""
        if self.job.retained_on_host is not None:
            asked = min(self.job.retained_on_host, self.layers - retained)
            return [asked] if offload or not asked else []
        if not self.hardware.gpu or not offload or groups > 1 or cheap != self.cheap_retentions()[-1]:  # sent or not, the smaller form
            return [0]
        if self.job.second_backward:
            return [0]
        others = self.layers - retained
        return sorted({others * part // ON_HOST_STEPS for part in range(ON_HOST_STEPS + 1)})

    def leaves_inputs(self, retained: int, sent: int) -> bool:
        """Whether as many layers are recomputed as shall have their inputs on NVMe, unless so many graphs were asked for."""
        asked = retained <= (self.job.retained or 0) and sent <= (self.job.retained_on_host or 0)
        return asked or self.layers - retained - sent >= min(self.layers, self.job.nvme_activations or 0)

    def second_backwards(self, groups: int, retained: int, sent: int) -> list[bool]:
        """Whether gradients may be computed twice: of one group whose layers are all recomputed."""
        if not self.job.clipping or groups > 1 or retained + sent > 0:
            return [False]
        return [False, True] if self.job.second_backward is None else [self.job.second_backward]

    def layer_chunks(self, tokens: int) -> list[int]:
        """Sizes of chunks for the layers' token-wise parts, those that are shorter than a micro-batch; 0 for none."""
        if self.job.layer_chunk_tokens is not None:
            return [self.job.layer_chunk_tokens]
        return [0, *(size for size, _ in self.shape.layer_chunked if size < tokens)]

    def placed(self, tokens: int, groups: int, retained: int, chunk: int) -> Iterator[Choices]:
        """Where blocks, sums and boundaries may live."""
        threads = self.job.update_threads or update_threads(self.hardware.physical_cores)
        blocks = len(self.shape.block_numel)
        for cheap, offload in product(self.cheap_retentions(), self.offloads()):
            for sent, in_chunks in product(self.on_host(groups, retained, cheap, offload), self.layer_chunks(tokens)):
                if in_chunks and ((retained and self.job.retained is None) or (sent and self.job.retained_on_host is None)):
                    continue  # layers that need chunks leave no room for graphs, and compute in backward what a graph would spare
                if not self.leaves_inputs(retained, sent):
                    continue
                if cheap and not retained and not sent and self.job.cheap_retention is None:
                    continue  # there is no graph to keep less of
                for sums in (0, blocks // 2, blocks) if groups > 1 else (0,):
                    for again in self.second_backwards(groups, retained, sent):
                        yield self.filled(
                            Choices(tokens, groups, 0, sums, retained, cheap, offload, chunk, threads, sent, again, in_chunks)
                        )

    def filled(self, choices: Choices) -> Choices:
        """With as many resident blocks as there is room for, then as many gradient sums; what host RAM then lacks room for goes to NVMe."""
        return self.spilled(self.placed_on_device(choices))

    def spilled(self, choices: Choices) -> Choices:
        """With as little on NVMe as host RAM allows: arrays of blocks, or inputs of layers first, whichever moves fewer bytes in a step."""
        if not self.job.nvme_drives:
            return choices
        recomputed = self.layers - choices.retained - choices.retained_on_host if choices.offload else 0
        if self.job.nvme_activations is not None:
            return self.with_arrays_spilled(replace(choices, nvme_activations=min(self.job.nvme_activations, recomputed)))
        arrays, asked = self.with_arrays_spilled(replace(choices, nvme_activations=0)), self.job.nvme_blocks or 0
        if not recomputed or (arrays.nvme_blocks <= asked and self.host_share(arrays) <= 1):
            return arrays
        inputs = self.with_arrays_spilled(replace(choices, nvme_activations=recomputed))
        if inputs.nvme_blocks <= asked and self.host_share(inputs) <= 1:
            inputs = self.least_inputs(inputs)
        fitting = [found for found in (arrays, inputs) if self.fits(found)]
        if not fitting:
            return min(arrays, inputs, key=self.shortage)
        return min(fitting, key=lambda found: sum(nvme_traffic(found, self.job, self.shape)))

    def least_inputs(self, choices: Choices) -> Choices:
        """With the inputs of the fewest layers on NVMe that suffice, if those of `choices` do."""
        counts = range(1, choices.nvme_activations)
        least = bisect_left(counts, True, key=lambda count: self.host_share(replace(choices, nvme_activations=count)) <= 1)
        return replace(choices, nvme_activations=least + 1)

    def with_arrays_spilled(self, choices: Choices) -> Choices:
        """With arrays of as few blocks on NVMe as suffice, what a step touches least."""
        levels = [level for level in LEVELS if self.job.nvme_arrays in (None, level)]
        streamed, asked = len(self.shape.block_numel) - choices.resident, self.job.nvme_blocks
        if asked is not None:
            with_asked = [replace(choices, nvme_blocks=min(asked, streamed), nvme_arrays=level) for level in levels]
            return next((found for found in with_asked if self.host_share(found) <= 1), with_asked[0])
        if self.host_share(choices) <= 1:
            return replace(choices, nvme_blocks=0, nvme_arrays=levels[0])
        tried = []
        for level in levels:
            for most_blocks in sorted({min(streamed, self.layers), streamed}):  # the head and the embedding need the largest buffers
                tried.append(replace(choices, nvme_blocks=most_blocks, nvme_arrays=level))
                if self.host_share(tried[-1]) <= 1:
                    return self.least_spilled(tried[-1])
        return min(tried, key=self.host_share)

    def least_spilled(self, choices: Choices) -> Choices:
        """With the fewest blocks on NVMe that suffice, if all of `choices` do."""
        counts = range(1, choices.nvme_blocks)
        least = bisect_left(counts, True, key=lambda count: self.host_share(replace(choices, nvme_blocks=count)) <= 1)
        return replace(choices, nvme_blocks=least + 1)

    def placed_on_device(self, choices: Choices) -> Choices:
        """With as many resident blocks as there is room for, then as many gradient sums."""
        blocks, several = len(self.shape.block_numel), choices.groups > 1

        def resident(count: int) -> Choices:
            return replace(choices, resident=count, sums_on_device=max(choices.sums_on_device, count) if several else 0)

        fits = self.fits_device(choices)
        if self.job.resident is not None:
            return self.summed(resident(min(self.job.resident, blocks)), fits)
        if not fits(resident(0)):
            return resident(0)
        streamed = min(blocks, self.job.nvme_blocks or 0)  # what was sent to a drive is not resident
        return self.summed(resident(most(blocks - streamed, lambda count: fits(resident(count)))), fits)

    def summed(self, choices: Choices, fits: Callable[[Choices], bool]) -> Choices:
        """With the gradient sums of as many blocks on the device as there is room for, those of `choices` at least."""
        if choices.groups == 1:
            return choices
        least, blocks = choices.sums_on_device, len(self.shape.block_numel)

        def keeping(count: int) -> Choices:
            return replace(choices, sums_on_device=least + count)

        return keeping(most(blocks - least, lambda count: fits(keeping(count))))

    # -- memory ---------------------------------------------------------------------------------------------------------------

    @cached_property
    def _known(self) -> dict[tuple[Table, Choices], int]:
        return {}  # most choices are weighed several times

    def _bytes_of(self, table: Table, choices: Choices) -> int:
        key = table, choices
        if key not in self._known:
            self._known[key] = sum(table(choices, self.job, self.shape, self.hardware).values())
        return self._known[key]

    def device(self, choices: Choices) -> int:
        """Bytes where it computes."""
        return self._bytes_of(device_bytes, choices)

    def host(self, choices: Choices) -> int:
        """Bytes of host RAM."""
        return self._bytes_of(host_bytes, choices)

    def bytes(self, choices: Choices) -> int:
        return self.device(choices) + self.host(choices)

    def fits_device(self, choices: Choices) -> Callable[[Choices], bool]:
        """A test of choices that differ from these in where blocks and gradient sums live alone: it adds up only what that decides."""
        if self.room.device is None:
            return self.fits

        def of_blocks(others: Choices) -> int:
            return sum(block_bytes(others, self.job, self.shape, self.hardware).values())

        room = self.room.device - self.device(choices) + of_blocks(choices)
        return lambda others: of_blocks(others) <= room

    def fits(self, choices: Choices) -> bool:
        return self.shortage(choices) <= 1

    def shortage(self, choices: Choices) -> float:
        """What the tightest tier needs, over what it has."""
        shares = [self.host_share(choices)]
        if self.room.device is not None:
            shares.append(self.device(choices) / max(1, self.room.device))
        if self.room.nvme is not None:
            shares.append(sum(nvme_bytes(choices, self.job, self.shape).values()) / max(1, self.room.nvme))
        return max(shares)

    def host_share(self, choices: Choices) -> float:
        """What host RAM must hold, over what it can."""
        need = self.bytes(choices) if self.room.device is None else self.host(choices)
        return need / max(1, self.room.host)


def most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `count` that fits, if whatever is below one that fits does too; 0 if none does."""
    if fits(count):  # the last block takes the slots with it, so that all can fit where all but one do not
        return count
    return max(0, bisect_right(range(count), False, key=lambda number: not fits(number)) - 1)


def head_chunk(micro_batch_tokens: int, job: Job, shape: ModelShape, hardware: Hardware) -> int:
    """The largest chunk whose working set is no larger than what the layers need anyway."""

    def need(chunk: int) -> int:
        return head_bytes(chunk, micro_batch_tokens, job, shape, hardware)

    compiled = compiled_sets(job, shape)
    layer = compiled.recomputed if compiled else shape.layer
    room = max(layer.at(micro_batch_tokens), need(SMALLEST_HEAD_CHUNK_TOKENS))
    return max((chunk for chunk in shape.head.sizes if chunk <= micro_batch_tokens and need(chunk) <= room), default=shape.head.sizes[0])
