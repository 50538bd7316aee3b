"""Checkpoints that survive a failing disk or machine.

A checkpoint is a Hugging Face model folder plus `optimizer/` (remainder and moments, one file per
block), `state.json` (where the run is) and `MANIFEST.json` (sizes and hashes, written last). It is
written beside the checkpoint before, made real by one rename, and checked before it is trusted.
Every tensor file carries its step: files of two steps are never read as one.

Restored, every tensor is read once, and checked on the way: one thread reads a file from beginning
to end, into the arrays; after the last byte its SHA-256 is known. An older checkpoint is loaded
over one that turns out damaged.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatrain.errors import (
    ConfigError,
    DamagedError,
    ModelError,
    StorageError,
    logger,
    system_errors,
)
from megatrain.memory.layout import TensorRange
from megatrain.models.constants import FLOATS, ParameterPlace, names_in
from megatrain.models.names import Tensors, in_blocks
from megatrain.optim import Optimizer
from megatrain.optim.split import as_weight
from megatrain.storage import export, manifest, passthrough, run_folder, safetensors
from megatrain.storage.hashed_file import WrittenFile, sync_tree, write_bytes
from megatrain.storage.safetensors import StoredTensor, TensorSource, dtype_name
from megatrain.storage.sharded_write import led, readings, write_model
from megatrain.storage.weights import find_tensors

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


class Checkpointable(export.Exportable, Protocol):
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
    run_dir: Path,
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
    made_of = {**identity(engine), "source": dict(source or {})}
    about = {"step": step, "made_of": made_of, "engine": engine.state(), "state": state}
    files = {run_folder.STATE: json.dumps(about, indent=1).encode() + b"\n", **(code or {})}

    def lead() -> passthrough.Passthrough:
        run_folder.make_run_dir(run_dir)
        target = run_dir / run_folder.checkpoint_name(step)
        with system_errors(target, "save it"):
            run_folder.tidy(run_dir)
            _write(target, step, engine, tokenizer, generation_config, files)
            run_folder.point(run_dir, "last", target)
            if best is not None and (run_dir / run_folder.checkpoint_name(best)).is_dir():
                run_folder.point(run_dir, "best", run_dir / run_folder.checkpoint_name(best))
            run_folder.prune(run_dir, keep, [path for path in abandoned if path != target])
            return passthrough.at_home(run_dir, engine.passthrough)

    engine.passthrough = led(
        engine.store.world, lead, lambda: {**export.weight_plan(engine), **_optimizer_plan(engine)}
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
        metadata, plan = {"format": "pt", "step": str(step)}, export.weight_plan(engine)
        names = {source.name for source in export.unchanged(engine)}  # share no file with others
        unchanged = {file: sources for file, sources in plan.items() if sources[0].name in names}
        kept = passthrough.keep_once(run_dir, unchanged, world)
        for file in kept:
            run_folder.link_or_copy(run_dir / run_folder.PASSENGERS / file.name, folder / file.name)
        states = _optimizer_plan(engine)
        files = write_model(folder, plan, metadata, states, there=unchanged, world=world)
        export.write_description(folder, engine, tokenizer, generation_config)
        files += [write_bytes(folder / name, text) for name, text in small.items()]
        hashed = {file.name: file for file in (*files, *kept)}
        # on the disk already; those that are kept may be copies
        sync_tree(folder, but={file.name for file in files})
        by_libraries = manifest.stray_files(folder, manifest.Manifest(step, 0, hashed))
        hashed |= {file.name: file for file in manifest.describe_files(folder, by_libraries)}
        sequence, constants = run_folder.next_sequence(run_dir), names_in(engine.constants)
        saved = manifest.Manifest(step, sequence, hashed, constants=constants)
        write_bytes(folder / manifest.MANIFEST, saved.encode())


def saved_arrays(engine: Checkpointable) -> dict[str, torch.dtype]:
    """The arrays that a run continues from: master weights and optimizer state, no gradients."""
    names = {"weight", "remainder", *(array.name for array in engine.optimizer.state_arrays)}
    return {spec.name: spec.dtype for spec in engine.store.arrays.values() if spec.name in names}


def _optimizer_plan(engine: Checkpointable) -> dict[str, list[TensorSource]]:
    """A file per block with its arrays but the weights: tensors `exp_avg/model.norm.weight` etc."""
    plan = {}
    for block in (block.index for block in engine.anatomy.blocks):
        plan[optimizer_file(block)] = [
            replace(source, name=f"{array}/{source.name}")
            for array in saved_arrays(engine)
            if array != "weight"
            for source in export.array_sources(
                engine, array, block, saved_tensors(engine, array, block, engine.published)
            )
        ]
    return plan


def saved_tensors(
    engine: Checkpointable, array: str, block: int, weights: Tensors
) -> Sequence[TensorRange]:
    """The tensors of an array of a block beside these weights: cut alike where it has an element
    for each parameter, else into the model's own tensors."""
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
    return {
        "model": engine.anatomy.family,
        "parameters": engine.anatomy.parameters,
        "frozen parameters": engine.anatomy.frozen_parameters,
        "precision": engine.precision,
        "optimizer": engine.optimizer.name,
        "arrays": {name: dtype_name(dtype) for name, dtype in saved_arrays(engine).items()},
    }


