"""A machine whose GPUs train together, each as a rank, and plans for other numbers of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatrain.config import Config
from megatrain.engine.resolved import Machine, Resolved
from megatrain.machine import profile
from megatrain.planner.plan import OnGpus, Plan
from megatrain.recipes.setup import plan_run, prices_of
from megatrain.reporting.energy import Economy

COUNTS = (1, 2, 4, 8)  # of GPUs that are compared


def several(machine: Machine, ranks: int, hosts: int = 1) -> Machine:
    """The machine with `ranks` GPUs at work, each with its part of the host.

    machine: with one, which has all of it.
    hosts: machines like it.
    """
    if ranks == 1:
        return replace(machine, hosts=hosts, alone=machine)
    known = profile.known(machine.profile, machine.hardware, ranks) if machine.here else None
    return replace(
        machine,
        hardware=profile.part_of(machine.hardware, ranks),
        profile=known or profile.assumed(machine.profile, machine.hardware, ranks),
        ranks=ranks,
        hosts=hosts,
        together_assumed=known is None,
        peers=profile.peers(machine.hardware),
        alone=machine,
    )


def beside_others(config: Config, plan: Plan) -> Plan:
    """The plan with what 1, 2, 4 and 8 GPUs of each host would give, if a number was asked for."""
    if plan.made_of.machine.alone is None:
        return plan
    return replace(plan, on_gpus=tuple(on_gpus(config, plan)))


def on_gpus(config: Config, plan: Plan) -> Iterator[OnGpus]:
    """Plan for other numbers of GPUs, as far as a step has rows for them.

    The config's price is that of the plan's machine; others are taken in proportion.
    """
    resolved: Resolved = plan.made_of
    machine, job = resolved.machine, plan.job
    assert machine.alone is not None
    for gpus in sorted({*COUNTS, job.ranks}):
        if gpus % job.pieces:
            continue
        if job.most_ranks is not None and gpus * job.hosts > max(job.most_ranks, job.size):
            return
        found = plan
        if gpus != job.ranks:
            others = several(machine.alone, gpus, job.hosts)
            found = plan_run(config, replace(resolved, machine=others))
        if not found.fits:
            yield OnGpus(gpus, fits=False)
            continue
        timing, times = found.timing, gpus / job.ranks * job.hosts
        prices = prices_of(config).times(times)
        spent = Economy(round(timing.tokens_per_s * 3600), 3600, None, prices, "")
        yield OnGpus(
            gpus,
            fits=True,
            seconds=timing.seconds,
            tokens_per_s=timing.tokens_per_s,
            tflops=timing.tflops,
            cost_per_million=spent.cost_per_million,
        )
