"""Made-up models whose layers keep to the rules of streaming, or break one."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """A decoder layer of a made-up model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, device="meta")

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return self.linear(hidden_states)


class LeakyLayer(Layer):
    """Returns a tensor beside its hidden states."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return self.linear(hidden_states), hidden_states.mean()


class SidewaysLayer(Layer):
    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return hidden_states.mean(), self.linear(hidden_states)


class FillingLayer(Layer):
    def forward(self, hidden_states: Tensor, box: Any = None, **_: Any) -> Any:
        box.append(hidden_states)
        return self.linear(hidden_states)


class KeepingLayer(Layer):
    def forward(self, hidden_states: Tensor, box: Any = None, **_: Any) -> Any:
        box["states"] = hidden_states
        return self.linear(hidden_states)


class LookingLayer(Layer):
    def forward(self, hidden_states: Tensor, box: Any = None, **_: Any) -> Any:
        before = box.get("states", 0)
        box["states"] = hidden_states
        return self.linear(hidden_states) + before


class AskingLayer(Layer):
    def forward(self, hidden_states: Tensor, box: Any = None, **_: Any) -> Any:
        return self.linear(hidden_states) * (2 if box else 1)


class ValueDependentLayer(Layer):
    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return self.linear(hidden_states) if hidden_states.sum() > 0 else hidden_states


class DynamicCache:
    """Looks like a key-value cache by its name."""


class Toy(nn.Module):
    """A made-up decoder. What each variant does wrong is in `between` and in `extras`."""

    layer: type[Layer] = Layer

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8, device="meta")
        self.layers = nn.ModuleList(self.layer() for _ in range(layers))

    def extras(self, hidden: Tensor) -> dict[str, Any]:
        return {"mask": None, "positions": torch.arange(hidden.shape[1])}

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def order(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.order():
            output = layer(self.between(hidden), **self.extras(hidden))
            hidden = output[0] if isinstance(output, tuple) else output
        assert isinstance(hidden, Tensor)
        return hidden


class ChangesBetween(Toy):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden * 1.0


class PassesGradient(Toy):
    def extras(self, hidden: Tensor) -> dict[str, Any]:
        return {"embedding": {"of": self.embed.weight.sum()}}


class PassesCache(Toy):
    def extras(self, hidden: Tensor) -> dict[str, Any]:
        return {"past": DynamicCache()}


class PassesBox(Toy):
    """Hands a list to its layers, which put something into it."""

    layer: type[Layer] = FillingLayer

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        self.box: Any = self.empty()
        return super().forward(input_ids, use_cache)

    def empty(self) -> Any:
        return []

    def extras(self, hidden: Tensor) -> dict[str, Any]:
        return {"box": self.box}


class IgnoresItsBox(PassesBox):
    layer = Layer


class PassesDict(PassesBox):
    """What its layers put into a dict is looked at by none."""

    layer: type[Layer] = KeepingLayer

    def empty(self) -> Any:
        return {}


class PassesUserDict(PassesDict):
    def empty(self) -> Any:
        return UserDict[str, Tensor]()


class LooksIntoItsDict(PassesDict):
    layer = LookingLayer


class AsksItsDict(PassesDict):
    layer = AskingLayer


class UsesItsDictAtTheEnd(PassesDict):
    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        hidden: Tensor = super().forward(input_ids, use_cache) + self.box["states"]
        return hidden


class AddsItsInputAtTheEnd(Toy):
    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        embedded: Tensor = self.embed(input_ids)
        hidden = embedded
        for layer in self.layers:
            hidden = layer(hidden)
        return embedded + hidden


class RunsTwice(Toy):
    def order(self) -> list[nn.Module]:
        return [*self.layers, self.layers[0]]


class SkipsOne(Toy):
    def order(self) -> list[nn.Module]:
        return list(self.layers)[:2]


class DropsMore(Toy):
    """Its layers return more than hidden states, which it hands out at most."""

    layer: type[Layer] = LeakyLayer

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden, extra = layer(hidden, **self.extras(hidden))
            self.seen = [*self.seen, extra]
        return self.end(hidden)

    def end(self, hidden: Tensor) -> Tensor:
        return hidden


class TouchingLayer(LeakyLayer):
    def forward(self, hidden_states: Tensor, from_before: Any = (), **_: Any) -> Any:
        return self.linear(hidden_states) + sum(from_before), hidden_states.mean()


class HandsMoreOnUntouched(DropsMore):
    def extras(self, hidden: Tensor) -> dict[str, Any]:
        return {"from_before": self.seen[-1:]}


class HandsMoreOn(HandsMoreOnUntouched):
    layer = TouchingLayer


class AddsMoreAtTheEnd(DropsMore):
    def end(self, hidden: Tensor) -> Tensor:
        added: Tensor = hidden + self.seen[0]
        return added


class UsesItsValues(AddsMoreAtTheEnd):
    """No gradient shows this."""

    def end(self, hidden: Tensor) -> Tensor:
        return hidden * float(self.seen[0].detach())


class AsksForMore(DropsMore):
    def end(self, hidden: Tensor) -> Tensor:
        return hidden * 2 if self.seen[0] else hidden


class HiddenStatesSecond(DropsMore):
    layer = SidewaysLayer


class LooksAtValues(Toy):
    layer = ValueDependentLayer