def write_final(run_dir: Path, *, full: bool = False, card: str | None = None) -> Path:
    """Make `final/` of the last checkpoint: its model, as hard links. full: with the state to go on
    from; card: its text. Raises ConfigError and StorageError."""
    source = run_folder.find_checkpoint(run_dir, "last")
    saved, target = manifest.read_manifest(source), run_dir / run_folder.FINAL
    names = saved.files if full else run_folder.model_files(saved)
    with run_folder.new_folder(target, run_dir / "final.tmp") as folder:
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            run_folder.link_or_copy(source / name, folder / name)
        files = {name: saved.files[name] for name in names}
        if card is not None:
            files[run_folder.CARD] = write_bytes(folder / run_folder.CARD, card.encode())
        sync_tree(folder)
        write_bytes(folder / manifest.MANIFEST, replace(saved, files=files).encode())
    return target


def reopen(run_dir: Path, source: Path) -> None:
    """Remove a full `final/` of a run that goes on from `source`, unless it is of a later save. As
    `source` itself it becomes a checkpoint again, whose own was lost."""
    final, saved = run_dir / run_folder.FINAL, run_folder.sequence_of(source)
    with system_errors(final, "move it"):
        run_folder.tidy(run_dir)
        if not final.is_dir():
            return
        if source.resolve() == final.resolve():
            name = run_folder.checkpoint_name(manifest.read_manifest(final).step)
            run_folder.put_in_place(final, run_dir / name)
        elif run_folder.holds_state(final) and run_folder.sequence_of(final, math.inf) <= saved:
            run_folder.discard(final)


# -- restoring ------------------------------------------------------------------------------------

# A tensor in a file, and the array, block and range of the array that it is read into; a constant
# has a place, and no array.
_Transfer = tuple[StoredTensor, str, int, TensorRange | ParameterPlace]


@dataclass(frozen=True)
class Resumable:
    """The newest intact checkpoint, if any, and a warning for each newer one that is not intact."""

    path: Path | None
    warnings: tuple[str, ...]
    named: bool = False  # by the user: then no other will do


def find_resumable(run_dir: Path, deep: bool = True, besides: Collection[Path] = ()) -> Resumable:
    """Find a checkpoint to resume from, newest save first, not in `besides`. deep: hash all."""
    warnings = []
    for path in (one for one in run_folder.newest_first(run_dir) if one not in besides):
        try:
            manifest.verify_checkpoint(path, deep)
        except StorageError as error:
            warnings.append(str(error))
        else:
            return Resumable(path, tuple(warnings))
    return Resumable(None, tuple(warnings))


