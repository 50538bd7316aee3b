"""From a checkpoint back into an engine: every tensor is read once, and checked on its way to where it belongs.

A file of tensors is read from its beginning to its end by one thread, some files at a time, straight into the arrays; its SHA-256 is known
when its last byte is. What turns out damaged is named, and an older checkpoint loaded over it.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from megatrain.checkpoint import Saved, identity, optimizer_file, saved_arrays, sequence_of
from megatrain.errors import ConfigError, DamagedError, StorageError
from megatrain.manifest import USE_ANOTHER, check_files, damaged, read_bytes, verify_checkpoint
from megatrain.memory.layout import TensorSpec
from megatrain.memory.store import Arrays
from megatrain.models.names import published_names
from megatrain.models.safetensors_io import IO_THREADS, HashedReader, StoredTensor, open_shards, read_header
from megatrain.models.safetensors_writer import WrittenFile
from megatrain.run_folder import checkpoints

logger = logging.getLogger("megatrain")


# -- which one ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resumable:
    """The newest intact checkpoint, if any, and a warning for each newer one that is not intact."""

    path: Path | None
    warnings: tuple[str, ...]


def find_resumable(run_dir: Path | str, deep: bool = True, besides: Collection[Path] = ()) -> Resumable:
    """Look for a checkpoint to go on from, newest save first; with `deep` every byte of it is checked. besides: not to be looked at."""
    run_dir = Path(run_dir)
    # unreadable ones first: each may have been the newest, so each gets its warning
    candidates = sorted(checkpoints(run_dir), key=partial(sequence_of, unreadable=math.inf), reverse=True)
    if (run_dir / "final").is_dir():  # the same bytes as a checkpoint's, unless that was removed by hand
        candidates.append(run_dir / "final")
    warnings = []
    for path in (path for path in candidates if path not in besides):
        try:
            verify_checkpoint(path, deep)
        except StorageError as error:
            warnings.append(str(error))
        else:
            return Resumable(path, tuple(warnings))
    return Resumable(None, tuple(warnings))


def load_resumable(run_dir: Path | str, engine: Saved, found: Resumable) -> tuple[Path, dict[str, Any]]:
    """`load_checkpoint` of what was found or, where that turns out damaged, of the newest that does not; warns of each that does.

    Returns which it was, and the state that was saved. Raises StorageError if none is left, and else as `load_checkpoint`.
    """
    said, tried = set(found.warnings), []
    while found.path is not None:
        logger.info(f"resuming from {found.path}")
        try:
            return found.path, load_checkpoint(found.path, engine)
        except DamagedError as error:
            logger.warning(str(error))
        tried.append(found.path)
        found = find_resumable(run_dir, deep=False, besides=tried)
        for warning in (warning for warning in found.warnings if warning not in said):
            logger.warning(warning)
        said.update(found.warnings)
    raise nothing_to_resume(run_dir)


def nothing_to_resume(run_dir: Path | str) -> StorageError:
    return StorageError(f"{run_dir}: has no intact checkpoint to go on from; start again: megatrain train {Path(run_dir) / 'config.yaml'}")


# -- loading it ---------------------------------------------------------------------------------------------------------------------


def load_checkpoint(path: Path | str, engine: Saved) -> dict[str, Any]:
    """Restore every array of the engine bit for bit, and its counters; returns the `state` that was saved.

    If it fails the engine's arrays may be of two origins: it must not be used, but another checkpoint may be loaded, which replaces all.

    Raises:
        DamagedError: the checkpoint is damaged or mixed, or cannot be read; the message names the file.
        StorageError: a drive of the engine's own fails.
        ConfigError: it is of another model, precision or optimizer.
    """
    path = Path(path)
    with _damage():
        manifest = verify_checkpoint(path, deep=False)
        check_files(path, manifest, [name for name in manifest.files if not name.endswith(".safetensors")])
        about = json.loads(read_bytes(path / "state.json"))
        if about["step"] != manifest.step:
            raise StorageError(f"{path / 'state.json'}: is of step {about['step']} in a checkpoint of step {manifest.step}; {USE_ANOTHER}")
        _refuse_other(path, about["made_of"], identity(engine))
        try:
            places = _by_file(path, engine)
        except (ConfigError, StorageError):
            check_files(path, manifest, manifest.files)  # a wrong name may be a damaged one
            raise
    for block in engine.anatomy.blocks:
        engine.wait_ready(block.index)
    files = [name for name in manifest.files if name.endswith(".safetensors")]
    with ThreadPoolExecutor(IO_THREADS, thread_name_prefix="load") as pool:
        try:
            jobs = [pool.submit(_restore, engine.store, path / name, manifest.files[name], places.get(name, [])) for name in files]
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    engine.load_state(about["engine"])
    state: dict[str, Any] = about["state"]
    return state


@contextmanager
def _damage() -> Iterator[None]:
    """What goes wrong with the checkpoint's files is theirs, and no fault of a drive that the engine computes with."""
    try:
        yield
    except StorageError as error:
        raise DamagedError(str(error)) from error


def _refuse_other(path: Path, saved: Mapping[str, Any], running: Mapping[str, Any]) -> None:
    for key, value in running.items():
        if saved[key] != value:
            raise ConfigError(f"{path}: was saved with {key} {saved[key]!r} and this run has {value!r}; resume with the run's own config")


@dataclass(frozen=True)
class _Place:
    """A tensor of one array of one block."""

    array: str
    block: int
    spec: TensorSpec


def _by_file(path: Path, engine: Saved) -> dict[str, list[tuple[StoredTensor, _Place]]]:
    places = defaultdict(list)
    for stored, place in _places(path, engine):
        places[str(stored.path.relative_to(path))].append((stored, place))
    return places


def _places(path: Path, engine: Saved) -> Iterator[tuple[StoredTensor, _Place]]:
    """(tensor on disk, where it belongs) for all saved arrays; checks names, shapes and dtypes."""
    weights, names = open_shards(path), published_names(engine.anatomy)
    for block in engine.anatomy.blocks:
        states = read_header(path / optimizer_file(block.index)).tensors
        for array, dtype in saved_arrays(engine).items():
            for spec in engine.store.layout(array, block.index).tensors:
                name = names[spec.name]
                stored = weights.get(name) if array == "weight" else states.get(f"{array}/{name}")
                if stored is None or stored.shape != spec.shape or stored.dtype != dtype:
                    raise ConfigError(f"{path}: has no {array} of {spec.name} with shape {list(spec.shape)}; it is of another model")
                yield stored, _Place(array, block.index, spec)


def _restore(store: Arrays, path: Path, written: WrittenFile, places: list[tuple[StoredTensor, _Place]]) -> None:
    """One file, from its beginning to its end."""
    in_order = sorted(places, key=lambda pair: pair[0].offset)
    with ExitStack() as stack:
        with _damage():
            file = stack.enter_context(HashedReader(path))
        for (array, block), tensors in groupby(in_order, key=lambda pair: (pair[1].array, pair[1].block)):
            with store.lease(block, [array], changes=True, soon=False) as arrays:
                for stored, place in tensors:
                    with _damage():
                        file.skip_to(stored.offset)
                        file.read_into(arrays[array].narrow(0, place.spec.offset, place.spec.numel))
        with _damage():
            file.skip_to(written.nbytes)
        if file.sha256 != written.sha256:
            raise damaged(path)
