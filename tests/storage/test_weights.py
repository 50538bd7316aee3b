"""Pretrained weights arrive bit for bit; a folder that is not what it claims is refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatrain.errors import ModelError, StorageError
from megatrain.memory.layout import ArraySpec
from megatrain.memory.store import Store
from megatrain.models.anatomy import layouts_of
from megatrain.models.pretrained import ModelSource
from megatrain.models.skeleton import Skeleton
from megatrain.optim.split import join_master
from megatrain.storage.safetensors_reader import read_chunks
from megatrain.storage.weights import load_weights

Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 48,
    "max_position_embeddings": 32,
}
WIDE: dict[str, Any] = {"intermediate_size": 40}
FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES, **WIDE, num_key_value_heads=2),
    "llama-tied": transformers.LlamaConfig(
        **SIZES, **WIDE, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "mistral": transformers.MistralConfig(**SIZES, **WIDE, num_key_value_heads=2, sliding_window=8),
    "qwen2": transformers.Qwen2Config(**SIZES, **WIDE, num_key_value_heads=2),
    "qwen3": transformers.Qwen3Config(
        **SIZES, **WIDE, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True
    ),
    "gpt-neox": transformers.GPTNeoXConfig(**SIZES, **WIDE),
    "falcon": transformers.FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-old": transformers.FalconConfig(
        **SIZES, new_decoder_architecture=False, multi_query=True
    ),
}


def store_for(config: Any, precision: str = "bfloat16") -> tuple[Skeleton, Store]:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    skeleton = Skeleton(config, dtype=dtype)
    arrays = [ArraySpec("weight", dtype)] + (
        [ArraySpec("remainder", torch.int16)] if precision == "bfloat16" else []
    )
    store = Store(layouts_of(skeleton.anatomy), arrays, device=torch.device("cpu"), threads=1)
    for block in skeleton.anatomy.blocks:
        for array in arrays:
            store.array(array.name, block.index).fill_(3)  # whatever was there must be overwritten
    return skeleton, store


def masters(skeleton: Skeleton, store: Store) -> Tensors:
    """The fp32 master weight of every tensor."""
    result = {}
    for block in skeleton.anatomy.blocks:
        flat = store.array("weight", block.index)
        master = (
            join_master(flat, store.array("remainder", block.index))
            if "remainder" in store.arrays
            else flat
        )
        result.update(block.layout.views(master))
    return result


def load(folder: Path, config: Any, precision: str = "bfloat16") -> Tensors:
    skeleton, store = store_for(config, precision)
    with store:
        load_weights(skeleton.anatomy, store, ModelSource("folder", folder))
        return {name: tensor.clone() for name, tensor in masters(skeleton, store).items()}


def save_model(
    folder: Path, config: Any, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> Tensors:
    """A random model on disk, and its tensors as fp32."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, **kwargs)
    return {name: parameter.detach().float() for name, parameter in model.named_parameters()}


