"""A tokenizer's chat template: a program from a conversation to text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time
from functools import cached_property
from os.path import expanduser  # leaves `~nobody` as it is, where Path's raises
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.data.samples import MARK, Chat, Message, RowError, Tool, parsed_calls
from megatrain.data.workers import fenced
from megatrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # transformers' own tag
CharSpan = tuple[int, int]  # characters [start, stop)
STAND_IN = "Zq7vXstandinXv7qZ"  # in no text, and unchanged by trimming
LONGEST_REASON = 400  # characters of an error of a template
# Fields of a turn that are the model's own words besides its content, as templates name them.
OWN_WORDS = ("reasoning_content", "thinking", "reasoning")

# A template asks transformers for the time, and functions cannot be handed to it: so it is given
# one of its own, in which each directive of a format has the value of a day.
CLOCK = "strftime_now"
DIRECTIVES = [f"%-{letter}" for letter in "dmHIMSj"]
DIRECTIVES += [f"%{letter}" for letter in "aAwdebBmyYHIpMSfjUWcxXFT%"]
FIXED_CLOCK = f"""{{%- macro {CLOCK}(format) -%}}
{{%- set said = namespace(text=format) -%}}
{{%- for directive, value in directives.items() -%}}
{{%- set said.text = said.text | replace(directive, value) -%}}
{{%- endfor -%}}
{{{{ said.text }}}}
{{%- endmacro +%}}"""


@dataclass(frozen=True)
class Scene:
    """The input of a template: turns, the row's own variables of the template, and tools."""

    turns: tuple[dict[str, Any], ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()

    def beginning(self, count: int) -> Scene:
        return replace(self, turns=self.turns[:count])

    def with_turn(self, index: int, turn: dict[str, Any]) -> Scene:
        """The same with another turn in this place."""
        return replace(self, turns=(*self.turns[:index], turn, *self.turns[index + 1 :]))

    def with_stand_ins(self, index: int) -> dict[str, Any]:
        """An assistant's turn with another text for what it says, and for the tools' names."""
        turn = self.turns[index]
        said: dict[str, Any] = {n: STAND_IN for n in ("content", *OWN_WORDS) if turn.get(n)}
        if "</think>" in (turn["content"] or ""):  # some templates take it apart there
            said["content"] = f"<think>\n{STAND_IN}\n</think>\n\n{STAND_IN}"
        if calls := turn.get("tool_calls"):
            said["tool_calls"] = [
                {**call, "function": {**call["function"], "name": STAND_IN}} for call in calls
            ]
        return {**turn, **said}


QUESTION = {"role": "user", "content": "question"}
ANSWERED = Scene((QUESTION, {"role": "assistant", "content": STAND_IN}))
FOLLOWED = Scene((*ANSWERED.turns, QUESTION))
CALLS, THINKS = "<tool_call>", "<think>"  # begin a call of Hermes' and Qwen's form, and a thought
ASIDE = re.compile(r"(?s)<(tool_call|think)>.*?(</\1>\s*|\Z)")  # what of a turn is no content
_CALL = {"open": CALLS, "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "json"}
_CALL["transform"] = {"type": "function", "function": "{content}"}
_THOUGHT = {"open": THINKS, "close_pattern": r"</think>\s*", "content": "text"}
_FIELDS = {"reasoning_content": _THOUGHT, "tool_calls": _CALL, "content": {"content": "text"}}
FORM = {"start_anchor_pattern": r"\A", "fields": _FIELDS}  # that one, in transformers' words
UNREADABLE = {"function": {"name": "", "arguments": None}}  # a call that is no JSON
_KEY = "zq7key7qz"  # of the only argument of the call below
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string", "description": "d"}}}
_NAME = "zq7name7qz"
FUNCTION = {"name": _NAME, "description": "d", "parameters": _PARAMETERS}
TOOLS: tuple[Tool, ...] = ({"type": "function", "function": FUNCTION},)
CALL = {"name": _NAME, "arguments": {_KEY: STAND_IN}}
RESULT = {"role": "tool", "content": "result", "name": _NAME, "tool_call_id": "abcdefghi"}
CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    # some templates insist on ids of 9 characters
    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": CALL}],
}
CALLED = Scene((QUESTION, CALLING, RESULT, *ANSWERED.turns[1:]), tools=TOOLS)


def _with_arguments(calls: Any, as_text: bool) -> list[dict[str, Any]]:
    """Calls with their arguments as JSON text, or as they are."""
    found = [{**call, "function": {**call["function"]}} for call in calls]
    for one in (call["function"] for call in found if as_text):
        one["arguments"] = json.dumps(one["arguments"], ensure_ascii=False)
    return found


def in_parts(turns: Iterable[Mapping[str, Any]], all_turns: bool = True) -> list[dict[str, Any]]:
    """Turns whose texts are lists of parts, or those alone that have images."""
    found = [{**turn} for turn in turns]
    for turn in found:
        content = turn.get("content")
        if isinstance(content, str) and (all_turns or MARK in content):
            parts = turn["content"] = []
            for number, text in enumerate(content.split(MARK)):
                parts += [{"type": "image"}] if number else []
                parts += [{"type": "text", "text": text}] if text or MARK not in content else []
    return found


class Template:
    """A tokenizer's chat template, and what its text shows of how it writes turns. `day` is the
    date that it gets when it asks for the time. Rendering may never end: see `workers.fenced`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, day: date | None = None) -> None:
        try:
            self._source: str = tokenizer.get_chat_template()
            # a tokenizer may have another one for tools
            self._with_tools: str = tokenizer.get_chat_template(tools=[dict(TOOLS[0])])
        except ValueError as error:  # several, and none of them the default
            raise DataError(f"{tokenizer.name_or_path}: no default chat template") from error
        self._variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
        if day is not None and CLOCK in self._source + self._with_tools:
            self._source = FIXED_CLOCK + self._source
            self._with_tools = FIXED_CLOCK + self._with_tools
            moment = datetime.combine(day, time())
            self._variables["directives"] = {each: moment.strftime(each) for each in DIRECTIVES}
        self.eos = tokenizer.eos_token or ""
        tokens = tokenizer.added_tokens_decoder.values()
        self._special = {str(token) for token in tokens if token.special}
        specials = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        self._any_special = re.compile(specials or "(?!)")
        # GPT-NeoX adds runs of spaces, which end no turn
        added = sorted(filter(str.strip, map(str, tokens)), key=len, reverse=True)
        any_of = "|".join(map(re.escape, added)) or "(?!)"
        self.next_token = re.compile(rf"\s*({any_of})")
        # an ending may be of several tokens
        self._ending = re.compile(rf"\s*(?:{any_of})*({any_of})")
        self._last_token = re.compile(rf"({any_of})\s*\Z")

    def render(self, scene: Scene, generation_prompt: bool = False) -> str:
        """The conversation as text. Raises RowError where the template refuses it."""
        return self._run(scene, self.wanted(scene.turns), generation_prompt)[0]

    def tried(self, scene: Scene, generation_prompt: bool = False) -> str | None:
        """As `render`; None where the template refuses it, or it has no turns."""
        with suppress(RowError):
            return self.render(scene, generation_prompt) if scene.turns else None
        return None

    def render_marked(self, scene: Scene) -> tuple[str, list[CharSpan]]:
        """The text, and the spans of its `{% generation %}` blocks. Raises RowError."""
        marks = GENERATION.search(self._with_tools if scene.tools else self._source)
        return self._run(scene, self.wanted(scene.turns), False, marks is not None)

    def scene(self, chat: Chat) -> Scene:
        """The conversation as this template wants it."""
        return Scene(tuple(map(self.turn, chat.messages)), chat.variables, chat.tools)

    def turn(self, message: Message) -> dict[str, Any]:
        """The dict that Hugging Face chat templates take."""
        turn = {**message.extra, "role": message.role, "content": message.content}
        if calls := message.extra.get("tool_calls"):
            content, as_text = self._form_of_calls
            turn["content"] = message.content or content
            turn["tool_calls"] = _with_arguments(calls, as_text)
        return turn

    def wanted(self, turns: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Turns as this template wants them: texts, or lists of parts."""
        return in_parts(turns, self._takes_parts)

    @cached_property
    def _takes_parts(self) -> bool:
        """True if it writes contents that are lists of parts, and none that are texts."""
        return not self._writes([*ANSWERED.turns]) and self._writes(in_parts(ANSWERED.turns))

    def _writes(self, turns: list[dict[str, Any]]) -> bool:
        with suppress(RowError):
            text = self._run(ANSWERED, turns)[0]
            return all(turn["content"] in text for turn in ANSWERED.turns)
        return False

    @cached_property
    def _form_of_calls(self) -> tuple[str | None, bool]:
        """(content of a turn that only calls, whether arguments are JSON text) as it wants them.
        Most take objects; templates that append arguments to a text take text, and some look for
        calls only where the content is null."""
        for content, as_text in ((c, t) for c in ("", None) for t in (False, True)):
            calls = _with_arguments(CALLING["tool_calls"], as_text)
            calling = {**CALLING, "content": content, "tool_calls": calls}
            text = self.tried(Scene((QUESTION, calling), tools=TOOLS)) or ""
            # an object as Python writes it, or a text quoted as JSON once more
            garbled = f"'{_KEY}'" in text or f'\\"{_KEY}' in text
            said_none = content is None and "None" in text
            if _NAME in text and STAND_IN in text and not garbled and not said_none:
                return content, as_text
        return "", False

    @cached_property
    def shows_tools(self) -> bool:
        """True if it writes the tools."""
        return _NAME in (self.tried(Scene((QUESTION,), tools=TOOLS), True) or "")

    @cached_property
    def prompts(self) -> bool:
        """True if it writes something for a generation prompt."""
        asked = Scene((QUESTION,))
        bare, prompted = self.tried(asked), self.tried(asked, True)
        return None not in (bare, prompted) and bare != prompted

    @cached_property
    def stop(self) -> str | None:
        """The token that ends an answer, else the one with which the next turn begins, if any."""
        ending = self._ending.match(self._behind_answer(ANSWERED))
        found = ending or self.next_token.match(self._behind_answer(FOLLOWED))
        return found[1] if found else None

    def last_token(self, text: str) -> str | None:
        """The added token with which a text ends, but for white space."""
        found = self._last_token.search(text)
        return found[1] if found else None

    def names(self, variable: str) -> bool:
        """True if its source contains this name."""
        return re.search(rf"\b{re.escape(variable)}\b", self._source + self._with_tools) is not None

    def spelt(self, text: str) -> set[str]:
        """The special tokens that a text spells, and that the tokenizer will read as such."""
        return set(self._any_special.findall(text))

    def ends(self, answer: str) -> bool:
        """True if an answer's last token ends it, as `</tool_call>` does not."""
        last = self.last_token(answer)
        return last is not None and (last == self.stop or last in self._special)

    def _behind_answer(self, scene: Scene) -> str:
        """The text behind the content of an answer; none by a template for another kind of data."""
        return (self.tried(scene) or "").partition(STAND_IN)[2]

    def _run(
        self,
        scene: Scene,
        turns: list[dict[str, Any]],
        generation_prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[CharSpan]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self._with_tools if scene.tools else self._source
        for turn in turns:  # by both names that templates read, as transformers 5.21 has it
            said = next((turn[key] for key in OWN_WORDS if turn.get(key) is not None), None)
            if said is not None:
                turn |= {"thinking": said, **turn, "reasoning_content": said}
        try:
            found: Any = render_jinja_template(  # declared as str, returns (texts, spans)
                conversations=[turns],
                tools=[dict(tool) for tool in scene.tools] or None,
                chat_template=source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=generation_prompt,
                **{**self._variables, **scene.variables},
            )
        except MemoryError:  # the limit of a worker
            raise
        except Exception as error:  # whatever the code of a template does
            reason = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
            raise RowError(f"the chat template refuses this conversation: {reason}") from error
        texts, spans = found
        try:
            texts[0].encode()
        except UnicodeEncodeError as error:  # as JSON can spell it, in tools and variables, too
            half = f"character {error.start} is half of a surrogate pair"
            raise RowError(f"the rendered conversation: {half}") from None
        return texts[0], list(spans[0]) if marks else []


@dataclass(frozen=True)
class Toolbox:
    """The tools of a run in its model's words. Calls are read by the tokenizer's own
    `response_template`, else in the form <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
    """

    template: Template
    tokenizer: Any
    schemas: tuple[Tool, ...]
    rewarding: bool = False  # environments reward answers

    def suits(self) -> bool:
        """True if the template writes tools, calls and results, and calls are read as written."""
        asked = self.template.render(Scene((QUESTION,), tools=self.schemas), True)
        called = self.template.render(Scene((QUESTION, self._calling), tools=self.schemas))
        shown = all(one["function"]["name"] in asked for one in self.schemas)
        answer, before = (self.ids(text) for text in (called.removeprefix(asked), asked))
        read = [one["function"] for one in self.read(answer, before)[1]]
        return shown and read == [CALL] and RESULT["content"] in self.between([RESULT])

    @property
    def _calling(self) -> dict[str, Any]:
        return self.template.turn(Message("assistant", "", extra=CALLING))

    def between(self, results: list[dict[str, Any]]) -> str:
        """The text between the end of a turn that calls, and the next turn's first token."""
        turns = (QUESTION, self._calling, *({**RESULT, **one} for one in results))
        text = self.template.render(Scene(turns, tools=self.schemas), generation_prompt=True)
        return text.partition(STAND_IN)[2].partition(self.template.stop or STAND_IN)[2]

    def ids(self, text: str) -> list[int]:
        """Its tokens; no process is forked for that beside a GPU at work."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def read(
        self, ids: list[int], before: list[int]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The assistant's turn that tokens are behind others, and its calls."""
        own = getattr(self.tokenizer, "response_template", None)
        prefix = self.tokenizer.decode(before)
        ends = own is None and ids and ids[-1] in self.tokenizer.all_special_ids  # by any end
        text = self.tokenizer.decode(ids[:-1] if ends else ids)
        if own is None:  # and a prompt may have begun the thought
            text, prefix = THINKS * prefix.rstrip().endswith(THINKS) + text, ""
        try:
            given = {"prefix": prefix, "tools": [dict(one) for one in self.schemas]}
            found = self.tokenizer.parse_response(text, own or FORM, **given)
            calls = found.pop("tool_calls", None)
            calls = parsed_calls(calls, "tool_calls") if calls else []
        except Exception:  # noqa: BLE001  whatever a model writes
            plain = self.tokenizer.decode(ids, skip_special_tokens=True)
            return {"role": "assistant", "content": plain}, [UNREADABLE] if CALLS in text else []
        content = str(found.get("content") or "").removesuffix(self.tokenizer.eos_token or "")
        if own is None:  # wherever it stands
            content = ASIDE.sub("", text)
        more = {"tool_calls": calls} if calls else {}
        return {**found, "role": "assistant", "content": content, **more}, calls


NAMED_TEMPLATES = ("chatml", "llama3", "gemma", "phi3", "mistral", "alpaca")
FOLDER = Path(__file__).parent / "templates"

# What looks like a special token in a rendered conversation.
TOKEN = re.compile(r"<\|[^\s<>|]+\|>|<｜[^\s<>｜]+｜>|</?s>|<(?:start|end)_of_[a-z]+>")


def find_template(name: str) -> str:
    """The source of a template by name, or of a file. Raises DataError if there is neither."""
    path = FOLDER / f"{name}.jinja" if name in NAMED_TEMPLATES else Path(expanduser(name))
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        known = f"no such file, and no such name; known names are {', '.join(NAMED_TEMPLATES)}"
        raise DataError(f"{name}: {known}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text: {error}") from error


def use_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give a tokenizer the chat template of this name or file. Raises DataError where there is
    none, it renders no conversation, or writes tokens that the tokenizer does not have."""
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
