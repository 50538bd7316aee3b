"""Exports as GGUF: transformers' own reader gives the same logits and ids from the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, ModelError, StorageError
from megatrain.models.gguf_vocabulary import SPLITS, vocabulary_of
from megatrain.storage.checkpoint import save_checkpoint, write_final
from megatrain.storage.export import export
from megatrain.storage.gguf_file import FAMILIES
from tests.files import flip, largest_file, names

ROWS = 320  # of the embedding: more than there are tokens
IDS = torch.arange(60).view(2, 30) * 5
SIZES: Any = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": ROWS}
SIZES |= {"max_position_embeddings": 64, "initializer_range": 0.2}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
SCALED: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
}
SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS: dict[str, Any] = {
    "llama": lambda **more: transformers.LlamaConfig(**SIZES, **{"rope_parameters": ROPE, **more}),
    "mistral": lambda **more: transformers.MistralConfig(**SIZES, head_dim=32, **more),
    "qwen2": lambda **more: transformers.Qwen2Config(**SIZES, **more),
    "qwen3": lambda **more: transformers.Qwen3Config(**SIZES, **{"head_dim": 128, **more}),
}
TEXTS = ("Hello world, it's  me!", " two\n\nlines\t", "naïve café: 漢字 😀", "<think>x</think>", "")
CHAT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_level(name: str = "gpt-2") -> PreTrainedTokenizerFast:
    """A tokenizer that splits as GGUF's `name` does."""
    patterns = {split: pattern for (pattern, _), split in SPLITS.items()}
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split: Any = plain
    if name == "smollm":
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    elif name != "gpt-2":
        words = pre_tokenizers.Split(Regex(patterns[name]), behavior="isolated")
        bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Sequence([words, bare])
    whole = {kept for (_, kept), known in SPLITS.items() if known == name} == {True}
    base = Tokenizer(models.BPE(ignore_merges=whole))
    base.pre_tokenizer, base.decoder = split, decoders.ByteLevel()
    if name == "qwen2":
        base.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    base.train_from_iterator(["hello world it is me, two lines of words 2024 " * 3], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=base, eos_token=special[0], chat_template=CHAT)
    made.add_tokens([AddedToken("<think>", normalized=False)])
    return made


def of_sentencepiece() -> PreTrainedTokenizerFast:
    base = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    space = normalizers.Replace(" ", "▁")
    base.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(vocab_size=310, special_tokens=special, show_progress=False)
    base.train_from_iterator(["hello world it is me two lines of words " * 3], trainer)
    found: dict[str, int] = base.get_vocab()
    order = sorted(found, key=found.__getitem__)
    pairs = [(p[:at], p[at:]) for p in order for at in range(1, len(p)) if p not in special]
    merges = [(a, b) for a, b in pairs if a in found and b in found]
    base.model = models.BPE(found, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    base.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    ends: Any = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=base, **ends)


Export = Callable[..., Path]


@pytest.fixture
def exported(tmp_path: Path) -> Export:
    """exported(config, tokenizer, dtype="float16"): the GGUF file of a run with that model."""

    def make(
        config: Any, tokenizer: Any = None, precision: str = "bfloat16", **options: Any
    ) -> Path:
        with Engine.from_config(config, precision=precision, device="cpu") as engine:
            engine.forward_backward([{"input_ids": IDS, "labels": IDS}])
            engine.step(lr=1e-2)
            save_checkpoint(tmp_path / "run", 1, engine, tokenizer or byte_level(), {})
        return export(tmp_path / "run", tmp_path / "out", format="gguf", **options) / "model.gguf"

    return make


def read(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


def in_float32(folder: Path, **named: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **named)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_computes_the_same_from_the_file(exported, tmp_path, family, dtype):
    path = exported(CONFIGS[family](tie_word_embeddings=dtype == "float32"), dtype=dtype)
    assert names(path.parent) == {"model.gguf"}
    # float16 is of the masters, too
    as_folder = "float32" if dtype == "float16" else dtype
    theirs = in_float32(export(tmp_path / "run", tmp_path / "hf", as_folder))
    ours = in_float32(path.parent, gguf_file=path.name)
    if dtype == "float16":
        for weight in theirs.parameters():
            weight.data = weight.data.half().float() if weight.dim() > 1 else weight.data
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    with torch.no_grad():
        logits, wanted = ours(IDS).logits, theirs(IDS).logits
    assert wanted.std() > 0.3
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    kind = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}[dtype]
    assert kinds["blk.0.attn_q.weight"] == kind
    assert kinds["blk.0.attn_norm.weight"] == kinds["output_norm.weight"] == "F32"