def named_checkpoint(run_dir: Path, name: str) -> Resumable:
    """Find the checkpoint of this name, to resume from. Raises ConfigError and StorageError."""
    path = run_dir / run_folder.find_checkpoint(run_dir, name).name
    if not run_folder.holds_state(path):
        raise ConfigError(f"{path}: holds the model alone; name a checkpoint to go on from")
    manifest.verify_checkpoint(path, deep=False)
    return Resumable(path, (), named=True)


def load_resumable(
    run_dir: Path, engine: Checkpointable, found: Resumable
) -> tuple[Path, dict[str, Any]]:
    """Load the checkpoint found, or the newest that does not turn out damaged, warning of others.
    Returns its folder and state. Raises StorageError, and as `load_checkpoint`."""
    said, tried, world = set(found.warnings), [], engine.store.world
    while found.path is not None:
        logger.info(f"resuming from {found.path}")
        try:
            return found.path, load_checkpoint(found.path, engine)
        except DamagedError as error:
            if found.named:
                raise
            logger.warning(str(error))
        tried.append(found.path)
        found = world.on_rank0(partial(find_resumable, run_dir, deep=False, besides=tried))
        for warning in (warning for warning in found.warnings if warning not in said):
            logger.warning(warning)
        said.update(found.warnings)
    raise nothing_to_resume(run_dir)


def nothing_to_resume(run_dir: Path) -> StorageError:
    config, final, anew = run_dir / "config.yaml", run_dir / run_folder.FINAL, f"output={run_dir}-2"
    left = run_folder.manifest_of(final) is not None
    model = f", or from the trained model, with model={final}" if left else ""
    return StorageError(
        f"{run_dir}: has no intact checkpoint to go on from; "
        f"start again: megatrain train {config} {anew}{model}"
    )


def load_checkpoint(path: Path, engine: Checkpointable) -> dict[str, Any]:
    """Restore every array of the engine bit for bit, and its counters.

    Of several ranks, however many have saved it, each reads its own shares; each file is read to
    its end and checked by one of them. All call it at the same place.

    After a failure the arrays may be of two origins: the engine must not be used, but another
    checkpoint may be loaded, which replaces all.

    Returns:
        The `state` that was saved.

    Raises:
        DamagedError: the checkpoint is damaged or mixed, or cannot be read; names the file.
        StorageError: a drive of the engine's own fails.
        ConfigError: it is of another model, precision or optimizer.
    """
    with engine.store.world.together():
        about = _load(path, engine)
    engine.load_state(about["engine"])  # ranks may wait for each other
    state: dict[str, Any] = about["state"]
    return state


def _load(path: Path, engine: Checkpointable) -> dict[str, Any]:
    """Restore all but the engine's counters; returns what `read_about` does."""
    with _damage():
        saved = manifest.verify_checkpoint(path, deep=False)
        about = read_about(path)
        if about["step"] != saved.step:
            raise StorageError(
                f"{path / run_folder.STATE}: is of step {about['step']} in a checkpoint of step "
                f"{saved.step}; {manifest.USE_ANOTHER}"
            )
        for key, now in identity(engine).items():
            if (then := about["made_of"].get(key)) != now:
                raise ConfigError(
                    f"{path}: was saved with {key} {then!r} and this run has {now!r}; "
                    "resume with the run's own config"
                )
        try:
            weights = safetensors.open_shards(path)
            found = find_tensors(engine.anatomy, weights, str(path))
            places = found.names
            tensors = in_blocks(places, len(engine.anatomy.blocks))
            transfers = _transfers(path, engine, weights, tensors)
            engine.constants.expect({p: (n, weights[n].dtype) for p, n in places.items()})
            for place, name in places.items():
                if place.constant:
                    file = str(weights[name].path.relative_to(path))
                    transfers[file].append((weights[name], "", place.block, place))
        except (ConfigError, ModelError, StorageError) as error:
            manifest.check_files(path, saved, saved.files)  # a wrong name may be a damaged one
            if isinstance(error, ModelError):
                raise ConfigError(f"{error}; it is of another model") from error
            raise
        for name in manifest.stray_files(path, saved):
            logger.warning(f"{path / name}: does not belong to this checkpoint and is not read")
    for block in engine.anatomy.blocks:
        engine.wait_ready(block.index)  # wait: a pending update still writes the arrays
    sizes = {n: file.nbytes for n, file in saved.files.items() if n.endswith(".safetensors")}
    safetensors.in_parallel(
        [
            partial(_restore, engine, path, saved.files[name], transfers.get(name, ()), how)
            for name, how in readings(sizes, engine.store.world, manifest.verifies()).items()
        ]
    )
    engine.published = engine.anatomy.published.named_as(places)
    kept = passthrough.passthrough_of(path, {name: weights[name] for name in found.passthrough})
    held = {place: weights[name] for place, name in places.items()}
    engine.passthrough = passthrough.with_frozen(kept, held, engine.store)
    return about


