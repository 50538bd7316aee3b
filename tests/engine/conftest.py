"""Fixtures of engine tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.helpers.once import engines_are_built_fast


@pytest.fixture(scope="session", autouse=True)
def once() -> Iterator[None]:
    with engines_are_built_fast():
        yield


@pytest.fixture
def no_code_is_generated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are cut as for the compiler, but then run eagerly: to translate one takes seconds."""
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition

    def cut_alone(graph: fx.GraphModule, inputs: list[Tensor], **_: Any) -> Any:
        return aot_eager_decomp_partition(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", cut_alone)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
