"""Slabs are zeroed host memory; they are unpinned when they go, also if nobody closes them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatrain.errors import OutOfMemory
from megatrain.memory import slab
from megatrain.memory.sizes import HUGE_PAGE
from megatrain.memory.slab import Slab


class Cuda:
    """Notes what is registered, as the CUDA runtime does."""

    def __init__(self, code: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.code = code
        self.forgotten = 0

    def register(self, pointer: int, nbytes: int, flags: int) -> int:
        assert pointer not in self.registered, "registered twice"
        if self.code == 0:
            self.registered[pointer] = nbytes
        return self.code

    def unregister(self, pointer: int) -> int:
        del self.registered[pointer]  # KeyError: it was not, or not any more
        return 0

    def forget(self) -> None:
        self.forgotten += 1

    @property
    def runtime(self) -> SimpleNamespace:
        return SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(slab, "_cudart", lambda: fake.runtime)
    monkeypatch.setattr(slab, "_forget_error", fake.forget)
    return fake


def test_a_slab_is_whole_huge_pages_of_zeros():
    for nbytes in [0, 1, HUGE_PAGE, HUGE_PAGE + 1]:
        made = Slab("test", nbytes, pinned=False, threads=1)
        assert made.nbytes % HUGE_PAGE == 0
        assert nbytes <= made.nbytes <= max(nbytes, 1) + HUGE_PAGE
        assert made.bytes.numel() == made.nbytes
        assert not made.bytes.any()
        made.close()


def test_closing_unpins_once(cuda):
    made = Slab("test", 100, pinned=True, threads=2)
    assert cuda.registered == {made.bytes.data_ptr(): HUGE_PAGE}
    made.close()
    assert cuda.registered == {}
    made.close()
    del made


def test_a_slab_that_nobody_closed_is_unpinned_when_it_goes(cuda):
    made = Slab("test", 100, pinned=True, threads=1)
    assert cuda.registered
    del made
    assert cuda.registered == {}


@pytest.mark.parametrize("code", [2, 801])
def test_memory_that_may_not_be_pinned_stays_pageable_and_says_so(cuda, code, caplog):
    cuda.code = code
    made = Slab("weight", 100, pinned=True, threads=1)
    assert not made.pinned
    assert cuda.registered == {}
    assert cuda.forgotten == 1, "CUDA would raise its refusal again at the next launch"
    assert not torch.any(made.bytes)
    assert f"may not pin 0.0 GiB of host memory for weight (error {code})" in caplog.text
    assert "ulimit -l unlimited" in caplog.text
    made.close()


def test_memory_that_cannot_be_pinned_for_another_reason_is_refused(cuda):
    cuda.code = 1
    with pytest.raises(
        OutOfMemory, match=r"could not pin 0\.0 GiB of host memory for test \(error 1\)"
    ):
        Slab("test", 100, pinned=True, threads=1)
    assert cuda.registered == {}
