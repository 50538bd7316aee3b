"""Stand-ins for decoder layers: they let a model's own forward run without its layers.

A family's own code (embedding scale, positions, rotary tables, masks, softcaps) differs from
release to release. It is never re-implemented: it runs once per micro-batch, with every layer
replaced by a `Recorder` that notes what the layer would receive.
"""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree

from megatrain.data.images import OF_TOKENS as OF_TOKENS
from megatrain.data.images import TYPES as TYPES
from megatrain.errors import ModelError

PLAIN = (bool, int, float, str)  # values that settings have

Found = TypeVar("Found")


@dataclass(frozen=True)
class LayerCall:
    """The arguments that the model passes to one layer besides the hidden states. end_to_end: the
    layer takes the sequences of a batch as one, [1, batch * tokens, hidden]. around: makes what the
    layer runs in. side: what the model adds to the hidden states before the layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    end_to_end: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    side: Side | None = None

    def with_side(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states [batch, tokens, hidden] with what is added before the layer."""
        if self.side is None:
            return hidden
        return hidden.flatten(0, 1).index_add(0, self.side.index, self.side.rows).view_as(hidden)

    def without_graph(self) -> LayerCall:
        """The call with what is added as a constant."""
        return replace(self, side=self.side and replace(self.side, rows=self.side.rows.detach()))


@dataclass(frozen=True)
class Side:
    """Features of images that a model adds between layers (deepstack): rows [n, hidden] of the
    hidden states [batch * tokens, hidden] at `index`, int64 [n]."""

    index: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, added: torch.Tensor) -> Side:
        """Those of a tensor [batch, tokens, hidden] that are not zero; a GPU is waited for."""
        flat = added.flatten(0, 1)
        index = flat.detach().any(-1).nonzero()[:, 0]
        return cls(index, flat[index])


def of_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An argument of a model's forward in the dtype of the computation, if it is of floats."""
    return value.to(dtype) if value.is_floating_point() else value


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nested structure."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class ReachedEnd(Exception):
    """Raised by the last recorder: all layers have been seen, and what follows is the head."""


class UnusedOutputUsed(ModelError):
    """A model uses what its layers return beside hidden states."""


class UnusedOutput:
    """A layer's output beside hidden states: a model may hand it out; using it raises."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise UnusedOutputUsed("it computes with what its layers return beside hidden states")

    def __bool__(self) -> bool:
        return self.__torch_function__()  # type: ignore[no-any-return]

    def __getitem__(self, _: Any) -> Any:
        return self.__torch_function__()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        return self.__torch_function__()


class Discarding(UserDict[Any, Any]):
    """Stands in for the empty dict `of` that a model hands to its layers, one after the other. What
    a layer puts there is dropped, as it would outlive the layer's graph; asking for it raises."""

    def __init__(self, of: MutableMapping[Any, Any]) -> None:
        super().__init__()
        self.of = of

    def __setitem__(self, key: Any, item: Any) -> None:
        self.of[key] = UnusedOutput()

    def refuse(self, *_: Any) -> Any:
        raise UnusedOutputUsed("its layers look for what earlier layers have put into a dict")

    __getitem__ = __delitem__ = __contains__ = __iter__ = __len__ = refuse


def discarding(value: Any) -> Any:
    """`value`, or a stand-in for it if it is a dict, of whatever class, with nothing to be used."""
    if not isinstance(value, MutableMapping):
        return value
    return value if any(type(v) is not UnusedOutput for v in value.values()) else Discarding(value)


def form_output(hidden: torch.Tensor, extras: int | None) -> Any:
    """The stand-in for a layer's output that hands `hidden` on. `extras`: see `Findings`."""
    return hidden if extras is None else (hidden, *(UnusedOutput() for _ in range(extras)))


