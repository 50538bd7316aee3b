"""Arrays on NVMe: what is written comes back, and no failure of a drive goes unnoticed."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatrain.errors import MegaTrainError, StorageError
from megatrain.memory import nvme_store, sizes
from megatrain.memory.layout import ArraySpec, FlatLayout
from megatrain.memory.nvme_store import NvmeStore
from megatrain.memory.store import Store
from tests.helpers.delays import failing

LAYOUTS = [
    FlatLayout.pack([("w", (n,), True), ("n", (33,), False)])
    for n in (5000, 70_000, 100, 30_000, 4096)
]
ARRAYS = [
    ArraySpec("remainder", torch.int16),
    ArraySpec("exp_avg", torch.float32),
    ArraySpec("scales", torch.float32, per="group"),
]
BLOCKS = {"remainder": (0, 1, 2, 3, 4), "exp_avg": (1, 3, 4), "scales": (1, 2)}


def numel(spec: ArraySpec, block: int) -> int:
    return LAYOUTS[block].of(spec).numel


@pytest.fixture(params=[1, 2], ids=["one folder", "two folders"])
def store(request, tmp_path, monkeypatch):
    monkeypatch.setattr(nvme_store, "PIECE_BYTES", 16384)
    monkeypatch.setattr(sizes, "STATE_STAGES", 2)
    folders = [tmp_path / str(i) for i in range(request.param)]
    made = NvmeStore(numel, ARRAYS, BLOCKS, folders, threads=1)
    yield made
    made.close()


def write(store: NvmeStore, name: str, block: int, value: float, *, soon: bool = True) -> None:
    lease = store.lease(block, [name], changes=True)
    lease.wait()[name].fill_(value)
    lease.release(changed=True, soon=soon)


def read(store: NvmeStore, name: str, block: int) -> torch.Tensor:
    lease = store.lease(block, [name], changes=False)
    array = lease.wait()[name].clone()
    lease.release(changed=False, soon=True)
    return array


def write_and_read_all(store: NvmeStore, times: int = 1) -> None:
    for _ in range(times):
        for number, key in enumerate(KEYS):
            write(store, *key, number)
            assert torch.all(read(store, *key) == number)


KEYS = [(name, block) for name, blocks in BLOCKS.items() for block in blocks]


def test_arrays_begin_as_zero_with_size_and_type_as_declared(store):
    specs = {spec.name: spec for spec in ARRAYS}
    for name, block in KEYS:
        array = read(store, name, block)
        spec = specs[name]
        assert (array.dtype, array.numel()) == (spec.dtype, LAYOUTS[block].per(spec.per).numel)
        assert not array.any()
        assert store.holds(name, block)
    assert not store.holds("exp_avg", 0)


@pytest.mark.parametrize(
    "soon", [True, False], ids=["written at once", "written when the buffer is wanted"]
)
def test_what_was_written_comes_back_though_there_are_fewer_buffers(store, soon):
    for turn in (0, 100):
        for number, (name, block) in enumerate(KEYS):
            write(store, name, block, number + turn, soon=soon)
        for number, (name, block) in enumerate(KEYS):
            assert torch.all(read(store, name, block) == number + turn)


@pytest.mark.parametrize(("start", "numel"), [(0, 70_000), (1, 3), (4095, 4099), (2047, 60_001)])
def test_pieces_past_the_buffers_are_those_of_the_array(store, start, numel, monkeypatch):
    monkeypatch.setattr(nvme_store, "READ_BYTES", 16384)
    lease = store.lease(1, ["exp_avg"], changes=True)
    array = lease.wait()["exp_avg"]
    array.copy_(torch.arange(array.numel()))
    lease.release(changed=True, soon=True)
    for evicted in (False, True):
        if evicted:
            while ("exp_avg", 1) in store._where:
                read(store, "exp_avg", 3), read(store, "exp_avg", 4)
        pieces = torch.cat([piece.clone() for piece in store.pieces("exp_avg", 1, start, numel)])
        assert torch.equal(pieces, torch.arange(start, start + numel).float())


def test_a_buffer_is_shared_and_one_that_waits_gets_its_turn_when_it_is_free(store):
    first, second = (store.lease(block, ["exp_avg"], changes=True) for block in (1, 3))
    again = store.lease(1, ["exp_avg"], changes=False)
    third = store.lease(4, ["exp_avg"], changes=True)
    assert first.wait()["exp_avg"].data_ptr() == again.wait()["exp_avg"].data_ptr()
    second.wait()
    arrived = threading.Event()

    def wait_for_third() -> None:
        third.wait()
        arrived.set()

    waiting = threading.Thread(target=wait_for_third)
    waiting.start()
    again.release(changed=False, soon=True)
    assert not arrived.wait(0.05)  # the first still has its buffer
    first.release(changed=True, soon=True)
    assert arrived.wait(5)
    waiting.join()
    assert store.waited_s > 0.04


def test_a_buffer_is_written_when_its_last_user_has_changed_it(store, monkeypatch):
    writes, write = [], store._files.write

    def noted(*given: Any) -> None:
        writes.append(given)
        write(*given)

    monkeypatch.setattr(store._files, "write", noted)
    users = [store.lease(1, ["exp_avg"], changes=True) for _ in range(2)]
    for number, lease in enumerate(users):
        lease.wait()
        assert len(writes) == 0
        lease.release(changed=True, soon=True)
        assert len(writes) == number


def test_a_lease_released_before_its_turn_lets_the_next_one_pass(store):
    held = [store.lease(block, ["exp_avg"], changes=False) for block in (1, 3)]
    unwanted, last = (store.lease(4, ["exp_avg"], changes=False) for _ in range(2))
    unwanted.release(changed=False, soon=True)
    held[0].release(changed=False, soon=True)
    last.wait()


def test_a_stopped_store_wakes_those_who_wait(store):
    for block in (1, 3):
        store.lease(block, ["exp_avg"], changes=True)
    waiting = store.lease(4, ["exp_avg"], changes=True)
    threading.Timer(0.02, store.stop, [MegaTrainError("stopped")]).start()
    with pytest.raises(MegaTrainError, match="stopped"):
        waiting.wait()


def test_many_threads_see_each_other_s_changes(store):
    """Every thread adds one to every array, in an order of its own."""

    def work(number: int) -> None:
        for block in [*range(number, 5), *range(number)]:
            lease = store.lease(block, ["remainder"], changes=True)
            array = lease.wait()["remainder"]
            with locks[block]:
                array += 1
            lease.release(changed=True, soon=bool(number % 2))

    locks = [threading.Lock() for _ in range(5)]
    threads = [threading.Thread(target=work, args=(number % 5,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for block in range(5):
        assert torch.all(read(store, "remainder", block) == 10)


# -- drives that fail -----------------------------------------------------------------------------


def fail_every(monkeypatch: pytest.MonkeyPatch, call: str, n: int, error: int) -> None:
    """Every n-th call fails."""
    real, count = getattr(os, call), iter(range(1, 1 << 30))

    def shim(*arguments: object) -> object:
        if next(count) % n == 0:
            raise OSError(error, os.strerror(error))
        return real(*arguments)

    monkeypatch.setattr(os, call, shim)


@pytest.mark.parametrize(
    ("call", "n", "error"),
    [("preadv", 1, errno.EIO), ("preadv", 7, errno.EIO), ("pwritev", 3, errno.ENOSPC)],
)
def test_a_call_that_fails_stops_whoever_waits_with_folder_and_errno(
    store, tmp_path, monkeypatch, call, n, error
):
    fail_every(monkeypatch, call, n, error)
    message = rf"{tmp_path}/[01]: cannot (read|write) .*\(errno {error}\)"
    with pytest.raises(StorageError, match=message):
        write_and_read_all(store, times=8)
    with pytest.raises(StorageError, match=f"errno {error}"):  # and everybody later
        read(store, "scales", 1)
    with pytest.raises(StorageError, match=f"errno {error}"):
        list(store.pieces("scales", 1, 0, 2))


@pytest.mark.parametrize("most", [4096, 5000, 12288])
def test_short_transfers_are_continued(store, monkeypatch, most):
    """A drive that moves at most `most` bytes at a time."""
    for call in ("preadv", "pwritev"):
        real = getattr(os, call)

        def shim(
            number: int, views: list[memoryview], offset: int, real: Callable[..., Any] = real
        ) -> Any:
            return min(real(number, views, offset), most)

        monkeypatch.setattr(os, call, shim)
    for number, key in enumerate(KEYS):
        write(store, *key, number)
    for number, key in enumerate(KEYS):
        assert torch.all(read(store, *key) == number)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_drive_that_moves_nothing_is_given_up(store, monkeypatch, call):
    monkeypatch.setattr(os, call, lambda *_: 0)
    with pytest.raises(StorageError, match=r"only 0 of .*check the drive"):
        write_and_read_all(store, times=2)


def test_space_is_reserved_before_anything_is_loaded(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"cannot reserve .*No space left.*free space there"):
        NvmeStore(numel, ARRAYS, BLOCKS, [tmp_path], threads=1)


def test_a_file_system_without_direct_access_is_said_aloud(tmp_path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    made = NvmeStore(numel, ARRAYS, BLOCKS, [tmp_path / "swap"], threads=1)
    assert list((tmp_path / "swap").iterdir()) == []  # nothing is left, however the process ends
    assert (tmp_path / "swap").stat().st_mode & 0o777 == 0o700
    write(made, "remainder", 1, 3)
    assert torch.all(read(made, "remainder", 1) == 3)
    made.close()
    assert "O_DIRECT" in caplog.text


# -- over the tiers -------------------------------------------------------------------------------


def test_a_lease_is_over_all_tiers(tmp_path):
    specs = [ArraySpec("weight", torch.float32), ArraySpec("exp_avg", torch.float32)]
    with Store(
        LAYOUTS,
        specs,
        resident=1,
        resident_arrays=specs,
        device=torch.device("cpu"),
        on_nvme={"exp_avg": (2, 3)},
        nvme_folders=[tmp_path],
        threads=1,
    ) as store:
        for block in range(5):
            with store.lease(block, ["weight", "exp_avg"], changes=True) as arrays:
                arrays["weight"].fill_(block)
                arrays["exp_avg"].fill_(10 + block)
        for block in range(5):
            with store.lease(block, ["exp_avg", "weight"]) as arrays:
                assert torch.all(arrays["weight"] == block)
                assert torch.all(arrays["exp_avg"] == 10 + block)
            assert torch.all(torch.cat(list(store.pieces("exp_avg", block, 5, 100))) == 10 + block)
        assert [b for b in range(5) if store.is_on_nvme("exp_avg", b)] == [2, 3]
        with pytest.raises(KeyError):
            store.array("exp_avg", 2)


@pytest.mark.parametrize(
    "failed",
    [KeyboardInterrupt(), RuntimeError("can't start new thread")],
    ids=["interrupted", "no thread"],
)
def test_nobody_waits_for_a_transfer_that_did_not_begin(store, monkeypatch, failed):
    monkeypatch.setattr(store._files, "read", failing(store._files.read, 1, failed))
    with pytest.raises(type(failed)):
        store.lease(1, ["exp_avg"], changes=True)
    message = "a transfer to or from NVMe did not begin"
    with pytest.raises(StorageError, match=message):
        store.lease(1, ["exp_avg"], changes=True).wait()
