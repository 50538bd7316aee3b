"""A teacher's likeliest tokens at all targets of the rows that a run will need, in files.

A teacher that has written them need not be beside the model that learns. They are kept beside the
tokenised rows under a name of all that they follow from: the teacher's files and configuration, the
rows, how many tokens, temperature, precision and versions. Each sweep of the teacher's weights
writes a file; what is there is not computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.config import Config
from megatrain.data.loader import Loader
from megatrain.data.micro_batches import MicroBatch, ReferenceArray
from megatrain.data.rows import IndexArray, Joined, default_cache
from megatrain.data.samples import name_for
from megatrain.engine.inference import held_head, last_states
from megatrain.errors import ConfigError, PlanError, StorageError, logger
from megatrain.heartbeat import TOKENS_SWEPT, doing, may_end_here
from megatrain.losses import Distillation, find_examples, find_targets
from megatrain.losses.divergence import likeliest
from megatrain.losses.sequences import REFERENCE
from megatrain.machine.hardware import disk_free
from megatrain.models.pretrained import digests_of, resolve_source
from megatrain.models.skeleton import Skeleton
from megatrain.planner.activations import WEIGHT_BYTES
from megatrain.recipes.frozen import (
    SWEPT_TOKENS,
    TEACHER_LOGITS,
    config_of_teacher,
    model_in,
    sweeps,
    teacher_engine,
)
from megatrain.recipes.loop import tokens_to_sweep
from megatrain.recipes.reference import DIGEST_BYTES, Batches, Wanted, body_digest, keep
from megatrain.recipes.state import Ready
from megatrain.recipes.verify import causes_of
from megatrain.reporting.words import human_bytes

FOLDER, FILES = "teacher", "*.likeliest"
# (numbers of rows, targets of each, `likeliest` of all these) of a file
Part = tuple[IndexArray, IndexArray, Any]


def references_of_run(ready: Ready, wanted: Sequence[Wanted]) -> tuple[None, ReferenceArray | None]:
    """Let the loader give out where each row's targets begin among what its loss then has of the
    teacher; returns the same of held-out rows, if there are any, second."""
    loader, loss, skeleton = ready.loader, ready.loss, ready.resolved.skeleton
    assert isinstance(loader, Loader) and isinstance(loss, Distillation)

    def batches(wanted: Wanted, references: ReferenceArray) -> Iterator[list[MicroBatch]]:
        given = loader.batches_of(wanted.rows, references=references, chosen=wanted.chosen)
        return sweeps(given, SWEPT_TOKENS)

    precision, room = ready.machine.precision, ready.plan.budget.host
    asked = ready.config, loss, precision, skeleton
    loader.references, *others = references_of_teacher(*asked, wanted, batches, room)
    return None, others[0] if others else None


def references_of_teacher(
    config: Config,
    loss: Distillation,
    precision: str,
    student: Skeleton,
    wanted: Sequence[Wanted],
    batches: Batches,
    room: float = float("inf"),
) -> list[ReferenceArray]:
    """Give a loss what the teacher has at the targets of these rows, which is computed where it is
    not kept; and return for each set where its rows' targets begin in that, float64 [rows, 1], NaN
    of others. room: bytes of host RAM. Raises ConfigError, PlanError and StorageError."""
    named = str(config.distill.teacher_model_name_or_path)
    teacher = Skeleton(config_of_teacher(named))
    sizes = [one.config.get_text_config().vocab_size for one in (teacher, student)]
    loss.width, top_k = min(sizes), loss.top_k or 0
    if top_k > loss.width:
        where = config.where("distill.teacher_top_k")
        raise ConfigError(f"{where}: {top_k}, and the vocabulary has {loss.width} tokens; set less")
    causes = causes_of(teacher) | {
        "models": digests_of(resolve_source(model_in(named), weights=False)),
        "computed": [precision, config.device, loss.width, top_k, loss.temperature],
    }
    place = default_cache() / FOLDER
    folders = [place / f"{name_for(causes)}-{one.rows.digest}" for one in wanted]
    parts = [[*_parts(folder)] for folder in folders]
    lacking = [_missing(*pair) for pair in zip(wanted, parts, strict=True)]
    if any(len(one.chosen) for one in lacking):
        need = teacher.anatomy.parameters * WEIGHT_BYTES[precision]
        if need > room:
            raise PlanError(
                f"{config.where('distill.teacher_model_name_or_path')}: {named}: its weights take "
                f"{human_bytes(need)} of host RAM, of which {human_bytes(room)} can be had; take a "
                "smaller teacher, or have its file written on a larger machine (MEGATRAIN_CACHE)"
            )
        _check_drive(lacking, place, top_k)
        with teacher_engine(config, precision) as engine:
            for one, folder in zip(lacking, folders, strict=True):
                _write(engine, loss, one, folder, batches)
        parts = [[*_parts(folder)] for folder in folders]
    found = [np.full((len(one.rows), one.rows.sides), np.nan) for one in wanted]
    begin = 0
    for references, of_set in zip(found, parts, strict=True):
        for rows, counts, values in of_set:
            references[rows, 0] = begin + counts.cumsum() - counts
            begin += len(values)
    pieces = [values for of_set in parts for *_, values in of_set]
    loss.kept = Joined(pieces)
    tails = np.concatenate([values[:, -1] for values in pieces]).view(np.float32)
    mass = -np.expm1(tails.astype(np.float64))
    logger.info(
        f"{place}: at {len(mass):,} targets the {top_k} likeliest tokens hold {mass.mean():.2%} of "
        f"the teacher's probability, at the worst 1% of them no more than "
        f"{np.quantile(mass, 0.01):.2%}; the loss takes all other tokens as one"
    )
    return found


def _missing(wanted: Wanted, parts: Iterable[Part]) -> Wanted:
    """Those of the rows that no file is of."""
    known = np.concatenate([np.arange(0), *(rows for rows, *_ in parts)])
    return Wanted(wanted.rows, np.setdiff1d(wanted.chosen, known))


def _check_drive(lacking: Iterable[Wanted], place: Path, top_k: int) -> None:
    """Say how much is written. Raises StorageError where there is no room for it."""
    count = sum(int(one.rows.target_counts[one.chosen].sum()) for one in lacking)
    size, free = 4 * (2 * top_k + 1) * count, disk_free(place)
    about = f"the teacher's {top_k} likeliest tokens at {count:,} targets: {human_bytes(size)}"
    if size > free:
        raise StorageError(
            f"{place}: has {human_bytes(free)} free, too little for {about}; set MEGATRAIN_CACHE "
            "to another folder, or a smaller distill.teacher_top_k"
        )
    logger.info(f"{place}: writing {about}")


def _write(engine: Any, loss: Distillation, wanted: Wanted, folder: Path, batches: Batches) -> None:
    """Write the teacher's likeliest tokens, a file for each sweep of its weights."""
    numbers = np.arange(len(wanted.rows), dtype=np.float64)[:, None]
    swept = tokens_to_sweep(engine, wanted.rows, wanted.chosen)
    with doing("writing the teacher's likeliest tokens", swept, TOKENS_SWEPT):
        for part in batches(wanted, numbers) if len(wanted.chosen) else ():
            may_end_here()
            examples = [find_examples(one, find_targets(one["labels"])) for one in part]
            rows = torch.cat([one.given[REFERENCE] for one in examples]).long().numpy()
            counts = torch.cat([one.sizes for one in examples]).numpy()
            states = torch.cat(last_states(engine, part))
            with torch.no_grad(), held_head(engine) as project:
                chunks = (project(c.to(engine.device)) for c in torch.split(states, TEACHER_LOGITS))
                values = torch.cat([_likeliest(logits, loss) for logits in chunks])
            head = np.concatenate([[len(rows)], rows, counts]).astype(np.int64)
            keep(folder / f"{rows[0]:09}.likeliest", head.tobytes() + values.numpy().tobytes())


def _likeliest(logits: torch.Tensor, loss: Distillation) -> torch.Tensor:
    return likeliest(logits[:, : loss.width], loss.top_k or 0, loss.temperature).cpu()


def _parts(folder: Path) -> Iterator[Part]:
    """The content of each file, mapped. Damaged ones are removed, with a warning."""
    for path in sorted(folder.glob(FILES)):
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if digest.tobytes() != body_digest(body):
            logger.warning(f"{path}: is damaged; what the teacher had there is computed anew")
            path.unlink()
            continue
        count = int(body[:8].view(np.int64)[0])
        rows, counts = body[8 : 8 + 16 * count].view(np.int64).reshape(2, -1)
        values = body[8 + 16 * count :].view(np.int32)
        yield rows, counts, values.reshape(int(counts.sum()), -1)
