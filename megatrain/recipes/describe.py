"""A run's description before its first step, and its summary after its last."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatrain.config import Config, resuming
from megatrain.engine.resolved import Machine, Resolved
from megatrain.errors import logger, number_of
from megatrain.machine.hardware import update_threads
from megatrain.machine.profile import installed_version, keep_ratio
from megatrain.planner.plan import Plan
from megatrain.recipes.planned_site import prices_of
from megatrain.recipes.ranks.launch import environment, launched_by
from megatrain.recipes.report import PLAN_FILE
from megatrain.recipes.rl.rollouts import Rollouts
from megatrain.recipes.sample import sample
from megatrain.recipes.setup import decided_of_optimizer, micro_batch_of
from megatrain.recipes.signals import StopRequest
from megatrain.recipes.state import Ready, Run
from megatrain.reporting.energy import Economy
from megatrain.reporting.meters import peak_host_bytes
from megatrain.reporting.metrics import held_out_losses
from megatrain.reporting.mfu import ModelFlops
from megatrain.reporting.summary import Facts, Predicted, RunSummary
from megatrain.reporting.words import human_parameters
from megatrain.schedule import UNCHANGED
from megatrain.settings import KEYS, OPTIONS
from megatrain.storage.run_folder import find_checkpoint, write_text
from megatrain.world import World

SUMS, RANKS = "sums_on_device", "ranks"
FEW_STEPS = 4  # of which the first compiles
PACKAGES = ["megatrain", "torch", "transformers", "tokenizers"]
PACKAGES += ["safetensors", "numba", "numpy", "datasets"]
DESCRIPTION = (resuming.CONFIG_FILE, resuming.RESOLVED_FILE, PLAN_FILE, resuming.ENVIRONMENT_FILE)


def decided(ready: Ready) -> dict[str, Any]:
    """The values of keys that the config leaves open."""
    choices, resolved = ready.plan.choices, ready.resolved
    return {option.key: getattr(choices, option.field) for option in OPTIONS if option.key} | {
        "train.micro_batch_tokens": micro_batch_of(ready.config, ready.plan),
        "data.packing": resolved.packed_to is not None,
        "model.images": ready.model.sight is not None,
        "data.date": ready.day.isoformat(),
        "checkpoint.every": ready.save_every,
        "train.eval_every": ready.eval_every,
        "precision": resolved.machine.precision,
        "compile": resolved.compile,
        "train.router_aux_loss_coef": resolved.router_aux_loss_coef,
        "device": resolved.machine.device.type,
        **decided_of_optimizer(ready.config),
    }


def kept_config(ready: Ready) -> dict[str, Any]:
    """The config as checkpoints keep it, with choices by field that order the sums of as many
    ranks, and of no other number; and that."""
    plan, found = ready.plan, resuming.for_state(ready.config, decided(ready))
    if plan.job.size == 1 or plan.choices.groups == 1:
        return found
    return found | {SUMS: plan.choices.sums_on_device, RANKS: plan.job.size}


def describe_run(ready: Ready) -> None:
    """Write the config, the choices, the plan and the environment; log the choices."""
    if not ready.machine.world.is_first:
        return
    plan, folder = ready.plan, ready.config.output
    config = resuming.with_absolute_paths(ready.config)
    environment = described_environment(ready.machine)
    # first: by it a folder is known as a run's
    write_text(folder / resuming.RESOLVED_FILE, config.with_values(decided(ready)).to_yaml())
    write_text(folder / resuming.CONFIG_FILE, config.to_yaml())
    write_text(folder / PLAN_FILE, json.dumps(plan.to_dict(), indent=1) + "\n")
    write_text(folder / resuming.ENVIRONMENT_FILE, json.dumps(environment, indent=1) + "\n")
    parameters = human_parameters(plan.parameters, plan.active_parameters)
    logger.info(f"{parameters}; {choices_in_words(plan)}")


def other_circumstances(run_dir: Path, world: World) -> list[str]:
    """Warnings if libraries are of other versions than before, or ranks of another number."""
    path = run_dir / resuming.ENVIRONMENT_FILE
    try:
        found = environment(run_dir)
        then, ranks = dict(found["packages"]), int(found.get("ranks", 1))
    except (OSError, ValueError, TypeError, KeyError):
        return [f"{path}: cannot be read, so other versions of libraries would not be noticed"]
    now = {name: installed_version(name) for name in PACKAGES}
    pairs = ((name, then.get(name), version) for name, version in now.items())
    changed = [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
    counts = f"{number_of(ranks, 'rank')} before and {world.size} now: {resuming.NEW_ORDER}"
    versions = f"other versions than the run has used may round otherwise: {', '.join(changed)}"
    return [counts] * (ranks != world.size) + [versions] * bool(changed)


def described_environment(machine: Machine) -> dict[str, Any]:
    """Versions, hardware, and the rates that the plan was made from, as JSON-able values."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "hardware": asdict(machine.hardware),
        "rates": asdict(machine.profile),
        **launched_by(),
        "ranks": machine.world.size,
    }


