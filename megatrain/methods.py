"""The methods of training: each is one row of a table, and one of `losses.LOSSES`.

Config, loader, loop and planner read the table; nothing else knows a method by its name. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["plain", "pairs", "judged", "prompts"]
RATE, PREFERENCE_RATE, REWARD_RATE = 1e-5, 1e-6, 1e-4  # but for the first TRL's


@dataclass(frozen=True)
class Method:
    """A row of METHODS.

    Attributes:
        kind: of rows: plain (a conversation or a text), pairs (two answers, of which one is
            better), judged (an answer that is wanted or not), or prompts (the model writes the
            answers, and functions reward them).
        learning_rate: where the config has none.
        whole_documents: texts follow each other in full sequences.
        scores: the model has a score for a sequence, and no logits.
        truncation_mode: where the config has none.
        words, task: what it does and what the hub calls that, for a model card.
    """

    kind: Kind
    learning_rate: float = PREFERENCE_RATE
    whole_documents: bool = False
    scores: bool = False
    truncation_mode: str = "keep_start"
    words: str = "Tuned by preferences ({}) from"
    task: str = "text-generation"


METHODS: dict[str, Method] = {
    "sft": Method("plain", RATE, words="Fine-tuned from"),
    "pretrain": Method("plain", RATE, whole_documents=True, words="Pre-trained from"),
    "dpo": Method("pairs"),
    "orpo": Method("pairs"),
    "simpo": Method("pairs"),
    "cpo": Method("pairs"),
    "kto": Method("judged"),
    "reward": Method(
        "pairs",
        REWARD_RATE,
        scores=True,
        truncation_mode="drop",  # a cut answer has another end, and another score
        words="Trained as a reward model from",
        task="text-classification",
    ),
    "grpo": Method("prompts", words="Tuned by rewards ({}) from"),
    "rloo": Method("prompts", words="Tuned by rewards ({}) from"),
    "distill": Method("plain", words="Distilled by a teacher into"),
}
