"""The site of a plan without torch: a machine that is described, as by `megatrain plan --gpu "RTX
4090" --ram 128GiB`, several GPUs of any, and what steps on it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from megatrain.config import Config
from megatrain.errors import ConfigError, logger
from megatrain.machine import profile as rates
from megatrain.machine.datasheets import FIRST_BFLOAT16, FIRST_FP8, board_power_w, parse_size
from megatrain.machine.hardware import GIB
from megatrain.machine.hypothetical import DRIVER_BYTES, SYSTEM_BYTES, find_gpu, hypothetical
from megatrain.machine.profile import typical
from megatrain.planner.plan import OnGpus, Plan
from megatrain.planner.question import Site
from megatrain.reporting.energy import Economy, Prices, planned_power

BYTES_OF_GBIT = 1e9 / 8
S = TypeVar("S", bound=Site)


def planned_site(
    config: Config,
    find: Callable[[], Site] | None = None,
    *,
    gpus: int | None = None,
    hosts: int | None = None,
    network: float | None = None,
    **other: Any,
) -> Site:
    """The site that is described by `other`, or else what `find` returns, with `gpus` of each of
    `hosts` like it at work. network: Gbit/s of each host to the others. Raises ConfigError, naming
    the command's flags."""
    if (hosts or 1) > 1 and network is None:
        raise ConfigError("--hosts needs --network, too: Gbit/s of each host, such as 400")
    if network is not None and not (network > 0 and (hosts or 1) > 1):
        raise ConfigError("--network: Gbit/s of each host, more than 0, for two --hosts or more")
    site = find() if find and not other else _described(config, gpus=gpus or 1, **other)
    if gpus is None and hosts is None:
        return site
    profile = replace(site.profile, network=(network or 0.0) * BYTES_OF_GBIT)
    return several(replace(site, profile=profile), gpus or 1, hosts or 1)


def _described(
    config: Config,
    gpu: str | None = None,
    ram: str | None = None,
    cores: int | None = None,
    *,
    gpu_memory: str | None = None,
    gpu_tflops: float | None = None,
    pcie: float | None = None,
    gpus: int = 1,
) -> Site:
    """A machine with this GPU, RAM ("128GiB") and number of cores (None: the usual host's).

    gpu: a name in machine/datasheets.py, or that of a GPU which is described by its memory
        ("12GiB"), its dense bf16 TFLOP/s and the GB/s each way of its link to the host.
    gpus: of the same kind.

    Raises ConfigError for a GPU that is neither known nor described, a bad size, and a precision
    that the GPU lacks.
    """
    if ram is None or (gpu, gpu_memory, gpu_tflops, pcie) == (None, None, None, None):
        together = "--gpu and --ram belong together, and --cores to them"
        raise ConfigError(f"{together}; give none of them for this machine")
    memory = None
    if gpu_memory is not None:
        memory = _size("--gpu-memory", gpu_memory, DRIVER_BYTES, "12GiB")
    for flag, value in {"--gpu-tflops": gpu_tflops, "--pcie": pcie}.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{flag}: must be more than 0, not {value:g}")
    name, sheet, listed = find_gpu(gpu, memory, gpu_tflops, pcie)
    hardware = hypothetical(name, sheet, _size("--ram", ram, SYSTEM_BYTES, "128GiB"), cores, gpus)
    if not listed:
        logger.warning(
            f"{name} is not in the table of GPUs: assumed are {sheet.memory:,.0f} GB/s of memory, "
            f"{sheet.float32:,.0f} TFLOP/s in float32, no fp8, and a desktop around it"
        )
    precision, capability = config.precision, sheet.capability
    if precision == "auto":
        precision = "bfloat16" if capability >= FIRST_BFLOAT16 else "float32"
    elif precision == "fp8" and capability < FIRST_FP8:
        where = config.where("precision")
        raise ConfigError(f"{where}: the {name} has no fp8 units; set precision: bfloat16")
    return Site(precision, hardware, typical(hardware, sheet), compiles=True, here=False)


def _size(flag: str, text: str, least: int, example: str) -> int:
    size = parse_size(text)
    if not isinstance(size, int) or size <= least:
        wanted = f"a size of more than {least / GIB:.2g} GiB, such as {example}"
        raise ConfigError(f"{flag}: must be {wanted}, not {text!r}")
    return size


# -- several GPUs ----------------------------------------------------------------------------------

COUNTS = (1, 2, 4, 8)  # of GPUs that are compared


