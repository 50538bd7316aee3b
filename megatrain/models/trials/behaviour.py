"""Trials of tokens that a family should not see, on a small model of random values.

Masks and shapes do not tell: a layer that attends to later tokens gets no mask, and the state of a
recurrent layer crosses from one packed document into the next beside a mask that separates them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megatrain.errors import ModelError
from megatrain.models.meta import torch_paths
from megatrain.models.recorder import (
    OF_TOKENS,
    LayerCall,
    boundaries_of,
    documents_known,
    documents_of,
    none_found,
    of_dtype,
    with_places,
)
from megatrain.models.trials.small import plain_model, shrink, small_scale

TOKENS = 8
NOISE = 1e-4  # of the largest logit: rounding moves one less
ROUNDINGS = 4  # of the largest logit, where kernels compute in few bits


@dataclass(frozen=True)
class Behaviour:
    """The movement of logits that should not move, as a share of the largest."""

    again: float  # when the same is computed once more
    ahead: float  # before the last token, when only that changes
    between: float | None  # of a document, behind others; None: the family takes no positions
    small: Any = None  # the configuration of the model that was tried

    @property
    def causal(self) -> bool:
        """No token sees a later one."""
        return self.ahead <= NOISE

    @property
    def separates(self) -> bool:
        """No document sees another one in its sequence."""
        return self.between is not None and self.between <= NOISE


_KNOWN: dict[tuple[type, str], Behaviour | None] = {}


def behaviour_of(
    model: Any, stack: nn.ModuleList, trust_remote_code: bool = False
) -> Behaviour | None:
    """A family's behaviour, tried once in a process; None if no small model shows it."""
    config = model.config
    attention = config._attn_implementation
    key = type(model), json.dumps([attention, config.to_dict()], default=str)
    if key not in _KNOWN:
        try:
            with small_scale():
                small = shrink(config, stack, attention, trust_remote_code)
                _KNOWN[key] = observe(small, attention, trust_remote_code)
        except ModelError:
            _KNOWN[key] = None
    return _KNOWN[key]


# why: decision 0065
def observe(config: Any, attention: str, trust_remote_code: bool = False) -> Behaviour:
    """Try the model of a small configuration. Raises ModelError if it does not run."""
    model = plain_model(config, attention=attention, trust_remote_code=trust_remote_code)
    ids, others = random_ids(config, TOKENS)
    last_changed = torch.cat([ids, torch.cat([ids[:, :-1], others[:, -1:]], dim=1)])
    logits = logits_of(model, last_changed)
    if not logits.isfinite().all():
        raise ModelError("its logits are not finite")
    again = moved(logits, logits_of(model, last_changed))
    ahead = moved(logits[0, :-1], logits[1, :-1])
    try:
        return Behaviour(again, ahead, across_documents(model), config)
    except ModelError:  # it takes no positions
        return Behaviour(again, ahead, None, config)


