"""Full disks and kill -9: what was saved stays, what was not leaves nothing."""

from __future__ import annotations

import pytest

from megatrain.errors import StorageError
from megatrain.storage.checkpoint import find_resumable, load_checkpoint, save_checkpoint
from tests.helpers.files import largest_file, names


@pytest.mark.parametrize("limit", [0, 100, 700, 4096, 9000])
def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_else(run_dir, engine, limit, save):
    save(1)
    before = engine.bits()
    engine.update(2)
    words = r"checkpoint-2\.tmp/.*errno 27.*free space"
    with largest_file(limit), pytest.raises(StorageError, match=words):
        save_checkpoint(run_dir, 2, engine, None, {})
    assert names(run_dir) == {"checkpoint-1", "last"}
    load_checkpoint(run_dir / "checkpoint-1", engine)
    assert engine.bits() == before
    assert save(2).name == "checkpoint-2", "the run can go on and save later"


def test_a_replacement_cut_off_in_the_middle_loses_nothing(run_dir, engine, save):
    save(1)
    # killed before the new one was renamed
    (run_dir / "checkpoint-1").rename(run_dir / "checkpoint-1.replaced")
    assert find_resumable(run_dir).path == run_dir / "checkpoint-1.replaced"
    save(2)
    assert names(run_dir) == {"checkpoint-1", "checkpoint-2", "last"}
