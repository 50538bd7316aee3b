"""Every block has its own piece of every array, zero at first, whatever slabs they are cut from."""

from __future__ import annotations

import pytest
import torch

from megatrain.errors import OutOfMemory
from megatrain.memory import host_store, slab
from megatrain.memory.host_store import ArraySpec, HostStore
from megatrain.memory.layout import FlatLayout
from megatrain.memory.slab import HUGE_PAGE, Slab

LAYOUTS = [FlatLayout.pack([("w", (n,), True)]) for n in (500_000, 100, 1_500_000, 1_500_000, 3_000)]
ARRAYS = [ArraySpec("weight", torch.bfloat16, transferred=True), ArraySpec("remainder", torch.int16), ArraySpec("exp_avg", torch.float32)]


@pytest.fixture(params=[16 << 30, 4 << 20, 1], ids=["one slab", "several slabs", "a slab for every block"])
def store(request, monkeypatch):
    monkeypatch.setattr(host_store, "SLAB_BYTES", request.param)
    with HostStore(LAYOUTS, ARRAYS) as made:
        yield made


def test_arrays_have_the_size_and_type_declared_and_begin_as_zero(store):
    for spec in ARRAYS:
        for block, layout in enumerate(LAYOUTS):
            array = store.array(spec.name, block)
            assert (array.dtype, tuple(array.shape), array.device.type) == (spec.dtype, (layout.numel,), "cpu")
            assert array.is_contiguous()
            assert array.data_ptr() % 4096 == 0
            assert not array.any()


def test_no_array_overlaps_another(store):
    keys = [(spec.name, block) for spec in ARRAYS for block in range(len(LAYOUTS))]
    for number, key in enumerate(keys):
        store.array(*key).fill_(number)
    for number, key in enumerate(keys):
        assert torch.all(store.array(*key) == number)


def test_the_same_array_is_the_same_memory_each_time(store):
    store.array("weight", 2)[7] = 5
    assert store.array("weight", 2)[7] == 5


def test_bytes_are_the_sum_of_the_arrays_and_little_more(store):
    arrays = sum(layout.numel * spec.dtype.itemsize for layout in LAYOUTS for spec in ARRAYS)
    assert arrays <= store.nbytes <= arrays + (HUGE_PAGE + 4096) * len(LAYOUTS) * len(ARRAYS)


def test_what_it_has(store):
    assert store.has("exp_avg")
    assert not store.has("grad")
    assert store.layouts == tuple(LAYOUTS)


def test_a_closed_store_gives_nothing_back(store):
    store.close()
    assert store.nbytes == 0
    with pytest.raises(KeyError):
        store.array("weight", 0)
    store.close()  # twice is harmless


def test_a_view_that_is_still_held_outlives_the_store():
    store = HostStore(LAYOUTS, ARRAYS)
    held = store.array("weight", 1)
    held.fill_(3)
    store.close()
    assert torch.all(held == 3)


def test_memory_that_cannot_be_had_is_named(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(OutOfMemory, match="host memory for weight"):
        HostStore(LAYOUTS, ARRAYS)


@pytest.mark.parametrize("nbytes", [0, 1, HUGE_PAGE, HUGE_PAGE + 1])
def test_a_slab_is_whole_huge_pages_of_zeros(nbytes):
    made = Slab("test", nbytes, pinned=False, threads=1)
    assert made.nbytes % HUGE_PAGE == 0
    assert nbytes <= made.nbytes <= max(nbytes, 1) + HUGE_PAGE
    assert made.bytes.numel() == made.nbytes
    assert not made.bytes.any()
    made.close()


def test_touching_reaches_every_byte(monkeypatch):
    monkeypatch.setattr(slab, "TOUCH_BYTES", HUGE_PAGE)
    made = Slab("test", 3 * HUGE_PAGE, pinned=False, threads=2)
    made.bytes.fill_(1)
    made._touch(2)
    assert not made.bytes.any()
    made.close()
