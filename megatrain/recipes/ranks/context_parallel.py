"""Checks and counts of ranks that share sequences (train.context_parallel).

The config and the loader count tokens of whole sequences; a plan counts those that a rank computes,
of sequences as long as its piece.
"""

from __future__ import annotations

import logging

from megatrain.config import Config
from megatrain.data.loader import Loader
from megatrain.engine.checks import check_context_parallel
from megatrain.engine.resolved import Resolved
from megatrain.errors import ConfigError
from megatrain.losses import SequenceLoss
from megatrain.planner.job import StepTokens
from megatrain.planner.plan import Plan
from megatrain.world import World

logger = logging.getLogger("megatrain")


def sharing(config: Config, world: World) -> World:
    """The world with `train.context_parallel` ranks to a sequence. Raises ConfigError."""
    check_divides(config, world.local_size)
    return world.sharing_sequences(config.train.context_parallel)


def check_divides(config: Config, ranks: int) -> None:
    """Raise ConfigError unless ranks of a host can share sequences evenly."""
    pieces = config.train.context_parallel
    if ranks % pieces:
        where, there = config.where("train.context_parallel"), f"{ranks} train{'s' * (ranks == 1)}"
        raise ConfigError(
            f"{where}: {pieces} GPUs of a host cannot share sequences where {there}; set a number "
            "that divides it"
        )


def check_shared(config: Config, resolved: Resolved) -> None:
    """Raise ConfigError for what sequences cannot be shared with; warn of what plans leave out."""
    pieces, where = config.train.context_parallel, config.where("train.context_parallel")
    if pieces == 1:
        return
    if isinstance(resolved.request.loss, SequenceLoss):
        raise ConfigError(
            f"{where}: {pieces} does not work with method: {config.method}, whose loss is over "
            "whole sequences; set 1"
        )
    balances, compiled = resolved.router_aux_loss_coef > 0, resolved.compile is True
    check_context_parallel(pieces, resolved.skeleton, compiled, balances, where)
    if resolved.packed_to is not None or resolved.request.attention == "eager":
        what = "masks of packed sequences" if resolved.packed_to else "scores of eager attention"
        logger.warning(f"{where}: the plan counts too little memory for {what}")


def micro_batch_of(config: Config, plan: Plan) -> int:
    """Tokens of a micro-batch's whole sequences, padding included."""
    asked, pieces = config.train.micro_batch_tokens, config.train.context_parallel
    return plan.choices.micro_batch_tokens * pieces if asked == "auto" or pieces == 1 else asked


def step_tokens(loader: Loader, sizes: list[int]) -> tuple[StepTokens, ...]:
    """A rank's part of steps, in micro-batches of `sizes` of its tokens."""
    pieces = loader.world.cp_size
    return tuple(
        StepTokens(size // pieces, -(-most // pieces), mean / pieces, most_parts, parts)
        for size, most, mean, most_parts, parts in loader.step_tokens(n * pieces for n in sizes)
    )
