"""Names of tensors in a model folder, and the place of each in the blocks' arrays.

Releases rename modules (GPT-NeoX's `embed_out` became `lm_head`), and transformers renames and
fuses tensors on loading: a mixture's experts, published one by one, become one tensor. What other
programs read is written, and nothing is copied for it: every published tensor is a contiguous range
of a block's flat array, one expert's matrix among them. transformers itself says which.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megatrain.errors import ModelError
from megatrain.memory.layout import FlatLayout, TensorRange
from megatrain.models.constants import Block, ParameterPlace, kept_tensors
from megatrain.models.meta import storage_of

PASSENGER = -1  # in place of a block
# By block, the tensors of a model folder.
Tensors = tuple[tuple[TensorRange, ...], ...]


@dataclass(frozen=True)
class Published:
    """The tensors of a model's folder as transformers saves it."""

    # of each tensor, by block and in the order of its array, tied ones once; and those in no array
    places: tuple[tuple[ParameterPlace, ...], ...]
    constants: tuple[tuple[ParameterPlace, ...], ...]
    # by every name that is understood: published ones, the model's own, those of whole tensors
    known: Mapping[str, ParameterPlace]
    # for each of the model's own tensors. Fused ones are not published, but arrays with less than
    # an element per parameter have only them.
    whole_names: Mapping[str, str]
    prefix: str  # of the base model, which a folder's names may lack
    renamings: tuple[Any, ...]  # transformers' own on loading: other releases' and classes' names
    unused_weights: tuple[ParameterPlace, ...] = ()
    unread: tuple[str, ...] = ()  # patterns of further names in folders, which transformers drops

    @property
    def tensors(self) -> Tensors:
        return tuple(tuple(place.tensor for place in places) for places in self.places)

    def places_of(self, names: Iterable[str]) -> dict[str, ParameterPlace | None]:
        """The places of a folder's tensors, by name. None: unknown, also under a new name."""
        found = {name: self._look_up(self.known, name) for name in names}
        others = [name for name, place in found.items() if place is None]
        for name, renamed in zip(others, self._renamed(others), strict=True):
            found[name] = self._look_up(self._by_new_name, renamed)
        return found

    def missing(self, found: Collection[ParameterPlace]) -> list[str]:
        """Names of the published tensors that are in none of these places."""
        whole = {place.own for place in found if place.whole}
        every = (*self.places, *self.constants, self.unused_weights)
        wanted = (place for places in every for place in places)
        return [p.tensor.name for p in wanted if p not in found and p.own not in whole]

    def named_as(self, found: Mapping[ParameterPlace, str]) -> Tensors:
        """`tensors` under the names that a folder has for them, where it has them as they are."""
        return tuple(
            tuple(replace(p.tensor, name=found.get(p, p.tensor.name)) for p in places)
            for places in self.places
        )

    def _look_up(self, table: Mapping[str, ParameterPlace], name: str) -> ParameterPlace | None:
        return table.get(name) or table.get(f"{self.prefix}.{name}")

    @cached_property
    def _by_new_name(self) -> dict[str, ParameterPlace]:
        return dict(zip(self._renamed(self.known), self.known.values(), strict=True))

    def _renamed(self, names: Iterable[str]) -> list[str]:
        """The names as transformers has them once it has applied its renamings."""
        steps = copy.deepcopy(self.renamings)  # some remember which names they have met
        return [_rename(name, steps) for name in names]


def in_blocks(names: Mapping[ParameterPlace, str], blocks: int) -> Tensors:
    """A folder's tensors by block, under these names, but for constants."""
    found: list[list[TensorRange]] = [[] for _ in range(blocks)]
    for place, name in names.items():
        if not place.constant:
            found[place.block].append(replace(place.tensor, name=name))
    return tuple(map(tuple, found))


class _NoCopies(TorchFunctionMode):
    """`contiguous` returns its argument, so that what conversions cut out stays a view."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def published(
    model: nn.Module,
    family: str,
    blocks: Sequence[Block],
    tied: Iterable[tuple[str, str]],
    unused_weights: Iterable[str] = (),
) -> Published:
    """Map the blocks' tensors to those that transformers saves; `family` is the model_type. Raises
    ModelError if a published tensor is no range of a block's array."""
    ranges = [*(b.layout for b in blocks), *(b.constants for b in blocks)]
    flats = [torch.empty(layout.numel, device="meta") for layout in ranges]
    own = [layout.views(flat) for layout, flat in zip(ranges, flats, strict=True)]
    views = {name: view for of_layout in own for name, view in of_layout.items()}
    number_of = {storage_of(flat): number for number, flat in enumerate(flats)}
    places: list[list[ParameterPlace]] = [[] for _ in ranges]
    for name, view in reverted(model, views).items():
        number = number_of.get(storage_of(view))
        if number is None or not view.is_contiguous():
            raise ModelError(
                f"{type(model).__name__}: {name} is rearranged when transformers loads it; "
                "it cannot be streamed yet"
            )
        tensor = TensorRange(name, tuple(view.shape), int(view.storage_offset()))
        constant, index = divmod(number, len(blocks))
        specs = ranges[number].tensors
        owner = specs[bisect_right(specs, tensor.offset, key=lambda spec: spec.offset) - 1].name
        places[number].append(ParameterPlace(index, tensor, owner, constant=bool(constant)))
    for number, (layout, of_layout) in enumerate(zip(ranges, places, strict=True)):
        of_layout.sort(key=lambda place: place.tensor.offset)
        _check_whole(type(model).__name__, blocks[number % len(blocks)].name, layout, of_layout)
    aliases = {
        name: owner
        for alias, owner in tied
        for name in (alias, *reverted(model, {alias: views[owner]}))
    }
    # of whole tensors and aliases, by transformers' renamings alone
    renamings = _renamings_on_save(family)
    whole = {name: _rename(name, renamings) for name in (*views, *(alias for alias, _ in tied))}
    assert len(set(whole.values())) == len(whole), "two tensors would have one name"
    carried = _places_of_unused(model, unused_weights)
    return Published(
        tuple(map(tuple, places[: len(blocks)])),
        tuple(map(tuple, places[len(blocks) :])),
        carried | _known(ranges, places, aliases, whole),
        whole,
        prefix=next(iter(views)).partition(".")[0],
        renamings=_renamings_on_load(model),
        unused_weights=tuple(dict.fromkeys(p for p in carried.values() if not p.whole)),
        unread=tuple(sorted(model._keys_to_ignore_on_load_unexpected or ())),  # type: ignore[arg-type]
    )


