"""The order in which leases get buffers: readers pass updates, and no lease waits forever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
import torch

from megatrain import schedule
from megatrain.errors import MegaTrainError
from megatrain.memory.layout import ArraySpec, FlatLayout
from megatrain.memory.nvme_store import NvmeLease, NvmeStore

BLOCKS = 7
ARRAYS = [ArraySpec("weight", torch.float32), ArraySpec("remainder", torch.int16)]
IN_TIME_S = 5.0

Make = Callable[..., NvmeStore]


@pytest.fixture
def make(tmp_path, monkeypatch) -> Iterator[Make]:
    """Makes stores with given numbers of buffers for weights and for arrays of updates alone."""
    with ExitStack() as made:

        def one(weights: int, others: int = 3) -> NvmeStore:
            monkeypatch.setattr(schedule, "STAGES", {"weight": weights})
            monkeypatch.setattr(schedule, "STATE_STAGES", others)
            layouts = [FlatLayout.pack([("w", (100 + block,), True)]) for block in range(BLOCKS)]
            store = NvmeStore(
                lambda spec, block: layouts[block].of(spec).numel,
                ARRAYS,
                {spec.name: range(BLOCKS) for spec in ARRAYS},
                [tmp_path],
                threads=1,
            )
            made.callback(store.close)
            made.callback(store.stop, MegaTrainError("the test is over"))  # a lease that hangs ends
            return store

        yield one


def ask(store: NvmeStore, block: int, *names: str) -> NvmeLease:
    return store.lease(block, names or ("weight", "remainder"), changes=True)


def update(lease: NvmeLease, value: int) -> None:
    for array in lease.wait().values():
        array.fill_(value)
    lease.release(changed=True, soon=True)


def look(store: NvmeStore, block: int, *, ahead: bool = True) -> NvmeLease:
    return store.lease(block, ["weight"], changes=False, ahead=ahead)


def value_of(lease: NvmeLease) -> float:
    array = lease.wait()["weight"]
    assert bool((array[:100] == array[0]).all())
    value = float(array[0])
    lease.release(changed=False, soon=True)
    return value


def in_time(*calls: Callable[[], object]) -> None:
    """Run these at once; each must end."""
    ended = [Future[object]() for _ in calls]

    def run(call: Callable[[], object], end: Future[object]) -> None:
        try:
            end.set_result(call())
        except BaseException as error:  # noqa: BLE001
            end.set_exception(error)

    for call, end in zip(calls, ended, strict=True):
        threading.Thread(target=run, args=(call, end), daemon=True).start()
    for end in ended:
        end.result(IN_TIME_S)


def served(lease: NvmeLease) -> bool:
    return len(lease.buffers) == len(lease.keys)


@pytest.mark.parametrize("buffers", [2, 3, 5])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_reader_passes_the_updates_that_were_queued_before(make, buffers, ahead):
    store = make(buffers, others=BLOCKS)
    updates = [ask(store, block) for block in range(BLOCKS)]
    update(updates[0], 7)
    update(updates[1], 8)
    found: dict[int, float] = {}

    def read(block: int) -> None:
        found[block] = value_of(look(store, block, ahead=ahead))

    for block in (0, 1):
        in_time(partial(read, block))
    assert found == {0: 7, 1: 8}
    assert not served(updates[-1])


def test_updates_leave_buffers_to_readers_until_they_have_gone(make):
    store = make(5, others=BLOCKS)
    updates = [ask(store, block) for block in range(BLOCKS)]
    assert [served(lease) for lease in updates] == [True] * 3 + [False] * 4
    readers = [look(store, block) for block in (5, 6)]
    assert all(map(served, readers))
    update(updates[0], 1)
    in_time(updates[3].wait)  # not served before the first is written, though it was read by nobody
    assert not served(updates[4])


def test_buffers_that_readers_gave_back_count_for_the_updates_that_use_them(make):
    store = make(5, others=BLOCKS)
    for block in range(5):
        value_of(look(store, block))
    updates = [ask(store, block) for block in (5, 6, 0, 1)]
    assert [served(lease) for lease in updates] == [True, True, True, False]


def test_where_every_block_has_a_buffer_updates_take_them_all(make):
    store = make(BLOCKS, others=BLOCKS)
    assert all(served(ask(store, block)) for block in range(BLOCKS))


def test_a_reader_whose_block_is_updated_keeps_its_place_and_takes_no_buffer(make):
    store = make(3)
    first = look(store, 0, ahead=False)
    second, third = look(store, 1), look(store, 2)
    assert not any(map(served, (first, second, third)))
    in_time(first.wait)
    assert all(map(served, (first, second, third)))


def test_a_reader_that_gave_up_holds_nobody_back(make):
    store = make(3)
    first, second = look(store, 0, ahead=False), look(store, 1)
    first.release(changed=False, soon=True)
    in_time(second.wait)


def test_what_an_update_is_to_change_is_shared_with_the_reader_that_came_before(make):
    store = make(2)
    reader, changer = look(store, 0), ask(store, 0)
    in_time(reader.wait, changer.wait)
    assert reader.wait()["weight"].data_ptr() == changer.wait()["weight"].data_ptr()


def test_a_reader_of_several_arrays_takes_its_turn_in_all_of_them(make):
    """Else it would hold the only weight's buffer and wait for the remainder's.

    An update holds that one, and waits for the weight's.
    """
    store = make(1, others=1)
    updates = [ask(store, block) for block in (0, 1)]
    both = store.lease(0, ["weight", "remainder"], changes=False)
    update(updates[0], 5)
    in_time(lambda: update(updates[1], 6), lambda: value_of(both))


def test_an_error_reaches_readers_that_wait_and_those_behind_them(make):
    store = make(1)
    ask(store, 3).wait()
    readers = [look(store, 0, ahead=False), look(store, 1), look(store, 2, ahead=False)]
    errors: list[str] = []

    def wait(lease: NvmeLease) -> None:
        with pytest.raises(MegaTrainError) as raised:
            lease.wait()
        errors.append(str(raised.value))

    threading.Timer(0.02, store.stop, [MegaTrainError("the update failed")]).start()
    in_time(*(lambda lease=lease: wait(lease) for lease in readers[1:]))
    wait(readers[0])
    assert errors == ["the update failed"] * 3


# -- steps as an engine takes them ----------------------------------------------------------------


class Steps:
    """Updates in one thread and uploads in another, each in the order of asking.

    What is uploaded must be of the last step.
    """

    def __init__(self, store: NvmeStore, seed: int, slow: str) -> None:
        self.store, self.random, self.slow = store, random.Random(seed), slow
        self.lanes = {name: ThreadPoolExecutor(1) for name in ("update", "upload", "release")}
        self.done: dict[int, Future[None]] = {}

    def sleep(self, lane: str) -> None:
        if self.slow in (lane, "all"):
            time.sleep(self.random.random() * 0.003)

    def update(self, block: int, step: int) -> None:
        lease = ask(self.store, block)

        def job() -> None:
            self.sleep("update")
            update(lease, step)

        self.done[block] = self.lanes["update"].submit(job)

    def upload(self, block: int) -> Future[float]:
        done = self.done.get(block)
        lease = look(self.store, block, ahead=done is None or done.done())

        def job() -> float:
            if done is not None:
                done.result()
            found = float(lease.wait()["weight"][0])
            self.sleep("upload")
            return found

        def release() -> None:
            landed.result()
            self.sleep("release")
            lease.release(changed=False, soon=True)

        landed = self.lanes["upload"].submit(job)
        self.lanes["release"].submit(release)
        return landed

    def sweep(
        self, visits: list[int], expected: int, visited: Callable[[int], None] = lambda _: None
    ) -> None:
        """Visit the blocks; two are fetched ahead."""
        fetched = [self.upload(block) for block in visits[:2]]
        for number, block in enumerate(visits):
            assert fetched[number].result(IN_TIME_S) == expected
            if number + 2 < len(visits):
                fetched.append(self.upload(visits[number + 2]))
            visited(block)


@pytest.mark.parametrize("slow", ["nobody", "update", "upload", "release", "all"])
@pytest.mark.parametrize("buffers", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "beside_backward", [False, True], ids=["updates before the forward", "updates beside backward"]
)
def test_sweeps_beside_updates_see_what_was_updated_and_end(make, buffers, slow, beside_backward):
    store = make(buffers, others=min(buffers, 3))
    steps, forward = Steps(store, buffers, slow), list(range(BLOCKS))
    for step in range(1, 5):
        if beside_backward:
            visited = partial(steps.update, step=step)
            steps.sweep([*reversed(forward)], step - 1, visited)
        else:
            for block in forward:
                steps.update(block, step)
        if step == 2:  # an evaluation, a save and a copy come between
            steps.done[3].result(IN_TIME_S)
            assert {float(piece[0]) for piece in store.pieces("weight", 3, 0, 100)} == {2}
            in_time(lambda: value_of(look(store, 3)))
        steps.sweep(forward, step)
    for lane in steps.lanes.values():
        lane.shutdown()