def several(machine: S, ranks: int, hosts: int = 1) -> S:
    """The machine with `ranks` GPUs at work, each with its part of the host. machine: with one,
    which has all of it. hosts: machines like it."""
    if ranks == 1:
        return replace(machine, hosts=hosts, alone=machine)
    known = rates.known(machine.profile, machine.hardware, ranks) if machine.here else None
    gpu = machine.hardware.gpu
    return replace(
        machine,
        hardware=rates.part_of(machine.hardware, ranks),
        profile=known or rates.assumed(machine.profile, machine.hardware, ranks),
        ranks=ranks,
        hosts=hosts,
        together_assumed=known is None,
        peers=gpu is None or rates.GEFORCE.search(gpu.name) is None,
        alone=machine,
    )


# -- what it costs ---------------------------------------------------------------------------------


def with_economy(config: Config, plan: Plan, site: Site, steps: int | None) -> Plan:
    """The plan with the economy of its steps, or of one if their number is not known."""
    if not plan.fits:
        return replace(plan, steps=steps)
    options, timing, gpu = config.economy, plan.timing, site.hardware.gpu
    board_w, gpu_w = (board_power_w(gpu.name), options.gpu_power_w) if gpu else (None, None)
    gpus, hosts = plan.job.size, plan.job.hosts
    watts, counted = planned_power(timing.busy, board_w, gpu_w, options.host_power_w, gpus, hosts)
    seconds = (steps or 1) * timing.seconds
    spent = seconds, None if watts is None else watts * seconds, prices_of(config).times(hosts)
    economy = Economy(round(seconds * timing.tokens_per_s), *spent, counted)
    return replace(plan, economy=economy, steps=steps)


def prices_of(config: Config) -> Prices:
    options = config.economy
    return Prices(options.price_per_hour, options.price_per_kwh, options.currency)


def beside_others(
    config: Config, plan: Plan, alone: S | None, plan_on: Callable[[S], Plan]
) -> Plan:
    """The plan with what 1, 2, 4 and 8 GPUs of each host would give, as far as a step has rows for
    them, if a number was asked for: `alone` is the machine with one, `plan_on` plans for another.
    The config's price is that of the plan's machine; others are taken in proportion."""
    job, rows = plan.job, list[OnGpus]()
    if alone is None:
        return plan
    for gpus in sorted({*COUNTS, job.ranks}):
        too_many = job.most_ranks is not None and gpus * job.hosts > max(job.most_ranks, job.size)
        if gpus % job.pieces or too_many:
            continue
        found = plan if gpus == job.ranks else plan_on(several(alone, gpus, job.hosts))
        if not found.fits:
            rows.append(OnGpus(gpus, fits=False))
            continue
        timing = found.timing
        prices = prices_of(config).times(gpus / job.ranks * job.hosts)
        spent = Economy(round(timing.tokens_per_s * 3600), 3600, None, prices, "")
        speed = timing.seconds, timing.tokens_per_s, timing.tflops
        rows.append(OnGpus(gpus, True, *speed, spent.cost_per_million))
    return replace(plan, on_gpus=tuple(rows))


# -- notices ---------------------------------------------------------------------------------------


def notice(config: Config, machine: Site) -> None:
    """Warn of a GPU that has no bf16 units: what that costs, and what to set. Log keys for GPUs, or
    several of them or of hosts, that have no effect on this machine."""
    gpu, several = machine.hardware.gpu, machine.ranks * machine.hosts
    if gpu is not None and gpu.capability < FIRST_BFLOAT16:
        instead = "it computes in float32, several times slower than cards that have them"
        if machine.precision != "float32":
            instead = "it emulates them slowly; set precision: float32"
        logger.warning(f"{gpu.name} has no bf16 units: {instead}")
    for key, value, without, others, trains in (
        ("memory.transport", config.memory.transport, ("auto",), machine.ranks, "GPU of a host"),
        ("memory.replicated", config.memory.replicated, ("auto", 0), several, "GPU"),
        ("train.wire", config.train.wire, ("float32",), machine.hosts, "host"),
    ):
        if others == 1 and value not in without:
            logger.info(f"{config.where(key)}: {value} has no effect where one {trains} trains")
    if gpu is None and config.memory.gpu != "auto":
        logger.info(f"{config.where('memory.gpu')}: has no effect on a CPU, where all is host RAM")


def check_divides(config: Config, ranks: int) -> None:
    """Raise ConfigError unless ranks of a host can share sequences evenly."""
    pieces = config.train.context_parallel
    if ranks % pieces:
        where, there = config.where("train.context_parallel"), f"{ranks} train{'s' * (ranks == 1)}"
        raise ConfigError(
            f"{where}: {pieces} GPUs of a host cannot share sequences where {there}; set a number "
            "that divides it"
        )
