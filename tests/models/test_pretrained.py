"""Sources, configurations and tokenizers: what a user names is found, what a folder claims is not
obeyed."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatrain.errors import ModelError
from megatrain.models.pretrained import (
    ModelSource,
    about_added,
    end_of_turn,
    load_config_and_tokenizer,
    load_tokenizer,
    read_model_config,
    resolve_source,
    stop_ids,
    with_stops,
)
from tests.helpers.commands import CHATML as TURNS

SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "vocab_size": 8, "max_position_embeddings": 16}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def make_tokenizer(**special: str) -> transformers.PreTrainedTokenizerFast:
    words = {"<unk>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "</s>": 3, "hello": 4}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), **special
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def edit(folder: Path, file: str, **entries: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_a_source_is_a_folder_or_a_gguf_file(folder: Path, tmp_path: Path) -> None:
    assert resolve_source(str(folder)) == ModelSource("folder", folder)
    (tmp_path / "x.gguf").touch()
    expected = ModelSource("gguf", tmp_path, "x.gguf")
    assert resolve_source(tmp_path / "x.gguf") == expected == resolve_source(tmp_path)
    assert expected.file == tmp_path / "x.gguf"


def test_what_is_no_model_says_what_it_is(folder: Path, tmp_path: Path) -> None:
    for number, (files, message) in enumerate(
        (
            ([], "has no config.json"),
            (["a.gguf", "b.gguf"], "holds 2 GGUF files"),
            (["last"], "is a run folder; name one of its checkpoints"),
            (["adapter_config.json"], "is an adapter"),
        )
    ):
        other = tmp_path / str(number)
        other.mkdir()
        for file in files:
            (other / file).touch()
        with pytest.raises(ModelError, match=message):
            resolve_source(other)
    for path, message in (
        (folder.with_name("modle"), r"modle: no such file or folder \(did you mean .*/model\?\)"),
        (tmp_path / "gone" / "model", r"nor is there a folder .*/gone"),
        (folder / "config.json", "is a file; name the folder"),
    ):
        with pytest.raises(ModelError, match=message):
            resolve_source(path)


def test_a_malformed_config_is_one_sentence(folder: Path) -> None:
    message = r"config\.json: (cannot be used|cannot be read|needs Python code)"
    wide = '{"model_type": "llama", "hidden_size": "wide"}'
    odd = ("", "[]", "{}", '{"model_type": "no-such"}', wide, '{"model_type": 7}', "1" * 6000)
    for text in odd:
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message) as caught:
            read_model_config(resolve_source(folder))
        assert "\n" not in str(caught.value)


def test_other_quantised_weights_are_refused_by_method(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    for key, stated in (
        ("quantization_config", {"quant_method": "gptq"}),
        ("quantization_config", "gptq"),
        ("compression_config", {"quant_method": "gptq"}),
    ):
        (folder / "config.json").write_text(text)
        edit(folder, "config.json", **{key: stated})
        with pytest.raises(ModelError, match=r"quantised \(gptq\).*name the unquantised model"):
            read_model_config(resolve_source(folder))


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
@pytest.mark.parametrize("part", [None, "text_config"])
def test_what_can_be_dequantised_is_a_model_without_quantisation(
    folder: Path, method: str, part: str | None
) -> None:
    plain = read_model_config(resolve_source(folder)).to_dict()
    settings = {"quantization_config": {"quant_method": method}}
    edit(folder, "config.json", **({part: settings} if part else settings))
    found = read_model_config(resolve_source(folder)).to_dict()
    assert "quantization_config" not in found | found.get("text_config", {})
    assert {key: found[key] for key in plain} == plain


def test_a_folder_cannot_choose_a_kernel_to_download(folder: Path) -> None:
    plain = (folder / "config.json").read_text()
    keys = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
    for key in (*keys, "_experts_implementation"):
        (folder / "config.json").write_text(plain)
        edit(folder, "config.json", **{key: "somebody/kernel"})
        config = read_model_config(resolve_source(folder))
        assert config._attn_implementation is None
        assert "somebody/kernel" not in config.to_json_string()


@pytest.fixture
def trap(folder: Path) -> Path:
    """A folder whose code leaves a mark if it is ever run."""
    mark = folder / "ran"
    (folder / "evil.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom transformers import LlamaConfig as C\n\n"
        "class Evil(C):\n    model_type = 'evil'\n"
    )
    return mark


def test_code_of_a_folder_is_not_run(folder: Path, trap: Path) -> None:
    code = {"auto_map": {"AutoConfig": "evil.Evil"}, "trust_remote_code": True}
    edit(folder, "config.json", **code)
    read_model_config(resolve_source(folder))
    edit(folder, "config.json", model_type="evil")
    with pytest.raises(ModelError, match="needs Python code from the model's folder"):
        read_model_config(resolve_source(folder))
    make_tokenizer(eos_token="</s>").save_pretrained(folder)
    code = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    edit(folder, "tokenizer_config.json", **code)
    with suppress(ModelError):  # either answer is right, as long as nothing ran
        load_tokenizer(resolve_source(folder))
    assert not trap.exists()


def test_files_that_cannot_be_used_are_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"model: the tokenizer cannot be used"):
        load_tokenizer(resolve_source(folder))
    make_tokenizer(eos_token="</s>").save_pretrained(folder)
    for file, change, message in (
        ("tokenizer.json", {"truncation": 0}, "model: the tokenizer cannot be used"),
        ("tokenizer.json", {"version": "9"}, "model: the tokenizer cannot be used"),
        ("tokenizer_config.json", {"model_max_length": "long"}, "model_max_length is 'long'"),
        ("config.json", {"architectures": 5}, r"config\.json: .*architectures.* 5"),
    ):
        text = (folder / file).read_text()
        edit(folder, file, **change)
        with pytest.raises(ModelError, match=message):
            load_config_and_tokenizer(resolve_source(folder))
        (folder / file).write_text(text)


def test_a_tokenizer_file_that_cannot_be_looked_at_is_not_taken_for_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokenizer(eos_token="</s>").save_pretrained(folder)
    look, failures = os.stat, ["tokenizer.json"]

    def once(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if failures and str(path) == str(folder / failures[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder / failures.pop()))
        return look(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", once)
    with pytest.raises(ModelError, match="Input/output error"):
        load_tokenizer(ModelSource("folder", folder))
    assert load_tokenizer(ModelSource("folder", folder)).is_fast


def test_a_folder_keeps_its_eos_and_gets_a_pad(folder: Path) -> None:
    tokenizer = make_tokenizer(eos_token="</s>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    transformers.GenerationConfig(eos_token_id=[2, 3]).save_pretrained(folder)
    config, loaded, generation = load_config_and_tokenizer(resolve_source(folder))
    assert (loaded.eos_token, loaded.pad_token) == ("</s>", "</s>")
    assert config.model_type == "llama"
    assert generation is not None
    assert generation.eos_token_id == [2, 3]
    make_tokenizer(eos_token="</s>", pad_token="<unk>").save_pretrained(folder)
    assert load_tokenizer(resolve_source(folder)).pad_token == "<unk>"


def test_the_end_of_a_turn_is_read_from_the_template() -> None:
    tokenizer = make_tokenizer(eos_token="</s>")
    for template, token in (
        (CHATML, "<|im_end|>"),
        ("{% for m in messages %}{{ m['content'] }}</s>{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        ("{{ broken", None),
        (None, None),
    ):
        tokenizer.chat_template = template
        assert end_of_turn(tokenizer) == token


def test_a_gguf_file_that_ends_at_once_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"x\.gguf: cannot be used"):
        read_model_config(resolve_source(tmp_path / "x.gguf"))


@pytest.mark.slow
def test_a_gguf_file_is_read_once_and_has_the_end_of_turn_as_its_eos(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reader = resolve_source(smollm2_gguf), Mock(side_effect=gguf.GGUFReader)
    monkeypatch.setattr(gguf, "GGUFReader", reader)
    config, tokenizer, generation = load_config_and_tokenizer(source, chat_template="alpaca")
    answer: Any = [{"role": "assistant", "content": "1 2 3"}]
    text = tokenizer.apply_chat_template(answer, tokenize=False)
    assert str(text).endswith("### Response:\n1 2 3<|im_end|>\n\n")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert (config.eos_token_id, config.pad_token_id) == (2, 2)
    assert generation is not None
    assert generation.eos_token_id == 2
    assert reader.call_count == 1 and gguf.GGUFReader is reader


# -- tokens that end answers -----------------------------------------------------------------------

CONFIG = transformers.LlamaConfig(
    hidden_size=8, num_attention_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=None
)
HEADS = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"


def with_template(template: Any) -> Any:
    words = ["<s>", "</s>", "<|im_end|>", "<|im_start|>", "<|user|>", "<|assistant|>"]
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({w: n for n, w in enumerate(words)}, unk_token="<s>")),
        eos_token="</s>",
        extra_special_tokens=words[2:],
    )
    made.chat_template = template
    return made


def test_what_ends_answers_is_added():
    for template, known, expected, added in (
        (TURNS, [1], [1, 2], ["<|im_end|>"]),
        (TURNS, 1, [1, 2], ["<|im_end|>"]),
        (TURNS, [2], [2, 1], ["</s>"]),
        (TURNS, [1, 2, 7], [1, 2, 7], []),
        (HEADS, 1, [1, 4], ["<|user|>"]),
        (None, [5], [5, 1], ["</s>"]),
        ({"tool_use": TURNS}, 1, [1], []),  # none of several is the default
    ):
        given = transformers.GenerationConfig(eos_token_id=known, top_p=0.8)
        settings, lacking = with_stops(CONFIG, with_template(template), given)
        assert (stop_ids(settings), lacking) == (expected, added)
        assert settings is not None
        assert settings.top_p == 0.8
        assert given.eos_token_id == known  # not changed in place


def test_settings_are_made_where_there_are_none_and_something_is_lacking():
    made, lacking = with_stops(CONFIG, with_template(TURNS), None)
    assert made is not None
    assert (made.eos_token_id, made.bos_token_id, lacking) == ([1, 2], 0, ["<|im_end|>"])
    assert "<|im_end|> ends answers" in about_added(lacking)
    assert with_stops(CONFIG, with_template(None), None) == (None, [])
    assert about_added([]) == ""
