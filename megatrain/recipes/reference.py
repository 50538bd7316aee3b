"""Log-probabilities of a run's answers under the model that it began with, computed once.

They take one forward over the rows that the run will need, and a number for each sequence. They are
kept beside the tokenised rows under a name of all that they follow from: the weights as they
compute, the rows, precision, attention and versions. Other rates, or another beta, compute nothing
anew, and a longer run the rows that it adds.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.data.loader import Loader
from megatrain.data.micro_batches import MicroBatch, ReferenceArray
from megatrain.data.rows import IndexArray, Rows, default_cache
from megatrain.data.samples import name_for
from megatrain.durable import sync_folder
from megatrain.engine.engine import Engine
from megatrain.errors import StorageError, logger, system_errors
from megatrain.heartbeat import TOKENS_SWEPT, doing, may_end_here
from megatrain.recipes.frozen import sweeps
from megatrain.recipes.loop import tokens_to_sweep
from megatrain.recipes.state import Ready
from megatrain.recipes.verify import causes_of
from megatrain.storage.checkpoint import Resumable, read_about
from megatrain.storage.hashed_file import write_bytes

FOLDER, DIGEST_BYTES = "reference", 16
AT_ONCE = 16  # tensors that are hashed at a time
KEEP_EVERY_S = 60.0  # what is known by then outlives a kill


@dataclass(frozen=True)
class Wanted:
    """Rows whose log-probabilities a run needs: those of these numbers, ascending."""

    rows: Rows
    chosen: IndexArray

    def missing(self, known: ReferenceArray) -> IndexArray:
        """Numbers of the rows whose log-probabilities are not among these."""
        return self.chosen[np.isnan(known[self.chosen]).any(1)]


# (rows, what to give as their references) -> micro-batches over those wanted, by sweeps of weights
Batches = Callable[[Wanted, ReferenceArray], Iterable[list[MicroBatch]]]


def reference_key(engine: Engine) -> str:
    """A hash of everything but the rows that log-probabilities follow from."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    weights = engine.iter_weights()
    with doing("hashing the reference's weights"), ThreadPoolExecutor() as threads:
        while some := list(islice(weights, AT_ONCE)):  # not all: they may be on a drive
            for name, digest in threads.map(_hashed, some):
                found.update(name.encode() + digest)
    computed = {"precision": engine.precision, "device": engine.device.type}
    return name_for({**causes_of(engine.skeleton), **computed, "weights": found.hexdigest()})


def _hashed(named: tuple[str, torch.Tensor]) -> tuple[str, bytes]:
    name, weight = named
    raw = weight.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return name, hashlib.blake2b(raw.data, digest_size=DIGEST_BYTES).digest()


def are_kept(of_model: str, wanted: Iterable[Wanted]) -> bool:
    """True if the cache has the log-probabilities of all these rows."""
    return not any(len(some.missing(kept(of_model, some.rows))) for some in wanted)


def kept(of_model: str, rows: Rows) -> ReferenceArray:
    """Log-probabilities of these rows, float64 [rows, sides]: NaN where the cache has none.
    of_model: its `fingerprint`. Damaged ones are not there, with a warning."""
    path, shape = _path(of_model, rows), (len(rows), rows.sides)
    try:
        data = path.read_bytes()
    except OSError:
        return np.full(shape, np.nan)
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if digest != body_digest(body) or len(body) != 8 * shape[0] * shape[1]:
        logger.warning(f"{path}: is damaged; the reference's log-probabilities are computed anew")
        return np.full(shape, np.nan)
    return np.frombuffer(body, np.float64).reshape(shape)


def references_of(
    engine: Engine, of_model: str, wanted: Wanted, batches: Batches
) -> ReferenceArray:
    """Log-probabilities of these rows at least: those in the cache, and the others computed with
    the engine's weights, which are the model's, and kept. Raises StorageError if that fails."""
    world, rows = engine.world, wanted.rows
    known = world.on_rank0(partial(kept, of_model, rows))
    missing = Wanted(rows, wanted.missing(known))
    if not len(missing.chosen):
        return known
    tokens = int(rows.side_lengths[missing.chosen].sum())
    logger.info(f"computing the reference's log-probabilities: a forward over {tokens:,} tokens")
    found, count = known.reshape(-1).copy(), len(rows) * rows.sides
    numbers = np.arange(count, dtype=np.float64).reshape(known.shape)
    at = time.monotonic()
    swept = tokens_to_sweep(engine, rows, missing.chosen)
    with doing("computing the reference's log-probabilities", swept, TOKENS_SWEPT):
        for part in batches(missing, numbers):
            may_end_here()
            mine = part[world.rank :: world.size]
            for some in world.all_gather([*map(_summed, mine, engine.logprobs(mine))]):
                for of_examples, sums in some:
                    found[of_examples] = sums
            if time.monotonic() - at > KEEP_EVERY_S and world.is_first:
                keep(_path(of_model, rows), found.tobytes())
                at = time.monotonic()
    references = found.reshape(known.shape)
    assert not len(wanted.missing(references)), "every sequence is in one micro-batch"
    world.on_rank0(lambda: keep(_path(of_model, rows), references.tobytes()))
    return references


