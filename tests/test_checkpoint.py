"""Checkpoints: bit-exact, complete or absent, and every damaged byte is found."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatrain.checkpoint import (
    RunLock,
    checkpoint_bytes,
    checkpoints,
    find_checkpoint,
    find_resumable,
    load_checkpoint,
    mark_best,
    save_checkpoint,
    verify_checkpoint,
    write_final,
)
from megatrain.errors import ConfigError, StorageError
from megatrain.manifest import Manifest, read_manifest
from megatrain.memory.host_store import ArraySpec, HostStore
from megatrain.models.anatomy import Anatomy
from megatrain.models.safetensors_writer import WrittenFile
from megatrain.models.skeleton import Skeleton, layouts_of
from megatrain.optim import AdamW

CONFIG = transformers.LlamaConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, max_position_embeddings=16
)
ARRAYS = {
    "bfloat16": [("weight", torch.bfloat16), ("remainder", torch.int16), ("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)],
    "float32": [("weight", torch.float32), ("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)],
}


class StillEngine:
    """What saving sees of an engine, without threads: `update(n)` is pending for each block until it is waited for."""

    optimizer = AdamW()

    def __init__(self, config: Any = CONFIG, precision: str = "bfloat16") -> None:
        self.precision = precision
        self.hf_config = config
        self.anatomy: Anatomy = Skeleton(config, dtype=dict(ARRAYS[precision])["weight"]).anatomy
        specs = [ArraySpec(name, dtype) for name, dtype in ARRAYS[precision]]
        self.store = HostStore(layouts_of(self.anatomy), [*specs, ArraySpec("grad", torch.bfloat16)], threads=1)
        self.updates = 0
        self.pending: dict[int, int] = {}
        self.lock = threading.Lock()  # several writers may wait for one block
        self.update(0)

    def update(self, number: int) -> None:
        """Every array gets values that tell the update."""
        self.updates = number
        self.pending = {block.index: number for block in self.anatomy.blocks}

    def wait_ready(self, block: int) -> None:
        with self.lock:
            self._finish(block)

    def _finish(self, block: int) -> None:
        number = self.pending.pop(block, None)
        if number is None:
            return
        for index, (name, dtype) in enumerate(ARRAYS[self.precision]):
            for view in self.anatomy.blocks[block].layout.views(self.store.array(name, block)).values():
                ramp = torch.arange(view.numel()).mul(17).add(1000 * number + 100 * block + index).remainder(30000)
                view.copy_(ramp.view(view.shape).to(dtype))

    def state(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_state(self, state: Mapping[str, int]) -> None:
        self.updates = state["updates"]

    def bits(self) -> str:
        """A digest of all that a checkpoint keeps."""
        digest = hashlib.sha256()
        for block in self.anatomy.blocks:
            self.wait_ready(block.index)
            for name, _ in ARRAYS[self.precision]:
                digest.update(self.store.array(name, block.index).view(torch.uint8).numpy().data)
        return digest.hexdigest()


@pytest.fixture
def engine() -> Iterator[StillEngine]:
    engine = StillEngine()
    with engine.store:
        yield engine


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def save(run_dir: Path, engine: StillEngine, *steps: int, keep: int = 9) -> Path:
    for step in steps:
        engine.update(step)
        save_checkpoint(run_dir, step, engine, None, {"step": step}, keep)
    return run_dir / f"checkpoint-{steps[-1]}"


def names(run_dir: Path) -> set[str]:
    return {path.name for path in run_dir.iterdir()}


# -- round trip ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ARRAYS)
def test_every_array_and_the_state_come_back_bit_for_bit(run_dir: Path, precision: str) -> None:
    state = {"position": [3, 14], "loss": 0.1 + 0.2, "name": "é", "none": None, "rng": [2**63, -1]}
    source, target = StillEngine(precision=precision), StillEngine(precision=precision)
    with source.store, target.store:
        source.update(7)
        path = save_checkpoint(run_dir, 7, source, None, state)
        target.update(1)
        assert load_checkpoint(path, target) == state
        assert (target.updates, target.bits()) == (7, source.bits())


def test_a_save_waits_for_each_blocks_update(run_dir: Path, engine: StillEngine) -> None:
    engine.update(5)
    assert len(engine.pending) == 4
    path = save_checkpoint(run_dir, 5, engine, None, {})
    saved = load_file(path / "model.safetensors")
    for block in engine.anatomy.blocks:
        for name, view in block.layout.views(engine.store.array("weight", block.index)).items():
            assert torch.equal(saved[name], view), name
    assert not engine.pending


def test_a_failed_update_is_not_saved(run_dir: Path, engine: StillEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(block: int) -> None:
        raise RuntimeError(f"update of block {block} failed")

    monkeypatch.setattr(engine, "wait_ready", poisoned)
    with pytest.raises(RuntimeError, match="update of block"):
        save_checkpoint(run_dir, 1, engine, None, {})
    assert names(run_dir) == set()


def test_gradients_are_not_saved(run_dir: Path, engine: StillEngine) -> None:
    path = save(run_dir, engine, 1)
    assert {name.split("/")[0] for name in load_file(path / "optimizer" / "block-00001.safetensors")} == {
        "remainder",
        "exp_avg",
        "exp_avg_sq",
    }
    on_disk = sum(tensor.nbytes for file in path.rglob("*.safetensors") for tensor in load_file(file).values())
    assert on_disk == checkpoint_bytes(engine) == 12 * engine.anatomy.parameters


def test_transformers_loads_the_folder_as_it_is(run_dir: Path, engine: StillEngine) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(save(run_dir, engine, 3))
    assert model.dtype == torch.bfloat16
    expected = {n: v for b in engine.anatomy.blocks for n, v in b.layout.views(engine.store.array("weight", b.index)).items()}
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("deep", [True, False])
def test_a_fresh_checkpoint_verifies(run_dir: Path, engine: StillEngine, deep: bool) -> None:
    manifest = verify_checkpoint(save(run_dir, engine, 3), deep)
    assert manifest.step == 3
    files = {str(path.relative_to(run_dir / "last")) for path in (run_dir / "last").rglob("*") if path.is_file()}
    assert files == {*manifest.files, "MANIFEST.json"}


def test_the_run_folder_is_the_owners_alone(run_dir: Path, engine: StillEngine) -> None:
    save(run_dir, engine, 1)
    assert run_dir.stat().st_mode & 0o777 == 0o700


# -- what is kept -------------------------------------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_last_points_to_the_newest(run_dir: Path, engine: StillEngine) -> None:
    save(run_dir, engine, 1, 2, 3, 10, keep=2)
    assert names(run_dir) == {"checkpoint-3", "checkpoint-10", "last"}
    assert os.readlink(run_dir / "last") == "checkpoint-10"


def test_best_is_kept_besides_until_another_is_better(run_dir: Path, engine: StillEngine) -> None:
    mark_best(run_dir, save(run_dir, engine, 1))
    save(run_dir, engine, 2, 3, keep=1)
    assert names(run_dir) == {"checkpoint-1", "checkpoint-3", "best", "last"}
    mark_best(run_dir, run_dir / "checkpoint-3")
    save(run_dir, engine, 4, keep=1)
    assert names(run_dir) == {"checkpoint-3", "checkpoint-4", "best", "last"}
    assert find_checkpoint(run_dir, "best") == run_dir / "checkpoint-3"


def test_final_is_hard_links_of_the_last(run_dir: Path, engine: StillEngine) -> None:
    last = save(run_dir, engine, 1, 2)
    final = write_final(run_dir)
    assert verify_checkpoint(final).step == 2
    assert (final / "model.safetensors").samefile(last / "model.safetensors")
    save(run_dir, engine, 3, 4, keep=1)
    assert verify_checkpoint(final).step == 2, "pruning must leave final alone"
    write_final(run_dir, "checkpoint-4")
    assert verify_checkpoint(final).step == 4


def test_final_is_copied_where_links_are_not_possible(run_dir: Path, engine: StillEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: object, target: object) -> None:
        raise OSError(1, "Operation not permitted")

    last = save(run_dir, engine, 1)
    monkeypatch.setattr(os, "link", no_links)
    final = write_final(run_dir)
    assert verify_checkpoint(final).step == 1
    assert not (final / "model.safetensors").samefile(last / "model.safetensors")


def test_saving_a_step_again_replaces_it(run_dir: Path, engine: StillEngine) -> None:
    save(run_dir, engine, 4)
    engine.update(5)
    path = save_checkpoint(run_dir, 4, engine, None, {"second": True})
    assert load_checkpoint(path, engine) == {"second": True}
    assert names(run_dir) == {"checkpoint-4", "last"}


def test_after_going_back_the_new_saves_are_the_newest(run_dir: Path, engine: StillEngine) -> None:
    save(run_dir, engine, 100, 200, 300)
    save(run_dir, engine, 150, keep=2)  # resumed from 100 by hand
    assert names(run_dir) == {"checkpoint-150", "checkpoint-300", "last"}
    assert find_resumable(run_dir).path == run_dir / "checkpoint-150"


@pytest.mark.parametrize(
    ("which", "found"), [(None, "checkpoint-2"), ("last", "checkpoint-2"), ("checkpoint-1", "checkpoint-1"), ("1", "checkpoint-1")]
)
def test_checkpoints_are_found_by_name(run_dir: Path, engine: StillEngine, which: str | None, found: str) -> None:
    save(run_dir, engine, 1, 2)
    assert find_checkpoint(run_dir, which) == run_dir / found


@pytest.mark.parametrize("which", ["best", "final", "3", "../run/checkpoint-1"])
def test_a_checkpoint_that_is_not_there_is_answered_with_those_that_are(run_dir: Path, engine: StillEngine, which: str) -> None:
    save(run_dir, engine, 1)
    with pytest.raises(ConfigError, match=r"there is checkpoint-1, last"):
        find_checkpoint(run_dir, which)


def test_a_run_folder_serves_one_run(run_dir: Path) -> None:
    with RunLock(run_dir), pytest.raises(ConfigError, match=rf"in use by another run \(process {os.getpid()}\)"), RunLock(run_dir):
        pass
    with RunLock(run_dir):
        pass
    assert run_dir.stat().st_mode & 0o777 == 0o700


# -- damage -------------------------------------------------------------------------------------------------------------------------


def damaged(draw: random.Random, files: dict[str, bytes]) -> tuple[str, str, bytes | None]:
    """One way to damage one of the files: (name, what was done, the bytes it leaves, None for none)."""
    name = draw.choice(sorted(files))
    data = files[name]
    position = draw.randrange(len(data))
    flipped, zeroed = bytearray(data), bytearray(data)
    flipped[position] ^= 1 << draw.randrange(8)
    zeroed[position : position + 512] = bytes(len(data[position : position + 512]))
    kinds = {
        "flipped": bytes(flipped),
        "truncated": data[:position],
        "extended": data + b"\0",
        "zeroed": bytes(zeroed),
        "removed": None,
        "swapped": files[draw.choice(sorted(files))],
    }
    what = draw.choices(list(kinds), weights=[8, 2, 1, 2, 1, 1])[0]
    return (name, what, kinds[what]) if kinds[what] != data else damaged(draw, files)


def test_every_damage_is_found_and_the_file_is_named(run_dir: Path, engine: StillEngine) -> None:
    folder = save(run_dir, engine, 1)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    draw = random.Random(1)
    for _ in range(1000):
        name, what, data = damaged(draw, files)
        path = folder / name
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        with pytest.raises(StorageError) as caught:
            verify_checkpoint(folder)
        assert name in str(caught.value) or (name, what) == ("MANIFEST.json", "removed"), (name, what)
        path.write_bytes(files[name])
    verify_checkpoint(folder)


def forge(folder: Path, **changes: Any) -> None:
    """Write a manifest that agrees with the files as they are now."""
    old = read_manifest(folder)
    files = {}
    for name in old.files:
        data = (folder / name).read_bytes()
        files[name] = WrittenFile(name, len(data), hashlib.sha256(data).hexdigest())
    values: dict[str, Any] = {"step": old.step, "sequence": old.sequence, "files": files} | changes
    (folder / "MANIFEST.json").write_bytes(Manifest(**values).encode())


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer/block-00002.safetensors"])
def test_files_of_two_steps_are_refused_even_with_matching_hashes(run_dir: Path, engine: StillEngine, file: str) -> None:
    save(run_dir, engine, 1, 2)
    shutil.copyfile(run_dir / "checkpoint-1" / file, run_dir / "checkpoint-2" / file)
    forge(run_dir / "checkpoint-2")
    with pytest.raises(StorageError, match=rf"{file}: is of step 1 in a checkpoint of step 2"):
        load_checkpoint(run_dir / "checkpoint-2", engine)


def test_a_state_of_another_step_is_refused(run_dir: Path, engine: StillEngine) -> None:
    save(run_dir, engine, 1, 2)
    shutil.copyfile(run_dir / "checkpoint-1" / "state.json", run_dir / "checkpoint-2" / "state.json")
    forge(run_dir / "checkpoint-2")
    with pytest.raises(StorageError, match=r"state\.json: is of step 1"):
        load_checkpoint(run_dir / "checkpoint-2", engine)


def test_a_manifest_cannot_name_files_outside(run_dir: Path, engine: StillEngine) -> None:
    folder = save(run_dir, engine, 1)
    forge(folder, files={"../../secret": WrittenFile("../../secret", 1, "")})
    with pytest.raises(StorageError, match="outside the checkpoint"):
        verify_checkpoint(folder)


def test_a_later_format_is_refused_as_such(run_dir: Path, engine: StillEngine) -> None:
    path = save(run_dir, engine, 1) / "MANIFEST.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(StorageError, match="has format 2 and this release reads 1"):
        verify_checkpoint(path.parent)


def test_a_stray_weight_file_is_refused(run_dir: Path, engine: StillEngine) -> None:
    folder = save(run_dir, engine, 1)
    save_file({"a": torch.ones(1)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(StorageError, match=r"model-00001-of-00002\.safetensors: does not belong"):
        verify_checkpoint(folder)


def test_a_damaged_checkpoint_gives_way_to_the_one_before_with_a_warning(run_dir: Path, engine: StillEngine) -> None:
    save(run_dir, engine, 1, 2, 3)
    (run_dir / "checkpoint-3" / "MANIFEST.json").unlink()
    file = run_dir / "checkpoint-2" / "optimizer" / "block-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = find_resumable(run_dir)
    assert found.path == run_dir / "checkpoint-1"
    assert len(found.warnings) == 2
    assert "block-00000.safetensors: does not match its checksum" in " ".join(found.warnings)


def test_final_is_resumed_from_when_nothing_else_is_left(run_dir: Path, engine: StillEngine) -> None:
    path = save(run_dir, engine, 1)
    write_final(run_dir)
    shutil.rmtree(path)
    assert find_resumable(run_dir).path == run_dir / "final"


def test_without_checkpoints_there_is_nothing_to_resume(run_dir: Path) -> None:
    assert find_resumable(run_dir).path is None


OTHER = transformers.LlamaConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, vocab_size=32, max_position_embeddings=16
)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: StillEngine(precision="float32"), "precision 'bfloat16' and this run has 'float32'"),
        (lambda: StillEngine(OTHER), "parameters 5456 and this run has"),
    ],
)
def test_another_engine_is_refused_in_a_sentence(
    run_dir: Path, engine: StillEngine, other: Callable[[], StillEngine], message: str
) -> None:
    path = save(run_dir, engine, 1)
    stranger = other()
    with stranger.store, pytest.raises(ConfigError, match=message):
        load_checkpoint(path, stranger)


def test_another_optimizer_is_refused(run_dir: Path, engine: StillEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(run_dir, engine, 1)
    monkeypatch.setattr(AdamW, "name", "lion")
    with pytest.raises(ConfigError, match="optimizer 'adamw' and this run has 'lion'"):
        load_checkpoint(path, engine)


# -- full disks and sudden death ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 100, 700, 4096, 9000])
def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_else(run_dir: Path, engine: StillEngine, limit: int) -> None:
    save(run_dir, engine, 1)
    before = engine.bits()
    engine.update(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(StorageError, match=r"checkpoint-2\.tmp/.*errno 27.*free space"):
            save_checkpoint(run_dir, 2, engine, None, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(run_dir) == {"checkpoint-1", "last"}
    load_checkpoint(run_dir / "checkpoint-1", engine)
    assert engine.bits() == before
    assert save(run_dir, engine, 2).name == "checkpoint-2", "the run can go on and save later"


def test_too_little_space_is_known_before_writing(run_dir: Path, engine: StillEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(run_dir.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(StorageError, match=r"a checkpoint needs .* GiB and 0\.00 GiB are free"):
        save(run_dir, engine, 1)


def test_what_a_killed_save_left_is_removed_by_the_next(run_dir: Path, engine: StillEngine) -> None:
    save(run_dir, engine, 1)
    shutil.copytree(run_dir / "checkpoint-1", run_dir / "checkpoint-2.tmp")
    (run_dir / "last.link.tmp").symlink_to("nowhere")
    assert find_resumable(run_dir).path == run_dir / "checkpoint-1"
    save(run_dir, engine, 3)
    assert names(run_dir) == {"checkpoint-1", "checkpoint-3", "last"}


def test_a_replacement_cut_off_in_the_middle_loses_nothing(run_dir: Path, engine: StillEngine) -> None:
    save(run_dir, engine, 1)
    (run_dir / "checkpoint-1").rename(run_dir / "checkpoint-1.replaced")  # killed before the new one was renamed
    assert find_resumable(run_dir).path == run_dir / "checkpoint-1.replaced"
    save(run_dir, engine, 2)
    assert names(run_dir) == {"checkpoint-1", "checkpoint-2", "last"}


def save_until_killed(run_dir: Path, engine: StillEngine, step: int) -> None:
    """The child: train and save for ever, writing a step twice now and then as a resumed run does."""
    while True:
        step += 1
        engine.update(step)
        save_checkpoint(run_dir, step, engine, None, {"step": step}, keep=1)
        if step % 3 == 0:
            save_checkpoint(run_dir, step, engine, None, {"step": step}, keep=1)


def test_kill_9_in_the_middle_of_saves_loses_no_finished_save(run_dir: Path, engine: StillEngine) -> None:
    draw = random.Random(2)
    save(run_dir, engine, 1)
    newest, interrupted = 1, 0
    for _ in range(100):
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(run_dir, engine, newest)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.005, 0.08))
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child must not end by itself"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        interrupted += any(path.name.endswith((".tmp", ".replaced")) for path in run_dir.iterdir())
        finished = int(os.readlink(run_dir / "last").partition("-")[2])
        found = find_resumable(run_dir)
        assert found.path is not None
        assert found.warnings == ()
        state = load_checkpoint(found.path, engine, verify=False)
        assert state["step"] == engine.updates >= max(newest, finished)
        loaded = engine.bits()
        engine.update(state["step"])
        assert engine.bits() == loaded
        newest = state["step"]
    assert interrupted > 25, "too few kills hit a save for this test to mean anything"
    assert newest > 50
    assert len(checkpoints(run_dir)) <= 3
