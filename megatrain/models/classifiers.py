"""Reward models: a language model whose head gives a score instead of logits.

They are transformers' classes for sequence classification, with one label. The score of a sequence
is that of its last token that is no padding; what follows the last layer mixes no tokens, so every
token has one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatrain.errors import ModelError

ENDING = "ForSequenceClassification"


def is_classifier(config: Any) -> bool:
    """True if a configuration names a class for sequence classification."""
    return bool(config.architectures) and str(config.architectures[0]).endswith(ENDING)


def as_classifier(config: Any, pad_id: int) -> Any:
    """The configuration of a language model's reward model, or of the same one.

    pad_id: of the tokenizer; transformers takes the last token that is another.

    Raises ModelError where transformers has no such class, or if it has several labels.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES,
    )

    found = copy.deepcopy(config)
    if not is_classifier(config):
        if config.model_type not in CLASSES:
            raise ModelError(
                f"model type {config.model_type!r} has no class for sequence classification in "
                "transformers, so there is no reward model of it; choose another model"
            )
        found.architectures, found.num_labels = [CLASSES[config.model_type]], 1
    if found.num_labels != 1:
        raise ModelError(
            f"{found.architectures[0]} has {found.num_labels} labels; a reward model has one"
        )
    found.get_text_config().pad_token_id = pad_id
    return found


def as_language_model(config: Any) -> Any:
    """The configuration of the language model that a reward model is made of; others as they are.

    The layers are the same.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if not is_classifier(config):
        return config
    found = copy.deepcopy(config)
    name = CAUSAL.get(config.model_type)
    found.architectures = [name] if name else None
    return found


@contextmanager
def unwarned() -> Iterator[None]:
    """For the first run of a head: transformers warns once of padding in embeddings, but single
    positions have none."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
