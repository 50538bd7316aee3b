"""Stand-ins for decoder layers: they let a model's own forward run without any layer, and note what each would have received.

A family's model-level code (embedding scale, positions, rotary tables, masks per layer type, softcaps) differs from release to release.
We never re-implement it: we run it, once per micro-batch, with every layer replaced by a `Recorder`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class LayerCall:
    """What the model passes to one layer besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ReachedEnd(Exception):
    """Raised by the last recorder: all layers have been seen, and what follows belongs to the head."""


@dataclass
class Tape:
    """What one run through the recorders notes, and what it plays back.

    `injected` is None while recording; otherwise every recorder returns it, so that the model's own code after
    its last layer (final norm, LM head, softcap) runs on these hidden states.
    """

    injected: torch.Tensor | None = None
    hidden: torch.Tensor | None = None  # input of layer 0, [batch, tokens, hidden]
    calls: list[LayerCall] = field(default_factory=list)


class Recorder(nn.Module):
    """Replaces decoder layer `index` inside the model. Attributes it lacks are looked up on the layer it stands for."""

    def __init__(self, layer: nn.Module, index: int, is_last: bool, returns_tuple: bool) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule: its parameters are streamed, not the model's
        self.index = index
        self.is_last = is_last
        self.returns_tuple = returns_tuple
        self.tape: Tape | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)  # e.g. `decoder_layer.attention_type`, which picks a mask

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, args, kwargs = split_hidden(args, kwargs)
        assert self.tape is not None, "a recorder runs only under Skeleton"
        if self.tape.injected is not None:
            hidden = self.tape.injected
        else:
            if self.index == 0:
                self.tape.hidden = hidden
            self.tape.calls.append(LayerCall(args, kwargs))
            if self.is_last:
                raise ReachedEnd
        return (hidden,) if self.returns_tuple else hidden


def split_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """(hidden states, other positional arguments, other keyword arguments) of a layer call."""
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest


def kind_of(layer: nn.Module, call: LayerCall) -> Any:
    """Equal for layers of one class with equal parameter shapes and equal inputs."""

    def describe(value: Any) -> Any:
        return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)

    shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
    return type(layer), shapes, tuple(describe(leaf) for leaf in pytree.tree_leaves((call.args, call.kwargs)))
