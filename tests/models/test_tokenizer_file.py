"""Text is read as tokenizer.json says, whatever class transformers has for it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, trainers
from tokenizers import decoders as d
from tokenizers import normalizers as n
from tokenizers import pre_tokenizers as p

from megatrain.errors import DataError
from megatrain.models.pretrained import load_tokenizer, resolve_source
from megatrain.models.tokenizer_file import PROBES, published_file

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["[CLS]", "[SEP]", "[MASK]"]
TEXT = [*PROBES, "the river runs to the sea in 2024 and 1990, and 12345 boats", "Paris café 日本"]

# -- pipelines of published files, by the model that they are of -----------------------------------

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
LLAMA3 = f"{CONTRACTIONS}|{WORDS}|\\p{{N}}{{1,3}}|{ENDS}"
QWEN2 = f"{CONTRACTIONS}|{WORDS}|\\p{{N}}|{ENDS}"
QWEN3_5 = f"{CONTRACTIONS}|[^\\r\\n\\p{{L}}\\p{{N}}]?[\\p{{L}}\\p{{M}}]+|\\p{{N}}|{ENDS}"
GPT4O = f"{CASED}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{{N}}{{1,3}}|{ENDS}"
TEKKEN = f"{CASED}|\\p{{N}}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
DEEPSEEK = [
    r"[\r\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓ]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
]  # fmt: skip
DEEPSEEK3 = [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", f"{WORDS}|{ENDS}"]


def trained(model: Any, alphabet: bool = True, **more: Any) -> Tokenizer:
    """A tokenizer of this kind that knows a few hundred tokens."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = more.get("normalizer")
    tokenizer.pre_tokenizer = more.get("pre")
    tokenizer.decoder = more.get("decoder")
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))] if more.get("bytes") else []
    names = list(dict.fromkeys([*names, *SPECIAL]))
    how: dict[str, Any] = {"vocab_size": 1200, "special_tokens": names, "show_progress": False}
    kind: Any = {"BPE": trainers.BpeTrainer, "Unigram": trainers.UnigramTrainer}.get(
        type(model).__name__, trainers.WordPieceTrainer
    )
    if alphabet:
        how["initial_alphabet"] = p.ByteLevel.alphabet()
    if kind is trainers.UnigramTrainer:
        how["unk_token"] = "<unk>"
    tokenizer.train_from_iterator(TEXT * 10, kind(**how))
    said = json.loads(tokenizer.to_str())
    said["added_tokens"] = [t for t in said["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(said))


def byte_level(
    *patterns: str, normalizer: Any = None, prefix: bool = False, **more: Any
) -> Tokenizer:
    """Byte-level BPE; GPT-2's own pattern unless others are given."""
    last = p.ByteLevel(add_prefix_space=prefix, use_regex=not patterns)
    splits = [p.Split(Regex(pattern), "isolated") for pattern in patterns]
    splits = [*more.get("before", ()), *splits]
    pre = p.Sequence([*splits, last]) if splits else last
    return trained(models.BPE(), normalizer=normalizer, pre=pre, decoder=d.ByteLevel())


def of_bytes(normalizer: Any, pre: Any = None, prepend: bool = True) -> Tokenizer:
    """SentencePiece's BPE with bytes for what it does not know."""
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    steps = [d.Replace("▁", " "), d.ByteFallback(), d.Fuse()]
    steps = [*steps, d.Strip(" ", 1, 0)] if prepend else steps
    pre = pre or p.Metaspace("▁", "never", split=True)
    decoder = d.Sequence(steps)
    return trained(model, False, normalizer=normalizer, pre=pre, decoder=decoder, bytes=True)


def legacy_llama() -> Tokenizer:
    found = of_bytes(n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁")]))
    found.pre_tokenizer = None
    return found


def spaces_replaced() -> Tokenizer:
    found = of_bytes(n.Replace(" ", "▁"), prepend=False)
    found.pre_tokenizer = p.Split(" ", "merged_with_previous")
    return found


def unigram(normalizer: Any, scheme: str = "always") -> Tokenizer:
    space = p.Metaspace("▁", scheme)
    return trained(
        models.Unigram(), False, normalizer=normalizer, pre=space, decoder=d.Metaspace("▁", scheme)
    )


def word_piece(lowercase: bool) -> Tokenizer:
    return trained(
        models.WordPiece(unk_token="<unk>"),
        False,
        normalizer=n.BertNormalizer(lowercase=lowercase),
        pre=p.BertPreTokenizer(),
        decoder=d.WordPiece(),
    )


def metaspace(scheme: str) -> Callable[[], Tokenizer]:
    return lambda: of_bytes(None, p.Metaspace("▁", scheme, split=False))


def falcon() -> Tokenizer:
    return byte_level(before=[p.Punctuation("contiguous"), p.Digits(False)])


def command_r() -> Tokenizer:
    return byte_level(normalizer=n.NFC(), before=[DIGITS])


def deepseek_coder() -> Tokenizer:
    return byte_level(*DEEPSEEK, before=[DIGITS])


NMT = n.Sequence([n.Nmt(), n.NFKC(), n.Replace(Regex(" {2,}"), " ")])
DIGITS = p.Digits(individual_digits=True)
# model_type, tokenizer_class, pipeline
PUBLISHED: dict[str, tuple[str, str, Callable[[], Tokenizer]]] = {
    "Llama 3": ("llama", "PreTrainedTokenizerFast", lambda: byte_level(LLAMA3)),
    "DeepSeek-R1-Distill-Llama": ("llama", "LlamaTokenizerFast", lambda: byte_level(LLAMA3)),
    "DeepSeek-R1-Distill-Qwen": ("qwen2", "LlamaTokenizerFast", lambda: byte_level(QWEN2)),
    "llama with Qwen's class": ("llama", "Qwen2Tokenizer", lambda: byte_level(LLAMA3)),
    "Llama 2": ("llama", "LlamaTokenizer", legacy_llama),
    "Llama 2, fast": ("llama", "LlamaTokenizerFast", legacy_llama),
    "Llama, metaspace first": ("llama", "LlamaTokenizer", metaspace("first")),
    "Llama, metaspace always": ("llama", "LlamaTokenizer", metaspace("always")),
    "Llama, no prefix": ("llama", "LlamaTokenizer", metaspace("never")),
    "CodeLlama": ("llama", "CodeLlamaTokenizer", legacy_llama),
    "Mistral 7B": ("mistral", "LlamaTokenizer", legacy_llama),
    "Mistral Nemo": ("mistral", "PreTrainedTokenizerFast", lambda: byte_level(TEKKEN)),
    "Mistral Small": ("mistral3", "LlamaTokenizerFast", lambda: byte_level(TEKKEN)),
    "Qwen2.5": ("qwen2", "Qwen2Tokenizer", lambda: byte_level(QWEN2, normalizer=n.NFC())),
    "Qwen3": ("qwen3", "Qwen2Tokenizer", lambda: byte_level(QWEN2, normalizer=n.NFC())),
    "Qwen3.5": ("qwen3_5", "Qwen2Tokenizer", lambda: byte_level(QWEN3_5, normalizer=n.NFC())),
    "qwen3_5 with another file": ("qwen3_5", "PreTrainedTokenizerFast", lambda: byte_level(LLAMA3)),
    "GPT-2": ("gpt2", "GPT2Tokenizer", byte_level),
    "GPT-2 with a prefix": ("gpt2", "GPT2Tokenizer", lambda: byte_level(prefix=True)),
    "OPT": ("opt", "GPT2Tokenizer", byte_level),
    "gpt-oss": ("gpt_oss", "PreTrainedTokenizerFast", lambda: byte_level(GPT4O)),
    "GPT-NeoX, Pythia": ("gpt_neox", "GPTNeoXTokenizer", lambda: byte_level(normalizer=n.NFC())),
    "Mamba": ("mamba", "GPTNeoXTokenizer", lambda: byte_level(normalizer=n.NFC())),
    "OLMo": ("olmo", "GPTNeoXTokenizer", lambda: byte_level(normalizer=n.NFC())),
    "OLMo 2": ("olmo2", "GPT2Tokenizer", lambda: byte_level(LLAMA3)),
    "Phi-2": ("phi", "CodeGenTokenizer", byte_level),
    "Phi-3": ("phi3", "LlamaTokenizer", legacy_llama),
    "Phi-4": ("phi3", "GPT2Tokenizer", lambda: byte_level(LLAMA3)),
    "Gemma": ("gemma", "GemmaTokenizer", spaces_replaced),
    "Gemma 3": ("gemma3_text", "GemmaTokenizer", spaces_replaced),
    "Falcon": ("falcon", "PreTrainedTokenizerFast", falcon),
    "Bloom": ("bloom", "BloomTokenizerFast", lambda: byte_level(r" ?[^(\s|[.,!?…。，、।۔،])]+")),
    "StarCoder": ("gpt_bigcode", "GPT2TokenizerFast", lambda: byte_level(before=[DIGITS])),
    "StarCoder 2": ("starcoder2", "GPT2Tokenizer", lambda: byte_level(before=[DIGITS])),
    "SmolLM": ("llama", "GPT2Tokenizer", lambda: byte_level(before=[DIGITS])),
    "Cohere Command R": ("cohere", "CohereTokenizer", command_r),
    "DeepSeek Coder": ("llama", "LlamaTokenizerFast", deepseek_coder),
    "DeepSeek-V3": ("deepseek_v3", "LlamaTokenizerFast", lambda: byte_level(*DEEPSEEK3)),
    "Granite": ("granite", "GPT2Tokenizer", lambda: byte_level(before=[DIGITS])),
    "MPT": ("mpt", "GPTNeoXTokenizer", lambda: byte_level(normalizer=n.NFC())),
    "InternLM 2": ("internlm2", "LlamaTokenizer", legacy_llama),
    "T5": ("t5", "T5Tokenizer", lambda: unigram(NMT)),
    "XLM-R": ("xlm-roberta", "XLMRobertaTokenizer", lambda: unigram(NMT)),
    "ALBERT": ("albert", "AlbertTokenizer", lambda: unigram(n.Sequence([n.Lowercase(), NMT]))),
    "BERT": ("bert", "BertTokenizer", lambda: word_piece(True)),
    "BERT, cased": ("bert", "BertTokenizer", lambda: word_piece(False)),
    "RWKV, words": ("rwkv", "PreTrainedTokenizerFast", lambda: byte_level(normalizer=n.NFC())),
}  # fmt: skip


def texts_of(count: int) -> list[str]:
    """Probes and mixtures of their pieces, with added tokens among them."""
    rng = random.Random(0)
    words = [*itertools.chain.from_iterable(text.split(" ") for text in PROBES), "\n", "\t", "  "]
    made = (" ".join(rng.choices([*words, *SPECIAL[4:7]], k=6)) for _ in range(count))
    return [*TEXT, *made][:count]


def publish(folder: Path, model_type: str, kind: str, tokenizer: Tokenizer) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    about = {"tokenizer_class": kind, "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def read(folder: Path) -> tuple[Any, Tokenizer]:
    """(what is loaded, what the file says) of a model folder."""
    return load_tokenizer(resolve_source(folder)), Tokenizer.from_file(
        str(folder / "tokenizer.json")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_are_those_of_the_file(name, tmp_path):
    model_type, kind, make = PUBLISHED[name]
    loaded, published = read(publish(tmp_path / "model", model_type, kind, make()))
    for text in texts_of(200):
        ids = published.encode(text, add_special_tokens=False).ids
        assert loaded(text, add_special_tokens=False)["input_ids"] == ids, text


def test_another_pipeline_is_said_once_and_the_file_s_is_used(tmp_path, caplog):
    folder = publish(
        tmp_path / "model", *PUBLISHED["llama with Qwen's class"][:2], byte_level(LLAMA3)
    )
    loaded, published = read(folder)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "megatrain"]
    assert said.startswith(
        f"{folder}/tokenizer.json: transformers' Qwen2Tokenizer (tokenizer_class)"
    )
    assert loaded.eos_token == "</s>"
    assert loaded("in 2024")["input_ids"] == published.encode("in 2024").ids
    assert published_file(loaded) == (folder / "tokenizer.json").read_bytes()
    loaded.add_tokens(["<new>"])
    assert published_file(loaded) is None


def test_one_that_makes_much_of_little_is_refused(tmp_path):
    tokenizer = byte_level()
    steps = [n.Replace("o", "e" * 10**6), n.Replace("e", "i" * 10**4)]
    tokenizer.normalizer = n.Sequence(steps)
    folder = publish(tmp_path / "model", "llama", "PreTrainedTokenizerFast", tokenizer)
    with pytest.raises(
        DataError, match=r"tokenizer.json: the tokenizer .* for a few words; use an"
    ):
        load_tokenizer(resolve_source(folder))


def test_the_class_of_the_file_s_own_pipeline_stays(tmp_path, caplog):
    name, kind, make = PUBLISHED["Qwen2.5"]
    loaded, _ = read(publish(tmp_path / "model", name, kind, make()))
    assert type(loaded).__name__ == kind
    assert not [record for record in caplog.records if record.name == "megatrain"]
