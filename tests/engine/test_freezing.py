"""Frozen tensors against plain PyTorch with `requires_grad = False` on the same, in every mode;
and without anything that only training needs."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatrain.engine.engine import Engine
from megatrain.engine.verify import gradients_of, tensors_of, weights_of
from megatrain.errors import ConfigError
from megatrain.models.trials.small import plain_gradients
from megatrain.optim import AdamW, Lion, Muon
from megatrain.optim.optimizer import Frozen
from megatrain.settings import ALL, Settings
from megatrain.storage.checkpoint import load_checkpoint, save_checkpoint, write_final
from megatrain.storage.export import export
from tests.helpers.compare import apart, differing, distance
from tests.helpers.plain import MAX_NORM, train_plain
from tests.helpers.runs import Trace, assert_same, cosine, run, train_engine, train_with_a_break
from tests.helpers.support import (
    engine_of,
    full_batches,
    micro_batches,
    plain_model,
    tiny_config,
)

STEPS = [micro_batches(seed, [(2, 9), (1, 6)]) for seed in range(2)]
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
# tied, with biases, with positions to learn, with projections at the ends, eager, of experts
KINDS = ["llama-tied", "falcon-rw", "gpt2", "opt-projected", "gemma2", "mixtral"]
MODES = {
    "retained": Settings(retained=ALL),
    "partly retained": Settings(retained=1, head_chunk_tokens=7),
    "two groups": Settings(groups=2),
    "sums on the device": Settings(groups=3, sums_on_device=2),
    "computed twice": Settings(second_backward=True),
    "one layer computed twice": Settings(second_backward=1),
    "offloaded": Settings(offload_activations=True),
    "graphs on the host": Settings(offload_activations=True, retained=1, retained_on_host=2),
    "front resident": Settings(resident=2),
    "all resident, in groups": Settings(resident=ALL, groups=2),
    "in chunks": Settings(layer_chunk_tokens=4),
}

# whose sums, or second gradients, go around a layer that has none
AROUND = ["two groups", "sums on the device", "computed twice", "graphs on the host"]
PARTS, MIDDLE = FROZEN["parts of layers"], FROZEN["a layer in the middle"]
FREE: dict[str, Any] = {"max_grad_norm": None}
Case = tuple[str, tuple[str, ...], dict[str, Any]]
EVERYWHERE: list[Case] = [
    *(("llama", patterns, {}) for patterns in FROZEN.values()),
    *(("llama", PARTS, {"settings": settings}) for settings in MODES.values()),
    *(("llama", MIDDLE, {"settings": MODES[mode]}) for mode in AROUND),
]
MIXTURES: list[Case] = [("mixtral", patterns, {}) for patterns in OF_MIXTURES.values()]
QUICK: list[Case] = [
    *MIXTURES,
    *(("llama", patterns, FREE) for patterns in (PARTS, MIDDLE, FROZEN["the head"])),
    # either name of a tied tensor, as in plain PyTorch, where both are one parameter
    ("llama-tied", ("lm_head.weight",), {}),
    ("llama-tied", ("model.embed_tokens.weight",), {}),
]
CASES: list[Any] = [("cpu", *case) for case in QUICK]
CASES += [pytest.param("cpu", *case, marks=pytest.mark.slow) for case in EVERYWHERE]
CASES += [pytest.param("cuda", *case, marks=pytest.mark.cuda) for case in (*EVERYWHERE, *MIXTURES)]


@cache
def plain_trace(family: str, patterns: tuple[str, ...], device: str, clips: bool) -> Trace:
    """The same steps in plain PyTorch."""
    with engine_of(family, freeze=patterns) as engine:
        frozen = engine.anatomy.frozen
    model = plain_model(tiny_config(family), device=device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return train_plain(model, STEPS, RATES, max_norm=MAX_NORM if clips else float("inf"))


@pytest.mark.parametrize(("device", "family", "patterns", "options"), CASES)
def test_training_is_that_of_plain_pytorch(device, family, patterns, options):
    expected = plain_trace(family, patterns, device, clips=options != FREE)
    near = 1e-6 if device == "cpu" else 1e-4
    with engine_of(family, freeze=patterns, device=device, **options) as engine:
        frozen, before = engine.anatomy.frozen, weights_of(engine)
        ours = train_engine(engine, STEPS, RATES)
        assert not set(gradients_of(engine)) & set(frozen)
    assert frozen
    assert ours.losses == pytest.approx(expected.losses, rel=near)
    assert ours.norms == pytest.approx(expected.norms, rel=10 * near)
    for name, weight in expected.weights.items():
        assert distance(ours.weights[name], weight) <= 1e-5, name
        assert torch.equal(ours.weights[name], before[name]) == (name in frozen), name


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_gradients_are_those_of_plain_pytorch_in_every_kind_of_family(family):
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


# -- what is left out ----------------------------------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("float32", AdamW()),
        ("bfloat16", AdamW()),
        ("bfloat16", AdamW(moments="int8")),
        ("bfloat16", Lion()),
        ("bfloat16", Muon()),
    ],
    ids=str,
)
def test_they_have_a_weight_and_nothing_else(precision, optimizer):
    with engine_of("llama", freeze=PARTS, optimizer=optimizer, precision=precision) as engine:
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


def test_a_model_that_is_only_read_has_its_weights_and_nothing_else():
    options: dict[str, Any] = {"precision": "bfloat16", "device": "cpu", "settings": Settings()}
    with Engine.from_config(tiny_config("llama"), optimizer=Frozen(), **options) as engine:
        store, gradients = engine.store, engine.parts.gradients
        numels = [layout.numel for layout in store.layouts]
        for name, size in {"weight": 2, "remainder": 0, "grad": 0}.items():
            found = [store.array(name, block).nbytes for block in range(len(numels))]
            assert found == [size * numel for numel in numels], name
        sums = [*gradients._own.values(), *gradients._ring, gradients._staging]
        assert not any(buffer.flat.numel() for buffer in sums)


def folder_of(family: str, dtype: torch.dtype, folder: Path) -> Path:
    model: Any = plain_model(tiny_config(family), dtype=dtype)
    model.save_pretrained(folder)
    return folder


def open_engine(source: Path, freeze: tuple[str, ...], **options: Any) -> Engine:
    options = {"precision": "bfloat16", "optimizer": AdamW(lr=1e-3), **options}
    settings = Settings(head_chunk_tokens=7)
    return Engine.from_pretrained(source, freeze=freeze, device="cpu", settings=settings, **options)


def frozen_in(engine: Engine, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The frozen ones of a folder's tensors."""
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


# -- saved and resumed -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "dtype"),
    [
        ("llama", "bfloat16", torch.float32),
        ("llama", "float32", torch.float16),
        ("llama", "fp8", torch.bfloat16),
        ("mixtral", "bfloat16", torch.bfloat16),
        ("mixtral", "float32", torch.float32),
        ("mixtral", "fp8", torch.float16),
    ],
    ids=str,
)
def test_a_folder_s_frozen_tensors_come_out_as_they_went_in(family, precision, dtype, tmp_path):
    what = PARTS if family == "llama" else ("*embed*", *OF_MIXTURES["experts"])
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        (torch.float32, AdamW(moments="int8")),
        (torch.bfloat16, Lion()),
        (torch.float32, Muon()),
    ],
    ids=str,
)
def test_two_halves_are_one_run_though_the_source_is_gone(optimizer, dtype, tmp_path):
    source = folder_of("llama", dtype, tmp_path / "source")
    given = tensors_of(source)
    what, steps = PARTS, [micro_batches(seed, [(2, 9)]) for seed in range(4)]
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
