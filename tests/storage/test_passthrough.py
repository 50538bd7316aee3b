"""Multimodal folders go in and come out: text is trained, everything else is as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatrain.data.samples import NO_IMAGES
from megatrain.engine.engine import Engine
from megatrain.engine.verify import tensors_of
from megatrain.errors import DamagedError, DataError, ModelError, StorageError
from megatrain.optim import AdamW
from megatrain.settings import Settings
from megatrain.storage.checkpoint import (
    find_resumable,
    load_checkpoint,
    save_checkpoint,
    write_final,
)
from megatrain.storage.export import export
from megatrain.storage.manifest import read_manifest, verify_checkpoint
from megatrain.storage.run_folder import PASSENGERS, bytes_of_checkpoints
from tests.helpers.compare import differing, distance
from tests.helpers.files import flip, names
from tests.helpers.multimodal import save_multimodal, skip_unless_it_reads_text
from tests.helpers.plain import plain_optimizer, train_plain
from tests.helpers.runs import train_engine
from tests.helpers.support import VOCABULARY, micro_batches

STEPS = [micro_batches(seed) for seed in range(3)]
RATES = [1e-3, 8e-4, 5e-4]
EPS = 1e-4  # far above rounding: some gradients are zero but for that
IDS = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))
PROCESSOR = {"processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"}
# experts one by one, masks of images, images, tied embeddings, a parameter that is no module's.
# `python -m benchmarks.families` does the same with every family that there is.
FAMILIES = ("qwen3.5-moe", "gemma3", "llama4", "qwen2-vl", "llava-next")
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]  # of text, and of passengers


def open_engine(
    source: Path, precision: str = "float32", device: str = "cpu", freeze: str = ""
) -> Engine:
    return Engine.from_pretrained(
        source,
        optimizer=AdamW(lr=RATES[0], weight_decay=0.1, eps=EPS),
        precision=precision,
        device=device,
        max_grad_norm=0.5,
        router_aux_loss_coef=0,
        freeze=[freeze] if freeze else (),
        settings=Settings(head_chunk_tokens=7),
    )


def adamw(groups: Any, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr, eps=EPS)


def other_files(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.iterdir() if path.is_file() and "safeten" not in path.name)
    return {path.name: path.read_bytes() for path in files}


def config_in(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def logits_of(folder: Path) -> tuple[str, Tensor]:
    """The class that config.json names, and what it computes."""
    (name,) = config_in(folder)["architectures"]
    model = getattr(transformers, name).from_pretrained(folder).eval()
    with torch.no_grad():
        return name, model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a vision tower, and tensors that transformers does not load."""
    folder = tmp_path_factory.mktemp("given") / "model"
    save_multimodal(folder, "qwen3.5", num_hidden_layers=2)
    with_more(folder, {"mtp.fc.weight": torch.randn(3, 5), "mtp.norm.weight": torch.randn(5)})
    return folder


@pytest.fixture
def source(given: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(given, tmp_path / "source"))


def with_more(folder: Path, tensors: dict[str, Tensor], but: str = "") -> None:
    """Add tensors to a folder's only file, and take one away."""
    held = load_file(folder / "model.safetensors") | tensors
    held.pop(but, None)
    save_file(held, folder / "model.safetensors", {"format": "pt"})


def passengers_of(folder: Path) -> dict[str, Tensor]:
    prefixes = ("mtp.", "model.visual.")
    return {name: t for name, t in tensors_of(folder).items() if name.startswith(prefixes)}


# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_trained_as_in_plain_pytorch_and_the_rest_comes_out_as_it_went_in(tmp_path, family):
    before, after, out = (tmp_path / name for name in ("in", "trained", "out"))
    model: Any = save_multimodal(before, family)
    skip_unless_it_reads_text(model)
    with open_engine(before) as engine:
        engine.save_pretrained(out)
        assert differing(tensors_of(out), tensors_of(before)) == []
        assert other_files(out) == other_files(before)
        carried = engine.anatomy.unused_weights.names
        ours = train_engine(engine, STEPS, RATES)
        engine.save_pretrained(after)
        logits = engine.logits(IDS)
    plain = train_plain(model, STEPS, RATES, [plain_optimizer(model, RATES[0], adamw)])
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert ours.norms == pytest.approx(plain.norms, rel=5e-5)
    assert {*ours.weights, *carried} == {*plain.weights, *carried}
    assert not ours.weights.keys() & {*carried}
    for name in ours.weights:
        assert distance(ours.weights[name], plain.weights[name]) <= 1e-5, name
    loaded, theirs = logits_of(after)
    assert loaded == type(model).__name__
    torch.testing.assert_close(theirs, logits, rtol=1e-4, atol=1e-5)
    changed = {name.rpartition(".")[0] for name in differing(tensors_of(after), tensors_of(before))}
    assert changed and not [name for name in changed if "visual" in name or "vision" in name]
    assert other_files(after) == other_files(before)


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-vl", "glm4v"])  # positions of 3 axes
def test_positions_that_are_given_are_those_of_plain_pytorch(tmp_path, family):
    model = save_multimodal(tmp_path / "in", family).eval()
    batch = micro_batches(5, ((2, 9),), pad_left=True)[0]
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0) + 3
    labels, real = batch["labels"][:, 1:], batch["labels"][:, 1:] != -100
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[:, :-1]
    plain = nn.functional.cross_entropy(logits[real], labels[real])
    with open_engine(tmp_path / "in") as engine:
        assert engine.evaluate([batch]).loss == pytest.approx(float(plain), rel=1e-6)


