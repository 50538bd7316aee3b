"""malloc gives large blocks back where the plan leaves little room, and else keeps its speed."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

import megatrain as mt
from tests.support import tiny_config


@pytest.mark.slow
@pytest.mark.parametrize(("room", "bound"), [(4.0, False), (1.5, True)])
def test_malloc_is_bound_where_memory_is_short(monkeypatch, room, bound):
    bound_heap = Mock()
    monkeypatch.setattr("megatrain.engine.constructors.bound_heap", bound_heap)
    sizes: dict[str, Any] = {"tokens_per_step": 32, "seq_len": 16, "device": "cpu"}
    with mt.Engine.from_config(tiny_config("llama"), **sizes) as engine:
        assert engine.plan is not None
        planned = engine.plan.host_bytes
    bound_heap.reset_mock()
    memory = {"host": int(planned * room)}
    mt.Engine.from_config(tiny_config("llama"), memory=memory, **sizes).close()
    assert bound_heap.called == bound
