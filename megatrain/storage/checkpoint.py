"""Checkpoints that survive a failing disk or machine.

A checkpoint is a Hugging Face model folder plus `optimizer/` (remainder and moments, one file per
block), `state.json` (where the run is) and `MANIFEST.json` (sizes and hashes, written last). It is
written beside the checkpoint before, made real by one rename, and checked before it is trusted.
Every tensor file carries its step: files of two steps are never read as one. `restore.py` reads it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatrain.errors import StorageError
from megatrain.memory.layout import TensorRange
from megatrain.models.constants import names_in
from megatrain.models.names import Tensors
from megatrain.optim import Optimizer
from megatrain.storage import run_folder, saves
from megatrain.storage.export import (
    Exportable,
    array_sources,
    passthrough_files,
    unchanged,
    weight_plan,
    write_description,
)
from megatrain.storage.hashed_file import WrittenFile, sync_tree, system_errors, write_bytes
from megatrain.storage.manifest import MANIFEST, Manifest, describe_files, read_manifest
from megatrain.storage.passthrough import Passthrough, at_home, is_kept, keep_once, put_into
from megatrain.storage.safetensors import TensorSource
from megatrain.storage.sharded_write import led, write_model

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


class Checkpointable(Exportable, Protocol):
    """An engine as a checkpoint sees it."""

    @property
    def precision(self) -> str: ...
    @property
    def optimizer(self) -> Optimizer: ...

    def state(self) -> dict[str, int]:
        """Counters and seeds."""

    def load_state(self, state: Mapping[str, int]) -> None:
        """Take over an earlier `state()`; called after the store's arrays were loaded."""


def save_checkpoint(
    run_dir: Path | str,
    step: int,
    engine: Checkpointable,
    tokenizer: PreTrainedTokenizerBase | None,
    state: dict[str, Any],
    keep: int = 2,
    generation_config: GenerationConfig | None = None,
    *,
    source: Mapping[str, str] | None = None,
    code: Mapping[str, bytes] | None = None,
    best: int | None = None,
    abandoned: Sequence[Path] = (),
) -> Path:
    """Write `checkpoint-<step>`, point `last` to it, and remove older checkpoints.

    Blocks are written in the order in which the pending update finishes them, beside the update.
    All ranks call it at the same place; the files are those that one rank with this state writes.

    Args:
        state: what the caller needs to go on (data position, random state, ...), as JSON.
        keep: the number of newest checkpoints to keep, beside the one that `best` points to.
        source: digests of the files that the model began with.
        code: Python files that the model needs, by name.
        best: point `best` to the checkpoint of this step; None leaves it.
        abandoned: checkpoints to remove once this one is written.

    Raises:
        ModelError: the model's unused weights are nowhere.
        StorageError: the disk is full or fails. The checkpoints before it are untouched and nothing
            of the new one is left.
    """
    assert keep >= 1, keep
    run_dir = Path(run_dir)
    made_of = {**identity(engine), "source": dict(source or {})}
    about = {"step": step, "made_of": made_of, "engine": engine.state(), "state": state}
    files = {saves.STATE: json.dumps(about, indent=1).encode() + b"\n", **(code or {})}

    def lead() -> Passthrough:
        run_folder.make_run_dir(run_dir)
        target = run_dir / run_folder.checkpoint_name(step)
        with system_errors(target, "save it"):
            saves.tidy(run_dir)
            _check_space(run_dir, engine)
            _write(target, step, engine, tokenizer, generation_config, files)
            run_folder.point(run_dir, "last", target)
            if best is not None and (run_dir / run_folder.checkpoint_name(best)).is_dir():
                run_folder.point(run_dir, "best", run_dir / run_folder.checkpoint_name(best))
            saves.prune(run_dir, keep, [path for path in abandoned if path != target])
            return at_home(run_dir, engine.passthrough)

    engine.passthrough = led(
        engine.store.world, lead, lambda: {**weight_plan(engine), **_optimizer_plan(engine)}
    )
    return run_dir / run_folder.checkpoint_name(step)


def _write(
    target: Path,
    step: int,
    engine: Checkpointable,
    tokenizer: PreTrainedTokenizerBase | None,
    generation_config: GenerationConfig | None,
    small: Mapping[str, bytes],
) -> None:
    """Make the folder of a checkpoint. small: files by name."""
    run_dir, world = target.parent, engine.store.world
    with run_folder.new_folder(target, run_dir / f"{target.name}.tmp") as folder:
        (folder / "optimizer").mkdir()
        metadata, plan = {"format": "pt", "step": str(step)}, weight_plan(engine)
        passthrough = passthrough_files(engine, plan)
        kept = keep_once(run_dir, passthrough, world)
        put_into(folder, run_dir, kept)
        states = _optimizer_plan(engine)
        files = write_model(folder, plan, metadata, states, there=passthrough, world=world)
        write_description(folder, engine, tokenizer, generation_config)
        files += [write_bytes(folder / name, text) for name, text in small.items()]
        sequence, constants = saves.next_sequence(run_dir), names_in(engine.constants)
        manifest = Manifest(step, sequence, {}, constants=constants)
        _write_manifest(folder, manifest, files, kept)


def saved_arrays(engine: Checkpointable) -> dict[str, torch.dtype]:
    """The arrays that a run continues from: master weights and optimizer state, no gradients."""
    names = {"weight", "remainder", *(array.name for array in engine.optimizer.state_arrays)}
    return {spec.name: spec.dtype for spec in engine.store.arrays.values() if spec.name in names}


