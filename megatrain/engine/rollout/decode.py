"""The loop that writes answers.

Rows lie in slots of a pool of keys and values. A prompt is computed once, but for its last token,
and its keys are copied to the slots of its answers; from then on every step takes one token of each
row. A slot that is free takes the next answer. Tokens are looked at every few steps on a GPU, where
a look waits for it: a row may have gone on behind its end by then, which is cut off.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.engine.inference import RESERVE_BYTES, free_bytes, generated
from megatrain.engine.rollout.draw import Draw
from megatrain.engine.rollout.pool import Pool, RowBytes, attending, masks_of
from megatrain.engine.rollout.streamed import StreamedModel
from megatrain.errors import OutOfMemory
from megatrain.heartbeat import beat
from megatrain.memory.sizes import SCORE_BYTES
from megatrain.models.recorder import TYPES, of_dtype
from megatrain.models.transforms.compiled import fused_parts

logger = logging.getLogger("megatrain")

LOOKS_EVERY = 16  # steps on a GPU, or a share of an answer
LOOKS = 32  # of a longest answer, at least
SEEN_STEP = 256  # places by which what rows see grows: each size is a graph of its own
PREFILL_TOKENS = 16384  # of prompts that are computed together
FUSED_FROM = 1 << 14  # tokens to write, from which compiling pays
ROWS_STEP = 64  # rows by which a graph's number grows from there on; below by two


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt, and the numbers of the answers to write. key: with an answer's number, what its
    draws follow from. most: tokens of an answer. images: arguments of the model's forward. drawn:
    of an answer that goes on, its tokens at the end of `ids`, behind which draws go on."""

    key: int
    ids: Sequence[int]
    answers: Sequence[int]
    most: int
    images: Mapping[str, Tensor] = field(default_factory=dict)
    drawn: int = 0


@dataclass(frozen=True)
class Answer:
    """Tokens with their log-probabilities under the whole distribution at the temperature, and,
    where not all tokens can be drawn, the probability of those that can. An end is in it.

    Of one that may call tools: mask is 1 for tokens that were drawn and 0 for what tools said,
    whose log-probabilities are NaN; turns are the assistant's and the tools', for reward functions.
    """

    key: int
    number: int
    ids: list[int]
    logprobs: list[float]
    kept_mass: list[float] | None
    finish: Literal["stop", "length"]
    mask: list[int] | None = None
    turns: list[dict[str, Any]] | None = None
    calls: int = 0
    failures: int = 0

    @property
    def drawn(self) -> int:
        """Tokens that were drawn."""
        return len(self.ids) if self.mask is None else sum(self.mask)


# Shown the tokens of an answer so far as they come; true ends it there.
Look = Callable[[AnswerRequest, int, list[int]], bool]
# Requests that have come since the last call; true waits for one, and none ends the loop then.
# Answers that go on come back so: their keys are computed again.
More = Callable[[bool], Sequence[AnswerRequest]] | None


