"""On CUDA: Muon updates resident blocks there as the host would; directions of streamed blocks go
up and come down in time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.optim import Muon
from megatrain.optim.muon import _product_bytes
from megatrain.settings import ALL, Settings
from tests.helpers.compare import distance
from tests.helpers.runs import assert_same, masters_of, run, train_engine
from tests.helpers.support import engine_of, micro_batches

MUON = Muon(lr=2e-3, weight_decay=0.1)
STEPS = [micro_batches(seed) for seed in range(4)]


def make(**options: Any) -> Engine:
    return engine_of("llama", optimizer=MUON, precision="bfloat16", **{"device": "cuda", **options})


def trained(settings: Settings, **options: Any) -> dict[str, torch.Tensor]:
    with make(settings=settings, **options) as engine:
        train_engine(engine, STEPS)
        return masters_of(engine)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(resident=2),
        Settings(resident=ALL),
        Settings(resident=ALL, groups=3),
        Settings(groups=3),
    ],
    ids=["front", "all", "all, of sums", "groups"],
)
def test_where_blocks_live_changes_no_more_than_rounding(settings):
    expected = trained(Settings())
    for name, ours in trained(settings).items():
        assert distance(ours, expected[name]) <= 2e-2, name


def test_directions_come_down_before_the_host_reads_them():
    """The stream is held up before every tensor; the same bits as without."""
    with make() as engine:
        workspace = engine.parts.updater._workspace
        assert workspace is not None
        workspace.delay = lambda: torch.cuda._sleep(20_000_000)
        assert_same(run(engine, STEPS), run(make(), STEPS))


def test_products_of_updates_take_their_workspace_before_the_first_step():
    torch._C._cuda_clearCublasWorkspaces()  # another test's may be there
    with make() as engine:
        workspace = engine.parts.updater._workspace
        assert workspace is not None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        direction = torch.ones(1, 64, 96, dtype=torch.bfloat16)
        engine.parts.updater.lane.submit(
            lambda _: workspace.replace(Muon().orthogonal, [direction])
        ).wait_host()
        assert torch.cuda.memory_allocated() == before


def test_orthogonalising_takes_what_the_planner_says():
    shape = (4096, 1024)
    matrix = torch.randn(1, *shape, device="cuda").bfloat16()
    Muon().orthogonal(matrix)  # the products' workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    Muon().orthogonal(matrix)
    # with the one that arrived
    taken = torch.cuda.max_memory_allocated() - before + 2 * matrix.numel()
    assert taken <= _product_bytes(shape) + (1 << 20)
