"""Mixtures are published expert by expert: transformers' folders go in, and the same come out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming

from megatrain.engine.engine import Engine
from megatrain.errors import ModelError
from megatrain.models.pretrained import as_classifier, resolve_source
from megatrain.models.skeleton import Skeleton
from megatrain.optim import AdamW, Muon
from megatrain.settings import Settings
from megatrain.storage.checkpoint import load_checkpoint, save_checkpoint
from megatrain.storage.export import export
from tests.helpers.compare import differing, distance
from tests.helpers.files import logits_of
from tests.helpers.plain import train_plain
from tests.helpers.runs import state_of, train_engine
from tests.helpers.support import (
    CONSTANT,
    FALCON,
    SIZES,
    VOCABULARY,
    micro_batches,
    plain_model,
    tiny_config,
)

MODEL: dict[str, Any] = {**SIZES, "num_hidden_layers": 2, "tie_word_embeddings": False}
MOE = MODEL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = MODEL | {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = MOE | {"shared_expert_intermediate_size": 16, "head_dim": 8}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
LATENT = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_key_value_heads": 4}
MAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
MAMBA |= {"expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False}

# name -> (configuration class, its arguments): one for each way in which a folder may differ from
# the model. `python -m benchmarks.families` does the same with every family that there is.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # expert by expert: beside dense layers, under another name, renamed as well, of a larger model
    "deepseek_v2": ("DeepseekV2Config", MOE | LATENT | {"first_k_dense_replace": 1}),
    "jamba": ("JambaConfig", MOE | MAMBA),
    "flint": ("FlintConfig", MOE | {"head_dim": 8}),
    "mixtral": ("MixtralConfig", LOCAL),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", SHARED | LINEAR),
    # other tensors that are one in the model
    "olmo_hybrid": ("OlmoHybridConfig", MODEL | LINEAR),
    # published as they are, or renamed
    "falcon": ("FalconConfig", FALCON | {"num_hidden_layers": 2}),
    "gpt_neox": ("GPTNeoXConfig", MODEL),
    "gpt_oss": ("GptOssConfig", LOCAL | {"head_dim": 8, "sliding_window": 5}),
    "granitemoe": ("GraniteMoeConfig", LOCAL),
}
# with tensors that are not trained: buffers, frozen parameters, indexers without gradients
FAMILIES |= {name: CONSTANT[name] for name in (
    "afmoe", "apertus", "deepseek-v32", "ernie4-5-moe", "gemma4",
)}  # fmt: skip
KNOWN = [family for family, (name, _) in FAMILIES.items() if name in dir(transformers)]
# for the tests below
FAMILIES |= {
    "qwen3_moe": ("Qwen3MoeConfig", MOE | {"head_dim": 8}),
    "qwen3_5": ("Qwen3_5TextConfig", MODEL | LINEAR | {"head_dim": 8}),
}
STEPS = [micro_batches(seed) for seed in range(2)]
RATES = [1e-3, 8e-4]
IDS = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))


def config_of(family: str) -> Any:
    name, arguments = FAMILIES[family]
    return getattr(transformers, name)(**arguments)


def open_engine(source: Path, optimizer: Any = None, precision: str = "float32") -> Engine:
    return Engine.from_pretrained(
        source,
        optimizer=optimizer or AdamW(lr=1e-3, weight_decay=0.1),
        precision=precision,
        device="cpu",
        max_grad_norm=0.5,
        router_aux_loss_coef=0,
        settings=Settings(head_chunk_tokens=7),
    )


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def config_in(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], tuple[nn.Module, Path]]:
    """A random model of a family, and the folder that transformers saves of it."""

    def save(family: str) -> tuple[nn.Module, Path]:
        model: Any = plain_model(config_of(family))
        model.save_pretrained(tmp_path / "in")
        return model, tmp_path / "in"

    return save


@pytest.mark.parametrize("family", KNOWN)  # of this release of transformers
def test_a_folder_of_transformers_goes_in_and_out_and_is_trained(saved, tmp_path, family):
    model, folder = saved(family)
    with open_engine(folder) as engine:
        engine.save_pretrained(tmp_path / "out")
        given, written = tensors_of(folder), tensors_of(tmp_path / "out")
        assert differing(written, given) == []
        assert config_in(tmp_path / "out") == config_in(folder)
        assert differing(dict(engine.iter_weights()), given) == []
        ours = train_engine(engine, STEPS, RATES)
        engine.save_pretrained(tmp_path / "trained")
        kept = {
            name
            for block in range(len(engine.published))
            for name, _ in engine.constants.of_block(block)
        }
        trained = tensors_of(tmp_path / "trained")
        assert set(differing(trained, given)) == set(given) - kept
        logits = engine.logits(IDS)
    twin = train_plain(copy.deepcopy(model), STEPS, RATES, backwards=True)
    plain = train_plain(model, STEPS, RATES)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-5)
    names = [name for name in plain.weights if name not in engine.constants]
    assert sorted(ours.weights) == sorted(names)
    for name in names:
        weight = plain.weights[name]
        bound = max(1e-5, 10 * distance(twin.weights[name], weight))
        assert distance(ours.weights[name], weight) <= bound, name
    torch.testing.assert_close(logits_of(tmp_path / "trained", IDS), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [(AdamW(lr=1e-3, moments="int8"), "float32"), (Muon(lr=1e-3), "bfloat16")],
    ids=["adamw", "muon"],
)
def test_a_checkpoint_has_the_folder_s_tensors_and_goes_on(saved, tmp_path, precision, optimizer):
    """Scales of groups and moments of all but matrices keep the model's own tensors."""
    _, folder = saved("qwen3_moe")
    with open_engine(folder, optimizer, precision) as engine:
        train_engine(engine, STEPS[:1])
        checkpoint = save_checkpoint(tmp_path / "run", 1, engine, None, {})
        assert tensors_of(checkpoint).keys() == tensors_of(folder).keys()
        expected = state_of(engine)
        with open_engine(folder, optimizer, precision) as other:
            load_checkpoint(checkpoint, other)
            assert differing(state_of(other), expected) == []
            train_engine(other, STEPS[1:])
            train_engine(engine, STEPS[1:])
            assert differing(state_of(other), state_of(engine)) == []
    out = export(tmp_path / "run", tmp_path / "out", "float32")
    assert tensors_of(out).keys() == tensors_of(folder).keys()


