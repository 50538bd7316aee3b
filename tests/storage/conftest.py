"""An engine that stands still, and a run folder to save it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.once import engines_are_built_fast, no_power_is_lost
from tests.helpers.still import StillEngine, save_steps, still_engine


@pytest.fixture(scope="session", autouse=True)
def once() -> Iterator[None]:
    with engines_are_built_fast():
        yield


@pytest.fixture(autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    with no_power_is_lost():
        yield


@pytest.fixture
def new_engine() -> Iterator[Callable[..., StillEngine]]:
    """Makes engines, as `still_engine` does."""
    made = []

    def make(layers: int = 2, precision: str = "bfloat16", vocab_size: int = 32) -> StillEngine:
        made.append(still_engine(layers, precision, vocab_size))
        return made[-1]

    yield make
    for engine in made:
        engine.store.close()


@pytest.fixture
def engine(new_engine: Callable[..., StillEngine]) -> StillEngine:
    return new_engine()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def save(run_dir: Path, engine: StillEngine) -> Callable[..., Path]:
    """Saves the given steps one after another; returns the last checkpoint."""
    return partial(save_steps, run_dir, engine, keep=9)
