"""The disk is measured past the cache, leaves nothing behind, and stops when it is slow."""

import errno
import fcntl
import os
import time
from unittest.mock import Mock

import pytest

from megatrain.errors import StorageError
from megatrain.measure import disk
from megatrain.measure.disk import PIECE_BYTES, disk_rates


def test_both_ways_have_a_rate_and_nothing_is_left(tmp_path):
    write, read = disk_rates(tmp_path / "runs" / "not" / "there", 2 * PIECE_BYTES)
    assert write > 0 and read > 0
    assert list(tmp_path.iterdir()) == []


def test_every_piece_is_written_once_and_read_once(tmp_path, monkeypatch):
    moved: dict[str, list[int]] = {"pwrite": [], "preadv": []}
    for name, offsets in moved.items():
        original = getattr(os, name)

        def note(number, data, start, offsets=offsets, original=original):
            offsets.append(start)
            return original(number, data, start)

        monkeypatch.setattr(os, name, note)
    disk_rates(tmp_path, 3 * PIECE_BYTES)
    for offsets in moved.values():
        assert sorted(offsets) == [0, PIECE_BYTES, 2 * PIECE_BYTES]


def test_a_slow_disk_is_not_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "THREADS", 1)
    written = Mock(side_effect=os.pwrite)
    monkeypatch.setattr(os, "pwrite", written)
    now = iter(range(0, 1000, 2))  # every look at the clock finds two seconds gone
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    rate, _ = disk_rates(tmp_path, 100 * PIECE_BYTES)
    assert written.call_count == 1
    assert rate < PIECE_BYTES


def test_a_file_system_without_direct_access_is_measured_too(tmp_path, monkeypatch):
    error = OSError(errno.EINVAL, "Invalid argument")
    monkeypatch.setattr(fcntl, "fcntl", Mock(side_effect=error))
    assert min(disk_rates(tmp_path, PIECE_BYTES)) > 0


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=error))
    words = r": cannot measure the disk: No space left on device \(errno 28\); name another"
    with pytest.raises(StorageError, match=words):
        disk_rates(tmp_path, PIECE_BYTES)
