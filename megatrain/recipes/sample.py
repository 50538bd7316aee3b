"""Answers of a model: the summary's sample, `eval.prompts` and `megatrain generate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from megatrain.config import Config
from megatrain.config.fields import check_prompts
from megatrain.data.rows import Rows, TokenRows
from megatrain.data.samples import MARK, Picture, Turns, pictures_in
from megatrain.data.template import Template
from megatrain.data.workers import fenced
from megatrain.engine.engine import Engine
from megatrain.engine.rollout.decode import Answer, AnswerRequest
from megatrain.engine.rollout.draw import Draw
from megatrain.errors import ConfigError, DataError, ModelError, logger
from megatrain.heartbeat import doing
from megatrain.models.family import longest_sequence
from megatrain.models.pretrained import stop_ids, with_stops
from megatrain.recipes.model import Model
from megatrain.recipes.signals import StopRequest

SAMPLE_TOKENS = 48
ANSWERING = "answering"
GREEDY = Draw(temperature=0.0)
QUESTION = "QUESTION"  # stands for one, in a template
EvalPrompt = tuple[Turns, list[int]]  # a conversation, or what a row begins with; its token ids

TEXT_PROMPT_TOKENS = 32  # of a row without turns, at most: the rest is up to the model


def draw_of(temperature: float = 0.0, top_p: float | None = None, seed: int | None = None) -> Draw:
    """The choice of the next token, as a user asks for it: the likeliest at temperature 0, else
    drawn, equally for equal seeds. Raises ConfigError for numbers out of range, and for others at
    temperature 0, where they would have no effect.

    top_p: of the likeliest tokens that together have this probability; None: of all.
    seed: None: 0.
    """
    if not (0 <= temperature < math.inf):
        wanted = "must be a number of at least 0, where 0 takes the likeliest token"
        raise ConfigError(f"--temperature: {wanted}, not {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"--top-p: must be above 0 and at most 1, not {top_p}")
    for name, value in {"--top-p": top_p, "--seed": seed}.items():
        if value is not None and temperature == 0:
            raise ConfigError(
                f"{name}: has no effect at temperature 0, where nothing is drawn; add "
                "--temperature 0.7, for example"
            )
    return Draw(seed=seed or 0, temperature=temperature, top_p=top_p)


def answer(
    engine: Engine,
    model: Model,
    turns: Turns,
    max_new_tokens: int,
    draw: Draw = GREEDY,
    show: Callable[[str], object] = str,
    ids: list[int] | None = None,
) -> str:
    """Answer to turns in the model's chat format; without one the continuation of the only turn.
    show: gets the text in pieces of whole words as it grows. ids: the turns' tokens, if known."""
    ids = ids_of(model, turns) if ids is None else ids
    with doing(ANSWERING):
        made = written(engine.rollout, model, turns, ids, max_new_tokens, draw, show)
    if made.finish == "length" and len(made.ids) < max_new_tokens:
        logger.warning(
            f"the answer is cut after {len(made.ids)} tokens: with its prompt it has the "
            f"{positions_of(model)} positions of this model"
        )
    return text_of(model, made.ids)


def user(prompt: str, pictures: Sequence[Picture] = ()) -> dict[str, Any]:
    """A question, behind its pictures."""
    seen = {"pictures": pictures} if pictures else {}
    return {"role": "user", "content": MARK * len(pictures) + prompt, **seen}


def images_in(model: Model, turns: Turns, ids: list[int]) -> dict[str, torch.Tensor]:
    """The arguments of the model's forward for all pictures of turns, whose tokens are `ids`."""
    pictures = pictures_in(turns)
    if not pictures or model.sight is None:
        return {}
    types = {k: torch.from_numpy(v) for k, v in model.sight.types(np.array([ids])).items()}
    return types | model.sight.inputs([pictures])


def system_turns(model: Model, text: str | None) -> list[dict[str, str]]:
    """The turn of a system prompt, if any. Raises ModelError where the template has none."""
    if text is None:
        return []
    tokenizer, turns = model.tokenizer, [{"role": "system", "content": text}]
    if tokenizer.chat_template is None:
        raise ModelError("--system: the model has no chat template, so no place for it")
    try:
        takes = rendered(tokenizer, [*turns, user("?")]) != rendered(tokenizer, [user("?")])
    except ModelError as error:
        raise ModelError(f"--system: {error}; put it into the prompt") from error
    if not takes:
        raise ModelError("--system: the chat template leaves it out; put it into the prompt")
    return turns


