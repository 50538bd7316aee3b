"""The planner's search: the fastest combination of options that fits. Arithmetic only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from megatrain.machine.hardware import Hardware, update_threads
from megatrain.machine.profile import MachineProfile
from megatrain.planner.activations import compiled_sets, head_bytes
from megatrain.planner.cost.shape import ModelShape
from megatrain.planner.job import Budget, Choices, Job
from megatrain.planner.memory import Layout
from megatrain.planner.timing import StepCosts
from megatrain.schedule import UNCHANGED

# Parts of their range at which numbers of retained layers, of layers that keep attention and of
# those that send saved activations to host RAM are tried: first, and then near the fastest. All
# numbers near it gained 0.1% on average in 57 plans of five models, and 1.4% at most.
PARTS, FINER_PARTS = 4, 8


def most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `count` that fits, if all numbers below one that fits do; else 0."""
    if fits(count):  # the last block takes the slots with it: all can fit where all but one do not
        return count
    return max(0, bisect_right(range(count), False, key=lambda number: not fits(number)) - 1)


def complexity(layout: Layout) -> tuple[int, ...]:
    """Order among choices that are equally fast, the simplest first."""
    choices = layout.choices
    return (
        choices.second_backward,
        choices.nvme_blocks,
        choices.groups,
        choices.offload_activations,
        choices.retained_on_host > 0,
        choices.cheap_retention,
        choices.keep_attention > 0,
        choices.layer_chunk_tokens is not None,
        layout.device_bytes + layout.host_bytes,
    )


# Larger micro-batches gain nothing: layers of 7B to 32B models run as fast at 2k to 16k tokens as
# at 32k on an H200, and a 1.8B layer is fastest at 16k.
AUTO_MICRO_BATCH_TOKENS = {"cuda": 16_384, "cpu": 2_048}
# A mixture's experts share a micro-batch, and each of its micro-batches has gradients of them all.
# Qwen3-30B-A3B's layers on an H200: 66,585 tokens/s at 16k, 69,494 at 32k, 60,540 at 64k.
MIXTURE_TIMES = 2
SMALLEST_HEAD_CHUNK_TOKENS = 256
# Tokens of sequences from which keeping attention's outputs is tried: in 4,096 tokens attention's
# forward takes 2% of a 7.6B model's step, by arithmetic.
LONG = 4096
# Parts of all blocks that are tried as replicated, with the fastest of all other choices.
REPLICATED_PARTS = 4
TIE = 0.005  # predictions are not known better: within it the simpler choice is taken
# Within it the choice is taken that is fastest where host and bus are slower than measured: two
# plans stood 1% apart on paper and 7% apart on a card. In the 57 plans that costs 0.2% on average
# as measured, and gains up to 2.5% where they are slower; 0.03 costs more and gains no more.
MARGIN = 0.02


def most_micro_batch_tokens(device_type: str, mixture: bool) -> int:
    """Tokens of the largest micro-batch that a plan chooses by itself."""
    return AUTO_MICRO_BATCH_TOKENS[device_type] * (MIXTURE_TIMES if mixture else 1)


