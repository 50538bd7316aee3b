"""What is renamed is on the disk before: neither a run's files nor an export's are lost with the
power."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import megatrain as mt

File = tuple[int, int]
RENAMES = ("rename", "replace")
MADE_AGAIN = "report.html"  # by `megatrain report`, so a run does not wait for the disk


class Disk:
    """Follows fsync and rename below a folder: what would be there after a power loss."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.synced: dict[File, tuple[int, int]] = {}
        self.renamed_in: dict[Path, set[str]] = {}
        self.lost: list[str] = []
        for name in RENAMES:
            patch.setattr(os, name, self.rename(getattr(os, name)))
        patch.setattr(os, "fsync", self.fsync(os.fsync))

    def fsync(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def noted(fd: int) -> None:
            call(fd)
            found = os.fstat(fd)
            self.synced[found.st_dev, found.st_ino] = (found.st_size, found.st_mtime_ns)
            if stat.S_ISDIR(found.st_mode):
                self.renamed_in.pop(Path(os.readlink(f"/proc/self/fd/{fd}")), None)

        return noted

    def rename(self, call: Callable[..., None]) -> Callable[..., None]:
        def noted(source: Any, target: Any) -> None:
            path = Path(source).absolute()
            call(source, target)
            target = Path(target).absolute()
            if self.folder in path.parents and not target.name.endswith((".tmp", MADE_AGAIN)):
                self.check(target)
                self.renamed_in.setdefault(target.parent, set()).add(target.name)

        return noted

    def check(self, path: Path) -> None:
        inside = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
        for each in inside:
            found = each.lstat()
            known = self.synced.get((found.st_dev, found.st_ino))
            is_old_link = stat.S_ISLNK(found.st_mode)
            if not is_old_link and known != (found.st_size, found.st_mtime_ns):
                self.lost.append(str(each.relative_to(self.folder)))


@pytest.fixture
def disk(project: Path) -> Iterator[Disk]:
    with pytest.MonkeyPatch.context() as patch:
        yield Disk(project, patch)


def test_nothing_is_renamed_before_it_is_on_the_disk(megatrain, project, disk):
    megatrain("train cfg.yaml train.max_steps=2 checkpoint.every=1 output=new/runs/a")
    megatrain("resume new/runs/a train.max_steps=3")
    megatrain("export new/runs/a out")
    megatrain("export new/runs/a whole --dtype float32")
    with mt.Engine.from_pretrained("out", device="cpu") as engine:
        engine.save_pretrained("saved")
    assert disk.lost == []
    assert disk.renamed_in == {}, "each folder is synced after a rename in it"


def test_a_new_run_folder_is_in_its_parents_on_the_disk(megatrain, project, disk):
    megatrain("train cfg.yaml train.max_steps=1 output=new/runs/a")
    for folder in (project, project / "new", project / "new" / "runs"):
        found = folder.stat()
        assert (found.st_dev, found.st_ino) in disk.synced, folder
