"""A tokenizer as GGUF files describe it: tokens, merges or scores, and how text is split before."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatrain.errors import ModelError
from megatrain.models.stops import end_of_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# GGUF's types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"  # how sentencepiece writes one
# Gemma's; when it splits there are none left
AT_SPACES: dict[str, Any] = {"type": "Split", "pattern": {"String": " "}, "invert": False}
AT_SPACES |= {"behavior": "MergedWithPrevious"}
BYTES = re.compile("<0x[0-9A-F]{2}>")  # and those that are in no token

# How readers split text, by the name that GGUF has for it: the tokenizer's own patterns, and
# whether a word that is a token is taken whole, whatever the merges say.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBERS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UNPUNCTUATED = " ?[^(\\s|[.,!?…。，、।۔،])]+"
GPT2, DIGITS = "ByteLevel's own", "single digits, then ByteLevel's own"
SPLITS = {
    (GPT2, False): "gpt-2",
    (DIGITS, False): "smollm",
    (_WORDS.replace("NUMBERS", ""), False): "qwen2",
    (_WORDS.replace("NUMBERS", "{1,3}"), True): "llama-bpe",
    (_CASED, True): "tekken",
    (_CONTRACTED, False): "gpt-4o",
    (_UNPUNCTUATED, False): "bloom",
}


@dataclass(frozen=True)
class Vocabulary:
    """What `tokenizer.ggml.*` and `tokenizer.chat_template` say.

    Attributes:
        model: gpt2 (byte-level merges) or llama (sentencepiece's, by scores).
        tokens: texts by id, as many as the embedding has rows.
        ids: by GGUF's names for them: bos, eos, eot, unknown, padding.
    """

    model: str
    split: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None
    scores: list[float] | None
    ids: dict[str, int]
    adds_bos: bool
    adds_eos: bool
    adds_space: bool
    chat_template: str | list[dict[str, str]] | None


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, rows: int) -> Vocabulary:
    """rows: of the embedding. Raises ModelError for a tokenizer that GGUF files cannot say."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    said = {} if backend is None else json.loads(backend.to_str())
    model: dict[str, Any] = said.get("model") or {}
    if model.get("type") != "BPE" or model.get("dropout") or not said:
        raise _refused("it is no byte-pair encoding")
    if any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix")):
        raise _refused("its pieces have prefixes or suffixes")
    known = tokenizer.get_vocab()
    if max(known.values()) >= rows:
        raise _refused(f"it has tokens beyond the {rows:,} rows of the embedding")
    merges = [one.split(" ") if isinstance(one, str) else list(one) for one in model["merges"]]
    if any(" " in half for halves in merges for half in halves):
        raise _refused("its merges contain spaces")
    of_sentencepiece = bool(model.get("byte_fallback"))
    tokens, types = _tokens(known, said, rows)
    if of_sentencepiece:
        split, space = "default", _adds_space(said)
        scores = _scores(tokens, merges)
        for token, text in enumerate(tokens):
            if text in (model.get("unk_token"), tokenizer.unk_token):
                types[token] = UNKNOWN
            elif BYTES.fullmatch(text):
                types[token] = BYTE
    else:
        split, space, scores = _split_of(said), False, None
    bos, eos = _adds(tokenizer)
    return Vocabulary(
        model="llama" if of_sentencepiece else "gpt2",
        split=split,
        tokens=tokens,
        types=types,
        merges=None if of_sentencepiece else [" ".join(halves) for halves in merges],
        scores=scores,
        ids=_special_ids(tokenizer),
        adds_bos=bos,
        adds_eos=eos,
        adds_space=space,
        chat_template=_templates(tokenizer),
    )


def _refused(why: str) -> ModelError:
    return ModelError(
        f"the tokenizer cannot be written into a GGUF file: {why}; export a Hugging Face folder"
    )


def _tokens(known: dict[str, int], said: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Texts and types by id; rows that no token has are called [PAD7], after their id."""
    tokens, types = [f"[PAD{row}]" for row in range(rows)], [UNUSED] * rows
    for text, token in known.items():
        tokens[token], types[token] = text, NORMAL
    for added in said["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return tokens, types


def _split_of(said: dict[str, Any]) -> str:
    """GGUF's name for how text is split before merges. Raises ModelError."""
    normalizer, ignores = said["normalizer"], bool(said["model"].get("ignore_merges"))
    found = said["pre_tokenizer"] or {}
    steps = found.get("pretokenizers", [found])
    kinds = [step.get("type") for step in steps]
    plain = kinds[-1:] == ["ByteLevel"] and not steps[-1]["add_prefix_space"]
    own = plain and steps[-1]["use_regex"]
    pattern = None
    if kinds == ["ByteLevel"] and own:
        pattern = GPT2
    elif kinds == ["Digits", "ByteLevel"] and own and steps[0]["individual_digits"]:
        pattern = DIGITS
    elif kinds == ["Split", "ByteLevel"] and plain and not own and not steps[0]["invert"]:
        pattern = steps[0]["pattern"].get("Regex") if steps[0]["behavior"] == "Isolated" else None
    name = SPLITS.get((pattern or "", ignores))
    # readers do not normalise; NFC, as of Qwen's tokenizers, changes only decomposed accents
    if name is None or (normalizer and normalizer != {"type": "NFC"}):
        known = ", ".join(SPLITS.values())
        raise _refused(f"it splits or normalises text as none of {known} does")
    return name


def _adds_space(said: dict[str, Any]) -> bool:
    """Whether a text of sentencepiece begins with a space that it has not. Raises ModelError."""
    normalizer, splits = said["normalizer"] or {}, said["pre_tokenizer"]
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepends = {"type": "Prepend", "prepend": SPACE}
    if splits in (None, AT_SPACES) and steps in ([replaces], [prepends, replaces]):
        return prepends in steps
    spaces = splits or {}
    whole = spaces.get("type") == "Metaspace" and spaces.get("replacement") == SPACE
    if not steps and whole and not spaces.get("split"):
        return bool(spaces["prepend_scheme"] != "never")
    raise _refused("it treats spaces as no sentencepiece does")


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Scores by which sentencepiece merges in the order of `merges`. Raises ModelError.

    It takes the pair whose piece has the best score, so merges into one piece stand together.
    """
    order: dict[str, int] = {}
    last = None
    for first, second in merges:
        piece = first + second
        if piece != last and piece in order:
            raise _refused("the order of its merges is none of scores")
        order.setdefault(piece, len(order))
        last = piece
    return [-float(order.get(text, len(order))) for text in tokens]


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    turn = end_of_turn(tokenizer)
    found = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    if turn is not None and turn != tokenizer.eos_token:
        found["eot"] = tokenizer.convert_tokens_to_ids(turn)
    return {name: token for name, token in found.items() if token is not None}


def _adds(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether a text gets a first token and a last one. Raises ModelError for any other."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for bos in (False, True):
        for eos in (False, True):
            first = [tokenizer.bos_token_id] * bos
            if whole == [*first, *bare, *[tokenizer.eos_token_id] * eos]:
                return bos, eos
    raise _refused("it puts other tokens around texts than one at each end")


def _templates(tokenizer: PreTrainedTokenizerBase) -> str | list[dict[str, str]] | None:
    templates: Any = tokenizer.chat_template
    if isinstance(templates, dict):
        return [{"name": name, "template": text} for name, text in templates.items()]
    return templates or None
