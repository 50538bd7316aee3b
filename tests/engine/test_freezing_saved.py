"""Frozen tensors are saved bit for bit as they came; and a plan with some."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatrain.engine.engine import Engine
from megatrain.engine.verify import tensors_of
from megatrain.errors import ConfigError
from megatrain.optim import AdamW, Lion, Muon
from megatrain.settings import Settings
from megatrain.storage.checkpoint import save_checkpoint, write_final
from megatrain.storage.export import export
from megatrain.storage.restore import load_checkpoint
from tests.compare import differing
from tests.engine.test_freezing import EMBEDDING, FROZEN, OF_MIXTURES, STEPS
from tests.runs import assert_same, run, train_with_a_break
from tests.support import (
    engine_of,
    micro_batches,
    plain_model,
    tiny_config,
)


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
    what, steps = FROZEN["parts of layers"], [micro_batches(seed, [(2, 9)]) for seed in range(4)]
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
