"""A calculator, an environment with documents to search, and rewards for examples/tools."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from megatrain.rewards import last_number

OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Work out an expression of numbers, + - * / and brackets.

    Args:
        expression: Such as "(3 + 4) * 12".
    """

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            return OPERATORS[type(node.op)](value(node.operand))
        raise ValueError("only numbers, + - * / and brackets are worked out")

    return f"{value(ast.parse(expression, mode='eval').body):.12g}"


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for an answer whose last turn ends with the wanted number."""
    found = [last_number(turns[-1]["content"]) for turns in completions]
    return [float(number == float(wanted)) for number, wanted in zip(found, answer, strict=True)]


class Library:
    """Documents of a row, which the model searches before it answers."""

    def reset(self, documents: dict[str, str], answer: str, **_: Any) -> str:
        self.documents, self.wanted, self.given = documents, answer.lower(), ""
        return f"\nThere are {len(documents)} documents: {', '.join(documents)}."

    def search(self, word: str) -> str:
        """Name the documents that hold a word.

        Args:
            word: One word, in any case.
        """
        found = [name for name, text in self.documents.items() if word.lower() in text.lower()]
        return ", ".join(found) or "none"

    def read(self, name: str) -> str:
        """Read a document.

        Args:
            name: Its name.
        """
        return self.documents[name]

    def answer(self, text: str) -> str:
        """Give the answer.

        Args:
            text: One or two words.
        """
        self.given = text.lower()
        return "Thank you."

    def get_reward(self) -> float:
        """1 for the wanted answer, 0.1 for another one."""
        return 1.0 if self.given == self.wanted else 0.1 * bool(self.given)
