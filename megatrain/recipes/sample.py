"""A look at what the model says: the summary's sampled answer, and `megatrain generate`."""

from __future__ import annotations

import torch

from megatrain.data.dataset import Rows
from megatrain.engine.engine import Engine
from megatrain.models.stops import stop_ids, with_stops
from megatrain.recipes.setup import Model

SAMPLE_TOKENS = 48
TEXT_PROMPT_TOKENS = 32  # of a row without turns, at most: the rest is up to the model


def answer(engine: Engine, model: Model, prompt: str, max_new_tokens: int) -> str:
    """Greedy answer to a user's prompt in the model's chat format; without one its continuation."""
    tokenizer = model.tokenizer
    turns, text = [{"role": "user", "content": prompt}], prompt
    if chats := tokenizer.chat_template is not None:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    # a template writes the special tokens itself
    ids = tokenizer(text, add_special_tokens=not chats).input_ids
    return continuation(engine, model, list(ids), max_new_tokens)


def continuation(engine: Engine, model: Model, ids: list[int], max_new_tokens: int) -> str:
    tokens = engine.generate(torch.tensor([ids]), max_new_tokens, end_tokens(model))
    return str(model.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def end_tokens(model: Model) -> list[int]:
    """Tokens that end an answer: those at which the saved model stops, too."""
    generation, _ = with_stops(model.config, model.tokenizer, model.generation)
    return stop_ids(generation or model.config)


def sample(
    engine: Engine, model: Model, held_out: Rows | None, prompt: str | None
) -> tuple[str | None, str | None]:
    """(prompt, answer) for the summary, or (None, None) if there is nothing to ask.

    prompt: the config's; by default the context of the first held-out row.
    """
    if prompt is not None:
        return prompt, answer(engine, model, prompt, SAMPLE_TOKENS)
    if held_out is None:
        return None, None
    row, mask = held_out.row(0)
    context = min(TEXT_PROMPT_TOKENS, len(row) // 2)
    if not mask[0] and not mask[1]:
        context = int(mask.argmax())
    ids = row[: max(1, context)].tolist()
    question = str(model.tokenizer.decode(ids, skip_special_tokens=True)).strip()
    return question, continuation(engine, model, ids, SAMPLE_TOKENS)
