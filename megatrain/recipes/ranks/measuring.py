"""Rates of this host's GPUs at work together, measured in processes of their own for `doctor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import typer

from megatrain.engine.request import choose_device
from megatrain.errors import MegaTrainError, exit_code_of
from megatrain.measure.ranks import measure_together
from megatrain.recipes.ranks.device import bind, cores_of_host
from megatrain.recipes.ranks.launch import run_ranks
from megatrain.recipes.ranks.liveness import OtherFailed
from megatrain.recipes.ranks.rendezvous import as_rank
from megatrain.world import World


def measure_processes(ranks: int, device: str) -> dict[str, Any]:
    """`measure_together` in new processes, each with a GPU, or on the CPU. Raises OtherFailed."""
    with TemporaryDirectory(prefix="megatrain-") as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", __name__, str(file), device]
        if code := run_ranks([], ranks, command=command):
            raise OtherFailed("the processes could not measure together, as they say above", code)
        found: dict[str, Any] = json.loads(file.read_text())
    found["update"] = tuple((threads, rate) for threads, rate in found["update"])
    return found


def measure_into(file: Path, device: str) -> None:
    """Measure as one of the ranks, of which the first writes the file."""

    def work(world: World) -> SimpleNamespace:
        own = choose_device(device)
        cores = max(1, cores_of_host(world) // world.size)
        bind(world, own)
        found = measure_together(world, own, cores)
        if world.is_first:
            file.write_text(json.dumps(found))
        return SimpleNamespace(exit_code=0)

    as_rank(device, work)


if __name__ == "__main__":
    try:
        measure_into(Path(sys.argv[1]), sys.argv[2])
    except MegaTrainError as error:
        code, sentence = exit_code_of(error)
        typer.echo(f"error: {sentence}", err=True)
        sys.exit(code)
