"""Drives are told apart, also where folders lie on something else."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatrain.machine.hardware import drive_name, mount_of, one_of_each_drive


def test_a_drive_is_known_by_its_device_and_mount_point(tmp_path):
    device, mount = drive_name(tmp_path / "not" / "there").split(" ", 1)
    assert drive_name(tmp_path) == f"{device} {mount}"
    assert os.path.ismount(mount)
    number = tmp_path.stat().st_dev
    if os.major(number):
        assert device == f"{os.major(number)}:{os.minor(number)}"


def test_what_has_no_device_of_its_own_is_known_by_its_source():
    """Its number is another one in the next container."""
    assert drive_name(Path("/proc/self")) == "proc /proc"


TABLE = [
    ("/", "ext4", "/dev/root"),
    ("/data/my files", "nfs4", "server:/export a"),
    ("/shm", "tmpfs", "shm"),
    ("/over", "ext4", "/dev/hidden"),
    ("/over", "overlay", "overlay"),
]


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        ("/nothing/there", ("/", "ext4", "/dev/root")),
        ("/over/x", ("/over", "overlay", "overlay")),  # hides what was mounted there before
        ("/overlaid", ("/", "ext4", "/dev/root")),
        ("/shm", ("/shm", "tmpfs", "shm")),
        ("/data/my files/x", ("/data/my files", "nfs4", "server:/export a")),
    ],
)
def test_what_a_folder_lies_on(monkeypatch, folder, found):
    monkeypatch.setattr(Path, "exists", lambda _: True)
    mounts = [SimpleNamespace(mountpoint=p, fstype=k, device=d) for p, k, d in TABLE]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    mount = mount_of(Path(folder))
    assert (mount.mountpoint, mount.fstype, mount.device) == found
    mounts.clear()
    assert mount_of(Path(folder)) is None


def test_folders_of_one_drive_count_once(tmp_path):
    assert len(one_of_each_drive([tmp_path, tmp_path / "a", Path("/proc")])) == 2
    assert one_of_each_drive([]) == []