def test_what_transformers_does_not_load_is_carried_along_too(source, tmp_path, caplog):
    caplog.set_level("INFO", logger="megatrain")
    with open_engine(source) as engine:
        engine.save_pretrained(tmp_path / "out")
    assert differing(passengers_of(tmp_path / "out"), passengers_of(source)) == []
    assert "mtp.fc.weight" in tensors_of(tmp_path / "out")
    assert (
        f"{source}: carried along unchanged: model.visual; {NO_IMAGES}; "
        "carried along and not trained, as transformers does not load them: mtp.fc.weight "
        "and 1 more"
    ) in caplog.messages


def test_config_json_says_in_which_dtype_the_weights_are(source, tmp_path):
    with open_engine(source, "bfloat16") as engine:
        engine.save_pretrained(tmp_path / "out")
    before, after = map(config_in, (source, tmp_path / "out"))
    assert (before["dtype"], after["dtype"]) == ("float32", "bfloat16")
    assert after["text_config"].pop("dtype") == "bfloat16"
    for part in (before, after, before["text_config"], before["vision_config"]):
        part.pop("dtype")
    after["vision_config"].pop("dtype")
    assert after == before
    assert differing(passengers_of(tmp_path / "out"), passengers_of(source)) == []


@pytest.mark.parametrize(
    ("more", "but", "reason"),
    [
        ({}, "model.visual.merger.norm.weight", "lacks model.visual.merger.norm.weight, which"),
        ({"model.visual.extra": torch.ones(2)}, "", "holds model.visual.extra, unknown to a"),
        (
            {"model.visual.merger.norm.weight": torch.ones(3)},
            "",
            r"norm.weight has shape \[3\], but config.json asks for \[16\]",
        ),
    ],
)
def test_a_folder_with_other_passengers_is_refused(source, more, but, reason):
    with_more(source, more, but)
    with pytest.raises(ModelError, match=reason):
        open_engine(source)


def test_without_a_folder_there_is_nothing_to_carry(given, tmp_path):
    with Engine.from_config(given, device="cpu", precision="float32") as engine:
        engine.train_step([{"input_ids": IDS, "labels": IDS}])
        reason = "model.visual: carried along from a folder with weights, and there is none"
        with pytest.raises(ModelError, match=reason):
            engine.save_pretrained(tmp_path / "out")
        with pytest.raises(ModelError, match=reason):
            save_checkpoint(tmp_path / "run", 1, engine, None, {})
    assert not (tmp_path / "out").exists()


def test_images_in_a_micro_batch_are_refused(given):
    batch = {"input_ids": IDS, "labels": IDS, "pixel_values": torch.zeros(4, 48)}
    with open_engine(given) as engine, pytest.raises(DataError) as refused:
        engine.train_step([batch])
    assert str(refused.value) == f"micro-batch 0 has pixel_values: {NO_IMAGES}; leave it out"


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture
def engine(source: Path) -> Iterator[Engine]:
    with open_engine(source, "bfloat16") as engine:
        yield engine


def save(run_dir: Path, engine: Engine, step: int, **options: Any) -> Path:
    train_engine(engine, STEPS[:1])
    return save_checkpoint(run_dir, step, engine, None, {"position": step}, **options)


