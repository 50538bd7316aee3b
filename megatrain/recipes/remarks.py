"""What is said of a machine and a model before a run is planned."""

from __future__ import annotations

import logging
from typing import Any

from megatrain.config import Config
from megatrain.engine.resolved import Machine
from megatrain.machine.datasheets import FIRST_BFLOAT16

logger = logging.getLogger("megatrain")


def say_if_without_bfloat16(machine: Machine) -> None:
    """Warn of a GPU that has no bf16 units: what that costs, and what to set."""
    gpu = machine.hardware.gpu
    if gpu is not None and gpu.capability < FIRST_BFLOAT16:
        instead = "it computes in float32, several times slower than cards that have them"
        if machine.precision != "float32":
            instead = "it emulates them slowly; set precision: float32"
        logger.warning(f"{gpu.name} has no bf16 units: {instead}")


def say_what_takes_several(config: Config, machine: Machine) -> None:
    """Say so of what the config says of several GPUs or hosts, where there is one."""
    several = machine.ranks * machine.hosts
    for key, value, without, others, trains in (
        ("memory.transport", config.memory.transport, ("auto",), machine.ranks, "GPU of a host"),
        ("memory.replicated", config.memory.replicated, ("auto", 0), several, "GPU"),
        ("train.wire", config.train.wire, ("float32",), machine.hosts, "host"),
    ):
        if others == 1 and value not in without:
            logger.info(f"{config.where(key)}: {value} has no effect where one {trains} trains")


def say_if_config_has_another(coefficient: float, asked: float | str, config: Any) -> None:
    """Say so if the weight of the routers' balancing loss is not that of the model's config.json,
    which holds in transformers only with output_router_logits."""
    own = getattr(config.get_text_config(), "router_aux_loss_coef", None)
    if coefficient and asked == "auto" and own not in (None, coefficient):
        logger.info(
            f"the routers' balancing loss weighs {coefficient:g}, not {own:g} as in config.json; "
            "set train.router_aux_loss_coef for another weight"
        )