# -- folders with other names ----------------------------------------------------------------------

Tensors = dict[str, Tensor]


def renamed(tensors: Tensors, *changes: tuple[str, str]) -> Tensors:
    for old, new in changes:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


# family, what a name is changed from and to
OTHERS: dict[str, tuple[str, tuple[str, str]]] = {
    "without the base model's prefix": ("qwen3_moe", ("model.", "")),
    "as transformers names its modules": ("gpt_neox", ("embed_out", "lm_head")),
    "with tensors that are not trained": ("afmoe", ("", "")),
    "inside a model of images and text": ("qwen3_5", ("model.", "model.language_model.")),
}


@pytest.mark.parametrize("case", OTHERS)
def test_names_that_transformers_understands_are_kept(saved, tmp_path, case):
    family, change = OTHERS[case]
    _, folder = saved(family)
    given = renamed(tensors_of(folder), change)
    save_file(given, folder / "model.safetensors", {"format": "pt"})
    with open_engine(folder) as engine:
        engine.save_pretrained(tmp_path / "out")
        assert differing(tensors_of(tmp_path / "out"), given) == []
        checkpoint = save_checkpoint(tmp_path / "run", 1, engine, None, {})
        expected = state_of(engine)
    with Engine.from_config(config_of(family), precision="float32", device="cpu") as other:
        load_checkpoint(checkpoint, other)
        assert differing(state_of(other), expected) == []
        assert differing(dict(other.iter_weights()), given) == []


