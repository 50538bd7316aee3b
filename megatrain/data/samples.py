"""Samples, made of rows: a conversation, plain text, a pair of answers, or a judged answer.

Each method trains one kind of row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatrain.data.conversations import Message, Tool
from megatrain.methods import METHODS

PLAIN, PAIRS, JUDGED = "plain", "pairs", "judged"


@dataclass(frozen=True)
class _Kind:
    """A kind of row.

    Attributes:
        sides: sequences that a row holds.
        trained: how many of them are trained on: the first ones.
        methods: that take it, as messages name them.
        what: its rows, as messages name them.
    """

    sides: int
    trained: int
    methods: str
    what: str


def _methods(kind: str) -> str:
    names = [
        name
        for name, method in METHODS.items()
        if method.kind == kind and not method.whole_documents
    ]
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


KINDS = {
    PLAIN: _Kind(1, 1, _methods(PLAIN), "rows of one answer"),
    PAIRS: _Kind(2, 2, _methods(PAIRS), "two answers, of which one is better,"),
    JUDGED: _Kind(2, 1, _methods(JUDGED), "answers that are marked as wanted or unwanted"),
}


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
        plain: (prompt, completion) for tokenizers without a chat template.
        literal: the row has two texts, which mean themselves rather than two turns.
        variables: what the row sets of its chat template, such as enable_thinking.
        tools: that the model may call.
        unread: fields of turns that nobody reads.
    """

    messages: tuple[Message, ...]
    plain: tuple[str, str] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    unread: frozenset[str] = frozenset()
    literal: bool = False


@dataclass(frozen=True)
class Document:
    """Plain text. `begins` and `ends` are False where it is a piece of a longer document, of which
    the characters `before` and `after` it are given."""

    text: str
    begins: bool = True
    ends: bool = True
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Pair:
    """A prompt with two answers, each as a conversation of which only the answer is trained on.

    margin: by how much the chosen one is better, None where nobody says.
    """

    chosen: Chat
    rejected: Chat
    margin: float | None = None


@dataclass(frozen=True)
class Judged:
    """A conversation of which only the last answer is trained on, as wanted or as unwanted."""

    chat: Chat
    wanted: bool


Text = Chat | Document
Sample = Text | Pair | Judged


def texts_of(sample: Sample) -> tuple[Text, ...]:
    """The texts of a sample: both answers of a pair, the chosen one first."""
    if isinstance(sample, Pair):
        return sample.chosen, sample.rejected
    return (sample.chat if isinstance(sample, Judged) else sample,)
