"""Writing files of tensors, by one rank or by several together.

Of several ranks the first does everything but this. Each file is written and hashed by one rank, by
the code that a rank alone runs. What the others own of its tensors comes in messages, in rounds: in
each, every file under way gets its next one. What there is to send follows from the plan alone, so
no rank asks another for anything. After some rounds all say whether they are well; until then one
that is not sends on without values, and reads what it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import distributed

from megatrain.errors import MegaTrainError
from megatrain.memory.nvme_store import READ_BYTES
from megatrain.storage import safetensors
from megatrain.storage.hashed_file import WrittenFile, write_bytes
from megatrain.storage.safetensors import TensorSource
from megatrain.world import ALONE, World

File = TypeVar("File", str, Path)


def readings(
    sizes: Mapping[File, int], world: World, verified: bool = True
) -> dict[File, dict[str, bool]]:
    """Arguments of this rank's `HashedReader` for each file, the largest first. verified: one rank
    hashes it."""
    found = {}
    for file, rank in assign_files(sizes, world.size).items():
        hashes = verified and rank == world.rank
        # who hashes is slower, and finds in RAM what the others of its host have read
        kept = verified and not hashes and world.hosts == 1
        found[file] = {"hashes": hashes, "kept": kept}
    return found


def assign_files(sizes: Mapping[File, int], writers: int) -> dict[File, int]:
    """Assign each file, the largest first, to the writer with the fewest bytes so far."""
    held, assigned = [0] * writers, {}
    for file in sorted(sizes, key=lambda file: -sizes[file]):
        assigned[file] = held.index(min(held))
        held[assigned[file]] += sizes[file]
    return assigned


MESSAGE_BYTES = READ_BYTES
ROUNDS = 16  # from one look at whether all ranks are well to the next

Plan = Mapping[str, Sequence[TensorSource]]
T = TypeVar("T")


# why: decision 0098
def write_files(
    folder: Path, plan: Plan, metadata: Mapping[str, str], world: World = ALONE
) -> list[WrittenFile]:
    """Write several safetensors files (paths relative to `folder`), a few at a time; the first
    failure cancels the rest. world: the first rank's, in `led`. Raises as `write_safetensors`."""
    if world.is_alone:
        write = partial(_write_file, folder, metadata=metadata)
        names = assign_files(_sizes(plan), 1)
        files = safetensors.in_parallel([partial(write, name, plan[name]) for name in names])
    else:
        order = world.broadcast(_Order(folder.absolute(), tuple(plan), dict(metadata)))
        failures, of_ranks = zip(*_write(order, plan, world), strict=True)
        world.raise_first(failures)
        files = list(chain(*of_ranks))
    written = {file.name: file for file in files}
    return [written[name] for name in plan]


def _write_file(
    folder: Path, name: str, sources: Sequence[TensorSource], metadata: Mapping[str, str]
) -> WrittenFile:
    return replace(safetensors.write_safetensors(folder / name, sources, metadata), name=name)


def write_model(
    folder: Path,
    weights: Plan,
    metadata: Mapping[str, str],
    others: Plan | None = None,
    there: Collection[str] = (),
    world: World = ALONE,
) -> list[WrittenFile]:
    """Write weight files and their index, but for those that are `there`, and `others`, which it
    does not list. world: as `write_files`."""
    wanted = {name: shard for name, shard in weights.items() if name not in there}
    files = write_files(folder, {**wanted, **(others or {})}, metadata, world)
    if len(weights) > 1:
        files.append(write_bytes(folder / safetensors.INDEX, safetensors.encode_index(weights)))
    return files


def _sizes(plan: Plan) -> dict[str, int]:
    """Bytes of tensors in each file."""
    return {name: sum(source.nbytes for source in sources) for name, sources in plan.items()}


# -- by several ranks ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Order:
    """Message of the first rank: the files that it is about to write."""

    folder: Path
    names: tuple[str, ...]
    metadata: dict[str, str]


# Of a write on one rank: the exception that it raises, and the files that it wrote.
_Outcome = tuple[MegaTrainError | None, list[WrittenFile]]


def led(world: World, lead: Callable[[], T], plan: Callable[[], Plan]) -> T:
    """Call `lead` on the first rank and return its result on all; the others help it to write.

    All call it at the same place, in the main thread.

    Args:
        lead: may call `write_files`, and lets no rank wait otherwise.
        plan: at least the files that it writes.

    Raises on all ranks what `lead` raises.
    """
    if world.is_alone:
        return lead()
    if world.is_first:
        try:
            result = lead()
        except Exception as error:
            world.broadcast(world.as_told(error))
            raise
        world.broadcast((result,))
        return result
    message: Any  # orders, then what `lead` raises, or its result in a tuple
    while isinstance(message := world.broadcast(), _Order):
        planned = plan()
        _write(message, {name: planned[name] for name in message.names}, world)
    if isinstance(message, Exception):
        raise message
    (result,) = message
    return result


