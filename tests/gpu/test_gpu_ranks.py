"""Several GPUs compute what one does, up to the order of sums, and the same bits in every run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatrain.models.pretrained import resolve_source
from megatrain.optim import AdamW
from megatrain.settings import ALL, WIRES, Settings
from megatrain.storage.checkpoint import load_checkpoint, save_checkpoint
from megatrain.world import World
from tests.engine.test_hosts import summed, summed_in_order
from tests.engine.test_ranks import CHUNK, SEVERAL, assert_near, train
from tests.helpers.ranks import RunRanks, staying_ranks
from tests.helpers.support import engine_of, micro_batches
from tests.storage.test_ranks_saved import (
    arrays_of,
    differing,
    files_in,
    gguf_engine,
    gguf_file,
    joined,
)

GPUS = min(4, torch.cuda.device_count())
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
HOW: dict[str, dict[str, Any]] = {
    "streamed": {"settings": Settings(**CHUNK)},
    "retained, offloaded": {
        "settings": Settings(**CHUNK, retained=1, offload_activations=True),
    },
    "half resident": {"settings": Settings(**CHUNK, resident=2)},
    # the head's one norm is the first rank's alone
    "tied, resident": {"family": "llama-tied", "settings": Settings(**CHUNK, resident=ALL)},
    "groups": {"settings": Settings(**CHUNK, groups=2, sums_on_device=ALL)},
    "groups, sums in host RAM": {"settings": Settings(**CHUNK, groups=2, sums_on_device=1)},
    "groups, replicated": {
        "settings": Settings(**CHUNK, groups=2, sums_on_device=1, resident=1, replicated=3)
    },
    "two backward passes": {"settings": Settings(**CHUNK, second_backward=True)},
    "unclipped": {"settings": Settings(**CHUNK, resident=2), "max_grad_norm": None},
}


def on_its_gpu(world: World, **given: Any) -> Any:
    told, held_out, arrays = train(world, device=f"cuda:{world.rank}", **given)
    return told, held_out, {name: array.cpu() for name, array in arrays.items()}


@pytest.fixture(scope="module")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunRanks]:
    with staying_ranks(tmp_path_factory.mktemp("ranks"), gpus=True) as run:
        yield run


@pytest.mark.parametrize("how", HOW)
def test_gpus_are_one(how, run_ranks):
    given: dict[str, Any] = {"steps": SEVERAL, "precision": "float32", **HOW[how]}
    found = run_ranks(GPUS, partial(on_its_gpu, **given))
    assert_near(found, on_its_gpu(World(), **given))


@pytest.mark.parametrize("how", ["streamed", "groups, replicated", "unclipped"])
def test_hosts_of_one_gpu_are_one(how, run_ranks):
    given: dict[str, Any] = {"steps": SEVERAL, "precision": "float32", **HOW[how]}
    found = run_ranks(2, partial(on_its_gpu, **given), hosts=2)
    assert_near(found, on_its_gpu(World(), **given))


def its_share(world: World, wire: str) -> torch.Tensor:
    return summed(world, wire, f"cuda:{world.rank}")


@pytest.mark.parametrize("wire", WIRES)
def test_sums_of_hosts_are_those_of_a_cpu(wire, run_ranks):
    whole = torch.cat(run_ranks(2, partial(its_share, wire=wire), hosts=2))
    assert torch.equal(whole, summed_in_order(2, 2, wire, len(whole)))


def test_two_runs_have_the_same_bits(run_ranks):
    job = partial(on_its_gpu, steps=SEVERAL, optimizer=AdamW(lr=1e-3))
    first, second = (run_ranks(GPUS, job) for _ in range(2))
    for (told, held_out, arrays), (again, held_out_again, arrays_again) in zip(
        first, second, strict=True
    ):
        assert (told, held_out) == (again, held_out_again)
        assert all(torch.equal(arrays[name], arrays_again[name]) for name in arrays)


@pytest.mark.parametrize("settings", [Settings(**CHUNK), Settings(**CHUNK, resident=ALL)])
def test_gpus_save_what_one_loads_and_saves(settings, run_ranks, tmp_path):
    several, one = tmp_path / "several", tmp_path / "one"
    job = partial(saved, folder=several, settings=settings)
    expected = joined(run_ranks(GPUS, job))
    assert differing(saved(World(), one, settings, source=several / "last"), expected) == []
    assert differing(files_in(several / "checkpoint-1"), files_in(one / "checkpoint-1")) == []


def saved(world: World, folder: Path, settings: Settings, source: Path | None = None) -> Any:
    """A rank's arrays. source: a checkpoint, loaded; else a step is trained."""
    with (
        # a tensor takes several pieces, and they several messages
        mock.patch("megatrain.memory.store.READ_BYTES", 1 << 12),
        mock.patch("megatrain.storage.sharded_write.MESSAGE_BYTES", 1 << 10),
        engine_of("llama", device=f"cuda:{world.rank}", settings=settings, world=world) as engine,
    ):
        if source is None:
            engine.train_step(micro_batches(world.rank, [(2, 9), (1, 6)]))
        else:
            load_checkpoint(source, engine)
        save_checkpoint(folder, 1, engine, None, {})
        return arrays_of(engine)


@pytest.mark.parametrize("settings", [Settings(**CHUNK), Settings(**CHUNK, resident=ALL)])
def test_gpus_read_a_gguf_file_as_one_does(settings, run_ranks, tmp_path):
    job = partial(read, file=gguf_file(tmp_path), settings=settings)
    assert differing(joined(run_ranks(GPUS, job)), job(World())) == []


def read(world: World, file: Path, settings: Settings) -> Any:
    with gguf_engine(world, device=f"cuda:{world.rank}", settings=settings) as engine:
        engine.load_weights(resolve_source(file))
        return arrays_of(engine)
