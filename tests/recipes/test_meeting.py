"""Ranks that are started again in the store of those that died."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
from torch import distributed

from megatrain.recipes.meeting import fresh_part

SOON = timedelta(seconds=20)


def test_each_start_has_a_part_of_the_store_for_itself():
    store, size = distributed.HashStore(), 3  # type: ignore[attr-defined]
    with ThreadPoolExecutor(size) as ranks:
        for start in range(3):
            # the second comes in the end: what it left before is there
            found = [ranks.submit(fresh_part, store, rank, size, SOON) for rank in (0, 2, 1)]
            first, *others = (one.result() for one in found)
            assert not first.check(["failed"])
            first.set("failed", f"of start {start}")
            assert [part.get("failed").decode() for part in others] == 2 * [f"of start {start}"]


@pytest.mark.parametrize(
    ("rank", "words"), [(0, r"ranks \[1\] did not come"), (1, "the first rank did not come")]
)
def test_who_does_not_come_is_named(rank, words):
    store = distributed.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as ranks:  # of a start before
        list(ranks.map(partial(fresh_part, store, size=2, patience=SOON), (0, 1)))
    with pytest.raises(RuntimeError, match=words):
        fresh_part(store, rank, 2, timedelta(seconds=0.2))
