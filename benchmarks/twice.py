"""Planned seconds of a step over host RAM, with gradients computed twice in no layer or in all,
and with any number of layers: a table in CSV.

    python -m benchmarks.twice qwen2.5-32b > benchmarks/results/2026-11-28-cpu/twice.csv

Steps of 65,536 tokens in sequences of 2,048 on an H200 of which 24 GiB may be used, with exact
clipping; rates are those of its data sheet.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from multiprocessing import get_context

from benchmarks.what_fits import STEP
from megatrain.config.load import bench_config
from megatrain.recipes.doctor import planned_machine
from megatrain.recipes.model import shape_model
from megatrain.recipes.setup import plan_run, quiet_libraries, request_of, resolve_run

RAM = range(128, 513, 16)
LIMITS = (*STEP, "memory.gpu=24GiB")


def main() -> None:
    print("moments,host GiB,none or all: layers twice,step s,any: layers twice,step s", flush=True)
    cases = [(sys.argv[1], moments) for moments in ("int8", "bfloat16", "float32")]
    # each by a process of its own, whose RAM is part of the plan, as in `megatrain plan`
    with get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        for rows in pool.starmap(table, cases, chunksize=1):
            print("\n".join(rows), flush=True)


def table(target: str, moments: str) -> list[str]:
    """Rows for one kind of moments, of the sizes of RAM that some plan fits."""
    quiet_libraries()
    limits = [*LIMITS, f"optimizer.moments={moments}"]
    described = shape_model(first := bench_config(target, limits))
    known = resolve_run(first, described, planned_machine(first, gpu="H200", ram="512GiB"))
    rows, fitting = list[str](), ["false", "true", "auto"]
    for ram in reversed(RAM):
        found = {}
        for twice in [*fitting]:
            config = bench_config(target, [*limits, f"memory.second_backward={twice}"])
            machine = planned_machine(config, gpu="H200", ram=f"{ram}GiB")
            request = request_of(config, described)
            plan = plan_run(config, replace(known, machine=machine, request=request))
            if plan.fits:
                found[twice] = f"{plan.choices.second_backward},{plan.timing.seconds:.2f}"
            else:  # nor in less
                fitting.remove(twice)
        before = found.get("false", found.get("true", "-,-"))
        if found:
            rows.insert(0, f"{moments},{ram},{before},{found.get('auto', '-,-')}")
    return rows


if __name__ == "__main__":
    main()
