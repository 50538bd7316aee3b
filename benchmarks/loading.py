"""How fast a model comes from the disk and goes back: checkpoint, resume, export and loading,
beside what the disk itself does.
python -m benchmarks.loading --model qwen2.5-7b --folder /scratch --json out.json
torchrun --nproc-per-node 2 -m benchmarks.loading ...
Random weights through the engine of `megatrain train`. Bytes are those of the tensors; the page
cache is dropped before each read. Peaks of host RAM show that no second copy is made. The speed of
virtual disks changes: so the disk alone reads the same files right afterwards, past the cache, and
writes for some seconds before and after what is written.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.records import Measured
from megatrain.config import Config
from megatrain.engine.engine import Engine
from megatrain.machine.hardware import GIB
from megatrain.measure.disk import PIECE_BYTES, THREADS, bypass_cache, disk_rates
from megatrain.models.pretrained import resolve_source
from megatrain.recipes.bench import prepare_shape
from megatrain.recipes.rank import as_rank, bind
from megatrain.recipes.setup import make_engine, make_run_plan, quiet_libraries
from megatrain.recipes.shapes import bench_config
from megatrain.reporting.meters import peak_host_bytes
from megatrain.storage.checkpoint import checkpoint_bytes, save_checkpoint
from megatrain.storage.export import save_pretrained
from megatrain.storage.restore import load_checkpoint
from megatrain.storage.weights import load_weights
from megatrain.world import World

DISK_BYTES = 8 << 30  # written, or read, by the disk alone: some seconds


class Way(NamedTuple):
    """What is measured.

    Attributes:
        nbytes: of its tensors.
        read: the folder whose files it reads, if any.
    """

    name: str
    nbytes: int
    run: Callable[[], object]
    read: Path | None = None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="qwen2.5-1.5b", help="a shape of `megatrain bench`, or a model folder"
    )
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="on the disk to be measured; what is written there is removed again",
    )
    parser.add_argument(
        "--weights", action="store_true", help="export and loading alone: no checkpoint"
    )
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("overrides", nargs="*", help="keys of the config")
    args = parser.parse_args()
    report = measure(args.model, args.layers, args.folder, args.overrides, args.weights)
    if report:
        print("\n".join(table(report)))
    if report and args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(
    model: str, layers: int | None, folder: Path, overrides: list[str], weights_alone: bool = False
) -> dict[str, Any]:
    """Seconds, bytes and peaks of host RAM of each way, of all ranks together."""
    config = bench_config(model, overrides)
    job = partial(_measure, config, layers, folder, weights_alone)
    return as_rank(config.device, job).report


def _measure(
    config: Config, layers: int | None, folder: Path, weights_alone: bool, world: World
) -> Measured:
    quiet_libraries()
    folder.mkdir(parents=True, exist_ok=True)
    parts = prepare_shape(config, layers, world)
    plan = make_run_plan(parts, checkpoints_written=0)
    plan.check()
    bind(world, parts.machine.device)
    run, exported = folder / "run", folder / "exported"
    try:
        with make_engine(parts, plan) as engine:
            weights = (
                sum(block.layout.parameters for block in engine.anatomy.blocks)
                * engine.store.arrays["weight"].dtype.itemsize
            )
            ways = ways_of(engine, run, exported, checkpoint_bytes(engine), weights)
            if weights_alone:
                ways = ways[2:]
            before = of_all(world)
            results = [timed(way, folder, world) for way in ways]
    finally:
        if world.is_first:
            for made in (run, exported):
                shutil.rmtree(made, ignore_errors=True)
    about = {
        "date": date.today().isoformat(),
        "model": config.model.source,
        "parameters": parts.resolved.shape.parameters,
        "ranks": world.size,
        "host_bytes_before": before,
    }
    return Measured({**about, "ways": results} if world.is_first else {})


def of_all(world: World) -> int:
    """Peak bytes of host RAM of all ranks."""
    return sum(world.every(peak_host_bytes(world.local_size)))


def ways_of(engine: Engine, run: Path, exported: Path, everything: int, weights: int) -> list[Way]:
    """In an order in which each finds its files."""
    checkpoint = run / "checkpoint-1"

    def load() -> None:
        load_weights(engine.anatomy, engine.store, resolve_source(exported), engine.constants)

    return [
        Way("save a checkpoint", everything, lambda: save_checkpoint(run, 1, engine, None, {})),
        Way(
            "resume from it, its hashes checked",
            everything,
            lambda: load_checkpoint(checkpoint, engine),
            read=checkpoint,
        ),
        Way("export the weights", weights, lambda: save_pretrained(engine, exported)),
        Way("load the weights", weights, load, read=exported),
    ]


def timed(way: Way, folder: Path, world: World) -> dict[str, Any]:
    """One way, from and to the disk itself, until all ranks are done."""
    before = [] if way.read else [world.first(lambda: write_rate(folder))]
    world.first(lambda: forget(folder))
    started = time.perf_counter()
    way.run()
    seconds = max(world.every(time.perf_counter() - started))
    after = world.first(lambda: read_rate(way.read) if way.read else write_rate(folder))
    return {
        "name": way.name,
        "bytes": way.nbytes,
        "seconds": seconds,
        "bytes_per_s": way.nbytes / seconds,
        "disk_bytes_per_s": [*before, after],
        "host_bytes": of_all(world),
    }


def forget(folder: Path) -> None:
    """Let the page cache drop every file in `folder`, after all of it is on the disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_rate(folder: Path) -> float:
    """Bytes/s that the disk alone writes."""
    write, _ = disk_rates(folder, DISK_BYTES)
    return write


def read_rate(folder: Path) -> float:
    """Bytes/s of the disk alone: the files in `folder` by several threads, past the page cache."""
    pieces = [
        (path, begin)
        for path in sorted(folder.rglob("*.safetensors"))
        for begin in range(0, path.stat().st_size, PIECE_BYTES)
    ][: DISK_BYTES // PIECE_BYTES]

    def read(piece: tuple[Path, int]) -> int:
        file = os.open(piece[0], os.O_RDONLY)
        try:
            bypass_cache(file)
            return os.preadv(file, [buffer], piece[1])
        finally:
            os.close(file)

    forget(folder)
    with mmap.mmap(-1, PIECE_BYTES) as buffer, ThreadPoolExecutor(THREADS) as pool:
        started = time.perf_counter()
        nbytes = sum(pool.map(read, pieces))  # all into one buffer, which is never looked at
        return nbytes / (time.perf_counter() - started)


def table(report: dict[str, Any]) -> list[str]:
    """Markdown rows."""

    def disk_alone(way: dict[str, Any]) -> str:
        return ", ".join(f"{rate / 1e9:.2f}" for rate in way["disk_bytes_per_s"])

    rows = [
        f"{report['model']}, {report['parameters']:,} parameters, {report['ranks']} rank(s); "
        f"host RAM before: {report['host_bytes_before'] / GIB:.2f} GiB",
        "",
        "| what | GB | s | GB/s | the disk alone | host GiB, peak |",
        "|---|---|---|---|---|---|",
    ]
    return rows + [
        f"| {way['name']} | {way['bytes'] / 1e9:.1f} | {way['seconds']:.1f} "
        f"| {way['bytes_per_s'] / 1e9:.2f} | {disk_alone(way)} | {way['host_bytes'] / GIB:.2f} |"
        for way in report["ways"]
    ]


if __name__ == "__main__":
    main()
