"""Made-up models whose layers keep to the rules of streaming, or break one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Compute = Callable[..., Any]  # (layer's linear module, hidden states, **others) -> its output


def plain(linear: nn.Module, hidden: Tensor, **_: Any) -> Any:
    return linear(hidden)


def leaky(linear: nn.Module, hidden: Tensor, **_: Any) -> Any:
    """A tensor beside its hidden states."""
    return linear(hidden), hidden.mean()


def touching(linear: nn.Module, hidden: Tensor, from_before: Any = (), **_: Any) -> Any:
    output = linear(hidden)
    for before in from_before:
        output = output + before
    return output, hidden.mean()


def filling(linear: nn.Module, hidden: Tensor, box: Any = None, **_: Any) -> Any:
    box.append(hidden)
    return linear(hidden)


def keeping(linear: nn.Module, hidden: Tensor, box: Any = None, **_: Any) -> Any:
    box["states"] = hidden
    return linear(hidden)


def looking(linear: nn.Module, hidden: Tensor, box: Any = None, **_: Any) -> Any:
    before = box.get("states", 0)
    box["states"] = hidden
    return linear(hidden) + before


def asking(linear: nn.Module, hidden: Tensor, box: Any = None, **_: Any) -> Any:
    return linear(hidden) * (2 if box else 1)


class Layer(nn.Module):
    """A decoder layer of a made-up model."""

    def __init__(self, compute: Compute = plain) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, device="meta")
        self.compute = compute

    def forward(self, hidden_states: Tensor, **others: Any) -> Any:
        return self.compute(self.linear, hidden_states, **others)


class DynamicCache:
    """Looks like a key-value cache by its name."""


class Toy(nn.Module):
    """A made-up decoder.

    Args:
        layer: makes a layer, or what one computes.
        box: makes what the model hands to its layers, one after the other.
        extras: (model) -> whatever else each layer receives.
        between: what happens to hidden states before each layer.
        order: of the layers that run, by number.
        end: (model, hidden states, embedding) -> the output. What layers return beside their hidden
            states is in `seen`.
    """

    def __init__(
        self,
        layer: Any = plain,
        *,
        box: Callable[[], Any] | None = None,
        extras: Callable[[Any], dict[str, Any]] = lambda toy: {},
        between: Callable[[Tensor], Tensor] = lambda hidden: hidden,
        order: tuple[int, ...] = (0, 1, 2),
        end: Callable[[Any, Tensor, Tensor], Tensor] = lambda toy, hidden, embedding: hidden,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8, device="meta")
        make = layer if isinstance(layer, type) else lambda: Layer(layer)
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.make_box, self.extras, self.between, self.order = box, extras, between, order
        self.end = end
        self.seen: list[Any] = []

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        embedding = hidden = self.embed(input_ids)
        self.seen = []
        self.box = self.make_box() if self.make_box else None
        for number in self.order:
            given = {"mask": None, "positions": torch.arange(hidden.shape[1]), **self.extras(self)}
            if self.make_box:
                given["box"] = self.box
            hidden = self.layers[number](self.between(hidden), **given)
            if isinstance(hidden, tuple):
                hidden, extra = hidden
                self.seen.append(extra)
        return self.end(self, hidden, embedding)
