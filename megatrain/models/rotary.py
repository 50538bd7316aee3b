"""Rotary embeddings whose factors follow the longest sequence they see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from megatrain.data.micro_batches import Regime, Regimes


def regimes_of(config: Any) -> Regimes:
    """At which lengths the factors of a model change; none where they never do."""
    text = config.get_text_config()
    found = set()
    for rope in rope_kinds(text):
        if rope.get("rope_type") == "longrope":
            found.add(Regime(rope["original_max_position_embeddings"]))
        elif "dynamic" in rope.get("rope_type", ""):
            found.add(Regime(text.max_position_embeddings, exact=True))
    return tuple(sorted(found, key=lambda regime: (regime.limit, regime.exact)))


def rope_kinds(text: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a model, or of each type of its layers; empty without any."""
    given = getattr(text, "rope_parameters", None) or {}
    return [given] if "rope_type" in given else [one for one in given.values() if one]


def longest_sequence(text: Any) -> int | None:
    """Positions that a model can read; None where its configuration names no limit.

    Where factors are stretched (YaRN, linear, dynamic NTK), these are as many times the positions
    that it was trained on; longrope and Llama 3 state the stretched number themselves.
    """
    stated: int | None = getattr(text, "max_position_embeddings", None)
    if stated is None:
        return None
    stretched = [stated]
    for rope in rope_kinds(text):
        if rope.get("rope_type") in ("yarn", "linear", "dynamic"):
            trained = rope.get("original_max_position_embeddings") or stated
            stretched.append(int(rope.get("factor", 1.0) * trained))
    return max(stretched)


def growing(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """(module, layer type) of factors that grow with the longest sequence so far: dynamic NTK.

    The layer type is a prefix of the buffers' names; empty where all layers share factors.
    """
    found = []
    for module in modules:
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            kinds = {"": kinds}
        for layer, kind in (kinds or {}).items():
            if "dynamic" in kind:
                found.append((module, f"{layer}_" if layer else ""))
    return found


def forget_lengths(growing: Iterable[tuple[Any, str]]) -> None:
    """Let the factors follow from the next sequences alone, not from longer ones before them."""
    for module, layer in growing:
        module._buffers[f"{layer}inv_freq"] = module._buffers[f"{layer}original_inv_freq"]
        setattr(module, f"{layer}max_seq_len_cached", module.original_max_seq_len)
