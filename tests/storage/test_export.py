"""Model folders: transformers loads what the engine or the checkpoint has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, StorageError
from megatrain.optim.split import join_master
from megatrain.storage import export as export_module
from megatrain.storage.checkpoint import save_checkpoint, write_final
from megatrain.storage.export import export, save_pretrained
from megatrain.storage.safetensors import plan_shards, read_header
from tests.helpers.files import flip, largest_file, logits_of, names

IDS = torch.arange(24).view(2, 12)
SMALL: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"vocab_size": 32, "max_position_embeddings": 16}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL, intermediate_size=24, tie_word_embeddings=True),
    "gpt-neox": transformers.GPTNeoXConfig(**SMALL, intermediate_size=24),
}


def trained(config: transformers.PretrainedConfig, precision: str) -> Engine:
    engine = Engine.from_config(config, precision=precision, device="cpu")
    engine.forward_backward([{"input_ids": IDS, "labels": IDS}])
    engine.step(lr=1e-3)
    return engine


@pytest.fixture(params=["bfloat16", "float32"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with trained(CONFIGS["llama"], request.param) as engine:
        yield engine


@pytest.fixture
def bf16_engine() -> Iterator[Engine]:
    with trained(CONFIGS["llama"], "bfloat16") as engine:
        yield engine


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = WordLevel({"<unk>": 0, "</s>": 1, "hello": 2}, unk_token="<unk>")
    ends = {"eos_token": "</s>", "pad_token": "</s>"}
    result = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **ends)
    result.chat_template = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
    return result


def masters(engine: Engine) -> dict[str, torch.Tensor]:
    result = {}
    for block in engine.anatomy.blocks:
        engine.wait_ready(block.index)
        halves = (engine.store.array(name, block.index) for name in ("weight", "remainder"))
        result.update(block.layout.views(join_master(*halves)))
    return result


def test_a_saved_engine_gives_its_own_logits_in_transformers(tmp_path, engine):
    expected = engine.logits(IDS).float()
    save_pretrained(engine, tmp_path / "out")
    assert torch.equal(logits_of(tmp_path / "out", IDS), expected)


def test_large_models_are_cut_into_shards(tmp_path, bf16_engine, monkeypatch):
    small_shards = partial(plan_shards, shard_bytes=2000)
    monkeypatch.setattr("megatrain.storage.export.plan_shards", small_shards)
    expected = bf16_engine.logits(IDS).float()
    save_checkpoint(tmp_path / "run", 1, bf16_engine, None, {})
    for folder in (tmp_path / "run" / "last", export(tmp_path / "run", tmp_path / "out")):
        assert len(list(folder.glob("model-*.safetensors"))) > 3
        assert torch.equal(logits_of(folder, IDS), expected)
    whole = export(tmp_path / "run", tmp_path / "whole", "float32")
    assert load_file(next(whole.glob("model-00001-*")))


def test_an_export_is_a_copy_of_the_checkpoints_model(tmp_path, engine):
    expected = engine.logits(IDS).float()
    several = tokenizer()
    several.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    folder = save_checkpoint(tmp_path / "run", 1, engine, several, {})
    out = export(tmp_path / "run", tmp_path / "out")
    assert torch.equal(logits_of(out, IDS), expected)
    assert AutoTokenizer.from_pretrained(out).chat_template == several.chat_template
    # an edit of the export must not reach the checkpoint
    assert not any((out / name).samefile(folder / name) for name in names(out))
    assert names(out) == names(folder) - {"optimizer", "state.json", "MANIFEST.json"}


def test_float32_is_the_exact_master(tmp_path, bf16_engine):
    save_checkpoint(tmp_path / "run", 1, bf16_engine, None, {})
    out = export(tmp_path / "run", tmp_path / "out", dtype="float32")
    exported, expected = load_file(out / "model.safetensors"), masters(bf16_engine)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert any(not torch.equal(master, master.bfloat16().float()) for master in expected.values())
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32


def test_bfloat16_of_a_float32_run_is_rounded_to_nearest(tmp_path):
    with trained(CONFIGS["llama"], "float32") as engine:
        save_checkpoint(tmp_path / "run", 1, engine, None, {})
        out = export(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
        exported = load_file(out / "model.safetensors")
        for name, weight in engine.iter_weights():
            assert torch.equal(exported[name], weight.bfloat16())


def test_best_last_and_final_are_found(tmp_path, bf16_engine):
    run = tmp_path / "run"
    for step in (1, 2, 3):
        save_checkpoint(run, step, bf16_engine, None, {}, best=1)
        if step == 2:
            write_final(run)
    assert (export(run / "checkpoint-1", tmp_path / "out") / "model.safetensors").exists()
    which = {"best": 1, "last": 3, "final": 2, "checkpoint-3": 3, None: 3}
    for name, step in which.items():
        out = export(run, tmp_path / f"out-{name}", checkpoint=name)
        assert read_header(out / "model.safetensors").metadata["step"] == str(step), name


def test_an_occupied_folder_is_refused(tmp_path, bf16_engine):
    save_checkpoint(tmp_path / "run", 1, bf16_engine, None, {})
    (tmp_path / "empty").mkdir()
    export(tmp_path / "run", tmp_path / "empty")
    with pytest.raises(ConfigError, match="empty: exists and is not an empty folder"):
        export(tmp_path / "run", tmp_path / "empty")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        save_pretrained(bf16_engine, tmp_path / "empty")


def test_an_unknown_dtype_or_checkpoint_is_refused(tmp_path, bf16_engine):
    save_checkpoint(tmp_path / "run", 1, bf16_engine, None, {})
    with pytest.raises(ConfigError, match="dtype must be bfloat16 or float32, not 'fp8'"):
        export(tmp_path / "run", tmp_path / "out", dtype="fp8")
    with pytest.raises(ConfigError, match="no checkpoint best"):
        export(tmp_path / "run", tmp_path / "out", checkpoint="best")
    with pytest.raises(ConfigError, match="there is none at all"):
        export(tmp_path / "nowhere", tmp_path / "out")


def test_a_damaged_checkpoint_is_not_exported(tmp_path, bf16_engine):
    flip(save_checkpoint(tmp_path / "run", 1, bf16_engine, None, {}) / "model.safetensors")
    with pytest.raises(StorageError, match=r"model\.safetensors: does not match its checksum"):
        export(tmp_path / "run", tmp_path / "out")
    assert names(tmp_path) == {"run"}


@pytest.mark.parametrize("limit", [100, 3000])
def test_a_full_disk_leaves_nothing_behind(tmp_path, bf16_engine, limit):
    save_checkpoint(tmp_path / "run", 1, bf16_engine, tokenizer(), {})
    with largest_file(limit):
        with pytest.raises(StorageError, match="errno 27"):
            save_pretrained(bf16_engine, tmp_path / "out", tokenizer())
        with pytest.raises(StorageError, match="errno 27"):
            export(tmp_path / "run", tmp_path / "out", dtype="float32")
    assert names(tmp_path) == {"run"}


def test_a_tokenizer_that_does_not_fit_on_the_disk_is_a_storage_error(tmp_path, bf16_engine):
    words = WordLevel({f"word{i}": i for i in range(5000)}, unk_token="word0")
    large = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    with largest_file(32 << 10), pytest.raises(StorageError, match="27"):
        save_pretrained(bf16_engine, tmp_path / "out", large)
    assert not any(tmp_path.iterdir())


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path, bf16_engine):
    save_checkpoint(tmp_path / "run", 1, bf16_engine, None, {})
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "half.safetensors").write_text("half")
    export(tmp_path / "run", tmp_path / "out")
    assert names(tmp_path) == {"run", "out"}
    assert not (tmp_path / "out" / "half.safetensors").exists()


@pytest.mark.parametrize("where", ["find_checkpoint", "open_shards"])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_named(
    tmp_path, new_engine, monkeypatch, where
):
    run, engine, later = tmp_path / "run", new_engine(layers=1), iter([2])
    original = getattr(export_module, where)

    def pruned(*asked: Any) -> Any:
        for step in later:
            found = original(*asked)
            save_checkpoint(run, step, engine, None, {}, keep=1)
            return found
        return original(*asked)

    save_checkpoint(run, 1, engine, None, {}, keep=1)
    monkeypatch.setattr(export_module, where, pruned)
    with pytest.raises(StorageError, match="was removed by its run while it was read"):
        export(run, tmp_path / "out")
    assert names(tmp_path) == {"run"}
    export(run, tmp_path / "out")
