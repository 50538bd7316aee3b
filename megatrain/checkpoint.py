"""Checkpoints that survive a dying disk or machine: written beside the last, made real by one rename, checked before they are trusted.

A checkpoint is a Hugging Face model folder plus `optimizer/` (remainder and moments, one file per block), `state.json` (where the run is)
and `MANIFEST.json` (sizes and hashes, written last). Every tensor file carries its step, so that files of two steps are never read as one.
`restore.py` reads it back.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatrain.errors import StorageError
from megatrain.export import INDEX, Trained, array_sources, weight_plan, write_description
from megatrain.manifest import MANIFEST, Manifest, describe_files, read_manifest, verify_checkpoint
from megatrain.models.names import published_names
from megatrain.models.safetensors_io import storage_error
from megatrain.models.safetensors_writer import TensorSource, WrittenFile, encode_index, write_bytes, write_files
from megatrain.optim import Optimizer
from megatrain.run_folder import (
    SMALL_FILES_BYTES,
    RunLock,
    checkpoint_name,
    checkpoints,
    discard,
    find_checkpoint,
    link_tree,
    make_run_dir,
    point,
    put_in_place,
    sync_folder,
    tidy,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

__all__ = [
    "RunLock",
    "Saved",
    "checkpoint_bytes",
    "checkpoints",
    "find_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
    "write_final",
]


class Saved(Trained, Protocol):
    """What a checkpoint needs of an engine."""

    @property
    def precision(self) -> str: ...
    @property
    def optimizer(self) -> Optimizer: ...

    def state(self) -> dict[str, int]:
        """Counters and seeds."""

    def load_state(self, state: Mapping[str, int]) -> None:
        """Take over what `state` gave; called after the store's arrays were loaded."""


# -- saving -------------------------------------------------------------------------------------------------------------------------


def save_checkpoint(
    run_dir: Path | str,
    step: int,
    engine: Saved,
    tokenizer: PreTrainedTokenizerBase | None,
    state: Mapping[str, Any],
    keep: int = 2,
    generation_config: GenerationConfig | None = None,
    *,
    best: bool = False,
) -> Path:
    """Write `checkpoint-<step>`, point `last` (and, if it is the best so far, `best`) to it, and remove all but the newest `keep`
    checkpoints; the one that `best` points to is kept besides.

    Blocks are written in the order in which the pending update finishes them, so the update runs on meanwhile. `state` is whatever the
    caller needs to go on (data position, random state, ...) and must be JSON.

    Raises:
        StorageError: the disk is full or fails. The checkpoints before it are untouched and nothing of the new one is left.
    """
    assert keep >= 1, keep
    run_dir = Path(run_dir)
    make_run_dir(run_dir)
    target = run_dir / checkpoint_name(step)
    partial_folder = run_dir / f"{target.name}.tmp"
    about = _encode_state(step, engine, state)
    with _system_errors(target, "save it"):
        tidy(run_dir)
        _check_space(run_dir, engine)
        try:
            partial_folder.mkdir()
            files = _write_tensors(partial_folder, step, engine)
            files.append(write_bytes(partial_folder / "state.json", about))
            write_description(partial_folder, engine.hf_config, generation_config, tokenizer, engine.store.arrays["weight"].dtype)
            _complete(partial_folder, step, _next_sequence(run_dir), files)
            put_in_place(partial_folder, target)
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)
        point(run_dir, "last", target)
        if best:
            point(run_dir, "best", target)
        _prune(run_dir, keep)
    return target


@contextmanager
def _system_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError that reached us from a library or a rename into our own sentence."""
    try:
        yield
    except OSError as error:
        raise storage_error(Path(error.filename or path), error, doing) from error


def saved_arrays(engine: Saved) -> dict[str, torch.dtype]:
    """The store's arrays that a run continues from: the master weight and what the optimizer declares. Gradients do not outlive a step."""
    names = {"weight", "remainder", *(array.name for array in engine.optimizer.state_arrays)}
    return {spec.name: spec.dtype for spec in engine.store.arrays.values() if spec.name in names}


def checkpoint_bytes(engine: Saved) -> int:
    """Bytes of tensors in one checkpoint."""
    layouts = (
        (dtype, engine.store.layout(name, block.index)) for name, dtype in saved_arrays(engine).items() for block in engine.anatomy.blocks
    )
    return sum(layout.parameters * dtype.itemsize for dtype, layout in layouts)


def _check_space(run_dir: Path, engine: Saved) -> None:
    need, free = checkpoint_bytes(engine) + SMALL_FILES_BYTES, shutil.disk_usage(run_dir).free
    if need > free:
        raise StorageError(
            f"{run_dir}: a checkpoint needs {need / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free; free space there, or lower "
            "checkpoint.keep"
        )