def test_a_run_keeps_passengers_once_and_outlives_its_source(tmp_path, source, engine):
    runs, expected = tmp_path / "run", passengers_of(source)
    first = save(runs, engine, 1, keep=2)
    shutil.rmtree(source)
    saved = [first, save(runs, engine, 2, keep=2)]
    kept = runs / PASSENGERS / SHARDS[1]
    for path in saved:
        assert names(path) >= {*SHARDS, *PROCESSOR, "model.safetensors.index.json"}
        assert (path / SHARDS[1]).samefile(kept)
        assert differing(passengers_of(path), expected) == []
        assert SHARDS[1] in verify_checkpoint(path).files
    one, two = (sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) for path in saved)
    assert bytes_of_checkpoints(runs) == one + two - kept.stat().st_size
    third = save(runs, engine, 3, keep=1)  # the others are removed
    assert not any(path.exists() for path in saved)
    final = write_final(runs)
    for path in (third, final):
        assert (path / SHARDS[1]).samefile(kept)
        assert differing(passengers_of(path), expected) == []
    engine.save_pretrained(tmp_path / "out")
    assert differing(passengers_of(tmp_path / "out"), expected) == []
    theirs, ours = logits_of(final)[1], engine.logits(IDS)
    torch.testing.assert_close(theirs.to(ours.dtype), ours, rtol=0.1, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_export_leaves_passengers_as_they_are(tmp_path, source, engine, dtype):
    save(tmp_path / "run", engine, 1)
    export(tmp_path / "run", tmp_path / "out", dtype)
    assert differing(passengers_of(tmp_path / "out"), passengers_of(source)) == []
    held = [name for file in SHARDS for name in load_file(tmp_path / "out" / file)]
    assert sorted(held) == sorted(tensors_of(tmp_path / "out")), "each tensor is in one file"
    text = tensors_of(tmp_path / "out")["model.language_model.norm.weight"]
    assert str(text.dtype) == f"torch.{dtype or 'bfloat16'}"
    assert names(tmp_path / "out") >= {*SHARDS, *PROCESSOR}
    assert not names(tmp_path / "out") & {"optimizer", "state.json"}
    assert logits_of(tmp_path / "out")[1].shape == (2, 11, VOCABULARY)


def test_passengers_that_are_damaged_are_noticed(tmp_path, engine):
    saved = save(tmp_path / "run", engine, 1)
    flip(saved / SHARDS[1])
    with pytest.raises(StorageError, match=rf"{SHARDS[1]}: does not match its checksum"):
        verify_checkpoint(saved)
    with pytest.raises(DamagedError, match=rf"{SHARDS[1]}: does not match its checksum"):
        load_checkpoint(saved, engine)
    with pytest.raises(StorageError, match=rf"{SHARDS[1]}: does not match its checksum"):
        open_engine(saved)


def test_passengers_that_are_lost_are_written_again(tmp_path, source, engine):
    runs = tmp_path / "run"
    save(runs, engine, 1)
    shutil.rmtree(runs / PASSENGERS)
    saved = save(runs, engine, 2)
    assert differing(passengers_of(saved), passengers_of(source)) == []
    shutil.rmtree(source)
    shutil.rmtree(runs / PASSENGERS)
    with pytest.raises(StorageError, match=r"source/model.safetensors"):
        save(runs, engine, 3)
    assert find_resumable(runs).path == saved


def test_another_run_in_the_folder_of_one_has_its_own(tmp_path, source, engine):
    runs = tmp_path / "run"
    shutil.rmtree(save(runs, engine, 1))
    other = {name: torch.zeros_like(t) for name, t in passengers_of(source).items()}
    with_more(source, other)
    with open_engine(source, "bfloat16") as engine:
        saved = save(runs, engine, 1)
    assert differing(passengers_of(saved), other) == []
    kept = read_manifest(runs / PASSENGERS).files
    assert read_manifest(saved).files[SHARDS[1]] == kept[SHARDS[1]]


def test_frozen_tensors_go_with_them(source, tmp_path, caplog):
    caplog.set_level("INFO", logger="megatrain")
    before, freeze = tensors_of(source), "*language_model.layers.0.*"
    frozen = {n: t for n, t in before.items() if "language_model.layers.0." in n}
    assert frozen
    with open_engine(source, "bfloat16", freeze=freeze) as engine:
        engine.train_step(STEPS[0])
        first = save_checkpoint(tmp_path / "run", 1, engine, None, {})
    words = "frozen tensors are float32; they are computed with in bfloat16 and saved as they came"
    assert caplog.text.count(f"{source}: {words}, once: ") == 1
    with open_engine(source, "bfloat16", freeze=freeze) as engine:
        load_checkpoint(first, engine)
        shutil.rmtree(source)
        for step in (2, 3):  # the first goes, from which it was read
            engine.train_step(STEPS[1])
            save_checkpoint(tmp_path / "run", step, engine, None, {}, keep=1)
    last = tmp_path / "run" / "checkpoint-3"
    after = tensors_of(last)
    unchanged = frozen | {
        n: t for n, t in before.items() if n.startswith(("mtp.", "model.visual."))
    }
    assert after.keys() == before.keys()
    assert differing({name: after[name] for name in unchanged}, unchanged) == []
    assert config_in(last)["architectures"] == ["Qwen3_5ForConditionalGeneration"]
