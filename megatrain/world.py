"""The ranks that train one model together: processes with a device each.

Every rank owns the same share of every block's arrays, computes gradients of micro-batches of its
own, and updates its share. Sums over ranks are ours, in the order of ranks: their bits depend
neither on the library that carries the bytes nor on its algorithms.
"""

from __future__ import annotations

import base64
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed

from megatrain.errors import ConfigError, MegaTrainError
from megatrain.heartbeat import beat, may_end_here

T = TypeVar("T")
LOOKS_EVERY_S = 0.1
# Ranks may wait long for each other, while one saves, or all are stopped. One that has died is
# noticed otherwise (recipes/ranks/liveness.py).
PATIENCE = timedelta(days=30)
BESIDE_SIZE = 1016  # bytes of a message that travel with its size: one that is short travels once


# renamed in torch 2.13
_gather: Any = getattr(distributed, "all_gather_single", None)
_gather = _gather or distributed.all_gather_into_tensor
scatter_sum: Any = getattr(distributed, "reduce_scatter_single", None)
scatter_sum = scatter_sum or distributed.reduce_scatter_tensor


@dataclass(frozen=True)
class World:
    """All ranks, and which of them this one is. The default is a rank alone.

    Attributes:
        local_rank, local_size: the same among the ranks of this host. Ranks of a host follow one
            another, and all hosts have as many.
        messages: the process group over which small messages travel, from the main thread.
        local, across: those over which blocks travel, from a thread of their own: the ranks of this
            host, and one of each host. None for a group of one.
        store: short texts by name, which every rank sees.
        cp_size: consecutive ranks that share sequences (context parallelism).
        sharing: the group over which these trade what their attention needs.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    messages: Any = None
    local: Any = None
    across: Any = None
    store: Any = None
    cp_size: int = 1
    sharing: Any = None
    _turns: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)

    @classmethod
    def joined(
        cls, device: torch.device, store: Any = None, local: tuple[int, int] | None = None
    ) -> World:
        """The world of torch.distributed, which has been initialised. All ranks call it.

        local: rank and size on this host; None: all ranks are on it.

        Raises ConfigError on all ranks if they are not numbered host by host.
        """
        rank, size = distributed.get_rank(), distributed.get_world_size()
        if size == 1:
            return cls()
        local = local or (rank, size)
        # on the CPU: small objects, which must not wait for a GPU's stream
        messages = distributed.new_group(backend="gloo", timeout=PATIENCE)
        world = cls(rank, size, *local, messages, store=store)
        check_numbers(world.all_gather(local))
        backend = "nccl" if device.type == "cuda" else "gloo"
        ranks, each = range(size), local[1]
        # two levels of groups: the ranks of a host, and the n-th ranks of all hosts
        groups: dict[str, Any] = {"local": None, "across": None}
        if each > 1:
            groups["local"] = _own_group([ranks[i : i + each] for i in ranks[::each]], backend)
        if each < size:
            groups["across"] = _own_group([ranks[i::each] for i in ranks[:each]], backend)
        return replace(world, **groups)

    def sharing_sequences(self, size: int) -> World:
        """A copy with context-parallel groups of `size` ranks, which divides those of a host. All
        ranks call it."""
        assert self.local_size % size == 0, "the config was checked"
        if size == 1:
            return self
        if size == self.local_size:
            return replace(self, cp_size=size, sharing=self.local)
        ranks, backend = range(self.size), distributed.get_backend(self.local)
        own = _own_group([ranks[i : i + size] for i in ranks[::size]], backend)
        return replace(self, cp_size=size, sharing=own)

    @property
    def cp_rank(self) -> int:
        """This rank's part of its sequences, counted from 0."""
        return self.rank % self.cp_size

    @property
    def dp_rank(self) -> int:
        """Number of this rank's context-parallel group. Each group has micro-batches of its own."""
        return self.rank // self.cp_size

    @property
    def dp_size(self) -> int:
        return self.size // self.cp_size

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def hosts(self) -> int:
        return self.size // self.local_size

    def here(self) -> World:
        """The ranks of this host alone, between which blocks travel, but no messages."""
        return World(*2 * (self.local_rank, self.local_size), local=self.local)

    def place(self, rank: int | None = None) -> int:
        """Number of the share of a block that a rank owns; by default this rank's.

        Those of ranks that stand in for each other on their hosts lie together, so that gathered
        across they are a host's part of the block, and those parts gathered here are all of it.
        """
        # with one host: the rank's own number
        host, local = divmod(self.rank if rank is None else rank, self.local_size)
        return local * self.hosts + host

    @property
    def owners(self) -> list[int]:
        """The ranks, in the order of what they own."""
        return sorted(range(self.size), key=self.place)

    @property
    def is_first(self) -> bool:
        """True for the rank that speaks for all, and writes what is not shared out."""
        return self.rank == 0

    def all_gather(self, mine: T) -> list[T]:
        """Every rank's value, in the order of ranks. All ranks call it at the same place."""
        if self.is_alone:
            return [mine]
        data = torch.tensor(bytearray(encode(mine)), dtype=torch.uint8)
        head = torch.tensor([len(data)]).view(torch.uint8)
        found = self._gathered(torch.cat((head, data[:BESIDE_SIZE])), len(head) + BESIDE_SIZE)
        sizes = [int(part[: len(head)].view(torch.int64)) for part in found]
        found = [part[len(head) :] for part in found]
        if max(sizes) > BESIDE_SIZE:  # on every rank
            found = self._gathered(data, max(sizes))
        sent = zip(found, sizes, strict=True)
        return [decode(part[:size].numpy().tobytes()) for part, size in sent]

    def _gathered(self, mine: torch.Tensor, size: int) -> list[torch.Tensor]:
        """Every rank's bytes, of which each has at most `size`."""
        found = [torch.empty(size, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.nn.functional.pad(mine, (0, size - len(mine)))
        distributed.all_gather(found, padded, group=self.messages)
        return found

    def broadcast(self, value: T | None = None) -> T:
        """Rank 0's value; other ranks' arguments are ignored. All ranks call it at one place."""
        if self.is_alone:
            return value  # type: ignore[return-value]
        data = torch.tensor(bytearray(encode(value) if self.is_first else b""), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        distributed.broadcast(size, src=0, group=self.messages)
        data = data if self.is_first else torch.empty(int(size), dtype=torch.uint8)
        distributed.broadcast(data, src=0, group=self.messages)
        return decode(data.numpy().tobytes())  # type: ignore[no-any-return]

    def on_rank0(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 alone: its value, or what it raises, on every rank."""
        with self.together():
            found = make() if self.is_first else None
        return self.broadcast(found)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on every rank what the block raises on one; if on several, the first rank's.

        Inside the block no rank may wait for another.
        """
        if self.is_alone:
            yield
            return
        failure = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  raised below
            failure = error
        self.raise_first(self.all_gather(self.as_told(failure)), failure)

    def raise_first(
        self, errors: Sequence[MegaTrainError | None], mine: Exception | None = None
    ) -> None:
        """Raise the first rank's error, if any has one. mine: this rank's, as it was caught."""
        for rank, error in enumerate(errors):
            if error is not None:
                raise mine if mine and rank == self.rank else error

    def as_told(self, error: Exception | None) -> MegaTrainError | None:
        """An error as other ranks raise it, or may understand it."""
        if error is None or isinstance(error, MegaTrainError):
            return error
        return MegaTrainError(f"rank {self.rank}: {type(error).__name__}: {error}")

    def whole(self, mine: torch.Tensor, share: int) -> torch.Tensor:
        """Every rank's `mine`, flat on the CPU, in the order of what they own. share: elements of
        the largest; behind those of a rank that has fewer are zeros."""
        padded = torch.nn.functional.pad(mine, (0, share - len(mine)))
        whole = torch.empty(self.size * share, dtype=mine.dtype)
        gather_whole(whole, padded, self.messages)
        return whole if self.hosts == 1 else whole.view(self.size, share)[self.owners].view(-1)

    def local_rank0_first(self, work: Callable[[], T]) -> T:
        """Run `work` on local rank 0 of every host first, and on the others once all hosts have it:
        they find what it left on the disk. All ranks call it at the same place.

        Waiting counts as a sign of life, and may end where work may.
        """
        if self.is_alone:
            return work()
        turn, first = f"turn/{next(self._turns)}", self.local_rank == 0
        found = work() if first else None
        if first:
            self.store.set(f"{turn}/{self.rank}", "done")
        self._wait_for(f"{turn}/{rank}" for rank in range(0, self.size, self.local_size))
        return found if first else work()  # type: ignore[return-value]

    def _wait_for(self, names: Iterable[str]) -> None:
        """Return once the store has all of these."""
        wanted = [*names]
        while not self.store.check(wanted):
            beat()
            may_end_here()
            time.sleep(LOOKS_EVERY_S)

    def one_by_one(self, work: Callable[[], object]) -> None:
        """Run `work` on the ranks of a host one after another. All ranks call it at the same place,
        and raise what one raises.

        The work itself lets no rank wait for another. Waiting is as in `local_rank0_first`.
        """
        for local in range(self.local_size):
            turn = f"turn/{next(self._turns)}"
            with self.together():
                try:
                    if local == self.local_rank:
                        work()
                finally:
                    if self.store is not None:
                        self.store.set(f"{turn}/{self.rank}", "done")
                if self.store is not None:
                    self._wait_for(f"{turn}/{rank}" for rank in range(self.size))
            beat()

    def number(self, local: int) -> int:
        """The number among all ranks' of a rank's micro-batch `local`."""
        return local * self.dp_size + self.dp_rank


ALONE = World()


def check_numbers(local: Sequence[tuple[int, int]]) -> None:
    """Raise ConfigError unless ranks of a host follow one another, as many on each. local: of every
    rank, its number on its host and how many there are."""
    each, size = local[0][1], len(local)
    for rank, (number, there) in enumerate(local):
        if (number, there) != (rank % each, each) or size % each:
            raise ConfigError(
                f"rank {rank} of {size} is number {number} of {there} on its host: start as many "
                "processes on every host, numbered host by host (torchrun does so, Slurm with "
                "--distribution=block)"
            )


def gather_whole(whole: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
    """Fill `whole` with every rank's `mine`, in the group's order. `mine` may be its part of it."""
    whole, mine = _bytes(whole), _bytes(mine)
    if whole.is_cuda:
        _gather(whole, mine, group=group)
    else:
        ranks = distributed.get_world_size(group)
        _pass_around(whole.chunk(ranks), [mine] * ranks, group)


def trade_parts(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
    """Give every rank of a group its part of what this one sends, and get one of each, in order."""
    received, sent = _bytes(received), _bytes(sent)
    if received.is_cuda:
        distributed.all_to_all_single(received, sent, group=group)
    else:
        ranks = distributed.get_world_size(group)
        _pass_around(received.chunk(ranks), sent.chunk(ranks), group)


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    """Not every library knows every dtype."""
    return flat.view(-1).view(torch.uint8)


def _pass_around(
    received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], group: Any
) -> None:
    """Send each rank its part and receive one of each, both ways at once, over gloo.

    gloo sends to a rank once that rank has announced that it receives. In gloo's own collectives
    this announcement waits behind what that rank sends itself, so bytes go one way at a time.
    """
    rank, ranks = distributed.get_rank(group), len(received)
    others = [(rank + i) % ranks for i in range(1, ranks)]
    works = [distributed.irecv(received[r], group=group, group_src=r) for r in others]
    works += [distributed.isend(sent[r], group=group, group_dst=r) for r in others]
    if received[rank].data_ptr() != sent[rank].data_ptr():
        received[rank].copy_(sent[rank])
    for work in works:
        assert work is not None  # this rank is of the group
        work.wait()


def _own_group(groups: Sequence[Sequence[int]], backend: str) -> Any:
    """That of these groups which has this rank. Every rank makes all of them, in this order."""
    made = [distributed.new_group([*r], backend=backend, timeout=PATIENCE) for r in groups]
    return next(one for one in made if one is not distributed.GroupMember.NON_GROUP_MEMBER)


# -- messages --------------------------------------------------------------------------------------

PACKAGE = __name__.partition(".")[0]


def encode(value: object) -> bytes:
    """A value as JSON, which does nothing when it is read, as a pickle may.

    Besides JSON's own values: tuples, sets, mappings with any keys, bytes, paths, dates, arrays and
    tensors, dataclasses, named tuples and errors of this package. Raises TypeError for others.
    """
    return json.dumps(_plain(value)).encode()


def decode(data: bytes) -> Any:
    """The value that `encode` was given. Raises MegaTrainError for anything else."""
    try:
        return _value(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise MegaTrainError(f"a message of another rank is broken: {error}") from error


def _plain(value: Any) -> Any:
    """In JSON's own types; what is none of them as a mapping of one key, its kind."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, list):
        return [*map(_plain, value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named": [type(value).__module__, type(value).__qualname__, [*map(_plain, value)]]}
    if isinstance(value, tuple | set | frozenset):
        return {"tuple" if isinstance(value, tuple) else "set": [*map(_plain, value)]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, date):
        return {"date": value.isoformat()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {"array": [value.dtype.str, [*value.shape], _plain(value.tobytes())]}
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {"tensor": [str(value.dtype)[6:], [*value.shape], _plain(raw.tobytes())]}
    if is_dataclass(value) and not isinstance(value, type):
        held = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"object": [type(value).__module__, type(value).__qualname__, held]}
    if isinstance(value, MegaTrainError):
        held = {name: _plain(one) for name, one in vars(value).items() if name != "__notes__"}
        return {"error": [type(value).__module__, type(value).__qualname__, held, str(value)]}
    raise TypeError(f"a message cannot have a {type(value).__name__}")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [*map(_value, plain)]
    if not isinstance(plain, dict):
        return plain
    ((kind, held),) = plain.items()
    match kind:
        case "tuple" | "set":
            return (tuple if kind == "tuple" else set)(map(_value, held))
        case "dict":
            return {_value(key): _value(one) for key, one in held}
        case "bytes":
            return base64.b64decode(held)
        case "path":
            return Path(held)
        case "date":
            return date.fromisoformat(held)
        case "array":
            dtype, shape, raw = held
            return np.frombuffer(bytearray(_value(raw)), np.dtype(dtype)).reshape(shape)
        case "tensor":
            dtype, shape, raw = held
            flat = torch.tensor(bytearray(_value(raw)), dtype=torch.uint8)
            return flat.view(getattr(torch, dtype)).reshape(shape)
        case "named":
            module, name, held = held
            return _class(module, name)._make(map(_value, held))
        case "object" | "error":
            module, name, attributes, *said = held
            found = _class(module, name).__new__(_class(module, name), *said)
            for name, one in attributes.items():
                object.__setattr__(found, name, _value(one))
            return found
    raise ValueError(f"{kind} is no kind of value")


def _class(module: str, name: str) -> Any:
    """A dataclass, named tuple or error of this package. Raises ValueError for anything else."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    ours = isinstance(found, type) and found.__module__.partition(".")[0] == PACKAGE
    if ours and (is_dataclass(found) or issubclass(found, MegaTrainError | tuple)):
        return found
    raise ValueError(f"{name} is no class of messages")