def _write(order: _Order, plan: Plan, world: World) -> list[_Outcome]:
    """Write this rank's part. Returns every rank's outcome; raises if ranks cannot be reached."""
    width = max(1, safetensors.IO_THREADS // world.size)  # tracks that a rank writes at a time
    of_track: dict[int, dict[str, Sequence[TensorSource]]] = {}
    for name, number in assign_files(_sizes(plan), world.size * width).items():
        of_track.setdefault(number, {})[name] = plan[name]
    tracks = [_Track(number % world.size, files) for number, files in sorted(of_track.items())]
    write = partial(_write_file, order.folder, metadata=order.metadata)
    writers = {
        number: _Writer(write, track.files)
        for number, track in enumerate(tracks)
        if track.writer == world.rank
    }
    sender = _Sender(tracks, world.rank)

    def failure() -> Exception | None:
        failures = (sender.failure, *(writer.failure for writer in writers.values()))
        return next(filter(None, failures), None)

    try:
        for number, turn in enumerate(zip_longest(*(track.turns() for track in tracks))):
            if number % ROUNDS == 0 and any(world.all_gather(failure() is not None)):
                break
            _take_turn(turn, tracks, writers, sender, world)
    finally:
        for writer in writers.values():
            writer.end()
    files = [file for writer in writers.values() for file in writer.written]
    return world.all_gather((world.as_told(failure()), files))


_Turn = tuple[int, int]  # a message of a file: its sender, its bytes


def _take_turn(
    turn: Sequence[_Turn | None],
    tracks: Sequence[_Track],
    writers: Mapping[int, _Writer],
    sender: _Sender,
    world: World,
) -> None:
    """Send and receive one round. turn: a message of every track, None at its end."""
    on_their_way: list[distributed.Work | None] = []
    received = []
    for number, (message, track) in enumerate(zip(turn, tracks, strict=True)):
        if message is None:
            continue
        rank, nbytes = message
        if world.rank not in (rank, track.writer):
            continue
        if rank == world.rank:
            values = sender.next_of(number, nbytes)
        else:
            values = torch.empty(nbytes, dtype=torch.uint8)
            on_their_way.append(distributed.irecv(values, rank, world.messages, tag=number))
        if number in writers:
            received.append((writers[number], values))
        else:
            sent = distributed.isend(values, track.writer, world.messages, tag=number)
            on_their_way.append(sent)
    for work in filter(None, on_their_way):
        work.wait()
    for writer, values in received:
        writer.give(values)


@dataclass(frozen=True)
class _Track:
    """Files that one rank writes, one after another."""

    writer: int
    files: Plan

    def turns(self) -> Iterator[_Turn]:
        """The messages of the files, in order; the same on all ranks."""
        for source in self._shared():
            for sender, numel in source.owned.items():
                nbytes = numel * source.dtype.itemsize
                for begin in range(0, nbytes, MESSAGE_BYTES):
                    yield sender, min(MESSAGE_BYTES, nbytes - begin)

    def own(self, rank: int) -> Iterator[torch.Tensor]:
        """The pieces that a rank sends, as bytes, on the CPU or the GPU."""
        for source in self._shared():
            if source.owned[rank]:
                for piece in source.pieces():
                    yield from torch.split(piece.reshape(-1).view(torch.uint8), MESSAGE_BYTES)

    def _shared(self) -> Iterator[TensorSource]:
        for sources in self.files.values():
            yield from (source for source in safetensors.in_order(sources) if source.owned)


class _Sender:
    """This rank's messages. failure: the error after which they are zeros."""

    def __init__(self, tracks: Sequence[_Track], rank: int) -> None:
        self.failure: Exception | None = None
        self._own = [track.own(rank) for track in tracks]

    def next_of(self, track: int, nbytes: int) -> torch.Tensor:
        if self.failure is None:
            try:
                message = next(self._own[track]).cpu()
                assert len(message) == nbytes, nbytes
                return message
            except Exception as error:  # noqa: BLE001  all ranks raise it
                self.failure = error
        return torch.zeros(nbytes, dtype=torch.uint8)


class _Writer:
    """A thread that writes files from the messages it receives. failure: the exception that ended
    it; later messages are dropped. written: files that are complete."""

    def __init__(
        self, write: Callable[[str, Sequence[TensorSource]], WrittenFile], files: Plan
    ) -> None:
        self.failure: Exception | None = None
        self.written: list[WrittenFile] = []
        self._write, self._files, self._ended = write, files, False
        # one waits while another is written, and a third arrives
        self._given: Queue[torch.Tensor | None] = Queue(1)
        self._thread = Thread(target=self._run, name="storage")
        self._thread.start()

    def give(self, message: torch.Tensor) -> None:
        """The next message of its files. Waits until it has written most of those before."""
        self._given.put(message)

    def end(self) -> None:
        """There is no more. Returns when its files are on the disk, or gone if not complete."""
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            for name, sources in self._files.items():
                fed = [
                    replace(s, pieces=partial(self._received, s)) if s.owned else s for s in sources
                ]
                self.written.append(self._write(name, fed))
        except EOFError:  # no more messages come for a file that is not complete
            pass
        except Exception as error:  # noqa: BLE001  all ranks raise it
            self.failure = error
        while not self._ended:  # nobody waits for room
            self._next()

    def _received(self, source: TensorSource) -> Iterator[torch.Tensor]:
        left = source.nbytes
        while left:
            message = self._next()
            if message is None:
                raise EOFError
            left -= len(message)
            yield message.view(source.dtype)

    def _next(self) -> torch.Tensor | None:
        message = self._given.get()
        self._ended = message is None
        return message
