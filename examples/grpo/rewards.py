"""Rewards of examples/grpo: what a sum is, and how many words an answer has."""

from typing import Any


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for an answer whose first line is the one that was wanted."""
    lines = [text.split("\n")[0].strip() for text in completions]
    return [float(line == wanted) for line, wanted in zip(lines, answer, strict=True)]


def words(completions: list[Any], count: list[int], **columns: Any) -> list[float]:
    """1 for as many words as were asked for, less the further away."""
    texts = [turns[-1]["content"] for turns in completions]
    found = zip(texts, count, strict=True)
    return [max(0.0, 1 - abs(wanted - len(text.split())) / wanted) for text, wanted in found]