@dataclass
class Tape:
    """The notes of one run through the recorders. If `injected` is given, every recorder returns it
    instead, so that the model's own code after its last layer (final norm, LM head, softcap) runs
    on these hidden states. sides: hand zeros on, so that what the model adds between shows."""

    injected: torch.Tensor | None = None
    sides: bool = False
    passed: torch.Tensor | None = None  # what the last recorder returned
    hidden: torch.Tensor | None = None  # input of layer 0, [batch, tokens, hidden]
    calls: list[LayerCall] = field(default_factory=list)


class StandIn(nn.Module):
    """Takes the place of decoder layer `index` inside the model. Attributes that it lacks are the
    layer's: a model reads `layer.attention_type`, for one."""

    layer: nn.Module

    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # no submodule: its parameters are not the model's
        self.index = index

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)


class Recorder(StandIn):
    """Notes the calls of a layer on the current tape, or returns what the tape injects."""

    def __init__(self, layer: nn.Module, index: int, is_last: bool, extras: int | None) -> None:
        super().__init__(layer, index)
        self.is_last = is_last
        self.extras = extras
        self.tape: Tape | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, call = split_hidden(args, kwargs)
        assert self.tape is not None, "a recorder runs only under Skeleton"
        if self.tape.injected is not None:
            hidden = self.tape.injected
        else:
            if self.index == 0:
                self.tape.hidden = hidden
            elif self.tape.sides and hidden is not self.tape.passed:
                call = replace(call, side=Side.of(hidden))
            self.tape.calls.append(call)
            if self.is_last:
                raise ReachedEnd
            if self.tape.sides:
                passed = self.tape.passed
                hidden = torch.zeros_like(hidden) if passed is None else passed
            self.tape.passed = hidden
        return form_output(hidden, self.extras)


def split_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, LayerCall]:
    """(hidden states, the other arguments) that a layer was called with."""
    rest = {name: discarding(value) for name, value in kwargs.items()}
    if args:
        return args[0], LayerCall(tuple(map(discarding, args[1:])), rest)
    return rest.pop("hidden_states"), LayerCall((), rest)


def kind_of(layer: nn.Module, call: LayerCall, index: int) -> Any:
    """A key that layers share whose modules, settings, parameters' shapes and inputs are equal. A
    setting of layer `index` that may be its own index, such as layer_idx, does not count."""

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.dtype
        return value if isinstance(value, PLAIN) else type(value)

    modules = list(layer.named_modules())
    settings = (
        (path, name, value)
        for path, module in modules
        for name, value in vars(module).items()
        if isinstance(value, PLAIN) and not (value == index and ("layer" in name or "idx" in name))
    )
    own = layer.named_parameters()
    shapes = ((name, tuple(p.shape), p.requires_grad) for name, p in own)
    inputs = map(describe, pytree.tree_leaves((call.args, call.kwargs)))
    types = ((path, type(module)) for path, module in modules)
    return tuple(types), tuple(settings), tuple(shapes), tuple(inputs)


def by_kind(
    layers: Iterable[nn.Module],
    calls: Iterable[LayerCall],
    find: Callable[[nn.Module, LayerCall], Found],
) -> list[Found]:
    """`find` of each layer; one of each kind is tried, so that depth takes no time."""
    pairs, known = list(zip(layers, calls, strict=True)), dict[Any, Found]()
    kinds = [kind_of(*pair, index) for index, pair in enumerate(pairs)]
    for kind, pair in zip(kinds, pairs, strict=True):
        if kind not in known:
            known[kind] = find(*pair)
    return [known[kind] for kind in kinds]


# Names that transformers gives to what kernels of recurrences take.
BEGINNINGS, NUMBERS = "cu_seq_lens_q", "seq_idx"


# -- documents packed into one sequence ------------------------------------------------------------


