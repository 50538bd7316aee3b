"""Processes that tokenise batches of rows, forked from this one.

They do what this process would do, and hand the results back in order; nothing else of them can be
seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, NoReturn, Self, TypeVar

from megatrain.data.forking import ended, forked
from megatrain.errors import MegaTrainError

ALONE_BATCHES = 4  # which this process does alone: a small set is done before others had begun
WAITING = 2  # batches for each process that are under way or done

Given = TypeVar("Given")
Done = TypeVar("Done")


class Team(Generic[Given, Done]):
    """Does a piece of work for each of many batches, in several processes once they are many.

    work: makes the results of batches in order; it may look ahead.

    Use it in a `with` block, whose end ends the processes. Raises MegaTrainError if one of them is
    killed from outside, and what the work raises.
    """

    def __init__(self, work: Callable[[Iterable[Given]], Iterator[Done]], processes: int) -> None:
        self._work, self._processes = work, processes
        self._alone = ALONE_BATCHES
        self._children: list[tuple[int, Connection]] = []
        self._idle = SimpleQueue[tuple[int, Connection]]()
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="megatrain-tokenise")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for child, connection in self._children:
            ended(child)
            connection.close()
        self._threads.shutdown(cancel_futures=True)

    def map(self, batches: Iterable[Given]) -> Iterator[Done]:
        """The result for each batch, in order; a few batches are taken ahead."""
        coming = iter(batches)
        if self._processes == 1:
            yield from self._work(coming)
            return
        for done in self._work(islice(coming, self._alone)):
            self._alone -= 1
            yield done
        under_way = deque[Future[Done]]()
        for batch in coming:
            if not self._children:
                self._fork()
            under_way.append(self._threads.submit(self._hand_over, batch))
            if len(under_way) == WAITING * self._processes:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def _hand_over(self, batch: Given) -> Done:
        """Have one of the processes do it."""
        child, connection = self._idle.get()
        try:
            connection.send(batch)
            done, error = connection.recv()
        except (EOFError, OSError) as lost:
            raise MegaTrainError(
                f"process {child}, which tokenises rows, was ended from outside, perhaps because "
                "RAM ran out; set data.processes: 1, or start again: what was done is kept"
            ) from lost
        finally:
            self._idle.put((child, connection))
        if error is not None:
            raise error
        result: Done = done
        return result

    def _fork(self) -> None:
        for _ in range(self._processes):
            ours, theirs = Pipe()
            try:
                child = forked(partial(self._serve, theirs))
            except OSError as error:
                raise MegaTrainError(
                    f"no {self._processes} processes can be started to tokenise rows "
                    f"({error.strerror}); set data.processes: 1"
                ) from error
            theirs.close()
            self._children.append((child, ours))
            self._idle.put((child, ours))

    def _serve(self, connection: Connection) -> NoReturn:
        """In a child: work until the parent has ended."""
        while True:
            batch = connection.recv()
            answer: tuple[Done | None, Exception | None]
            try:
                answer = (next(self._work([batch])), None)
            except Exception as error:  # noqa: BLE001  the parent raises it
                answer = (None, error)
            connection.send(answer)
