"""What the tests on CUDA get: true fp32 matrix products, and on request PyTorch's deterministic algorithms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Of torch.compile's own making, once in a process, in whichever test is the first.
COMPILER_WARNINGS = (
    "ignore:TensorFloat32 tensor cores:UserWarning",  # which these tests forbid
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # it looks at all that a graph begins with
    "ignore:\\s*Online softmax is disabled:UserWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:.*torch.jit.script_method:DeprecationWarning",
)

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # read when cuBLAS starts; deterministic algorithms insist on it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in COMPILER_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning), append=False)


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """No TF32: float32 means float32. And nothing of the previous test's memory."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """The same bits twice, where a kernel can do it; an error where it cannot."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
