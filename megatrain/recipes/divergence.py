"""Steps that went wrong: their batches are kept, and the way back is named.

A checkpoint is proven once the step after it was finite; the link `proven` points to the newest.
"""

from __future__ import annotations

import logging
import math
import shlex

from safetensors.torch import save

from megatrain.data.loader import StepBatch
from megatrain.engine.objective import StepResult
from megatrain.errors import DivergedError, StorageError
from megatrain.recipes.state import Run
from megatrain.storage.hashed_file import write_bytes
from megatrain.storage.saves import prove

NON_FINITE_IN_A_ROW = 5  # one bad batch is skipped; this many mean that the weights are lost
SPIKES_KEPT = 10  # batches of a process
LOWER = 10  # the divisor of the learning rate that is proposed

logger = logging.getLogger("megatrain")


def look_for_spikes(run: Run, batch: StepBatch, result: StepResult) -> bool:
    """Warn of a loss or norm far above the recent ones, and keep the batch."""
    if result.target_tokens == 0:
        return False
    found = run.recent.look(result.loss, result.grad_norm)
    if not found:
        return False
    run.spikes += 1
    kept = "" if run.spikes > SPIKES_KEPT else keep_batch(run, batch, f"spike-{run.step}")
    logger.warning(f"step {run.step}: {'; '.join(found)}{kept}")
    return True


def keep_batch(run: Run, batch: StepBatch, name: str) -> str:
    """Write the step's micro-batches into the run folder; says so, or that it could not."""
    numbered = enumerate(batch.micro_batches)
    tensors = {f"{key}.{i}": value for i, mb in numbered for key, value in mb.items()}
    world = run.engine.world
    of_rank = "" if world.is_alone else f"-rank-{world.rank}"  # each has some of the rows
    path = run.config.output / f"{name}{of_rank}.safetensors"
    try:
        write_bytes(path, save(tensors))
    except StorageError as error:
        return f" (the batch is not kept: {error})"
    return f" (the batch is in {path})"


# why: decision 0051
def stop_if_lost(run: Run, batch: StepBatch, result: StepResult) -> None:
    """Raise DivergedError, and keep the batch, after too many non-finite steps in a row.

    A finite step proves the checkpoint before it.
    """
    if result.target_tokens == 0:
        run.non_finite = 0
        return
    if not result.skipped:
        run.non_finite = 0
        if run.unproven is not None and math.isfinite(result.loss):
            try:
                if run.engine.world.is_first:
                    prove(run.config.output, run.unproven, run.config.checkpoint.keep)
            except StorageError as error:  # the next save meets it, too
                logger.warning(str(error))
            run.unproven = None
        return
    run.non_finite += 1
    logger.warning(
        f"step {run.step}: the loss or the gradient is not finite; skipped, the weights are "
        "unchanged"
    )
    if run.non_finite < NON_FINITE_IN_A_ROW:
        return
    kept = keep_batch(run, batch, f"bad-batch-{run.step}")
    raise DivergedError(f"{run.non_finite} steps in a row were not finite{kept}; {way_back(run)}")


def way_back(run: Run) -> str:
    """The command to type after a divergence."""
    folder = run.config.output
    rate = f"train.learning_rate={run.config.train.learning_rate / LOWER:g}"
    proven, quoted = folder / "proven", shlex.quote(str(folder))
    if proven.exists():
        name = proven.resolve().name
        return (
            f"go back to {name}, the newest that a finite step followed, with a lower rate: "
            f"megatrain resume {quoted} --checkpoint {name} {rate}"
        )
    anew = shlex.quote(str(folder.with_name(f"{folder.name}-2")))
    none = "no checkpoint was written yet"
    if (folder / "last").exists():
        none = "no checkpoint was followed by a finite step"
    config = shlex.quote(str(folder / "config.yaml"))
    return f"{none}: start again with a lower rate: megatrain train {config} output={anew} {rate}"
