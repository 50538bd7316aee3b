"""Steps of two hosts whose network is slow, on one machine: two network namespaces, joined by a
cable of a given rate, each with a rank, half of the cores and, where there are two, a GPU. Beside
the plan, and beside what the network alone would take for the bytes that cross it. Needs root and
iproute2.
python -m benchmarks.hosts smollm2-135m --tokens-per-step 512 --seq-len 128 --rate 200mbit
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT, machine
from megatrain.machine.hardware import visible_gpus
from megatrain.planner.activations import WEIGHT_BYTES
from megatrain.recipes.launch import environment_of
from megatrain.settings import WIRES

ADDRESS, PORT = "10.77.0.{}", 29400
QUEUE = "burst 512kb latency 200ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default=None, help="of the cable, as tc writes it: 200mbit")
    parser.add_argument("--json", type=Path, default=None)
    args, bench = parser.parse_known_args()
    command = ["-m", "megatrain", "bench", *bench, "--json"]
    with two_namespaces("bench-", args.rate) as names:
        found = first_of_both(names, command)
    report = report_of(found, args.rate, command)
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


@contextmanager
def two_namespaces(prefix: str, rate: str | None = None) -> Iterator[tuple[str, str]]:
    """Their names. The cable's ends are cable0 and cable1, at ADDRESS 1 and 2.

    Raises CalledProcessError where they cannot be made, FileNotFoundError without iproute2.
    """
    names = f"{prefix}0", f"{prefix}1"
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add cable0 netns {names[0]} type veth peer name cable1 netns {names[1]}")
        for rank, name in enumerate(names):
            ip(f"-n {name} addr add {ADDRESS.format(rank + 1)}/24 dev cable{rank}")
            for link in ("lo", f"cable{rank}"):
                ip(f"-n {name} link set {link} up")
            if rate is not None:
                ip(f"netns exec {name} tc qdisc add dev cable{rank} root tbf rate {rate} {QUEUE}")
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip(f"netns del {name}")


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)


def about(rank: int) -> dict[str, str]:
    """What a launcher tells the only rank of a host, where it shall listen, and its GPU."""
    there = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ADDRESS.format(1)}
    # by name, since a namespace resolves none
    names = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), f"cable{rank}")
    # else NCCL sees one host, and goes around the cable
    apart = {"NCCL_HOSTID": f"host-{rank}", "NCCL_IB_DISABLE": "1"}
    gpus = visible_gpus()
    gpu = {"CUDA_VISIBLE_DEVICES": gpus[rank]} if len(gpus) > 1 else {}
    return {**environment_of(rank, 2, PORT), **there, **names, **apart, **gpu}


def first_of_both(names: tuple[str, str], command: list[str]) -> dict[str, Any]:
    """Run the command on both hosts; the JSON that the first prints."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    ranks = []
    for rank, name in enumerate(names):
        own = cores[:half] if rank == 0 else cores[-half:]
        ranks.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *command],
                cwd=ROOT,
                env=os.environ | about(rank),
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                preexec_fn=partial(os.sched_setaffinity, 0, own),
            )
        )
    printed, _ = ranks[0].communicate()
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit("benchmarks.hosts: a rank failed; its reason is above")
    found: dict[str, Any] = json.loads(printed)
    return found


def report_of(found: dict[str, Any], rate: str | None, command: list[str]) -> dict[str, Any]:
    """The step beside its plan, and beside the bytes of weights and sums that a host gets from the
    other, at the rate that the run measured before."""
    network = found["environment"]["rates"]["network"]
    job = found["plan"]["job"]
    each = WEIGHT_BYTES[job["precision"]] + WIRES[job["wire"]]
    crossing = found["parameters"] * each // 2
    return {
        "date": date.today().isoformat(),
        "machine": machine(),
        "rate": rate,
        "command": ["python", *command],
        "network_bytes_per_s": network,
        "crossing_bytes": crossing,
        "network_s": crossing / network,
        "network_share": crossing / network / found["step_s"],
        **{key: found[key] for key in ("step_s", "predicted", "error", "shares", "choices")},
        "steps": found["steps"],
        "plan": found["plan"]["timing"],
    }


if __name__ == "__main__":
    main()
