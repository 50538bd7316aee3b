"""Which tensor of a model each of a folder's is, and whether it can be read as that."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from megatrain.errors import ModelError
from megatrain.memory.layout import TensorRange
from megatrain.models.anatomy import Anatomy
from megatrain.models.constants import FLOATS, Constants
from megatrain.models.names import Place
from megatrain.storage.saves import Candidate, listed

# Constant tables that older releases saved with the weights; models compute them anew.
IGNORED = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|(attn|attention|self_attn|self_attention)\.(bias|masked_bias)|position_ids)$"
)


@dataclass(frozen=True)
class Found:
    """The tensors of a folder.

    Attributes:
        names: by their places in the model.
        twins: tied ones as (alias, owner).
        carried: the places of those that are carried along; None for what transformers drops.
    """

    names: dict[Place, str]
    twins: list[tuple[str, str]]
    carried: dict[str, Place | None]


def match(
    anatomy: Anatomy, candidates: Mapping[str, Candidate], where: str, constants: Constants
) -> Found:
    """What the tensors of a folder are, all of them as they can be read. Raises ModelError."""
    matched = find_tensors(anatomy, candidates, where)
    for place, name in matched.names.items():
        dtypes = constants.may_be(place) if place.constant else FLOATS
        _check_kind(candidates[name], place.tensor, dtypes)
    for name, passenger in matched.carried.items():
        if passenger is not None:
            _check_shape(candidates[name], passenger.tensor)
    return matched


def find_tensors(anatomy: Anatomy, names: Iterable[str], where: str) -> Found:
    """What the tensors of these names are. Any name that transformers knows will do.

    Raises ModelError if a name is unknown to this model, two are of one tensor, or one is missing.
    """
    found, dropped = _match_names(anatomy, names, where)
    twins = _take_aliases(found)
    missing = anatomy.published.missing(found.keys())
    if missing:
        raise ModelError(
            f"{where}: lacks {listed(missing)}, which a {anatomy.family} model of this "
            "configuration needs"
        )
    carried: dict[str, Place | None] = dict.fromkeys(dropped)
    for place in [place for place in found if place.passenger]:
        carried[found.pop(place)] = place
    return Found(found, twins, carried)


def _match_names(
    anatomy: Anatomy, names: Iterable[str], where: str
) -> tuple[dict[Place, str], list[str]]:
    """(names by place, names of what transformers drops)."""
    found: dict[Place, str] = {}
    unexpected, dropped = [], []
    for name, place in anatomy.published.places_of(names).items():
        if place is None:
            if anatomy.published.is_dropped(name) and not IGNORED.search(name):
                dropped.append(name)
            elif not IGNORED.search(name):
                unexpected.append(name)
        elif place in found:
            raise ModelError(f"{where}: holds {place.own} twice, under another name too")
        else:
            found[place] = name
    if unexpected:
        raise ModelError(
            f"{where}: holds {listed(unexpected)}, unknown to a {anatomy.family} model of this "
            "config.json"
        )
    whole = {place.own for place in found if place.whole}
    for place in found:
        if place.own in whole and not place.whole:
            raise ModelError(f"{where}: holds {place.own} twice, whole and in parts")
    return found, dropped


def _take_aliases(found: dict[Place, str]) -> list[tuple[str, str]]:
    """Remove tied tensors from `found`; one replaces its owner if that is missing.

    Returns the names of (alias, owner) where both are present.
    """
    twins = []
    for alias in [place for place in found if place.alias]:
        owner, stand_in = replace(alias, alias=False), found.pop(alias)
        if owner in found:
            twins.append((stand_in, found[owner]))
        else:
            found[owner] = stand_in
    return twins


def _check_shape(candidate: Candidate, tensor: TensorRange) -> None:
    if candidate.shape != tensor.shape:
        raise ModelError(
            f"{candidate.where} has shape {list(candidate.shape)}, but config.json asks for "
            f"{list(tensor.shape)}"
        )


def _check_kind(candidate: Candidate, tensor: TensorRange, dtypes: Collection[torch.dtype]) -> None:
    _check_shape(candidate, tensor)
    if candidate.dtype not in dtypes:
        name = str(candidate.dtype).removeprefix("torch.")
        raise ModelError(
            f"{candidate.where} is {name}; "
            "training needs the unquantised model in bf16, fp16 or fp32"
        )