def documents_of(positions: torch.Tensor) -> torch.Tensor:
    """[batch, tokens]: each token's document. One begins where positions do not go on by one."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def boundaries_of(positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """int32 offsets at which documents of sequences [batch, tokens] begin, as kernels take them.
    cu_seq_lens_q [documents + 1] has their beginnings where all sequences lie end to end, and the
    number of tokens; seq_idx [batch, tokens] the number of each token's document among all."""
    documents = documents_of(positions)
    begins = torch.diff(documents, prepend=documents[:, :1] - 1, dim=-1).flatten()
    beginnings = torch.cat([begins.nonzero().flatten(), begins.new_tensor([begins.numel()])])
    numbers = (begins.cumsum(0) - 1).view_as(positions)
    return {BEGINNINGS: beginnings.int(), NUMBERS: numbers.int()}


def with_places(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs with their position_ids [batch, tokens], if any, as the model takes them of packed
    documents: where it has a `get_rope_index`, [1 + axes, batch, tokens], first these, which keep
    documents apart, then places on each axis, which it counts in each document alone."""
    if (positions := inputs.get("position_ids")) is None or positions.ndim != 2:
        return {**inputs}
    found = (getattr(module, "get_rope_index", None) for module in model.modules())
    if (rope_index := next(filter(None, found), None)) is None:
        return {**inputs}
    taken = {n: inputs[n] for n in inspect.signature(rope_index).parameters if n in inputs}
    if taken.keys() <= {"input_ids", "attention_mask"}:  # no images
        return {**inputs, "position_ids": positions.expand(4, *positions.shape)}
    lengths = boundaries_of(positions)[BEGINNINGS].diff().tolist()

    def alone(of_tokens: torch.Tensor) -> torch.Tensor:
        return pad_sequence([*torch.split(of_tokens.flatten(), lengths)], batch_first=True)

    given = {n: alone(t) if n in OF_TOKENS else t for n, t in taken.items()}
    places = rope_index(**given | {"attention_mask": alone(torch.ones_like(positions))})[0]
    laid = torch.cat([places[:, n, :length] for n, length in enumerate(lengths)], dim=1)
    return {**inputs, "position_ids": torch.cat([positions[None], laid.view(-1, *positions.shape)])}


def told(calls: list[LayerCall], masked: Sequence[bool], shape: torch.Size) -> list[LayerCall]:
    """Calls of layers as they keep documents apart: where `masked` by their mask, else by kernels.

    Kernels take the beginnings of documents, which `boundaries_of` found, in one sequence only. So
    sequences of `shape`, [batch, tokens], are laid end to end where there is no mask. (Masks of
    such a sequence would grow with its square.)
    """
    known: dict[int, torch.Tensor] = {}  # layers go on sharing what they share

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:2] != shape:
            return tensor
        return known.setdefault(id(tensor), tensor.flatten(0, 1).unsqueeze(0))

    def of_layer(call: LayerCall, by_mask: bool) -> LayerCall:
        if by_mask:
            given = {name: value for name, value in call.kwargs.items() if name != BEGINNINGS}
            return replace(call, kwargs=given)
        args, kwargs = pytree.tree_map_only(torch.Tensor, flat, (call.args, call.kwargs))
        return LayerCall(args, kwargs, end_to_end=True, side=call.side)

    return list(map(of_layer, calls, masked))


def none_found(positions: torch.Tensor) -> None:
    """Nothing is packed, as the model counted positions itself."""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute of this name, inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def documents_known(
    find: Callable[[torch.Tensor], torch.Tensor | None],
) -> AbstractContextManager[None]:
    """Have transformers ask `find` for the documents of positions; its own search stalls GPUs."""
    from transformers import masking_utils

    return replaced(masking_utils, "find_packed_sequence_indices", find)


def separates(call: LayerCall) -> bool:
    """True if a mask [.., 4, 4] has the last two tokens see themselves, and not the first two."""
    for mask in tensors_in((call.args, call.kwargs)):
        if mask.ndim > 1 and mask.shape[-2:] == (4, 4):
            seen = mask if mask.dtype == torch.bool else mask == 0
            if seen.diagonal(dim1=-2, dim2=-1).all() and not seen[..., 2:, :2].any():
                return True
    return False