def test_all_families_are_compared():
    assert FAMILIES.keys() == CONFIGS.keys()


# What the published GGUF file of SmolLM2-135M-Instruct says of the model and its tokenizer.
PUBLISHED = {
    "general.architecture": "llama",
    "general.type": "model",
    "general.quantization_version": 2,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
}
KEYS = {f"general.{name}" for name in ("name", "size_label", "file_type")}
KEYS |= {f"llama.{name}_length" for name in ("context", "embedding", "feed_forward")}
KEYS |= {f"llama.attention.{name}" for name in ("head_count", "head_count_kv")}
KEYS |= {"llama.attention.layer_norm_rms_epsilon", "llama.block_count", "llama.vocab_size"}
KEYS |= {"llama.rope.dimension_count", "llama.rope.freq_base", "tokenizer.chat_template"}
KEYS |= {f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges")}
KEYS |= {f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown", "padding")}


def test_the_keys_are_those_of_a_published_file(exported):
    tokenizer = byte_level("smollm")
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>", "unk_token": "<|endoftext|>"})
    said = read(exported(CONFIGS["llama"](), tokenizer))
    assert {name: said[name] for name in PUBLISHED} == PUBLISHED
    ours = {name for name in said if not name.startswith("GGUF.")}
    assert ours - PUBLISHED.keys() == KEYS | {
        "llama.attention.key_length",
        "llama.attention.value_length",
        "tokenizer.ggml.add_eos_token",
        "tokenizer.ggml.eot_token_id",
    }
    shape = {"head_count": 4, "head_count_kv": 2, "key_length": 16, "value_length": 16}
    assert {name: said[f"llama.attention.{name}"] for name in shape} == shape
    assert (said["llama.rope.dimension_count"], said["llama.rope.freq_base"]) == (16, 5000)
    assert said["llama.vocab_size"] == len(said["tokenizer.ggml.tokens"]) == ROWS
    ids = [said[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot", "unknown")]
    assert ids == [1, 0, 2, 0]


@pytest.mark.parametrize("split", SPLITS.values())
def test_the_tokenizer_comes_back(exported, tmp_path, split):
    tokenizer = byte_level(split)
    path = exported(CONFIGS["llama"](), tokenizer)
    found = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    digits = () if split == "smollm" else ("13579 and 24",)  # transformers reads no such split
    for text in (*TEXTS, *digits):
        assert found(text)["input_ids"] == tokenizer(text)["input_ids"], text
    said = read(path)
    assert said["tokenizer.ggml.pre"] == split
    assert found.chat_template == tokenizer.chat_template == said["tokenizer.chat_template"]
    assert (found.eos_token, said["tokenizer.ggml.eot_token_id"]) == ("<|endoftext|>", 2)
    types = said["tokenizer.ggml.token_type"]
    assert (types[0], types[3], types[len(tokenizer) - 1], types[-1]) == (3, 1, 4, 5)
    assert len(said["tokenizer.ggml.tokens"]) == ROWS


def test_sentencepiece_comes_back(exported):
    tokenizer = of_sentencepiece()
    path = exported(CONFIGS["mistral"](), tokenizer)
    found = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("hello world it is me", "two words", "naïve 漢字 hello", "a  b"):
        assert found(text, add_special_tokens=False)["input_ids"] == tokenizer(text)["input_ids"]
    said = read(path)
    assert (said["tokenizer.ggml.model"], said["tokenizer.ggml.pre"]) == ("llama", "default")
    assert said["tokenizer.ggml.add_space_prefix"] is True
    assert said["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]


def test_scaled_rotary_embeddings_go_along_as_factors(exported):
    config = CONFIGS["llama"](rope_parameters=SCALED)
    path = exported(config)
    factors = next(t for t in GGUFReader(path).tensors if t.name == "rope_freqs.weight")
    whole = transformers.AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq
    plain = 1 / SCALED["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / torch.tensor(factors.data), whole)
    assert factors.data.min() == 1 and factors.data.max() == 8


def test_a_window_is_the_context(exported, caplog):
    said = read(exported(CONFIGS["mistral"](sliding_window=32)))
    assert said["llama.context_length"] == 32
    assert "the context is told as 32 tokens" in caplog.text


REFUSED: dict[str, Any] = {
    "gpt_neox": (
        transformers.GPTNeoXConfig,
        "type gpt_neox cannot",
        "llama, mistral, qwen2, qwen3",
    ),
    "bias": (lambda **s: transformers.LlamaConfig(**s, attention_bias=True), "attention_bias", ""),
    "relu": (lambda **s: transformers.Qwen2Config(**s, hidden_act="relu"), "hidden_act: relu", ""),
    "yarn": (
        lambda **s: transformers.Qwen2Config(
            **s, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
        ),
        "rotary embeddings of type yarn",
        "",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_come_out_wrong_is_refused(exported, tmp_path, case):
    make, *words = REFUSED[case]
    sizes = {k: v for k, v in SIZES.items() if case != "gpt_neox" or k != "num_key_value_heads"}
    with pytest.raises(ModelError) as caught:
        exported(make(**sizes))
    assert all(word in str(caught.value) for word in (*words, "export a Hugging Face folder"))
    assert names(tmp_path) == {"run"}


def changed(change: Callable[[Any], object]) -> Any:
    tokenizer = byte_level()
    change(tokenizer.backend_tokenizer)
    return tokenizer


def test_tokenizers_that_no_file_can_say_are_refused():
    cases: list[tuple[Any, str]] = [
        (changed(lambda t: setattr(t, "normalizer", normalizers.Lowercase())), "normalises text"),
        (changed(lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace())), "splits"),
        (
            PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))),
            "no byte",
        ),
    ]
    for tokenizer, words in cases:
        with pytest.raises(ModelError, match=words):
            vocabulary_of(tokenizer, ROWS)
    rows = len(byte_level()) - 1
    with pytest.raises(ModelError, match=f"beyond the {rows} rows"):
        vocabulary_of(byte_level(), rows)


def test_values_beyond_float16_are_refused(tmp_path):
    with Engine.from_config(CONFIGS["llama"](), precision="float32", device="cpu") as engine:
        engine.store.array("weight", 1).fill_(1e6)
        save_checkpoint(tmp_path / "run", 1, engine, byte_level(), {})
    with pytest.raises(ModelError, match="values beyond those of float16; export it as bfloat16"):
        export(tmp_path / "run", tmp_path / "out", "float16", format="gguf")
    assert names(tmp_path) == {"run"}


def test_final_alone_gives_what_it_has(exported, tmp_path):
    exported(CONFIGS["llama"]())
    write_final(tmp_path / "run").rename(tmp_path / "alone")
    export(tmp_path / "alone", tmp_path / "half", "float16", format="gguf")
    with pytest.raises(ModelError, match="float32 master is unknown"):
        export(tmp_path / "alone", tmp_path / "whole", "float32", format="gguf")


def test_damage_full_disks_and_wrong_words_leave_nothing(exported, tmp_path):
    folder = exported(CONFIGS["llama"]()).parent
    assert "out" in str(read(folder / "model.gguf")["general.name"])
    with largest_file(3000), pytest.raises(StorageError, match="errno 27"):
        export(tmp_path / "run", tmp_path / "full", format="gguf")
    with pytest.raises(ConfigError, match="dtype must be bfloat16 or float32 or float16, not 'q4'"):
        export(tmp_path / "run", tmp_path / "x", "q4", format="gguf")
    with pytest.raises(ConfigError, match="format must be safetensors or gguf, not 'onnx'"):
        export(tmp_path / "run", tmp_path / "x", format="onnx")
    with pytest.raises(ConfigError, match=r"x.gguf: is to be a folder, which will hold model.gguf"):
        export(tmp_path / "run", tmp_path / "x.gguf", format="gguf")
    flip(tmp_path / "run" / "checkpoint-1" / "model.safetensors")
    with pytest.raises(StorageError, match="does not match its checksum"):
        export(tmp_path / "run", tmp_path / "x", format="gguf")
    assert names(tmp_path) == {"run", "out"}
