"""Frozen tensors against plain PyTorch with `requires_grad = False` on the same, in every mode; in
what is saved, bit for bit as they came; and without anything that only training needs."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import megatrain as mt
from megatrain.engine.engine import Engine
from megatrain.engine.verify import gradients_of, tensors_of, weights_of
from megatrain.errors import ConfigError
from megatrain.models.plain import plain_gradients
from megatrain.optim import AdamW, Lion, Muon
from megatrain.settings import ALL, Settings
from megatrain.storage.checkpoint import checkpoint_bytes, save_checkpoint, write_final
from megatrain.storage.export import export, unchanged
from megatrain.storage.restore import load_checkpoint
from megatrain.storage.run_folder import PASSENGERS
from tests.compare import apart, differing, distance
from tests.delays import LANES, delay
from tests.plain import train_plain
from tests.runs import Trace, assert_same, cosine, run, train_engine, train_with_a_break
from tests.support import (
    FAMILIES,
    MORE_FAMILIES,
    engine_of,
    full_batches,
    micro_batches,
    plain_model,
    tiny_config,
)

STEPS = [micro_batches(seed) for seed in range(3)]
RATES = cosine(len(STEPS), 1e-3)
EMBEDDING = "model.embed_tokens.*"
# by what they leave to do: of three layers and the two ends
FROZEN = {
    "the embedding": (EMBEDDING,),
    "the embedding and the first layer": (EMBEDDING, "*.layers.0.*"),
    "a layer in the middle": ("model.layers.1.*",),
    "parts of layers": (EMBEDDING, "*.layers.0.*", "*.layers.1.*proj*", "*norm.weight"),
    "the head": ("lm_head.weight", "model.norm.weight"),
    "all but the last layer": (EMBEDDING, "*.layers.[01].*", "lm_head.*", "model.norm.*"),
    "all but the head": (EMBEDDING, "*.layers.*"),
}
OF_MIXTURES = {
    "routers": ("*.gate.weight",),
    "experts": ("*.experts.*",),
    "a fused tensor by its own name": ("model.layers.1.mlp.experts.gate_up_proj", EMBEDDING),
}
MODES = {
    "retained": Settings(retained=ALL),
    "partly retained": Settings(retained=1, head_chunk_tokens=7),
    "two groups": Settings(groups=2),
    "sums on the device": Settings(groups=3, sums_on_device=2),
    "computed twice": Settings(second_backward=True),
    "offloaded": Settings(offload_activations=True),
    "graphs on the host": Settings(offload_activations=True, retained=1, retained_on_host=2),
    "front resident": Settings(resident=2),
    "all resident, in groups": Settings(resident=ALL, groups=2),
    "in chunks": Settings(layer_chunk_tokens=4),
}


@cache
def plain_trace(
    family: str, patterns: tuple[str, ...], device: str = "cpu", **options: Any
) -> Trace:
    """What plain PyTorch makes of the steps."""
    with engine_of(family, freeze=patterns) as engine:
        frozen = engine.anatomy.frozen
    model = plain_model(tiny_config(family), device=device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return train_plain(model, STEPS, RATES, **options)


def assert_trains_as(
    family: str, patterns: tuple[str, ...], *, plain: Trace | None = None, **options: Any
) -> None:
    expected = plain or plain_trace(family, patterns, options.get("device", "cpu"))
    near = 1e-6 if options.get("device", "cpu") == "cpu" else 1e-4
    with engine_of(family, freeze=patterns, **options) as engine:
        frozen, before = engine.anatomy.frozen, weights_of(engine)
        ours = train_engine(engine, STEPS, RATES)
    assert frozen
    assert ours.losses == pytest.approx(expected.losses, rel=near)
    assert ours.norms == pytest.approx(expected.norms, rel=10 * near)
    for name, weight in expected.weights.items():
        assert distance(ours.weights[name], weight) <= 1e-5, name
        assert torch.equal(ours.weights[name], before[name]) == (name in frozen), name


@pytest.mark.parametrize("what", FROZEN)
def test_training_is_that_of_plain_pytorch(what, device):
    assert_trains_as("llama", FROZEN[what], device=device)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_gradients_are_those_of_plain_pytorch_in_every_family(family):
    model, batches = plain_model(tiny_config(family)), micro_batches(1)
    with engine_of(family, weights=model) as engine:
        blocks = [[t.name for t in block.layout.tensors] for block in engine.anatomy.blocks]
    frozen = (*blocks[0], *blocks[1], *blocks[2][::2], blocks[3][0])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    plain_gradients(model, batches)
    with engine_of(family, weights=model, freeze=frozen) as engine:
        engine.forward_backward(batches)
        ours = gradients_of(engine)
    plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert apart(ours, plain, of_largest=1e-6) == []


@pytest.mark.parametrize("what", OF_MIXTURES)
def test_mixtures_too(what, device):
    assert_trains_as("mixtral", OF_MIXTURES[what], device=device)


@pytest.mark.parametrize("what", ["parts of layers", "a layer in the middle"])
@pytest.mark.parametrize("mode", MODES)
def test_in_every_mode(mode, what, device):
    assert_trains_as("llama", FROZEN[what], settings=MODES[mode], device=device)


@pytest.mark.parametrize("blocks", [3, 5])
def test_on_nvme(blocks, tmp_path):
    settings = Settings(nvme_blocks=blocks, nvme_arrays="all", nvme_folders=(tmp_path,))
    assert_trains_as("llama", FROZEN["parts of layers"], settings=settings)


@pytest.mark.parametrize("what", FROZEN)
def test_without_clipping(what):
    plain = plain_trace("llama", FROZEN[what], max_norm=float("inf"))
    assert_trains_as("llama", FROZEN[what], plain=plain, max_grad_norm=None)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_either_name_of_a_tied_tensor_freezes_it(name):
    """As in plain PyTorch, where both are one parameter."""
    assert_trains_as("llama-tied", (name,))
    with engine_of("llama-tied", freeze=(name,)) as engine:
        engine.forward_backward(STEPS[0])
        assert "model.embed_tokens.weight" not in gradients_of(engine)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.usefixtures("no_code_is_generated")
@pytest.mark.parametrize("cheap", [False, True])
def test_compiled(cheap):
    settings = Settings(compile=True, retained=1, cheap_retention=cheap)
    assert_trains_as("llama", FROZEN["parts of layers"], settings=settings)


def test_balanced_routers_pull_at_what_is_trained_though_they_are_frozen():
    batch = full_batches(0, [(2, 9)])[0]
    model: Any = plain_model(tiny_config("mixtral"))
    model.router_aux_loss_coef = 0.1
    frozen = ("*.gate.weight", "*embed*")
    with engine_of("mixtral", freeze=frozen, router_aux_loss_coef=0.1) as engine:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in engine.anatomy.frozen)
        model(**batch, output_router_logits=True, use_cache=False).loss.backward()
        engine.forward_backward([batch])
        ours = gradients_of(engine)
    plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == plain.keys()
    assert all(distance(ours[name], grad) < 1e-5 for name, grad in plain.items())


# -- what is left out ------------------------------------------------------------------------------


@pytest.mark.parametrize("what", FROZEN)
@pytest.mark.parametrize("retained", [0, ALL])
def test_backward_ends_at_the_first_block_that_is_trained(what, retained, monkeypatch):
    with engine_of("llama", freeze=FROZEN[what], settings=Settings(retained=retained)) as engine:
        skeleton, seen = engine.skeleton, dict[str, list[int]](embed=[], layer=[], layer_again=[])
        for name, calls in seen.items():
            original = getattr(skeleton, name)

            def counted(*given: Any, original: Any = original, calls: list[int] = calls) -> Any:
                calls.append(given[0] if isinstance(given[0], int) else 0)
                return original(*given)

            monkeypatch.setattr(skeleton, name, counted)
        engine.forward_backward(full_batches(0, [(2, 8)]))
        first, trained = engine.anatomy.first_trained, [b.trains for b in engine.anatomy.blocks]
        finished = [gradient.block for gradient in engine.parts.sink.finished]
    assert finished == [block for block in reversed(range(5)) if trained[block]]
    assert len(seen["embed"]) == 1 + (first == 0)
    visited = [layer for layer in (2, 1, 0) if layer + 1 >= first]
    assert seen["layer_again"] == ([] if retained else visited)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("optimizer", [AdamW(), AdamW(moments="int8"), Lion(), Muon()], ids=repr)
def test_they_have_a_weight_and_nothing_else(precision, optimizer):
    with engine_of("llama", freeze=FROZEN["parts of layers"], optimizer=optimizer) as engine:
        store = engine.store
        for block, layout in enumerate(store.layouts):
            frozen = sum(spec.numel for spec in layout.tensors if spec.frozen)
            assert layout.parameters == layout.trained.parameters + frozen
            assert store.array("weight", block).numel() == layout.numel
            for name in (name for name in store.arrays if name != "weight"):
                named = {spec.name for spec in store.layout(name, block).tensors}
                assert not named & set(engine.anatomy.frozen)
                assert store.array(name, block).numel() <= layout.trainable
        # embedding and first layer
        assert [layout.trainable for layout in store.layouts[:2]] == [0, 0]


def test_random_delays_change_no_bit():
    def trained(slow: bool) -> Trace:
        config = tiny_config("qwen2-tied", num_hidden_layers=4)
        frozen = ("*.layers.0.*", "*.layers.2.*", "*.layers.1.*mlp*", EMBEDDING)
        settings = Settings(groups=2, offload_activations=True)
        engine = engine_of(config, freeze=frozen, settings=settings, precision="bfloat16")
        return run(delay(engine, (*LANES, "compute"), 0.002) if slow else engine, STEPS)

    assert_same(trained(True), trained(False))


# -- what is saved ---------------------------------------------------------------------------------


def folder_of(family: str, dtype: torch.dtype, folder: Path) -> Path:
    model: Any = plain_model(tiny_config(family), dtype=dtype)
    model.save_pretrained(folder)
    return folder


def open_engine(source: Path, freeze: tuple[str, ...], **options: Any) -> Engine:
    options = {"precision": "bfloat16", "optimizer": AdamW(lr=1e-3), **options}
    settings = Settings(head_chunk_tokens=7)
    return Engine.from_pretrained(source, freeze=freeze, device="cpu", settings=settings, **options)


def frozen_in(engine: Engine, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a folder's tensors, those that are frozen."""
    layouts = engine.store.layouts
    names = {
        tensor.name
        for block, found in enumerate(engine.published)
        for tensor in found
        if tensor.offset >= layouts[block].trainable
    }
    assert names
    return {name: tensor for name, tensor in tensors.items() if name in names}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [found[name].dtype for name in expected] == [t.dtype for t in expected.values()]
    assert differing(found, expected) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("precision", ["bfloat16", "float32", "fp8"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_folder_s_frozen_tensors_come_out_as_they_went_in(family, precision, dtype, tmp_path):
    what = FROZEN["parts of layers"] if family == "llama" else ("*embed*", *OF_MIXTURES["experts"])
    source = folder_of(family, dtype, tmp_path / "source")
    given = tensors_of(source)
    with open_engine(source, what, precision=precision) as engine:
        frozen = frozen_in(engine, given)
        engine.train_step(STEPS[0])
        engine.save_pretrained(tmp_path / "saved")
        save_checkpoint(tmp_path / "run", 1, engine, None, {})
        computed = {name: weight for name, weight in engine.iter_weights() if name in frozen}
    write_final(tmp_path / "run")
    for name in ("bfloat16", "float32"):
        export(tmp_path / "run", tmp_path / name, name)
    for folder in ("saved", "run/checkpoint-1", "run/final", "bfloat16", "float32"):
        written = tensors_of(tmp_path / folder)
        same({name: t for name, t in written.items() if name in frozen}, frozen)
        assert written.keys() == given.keys()
        assert not any(
            torch.equal(written[n].float(), given[n].float()) for n in ("lm_head.weight",)
        )
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
    # computed with as if it trained
    with open_engine(source, (), precision=precision) as engine:
        same(computed, {n: weight for n, weight in engine.iter_weights() if n in frozen})


def test_checkpoints_share_one_copy_and_take_what_they_say(tmp_path):
    source = folder_of("llama", torch.float32, tmp_path / "source")
    with open_engine(source, FROZEN["parts of layers"]) as engine:
        for step in (1, 2):
            engine.train_step(STEPS[0])
            save_checkpoint(tmp_path / "run", step, engine, None, {})
        once = sum(tensor.nbytes for tensor in unchanged(engine))
        assert once == 4 * engine.anatomy.frozen_parameters
        assert checkpoint_bytes(engine) == 12 * engine.anatomy.parameters
    checkpoints = [tmp_path / "run" / f"checkpoint-{step}" for step in (1, 2)]
    linked = {path.name: path.stat() for path in (tmp_path / "run" / PASSENGERS).glob("*.safe*")}
    assert linked
    for checkpoint in checkpoints:
        files = {str(p.relative_to(checkpoint)): p.stat() for p in checkpoint.rglob("*.safe*")}
        assert all(files[name].st_ino == there.st_ino for name, there in linked.items())
        own = sum(s.st_size for name, s in files.items() if name not in linked)
        assert 0 <= own - 12 * engine.anatomy.parameters <= 16_000  # headers


@pytest.mark.parametrize("optimizer", [AdamW(moments="int8"), Lion(), Muon()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_halves_are_one_run_though_the_source_is_gone(optimizer, dtype, tmp_path):
    source = folder_of("llama", dtype, tmp_path / "source")
    given = tensors_of(source)
    what, steps = FROZEN["parts of layers"], [micro_batches(seed) for seed in range(4)]
    whole = run(open_engine(source, what, optimizer=optimizer), steps)
    with open_engine(source, what, optimizer=optimizer) as engine:
        frozen = frozen_in(engine, given)

    def opened() -> Engine:
        if not (tmp_path / "run" / "checkpoint-2").exists():
            return open_engine(source, what, optimizer=optimizer)
        shutil.rmtree(source)
        return engine_of("llama", precision="bfloat16", optimizer=optimizer, freeze=what,
                         max_grad_norm=1.0)  # fmt: skip

    assert_same(train_with_a_break(opened, steps, tmp_path / "run"), whole)
    with engine_of("llama", precision="bfloat16", optimizer=optimizer, freeze=what) as engine:
        load_checkpoint(tmp_path / "run" / "checkpoint-2", engine)
        save_checkpoint(tmp_path / "run", 5, engine, None, {})
    last = tensors_of(tmp_path / "run" / "checkpoint-5")
    same({name: tensor for name, tensor in last.items() if name in frozen}, frozen)


@pytest.mark.parametrize("now", [(), (EMBEDDING,), ("lm_head.weight", "model.norm.weight")])
def test_a_checkpoint_of_other_frozen_tensors_is_refused(now, tmp_path):
    with engine_of("llama", freeze=FROZEN["the head"][:1]) as engine:
        path = save_checkpoint(tmp_path, 1, engine, None, {})
    reason = "was saved with|other tensors"
    with engine_of("llama", freeze=now) as engine, pytest.raises(ConfigError, match=reason):
        load_checkpoint(path, engine)


def test_drawn_weights_are_frozen_as_they_are_computed_with(tmp_path):
    config, settings = tiny_config("llama"), Settings(head_chunk_tokens=7)
    with Engine.from_config(
        config, freeze=EMBEDDING, precision="bfloat16", device="cpu", settings=settings
    ) as engine:
        drawn = dict(engine.iter_weights())["model.embed_tokens.weight"].clone()
        engine.train_step(STEPS[0])
        engine.save_pretrained(tmp_path / "saved")
    saved = tensors_of(tmp_path / "saved")["model.embed_tokens.weight"]
    assert saved.dtype == torch.bfloat16
    assert torch.equal(saved, drawn)


def test_without_patterns_nothing_is_frozen():
    with engine_of("llama") as engine, engine_of("llama", freeze=()) as same_engine:
        assert engine.anatomy.blocks == same_engine.anatomy.blocks
        assert not engine.anatomy.frozen
        assert all(layout.trained is layout for layout in engine.store.layouts)


def test_evaluation_and_logits_know_no_difference():
    with engine_of("llama") as engine, engine_of("llama", freeze=FROZEN["the head"]) as frozen:
        batches = micro_batches(1)
        assert engine.evaluate(batches).loss == frozen.evaluate(batches).loss
        assert torch.equal(
            engine.logits(batches[0]["input_ids"]), frozen.logits(batches[0]["input_ids"])
        )


def test_a_plan_of_a_frozen_model_opens_its_engine(tmp_path):
    source = folder_of("llama", torch.float32, tmp_path / "model")
    options: dict[str, Any] = {"precision": "bfloat16", "device": "cpu"}
    plan = mt.plan(
        str(source), tokens_per_step=64, seq_len=16, train={"freeze": [EMBEDDING]}, **options
    )
    planned = Engine.from_pretrained(
        source, tokens_per_step=64, seq_len=16, freeze=[EMBEDDING], **options
    )
    with planned, Engine.from_plan(plan) as engine:
        assert planned.plan is not None
        frozen = engine.anatomy.frozen_parameters
        assert planned.plan.frozen_parameters == plan.frozen_parameters == frozen > 0
        assert engine.anatomy.frozen == planned.anatomy.frozen == ("model.embed_tokens.weight",)