def _write_tensors(folder: Path, step: int, engine: Saved) -> list[WrittenFile]:
    """Weights as a model folder has them, and `optimizer/`; each file tagged with the step."""
    weights = weight_plan(engine)
    (folder / "optimizer").mkdir()
    files = write_files(folder, weights | _optimizer_plan(engine), {"format": "pt", "step": str(step)})
    if len(weights) > 1:
        files.append(write_bytes(folder / INDEX, encode_index(weights)))
    return files


def _complete(folder: Path, step: int, sequence: int, files: list[WrittenFile]) -> None:
    """Write the manifest, when everything that it lists is on the disk. `files` are those whose hashes are known."""
    known = {file.name for file in files}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = files + _sync_and_describe(folder, [name for name in names if name not in known])
    for subfolder in sorted(path for path in folder.rglob("*") if path.is_dir()):
        sync_folder(subfolder)
    write_bytes(folder / MANIFEST, Manifest(step, sequence, {file.name: file for file in files}).encode())
    sync_folder(folder)


def _sync_and_describe(folder: Path, names: list[str]) -> list[WrittenFile]:
    """For files that a library wrote."""
    for name in names:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    return describe_files(folder, names)


def _optimizer_plan(engine: Saved) -> dict[str, list[TensorSource]]:
    """One file per block with all that is not in the model's own files: `exp_avg/model.norm.weight` and so on."""
    published = published_names(engine.anatomy)
    names = {array: {own: f"{array}/{name}" for own, name in published.items()} for array in saved_arrays(engine) if array != "weight"}
    return {
        optimizer_file(block.index): [source for array in names for source in array_sources(engine, array, block.index, names[array])]
        for block in engine.anatomy.blocks
    }


def optimizer_file(block: int) -> str:
    return f"optimizer/block-{block:05d}.safetensors"


def _encode_state(step: int, engine: Saved, state: Mapping[str, Any]) -> bytes:
    about = {"step": step, "made_of": identity(engine), "engine": engine.state(), "state": dict(state)}
    return json.dumps(about, indent=1).encode() + b"\n"


def identity(engine: Saved) -> dict[str, Any]:
    """What must agree between a checkpoint and the engine that continues from it."""
    arrays = {name: str(dtype).removeprefix("torch.") for name, dtype in saved_arrays(engine).items()}
    return {
        "model": engine.anatomy.family,
        "parameters": engine.anatomy.parameters,
        "precision": engine.precision,
        "optimizer": engine.optimizer.name,
        "arrays": arrays,
    }


def _next_sequence(run_dir: Path) -> int:
    return 1 + int(max((sequence_of(path) for path in checkpoints(run_dir)), default=0))


def sequence_of(checkpoint: Path, unreadable: float = 0) -> float:
    """When it was saved, in saves; `unreadable` for a folder without an intact manifest, which is thrown away first."""
    try:
        return read_manifest(checkpoint).sequence
    except StorageError:
        return unreadable


def _prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and those that `last` and `best` point to; `final` has files of its own."""
    by_age = sorted(checkpoints(run_dir), key=sequence_of, reverse=True)
    pointed = {(run_dir / name).resolve() for name in ("last", "best")}
    for path in by_age[keep:]:
        if path.resolve() not in pointed:
            discard(path)


def write_final(run_dir: Path | str, checkpoint: Path | str | None = None) -> Path:
    """Make `final/` of a checkpoint (by default the last), as hard links: it costs no space while that checkpoint is kept.

    Raises:
        ConfigError: there is no such checkpoint.
        StorageError: the disk fails.
    """
    run_dir = Path(run_dir)
    source = find_checkpoint(run_dir, "last" if checkpoint is None else Path(checkpoint).name)
    partial_folder, target = run_dir / "final.tmp", run_dir / "final"
    with _system_errors(target, "write it"):
        shutil.rmtree(partial_folder, ignore_errors=True)
        try:
            link_tree(source, partial_folder)
            sync_folder(partial_folder)
            put_in_place(partial_folder, target)
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)
    return target


def reopen(run_dir: Path, source: Path) -> None:
    """A run that had ended goes on from `source`: `final/` goes, the same bytes as its last checkpoint. If it is the `source` itself, since
    that checkpoint was lost, it becomes one again. Raises StorageError."""
    final = run_dir / "final"
    if not final.is_dir():
        return
    with _system_errors(final, "move it"):
        if source.resolve() == final.resolve():
            put_in_place(final, run_dir / checkpoint_name(read_manifest(final).step))
        else:
            discard(final)
