"""Refusals of what an engine cannot do, before it takes any memory."""

from __future__ import annotations

from megatrain.errors import ConfigError
from megatrain.models.family import regimes_of
from megatrain.models.skeleton import Skeleton
from megatrain.models.ulysses import why_not_in_pieces
from megatrain.settings import Settings, contradiction
from megatrain.world import World


def check_positions(skeleton: Skeleton, seq_len: int, name: str) -> None:
    """Raise ConfigError if sequences are longer than the model can read. `name`: of the option."""
    longest = skeleton.anatomy.max_positions
    if longest is not None and seq_len > longest:
        raise ConfigError(
            f"{name}: {seq_len} exceeds the {longest} positions of this model; set "
            f"{name.rpartition(' ')[2]}: {longest}"
        )


def check_settings(settings: Settings, max_grad_norm: float | None) -> None:
    """Raise ConfigError if the settings need a norm to clip to, and there is none."""
    values = {**vars(settings), "max_grad_norm": max_grad_norm or 0}
    if found := contradiction(values, in_config=False):
        raise ConfigError(": ".join(found))


def check_world(
    world: World, skeleton: Skeleton, settings: Settings, balances: bool = False
) -> None:
    """Raise ConfigError for what is not built for several ranks. balances: routers."""
    if world.is_alone:
        return
    if settings.transport == "read" and world.hosts > 1:
        raise ConfigError(
            f"{world.size} ranks: the ranks of several hosts cannot read weights from one copy; "
            "set transport: gather"
        )
    if world.cp_size > 1:
        check_context_parallel(world.cp_size, skeleton, settings.compile, balances)


def check_context_parallel(
    cp_size: int, skeleton: Skeleton, compiled: bool, balances: bool, name: str = "context_parallel"
) -> None:
    """Raise ConfigError for what does not compute a part of each sequence as it does whole ones.

    compiled: layers are. balances: routers are. name: of the option.
    """
    refused = {
        "compiled layers (set compile: loss)": compiled,
        "a balancing loss of routers (set router_aux_loss_coef: 0)": balances,
        "dropout": skeleton.has_dropout,
        "rotary factors that follow the length of sequences": bool(regimes_of(skeleton.config)),
    }
    if found := [what for what, there in refused.items() if there]:
        raise ConfigError(f"{name}: {cp_size} does not work with {found[0]}; set 1")
    if why := why_not_in_pieces(skeleton):
        family = skeleton.anatomy.family
        raise ConfigError(f"{name}: {cp_size} does not work with a {family} model ({why}); set 1")
