"""What a family does with tokens that it should not see, tried on a small model of random values.

Masks and shapes do not tell: a layer that attends to later tokens gets no mask, and the state of a
recurrent layer crosses from one packed document into the next beside a mask that separates them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.models.documents import documents_known, documents_of, none_found
from megatrain.models.meta import torch_paths
from megatrain.models.plain import plain_model, small_scale
from megatrain.models.shrink import shrink

TOKENS = 8
NOISE = 1e-4  # of the largest logit: rounding moves one less


@dataclass(frozen=True)
class Behaviour:
    """How far logits move that should not, as a share of the largest.

    Attributes:
        ahead: when only the last token changes, before it.
        between: of a document, when others are packed before it; None: the family takes no
            positions.
    """

    ahead: float
    between: float | None

    @property
    def causal(self) -> bool:
        """No token sees a later one."""
        return self.ahead <= NOISE

    @property
    def separates(self) -> bool:
        """No document sees another one in its sequence."""
        return self.between is not None and self.between <= NOISE


_KNOWN: dict[str, Behaviour | None] = {}


def behaviour_of(
    model: Any, stack: nn.ModuleList, trust_remote_code: bool = False
) -> Behaviour | None:
    """How a family behaves, found once in a process; None if its small model does not tell.

    Args: as `shrink`.
    """
    config = model.config
    attention = config._attn_implementation
    key = json.dumps([type(model).__name__, attention, config.to_dict()], default=str)
    if key not in _KNOWN:
        try:
            with small_scale():
                small = shrink(config, stack, attention, trust_remote_code)
                _KNOWN[key] = observe(small, attention, trust_remote_code)
        except ModelError:
            _KNOWN[key] = None
    return _KNOWN[key]


def observe(config: Any, attention: str, trust_remote_code: bool = False) -> Behaviour:
    """What the model of a small configuration does.

    Raises ModelError if it does not run, or not in numbers.
    """
    model = plain_model(config, attention=attention, trust_remote_code=trust_remote_code)
    vocabulary, half = config.get_text_config().vocab_size, TOKENS // 2
    ids = torch.randint(vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    others = (ids + vocabulary // 2) % vocabulary  # another token in every place
    last_changed = torch.cat([ids, torch.cat([ids[:, :-1], others[:, -1:]], dim=1)])
    first_changed = torch.cat([ids, torch.cat([others[:, :half], ids[:, half:]], dim=1)])
    logits = logits_of(model, last_changed)
    if not logits.isfinite().all():
        raise ModelError("its logits are not finite")
    ahead = moved(logits[0, :-1], logits[1, :-1])
    (alone,) = logits_of(model, ids[:, half:])
    positions = (torch.arange(TOKENS) % half).expand(2, -1)
    try:
        one, another = logits_of(model, first_changed, positions)[:, half:]
    except ModelError:  # it takes no positions
        return Behaviour(ahead, None)
    return Behaviour(ahead, max(moved(one, another), moved(one, alone)))


@torch.no_grad()
def logits_of(model: nn.Module, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits [rows, tokens, vocab]. `positions`: of packed documents. Raises ModelError."""
    given = {} if positions is None else {"position_ids": positions}
    try:
        with torch_paths(), documents_known(none_found if positions is None else documents_of):
            logits: Tensor = model(input_ids=ids, use_cache=False, **given).logits
    except Exception as error:  # whatever a family's code raises
        raise ModelError(f"it does not run ({type(error).__name__}: {error})") from error
    return logits


def moved(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((a - b).abs().max() / b.abs().max())


def refuse_looking_ahead(model: Any, behaviour: Behaviour | None) -> None:
    """Raise ModelError if tokens see later ones, which they are to predict."""
    if behaviour is None or behaviour.causal:
        return
    encoder = model.config.to_dict().get("is_decoder") is False
    raise ModelError(
        f"{type(model).__name__} shows every token the ones it should predict: earlier logits move "
        f"by {behaviour.ahead:.2g} of the largest when the last token changes; "
        + ("set is_decoder to true in config.json" if encoder else "it is no causal language model")
    )
