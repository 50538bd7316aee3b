"""Slabs are zeroed host memory; what CUDA was told about them it is told again when they go, whoever forgets to close them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatrain.errors import OutOfMemory
from megatrain.memory import slab
from megatrain.memory.slab import HUGE_PAGE, Slab


class Cuda:
    """Notes what is registered, as the CUDA runtime does."""

    def __init__(self, code: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.code = code

    def register(self, pointer: int, nbytes: int, flags: int) -> int:
        assert pointer not in self.registered, "registered twice"
        if self.code == 0:
            self.registered[pointer] = nbytes
        return self.code

    def unregister(self, pointer: int) -> int:
        del self.registered[pointer]  # KeyError: it was not, or not any more
        return 0

    @property
    def runtime(self) -> SimpleNamespace:
        return SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(slab, "_cudart", lambda: fake.runtime)
    return fake


def test_it_is_zero_and_whole_huge_pages():
    made = Slab("test", HUGE_PAGE + 1, pinned=False, threads=1)
    assert made.nbytes == made.bytes.numel() == 2 * HUGE_PAGE
    assert not torch.any(made.bytes)
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


def test_a_slab_that_could_not_be_pinned_is_none(cuda):
    cuda.code = 2
    with pytest.raises(OutOfMemory, match=r"could not pin 0\.0 GiB of host memory for test \(error 2\)"):
        Slab("test", 100, pinned=True, threads=1)
    assert cuda.registered == {}
