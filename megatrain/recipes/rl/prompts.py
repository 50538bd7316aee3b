"""Prompts that are answered in a run, with the columns that reward functions are given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np

from megatrain.config import Config
from megatrain.data.build import hold_out, look_for_copies, weighted
from megatrain.data.cache import hash64
from megatrain.data.files import RawRow
from megatrain.data.formats import ABOUT_CHATS, renamed
from megatrain.data.rows import Counts, TokenRows
from megatrain.data.samples import MEDIA, PROMPTS, RowError, asked_in, is_given, type_name
from megatrain.data.sources import Part, open_source
from megatrain.data.template import Scene, Template, Toolbox
from megatrain.data.workers import fenced
from megatrain.errors import ConfigError, DataError, RewardError
from megatrain.heartbeat import beat, may_end_here
from megatrain.recipes.model import Model, parts_in
from megatrain.recipes.rl.judges import Beginning, Judges
from megatrain.recipes.rl.own_answers import answered_rows
from megatrain.recipes.sample import encoded, positions_of

# Arguments of reward functions, beside the columns.
GIVEN: tuple[str, ...] = ("prompts", "completions", "completion_ids", "environments")
GIVEN += ("trainer_state", "log_extra", "log_metric")
UNSUITED = (
    "the model's chat template leaves out tools, calls or results, or its calls are of a form that "
    "is not read: neither its tokenizer's response_template nor <tool_call>; choose a model that "
    "was trained to call tools, or set data.chat_template"
)
Box = tuple[Toolbox, Judges] | None


@dataclass(frozen=True, eq=False)
class PromptRows(TokenRows):
    """Prompts as rows without targets. prompts: those of the flat arrays. toolbox: of their
    answers; None: these call no tools."""

    prompts: Sequence[Prompt] = ()
    toolbox: Toolbox | None = None

    def prompt(self, index: int) -> Prompt:
        return self.prompts[int(self.chosen[index])]


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt, and what reward functions are given: a text or turns; further columns.
    begins: what an environment is reset with."""

    ids: list[int]
    asked: str | list[dict[str, Any]]
    columns: Mapping[str, Any]
    where: str
    begins: Beginning | None = None


def read_prompt_rows(
    config: Config, model: Model, day: date
) -> tuple[PromptRows, PromptRows | None]:
    """The prompts to train on, and those held out. Raises DataError."""
    data, seed = config.data, config.train.seed
    parts = parts_in(config, data.train)
    tokenizer = model.tokenizer
    held: Any = None
    template = Template(tokenizer, day) if tokenizer.chat_template else None
    with ExitStack() as stack:
        box = _open_box(config, tokenizer, template, stack)
        rows: Any = _read(config, model, parts, template, box)
        if isinstance(data.eval, tuple):
            held = _read(config, model, parts_in(config, data.eval), template, box)
    if isinstance(data.eval, int | float):
        rows, held = hold_out(rows, data.eval, seed)
    rows = weighted(rows, parts, seed)
    if isinstance(data.eval, tuple):
        look_for_copies(rows, held)
    return rows, held


def _open_box(config: Config, tokenizer: Any, template: Template | None, stack: ExitStack) -> Box:
    """A config's tools, if any, and what resets its environments until the stack closes. Raises
    ConfigError for tools that cannot be imported or described, or that the model cannot call."""
    if not config.tools.files:
        return None
    judges = stack.enter_context(Judges((), processes=1, tools=config.tools))
    try:
        schemas, rewarding = judges.described()
        if not (config.rewards.functions or rewarding):
            raise RewardError("rewards.functions is empty, and no get_reward rewards answers")
        if template:
            box = Toolbox(template, tokenizer, schemas, rewarding)
            if fenced(box.suits):
                return box, judges
        raise RewardError(UNSUITED)
    except (RewardError, RowError) as error:
        raise ConfigError(f"{config.where('tools')}: {error}") from None


