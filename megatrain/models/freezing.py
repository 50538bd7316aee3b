"""Frozen tensors: those that the user's patterns take, and a model's blocks when they do not train.

A frozen tensor is streamed and computed with as any other, and keeps its weight alone: it is the
tail of its block's weight array, which is longer than the block's other arrays.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from megatrain.errors import ConfigError
from megatrain.memory.layout import TensorSpec
from megatrain.models.anatomy import Anatomy
from megatrain.models.constants import ParameterPlace

PRODUCTS = 3  # of a trained weight in a step


# why: decision 0087
def freeze(anatomy: Anatomy, patterns: Sequence[str], name: str = "freeze") -> Anatomy:
    """The anatomy with the tensors frozen whose names match one of these shell patterns.

    Names are those of the model's folder, with and without the base model's prefix, and the model's
    own. Of tied tensors there is one: either name freezes it, as `requires_grad = False` would.

    name: of the option, for errors.

    Raises ConfigError for a pattern that takes nothing, or a part of a tensor that is trained as
    one, and if nothing is left to train.
    """
    known, taken = anatomy.published.known, set[str]()  # names that some pattern takes
    prefix = f"{anatomy.published.prefix}."
    for pattern in map(str, patterns):
        forms = ((known_as, known_as.removeprefix(prefix)) for known_as in known)
        found = [
            one for one, bare in forms if fnmatchcase(one, pattern) or fnmatchcase(bare, pattern)
        ]
        if not found:
            names = [p.tensor.name for places in anatomy.published.places for p in places]
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name}: {pattern!r} is the name of no tensor of this model{hint}")
        taken.update(found)
    streamed = {spec.name for block in anatomy.blocks for spec in block.layout.tensors}
    frozen = frozenset(known[known_as].own for known_as in taken) & streamed
    _refuse_parts(anatomy, taken, frozen, name)
    if frozen == streamed:
        raise ConfigError(
            f"{name}: takes every tensor of the model, which leaves nothing to train; leave out a "
            f"pattern, such as {patterns[-1]!r}"
        )
    return _with_frozen(anatomy, frozen)


def freeze_all(anatomy: Anatomy) -> Anatomy:
    """The anatomy of a model that is only read."""
    streamed = {spec.name for block in anatomy.blocks for spec in block.layout.tensors}
    return _with_frozen(anatomy, streamed)


def _refuse_parts(
    anatomy: Anatomy, taken: Collection[str], owners: Collection[str], name: str
) -> None:
    """Raise ConfigError if of a tensor that is published in parts some are not taken."""
    parts = defaultdict(list)
    for place in (place for places in anatomy.published.places for place in places):
        parts[place.own].append(place.tensor.name)
    places = (anatomy.published.known[known_as] for known_as in taken)
    whole = {place.own for place in places if place.whole}
    for own in sorted(set(owners) - whole):
        left = [part for part in parts[own] if len(parts[own]) > 1 and part not in taken]
        if left:
            raise ConfigError(
                f"{name}: takes a part of {own}, which is trained as one tensor, and leaves out "
                f"{left[0]}; freeze all of it, as {own!r}, or none"
            )


def _with_frozen(anatomy: Anatomy, frozen: Collection[str]) -> Anatomy:
    """The anatomy with these tensors, by the model's own names, at the ends of their blocks."""
    blocks = tuple(replace(b, layout=b.layout.freeze(frozen)) for b in anatomy.blocks)
    moved: dict[str, int] = {}  # from the old first element of a tensor to the new one
    for old, new in zip(anatomy.blocks, blocks, strict=True):
        offsets = {spec.name: spec.offset for spec in new.layout.tensors}
        moved |= {spec.name: offsets[spec.name] - spec.offset for spec in old.layout.tensors}

    def at(place: ParameterPlace) -> ParameterPlace:
        if place.constant or place.passenger or not moved[place.own]:
            return place
        offset = place.tensor.offset + moved[place.own]
        return replace(place, tensor=replace(place.tensor, offset=offset))

    def in_order(places: Sequence[ParameterPlace]) -> tuple[ParameterPlace, ...]:
        return tuple(sorted(map(at, places), key=lambda place: place.tensor.offset))

    published = replace(
        anatomy.published,
        places=tuple(map(in_order, anatomy.published.places)),
        known={name: at(place) for name, place in anatomy.published.known.items()},
    )
    return replace(anatomy, blocks=blocks, published=published)


# -- what is computed with them --------------------------------------------------------------------


def counted_parameters(
    anatomy: Anatomy, idle: int, wanted: Callable[[TensorSpec, int], bool] = lambda *_: True
) -> int:
    """The number of trained parameters whose matmuls take as long as a step's with frozen ones.

    A weight is multiplied with a token forward, for its input's gradient from the first trained
    block on, and for its own gradient if it is trained: a trained one three times.

    Args:
        idle: parameters of experts that are not a token's own.
        wanted: which tensors count, by (tensor, block); by default all.
    """
    owners = {own for _, own in anatomy.tied}
    weights = experts = products = 0
    for block in anatomy.blocks:
        for tensor in (t for t in block.layout.tensors if wanted(t, block.index)):
            used_in = anatomy.head.index if tensor.name in owners else block.index
            times = 1 + (used_in >= anatomy.first_trained) + (not tensor.frozen)
            weights += times * tensor.numel
            if is_of_experts(tensor):
                experts, products = experts + tensor.numel, products + times * tensor.numel
    of_experts = idle * products // experts if experts else PRODUCTS * idle
    return (weights - of_experts) // PRODUCTS


def share_of_experts_trained(anatomy: Anatomy) -> float:
    """The trained share of the parameters in experts' matrices; 1 for a model that has none."""
    experts = [t for block in anatomy.blocks for t in block.layout.tensors if is_of_experts(t)]
    every = sum(tensor.numel for tensor in experts)
    return sum(t.numel for t in experts if not t.frozen) / every if every else 1.0


def is_of_experts(tensor: TensorSpec) -> bool:
    """True for the matrices of a layer's experts."""
    return tensor.hidden and len(tensor.shape) == 3
