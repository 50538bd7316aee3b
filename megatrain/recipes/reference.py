"""Log-probabilities of a run's answers under the model that it began with, computed once.

They take one forward over the rows, and a number for each sequence. They are kept beside the
tokenised rows under a name of all that they follow from: the weights as they compute, the rows,
precision, attention and versions. Other rates, or another beta, compute nothing anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatrain.data.dataset import Rows, default_cache
from megatrain.data.micro_batches import MicroBatch, ReferenceArray
from megatrain.durable import sync_folder
from megatrain.engine.engine import Engine
from megatrain.errors import StorageError
from megatrain.heartbeat import may_end_here
from megatrain.losses import SequenceLoss
from megatrain.machine.profile import installed_version
from megatrain.recipes.sweeps import sweeps
from megatrain.reporting.progress import Progress
from megatrain.storage.restore import Resumable, read_about
from megatrain.version import VERSION

if TYPE_CHECKING:
    from megatrain.recipes.run import Ready

logger = logging.getLogger("megatrain")

FOLDER, DIGEST_BYTES = "reference", 16
AT_ONCE = 16  # tensors that are hashed at a time
PACKAGES = ("transformers", "torch")
# (rows, what to give as their references) -> micro-batches over all of them, by sweeps of weights
Batches = Callable[[Rows, ReferenceArray], Iterable[list[MicroBatch]]]


def fingerprint(engine: Engine) -> str:
    """A hash of everything but the rows that log-probabilities follow from."""
    attention = engine.hf_config._attn_implementation
    about = [engine.precision, attention, engine.device.type, VERSION]
    about += map(installed_version, PACKAGES)
    found = hashlib.blake2b(repr(about).encode(), digest_size=DIGEST_BYTES)
    weights = engine.iter_weights()
    with ThreadPoolExecutor() as threads:
        while some := list(islice(weights, AT_ONCE)):  # not all: they may be on a drive
            for name, digest in threads.map(_hashed, some):
                found.update(name.encode() + digest)
    return found.hexdigest()


def _hashed(named: tuple[str, torch.Tensor]) -> tuple[str, bytes]:
    name, weight = named
    raw = weight.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return name, hashlib.blake2b(raw.data, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class References:
    """Log-probabilities under the model that a run began with, float64 [rows, sides].

    of_model: its `fingerprint`.
    """

    of_model: str
    train: ReferenceArray
    held_out: ReferenceArray | None


def references_of(
    engine: Engine, of_model: str, train: Rows, held_out: Rows | None, batches: Batches
) -> References:
    """Those in the cache, and the others computed with the engine's weights, which are the model's.

    Raises StorageError.
    """

    def of(rows: Rows) -> ReferenceArray:
        found = kept(of_model, rows)
        if found is not None:
            return found
        tokens = int(rows.side_lengths.sum())
        logger.info(
            f"computing the reference's log-probabilities: a forward over {tokens:,} tokens"
        )
        return computed(engine, of_model, rows, batches)

    return References(of_model, of(train), None if held_out is None else of(held_out))


def are_kept(of_model: str, *sets: Rows | None) -> bool:
    """Whether the cache has the log-probabilities of all these rows."""
    return all(kept(of_model, rows) is not None for rows in sets if rows is not None)


def kept(of_model: str, rows: Rows) -> ReferenceArray | None:
    """The log-probabilities of these rows, float64 [rows, sides], if they are in the cache.

    of_model: its `fingerprint`. Damaged ones are not there, with a warning.
    """
    path, shape = _path(of_model, rows), (len(rows), rows.sides)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if digest != _digest(body) or len(body) != 8 * shape[0] * shape[1]:
        logger.warning(f"{path}: is damaged; the reference's log-probabilities are computed anew")
        return None
    return np.frombuffer(body, np.float64).reshape(shape)


def computed(engine: Engine, of_model: str, rows: Rows, batches: Batches) -> ReferenceArray:
    """The log-probabilities of these rows under the engine's weights, which are kept from now on.

    Raises StorageError if they cannot be kept.
    """
    count = len(rows) * rows.sides
    numbers = np.arange(count, dtype=np.float64).reshape(len(rows), rows.sides)
    found = np.full(count, np.nan)
    for part in batches(rows, numbers):
        may_end_here()
        for batch, logprobs in zip(part, engine.logprobs(part), strict=True):
            of_examples = batch["row_reference"].numpy().astype(np.int64)
            flat = logprobs.double().reshape(-1).numpy()
            example = batch["row_of"].reshape(-1).numpy()
            found[of_examples] = np.bincount(example, flat, minlength=len(of_examples))
    assert not np.isnan(found).any(), "every sequence is in one micro-batch"
    references = found.reshape(numbers.shape)
    _keep(_path(of_model, rows), references.tobytes())
    return references


def _path(of_model: str, rows: Rows) -> Path:
    return default_cache() / FOLDER / f"{of_model}-{rows.digest}"


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def _keep(path: Path, body: bytes) -> None:
    """Write a file that appears whole, for its owner alone. Raises StorageError."""
    passing = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(passing, flags, 0o600), "wb") as file:
                file.write(_digest(body) + body)
                file.flush()
                os.fsync(file.fileno())
            passing.rename(path)
        finally:
            passing.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise StorageError(
            f"{path.parent}: cannot keep the reference's log-probabilities here "
            f"({error.strerror}); set MEGATRAIN_CACHE to another folder"
        ) from error


# -- of a run -----------------------------------------------------------------------------------


def known_reference(ready: Ready, resuming: Resumable | None) -> str | None:
    """The fingerprint of the model that a run began with, if its method has a reference and it goes
    on."""
    loss = ready.parts.resolved.loss
    if not (isinstance(loss, SequenceLoss) and loss.reference) or resuming is None:
        return None
    assert resuming.path is not None
    return str(read_about(resuming.path)["state"].get("reference"))


def compare_with_reference(
    ready: Ready,
    engine: Engine,
    of_model: str | None,
    anew: bool,
    progress: Progress,
) -> References | None:
    """The reference's log-probabilities, which the loader gives out from now on; None for methods
    without.

    of_model: of the run that goes on. anew: the engine's weights are those that it began with.

    Raises StorageError if they are gone, and the model is another.
    """
    loss, loader, config = ready.parts.resolved.loss, ready.loader, ready.parts.config
    if not (isinstance(loss, SequenceLoss) and loss.reference):
        return None

    def batches(rows: Rows, references: ReferenceArray) -> Iterator[list[MicroBatch]]:
        return sweeps(loader.batches_of(rows, references=references), ready.sweep_tokens)

    with progress.doing("the reference's log-probabilities"):
        here = fingerprint(engine) if anew else of_model
        if of_model not in (None, here):
            raise StorageError(
                f"{config.model.source}: is not the model that this run began with, whose "
                "log-probabilities are gone from the cache; bring that model back, or start a new "
                "run"
            )
        assert here is not None
        found = references_of(engine, here, *ready.rows, batches)
    loader.references = found.train
    return found