def random_ids(config: Any, tokens: int) -> tuple[Tensor, Tensor]:
    """Random token ids [1, tokens], and others in every place."""
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    return ids, (ids + vocabulary // 2) % vocabulary


def why_together(
    small: Any,
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> str | None:
    """The reason for which documents in one sequence see each other though the family's kernels on
    `device` are told where they begin; None: they do not. `small`: its small configuration."""
    options: dict[str, Any] = {"attention": attention, "trust_remote_code": trust_remote_code}
    try:
        with small_scale():
            movement = across_documents(plain_model(small, **options).to(device, dtype), told=True)
    except (ModelError, RuntimeError, AssertionError) as error:  # there may be no such device
        return str(error).splitlines()[0]
    if movement <= max(NOISE, ROUNDINGS * torch.finfo(dtype).eps):
        return None
    return f"its kernels let logits move by {movement:.2g} of the largest"


def across_documents(model: Any, told: bool = False) -> float:
    """`Behaviour.between`, by masks, or by kernels that are `told` where documents begin. Raises
    ModelError if the model takes no positions."""
    half = TOKENS // 2
    ids, others = random_ids(model.config, half)
    positions = (torch.arange(TOKENS) % half)[None]
    # a row at a time, as one kernel or other takes it
    (twice,) = logits_of(model, torch.cat([ids, ids], dim=1), positions, told)
    (after,) = logits_of(model, torch.cat([others, ids], dim=1), positions, told)
    # a document alone: other kernels might round otherwise, but the first of two is alone, too
    return max(moved(twice[half:], after[half:]), moved(twice[:half], twice[half:]))


@torch.no_grad()
def logits_of(
    model: Any, ids: Tensor, positions: Tensor | None = None, told: bool = False
) -> Tensor:
    """Logits [rows, tokens, vocab], computed by transformers' own code in torch, or else by kernels
    that are told where documents begin. `positions`: of packed documents. Raises ModelError."""
    given = {"input_ids": ids}
    if positions is not None:
        given = with_places(model, given | {"position_ids": positions})
    if told and positions is not None:
        given |= boundaries_of(positions)
    given = {name: tensor.to(model.device) for name, tensor in given.items()}
    find = none_found if positions is None else documents_of
    try:
        with nullcontext() if told else torch_paths(), documents_known(find):
            outputs = model(use_cache=False, **given)
            logits: Tensor = outputs.logits
    except Exception as error:  # whatever a family's code raises
        raise ModelError(f"it does not run ({type(error).__name__}: {error})") from error
    return logits


def images_pack(
    dtype: torch.dtype,
    embed: Callable[..., Any],
    zeros: AbstractContextManager[None],
    image_row: Mapping[str, Tensor] | None,
) -> bool:
    """True if of a row with an image, twice in one sequence, layers get twice what they get of one,
    and the masks of text: then they keep rows with images apart as they do texts. embed: runs the
    model's forward up to its layers, under `zeros`."""
    if image_row is None:
        return True
    row = {name: of_dtype(value, dtype) for name, value in image_row.items()}
    two = {name: torch.cat([row[name]] * 2, int(name in OF_TOKENS)) for name in row}
    tokens, ids = row["input_ids"].shape[1], torch.zeros_like(two["input_ids"])
    packed = {"position_ids": torch.arange(tokens).repeat(1, 2)}
    with suppress(Exception), zeros, torch.no_grad():  # whatever a family's code raises
        given = (row, packed | {"input_ids": ids}, packed | two)
        calls = zip(*(embed(inputs)[1] for inputs in given), strict=True)
        return all(_laid_together(*of_layer, tokens=2 * tokens) for of_layer in calls)
    return False


def _laid_together(*calls: LayerCall, tokens: int) -> bool:
    """True for the calls of a layer of a document, a text and twice the document, these two in
    sequences of `tokens`, if the last gets twice what the first does, and the text's masks."""
    leaves = (pytree.tree_leaves_with_path((call.args, call.kwargs)) for call in calls)
    one, text, both = (
        {p: leaf for p, leaf in found if isinstance(leaf, Tensor)} for found in leaves
    )

    def expected(path: Any, shape: torch.Size) -> Tensor | None:
        alone = one.get(path)
        if alone is None or shape[-2:] == (tokens, tokens):
            return text.get(path)
        grown = [dim for dim, (a, b) in enumerate(zip(alone.shape, shape, strict=True)) if a != b]
        return torch.cat([alone, alone], grown[0]) if grown else alone

    pairs = [(found, expected(path, found.shape)) for path, found in both.items()]
    same = all(b is not None and a.shape == b.shape and a.equal(b) for a, b in pairs)
    return same and one.keys() <= both.keys()


def moved(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((a - b).abs().max() / b.abs().max())


def refuse_misbehaving(model: Any, behaviour: Behaviour | None) -> None:
    """Raise ModelError if tokens see later ones, or have other logits each time."""
    if behaviour is None:
        return
    if behaviour.again > NOISE:
        raise ModelError(
            f"{type(model).__name__} computes other logits each time: they move by "
            f"{behaviour.again:.2g} of the largest, without dropout; it draws random numbers, "
            "which cannot be repeated when layers are recomputed"
        )
    if behaviour.causal:
        return
    encoder = model.config.to_dict().get("is_decoder") is False
    raise ModelError(
        f"{type(model).__name__} shows every token the ones it should predict: earlier logits move "
        f"by {behaviour.ahead:.2g} of the largest when the last token changes; "
        + ("set is_decoder to true in config.json" if encoder else "it is no causal language model")
    )
