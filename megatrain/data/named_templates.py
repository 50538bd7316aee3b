"""Chat templates by name, for models that come without one or with the wrong one."""

from __future__ import annotations

import re
from os.path import expanduser  # leaves `~nobody` as it is, where Path's raises
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.data.template import ANSWERED, FOLLOWED, Template
from megatrain.data.workers import fenced
from megatrain.errors import DataError, if_forbidden

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The token that ends a turn, by the name of the template; None: the tokenizer's eos_token.
TEMPLATES = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
    "mistral": None,
    "alpaca": None,
}
FOLDER = Path(__file__).parent / "templates"

# What looks like a special token in a rendered conversation.
TOKEN = re.compile(r"<\|[^\s<>|]+\|>|<｜[^\s<>｜]+｜>|</?s>|<(?:start|end)_of_[a-z]+>")


def find_template(name: str) -> str:
    """The source of a template by name, or of a file. Raises DataError if there is neither."""
    path = Path(expanduser(name))
    if name in TEMPLATES:
        path = FOLDER / f"{name}.jinja"
    else:
        with if_forbidden(DataError, path):
            there = path.is_file()
        if not there:
            known = ", ".join(TEMPLATES)
            raise DataError(f"{name}: no such file, and no such name; known names are {known}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text: {error}") from error


def use_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give a tokenizer the chat template of this name or file.

    Raises DataError where that does not exist, renders no conversation, or writes tokens that the
    tokenizer does not have.
    """
    tokenizer.chat_template = find_template(name)
    template = Template(tokenizer)

    def tried() -> str:
        template.render(ANSWERED)
        return template.render(FOLLOWED, generation_prompt=True)

    try:
        text = fenced(tried)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    for token in dict.fromkeys(TOKEN.findall(text)):
        if len(tokenizer.encode(token, add_special_tokens=False)) != 1:
            raise DataError(
                f"{name}: the tokenizer has no token {token}, which this chat template writes; use "
                "a template whose tokens it has, or the tokenizer of a chat model"
            )
