"""Constants: tensors that belong to a model's weights, and that no step changes.

Persistent buffers, such as what a router adds to its scores to balance the experts; parameters that
are frozen; and idle ones, which take no part in what a layer returns and so have no gradient: the
indexers of sparse attention. They stay on the device, in the dtypes that transformers computes with
them, and are written as the folder that they were read from has them, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.data.samples import NO_IMAGES as NO_IMAGES
from megatrain.errors import ModelError
from megatrain.memory.layout import FlatLayout, TensorRange

# Of a block's trained parameters, as many as are constants at most. Indexers have 0.1 to 3%, a
# cross-attention that nothing attends with a third.
MOST = 0.25
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

NOTHING = FlatLayout.pack(())


@dataclass(frozen=True)
class Block:
    """One streaming unit. Its layouts name tensors as the model's state dict does."""

    index: int  # execution order: 0 is embed, then the decoder layers, then the head
    name: str
    layout: FlatLayout  # of what is streamed: trained, or frozen by the user
    constants: FlatLayout = NOTHING  # of what is not trained either, and is not streamed

    @property
    def trains(self) -> bool:
        """True if a step updates the block."""
        return self.layout.trainable > 0


@dataclass(frozen=True)
class ParameterPlace:
    """The place of a model folder's tensor."""

    block: int
    tensor: TensorRange
    own: str  # the model's own name of the tensor that it is, or is a part of
    whole: bool = False  # a tensor of the model's own that is published otherwise: in parts, say
    alias: bool = False  # it repeats a tied tensor, which it may replace
    constant: bool = False  # it lies in no array; its range is one of `Block.constants`
    passenger: bool = False  # it is carried along, and lies in no block


def kept_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model folder's tensors: parameters and persistent buffers, tied ones under every name."""
    kept: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return kept


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Those of this very module, by name, that its state dict has."""
    passing = module._non_persistent_buffers_set
    buffers = module._buffers.items()
    return {leaf: b for leaf, b in buffers if b is not None and leaf not in passing}


def trains(tensor: Tensor) -> bool:
    """True if steps change this tensor of `kept_tensors`."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def refuse_large(family: str, block: str, trained: FlatLayout, found: Mapping[str, Tensor]) -> None:
    """Raise ModelError for constants, by name, that are too large to be what we take them for."""
    total = 0
    for name, parameter in found.items():
        total += parameter.numel() if isinstance(parameter, nn.Parameter) else 0
        if total > MOST * trained.parameters:
            raise ModelError(
                f"{family}: {name} and others of {block} are frozen or take no part in what it "
                f"returns, more than {MOST:.0%} of what is trained; it cannot be streamed yet"
            )


class Constants:
    """The constants of a model without weights, whose modules hold them. blocks: their `constants`
    name the tensors. places: of a model folder's constants, by block. owner: (module, attribute)
    that holds a tensor, by its name."""

    def __init__(
        self,
        model: Any,
        blocks: Iterable[Block],
        places: Sequence[Sequence[ParameterPlace]],
        owner: Callable[[str], tuple[nn.Module, str]],
    ) -> None:
        self.places = places
        self._owner = owner
        self._offsets = {spec.name: spec.offset for b in blocks for spec in b.constants.tensors}
        # (name, values) as a folder has them
        self._read: dict[ParameterPlace, tuple[str, Tensor]] = {}
        wide = _kept_in_float32(model) if self._offsets else set()
        for name in self._offsets:
            tensor = self[name].detach()
            is_wide = tensor.is_floating_point() and name in wide
            self._put(name, tensor.to(torch.float32 if is_wide else tensor.dtype).contiguous())

    def __getitem__(self, name: str) -> Tensor:
        """The tensors that the model computes with, by the model's own name."""
        module, leaf = self._owner(name)
        held = module._parameters if leaf in module._parameters else module._buffers
        tensor = held[leaf]
        assert tensor is not None, name
        return tensor

    def _put(self, name: str, tensor: Tensor) -> None:
        module, leaf = self._owner(name)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor

    def __iter__(self) -> Iterator[str]:
        """The model's own names."""
        return iter(self._offsets)

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(self[name].nbytes for name in self)

    def move(self, device: torch.device) -> None:
        """To where the model computes. Those without values, on meta, become zeros."""
        for name in self:
            tensor = self[name].detach()
            blank = tensor.is_meta and device.type != "meta"
            self._put(name, torch.zeros_like(tensor, device=device) if blank else tensor.to(device))

    def release(self) -> None:
        """Give the device's memory back. Parameters lose their values, as all others do."""
        for name in self:
            tensor = self[name].detach()
            self._put(name, tensor.to("meta" if isinstance(self[name], nn.Parameter) else "cpu"))

    # -- values ------------------------------------------------------------------------------------

    def expect(self, read: Mapping[ParameterPlace, tuple[str, torch.dtype]]) -> None:
        """`write` will be called for those of a folder's tensors, (name, dtype) by place, that are
        constants."""
        self._read = {
            place: (name, torch.empty(place.tensor.shape, dtype=dtype))
            for place, (name, dtype) in read.items()
            if place.constant
        }

    def write(self, place: ParameterPlace, begin: int, values: Tensor) -> None:
        """A part of a tensor, flat, from its element `begin`. Called from several threads."""
        with torch.no_grad():
            for flat in (self._flat(place), self._read[place][1].view(-1)):
                flat.narrow(0, begin, values.numel()).copy_(values)

    def _flat(self, place: ParameterPlace) -> Tensor:
        flat = self[place.own].detach().view(-1)
        return flat.narrow(0, place.tensor.offset - self._offsets[place.own], place.tensor.numel)

    def of_block(self, block: int) -> list[tuple[str, Tensor]]:
        """(name, values) of a model folder's tensors, on the CPU."""
        if self._read:
            return [read for place, read in self._read.items() if place.block == block]
        places = self.places[block]
        return [(p.tensor.name, self._flat(p).cpu().view(p.tensor.shape)) for p in places]