def fused(tensors: Tensors) -> Tensors:
    """A Mixtral folder as earlier releases of ours wrote it."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        path = f"model.layers.{layer}.block_sparse_moe.experts"
        ups = [
            torch.cat([tensors[f"{path}.{expert}.{part}.weight"] for part in ("w1", "w3")])
            for expert in range(4)
        ]
        downs = [tensors[f"{path}.{expert}.w2.weight"] for expert in range(4)]
        found |= {f"{path}.gate_up_proj": torch.stack(ups), f"{path}.down_proj": torch.stack(downs)}
    return found


def test_fused_experts_are_understood_and_published_one_by_one(saved, tmp_path):
    _, folder = saved("mixtral")
    given = tensors_of(folder)
    save_file(fused(given), folder / "model.safetensors", {"format": "pt"})
    with open_engine(folder) as engine:
        engine.save_pretrained(tmp_path / "out")
    assert differing(tensors_of(tmp_path / "out"), given) == []


EXPERT = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "an expert too few": (
        lambda tensors: {n: t for n, t in tensors.items() if n != EXPERT.format(3)},
        r"lacks model\.layers\.1\..*experts\.3\.w2\.weight, which a mixtral model",
    ),
    "an expert too many": (
        lambda tensors: tensors | {EXPERT.format(4): torch.ones(2)},
        r"holds model\.layers\.1\..*experts\.4\.w2\.weight, unknown to a mixtral model",
    ),
    "an expert of another size": (
        lambda tensors: tensors | {EXPERT.format(0): torch.ones(2, 2)},
        r"experts\.0\.w2\.weight has shape \[2, 2\], but config\.json asks for \[32, 64\]",
    ),
    "experts alone and together": (
        lambda tensors: tensors | fused(tensors),
        r"holds model\.layers\.0\.mlp\.experts\.\w+ twice, whole and in parts",
    ),
}


def test_a_folder_that_is_not_what_it_claims_is_refused(saved):
    for case in REFUSED:
        change, words = REFUSED[case]
        _, folder = saved("mixtral")
        save_file(change(tensors_of(folder)), folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=words):
            open_engine(folder)


def test_a_reward_model_of_a_folder_with_further_tensors_has_its_own_config(tmp_path):
    config = config_of("qwen3_5")
    model: Any = plain_model(config)
    model.save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(3)}, file, {"format": "pt"})
    given: dict[str, Any] = {"device": "cpu", "precision": "float32"}
    with Engine.from_config(as_classifier(config, 0), **given) as engine:
        engine.load_weights(resolve_source(tmp_path / "in"))
        engine.save_pretrained(tmp_path / "out")
    (name,) = json.loads((tmp_path / "out" / "config.json").read_text())["architectures"]
    assert name.endswith("ForSequenceClassification")


# -- what is no range of an array ------------------------------------------------------------------

Q, K = "self_attn.q_proj.weight", "self_attn.k_proj.weight"
REARRANGED: dict[str, tuple[list[Any], str]] = {
    "strided": (
        [WeightConverter(Q, Q, operations=[Transpose()])],
        r"layers\.0\.self_attn\.q_proj\.weight is rearranged when transformers loads it",
    ),
    "two of one name": (
        [WeightRenaming("self_attn.x.weight", name) for name in (Q, K)],
        r"does not save every tensor of layers\.0 once",
    ),
}


@pytest.mark.parametrize("case", REARRANGED)
def test_a_family_whose_tensors_are_rearranged_is_refused(case, monkeypatch):
    mapping, words = REARRANGED[case]
    assert conversion_mapping.get_checkpoint_conversion_mapping("llama") is None  # fills the cache
    cache: Any = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setitem(cache, "llama", mapping)
    with pytest.raises(ModelError, match=rf"^LlamaForCausalLM: .*{words}"):
        Skeleton(tiny_config("llama"), dtype=torch.float32)
