"""A mixture's routers: where transformers reads their logits for its balancing loss.

Found by what transformers records and by a run on the meta device, not by a family's name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatrain.models.meta import blank_call, without_data
from megatrain.models.recorder import kind_of
from megatrain.models.skeleton import UNSUPPORTED, Skeleton
from megatrain.models.trials.probe import graph_of

ROWS, TOKENS = 1, 3  # of the try-out
LOSS = "load_balancing_loss_func"  # what transformers calls it in every family that has it


class Place(NamedTuple):
    """The position of logits in a router's output, counted in a tuple of tensors, and what carries
    their gradient: a part of the output that the layer's own output is computed from."""

    logits: int
    carrier: int


@dataclass(frozen=True)
class Routers:
    """All routers of a model."""

    modules: tuple[tuple[int, nn.Module], ...]  # at most one a layer, with the layer's index
    experts: int  # that a router chooses from, all of one number
    chosen: int  # experts for each token
    place: Place


def find_routers(skeleton: Skeleton) -> Routers | None:
    """A model's routers, before it is bound; None: transformers balances none, or not by logits."""
    recorded, model = _recorded(skeleton.model), skeleton.model
    if recorded is None or LOSS not in vars(sys.modules[type(model).__module__]):
        return None
    text = skeleton.config.get_text_config()
    chosen = getattr(model, "num_experts_per_tok", getattr(text, "num_experts_per_tok", None))
    modules = tuple(
        (index, module)
        for index, layer in enumerate(skeleton.layers)
        for name, module in layer.named_modules()
        if isinstance(module, recorded.target_class) and (recorded.layer_name or "") in name
    )
    widths = set(_tried_out(skeleton, dict(modules), recorded.index))
    if type(chosen) is not int or len(widths) != 1 or None in widths:
        return None
    ((experts, place),) = (found for found in widths if found)
    return Routers(modules, experts, chosen, place) if chosen <= experts else None


def tensors_of(output: Any) -> tuple[Any, ...]:
    """A module's output as a tuple."""
    return output if isinstance(output, tuple) else (output,)


def _recorded(model: nn.Module) -> Any:
    """transformers' note of which modules return router logits; None if there is no single one."""
    from transformers.utils.output_capturing import OutputRecorder

    for module in model.modules():
        if note := (getattr(module, "_can_record_outputs", None) or {}).get("router_logits"):
            note = note if isinstance(note, OutputRecorder) else OutputRecorder(note)
            many: bool = isinstance(note.target_class, (list, tuple))
            return None if many else note
    return None


def _tried_out(
    skeleton: Skeleton, routers: dict[int, nn.Module], index: int
) -> Iterator[tuple[int, Place] | None]:
    """(number of experts, place) of every kind of layer with a router; None for one whose router
    does not run once, or whose logits have another form or no gradient."""
    hidden, calls = skeleton.dry_call(ROWS, TOKENS)
    kinds = set()
    for number, module in routers.items():
        layer, call = skeleton.layers[number], calls[number]
        if (kind := kind_of(layer, call, number)) in kinds:
            continue
        kinds.add(kind)
        outputs: list[tuple[Any, ...]] = []
        forward, _ = blank_call(layer, (ROWS, TOKENS, hidden.shape[-1]), skeleton.dtype, call)
        noted = module.register_forward_hook(lambda *seen: outputs.append(tensors_of(seen[2])))  # noqa: B023
        try:
            with noted, without_data(), torch.enable_grad():
                yield _found(forward(), outputs, index)
        except UNSUPPORTED:  # it cannot run without data
            yield None


def _found(hidden: Tensor, outputs: list[tuple[Any, ...]], index: int) -> tuple[int, Place] | None:
    """The result that `_tried_out` wants of a layer that has returned `hidden`."""
    if len(outputs) != 1 or len(outputs[0]) <= index:
        return None
    logits, used = outputs[0][index], graph_of(hidden)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != ROWS * TOKENS:
        return None
    carriers = [
        place
        for place, part in enumerate(outputs[0])
        if isinstance(part, Tensor) and part.requires_grad and part.grad_fn in used
    ]
    # the logits themselves last: most layers drop them
    carriers.sort(key=lambda place: place == index)
    return (logits.shape[-1], Place(index, carriers[0])) if carriers else None
