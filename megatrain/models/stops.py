"""The tokens at which generation stops, which must be those that training ends answers with."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from megatrain.data.chat import ChatTemplate
from megatrain.data.workers import fenced
from megatrain.errors import DataError
from megatrain.models.classifiers import is_classifier

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase


# What templates were found to end turns with: each is asked in a process of its own.
_known: dict[str, tuple[str, ...]] = {}


def ends_of_turns(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The tokens that end an assistant's turns in the chat template, the usual one first.

    Raises TooMuch for a template that takes too long, or too much memory, to tell.
    """
    if not tokenizer.chat_template:
        return ()
    special = sorted(map(str, tokenizer.added_tokens_decoder.values()))
    asked = str((tokenizer.chat_template, tokenizer.special_tokens_map, special))
    if asked not in _known:
        try:
            template = ChatTemplate(tokenizer)
        except DataError:  # none of several is the default
            return ()
        _known[asked] = fenced(lambda: template.stops)
    return _known[asked]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The token that ends an assistant's turn in the chat template, if there is one."""
    return next(iter(ends_of_turns(tokenizer)), None)


def stop_ids(settings: GenerationConfig | PretrainedConfig | None) -> list[int]:
    """The end-of-sequence ids of generation settings, or of a configuration where these lack."""
    ids: Any = getattr(settings, "eos_token_id", None)
    return [token for token in (ids if isinstance(ids, list) else [ids]) if token is not None]


def with_stops(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig | None,
) -> tuple[GenerationConfig | None, list[str]]:
    """(generation settings that stop at what ends an answer, the tokens that they lacked).

    generation: None for a model that has none, for which transformers takes the configuration's. A
        reward model generates nothing, and has none.
    """
    from transformers import GenerationConfig

    if is_classifier(config):
        return None, []
    known = stop_ids(generation or config)
    tokens = dict.fromkeys(filter(None, (tokenizer.eos_token, *ends_of_turns(tokenizer))))
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    lacking = [token for token, number in ids.items() if number not in (None, *known)]
    if not lacking:
        return generation, []
    settings: Any = copy.deepcopy(generation) or GenerationConfig.from_model_config(config)
    all_ids = [*known, *(ids[token] for token in lacking)]
    settings.eos_token_id = all_ids if len(all_ids) > 1 else all_ids[0]
    return settings, lacking


def about_added(tokens: list[str]) -> str:
    """The sentence about tokens that generation settings lacked; empty for none."""
    named = " and ".join(tokens)
    return named and f"{named} ends answers here: generation_config.json, which lacked it, gets it"