def _places_of_unused(model: nn.Module, names: Iterable[str]) -> dict[str, ParameterPlace]:
    """The places of unused weights by every name that they may have in a folder."""
    weights, blanks = kept_tensors(model), {}
    owners: dict[int, str] = {}  # of those that share a tensor, a folder has one
    own_of, known = {}, {}
    for own in names:
        weight = weights[own]
        blanks[own] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        own_of[storage_of(blanks[own])] = own
    parts = reverted(model, blanks)
    for name, part in parts.items():
        own = own_of.get(storage_of(part), name)
        owner = owners.setdefault(id(weights.get(own, part)), own)
        tensor = TensorRange(name, tuple(part.shape), 0)
        known[name] = ParameterPlace(PASSENGER, tensor, owner, whole=owner != own, passenger=True)
    for own, blank in blanks.items():
        tensor = TensorRange(own, tuple(blank.shape), 0)
        whole = ParameterPlace(
            PASSENGER, tensor, owners.get(id(weights[own]), own), True, passenger=True
        )
        under = [known[name] for name, part in parts.items() if part is blank]
        known.setdefault(own, under[0] if under else whole)
    return known


def reverted(model: nn.Module, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that transformers saves for these."""
    from transformers.core_model_loading import revert_weight_conversion

    revert: Any = revert_weight_conversion  # untyped
    with _NoCopies():
        return revert(model, dict(views))  # type: ignore[no-any-return]


def _check_whole(
    family: str, block: str, layout: FlatLayout, places: Sequence[ParameterPlace]
) -> None:
    """Raise ModelError unless the places, in order, are all of the layout's elements, each once."""
    ends = [place.tensor.offset + place.tensor.numel for place in places]
    apart = all(end <= place.tensor.offset for end, place in zip(ends, places[1:], strict=False))
    if not apart or sum(place.tensor.numel for place in places) != layout.parameters:
        raise ModelError(
            f"{family}: transformers does not save every tensor of {block} once; "
            "it cannot be streamed yet"
        )


def _known(
    layouts: Sequence[FlatLayout],
    places: Sequence[Sequence[ParameterPlace]],
    aliases: Mapping[str, str],
    whole: Mapping[str, str],
) -> dict[str, ParameterPlace]:
    known = {place.tensor.name: place for of_layout in places for place in of_layout}
    own: dict[str, ParameterPlace] = {}
    for layout, of_layout in zip(layouts, places, strict=True):
        parts = {place.tensor.offset: place for place in of_layout}
        for spec in layout.tensors:
            part = parts[spec.offset]
            if part.tensor.shape != spec.shape:  # of a fused tensor, or in another shape
                fused = TensorRange(spec.name, spec.shape, spec.offset)
                part = replace(part, tensor=fused, own=spec.name, whole=True)
            own[spec.name] = part
    own |= {alias: replace(own[owner], alias=True) for alias, owner in aliases.items()}
    for name, place in own.items():
        known.setdefault(name, place)
        known.setdefault(whole.get(name, name), place)
    return known


def _rename(name: str, renamings: Iterable[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _renamings_on_save(family: str) -> list[Any]:
    """transformers' renamings for a family's causal LM, reversed; not its other rearrangements."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    mapping: Any = get_checkpoint_conversion_mapping  # untyped
    transforms = mapping(CAUSAL.get(family)) or mapping(family) or []
    # subclasses move prefixes and indices; for a new model transformers does not undo them either
    renamings = [step for step in reversed(transforms) if type(step) is WeightRenaming]
    return [renaming.reverse_transform() for renaming in renamings]


def _renamings_on_load(model: nn.Module) -> tuple[Any, ...]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    mapping: Any = get_model_conversion_mapping  # untyped
    return tuple(step for step in mapping(model) if isinstance(step, WeightRenaming))