@dataclass(frozen=True)
class Search:
    """The choices that a job leaves open, on one machine."""

    job: Job
    shape: ModelShape
    hardware: Hardware
    machine: MachineProfile
    budget: Budget
    parts: int = PARTS  # 0: only what needs the least memory

    @property
    def blocks(self) -> int:
        return len(self.shape.block_numel)

    def layout(self, choices: Choices) -> Layout:
        return Layout.of(choices, self.job, self.shape, self.hardware)

    # -- choosing ----------------------------------------------------------------------------------

    def fastest(self) -> Layout:
        """The fastest choices that leave spare memory, or that fit; else the nearest to fitting."""
        found = replace(self, budget=self.budget.less_spare()).fastest_that_fits()
        if found is None or self.strains(found.choices):
            # without the spare room, and then without NVMe, it may do without the strains
            candidates = [found, self.fastest_that_fits()]
            if self.job.nvme_drives and not self.job.nvme_blocks:
                without = replace(self, job=replace(self.job, nvme_drives=0)).fastest_that_fits()
                candidates.append(without and self.layout(without.choices))
            # the first of equal ones: room to spare is worth something
            found = min(filter(None, candidates), key=self.cost, default=None)
        if found is not None:
            return found
        spilled = (each if self.on_device(each) else self.spilled(each) for each in self.lean())
        return min(spilled, key=self.shortage)

    def strains(self, choices: Choices) -> int:
        """Number of expensive memory savers in use that the user did not ask for."""
        twice = choices.second_backward > 0 and not self.job.second_backward
        return twice + (choices.nvme_blocks > (self.job.nvme_blocks or 0))

    def cost(self, layout: Layout) -> tuple[int, float, int]:
        """Strains, seconds, which may differ by much where a drive is used, and layers computed
        twice."""
        seconds = StepCosts(layout, self.machine).predict().seconds if self.job.nvme_drives else 0.0
        return self.strains(layout.choices), seconds, layout.choices.second_backward

    def fastest_that_fits(self) -> Layout | None:
        if not self.fits_somehow():
            return None
        found = self.fastest_of(self.combined(), self.placed)
        if found is not None:
            finer = replace(self, parts=FINER_PARTS).near(found)
            near = (each for layout in finer for each in self.placed(layout))
            found = self.fastest_of([found, *near])
        return self.replicated(found)

    def replicated(self, found: Layout | None) -> Layout | None:
        """With whole weights on all ranks, in what is left of the GPU or in place of resident
        blocks and accumulators, if that is faster."""
        if found is None or self.job.size == 1 or self.job.replicated is not None:
            return found
        choices, blocks = found.choices, self.blocks
        fitting = most(blocks, lambda count: self.fits(found.moved(replicated=count)))
        tried = [found, found.moved(replicated=fitting)]
        for sums in sorted({choices.sums_on_device, *self.summed(choices.groups)}):
            for part in range(1, REPLICATED_PARTS + 1):
                count = -(-blocks * part // REPLICATED_PARTS)
                tried.append(self.filled(replace(choices, replicated=count, sums_on_device=sums)))
        return self.fastest_of(tried)

    def fits_somehow(self) -> bool:
        """True if any combination fits: then the one with the least memory does."""
        return any(map(self.fits, self.lean()))

    def fastest_of(
        self,
        candidates: Iterable[Layout],
        placed: Callable[[Layout], Iterable[Layout]] = lambda layout: (layout,),
    ) -> Layout | None:
        """The one that leans least on host and bus, of those that fit and are about as fast as the
        fastest; of equal ones the simplest.

        Args:
            placed: candidates with their blocks placed, which takes long: only of those that may
                be fast.
        """
        known = dict[Choices, float]()

        def computing(layout: Layout) -> float:
            """Seconds of computation, wherever blocks and sums are."""
            alike = replace(layout.choices, groups=1, sums_on_device=0, resident=0)
            if alike not in known:
                known[alike] = StepCosts(layout, self.machine).computing
            return known[alike]

        timed, best = dict[Choices, tuple[float, Layout]](), float("inf")
        for candidate in sorted(candidates, key=computing):
            if computing(candidate) > best * (1 + MARGIN):
                break  # nor can those that follow be as fast
            for layout in filter(self.fits, placed(candidate)):
                costs = StepCosts(layout, self.machine)
                if costs.at_least <= best * (1 + MARGIN):  # a simulation takes long
                    seconds = costs.predict().seconds
                    timed[layout.choices] = seconds, layout
                    best = min(best, seconds)
        near = [layout for seconds, layout in timed.values() if seconds <= best * (1 + MARGIN)]
        slower = self.machine.slower()
        held = [(StepCosts(layout, slower).predict().seconds, layout) for layout in near]
        least = min((seconds for seconds, _ in held), default=0.0) * (1 + TIE)
        return min((one for seconds, one in held if seconds <= least), key=complexity, default=None)

    # -- candidates --------------------------------------------------------------------------------

    def combined(self) -> Iterator[Layout]:
        """Combinations over the range of every open option but where blocks are (`placed`)."""
        for tokens in self.micro_batch_sizes():
            chunk = self.job.head_chunk_tokens or self.head_chunk(tokens)
            for groups, retained in product(self.group_counts(tokens), self.retained_counts()):
                yield from self.computed(tokens, groups, retained, chunk)

    def lean(self) -> Iterator[Layout]:
        """Those that need the least memory, placed."""
        for layout in replace(self, parts=0).combined():
            yield from self.placed(layout)

    def about(self, found: Choices) -> Iterator[Layout]:
        """Combinations with the micro-batch found; one group, or half to twice as many."""
        job, largest = self.job, self.micro_batch_sizes()[-1]
        tokens = job.micro_batch_tokens or min(found.micro_batch_tokens, largest)
        chunk = job.head_chunk_tokens or min(found.head_chunk_tokens, tokens)
        counts = {1, max(1, found.groups // 2), found.groups, 2 * found.groups}
        counts = {job.groups} if job.groups else {1} if job.one_group else counts
        for groups, retained in product(sorted(counts), self.retained_counts()):
            yield from self.computed(tokens, groups, retained, chunk)

    def near(self, layout: Layout) -> Iterator[Layout]:
        """Combinations with about as many layers retained, or with larger chunks of the head, which
        run faster and take room from other things."""
        found, layers = layout.choices, self.shape.layers_back
        tokens, chunk = found.micro_batch_tokens, found.head_chunk_tokens
        for retained in self.retained_counts():
            if abs(retained - found.retained) * PARTS < layers:
                yield from self.computed(tokens, found.groups, retained, chunk)
        for larger in () if self.job.head_chunk_tokens else self.shape.head.sizes:
            if chunk < larger <= tokens:
                yield self.layout(replace(found, head_chunk_tokens=larger))

    # -- values of the options ---------------------------------------------------------------------

    def micro_batch_sizes(self) -> list[int]:
        """Dry-run sizes from one sequence to the cap or a step's tokens; else one sequence."""
        job = self.job
        if job.micro_batch_tokens:
            return [job.micro_batch_tokens]
        mixture = self.shape.idle_parameters > 0
        cap = most_micro_batch_tokens("cuda" if self.hardware.gpu else "cpu", mixture)
        largest = min(cap, job.rank_tokens)
        least = max(job.seq_len, job.least_tokens)
        return [n for n in self.shape.layer.sizes if least <= n <= largest] or [least]

    def group_counts(self, micro_batch_tokens: int) -> list[int]:
        """Powers of two, and one group for each micro-batch."""
        if self.job.groups or self.job.second_backward or self.job.one_group:
            return [self.job.groups or 1]
        most = self.job.step(micro_batch_tokens).most_micro_batches
        return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]

    def retained_counts(self) -> list[int]:
        layers = self.shape.layers_back
        if self.job.retained is not None:
            return [min(self.job.retained, layers)]
        if not self.parts:
            return [0]
        counts = [*range(0, layers, max(1, -(-layers // self.parts))), layers]
        return [count for count in counts if not count or count <= layers - (self.twice or 0)]

    def cheap_retentions(self) -> list[bool]:
        """Only compiled layers can save selectively."""
        if self.job.cheap_retention is not None:
            return [self.job.cheap_retention]
        return [False, True] if self.job.compiled else [False]

    def offloads(self) -> list[bool]:
        asked, on_host = self.job.offload_activations, self.job.retained_on_host
        if asked is not None or on_host:
            return [bool(asked or on_host)]
        return [False, True] if self.hardware.gpu else [False]  # a CPU would only copy them

    # why: decision 0017
    def on_host(self, groups: int, retained: int, cheap: bool, offload: bool) -> list[int]:
        """Numbers of layers with saved activations in host RAM: with several groups there is more
        room on the device, and less time to send them. Unasked, only the smaller form is sent."""
        others = self.shape.layers_back - retained
        if self.job.retained_on_host is not None:
            asked = min(self.job.retained_on_host, others)
            return [asked] if offload or not asked else []
        never = not self.hardware.gpu or not offload or groups > 1 or self.job.second_backward
        if never or not self.parts or cheap != self.cheap_retentions()[-1]:
            return [0]
        return sorted({others * part // self.parts for part in range(self.parts + 1)})

    @property
    def twice(self) -> int | None:
        """Layers that the user has computed twice; None leaves that open."""
        asked, layers = self.job.second_backward, self.shape.layers_back
        return None if asked is None else min(asked, max(1, layers))

    # why: decision 0023
    def placed(self, layout: Layout) -> Iterator[Layout]:
        """With blocks placed and all gradients stored, and where these have no room, with the
        fewest layers computed twice that leave room for the others': recomputed layers, and only in
        one group."""
        choices = layout.choices
        layers = max(1, self.shape.layers_back - choices.retained)
        never = not self.job.clipping or choices.groups > 1 or choices.retained_on_host
        if self.twice is not None or never or choices.retained >= self.shape.layers_back > 0:
            yield self.filled(replace(choices, second_backward=self.twice or 0))
            return
        once = self.filled(choices)
        yield once
        if self.host_share(once) <= 1 and not once.choices.nvme_blocks:
            return
        most = self.layout(replace(choices, second_backward=layers))

        def enough(twice: int) -> bool:
            layout = self.placed_on_device(most.moved(second_backward=twice))
            return self.host_share(layout) <= 1

        fewest = layers
        if self.on_device(once):
            fewest = 1 + bisect_left(range(1, layers), True, key=enough)
        # all but one need less where the head's gradient would take larger buffers than it leaves
        for twice in {fewest, max(1, min(fewest, layers - 1))}:
            yield self.filled(most.moved(second_backward=twice).choices)

    def kept_attentions(self, retained: int) -> list[int]:
        """Numbers of recomputed layers, where attention takes long: none or all, or parts."""
        recomputed = self.shape.layers_back - retained
        if self.job.keep_attention is not None:
            return [min(self.job.keep_attention, recomputed)]
        kept = self.parts and self.shape.cost.kept_attention_bytes
        if not kept or self.job.activations != UNCHANGED:
            return [0]
        times = self.job.seq_len * self.job.pieces // LONG
        parts = self.parts if times >= self.parts else min(1, times)
        return sorted({0, *(recomputed * part // parts for part in range(1, parts + 1))})

    def layer_chunks(self, tokens: int) -> list[int | None]:
        """Chunks of layers' token-wise parts, shorter than a micro-batch; None: whole layers."""
        if self.job.layer_chunk_tokens is not None:
            return [self.job.layer_chunk_tokens or None]
        return [None, *(size for size, _ in self.shape.layer_chunked if size < tokens)]

    def computed(self, tokens: int, groups: int, retained: int, chunk: int) -> Iterator[Layout]:
        """Combinations of where accumulators and activations may be. chunk: the head's."""
        job = self.job
        threads = job.update_threads or update_threads(self.hardware.physical_cores)
        for cheap, offload in product(self.cheap_retentions(), self.offloads()):
            on_host = self.on_host(groups, retained, cheap, offload)
            for sent, in_chunks in product(on_host, self.layer_chunks(tokens)):
                unasked = (retained and job.retained is None) or (
                    sent and job.retained_on_host is None
                )
                if in_chunks and unasked:
                    continue  # layers that need chunks leave no room for saved activations
                if cheap and not retained and not sent and job.cheap_retention is None:
                    continue  # there is nothing to save less of
                attention = self.kept_attentions(retained + sent)
                for sums, kept in product(self.summed(groups), attention):
                    choices = Choices(
                        micro_batch_tokens=tokens,
                        groups=groups,
                        sums_on_device=sums,
                        replicated=min(job.replicated or 0, self.blocks),
                        retained=retained,
                        cheap_retention=cheap,
                        offload_activations=offload,
                        head_chunk_tokens=chunk,
                        update_threads=threads,
                        retained_on_host=sent,
                        keep_attention=kept,
                        layer_chunk_tokens=in_chunks,
                    )
                    yield self.layout(choices)

    def summed(self, groups: int) -> Sequence[int]:
        """Numbers of blocks whose accumulators stay on the device between groups."""
        if groups == 1:
            return (0,)
        if self.job.sums_on_device is not None:
            return (min(self.job.sums_on_device, self.blocks),)
        return (0, self.blocks // 2, self.blocks)

    def head_chunk(self, micro_batch_tokens: int) -> int:
        """The largest chunk whose working set is no larger than what the layers need anyway."""

        def need(chunk: int) -> int:
            return head_bytes(chunk, micro_batch_tokens, self.job, self.shape, self.hardware)

        compiled, sizes = compiled_sets(self.job, self.shape), self.shape.head.sizes
        layer = compiled.recomputed if compiled else self.shape.layer
        room = max(layer.at(micro_batch_tokens), need(SMALLEST_HEAD_CHUNK_TOKENS))
        fitting = (chunk for chunk in sizes if chunk <= micro_batch_tokens and need(chunk) <= room)
        return max(fitting, default=sizes[0])

    # -- placing blocks ----------------------------------------------------------------------------

    def filled(self, choices: Choices) -> Layout:
        """With blocks, then accumulators on the device as they fit, and the excess on NVMe; where
        the device has no room, no drive helps, and none is used."""
        layout = self.placed_on_device(self.layout(choices))
        return self.spilled(layout) if self.on_device(layout) else layout

    # why: decision 0014
    def placed_on_device(self, layout: Layout) -> Layout:
        """With as many blocks resident as fit, then as many accumulators."""
        choices, blocks = layout.choices, self.blocks
        asked = self.job.sums_on_device is not None and choices.groups > 1

        def placed(resident: int, sums: int = 0) -> Layout:
            sums = max(choices.sums_on_device, resident, sums) if choices.groups > 1 else 0
            return layout.moved(resident=resident, sums_on_device=sums)

        if self.job.resident is not None:
            resident = min(self.job.resident, blocks)
        elif not self.fits_device(placed(0)):
            return placed(0)
        else:  # what the user sent to a drive is streamed
            free = blocks - min(blocks, self.job.nvme_blocks or 0)
            if asked:  # resident blocks' sums always stay
                free = min(free, choices.sums_on_device)
            resident = most(free, lambda count: self.fits_device(placed(count)))
        if choices.groups == 1 or asked:
            return placed(resident)
        least = placed(resident).choices.sums_on_device
        more = most(blocks - least, lambda count: self.fits_device(placed(resident, least + count)))
        return placed(resident, least + more)

    def spilled(self, layout: Layout) -> Layout:
        """With the state of as few blocks on NVMe as suffice."""
        if not self.job.nvme_drives:
            return layout

        def on_nvme(count: int) -> Layout:
            return layout.moved(nvme_blocks=count)

        def enough(found: Layout) -> bool:
            return self.host_share(found) <= 1

        streamed = self.blocks - layout.choices.resident
        if self.job.nvme_blocks is not None:
            return on_nvme(min(self.job.nvme_blocks, streamed))
        if enough(layout):
            return on_nvme(0)
        # the head and the embedding come last: they need the largest buffers
        counts = sorted({min(streamed, self.shape.layers), streamed})
        tried = [on_nvme(count) for count in counts]
        found = next(filter(enough, tried), None)
        if found is None:
            return min(tried, key=self.host_share)
        fewer = range(1, found.choices.nvme_blocks)
        return on_nvme(1 + bisect_left(fewer, True, key=lambda n: enough(on_nvme(n))))

    # -- memory ------------------------------------------------------------------------------------

    def on_device(self, layout: Layout) -> bool:
        """True if there is room on the GPU, or none."""
        return self.budget.gpu is None or layout.device_bytes <= self.budget.gpu

    def fits_device(self, layout: Layout) -> bool:
        """True if there is room on the GPU; without one, on every tier."""
        return self.fits(layout) if self.budget.gpu is None else self.on_device(layout)

    def fits(self, layout: Layout) -> bool:
        return self.on_device(layout) and self.shortage(layout) <= 1  # the host's takes longer

    def shortage(self, layout: Layout) -> float:
        """The need of the tightest tier as a share of its budget."""
        shares = [self.host_share(layout)]
        if self.budget.gpu is not None:
            shares.append(layout.device_bytes / max(1, self.budget.gpu))
        if self.budget.nvme is not None:
            shares.append(sum(layout.nvme.values()) / max(1, self.budget.nvme))
        return max(shares)

    def host_share(self, layout: Layout) -> float:
        """The need of host RAM as a share of its budget."""
        need = layout.host_bytes + (layout.device_bytes if self.budget.gpu is None else 0)
        return need / max(1, self.budget.host)