def rewrite(folder: Path, change: Any) -> None:
    """Let `change` edit the tensors of a saved model."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


LLAMA, TIED = FAMILIES["llama"], FAMILIES["llama-tied"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_arrives_whole(tmp_path: Path, family: str) -> None:
    expected = save_model(tmp_path, FAMILIES[family])
    assert same(load(tmp_path, FAMILIES[family]), expected)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float_is_kept_exactly(tmp_path: Path, dtype: torch.dtype, precision: str) -> None:
    expected = save_model(tmp_path, LLAMA, dtype)
    assert same(load(tmp_path, LLAMA, precision), expected)


def test_a_bf16_source_has_no_remainder(tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA, torch.bfloat16)
    skeleton, store = store_for(LLAMA)
    with store:
        load_weights(skeleton.anatomy, store, ModelSource("folder", tmp_path))
        assert not any(
            view.any()
            for b in skeleton.anatomy.blocks
            for view in b.layout.views(store.array("remainder", b.index)).values()
        )


def test_tensors_larger_than_a_chunk_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.storage.weights.read_chunks", partial(read_chunks, chunk=100))
    expected = save_model(tmp_path, LLAMA)
    assert same(load(tmp_path, LLAMA), expected)


def test_shards_arrive(tmp_path: Path) -> None:
    expected = save_model(tmp_path, LLAMA, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(load(tmp_path, LLAMA), expected)


def test_a_folder_of_the_bare_base_model_is_understood(tmp_path: Path) -> None:
    expected = save_model(tmp_path, TIED)
    rewrite(
        tmp_path, lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()}
    )
    assert same(load(tmp_path, TIED), expected)


def test_constant_tables_of_older_releases_are_skipped(tmp_path: Path) -> None:
    expected = save_model(tmp_path, LLAMA)
    tables = [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.layers.1.attention.masked_bias",
    ]
    rewrite(tmp_path, lambda tensors: tensors | {name: torch.ones(3) for name in tables})
    assert same(load(tmp_path, LLAMA), expected)


def test_a_tied_head_may_be_there_too(tmp_path: Path) -> None:
    expected = save_model(tmp_path, TIED)
    rewrite(
        tmp_path,
        lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
    )
    assert same(load(tmp_path, TIED), expected)


def test_a_tied_head_may_stand_for_the_embedding(tmp_path: Path) -> None:
    expected = save_model(tmp_path, TIED)
    rewrite(
        tmp_path,
        lambda tensors: tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")},
    )
    assert same(load(tmp_path, TIED), expected)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, TIED)
    rewrite(
        tmp_path,
        lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
    )
    with pytest.raises(
        ModelError, match=r"lm_head\.weight differs from the embedding.*tie_word_embeddings"
    ):
        load(tmp_path, TIED)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA)
    rewrite(
        tmp_path,
        lambda tensors: {
            n: t for n, t in tensors.items() if n != "model.layers.1.mlp.up_proj.weight"
        },
    )
    with pytest.raises(
        ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight, which a llama model"
    ):
        load(tmp_path, LLAMA)


def test_an_untied_head_is_not_invented(tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA)
    rewrite(
        tmp_path,
        lambda tensors: {
            n.removeprefix("model."): t for n, t in tensors.items() if n != "lm_head.weight"
        },
    )
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        load(tmp_path, LLAMA)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA)
    rewrite(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if ".mlp." not in n})
    with pytest.raises(ModelError, match="and 3 more tensors"):
        load(tmp_path, LLAMA)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA)
    rewrite(
        tmp_path, lambda tensors: tensors | {"model.layers.2.mlp.up_proj.weight": torch.ones(2)}
    )
    with pytest.raises(
        ModelError, match=r"holds model\.layers\.2\.mlp\.up_proj\.weight, unknown to a llama model"
    ):
        load(tmp_path, LLAMA)


def test_a_tensor_with_two_names_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA)
    rewrite(tmp_path, lambda tensors: tensors | {"norm.weight": torch.ones(32)})
    with pytest.raises(ModelError, match=r"holds model\.norm\.weight twice"):
        load(tmp_path, LLAMA)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": torch.ones(47, 32)})
    with pytest.raises(
        ModelError,
        match=r"lm_head\.weight has shape \[47, 32\], but config\.json asks for \[48, 32\]",
    ):
        load(tmp_path, LLAMA)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_a_quantised_tensor_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    save_model(tmp_path, LLAMA)
    rewrite(
        tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"].to(dtype)}
    )
    with pytest.raises(
        ModelError, match=r"lm_head\.weight is \w+; training needs the unquantised model"
    ):
        load(tmp_path, LLAMA)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3.4e38])
def test_a_value_that_cannot_be_trained_is_named(tmp_path: Path, value: float) -> None:
    save_model(tmp_path, LLAMA)

    def poison(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = value

    rewrite(tmp_path, poison)
    with pytest.raises(
        ModelError, match=r"layers\.0\.mlp\.down_proj\.weight holds NaN, infinity or"
    ):
        load(tmp_path, LLAMA)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        load(tmp_path, LLAMA)


# -- GGUF -----------------------------------------------------------------------------------------


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order of rotary dimensions in which llama.cpp keeps queries and keys."""
    return (
        weight.view(heads, 2, weight.shape[0] // heads // 2, -1)
        .transpose(1, 2)
        .reshape(weight.shape)
        .contiguous()
    )


def write_gguf(path: Path, tensors: Tensors) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(40)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(48)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = permuted(tensor, 4 if "q_proj" in name else 2)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_arrives_whole(tmp_path: Path) -> None:
    expected = save_model(tmp_path / "folder", LLAMA)
    write_gguf(tmp_path / "tiny.gguf", expected)
    skeleton, store = store_for(LLAMA)
    with store:
        load_weights(skeleton.anatomy, store, ModelSource("gguf", tmp_path, "tiny.gguf"))
        assert same(masters(skeleton, store), expected)


def test_a_gguf_file_that_lacks_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    expected = save_model(tmp_path / "folder", LLAMA)
    expected.pop("model.norm.weight")
    write_gguf(tmp_path / "tiny.gguf", expected)
    skeleton, store = store_for(LLAMA)
    with store, pytest.raises(ModelError, match=r"tiny\.gguf: lacks model\.norm\.weight"):
        load_weights(skeleton.anatomy, store, ModelSource("gguf", tmp_path, "tiny.gguf"))
