"""What several ranks save is what one saves, and any number of them goes on from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.engine.components import open_store
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, DamagedError, MegaTrainError, ModelError, StorageError
from megatrain.models.anatomy import layouts_of
from megatrain.models.pretrained import read_model_config, resolve_source
from megatrain.models.skeleton import Skeleton
from megatrain.optim import AdamW
from megatrain.settings import ALL, Settings
from megatrain.storage import sharded_write
from megatrain.storage.checkpoint import (
    find_resumable,
    load_checkpoint,
    load_resumable,
    save_checkpoint,
)
from megatrain.storage.export import export
from megatrain.storage.safetensors import plan_shards
from megatrain.storage.weights import load_weights
from megatrain.world import World
from tests.helpers.files import flip, largest_file, names
from tests.helpers.gguf_toys import CONFIGS, byte_level
from tests.helpers.quantised import TILES, in_tiles, rewrite, state
from tests.helpers.support import engine_of, micro_batches, plain_model, tiny_config

STEPS = [micro_batches(seed, [(2, 9), (1, 6)]) for seed in range(3)]
CHUNK: dict[str, Any] = {"head_chunk_tokens": 4096}
FAR: dict[str, Any] = {"nvme_blocks": 4}
HOW: dict[str, dict[str, Any]] = {
    "tied": {"family": "llama-tied", "optimizer": AdamW(lr=1e-3, moments="bfloat16")},
    "frozen, resident": {
        "freeze": ("model.embed_tokens.*", "*.layers.1.*proj*"),
        "optimizer": AdamW(lr=1e-3, moments="int8"),
        "settings": Settings(**CHUNK, resident=ALL),
    },
    "experts, on NVMe": {"family": "mixtral", "settings": FAR},
}
Arrays = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_messages_and_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor takes several messages, and a model several files."""
    monkeypatch.setattr(sharded_write, "MESSAGE_BYTES", 1 << 10)
    monkeypatch.setattr(sharded_write, "ROUNDS", 3)
    cut = partial(plan_shards, shard_bytes=20_000)
    monkeypatch.setattr("megatrain.storage.export.plan_shards", cut)


def open_engine(world: World, folder: Path, family: str = "llama", **options: Any) -> Engine:
    """folder: a drive is beside it."""
    given = {"precision": "bfloat16", "settings": Settings(**CHUNK), **options}
    if given["settings"] == FAR:
        given["settings"] = Settings(**CHUNK, **FAR, nvme_folders=(folder.parent,))
    return engine_of(family, world=world, **given)


def train(engine: Engine, step: int) -> None:
    engine.train_step(STEPS[step][engine.world.rank :: engine.world.size])


def save(engine: Engine, folder: Path, step: int) -> Path:
    return save_checkpoint(folder, step, engine, None, {"step": step})


def begun(world: World, folder: Path, how: dict[str, Any]) -> Arrays:
    """Train two steps and save, while the last update still runs."""
    with open_engine(world, folder, **how) as engine:
        train(engine, 0)
        train(engine, 1)
        save(engine, folder, 2)
        engine.save_pretrained(folder.with_name(f"{folder.name}-model"))
        return arrays_of(engine)


def gone_on(world: World, source: Path, folder: Path, how: dict[str, Any]) -> Arrays:
    """Load and save."""
    with open_engine(world, folder, **how) as engine:
        assert load_checkpoint(source / "last", engine) == {"step": 2}
        save(engine, folder, 2)
        return arrays_of(engine)


def arrays_of(engine: Engine) -> Arrays:
    """This rank's share of what a run continues from."""
    found = {}
    for block in range(len(engine.anatomy.blocks)):
        engine.wait_ready(block)
        for name in engine.store.arrays.keys() - {"grad"}:
            found[f"{name} {block}"] = engine.store.lasting(name, block).clone()
    return found


def joined(of_ranks: list[Arrays]) -> Arrays:
    return {name: torch.cat([of[name] for of in of_ranks]) for name in of_ranks[0]}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    same = torch.equal if isinstance(next(iter(one.values())), torch.Tensor) else bytes.__eq__
    return [name for name in one if not same(one[name], other[name])]


