"""Sums over ranks in a fixed order, as the engine makes them, beside the library's own: seconds,
and elements whose bits differ, from each other and from call to call.
torchrun --nproc-per-node 4 -m benchmarks.sums --json out.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import closing
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import Measured
from megatrain.engine.build import choose_device
from megatrain.engine.exchange import Exchange
from megatrain.engine.streams import Compute
from megatrain.measure.ranks import ELEMENTS, Together
from megatrain.memory.layout import FlatLayout
from megatrain.recipes.rank import as_rank, bind
from megatrain.world import World, scatter_sum


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="cuda, cpu or auto")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    report = as_rank(args.device, partial(measure, args.device)).report
    if report:
        print(json.dumps(report, indent=1))
    if report and args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(device_name: str, world: World) -> Measured:
    if world.size == 1:
        raise SystemExit("benchmarks.sums: one rank has nothing to add; start it with torchrun")
    device = choose_device(device_name)  # a rank sees its own GPU alone
    bind(world, device)
    layout = FlatLayout((), ELEMENTS[device.type])
    torch.manual_seed(world.rank)
    with closing(Exchange(world, [layout], Compute(device))) as exchange:
        ours = torch.randn(exchange.padded(0), device=device)
        share = torch.empty(exchange.shares[0], device=device)

        def ordered() -> torch.Tensor:
            return exchange.summed(ours)

        def library() -> torch.Tensor:
            scatter_sum(share, ours, group=world.local)
            return share

        found: dict[str, Any] = {}
        works: dict[str, Callable[[], torch.Tensor]] = {"ordered": ordered, "library": library}
        clock, sums = Together(world, device), {}
        for name, work in works.items():
            sums[name] = work().clone()
            differing = int((work() != sums[name]).sum())
            found[name] = {
                "seconds": clock.seconds(work),
                "elements_that_differ_between_calls": sum(world.every(differing)),
            }
        differing = int((sums["ordered"] != sums["library"]).sum())
        found["elements_that_differ"] = sum(world.every(differing))
    about = {"date": date.today().isoformat(), "ranks": world.size, "elements": len(ours)}
    return Measured({**about, **found} if world.is_first else {})


if __name__ == "__main__":
    main()
