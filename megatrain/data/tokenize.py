"""Samples to token ids with a target mask: which tokens the loss is on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data.chat import ChatTemplate, Marked
from megatrain.data.fields import RowError
from megatrain.data.rows import IdArray, MaskArray
from megatrain.data.samples import Chat, Document, Sample, Text, texts_of
from megatrain.data.template import CharSpan
from megatrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAIN_ON = ("assistant", "all")
_PROMPTS = ("text", "chat", "alpaca")
AS_THEY_ARE = "as they are: prompt, completion, end of sequence (data.prompts: chat makes turns)"
STANFORD = "by the Stanford Alpaca prompt, as there is no chat template"
ASKED = "by the Stanford Alpaca prompt (data.prompts: alpaca)"


class Encoder:
    """A tokenizer with its rules of what is a target.

    Conversations go through the chat template, with the loss on what the assistant wrote
    (`train_on="assistant"`) or on everything ("all"). Two texts, prompt and completion, become
    `prompt completion eos` with the loss on completion and eos, unless `prompts` is "chat", which
    makes turns of them; so does an Alpaca row without a template, or with `prompts` "alpaca", its
    prompt in the Stanford words. Documents are `text eos` with the loss on all of it. The first
    token of a row is never a target, since nothing predicts it. Templates that ask for the time
    get `day`.

    Raises DataError when the tokenizer cannot serve: no offsets, or no eos.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        train_on: str = "assistant",
        prompts: str = "text",
        day: date | None = None,
    ) -> None:
        if train_on not in TRAIN_ON:
            raise DataError(f"data.train_on: {train_on!r} is unknown; use {' or '.join(TRAIN_ON)}")
        if prompts not in _PROMPTS:
            raise DataError(f"data.prompts: {prompts!r} is unknown; use {' or '.join(_PROMPTS)}")
        if not tokenizer.is_fast:
            raise DataError(
                f"{tokenizer.name_or_path}: the tokenizer gives no character offsets; use one with "
                "a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.prompts = prompts
        self.bos = tokenizer.bos_token
        self.template = ChatTemplate(tokenizer, day) if tokenizer.chat_template else None

    def marks(self, sample: Sample) -> tuple[Marked, ...]:
        """The texts of a sample: both answers of a pair. Raises RowError, as `mark`."""
        return tuple(map(self.mark, texts_of(sample)))

    def mark(self, sample: Text) -> Marked:
        """A text and its target characters. Raises RowError if it cannot be rendered."""
        if isinstance(sample, Document):
            start = len(sample.before)
            return Marked(
                sample.before + sample.text + sample.after,
                None,
                add_special=sample.begins and not self._has_bos(sample.text),
                eos=sample.ends,
                keep=(start, start + len(sample.text)),
            )
        if self.template is None or self._as_text(sample):
            return self._plain(sample)
        if self.train_on == "all":
            return self.template.whole(sample)
        return self.template.mark(sample)

    def _as_text(self, chat: Chat) -> bool:
        """True if a row of two texts stays such, though there is a template."""
        if chat.literal:
            return self.prompts != "chat"
        return self.prompts == "alpaca" and chat.plain is not None

    def _has_bos(self, text: str) -> bool:
        return bool(self.bos) and text.startswith(str(self.bos))

    def _plain(self, chat: Chat) -> Marked:
        if chat.plain is None and chat.literal:
            raise RowError(
                "a system prompt, tools or variables of the template have no place beside two "
                "texts; set data.prompts: chat to make turns of these"
            )
        if chat.plain is None:
            raise RowError(
                "the tokenizer has no chat template for conversations; name one "
                "(data.chat_template: chatml), or use rows of prompt and completion"
            )
        prompt, completion = chat.plain
        text = prompt + completion
        spans = None if self.train_on == "all" else ((len(prompt), len(text)),)
        wrapping = ASKED if self.template else STANFORD
        wrapping = AS_THEY_ARE if chat.literal else wrapping
        add_special = not self._has_bos(text)
        return Marked(text, spans, add_special=add_special, eos=True, wrapping=wrapping)

    def encode(self, batch: Sequence[Marked]) -> list[tuple[IdArray, MaskArray]]:
        """Ids (int32 [tokens]) and target mask (bool [tokens]) of each text, in order, uncut."""
        encoded: dict[int, tuple[IdArray, MaskArray]] = {}
        for add_special in (False, True):
            chosen = [i for i, marked in enumerate(batch) if marked.add_special == add_special]
            if not chosen:
                continue
            found = self.tokenizer(
                [batch[i].text for i in chosen],
                add_special_tokens=add_special,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # the caller cuts texts that are longer than the model's context
            )
            pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
            for i, (ids, offsets) in zip(chosen, pairs, strict=True):
                encoded[i] = self._finish(batch[i], ids, offsets)
        return [encoded[i] for i in range(len(batch))]

    def _finish(
        self, marked: Marked, ids: list[int], offsets: list[CharSpan]
    ) -> tuple[IdArray, MaskArray]:
        mask = np.ones(len(ids), np.bool_)
        if marked.spans is not None:
            mask = target_mask(offsets, marked.spans)
        tokens = np.asarray(ids, np.int32)
        if marked.keep != (0, len(marked.text)) and marked.keep is not None:
            chosen = tokens_in(offsets, marked.keep)
            tokens, mask = tokens[chosen], mask[chosen]
        if marked.eos and (not len(tokens) or tokens[-1] != self.eos):
            tokens, mask = np.append(tokens, np.int32(self.eos)), np.append(mask, True)
        elif marked.eos:
            mask[-1] = True  # the tokenizer appended it by itself
        mask[:1] = False
        return tokens, mask

    @property
    def eos(self) -> int:
        """The end-of-sequence token. Raises DataError if the tokenizer has none."""
        eos = self.tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise DataError(
                f"{self.tokenizer.name_or_path}: the tokenizer has no eos_token to end a text "
                "with; set one in its files"
            )
        return eos


def target_mask(offsets: Sequence[CharSpan], spans: Sequence[CharSpan]) -> MaskArray:
    """Tokens (character ranges [start, stop), in order) that overlap a span, as bool [tokens].

    A token that straddles a span's start is a target: it holds the answer's first characters.
    Byte-level tokenizers may trim white space off their offsets (to nothing, for a newline), so
    each token is taken to start where the one before it ended.
    """
    if not offsets:
        return np.zeros(0, np.bool_)
    starts, stops = np.asarray(offsets, np.int64).T
    starts = np.minimum(starts, np.concatenate([[0], np.maximum.accumulate(stops)[:-1]]))
    mask = np.zeros(len(stops), np.bool_)
    for start, stop in spans:
        mask |= (starts < stop) & (stops > start)
    return mask


def tokens_in(offsets: Sequence[CharSpan], piece: CharSpan) -> MaskArray:
    """Tokens of a text that belong to a piece of it, as bool [tokens].

    A token belongs where it begins, which is where the one before it ended: so each token belongs
    to one piece, white space and the spaces that a tokenizer puts in front included.
    """
    stops = np.asarray(offsets, np.int64).reshape(-1, 2)[:, 1]
    begins = np.maximum.accumulate(np.concatenate([[0], stops]))[:-1]
    return (begins >= piece[0]) & (begins < piece[1])