def ids_of(model: Model, turns: Turns, what: str = "the prompt") -> list[int]:
    """`rendered_ids`; raises ConfigError for more than the model can read and answer."""
    ids = rendered_ids(model, turns, what)
    if len(ids) >= (longest := positions_of(model) or math.inf):
        raise ConfigError(
            f"{what} has {len(ids)} tokens, and the model reads no more than {longest}, its answer "
            "included; shorten it"
        )
    return ids


def rendered_ids(model: Model, turns: Turns, what: str = "the prompt") -> list[int]:
    """Token ids of a prompt in the model's chat format; without one, of its only turn. Raises
    ModelError for turns that cannot be rendered."""
    tokenizer, text = model.tokenizer, turns[0]["content"]
    if chats := tokenizer.chat_template is not None:
        text = rendered(tokenizer, turns)
        if (pictures := pictures_in(turns)) and model.sight is not None:
            text, _ = model.sight.expanded(text, pictures)
    elif len(turns) > 1:
        raise ModelError(f"{what}: has several turns, and the model has no chat template for them")
    return encoded(tokenizer, text, special=not chats, what=what)


def encoded(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool, what: str = "the prompt"
) -> list[int]:
    """Token ids of a text. special: with those that the tokenizer puts around it, which a chat
    template writes itself. Raises ConfigError for what is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:  # halves of characters, which stand for bytes that are none
        raise ConfigError(f"{what}: is no UTF-8 text; convert it") from None

    def ids() -> list[int]:
        return list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)

    return fenced(ids, (f"{what}: the tokenizer", "for it; write another"))


def check_sample_prompt(config: Config, model: Model) -> None:
    """Raise ConfigError for a `sample_prompt` that the model cannot answer."""
    if config.sample_prompt is not None:
        try:
            ids_of(model, [user(config.sample_prompt)])
        except (ConfigError, ModelError) as error:
            raise ConfigError(f"{config.where('sample_prompt')}: {error}") from error


def eval_prompts(config: Config, model: Model) -> list[EvalPrompt]:
    """Read `eval.prompts`. Raises DataError for one that leaves no room for an answer."""
    new, found = config.eval.max_new_tokens, list[EvalPrompt]()
    where, longest = config.where("eval.prompts"), positions_of(model)
    for number, turns in enumerate(check_prompts(config), 1):
        ids = ids_of(model, turns, f"{where}: prompt {number}")
        if len(ids) + new > (longest or math.inf):
            raise DataError(
                f"{where}: prompt {number} has {len(ids)} tokens, which with an answer of "
                f"eval.max_new_tokens {new} exceed the {longest} that the model reads; shorten "
                "one of them"
            )
        found.append((turns, ids))
    return found


def prompts_of_rows(config: Config, model: Model, rows: Rows | None) -> list[EvalPrompt]:
    """The first `eval.prompts` of the rows that leave room for an answer, if that is a number; a
    warning says if they are fewer."""
    wanted = config.eval.prompts
    if not isinstance(wanted, int) or rows is None:
        return []
    room = (positions_of(model) or math.inf) - config.eval.max_new_tokens
    every = (context_of(model, rows, number) for number in range(len(rows)))
    found = list(islice((one for one in every if len(one[1]) <= room), wanted))
    if len(found) < wanted:
        where = config.where("eval.prompts")
        logger.warning(f"{where}: {len(found)} of {wanted} are answered, as rows are few or long")
    return found


def context_of(model: Model, rows: Rows, number: int) -> EvalPrompt:
    """A row up to its answer; of a text its beginning."""
    row, mask = rows.row(number)
    context = min(TEXT_PROMPT_TOKENS, len(row) // 2)
    if not mask[:2].any():
        context = int(mask.argmax()) if mask.any() else len(row)
    ids = row[: max(1, context)].tolist()
    pictures = rows.pictures(number, 0) if isinstance(rows, TokenRows) else ()
    return [{**user("", pictures), "content": question_in(model, ids)}], ids


def question_in(model: Model, ids: list[int]) -> str:
    """The text of a row's context, without what the chat template puts around a question."""
    text = str(model.tokenizer.decode(ids, skip_special_tokens=True))
    with suppress(ConfigError, DataError, ModelError):
        framed = model.tokenizer.decode(ids_of(model, [user(QUESTION)]), skip_special_tokens=True)
        before, _, after = str(framed).partition(QUESTION)
        if text.startswith(before) and text.endswith(after):
            text = text[len(before) : len(text) - len(after)]
    return text.strip()