def names_in(constants: Constants) -> tuple[str, ...]:
    """The constants among a model folder's tensors."""
    blocks = range(len(constants.places))
    return tuple(name for block in blocks for name, _ in constants.of_block(block))


def _kept_in_float32(model: Any) -> set[str]:
    """Names of the tensors that transformers keeps in float32 whatever it is asked for."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(torch.bfloat16)
    if not plan:
        return set()
    pattern, *_ = build_glob_alternation(list(plan))
    return {name for name in kept_tensors(model) if pattern.search(name)}


# -- unused weights --------------------------------------------------------------------------------

# Those that a forward on text alone never touches: a folder of a model that sees holds a vision
# tower beside the language model. Nothing of that is loaded, allocated or trained; its tensors go
# unchanged from the folder that is read into those that are written (storage/passthrough.py).

# What a micro-batch of text may hold.
OF_TEXT = ("input_ids", "labels", "attention_mask", "position_ids")


# why: decision 0068
@dataclass(frozen=True)
class UnusedWeights:
    """The weights of a model that are copied unchanged."""

    names: tuple[str, ...]  # of parameters, and of buffers that belong to the weights
    modules: tuple[str, ...]  # paths of the largest modules that hold nothing else
    nbytes: int  # of all of them, in the dtype that the configuration states
    multimodal: bool = False  # the configuration describes more than a language model


NOBODY = UnusedWeights((), (), 0)


def without_source(who: UnusedWeights) -> str:
    """The sentence that refuses a model whose unused weights are nowhere."""
    return (
        f"{', '.join(who.modules)}: carried along from a folder with weights, and there is none; "
        "train this model from its weights, or a language model from its own configuration"
    )


def find_unused_weights(model: nn.Module, names: Collection[str], config: Any) -> UnusedWeights:
    """Describe the unused weights of these names. config: of the folder that they are in."""
    mine = {id(tensor): tensor for name, tensor in kept_tensors(model).items() if name in names}
    nbytes = sum(tensor.numel() for tensor in mine.values()) * dtype_of(config).itemsize
    multimodal = bool(mine) and bool(parts_of(config))  # a text's configuration has parts, too
    return UnusedWeights(tuple(names), largest_modules(model, names), nbytes, multimodal)


def largest_modules(model: nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """The largest modules, or else single tensors, whose weights are all among these."""
    others = [name for name in kept_tensors(model) if name not in names]
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        found[next(p for p in paths if not any(o.startswith(f"{p}.") for o in others))] = None
    return tuple(found)


def is_below(path: str, roots: Collection[str]) -> bool:
    """True if a module or tensor is one of these, or inside one."""
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def parts_of(config: Any) -> dict[str, Any]:
    """The configurations inside a configuration, by key: of text, of a vision tower."""
    from transformers import PretrainedConfig

    return {key: part for key, part in vars(config).items() if isinstance(part, PretrainedConfig)}


def poison(model: nn.Module, names: Collection[str], device: torch.device | str = "cpu") -> None:
    """Put NaN in the place of weights: whatever computes with them shows. It takes no memory."""
    for path, module in model.named_modules(remove_duplicate=False):
        held: dict[str, Any] = module._parameters | module._buffers
        for leaf, tensor in held.items():
            if tensor is None or (f"{path}.{leaf}" if path else leaf) not in names:
                continue
            value = math.nan if tensor.is_floating_point() else 0
            one = torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
            if leaf in module._buffers:
                module._buffers[leaf] = one
            else:
                module._parameters[leaf] = nn.Parameter(one, tensor.requires_grad)


def dtype_of(config: Any) -> torch.dtype:
    """The dtype that a folder's configuration states; float32 where it states none."""
    stated = config.dtype
    found = getattr(torch, stated, None) if isinstance(stated, str) else stated
    return found if isinstance(found, torch.dtype) else torch.float32
