"""Log-probabilities of a run's rows under another model, computed once: of answers under the model
that it began with, and of a teacher's likeliest tokens.

They take one forward over the rows that the run will need, and a number for each sequence, or some
tokens at each target. They are kept beside the tokenised rows under a name of all that they follow
from: the weights as they compute, the rows, precision, attention and versions. Other rates, or
another beta, compute nothing anew, and a longer run the rows that it adds.
"""

from __future__ import annotations

import hashlib
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.config import Config
from megatrain.data.loader import Loader
from megatrain.data.micro_batches import MicroBatch, ReferenceArray
from megatrain.data.rows import IndexArray, Joined, Rows, default_cache
from megatrain.data.samples import name_for
from megatrain.durable import sync_folder
from megatrain.engine.engine import Engine
from megatrain.engine.inference import held_head, last_states
from megatrain.errors import PlanError, StorageError, logger, system_errors
from megatrain.heartbeat import TOKENS_SWEPT, doing, may_end_here
from megatrain.losses import Distillation
from megatrain.losses.divergence import likeliest
from megatrain.losses.sequences import REFERENCE
from megatrain.models.skeleton import Skeleton
from megatrain.planner.activations import WEIGHT_BYTES
from megatrain.recipes import frozen
from megatrain.recipes.loop import tokens_to_sweep
from megatrain.recipes.state import Ready
from megatrain.recipes.verify import causes_of
from megatrain.reporting.words import human_bytes
from megatrain.storage.checkpoint import Resumable, read_about
from megatrain.storage.hashed_file import write_bytes

FOLDER, OF_TEACHER, DIGEST_BYTES = "reference", "teacher", 16
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
    causes = {**causes_of(engine.skeleton), "precision": engine.precision}
    return name_for({**causes, "device": engine.device.type, "weights": found.hexdigest()})


def _hashed(named: tuple[str, torch.Tensor]) -> tuple[str, bytes]:
    name, weight = named
    raw = weight.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return name, hashlib.blake2b(raw.data, digest_size=DIGEST_BYTES).digest()


def kept(of_model: str, rows: Rows) -> ReferenceArray:
    """Log-probabilities of these rows, float64 [rows, sides]: NaN where the cache has none.
    of_model: its `fingerprint`. Damaged ones are not there, with a warning."""
    path, shape = _path(of_model, rows), (len(rows), rows.sides)
    try:
        data = path.read_bytes()
    except OSError:
        return np.full(shape, np.nan)
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if digest != _digest(body) or len(body) != 8 * shape[0] * shape[1]:
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
                _keep(_path(of_model, rows), found.tobytes())
                at = time.monotonic()
    references = found.reshape(known.shape)
    assert not len(wanted.missing(references)), "every sequence is in one micro-batch"
    world.on_rank0(lambda: _keep(_path(of_model, rows), references.tobytes()))
    return references


def _summed(batch: MicroBatch, logprobs: torch.Tensor) -> tuple[IndexArray, ReferenceArray]:
    """(numbers of the examples of a micro-batch, the sum of each one's log-probabilities)."""
    of_examples = batch["row_reference"].numpy().astype(np.int64)
    flat, example = logprobs.double().reshape(-1).numpy(), batch["row_of"].reshape(-1).numpy()
    return of_examples, np.bincount(example, flat, minlength=len(of_examples)).astype(np.float64)


def _path(of_model: str, rows: Rows) -> Path:
    return default_cache() / FOLDER / f"{of_model}-{rows.digest}"


def _digest(body: Any) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def _keep(path: Path, body: bytes) -> None:
    """Write a file that appears whole, for its owner alone. Raises StorageError."""
    passing = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    with system_errors(path.parent, "keep log-probabilities here", "set another MEGATRAIN_CACHE"):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_bytes(passing, _digest(body) + body)
        passing.rename(path)
        sync_folder(path.parent)


# -- of a teacher --------------------------------------------------------------------------------