def choices_in_words(plan: Plan) -> str:
    """The plan's choices, as a line."""
    choices, machine, codec = plan.choices, plan.made_of.machine, plan.job.activations
    blocks, twice = len(plan.made_of.shape.block_numel), choices.second_backward
    optional = {
        f"{choices.replicated} replicated": choices.replicated,
        f"{choices.retained_on_host} more in host RAM": choices.retained_on_host,
        "activations offloaded": choices.offload_activations,
        f"activations kept as {codec}": codec != UNCHANGED,
        f"attention of {choices.keep_attention} kept": choices.keep_attention,
        f"gradients of {number_of(twice, 'layer')} computed twice": twice,
        f"{(pieces := plan.job.pieces)} GPUs to a sequence": pieces > 1,
        f"{choices.nvme_blocks} blocks partly on NVMe": choices.nvme_blocks,
        f"{plan.frozen_parameters:,} more parameters frozen": plan.frozen_parameters,
        f"routers balanced with {(weight := plan.made_of.router_aux_loss_coef):g}": weight,
    }
    words = (
        f"micro-batches of {choices.micro_batch_tokens * plan.job.pieces:,} tokens",
        f"{number_of(choices.groups, 'group')} a step",
        f"{choices.resident} of {blocks} blocks resident",
        f"{choices.retained} of {blocks - 2} layers retained",
        *(what for what, applies in optional.items() if applies),
        number_of(choices.update_threads, "update thread"),
    )
    return f"{machine.precision} on {machine.device.type}: {', '.join(words)}"


def work_of(plan: Plan) -> ModelFlops:
    """The arithmetic of the model that is trained."""
    resolved: Resolved = plan.made_of
    anatomy, config = resolved.skeleton.anatomy, resolved.request.config
    shape, seeing = resolved.shape, resolved.skeleton.findings.seeing
    of_images = shape.image_flops(plan.job.images.mean, plan.job.images.each)
    return ModelFlops.of(anatomy, config, shape.idle_parameters, seeing, of_images)


def facts_of(config: Config, plan: Plan, resumed: bool = False) -> Facts:
    """The facts of a run that the advice is based on, besides times. resumed: the config then holds
    the planner's former choices, which the user did not ask for."""
    choices, resolved = plan.choices, plan.made_of
    shape, hardware = resolved.shape, resolved.machine.hardware
    blocks = len(shape.block_numel)
    idle = update_threads(hardware.physical_cores) - choices.update_threads
    asked = {KEYS[name] for name, value in config.asked().items() if value is not None}
    budgets = {"memory.gpu": config.memory.gpu, "memory.host": config.memory.host}
    asked |= {key for key, value in budgets.items() if value != "auto"}
    return Facts(
        cuda=resolved.machine.device.type == "cuda",
        compiled=plan.job.compiled,
        tokens_per_step=plan.job.tokens_per_step,
        groups=choices.groups,
        layers=blocks - 2,
        recomputed=shape.layers_back - choices.retained - choices.retained_on_host,
        streams=choices.resident < blocks,
        second_backward=choices.second_backward,
        update_threads=choices.update_threads,
        idle_threads=max(0, idle),
        planned_s=plan.timing.seconds,
        asked=frozenset(asked.difference(resuming.KEPT_CHOICES if resumed else ())),
    )


def summarize(run: Run, seconds: float, stop: StopRequest | None) -> RunSummary:
    """The first rank's summary of this start, which took `seconds`, with an answer of the model.
    stop: the request that ended the run early; None if it came to its end."""
    question, reply, plan, folder = None, None, run.plan, run.config.output
    metric = run.config.checkpoint.metric
    if stop is None:
        question, reply = sample(run.engine, run.model, run.held_out, run.config.sample_prompt)
    if not run.engine.world.is_first:
        return run.engine.world.broadcast()
    recent = run.progress.recent
    host_bytes = recent[-1].host_bytes if recent else None  # of all ranks of a host
    if run.engine.world.is_alone:
        host_bytes = peak_host_bytes()
    copied = 0 if run.beside is None else plan.disk["checkpoint 1"]
    alike = not (isinstance(run.loader, Rollouts) or plan.job.besides)  # to what plans foresee
    if run.step - run.first_step > FEW_STEPS and alike:
        keep_ratio(run.machine.profile, plan.timing.seconds, run.steady.median_s)
    found = RunSummary(
        run_dir=folder,
        steps=run.step - run.first_step,
        tokens=run.tokens - run.first_tokens,
        seconds=seconds,
        **held_out_losses(folder),
        best_step=run.best.get("step"),
        best_metric=metric,
        best_value=run.best.get(metric),
        final_dir=folder / find_checkpoint(folder).name if stop is None else None,
        prompt=question,
        answer=reply,
        host=Predicted(plan.host_bytes * plan.job.ranks + copied, host_bytes),
        gpu=Predicted(plan.gpu_bytes or None, run.meter.peak_bytes()),
        step_s=Predicted(plan.timing.seconds, run.steady.median_s),
        rates_guessed=not run.machine.profile.measured_on,
        time=run.progress.time,
        rows=run.loader.used(),
        economy=spent_economy(run),
        planned_economy=plan.economy,
        eval_s=run.progress.outside_s["evaluating"],
        save_s=run.progress.outside_s["saving"],
        advice=recent[-1].advice if recent else "",
        skipped=run.engine.skipped,
        spikes=run.spikes,
        exit_code=0 if stop is None else stop.exit_code,
    )
    return run.engine.world.broadcast(found)


def spent_economy(run: Run) -> Economy:
    """Time, energy and cost of this process's steps."""
    given, spent = run.config.economy, run.spent
    host = "processors measured" if spent.host_j is not None else "the host's power is not counted"
    counted = ["the host as given" if given.host_power_w is not None else host]
    if spent.gpu_j is not None:
        counted.insert(0, "GPU measured" if given.gpu_power_w is None else "GPU as given")
    tokens = run.tokens - run.first_tokens
    return Economy(tokens, run.spent_s, spent.total_j, prices_of(run.config), "; ".join(counted))
