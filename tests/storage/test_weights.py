"""Pretrained weights arrive bit for bit; a folder that is not what it claims is refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatrain.engine.engine import Engine
from megatrain.errors import ModelError
from megatrain.memory.layout import ArraySpec
from megatrain.memory.store import Store
from megatrain.models.anatomy import layouts_of
from megatrain.models.pretrained import ModelSource
from megatrain.models.skeleton import Skeleton
from megatrain.optim.split import join_master
from megatrain.storage.safetensors import INDEX
from megatrain.storage.weights import load_weights
from tests.helpers.files import add_tensors, gguf_writer
from tests.helpers.support import plain_model, tiny_config

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]
ONES = torch.ones(3)
SIZES: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 48, "max_position_embeddings": 32}
WIDE: Any = {**SIZES, "intermediate_size": 40}
SHARED: Any = {**WIDE, "num_key_value_heads": 2}
TIED = transformers.LlamaConfig(**SHARED, tie_word_embeddings=True)
LLAMA = transformers.LlamaConfig(**SHARED)


def store_for(config: Any, precision: str = "bfloat16") -> tuple[Skeleton, Store]:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    skeleton, arrays = Skeleton(config, dtype=dtype), [ArraySpec("weight", dtype)]
    if precision == "bfloat16":
        arrays.append(ArraySpec("remainder", torch.int16))
    store = Store(layouts_of(skeleton.anatomy), arrays, device=torch.device("cpu"), threads=1)
    for block in skeleton.anatomy.blocks:
        for array in arrays:
            store.array(array.name, block.index).fill_(3)  # whatever was there must be overwritten
    return skeleton, store


def masters(skeleton: Skeleton, store: Store) -> Tensors:
    """The fp32 master weight of every tensor."""
    result = {}
    for block in skeleton.anatomy.blocks:
        master = store.array("weight", block.index)
        if "remainder" in store.arrays:
            master = join_master(master, store.array("remainder", block.index))
        result.update(block.layout.views(master))
    return result


def load(folder: Path, config: Any, precision: str = "bfloat16", file: str = "") -> Tensors:
    source = ModelSource("gguf", folder, file) if file else ModelSource("folder", folder)
    skeleton, store = store_for(config, precision)
    with store:
        load_weights(skeleton.anatomy, store, source, skeleton.constants)
        return {name: tensor.clone() for name, tensor in masters(skeleton, store).items()}


def save_model(folder: Path, config: Any, dtype: Any = torch.float32, **kwargs: Any) -> Tensors:
    """A random model on disk, and its tensors as fp32."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, **kwargs)
    return {name: parameter.detach().float() for name, parameter in model.named_parameters()}


