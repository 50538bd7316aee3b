"""Every block has its own piece of every array, zero at first, whatever slabs they are cut from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatrain.errors import OutOfMemory
from megatrain.memory import slab
from megatrain.memory.layout import ArraySpec, FlatLayout
from megatrain.memory.sizes import HUGE_PAGE
from megatrain.memory.store import Store

LAYOUTS = [
    FlatLayout.pack([("w", (n,), True)]) for n in (500_000, 100, 1_500_000, 1_500_000, 3_000)
]
ARRAYS = [
    ArraySpec("weight", torch.bfloat16, transferred=True),
    ArraySpec("remainder", torch.int16),
    ArraySpec("exp_avg", torch.float32),
]


@pytest.fixture(
    params=[16 << 30, 4 << 20, 1], ids=["one slab", "several slabs", "a slab for every block"]
)
def store(request, monkeypatch):
    monkeypatch.setattr(slab, "SLAB_BYTES", request.param)
    with Store(LAYOUTS, ARRAYS, device=torch.device("cpu"), threads=1) as made:
        yield made


def test_arrays_have_the_size_and_type_declared_and_begin_as_zero(store):
    for spec in ARRAYS:
        for block, layout in enumerate(LAYOUTS):
            array = store.array(spec.name, block)
            assert (array.dtype, array.shape) == (spec.dtype, (layout.numel,))
            assert array.device.type == "cpu"
            assert array.is_contiguous()
            assert array.data_ptr() % 4096 == 0
            assert not array.any()


def test_no_array_overlaps_another(store):
    keys = [(spec.name, block) for spec in ARRAYS for block in range(len(LAYOUTS))]
    for number, key in enumerate(keys):
        store.array(*key).fill_(number)
    for number, key in enumerate(keys):
        assert torch.all(store.array(*key) == number)


def test_bytes_are_the_sum_of_the_arrays_and_little_more(store):
    arrays = sum(layout.numel * spec.dtype.itemsize for layout in LAYOUTS for spec in ARRAYS)
    assert arrays <= store.nbytes <= arrays + (HUGE_PAGE + 4096) * len(LAYOUTS) * len(ARRAYS)


def test_some_blocks_may_lack_an_array():
    arrays = [replace(one, blocks=(2,) if one.name == "remainder" else None) for one in ARRAYS]
    with Store(LAYOUTS, arrays, device=torch.device("cpu"), threads=1) as store:
        assert store.array("remainder", 2).numel() == LAYOUTS[2].numel
        for absent in range(2):
            with pytest.raises(KeyError):
                store.array("remainder", absent)
        assert store.array("weight", 0).numel() == LAYOUTS[0].numel


def test_a_view_that_is_still_held_outlives_the_store():
    store = Store(LAYOUTS, ARRAYS, device=torch.device("cpu"), threads=1)
    held = store.array("weight", 1)
    held.fill_(3)
    store.close()
    assert torch.all(held == 3)


def test_memory_that_cannot_be_had_is_named(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(OutOfMemory, match="host memory for weight"):
        Store(LAYOUTS, ARRAYS, device=torch.device("cpu"))