def answers_to(
    prompts: Sequence[EvalPrompt],
    engine: Engine,
    model: Model,
    max_new_tokens: int,
    stop: StopRequest,
) -> list[dict[str, Any]] | None:
    """Answers with their prompts, for samples.jsonl; None if asked to stop."""
    requests = [
        AnswerRequest(number, ids, (0,), max_new_tokens, images_in(model, turns, ids))
        for number, (turns, ids) in enumerate(prompts)
    ]
    if not prompts:
        return []
    written = dict[int, str]()
    with doing(ANSWERING):
        for one in engine.rollout(requests, GREEDY, end_tokens(model)):
            written[one.key] = text_of(model, one.ids)
            if stop.here and engine.world.is_alone:
                return None
    if stop.came():
        return None
    asked = (turns if len(turns) > 1 else turns[0]["content"] for turns, _ in prompts)
    return [{"prompt": one, "answer": written[n]} for n, one in enumerate(asked)]


def positions_of(model: Model) -> int | None:
    """Tokens that the model can read at a time; None for any number."""
    return longest_sequence(model.config.get_text_config())


def rendered(tokenizer: PreTrainedTokenizerBase, turns: Turns) -> str:
    """The prompt in the chat's format. Raises ModelError where the template refuses it."""

    def render() -> str:
        how: Any = {"tokenize": False, "add_generation_prompt": True}
        try:
            bare = [{k: v for k, v in turn.items() if k != "pictures"} for turn in turns]
            return str(tokenizer.apply_chat_template(Template(tokenizer).wanted(bare), **how))
        except MemoryError:  # the limit of a worker
            raise
        except Exception as error:  # noqa: BLE001  whatever the code of a template does
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"the chat template refuses this prompt: {reason}") from None

    return fenced(render)


def written(
    rollout: Callable[..., Iterator[Answer]],
    model: Model,
    turns: Turns,
    ids: list[int],
    max_new_tokens: int,
    draw: Draw,
    show: Callable[[str], object],
    key: int = 0,
) -> Answer:
    """The answer to turns, whose tokens are `ids`, within the model's positions. rollout: as
    `Engine.rollout`."""

    class Words(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            show(text)

    words: Any = Words(model.tokenizer, skip_special_tokens=True)
    ends, shown = end_tokens(model), 0
    room = int(min(max_new_tokens, (positions_of(model) or math.inf) - len(ids)))

    def look(_request: AnswerRequest, _number: int, tokens: list[int]) -> bool:
        nonlocal shown
        for token in tokens[shown:]:
            words.put(torch.tensor([token]))
        shown = len(tokens)
        return False

    request = AnswerRequest(key, ids, (0,), room, images_in(model, turns, ids))
    (made,) = rollout([request], draw, ends, look)
    words.end()
    return made


def text_of(model: Model, tokens: list[int]) -> str:
    return str(model.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def end_tokens(model: Model) -> list[int]:
    """Tokens that end an answer: those at which the saved model stops, too."""
    generation, _ = with_stops(model.config, model.tokenizer, model.generation)
    return stop_ids(generation or model.config)


def sample(
    engine: Engine, model: Model, held_out: Rows | None, prompt: str | None
) -> tuple[str | None, str | None]:
    """(prompt, answer) for the summary, or (None, None) if there is nothing to ask, or nobody.
    prompt: the config's; by default the context of the first held-out row."""
    if prompt is not None:
        return prompt, answer(engine, model, [user(prompt)], SAMPLE_TOKENS)
    if held_out is None or engine.anatomy.labels is not None:
        return None, None
    turns, ids = context_of(model, held_out, 0)
    return turns[0]["content"], answer(engine, model, turns, SAMPLE_TOKENS, ids=ids)