def files_in(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_the_number_of_ranks_is_in_no_file(how, tmp_path, on_ranks):
    """Saved by two, gone on with by four and by one, which save the same again."""
    of_two, of_four, of_one = (tmp_path / name for name in ("two", "four", "one"))
    open_engine(World(), of_one, **HOW[how]).close()  # what is found out once, before all fork
    ours = joined(on_ranks(2, partial(begun, folder=of_two, how=HOW[how])))
    again = partial(gone_on, source=of_two, how=HOW[how])
    theirs = joined(on_ranks(4, partial(again, folder=of_four)))
    alone = again(World(), folder=of_one)
    assert differing(ours, alone) == differing(theirs, alone) == []
    expected = files_in(of_one / "checkpoint-2")
    assert len([name for name in expected if name.startswith("model-")]) > 2
    assert differing(files_in(of_two / "checkpoint-2"), expected) == []
    assert differing(files_in(of_four / "checkpoint-2"), expected) == []
    with open_engine(World(), of_one, **HOW[how]) as engine:
        load_checkpoint(of_one / "last", engine)
        engine.save_pretrained(tmp_path / "one-model")
    assert differing(files_in(tmp_path / "two-model"), files_in(tmp_path / "one-model")) == []


@pytest.mark.slow
def test_nor_is_the_number_of_hosts(tmp_path, on_ranks):
    """Saved by two hosts of two, gone on with by three of one and by one rank."""
    how = HOW["tied"]
    first = on_ranks(4, partial(begun, folder=tmp_path / "two", how=how), hosts=2)
    again = partial(gone_on, source=tmp_path / "two", how=how)
    theirs = on_ranks(3, partial(again, folder=tmp_path / "three"), hosts=3)
    alone = again(World(), folder=tmp_path / "one")
    ours = joined([first[rank] for rank in World(0, 4, 0, 2).owners])
    assert differing(ours, alone) == differing(joined(theirs), alone) == []
    expected = files_in(tmp_path / "one" / "checkpoint-2")
    for name in ("two", "three"):
        assert differing(files_in(tmp_path / name / "checkpoint-2"), expected) == []


# -- failures --------------------------------------------------------------------------------------

FAILURES: dict[str, tuple[int, str]] = {
    "writing 0": (0, "errno 27.*free space"),
    "writing 1": (1, "errno 27.*free space"),
    "reading 1": (1, "^the drive fails; check it$"),
    "update 1": (1, "^rank 1: RuntimeError: failed$"),
}


def fails(world: World, folder: Path) -> tuple[dict[str, tuple[str, set[str]]], str, str]:
    """What saves that fail say, and what is there then; the same of a model's folder; and the
    name of the save after them."""
    found = {}
    with open_engine(world, folder) as engine:
        save(engine, folder, 1)
        for how, (rank, _) in FAILURES.items():
            train(engine, 0)  # the run goes on
            there = world.rank == rank
            if there and how == "reading 1":
                vars(engine.store)["pieces"] = broken
            if there and how == "update 1":
                vars(engine)["wait_ready"] = failed
            limit = 6_000 if there and how.startswith("writing") else -1
            with pytest.raises(MegaTrainError) as told, largest_file(limit):
                save(engine, folder, 2)
            vars(engine.store).pop("pieces", None)
            vars(engine).pop("wait_ready", None)
            found[how] = str(told.value), world.on_rank0(lambda: names(folder))
        with pytest.raises(ConfigError) as refused:
            engine.save_pretrained(folder)
        train(engine, 1)
        return found, str(refused.value), save(engine, folder, 3).name


def broken(*_: object) -> None:
    raise StorageError("the drive fails; check it")


def failed(_: int) -> None:
    raise RuntimeError("failed")


@pytest.mark.slow
def test_what_fails_on_one_rank_fails_on_all_and_the_run_goes_on(tmp_path, on_ranks):
    folder = tmp_path / "run"
    first, second = on_ranks(2, partial(fails, folder=folder))
    assert second == first, "all say the same"
    found, refused, last = first
    for how, (_, words) in FAILURES.items():
        said, there = found[how]
        assert re.search(words, said)
        assert there == {"checkpoint-1", "last"}
    assert "exists and is not an empty folder" in refused
    assert find_resumable(folder).path == folder / last == folder / "checkpoint-3"


def told_of_damage(world: World, folder: Path, transport: str) -> tuple[str, str, Any]:
    with open_engine(world, folder, settings=Settings(**CHUNK, transport=transport)) as engine:
        with pytest.raises(DamagedError) as told:
            load_checkpoint(folder / "checkpoint-2", engine)
        found = world.on_rank0(lambda: find_resumable(folder, deep=False))
        path, state = load_resumable(folder, engine, found)
        return str(told.value), path.name, state


@pytest.mark.parametrize("transport", ["gather", "read"])
def test_a_byte_that_one_rank_finds_damaged_is_for_all(transport, tmp_path, on_ranks):
    folder = tmp_path / "run"
    with open_engine(World(), folder) as engine:
        save(engine, folder, 1)
        save(engine, folder, 2)
    flip(folder / "checkpoint-2" / "optimizer" / "block-00003.safetensors")
    found = on_ranks(3, partial(told_of_damage, folder=folder, transport=transport))
    assert found == [found[0]] * 3
    said, path, state = found[0]
    assert re.search("block-00003.*does not match its checksum", said)
    assert (path, state) == ("checkpoint-1", {"step": 1})


# -- first weights ---------------------------------------------------------------------------------


def shares_of(folder: Path, ranks: int) -> Arrays:
    """Weights and remainders that so many ranks read, one after another."""
    source, found = resolve_source(folder), []
    config = read_model_config(source)
    for rank in range(ranks):
        skeleton = Skeleton(config, dtype=torch.bfloat16)
        given: dict[str, Any] = {"gradients": False, "world": World(rank, ranks)}
        given["device"] = torch.device("cpu")
        layouts = layouts_of(skeleton.anatomy)
        with open_store(layouts, AdamW(), "bfloat16", Settings(), **given) as store:
            load_weights(skeleton.anatomy, store, source, skeleton.constants)
            names = [(n, b) for n in ("weight", "remainder") for b in range(len(layouts))]
            found.append({f"{n} {b}": store.lasting(n, b).clone() for n, b in names})
    return joined(found)


def model_folder(folder: Path, kind: str) -> Path:
    if kind == "checked float32":  # has a manifest
        with open_engine(World(), folder) as engine:
            save(engine, folder / "run", 1)
        export(folder / "run", folder / "out", "float32")
        return folder / "out"
    family = {"mixture": "mixtral"}.get(kind, "qwen2-tied")
    model: Any = plain_model(tiny_config(family))
    model.half().save_pretrained(folder / "out")
    if kind == "fp8":
        rewrite(folder / "out", in_tiles)
        state(folder / "out", TILES)
    return folder / "out"


@pytest.mark.parametrize("kind", ["mixture", "checked float32", "fp8"])
def test_ranks_read_their_shares_of_a_folder(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("megatrain.storage.safetensors.CHUNK_ELEMENTS", 500)
    folder = model_folder(tmp_path, kind)
    assert differing(shares_of(folder, 3), shares_of(folder, 1)) == []


def gguf_engine(world: World, **options: Any) -> Engine:
    return engine_of(CONFIGS["llama"](), world=world, precision="bfloat16", **options)


def gguf_file(folder: Path) -> Path:
    with gguf_engine(World()) as engine:
        save_checkpoint(folder / "run", 1, engine, byte_level(), {})
    return export(folder / "run", folder / "out", format="gguf") / "model.gguf"


def of_gguf(world: World, file: Path, cut: Path) -> tuple[Arrays, str]:
    with gguf_engine(world) as engine:
        with pytest.raises(ModelError) as told:
            engine.load_weights(resolve_source(cut))
        engine.load_weights(resolve_source(file))
        return arrays_of(engine), str(told.value)


def test_ranks_read_a_gguf_file_or_all_raise_what_one_does(tmp_path, on_ranks):
    file, cut = gguf_file(tmp_path), tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    alone, _ = of_gguf(World(), file, cut)
    found, said = zip(*on_ranks(2, partial(of_gguf, file=file, cut=cut)), strict=True)
    assert differing(joined(list(found)), alone) == []
    assert all(re.search(r"cut\.gguf: .*cannot be", words) for words in said)