def read_about(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint that `find_resumable` found. Raises StorageError."""
    about: dict[str, Any] = json.loads(manifest.read_bytes(checkpoint / run_folder.STATE))
    return about


@contextmanager
def _damage() -> Iterator[None]:
    """Turn a StorageError into DamagedError: the checkpoint failed, not the engine's own drive."""
    try:
        yield
    except StorageError as error:
        raise DamagedError(str(error)) from error


def _transfers(
    path: Path, engine: Checkpointable, weights: Mapping[str, StoredTensor], tensors: Tensors
) -> dict[str, list[_Transfer]]:
    """All transfers by file, names, shapes and dtypes checked. tensors: by the folder's names."""
    found: dict[str, list[_Transfer]] = defaultdict(list)
    for block in engine.anatomy.blocks:
        states = safetensors.read_header(path / optimizer_file(block.index)).tensors
        for array, dtype in saved_arrays(engine).items():
            for tensor in saved_tensors(engine, array, block.index, tensors):
                name = tensor.name
                stored = weights.get(name) if array == "weight" else states.get(f"{array}/{name}")
                frozen = tensor.offset >= engine.store.layouts[block.index].trainable
                dtypes = FLOATS if frozen and array == "weight" else (dtype,)
                if stored is None or stored.shape != tensor.shape or stored.dtype not in dtypes:
                    raise ConfigError(
                        f"{path}: has no {array} of {name} with shape {list(tensor.shape)}; "
                        "it is of another model, or of a run that froze other tensors"
                    )
                file = str(stored.path.relative_to(path))
                found[file].append((stored, array, block.index, tensor))
    return found


def _restore(
    engine: Checkpointable,
    checkpoint: Path,
    written: WrittenFile,
    transfers: Sequence[_Transfer],
    how: Mapping[str, bool],
) -> None:
    """Read one file from beginning to end; a rank that does not hash it reads only its share."""
    in_order = sorted(transfers, key=lambda transfer: transfer[0].offset)
    with ExitStack() as stack:
        with _damage():
            file = stack.enter_context(safetensors.HashedReader(checkpoint / written.name, **how))
        for (array, block), group in groupby(in_order, key=itemgetter(1, 2)):
            # not soon: more tensors of the array may follow
            lease = partial(engine.store.lease, block, [array], changes=True, soon=False)
            with lease() if array else nullcontext({}) as arrays, _damage():
                for stored, _, _, target in group:
                    if isinstance(target, ParameterPlace):
                        for begin, values in file.chunks(stored):
                            engine.constants.write(target, begin, values)
                        continue
                    span = engine.store.span(array, block)
                    flat, mine = target.flat_within(arrays[array], span), target.within(span)
                    if not mine.numel:
                        continue
                    for begin, values in file.chunks(stored, *mine):
                        part = flat.narrow(0, begin - mine.start, values.numel())
                        # frozen ones are of their source's dtype
                        part.copy_(as_weight(values, flat.dtype))
        with _damage():
            intact = file.ends_as(written)
        if not intact:
            raise manifest.damaged(checkpoint / written.name)
