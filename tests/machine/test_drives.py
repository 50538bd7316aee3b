"""Drives are told apart, also where folders lie on something else."""

import os
from pathlib import Path

import pytest

from megatrain.machine.cgroups import mount_of
from megatrain.machine.hardware import drive_name, one_of_each_drive


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


TABLE = r"""22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:40 / /data/my\040files rw - nfs4 server:/export\040a rw,vers=4
31 22 0:41 / /shm rw,nosuid - tmpfs shm rw,size=65536k
32 22 0:42 / /over rw - ext4 /dev/hidden rw
33 22 0:43 / /over rw master:2 propagate_from:1 - overlay overlay rw,lowerdir=/a:/b"""


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
def test_what_a_folder_lies_on(tmp_path, monkeypatch, folder, found):
    monkeypatch.setattr(Path, "exists", lambda _: True)
    (tmp_path / "mountinfo").write_text(TABLE)
    mount = mount_of(Path(folder), tmp_path / "mountinfo")
    assert mount == (Path(found[0]), *found[1:])
    assert mount_of(Path(folder), tmp_path / "none") is None


def test_folders_of_one_drive_count_once(tmp_path):
    assert len(one_of_each_drive([tmp_path, tmp_path / "a", Path("/proc")])) == 2
    assert one_of_each_drive([]) == []
