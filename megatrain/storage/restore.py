"""Restore an engine from a checkpoint: every tensor is read once, and checked on the way.

One thread reads a file of tensors from beginning to end, straight into the arrays; after the last
byte its SHA-256 is known. Several files are read at a time. A damaged file is named, and an older
checkpoint is loaded over it.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError, DamagedError, ModelError, StorageError
from megatrain.memory.layout import TensorRange
from megatrain.models.anatomy import Anatomy
from megatrain.models.constants import FLOATS, Place
from megatrain.models.names import Tensors, in_blocks
from megatrain.optim.split import as_weight
from megatrain.storage.checkpoint import (
    Checkpointable,
    identity,
    optimizer_file,
    saved_arrays,
    saved_tensors,
)
from megatrain.storage.hashed_file import WrittenFile
from megatrain.storage.manifest import (
    USE_ANOTHER,
    check_files,
    damaged,
    read_bytes,
    stray_files,
    verifies,
    verify_checkpoint,
)
from megatrain.storage.passthrough import passthrough_of, with_frozen
from megatrain.storage.run_folder import FINAL
from megatrain.storage.safetensors import (
    HashedReader,
    StoredTensor,
    in_parallel,
    open_shards,
    read_header,
)
from megatrain.storage.saves import STATE, find_checkpoint, holds_state, manifest_of, newest_first
from megatrain.storage.sharded_write import Reading, readings
from megatrain.storage.weights import Found, find_tensors

# A tensor in a file, and the array, block and range of the array that it is read into; a constant
# has a place, and no array.
_Transfer = tuple[StoredTensor, str, int, TensorRange | Place]

logger = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Resumable:
    """The newest intact checkpoint, if any, and a warning for each newer one that is not intact."""

    path: Path | None
    warnings: tuple[str, ...]
    named: bool = False  # by the user: then no other will do


def find_resumable(
    run_dir: Path | str, deep: bool = True, besides: Collection[Path] = ()
) -> Resumable:
    """Find the checkpoint to resume from, newest save first, without those in `besides`.

    With `deep` every byte is checked.
    """
    # unreadable ones first: each may have been the newest, so each gets its warning
    candidates = newest_first(Path(run_dir), unreadable=math.inf)
    warnings = []
    for path in (path for path in candidates if path not in besides):
        try:
            verify_checkpoint(path, deep)
        except StorageError as error:
            warnings.append(str(error))
        else:
            return Resumable(path, tuple(warnings))
    return Resumable(None, tuple(warnings))


def named_checkpoint(run_dir: Path, name: str) -> Resumable:
    """Find the checkpoint of this name, to resume from. Raises ConfigError and StorageError."""
    path = run_dir / find_checkpoint(run_dir, name).name
    if not holds_state(path):
        raise ConfigError(f"{path}: holds the model alone; name a checkpoint to go on from")
    verify_checkpoint(path, deep=False)
    return Resumable(path, (), named=True)


def load_resumable(
    run_dir: Path | str, engine: Checkpointable, found: Resumable
) -> tuple[Path, dict[str, Any]]:
    """Load the checkpoint found, or the newest that does not turn out damaged, warning of others.

    Returns its folder and the saved state. Raises StorageError if there is none, and the errors of
    `load_checkpoint`.
    """
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


def nothing_to_resume(run_dir: Path | str) -> StorageError:
    run_dir = Path(run_dir)
    config, final, anew = (run_dir / "config.yaml", run_dir / FINAL, f"output={run_dir}-2")
    model = f", or from the trained model, with model={final}" if manifest_of(final) else ""
    return StorageError(
        f"{run_dir}: has no intact checkpoint to go on from; "
        f"start again: megatrain train {config} {anew}{model}"
    )


def load_checkpoint(path: Path | str, engine: Checkpointable) -> dict[str, Any]:
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
        about = _load(Path(path), engine)
    engine.load_state(about["engine"])  # ranks may wait for each other
    state: dict[str, Any] = about["state"]
    return state


def _load(path: Path, engine: Checkpointable) -> dict[str, Any]:
    """Restore all but the engine's counters; returns what `read_about` does."""
    with _damage():
        manifest = verify_checkpoint(path, deep=False)
        tensor_files = {n: file for n, file in manifest.files.items() if n.endswith(".safetensors")}
        about = read_about(path)
        if about["step"] != manifest.step:
            raise StorageError(
                f"{path / STATE}: is of step {about['step']} in a checkpoint of step "
                f"{manifest.step}; {USE_ANOTHER}"
            )
        _refuse_other(path, about["made_of"], identity(engine))
        try:
            weights = open_shards(path)
            found = _find(path, engine.anatomy, weights)
            places = found.names
            tensors = in_blocks(places, len(engine.anatomy.blocks))
            transfers = _transfers(path, engine, weights, tensors)
            engine.constants.expect({p: (n, weights[n].dtype) for p, n in places.items()})
            for place, name in places.items():
                if place.constant:
                    file = str(weights[name].path.relative_to(path))
                    transfers[file].append((weights[name], "", place.block, place))
        except (ConfigError, StorageError):
            check_files(path, manifest, manifest.files)  # a wrong name may be a damaged one
            raise
        for name in stray_files(path, manifest):
            logger.warning(f"{path / name}: does not belong to this checkpoint and is not read")
    for block in engine.anatomy.blocks:
        engine.wait_ready(block.index)  # wait: a pending update still writes the arrays
    sizes = {name: file.nbytes for name, file in tensor_files.items()}
    in_parallel(
        [
            partial(_restore, engine, path, tensor_files[name], transfers.get(name, ()), how)
            for name, how in readings(sizes, engine.store.world, verifies()).items()
        ]
    )
    engine.published = engine.anatomy.published.named_as(places)
    passthrough = passthrough_of(path, {name: weights[name] for name in found.passthrough})
    held = {place: weights[name] for place, name in places.items()}
    engine.passthrough = with_frozen(passthrough, held, engine.store, None)
    return about