def from_teacher(
    config: Config,
    loss: Distillation,
    precision: str,
    vocabulary: int,
    wanted: Iterable[Wanted],
    batches: Batches,
    room: float = math.inf,
) -> list[ReferenceArray]:
    """Give a loss the teacher's likeliest tokens at the targets of these rows, computed where they
    are not kept; for each set, where its rows' targets begin among all, float64 [rows, 1], NaN of
    others. vocabulary: the model's tokens; room: bytes of host RAM. Raises PlanError and
    StorageError."""
    named = str(config.distill.teacher_model_name_or_path)
    teacher, top_k = Skeleton(frozen.config_of_model(named)), loss.top_k or 0
    loss.width = min(vocabulary, teacher.config.get_text_config().vocab_size)
    computed = [precision, config.device, loss.width, top_k, loss.temperature]
    causes = {**causes_of(teacher), "teacher": frozen.digests_of_model(named)}
    name = name_for({**causes, "computed": computed})
    found, parts = list[ReferenceArray](), list[Any]()
    with ExitStack() as stack:
        for one in wanted:
            folder = default_cache() / OF_TEACHER / f"{name}-{one.rows.digest}"
            found.append(np.full((len(one.rows), one.rows.sides), np.nan))
            _take(sorted(folder.glob("*.tokens")), one.rows, parts, found[-1])
            missing = Wanted(one.rows, one.missing(found[-1]))
            if not len(missing.chosen):
                continue
            if (need := teacher.anatomy.parameters * WEIGHT_BYTES[precision]) > room:
                size = f"{human_bytes(need)} of host RAM, which has {human_bytes(room)}"
                raise PlanError(f"{named}: takes {size}; bring {folder} from a larger machine")
            if loss.teacher is None:
                frozen.open_teacher(config, loss, stack, precision=precision, device=config.device)
            _take(_write(loss, missing, folder, batches), one.rows, parts, found[-1])
    loss.teacher, loss.kept = None, Joined(parts)
    mass = -np.expm1(np.concatenate([part[:, -1] for part in parts]).view(np.float32))
    logger.info(
        f"the teacher's {top_k} likeliest tokens at {len(mass):,} targets have {mass.mean():.2%} "
        f"of its probability, {np.quantile(mass, 0.01):.2%} at most at the worst 1%"
    )
    return found


def _take(paths: Iterable[Path], rows: Rows, parts: list[Any], begins: ReferenceArray) -> None:
    """Map files behind the parts that there are, int32 [targets, 2 top_k + 1], and note where the
    targets of their rows begin. Damaged ones are removed, with a warning."""
    for path in paths:
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if digest.tobytes() != _digest(body):
            logger.warning(f"{path}: is damaged; what the teacher had there is computed anew")
            path.unlink(missing_ok=True)
            continue
        numbers = body[8 : 8 + 8 * int(body[:8].view(np.int64)[0])].view(np.int64)
        counts = rows.target_counts[numbers]
        begins[numbers, 0] = sum(map(len, parts)) + counts.cumsum() - counts
        parts.append(body[8 + numbers.nbytes :].view(np.int32).reshape(int(counts.sum()), -1))