def rewrite(folder: Path, change: Change) -> None:
    """Let `change` edit the tensors of a saved model."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_is_float32_among_others_is_told(tmp_path, caplog):
    """transformers keeps routers of some mixtures so."""
    model: Any = plain_model(tiny_config("llama"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    name = "model.norm.weight"
    rewrite(tmp_path, lambda tensors: tensors | {name: tensors[name].float()})
    for precision, told in (("bfloat16", 1), ("float32", 0)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "megatrain"):
            Engine.from_pretrained(tmp_path, precision=precision, device="cpu").close()
        assert caplog.text.count(f"has {name} in float32, unlike the rest") == told


def test_every_float_is_kept_exactly(tmp_path):
    for precision in ["bfloat16", "float32"]:
        for dtype in [torch.float32, torch.bfloat16, torch.float16]:
            expected = save_model(tmp_path, LLAMA, dtype)
            assert same(load(tmp_path, LLAMA, precision), expected)


def test_tensors_larger_than_a_chunk_arrive(tmp_path, monkeypatch):
    monkeypatch.setattr("megatrain.storage.safetensors.CHUNK_ELEMENTS", 100)
    expected = save_model(tmp_path, LLAMA)
    assert same(load(tmp_path, LLAMA), expected)


def test_shards_arrive(tmp_path):
    expected = save_model(tmp_path, LLAMA, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(load(tmp_path, LLAMA), expected)


def test_a_tied_head_that_the_index_names_and_no_file_holds_is_not_missed(tmp_path):
    expected, index = save_model(tmp_path, TIED, max_shard_size="20KB"), tmp_path / INDEX
    known = json.loads(index.read_text())
    known["weight_map"][HEAD] = min(known["weight_map"].values())
    index.write_text(json.dumps(known))
    assert same(load(tmp_path, TIED), expected)
    untied = transformers.LlamaConfig(**SHARED, tie_word_embeddings=False)
    untied.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight, which a llama model"):
        load(tmp_path, untied)


HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
TABLES = (
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.rotary_emb.inv_freq",
    "model.layers.1.attention.masked_bias",
)


def bare(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def without(tensors: Tensors, part: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


UNDERSTOOD: dict[str, tuple[Any, Change]] = {
    "the bare base model": (TIED, bare),
    "constant tables of older releases": (LLAMA, lambda t: t | {n: torch.ones(3) for n in TABLES}),
    "a tied head too": (TIED, lambda t: t | {HEAD: t[EMBED].clone()}),
    "a tied head for the embedding": (TIED, lambda t: t | {HEAD: t.pop(EMBED)}),
}


def test_other_ways_to_save_a_model_are_understood(tmp_path):
    for case in UNDERSTOOD:
        config, change = UNDERSTOOD[case]
        expected = save_model(tmp_path, config)
        rewrite(tmp_path, change)
        assert same(load(tmp_path, config), expected)


def cast(dtype: torch.dtype) -> Change:
    return lambda tensors: tensors | {HEAD: tensors[HEAD].to(dtype)}


def poisoned(value: float) -> Change:
    def change(tensors: Tensors) -> Tensors:
        tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = value
        return tensors

    return change


UP = "model.layers.{}.mlp.up_proj.weight"
QUANTISED = r"lm_head\.weight is \w+; training needs the unquantised model"
NOT_FINITE = r"layers\.0\.mlp\.down_proj\.weight holds NaN, infinity or"
REFUSED: list[tuple[Change, str]] = [
    (
        lambda t: without(t, UP.format(1)),
        r"lacks model\.layers\.1\.mlp\.up_proj\.weight, which a ll",
    ),
    (lambda t: bare(without(t, HEAD)), r"lacks lm_head\.weight"),
    (lambda t: without(t, ".mlp."), "and 3 more tensors"),
    (lambda t: t | {UP.format(2): ONES}, r"holds model\.layers\.2\..*, unknown to a llama model"),
    (lambda t: t | {"norm.weight": torch.ones(32)}, r"holds model\.norm\.weight twice"),
    (
        lambda t: t | {HEAD: torch.ones(47, 32)},
        r"shape \[47, 32\], but config\.json asks for \[48, 32\]",
    ),
    *((cast(dtype), QUANTISED) for dtype in (torch.int8, torch.float8_e4m3fn, torch.float64)),
    *((poisoned(float(value)), NOT_FINITE) for value in ("nan", "inf", "-inf", "3.4e38")),
]


def test_a_folder_that_is_not_what_it_claims_is_refused(tmp_path):
    for change, words in REFUSED:
        save_model(tmp_path, LLAMA)
        rewrite(tmp_path, change)
        with pytest.raises(ModelError, match=words):
            load(tmp_path, LLAMA)


def test_a_tied_head_that_differs_is_refused(tmp_path):
    save_model(tmp_path, TIED)
    rewrite(tmp_path, lambda tensors: tensors | {HEAD: tensors[EMBED] + 1})
    words = r"lm_head\.weight differs from the embedding.*tie_word_embeddings"
    with pytest.raises(ModelError, match=words):
        load(tmp_path, TIED)


# -- GGUF ----------------------------------------------------------------------------------------


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order of rotary dimensions in which llama.cpp keeps queries and keys."""
    halves = weight.view(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2)
    return halves.reshape(weight.shape).contiguous()


def write_gguf(path: Path, tensors: Tensors) -> None:
    with gguf_writer(path, LLAMA) as writer:
        writer.add_name("tiny")
        for name, tensor in tensors.items():
            heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
            add_tensors(writer, {name: permuted(tensor, heads) if heads else tensor}, layers=2)


def test_a_gguf_file_arrives_whole(tmp_path):
    expected = save_model(tmp_path / "folder", LLAMA)
    write_gguf(tmp_path / "tiny.gguf", expected)
    assert same(load(tmp_path, LLAMA, file="tiny.gguf"), expected)