# why: decision 0114
class Decoder:
    """Rows that are written together. model: transformers' own, with its weights on a device, or a
    `StreamedModel`."""

    def __init__(
        self,
        model: Any,
        draw: Draw,
        ends: Sequence[int],
        *,
        slots: int,
        room: int,
        most: int,
        bools: bool,
        even: bool,
        graphs: bool = True,
        look: Look | None = None,
    ) -> None:
        self.model, self.draw, self.ends, self.bools = model, draw, {*ends}, bools
        self.even = even  # prompts of one length together: recurrent layers have no mask
        self.look = look
        # transformers has another name for it from 5.24 on
        known = inspect.signature(model.forward).parameters
        names = ("cache", "past_key_values", "cache_params")
        self.cache_name = next((name for name in names if name in known), names[0])
        self.device: torch.device = model.device
        self.with_graphs = graphs and self.device.type == "cuda"
        self.looks_every = max(1, min(LOOKS_EVERY, most // LOOKS)) if self.with_graphs else 1
        self.room, self.pool = room, Pool(slots, room)

        def numbers(*more: int) -> Tensor:
            return torch.zeros(slots, *more, dtype=torch.int64, device=self.device)

        # of the next token of each row; `drawn` counts those of its answer
        self.token, self.place, self.key, self.number, self.drawn = (numbers() for _ in range(5))
        self.written = numbers(self.looks_every)
        self.logprobs, self.kept = (self.written.float() for _ in range(2))
        self.column = numbers()[:1]  # that the next step writes
        self.graphs: dict[tuple[int, int], Any] = {}
        # all replay one after the other, and leave nothing in it
        self.memory = torch.cuda.graph_pool_handle() if self.with_graphs else None
        self.rows: list[_Row] = []  # of slots from 0 on

    def write(self, requests: Iterable[AnswerRequest], more: More = None) -> Iterator[Answer]:
        """Answers as they end. more: requests that come meanwhile."""
        waiting = deque((request, deque(request.answers)) for request in requests)
        while waiting or self.rows:
            self._admit(waiting)
            for ahead in range(self.looks_every):
                self._step(ahead)
            beat()
            yield from self._ended()
            came = more(not (waiting or self.rows)) if more else ()
            # first, so that what has begun ends
            waiting.extendleft((request, deque(request.answers)) for request in came)

    # -- beginnings ------------------------------------------------------------------------------

    def _admit(self, waiting: deque[tuple[AnswerRequest, deque[int]]]) -> None:
        """Fill free slots."""
        free, found = self.pool.slots - len(self.rows), list[tuple[AnswerRequest, list[int]]]()
        while waiting and free:
            request, numbers = waiting[0]
            taken = [numbers.popleft() for _ in range(min(free, len(numbers)))]
            free -= len(taken)
            if not numbers:
                waiting.popleft()
            if taken:
                found.append((request, taken))
        begins = list[tuple[int, AnswerRequest]]()  # first slot of each prompt
        for request, taken in found:
            begins.append((len(self.rows), request))
            self.rows += [_Row(request, number, [], [], []) for number in taken]
        self.pool.forget(slice(begins[0][0], len(self.rows)) if begins else slice(0))
        self._prefill(begins)
        for (first, request), (_, taken) in zip(begins, found, strict=True):
            slots = torch.arange(first, first + len(taken), device=self.device)
            if len(taken) > 1 and len(request.ids) > 1:
                self.pool.copy(first, slots[1:], len(request.ids) - 1)
            self.token[slots] = request.ids[-1]
            self.place[slots] = len(request.ids) - 1
            self.key[slots], self.drawn[slots] = request.key, request.drawn
            self.number[slots] = torch.tensor(taken, device=self.device)

    def _prefill(self, begins: Sequence[tuple[int, AnswerRequest]]) -> None:
        """Compute keys and values of prompts, but for their last tokens, into their slots."""
        left = sorted((one for one in begins if len(one[1].ids) > 1), key=lambda o: -len(o[1].ids))
        while left:
            width = len(left[0][1].ids) - 1
            count = max(1, PREFILL_TOKENS // width)
            if self.even:
                count = min(count, sum(len(one.ids) == width + 1 for _, one in left))
            part, left = left[:count], left[count:]
            ids = torch.zeros(len(part), width, dtype=torch.int64)
            for row, (_, request) in enumerate(part):
                ids[row, : len(request.ids) - 1] = torch.tensor(request.ids[:-1])
            self.pool.prefill(torch.tensor([slot for slot, _ in part], device=self.device), width)
            along = torch.arange(width, device=self.device)
            near = (along[:, None] - along)[None, None].expand(len(part), -1, -1, -1)
            self._forward(ids.to(self.device), along.expand(len(part), -1), near, base=True)
            beat()

    # -- a step ----------------------------------------------------------------------------------

    def _step(self, ahead: int) -> None:
        """One token of every row, so many steps behind the last look."""
        rows, longest = len(self.rows), max(row.length for row in self.rows) + ahead
        if not self.with_graphs:
            self._compute(rows, longest)
            return
        rows = min(self.pool.slots, _bucket(rows))
        seen = min(self.room, -(-longest // SEEN_STEP) * SEEN_STEP)
        if (rows, seen) not in self.graphs:
            self.graphs[rows, seen] = self._captured(rows, seen)
        if (graph := self.graphs[rows, seen]) is not None:
            graph.replay()
        else:
            self._compute(rows, seen)

    def _captured(self, rows: int, seen: int) -> Any | None:
        """A CUDA graph; None of a family whose code waits for the device. The trial before it
        leaves no trace: what it changes is put back, and keys at the places to come are written
        again."""
        before = {one: one.clone() for one in (self.token, self.place, self.drawn, self.column)}
        before |= {one: one.clone() for one in self.pool.states.values()}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(rows, seen)
        torch.cuda.current_stream().wait_stream(stream)
        for one in (*before, *self.pool.states.values()):
            one.copy_(before[one] if one in before else torch.zeros_like(one))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.memory):  # computes nothing
                self._compute(rows, seen)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            name = self.model.config.model_type
            logger.warning(f"{name}: answers are written without CUDA graphs, slower ({reason})")
            self.with_graphs = False  # nor with another one: the failed one's memory is gone
            return None
        return graph

    def _compute(self, rows: int, seen: int) -> None:
        place = self.place[:rows]
        self.pool.step(place, seen)
        near = place[:, None, None, None] - torch.arange(seen, device=self.device)
        logits = self._forward(self.token[:rows, None], place[:, None], near)
        drawn = self.drawn[:rows]
        token, logprob, kept = self.draw(logits, self.key[:rows], self.number[:rows], drawn)
        for array, value in ((self.written, token), (self.logprobs, logprob), (self.kept, kept)):
            array[:rows].index_copy_(1, self.column, value[:, None])
        self.token[:rows] = token
        place.add_(1).clamp_(max=self.room - 1)
        for counter in (drawn, self.column):
            counter.add_(1)

    def _forward(self, ids: Tensor, positions: Tensor, near: Tensor, base: bool = False) -> Tensor:
        """Logits [rows, vocabulary] of the last tokens; of a prompt nothing but its keys."""
        model = self.model.base_model if base else self.model
        mask = masks_of(self.model.config, near, self.model.dtype, self.bools)
        found = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self.cache_name: self.pool},
        )
        return found[0][:, -1]  # type: ignore[no-any-return]

    # -- ends ------------------------------------------------------------------------------------

    def _ended(self) -> Iterator[Answer]:
        """Take what was written; rows that have ended leave, and the last ones take their slots."""
        count = len(self.rows)
        columns = (self.written, self.logprobs, self.kept)
        tokens, logprobs, kept = (one[:count].tolist() for one in columns)
        self.column.zero_()
        found = []
        for slot, row in enumerate(self.rows):
            before = len(row.ids)
            row.ids += tokens[slot]
            row.logprobs += logprobs[slot]
            row.kept += kept[slot]
            answer = row.ended(before, self.ends, self.draw.cuts)
            seen = row.ids if answer is None else answer.ids
            enough = self.look is not None and self.look(row.request, row.number, seen)
            if enough and answer is None:
                answer = row.answer(len(row.ids), "stop", self.draw.cuts)
            if answer is not None:
                found.append((slot, answer))
        for slot, _ in reversed(found):
            last = len(self.rows) - 1
            if slot != last:
                self.pool.copy(
                    last, torch.tensor([slot], device=self.device), self.rows[last].length
                )
                for one in (self.token, self.place, self.key, self.number, self.drawn):
                    one[slot] = one[last]
                self.rows[slot] = self.rows[last]
            self.rows.pop()
        for _, answer in found:
            yield answer


@dataclass
class _Row:
    request: AnswerRequest
    number: int
    ids: list[int]
    logprobs: list[float]
    kept: list[float]

    @property
    def length(self) -> int:
        """Places that its next token sees."""
        return len(self.request.ids) + len(self.ids)

    def ended(self, before: int, ends: set[int], cuts: bool) -> Answer | None:
        """The answer, if it has ended among the tokens from number `before` on."""
        most = self.request.most
        new = enumerate(self.ids[before:most], before + 1)
        size = next((size for size, one in new if one in ends), None)
        if size is not None:
            return self.answer(size, "stop", cuts)
        return None if len(self.ids) < most else self.answer(most, "length", cuts)

    def answer(self, size: int, finish: Literal["stop", "length"], cuts: bool) -> Answer:
        """The first tokens."""
        kept = self.kept[:size] if cuts else None
        found = self.ids[:size], self.logprobs[:size], kept
        return Answer(self.request.key, self.number, *found, finish)


def _bucket(rows: int) -> int:
    """The number of rows of a graph for so many."""
    if rows > ROWS_STEP:
        return -(-rows // ROWS_STEP) * ROWS_STEP
    return 1 << (rows - 1).bit_length()


# Of each model what `tried` found.
_TRIED: WeakKeyDictionary[Any, RowBytes | str] = WeakKeyDictionary()


# -- a family's way ------------------------------------------------------------------------------


@torch.no_grad()
def answers(
    model: Any,
    requests: Sequence[AnswerRequest],
    draw: Draw,
    ends: Sequence[int],
    look: Look | None = None,
    more: More = None,
    slots: int | None = None,
    *,
    fuse: bool = False,
) -> Iterator[Answer]:
    """Answers to requests as they end, in so many rows at most; None: as memory has room for.
    more: further requests, none of which with its answer is longer than the longest of these.
    fuse: on a GPU compile norms and MLPs, which takes a C compiler, if enough is to be written.

    A family whose cache is no list of keys and values is written by its own `generate`, one answer
    at a time. Raises OutOfMemory where not one row has room.
    """
    total = sum(len(one.answers) for one in requests)
    if not total:
        return
    room = max(len(one.ids) + one.most for one in requests)
    whole = not isinstance(model, StreamedModel)
    most = max(one.most for one in requests)
    fuse = fuse and whole and model.device.type == "cuda" and total * most >= FUSED_FROM
    if not any(one.images for one in requests):  # whose positions are the family's own
        with attending(model) as bools, fused_parts(model) if fuse else nullcontext():
            if model not in _TRIED:
                _TRIED[model] = tried(model, bools)
            found = _TRIED[model]
            if isinstance(found, RowBytes):
                slots = min(total, slots or slots_for(model, found, room))
                how: dict[str, Any] = {"bools": bools, "graphs": whole, "look": look}
                how["even"] = bool(found.states)
                decoder = Decoder(model, draw, ends, slots=slots, room=room, most=most, **how)
                yield from decoder.write(requests, more)
                return
        name = model.config.model_type
        logger.warning(f"{name}: transformers' generate writes answers, one by one, since {found}")
    while requests:
        for request in requests:
            for number in request.answers:
                yield by_generate(model, request, number, draw, ends, look)
        requests = more(True) if more else ()


def tried(model: Any, bools: bool) -> RowBytes | str:
    """Sizes of a family's rows, or the reason for which this loop cannot write them: a few tokens,
    compared with one pass over them."""
    prompts = [3, 4, 5], [6, 7]
    vocabulary = model.config.get_text_config().vocab_size
    requests = [
        AnswerRequest(n, [one % vocabulary for one in ids], (0,), 3)
        for n, ids in enumerate(prompts)
    ]
    greedy = Draw(temperature=0.0)
    try:
        how: dict[str, Any] = {
            "slots": 2,
            "room": 6,
            "most": 3,
            "bools": bools,
            "even": True,
            "graphs": False,
        }
        decoder = Decoder(model, greedy, (), **how)
        worst = 0.0
        for found in decoder.write(requests):
            ids = torch.tensor([[*requests[found.key].ids, *found.ids]], device=decoder.device)
            along = torch.arange(ids.shape[1], device=decoder.device)
            mask = masks_of(model.config, (along[:, None] - along)[None, None], model.dtype, bools)
            about = {"attention_mask": mask, "position_ids": along[None], "use_cache": False}
            logits = model(input_ids=ids, **about)[0][0, -4:-1].float()
            expected = logits.log_softmax(-1).gather(1, ids[0, -3:, None])[:, 0].tolist()
            gaps = (abs(a - b) for a, b in zip(expected, found.logprobs, strict=True))
            worst = max(worst, *gaps)
    except Exception as error:  # noqa: BLE001  whatever a family's code makes of a cache
        return f"its cache is of another kind ({type(error).__name__})"
    if not worst <= (0.01 if model.dtype == torch.float32 else 0.5):
        return f"its log-probabilities would differ by {worst:.2g}"
    return decoder.pool.row_bytes()


def slots_for(model: Any, takes: RowBytes, room: int) -> int:
    """Rows for which there is memory. Raises OutOfMemory where there is not one."""
    vocabulary = model.config.get_text_config().vocab_size
    row_bytes = takes.token * room + takes.states + SCORE_BYTES * vocabulary
    free = free_for_rows(model.device)
    if free < row_bytes:
        raise OutOfMemory(
            f"an answer's keys and values take {row_bytes >> 20} MiB, and {max(0, free) >> 20} MiB "
            "are free beside the weights; set a smaller max_completion_length"
        )
    return int(free // row_bytes)


def free_for_rows(device: torch.device) -> int:
    """Bytes that rows may take: half of what is free on a CPU, where others allocate, too."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available // 2)
    return free_bytes(device) - RESERVE_BYTES


def by_generate(
    model: Any,
    request: AnswerRequest,
    number: int,
    draw: Draw,
    ends: Sequence[int],
    look: Look | None,
) -> Answer:
    """An answer that transformers' `generate` writes, with the same draws; that of a streamed model
    is computed from its beginning for each token."""
    ids, logprobs, kept = list[int](), list[float](), list[float]()

    def choose(logits: Tensor) -> int:
        place = request.drawn + len(ids)
        about = torch.tensor([[request.key], [number], [place]], device=logits.device)
        token, logprob, mass = draw(logits[None], *about)
        ids.append(int(token))
        logprobs.append(float(logprob))
        kept.append(float(mass))
        if look is not None and look(request, number, ids) and ends:
            return ends[0]
        return ids[-1]

    prompt = torch.tensor([list(request.ids)], device=model.device)
    images: Any = {n: of_dtype(v, model.dtype).to(model.device) for n, v in request.images.items()}
    if isinstance(model, StreamedModel):
        while len(ids) < request.most:
            whole = torch.cat([prompt, torch.tensor([ids], device=model.device).long()], 1)
            # marks of tokens that are of images
            of_tokens: Any = {n: F.pad(v, (0, len(ids))) for n, v in images.items() if n in TYPES}
            if choose(model(input_ids=whole, **images | of_tokens)[0][0, -1]) in ends:
                break
    else:
        generated(model, prompt, request.most, ends, choose, **images)
    cut = len(ids) == request.most and ids[-1] not in ends
    finish: Literal["stop", "length"] = "length" if cut else "stop"
    return Answer(request.key, number, ids, logprobs, kept if draw.cuts else None, finish)