def _write(loss: Distillation, wanted: Wanted, folder: Path, batches: Batches) -> Iterator[Path]:
    """Files of the teacher's likeliest tokens, one for each sweep of its weights: the number of its
    rows, their numbers, and the tokens at all their targets."""
    rows, chosen, top_k, engine = wanted.rows, wanted.chosen, loss.top_k or 0, loss.teacher
    count = int(rows.target_counts[chosen].sum())
    size = human_bytes(4 * (2 * top_k + 1) * count)
    logger.info(f"{folder}: {size} of the teacher's tokens at {count:,} targets are written")
    every, swept = np.arange(len(rows), dtype=np.float64), tokens_to_sweep(engine, rows, chosen)
    with doing("asking the teacher", swept, TOKENS_SWEPT):
        for part in batches(wanted, every[:, None]):
            may_end_here()
            numbers = torch.cat([one[REFERENCE] for one in part]).long()
            states = (torch.split(one, frozen.TEACHER_LOGITS) for one in last_states(engine, part))
            with torch.no_grad(), held_head(engine) as project:
                logits = (project(some.to(engine.device)) for one in states for some in one)
                cut = (one[:, : loss.width] for one in logits if len(one))
                found = [likeliest(one, top_k, loss.temperature).cpu() for one in cut]
            body = torch.tensor([len(numbers)]), numbers, *found
            path = folder / f"{int(numbers[0]):09}.tokens"
            _keep(path, b"".join(one.numpy().tobytes() for one in body))
            yield path


# -- of a run -----------------------------------------------------------------------------------


def lacks_references(loader: Loader) -> bool:
    """True if rows to come have none, where the loader gives out some."""
    known = loader.references
    return known is not None and len(Wanted(loader.rows, loader.rows_to_come()).missing(known)) > 0


def open_engine(
    ready: Ready, stack: ExitStack, resuming: Resumable | None
) -> tuple[Engine, str | None, ReferenceArray | None]:
    """(the run's engine with its first weights, or zeros where a checkpoint follows; fingerprint of
    the reference; log-probabilities of held-out rows, if there are any); None for methods without.
    The loader gives out those of training rows from now on. A teacher that is to be asked before
    is, and closed again."""
    of_model, wanted = wanted_by(ready, resuming)
    taught = isinstance(ready.loss, Distillation)
    found = ask_teacher(ready, wanted) if taught and wanted else []
    sets = () if taught or of_model is None else wanted
    lacks = any(len(some.missing(kept(str(of_model), some.rows))) for some in sets)
    # the first rank's cache counts
    first = resuming is None or ready.machine.world.broadcast(lacks)
    with doing("preparing the weights"):
        engine = stack.enter_context(Engine.open_plan(ready.plan, weights=first))
    key = None
    if wanted and not taught:
        key, found = compare_with_reference(ready, engine, of_model, wanted, first)
    if found:
        assert isinstance(ready.loader, Loader)
        ready.loader.references = found[0]
    return engine, key, found[1] if len(found) > 1 else None


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
    ready: Ready, engine: Engine, of_model: str | None, wanted: Sequence[Wanted], anew: bool
) -> tuple[str, list[ReferenceArray]]:
    """(fingerprint of the reference, log-probabilities of each set of rows). of_model: of the run
    that goes on. anew: the engine's weights are those that it began with. Raises StorageError if
    they are gone, and the model is another."""
    batches = partial(_swept, ready.loader, ready.sweep_tokens * engine.world.size)
    here = reference_key(engine) if anew else of_model
    if of_model not in (None, here):
        raise StorageError(
            f"{ready.config.model.source}: is not the model that this run began with, whose "
            "log-probabilities are gone from the cache; bring that model back, or start a new run"
        )
    assert here is not None
    return here, [references_of(engine, here, some, batches) for some in wanted]


def ask_teacher(ready: Ready, wanted: Sequence[Wanted]) -> list[ReferenceArray]:
    """The same of a teacher, whose tokens the loss is given; as `from_teacher`."""
    assert isinstance(ready.loss, Distillation)
    batches, room = partial(_swept, ready.loader, frozen.SWEPT_TOKENS), ready.plan.budget.host
    about = ready.machine.precision, ready.model.config.get_text_config().vocab_size
    return from_teacher(ready.config, ready.loss, *about, wanted, batches, room)


def _swept(
    loader: Any, tokens: int, wanted: Wanted, references: ReferenceArray
) -> Iterator[list[MicroBatch]]:
    given = loader.batches_of(wanted.rows, references=references, chosen=wanted.chosen)
    return frozen.sweeps(given, tokens)
