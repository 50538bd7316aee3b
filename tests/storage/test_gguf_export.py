"""Exports as GGUF: transformers' own reader gives the same logits and ids from the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFReader
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, ModelError, StorageError
from megatrain.storage.checkpoint import save_checkpoint, write_final
from megatrain.storage.export import export
from megatrain.storage.gguf_file import SPLITS, add_tokenizer
from tests.helpers.files import flip, largest_file, names
from tests.helpers.gguf_toys import CONFIGS, ROWS, SCALED, SIZES, byte_level, of_sentencepiece

IDS = torch.arange(60).view(2, 30) * 5
TEXTS = ("Hello world, it's  me!", " two\n\nlines\t", "naïve café: 漢字 😀", "<think>x</think>", "")
UNREAD_SPLITS = ("smollm",)  # by transformers

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


def same_from_the_file(path: Path, theirs: Any) -> None:
    ours = in_float32(path.parent, gguf_file=path.name)
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    unequal = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert unequal == []
    with torch.no_grad():
        logits, wanted = ours(IDS).logits, theirs(IDS).logits
    assert wanted.std() > 0.3
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)


READ: list[Any] = [(family, {}) for family in CONFIGS if family != "mixtral"]  # for them a Llama


@pytest.mark.slow
@pytest.mark.parametrize(("family", "more"), [*READ, ("llama", {"tie_word_embeddings": True})])
def test_transformers_computes_the_same_from_the_file(exported, tmp_path, family, more):
    path = exported(CONFIGS[family](**more))
    assert names(path.parent) == {"model.gguf"}
    same_from_the_file(path, in_float32(export(tmp_path / "run", tmp_path / "hf")))


def test_models_saved_without_their_head_have_shorter_names(tmp_path):
    base = transformers.AutoModel.from_config(CONFIGS["llama"](tie_word_embeddings=True))
    base.save_pretrained(tmp_path / "base")
    byte_level().save_pretrained(tmp_path / "base")
    with Engine.from_pretrained(tmp_path / "base", device="cpu") as engine:
        save_checkpoint(tmp_path / "run", 1, engine, byte_level(), {})
    path = export(tmp_path / "run", tmp_path / "out", format="gguf") / "model.gguf"
    same_from_the_file(path, in_float32(export(tmp_path / "run", tmp_path / "hf")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("llama", "float16"), ("qwen3_moe", "float16")]
)
def test_masters_go_into_the_file(exported, tmp_path, family, dtype):
    path = exported(CONFIGS[family](), dtype=dtype)
    theirs = in_float32(export(tmp_path / "run", tmp_path / "hf", "float32"))
    for name, weight in theirs.named_parameters():
        exact = weight.dim() == 1 or name.endswith("mlp.gate.weight")
        if dtype == "float16" and not exact:
            weight.data = weight.data.half().float()
    same_from_the_file(path, theirs)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert kinds["blk.0.attn_q.weight"] == {"float32": "F32", "float16": "F16"}[dtype]
    assert kinds["blk.0.attn_norm.weight"] == kinds["output_norm.weight"] == "F32"
    assert kinds.get("blk.0.ffn_gate_inp.weight", "F32") == "F32"


def test_a_mixture_of_llamas_is_one_tensor_for_all_experts(exported, tmp_path):
    path = exported(CONFIGS["mixtral"](), dtype="float32")
    theirs = in_float32(export(tmp_path / "run", tmp_path / "hf", "float32")).state_dict()
    found = {t.name: torch.tensor(t.data) for t in GGUFReader(path).tensors}
    gate_up = [found[f"blk.1.ffn_{name}_exps.weight"] for name in ("gate", "up")]
    experts = "model.layers.1.mlp.experts"
    assert torch.equal(torch.cat(gate_up, 1), theirs[f"{experts}.gate_up_proj"])
    assert torch.equal(found["blk.1.ffn_down_exps.weight"], theirs[f"{experts}.down_proj"])
    assert torch.equal(found["blk.1.ffn_gate_inp.weight"], theirs["model.layers.1.mlp.gate.weight"])
    said = read(path)
    assert (said["llama.expert_count"], said["llama.expert_used_count"]) == (4, 2)


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


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS.values())
def test_the_tokenizer_comes_back(exported, tmp_path, split):
    tokenizer = byte_level(split)
    path = exported(CONFIGS["llama"](), tokenizer)
    found = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in () if split in UNREAD_SPLITS else TEXTS:
        assert found(text)["input_ids"] == tokenizer(text)["input_ids"], text
    said = read(path)
    assert said["tokenizer.ggml.pre"] == split
    assert found.chat_template == tokenizer.chat_template == said["tokenizer.chat_template"]
    assert (found.eos_token, said["tokenizer.ggml.eot_token_id"]) == ("<|endoftext|>", 2)
    types = said["tokenizer.ggml.token_type"]
    assert (types[0], types[3], types[len(tokenizer) - 1], types[-1]) == (3, 1, 4, 5)
    assert len(said["tokenizer.ggml.tokens"]) == ROWS


@pytest.mark.parametrize(("family", "begins"), [("mistral", "▁"), ("gemma3_text", "")])
def test_sentencepiece_comes_back(exported, family, begins):
    tokenizer = of_sentencepiece(begins)
    path = exported(CONFIGS[family](), tokenizer)
    found = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("hello world it is me", "two words", "naïve 漢字 hello", "a  b", "a    b"):
        assert found(text, add_special_tokens=False)["input_ids"] == tokenizer(text)["input_ids"]
    said = read(path)
    assert (said["tokenizer.ggml.model"], said["tokenizer.ggml.pre"]) == ("llama", "default")
    assert said["tokenizer.ggml.add_space_prefix"] is bool(begins)
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
    assert caplog.text.count("the context is written as 32 tokens") == 1


def test_a_refusal_leaves_nothing(exported, tmp_path):
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    with pytest.raises(ModelError, match=r"type gpt_neox cannot .*known are llama, mistral, "):
        exported(transformers.GPTNeoXConfig(**sizes))
    assert names(tmp_path) == {"run"}


def changed(change: Callable[[Any], object], tokenizer: Any = None) -> Any:
    tokenizer = tokenizer or byte_level()
    change(tokenizer.backend_tokenizer)
    return tokenizer


AROUND = processors.TemplateProcessing(
    "a <|im_end|> $A", special_tokens=[("a", 1), ("<|im_end|>", 2)]
)


def test_tokenizers_that_no_file_can_say_are_refused():
    cases: list[tuple[Any, str]] = [
        (changed(lambda t: setattr(t, "normalizer", normalizers.Lowercase())), "normalises text"),
        (changed(lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace())), "splits"),
        (
            PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))),
            "no byte",
        ),
        (
            changed(
                lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
                of_sentencepiece(),
            ),
            "treats spaces as no sentencepiece does",
        ),
        (changed(lambda t: setattr(t.model, "continuing_subword_prefix", "#")), "prefixes or suff"),
        (changed(lambda t: setattr(t, "post_processor", AROUND)), "other tokens around texts"),
    ]
    for tokenizer, words in cases:
        with pytest.raises(ModelError, match=words):
            add_tokenizer(None, tokenizer, ROWS)
    rows = len(byte_level()) - 1
    with pytest.raises(ModelError, match=f"beyond the {rows} rows"):
        add_tokenizer(None, byte_level(), rows)


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