def _summed(batch: MicroBatch, logprobs: torch.Tensor) -> tuple[IndexArray, ReferenceArray]:
    """(numbers of the examples of a micro-batch, the sum of each one's log-probabilities)."""
    of_examples = batch["row_reference"].numpy().astype(np.int64)
    flat, example = logprobs.double().reshape(-1).numpy(), batch["row_of"].reshape(-1).numpy()
    sums = np.bincount(example, flat, minlength=len(of_examples)).astype(np.float64)
    return of_examples, sums


def _path(of_model: str, rows: Rows) -> Path:
    return default_cache() / FOLDER / f"{of_model}-{rows.digest}"


def body_digest(body: Any) -> bytes:
    """The bytes that a kept file begins with. body: all that follows."""
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def keep(path: Path, body: bytes) -> None:
    """Write a file that appears whole, for its owner alone, with its digest before its body. Raises
    StorageError."""
    passing = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    keeping = "keep another model's log-probabilities here"
    with system_errors(path.parent, keeping, "set MEGATRAIN_CACHE to another folder"):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_bytes(passing, body_digest(body) + body)
        passing.rename(path)
        sync_folder(path.parent)


# -- of a run -----------------------------------------------------------------------------------


def lacks_references(loader: Loader) -> bool:
    """True if rows to come have none, where the loader gives out some."""
    known = loader.references
    return known is not None and len(Wanted(loader.rows, loader.rows_to_come()).missing(known)) > 0


def wanted_by(ready: Ready, resuming: Resumable | None) -> tuple[str | None, tuple[Wanted, ...]]:
    """(fingerprint of the model that a resumed run began with, the rows that a run trains on and
    those that it evaluates if it holds some out); none for methods without a reference. A run that
    goes on may take other rows than from its start, if its steps have another size now."""
    loader, of_model = ready.loader, None
    if not getattr(ready.loss, "reference", False):
        return None, ()
    assert isinstance(loader, Loader)
    chosen = loader.rows_to_come(from_start=True)
    if resuming is not None:
        assert resuming.path is not None
        state = read_about(resuming.path)["state"]
        of_model = str(state.get("reference"))
        loader.restore(state["position"])
        chosen = np.union1d(chosen, loader.rows_to_come())
    if ready.held_out is None:
        return of_model, (Wanted(loader.rows, chosen),)
    evaluated = np.arange(len(ready.held_out))[: ready.config.train.eval_rows]
    return of_model, (Wanted(loader.rows, chosen), Wanted(ready.held_out, evaluated))


def compare_with_reference(
    ready: Ready,
    engine: Engine,
    of_model: str | None,
    wanted: Sequence[Wanted],
    anew: bool,
) -> tuple[str | None, ReferenceArray | None]:
    """(fingerprint of the reference, log-probabilities of held-out rows, if there are any); None
    for methods without. The loader gives out those of training rows from now on. of_model: of the
    run that goes on. anew: the engine's weights are those that it began with. Raises StorageError
    if they are gone, and the model is another."""
    loader, config = ready.loader, ready.config
    if not wanted:
        return None, None

    assert isinstance(loader, Loader)

    def batches(wanted: Wanted, references: ReferenceArray) -> Iterator[list[MicroBatch]]:
        given = loader.batches_of(wanted.rows, references=references, chosen=wanted.chosen)
        return sweeps(given, ready.sweep_tokens * engine.world.size)

    here = reference_key(engine) if anew else of_model
    if of_model not in (None, here):
        raise StorageError(
            f"{config.model.source}: is not the model that this run began with, whose "
            "log-probabilities are gone from the cache; bring that model back, or start a new run"
        )
    assert here is not None
    train, *others = [references_of(engine, here, some, batches) for some in wanted]
    loader.references = train
    return here, others[0] if others else None