def _read(
    config: Config, model: Model, parts: list[Part], template: Template | None, box: Box
) -> PromptRows:
    source = open_source(parts, config.data.split)
    counts, prompts = Counts(), list[Prompt]()
    counts.choices.extend(source.notes)
    for row in source.read():
        counts.read += 1
        may_end_here()
        beat()
        try:
            prompts.append(_prompt_of(row, config, model, template, box))
        except (RowError, RewardError, ConfigError) as error:
            message = f"{row.where}: {error}"
            if config.data.on_bad_row == "refuse":
                raise DataError(f"{message}; or set data.on_bad_row: skip") from None
            counts.add_bad(message)
            continue
        counts.keep(row.part)
    if not prompts:
        bad = f"; the first: {counts.first_bad[0]}" if counts.first_bad else ""
        raise DataError(f"{source.name}: holds no prompt{bad}")
    ids = [one.ids for one in prompts]
    contexts = [hash64(np.asarray(one, np.int32).tobytes()) for one in ids]
    columns = [json.dumps(one.columns, sort_keys=True, default=repr).encode() for one in prompts]
    hashes = [hash64(one.to_bytes(8) + more) for one, more in zip(contexts, columns, strict=True)]
    rows = vars(answered_rows(ids, [[]] * len(ids), [False] * len(ids)))
    rows = {**rows, "counts": counts, "kind": PROMPTS}
    rows |= {"hashes": np.array(hashes, np.uint64), "contexts": np.array(contexts, np.uint64)}
    return PromptRows(**rows, prompts=prompts, toolbox=box[0] if box else None)


def _prompt_of(
    row: RawRow, config: Config, model: Model, template: Template | None, box: Box
) -> Prompt:
    """The prompt of a row: a text as it is, unless `data.prompts` makes a turn of it, and turns in
    the model's chat format. Raises RowError, RewardError and ConfigError."""
    if row.problem is not None:
        raise RowError(row.problem)
    value = renamed(row.value, config.data.columns or {})
    if not isinstance(value, Mapping):
        raise RowError(f"expected an object, found {type_name(value)}")
    for name in (*GIVEN, *MEDIA, *ABOUT_CHATS):
        if name in value and (name in GIVEN or is_given(value[name])):
            reason = "reward functions get their own, and prompts are texts or turns; rename it"
            raise RowError(f"field {name!r}: {reason}")
    given = value.get("prompt")
    name = "messages" if given is None else "prompt"
    turns = asked_in({"messages" if isinstance(given, list) else name: value.get(name)})
    columns = {key: value[key] for key in value if key != name}
    answer = config.policy.max_completion_length
    begins: Beginning | None = None
    if as_text := isinstance(given, str) and config.data.prompts != "chat":
        if box is not None:
            raise RowError("is a text, and tools are called in turns; set data.prompts: chat")
        ids = encoded(model.tokenizer, given, special=True)
    elif template is None:
        raise RowError("has turns, and the model has no chat template; give a text as `prompt`")
    else:
        if box and config.tools.environment_factory:
            asks = {**columns, "prompt": given or turns}
            begins = asks, box[1].added(asks)
            content = turns[-1]["content"] + (begins[1] or "")
            turns = [*turns[:-1], {**turns[-1], "content": content}]
        scene = Scene(tuple(turns), tools=box[0].schemas if box else ())
        text = fenced(lambda: template.render(scene, generation_prompt=True))
        ids = encoded(model.tokenizer, text, special=False)
    most = min(config.train.seq_len, positions_of(model) or config.train.seq_len)
    if not 0 < len(ids) <= most - answer:
        room = f"{most - answer} beside an answer of {config.method}.max_completion_length {answer}"
        raise RowError(f"the prompt has {len(ids)} tokens, and there is room for 1 to {room}")
    return Prompt(ids, str(given) if as_text else [*turns], columns, row.where, begins)


def planned_for(config: Config, *sets: PromptRows | None) -> Config:
    """The same config, whose rows are as long as the longest prompt and the longest answer."""
    longest = max(int(rows.lengths.max()) for rows in sets if rows is not None)
    longest += config.policy.max_completion_length
    train = config.train.model_copy(update={"seq_len": longest})
    return config.model_copy(update={"train": train})