def read_about(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint that `find_resumable` found. Raises StorageError."""
    about: dict[str, Any] = json.loads(read_bytes(checkpoint / STATE))
    return about


@contextmanager
def _damage() -> Iterator[None]:
    """Turn a StorageError into DamagedError: the checkpoint failed, not the engine's own drive."""
    try:
        yield
    except StorageError as error:
        raise DamagedError(str(error)) from error


def _refuse_other(path: Path, saved: Mapping[str, Any], running: Mapping[str, Any]) -> None:
    # without frozen tensors neither side has the key
    for key in (*running, *(key for key in saved if key == "frozen parameters")):
        then, now = (made_of.get(key, 0) for made_of in (saved, running))
        if then != now:
            raise ConfigError(
                f"{path}: was saved with {key} {then!r} and this run has {now!r}; "
                "resume with the run's own config"
            )


def _find(path: Path, anatomy: Anatomy, weights: Iterable[str]) -> Found:
    try:
        return find_tensors(anatomy, weights, str(path))
    except ModelError as error:
        raise ConfigError(f"{error}; it is of another model") from error


def _transfers(
    path: Path, engine: Checkpointable, weights: Mapping[str, StoredTensor], tensors: Tensors
) -> dict[str, list[_Transfer]]:
    """All transfers by file. Checks the names, shapes and dtypes of all arrays.

    tensors: those of the model folder, as it names them.
    """
    found: dict[str, list[_Transfer]] = defaultdict(list)
    for block in engine.anatomy.blocks:
        states = read_header(path / optimizer_file(block.index)).tensors
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
    how: Reading,
) -> None:
    """Read one file from beginning to end; a rank that does not hash it reads only its share."""
    in_order = sorted(transfers, key=lambda transfer: transfer[0].offset)
    with ExitStack() as stack:
        with _damage():
            file = stack.enter_context(HashedReader(checkpoint / written.name, *how))
        for (array, block), group in groupby(in_order, key=itemgetter(1, 2)):
            # not soon: more tensors of the array may follow
            lease = partial(engine.store.lease, block, [array], changes=True, soon=False)
            with lease() if array else nullcontext({}) as arrays, _damage():
                for stored, _, _, target in group:
                    if isinstance(target, Place):
                        for begin, values in file.chunks(stored):
                            engine.constants.write(target, begin, values)
                        continue
                    span = engine.store.span(array, block)
                    flat, mine = target.flat_within(arrays[array], span), target.within(span)
                    if not mine.numel:
                        continue
                    if stored.dtype != flat.dtype:  # frozen, as its source has it
                        for begin, values in file.chunks(stored, *mine):
                            flat.narrow(0, begin - mine.start, values.numel()).copy_(
                                as_weight(values, flat.dtype)
                            )
                        continue
                    file.skip_to(stored.offset + mine.start * stored.dtype.itemsize)
                    file.read_into(flat)
        with _damage():
            file.skip_to(written.nbytes)
        if how.hashes and file.sha256 != written.sha256:
            raise damaged(checkpoint / written.name)
