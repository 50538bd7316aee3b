"""Tokenizers in GGUF files: tokens, merges or scores, and the name of the pre-tokenizer."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from megatrain.errors import ModelError
from megatrain.models.stops import end_of_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


def add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Add a tokenizer's keys to a GGUF writer; `rows`: of the embedding. Raises ModelError."""
    from gguf import TokenType

    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = {} if backend is None else json.loads(backend.to_str())
    model: dict[str, Any] = described.get("model") or {}
    if model.get("type") != "BPE" or model.get("dropout") or not described:
        raise _refused("it is no byte-pair encoding")
    if any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix")):
        raise _refused("its pieces have prefixes or suffixes")
    known = tokenizer.get_vocab()
    if max(known.values()) >= rows:
        raise _refused(f"it has tokens beyond the {rows:,} rows of the embedding")
    merges = [one.split(" ") if isinstance(one, str) else list(one) for one in model["merges"]]
    if any(" " in half for halves in merges for half in halves):
        raise _refused("its merges contain spaces")
    sentencepiece = bool(model.get("byte_fallback"))
    tokens, types = _tokens(known, described, rows)
    for token, text in enumerate(tokens if sentencepiece else ()):
        if text in (model.get("unk_token"), tokenizer.unk_token):
            types[token] = TokenType.UNKNOWN
        elif BYTES.fullmatch(text):
            types[token] = TokenType.BYTE
    space = sentencepiece and _adds_space(described)
    split = "default" if sentencepiece else _split_of(described)
    bos, eos = _adds(tokenizer)
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if sentencepiece:
        writer.add_token_scores(_scores(tokens, merges))
    else:
        writer.add_token_merges([" ".join(halves) for halves in merges])
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    turn = end_of_turn(tokenizer)
    if turn is not None and turn != tokenizer.eos_token:
        ids["eot"] = tokenizer.convert_tokens_to_ids(turn)
    for name, token in ids.items():
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(bos)
    writer.add_add_eos_token(eos)
    writer.add_add_space_prefix(space)
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _refused(why: str) -> ModelError:
    return ModelError(
        f"the tokenizer cannot be written into a GGUF file: {why}; export a Hugging Face folder"
    )


def _tokens(
    known: dict[str, int], described: dict[str, Any], rows: int
) -> tuple[list[str], list[int]]:
    """Texts and types by id; a row without a token is named by its id, as [PAD7]."""
    from gguf import TokenType

    tokens, types = [f"[PAD{row}]" for row in range(rows)], [int(TokenType.UNUSED)] * rows
    for text, token in known.items():
        tokens[token], types[token] = text, TokenType.NORMAL
    for added in described["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return tokens, types


def _split_of(described: dict[str, Any]) -> str:
    """GGUF's name for how text is split before merges. Raises ModelError."""
    normalizer, ignores = described["normalizer"], bool(described["model"].get("ignore_merges"))
    found = described["pre_tokenizer"] or {}
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


def _adds_space(described: dict[str, Any]) -> bool:
    """True if sentencepiece puts a space before a text. Raises ModelError."""
    normalizer, splits = described["normalizer"] or {}, described["pre_tokenizer"]
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


def _adds(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """(puts a first token before texts, puts a last one behind). Raises ModelError for others."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for bos in (False, True):
        for eos in (False, True):
            first = [tokenizer.bos_token_id] * bos
            if whole == [*first, *bare, *[tokenizer.eos_token_id] * eos]:
                return bos, eos
    raise _refused("it puts other tokens around texts than one at each end")