def checkpoint_bytes(engine: Checkpointable) -> int:
    """Bytes of tensors in one checkpoint, but for those that no step changes."""
    layout, blocks, arrays = engine.store.layout, engine.anatomy.blocks, saved_arrays(engine)
    of_arrays = (
        layout(a, b.index).trained.parameters * arrays[a].itemsize for a in arrays for b in blocks
    )
    return sum(of_arrays) + engine.constants.nbytes


def _check_space(run_dir: Path, engine: Checkpointable) -> None:
    need = checkpoint_bytes(engine) + run_folder.SMALL_FILES_BYTES
    if not is_kept(run_dir):
        need += sum(source.nbytes for source in unchanged(engine))
    free = shutil.disk_usage(run_dir).free
    if need > free:
        raise StorageError(
            f"{run_dir}: a checkpoint needs {need / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are "
            "free; free space there, or lower checkpoint.keep"
        )


def _write_manifest(
    folder: Path,
    manifest: Manifest,
    files: Sequence[WrittenFile],
    linked: Sequence[WrittenFile],
) -> None:
    """Write MANIFEST.json once everything it is to list is on the disk.

    files: hashed already, and on the disk. linked: hashed already; may be copies.
    """
    hashed = {file.name for file in (*files, *linked)}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    others = [name for name in names if name not in hashed]  # written by a library
    sync_tree(folder, but={file.name for file in files})
    listed = {file.name: file for file in (*files, *linked, *describe_files(folder, others))}
    write_bytes(folder / MANIFEST, replace(manifest, files=listed).encode())


def _optimizer_plan(engine: Checkpointable) -> dict[str, list[TensorSource]]:
    """A file per block with its arrays but the weights: tensors `exp_avg/model.norm.weight` etc."""
    plan = {}
    for block in (block.index for block in engine.anatomy.blocks):
        plan[optimizer_file(block)] = [
            replace(source, name=f"{array}/{source.name}")
            for array in saved_arrays(engine)
            if array != "weight"
            for source in array_sources(
                engine, array, block, saved_tensors(engine, array, block, engine.published)
            )
        ]
    return plan


def saved_tensors(
    engine: Checkpointable, array: str, block: int, weights: Tensors
) -> Sequence[TensorRange]:
    """The tensors of an array of a block in a checkpoint whose weights are these.

    Arrays with an element for each parameter are cut alike, others into the model's own tensors.
    Only the weight has frozen ones.
    """
    spec, trainable = engine.store.arrays[array], engine.store.layouts[block].trainable
    if spec.per == "element":
        return [t for t in weights[block] if spec.whole or t.offset < trainable]
    names = engine.anatomy.published.whole_names
    tensors = engine.store.layout(array, block).tensors
    return [TensorRange(names[spec.name], spec.shape, spec.offset) for spec in tensors]


def optimizer_file(block: int) -> str:
    return f"optimizer/block-{block:05d}.safetensors"


def identity(engine: Checkpointable) -> dict[str, Any]:
    """The properties in which a checkpoint and the engine that continues from it must agree."""
    arrays = saved_arrays(engine).items()
    return {
        "model": engine.anatomy.family,
        "parameters": engine.anatomy.parameters,
        **({"frozen parameters": frozen} if (frozen := engine.anatomy.frozen_parameters) else {}),
        "precision": engine.precision,
        "optimizer": engine.optimizer.name,
        "arrays": {name: str(dtype).removeprefix("torch.") for name, dtype in arrays},
    }


def write_final(
    run_dir: Path | str,
    checkpoint: Path | str | None = None,
    *,
    full: bool = False,
    card: str | None = None,
) -> Path:
    """Make `final/` of a checkpoint (by default the last): its model, as hard links.

    They cost no space while that checkpoint is kept.

    Args:
        full: with the optimizer's state, so that a run may go on from it.
        card: its text.

    Raises:
        ConfigError: there is no such checkpoint.
        StorageError: the disk fails, or the checkpoint has no intact manifest.
    """
    run_dir = Path(run_dir)
    which = "last" if checkpoint is None else Path(checkpoint).name
    source = saves.find_checkpoint(run_dir, which)
    manifest, target = read_manifest(source), run_dir / run_folder.FINAL
    names = manifest.files if full else saves.model_files(manifest)
    with run_folder.new_folder(target, run_dir / "final.tmp") as folder:
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            run_folder.link_or_copy(source / name, folder / name)
        files = {name: manifest.files[name] for name in names}
        if card is not None:
            files[run_folder.CARD] = write_bytes(folder / run_folder.CARD, card.encode())
        sync_tree(folder)
        write_bytes(folder / MANIFEST, replace(manifest, files=files).encode())
    return target


def reopen(run_dir: Path, source: Path) -> None:
    """Remove a full `final/` of a run that goes on from `source`, unless it is of a later save.

    If `source` is `final/` itself, as its checkpoint was lost, it becomes a checkpoint again. One
    that holds the model alone stays until the next takes its place. Raises StorageError.
    """
    final, saved = run_dir / run_folder.FINAL, saves.sequence_of(source)
    with system_errors(final, "move it"):
        saves.tidy(run_dir)
        if not final.is_dir():
            return
        if source.resolve() == final.resolve():
            name = run_folder.checkpoint_name(read_manifest(final).step)
            run_folder.put_in_place(final, run_dir / name)
        elif saves.holds_state(final) and saves.sequence_of(final, math.inf) <= saved:
            run_folder.discard(final)
