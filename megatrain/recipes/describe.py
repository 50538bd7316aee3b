"""What a run writes about itself before its first step, and says about itself after its last."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.config.resuming import CONFIG_FILE, KEPT_CHOICES, RESOLVED_FILE
from megatrain.machine.hardware import update_threads
from megatrain.machine.profile import installed_version
from megatrain.planner.plan import Plan
from megatrain.recipes.loop import Run
from megatrain.recipes.optimizers import make_optimizer, optimizer_keys
from megatrain.recipes.sample import sample
from megatrain.recipes.setup import Parts, prices_of
from megatrain.recipes.signals import StopRequest
from megatrain.reporting.advice import Facts
from megatrain.reporting.energy import Economy
from megatrain.reporting.meters import peak_host_bytes
from megatrain.reporting.metrics import read_metrics
from megatrain.reporting.summary import Predicted, RunSummary
from megatrain.schedule import UNCHANGED
from megatrain.settings import KEYS, OPTIONS
from megatrain.storage.run_folder import write_text

PACKAGES = (
    "megatrain",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numba",
    "numpy",
    "datasets",
)


def describe_run(config: Config, plan: Plan, parts: Parts) -> str:
    """Write what was asked for, what was decided, and what it runs on; returns the decisions as a line."""
    choices, machine = plan.choices, parts.machine
    chosen = {option.key: getattr(choices, option.field) for option in OPTIONS if option.key}
    decided = chosen | {
        "data.packing": parts.resolved.packed_to is not None,
        "precision": machine.precision,
        "compile": plan.job.compiled,
        "device": machine.device.type,
        **decided_of_optimizer(config),
    }
    write_text(config.output / CONFIG_FILE, config.to_yaml())
    write_text(config.output / RESOLVED_FILE, config.with_values(decided).to_yaml())
    write_text(config.output / "plan.json", json.dumps(plan.to_dict(), indent=1) + "\n")
    write_text(config.output / "env.json", json.dumps(environment_of(parts), indent=1) + "\n")
    return choices_in_words(plan, parts)


def decided_of_optimizer(config: Config) -> dict[str, Any]:
    """What the optimizer's own defaults stand for, of the keys that it has."""
    optimizer, known = make_optimizer(config), optimizer_keys(config)
    values = {
        key: getattr(optimizer, key)
        for key, value in config.optimizer
        if value == "auto" and key in known
    }
    return {f"optimizer.{key}": value for key, value in values.items() if value is not None}


def environment_of(parts: Parts) -> dict[str, Any]:
    """What the run runs on, as JSON-able values."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "hardware": asdict(parts.machine.hardware),
    }


def choices_in_words(plan: Plan, parts: Parts) -> str:
    """What the plan decided, as a line."""
    choices, machine, blocks = plan.choices, parts.machine, len(parts.shape.block_numel)
    on_host = f"{choices.retained_on_host} more in host RAM, " if choices.retained_on_host else ""
    kept = (
        "" if plan.job.activations == UNCHANGED else f"activations kept as {plan.job.activations}, "
    )
    return (
        f"{machine.precision} on {machine.device.type}: micro-batches of {choices.micro_batch_tokens:,} tokens, "
        f"{choices.groups} group(s) a step, {choices.resident} of {blocks} blocks resident, "
        f"{choices.retained} of {blocks - 2} layers retained, {on_host}{'activations offloaded, ' if choices.offload_activations else ''}{kept}"
        f"{'gradients computed twice, ' if choices.second_backward else ''}"
        f"{f'{choices.nvme_blocks} blocks partly on NVMe, ' if choices.nvme_blocks else ''}{choices.update_threads} update thread(s)"
    )


def facts_of(config: Config, plan: Plan, parts: Parts, resumed: bool = False) -> Facts:
    """What the advice goes by, besides times. In a resumed run the planner's former choices look like the user's, and are not."""
    choices, layers = plan.choices, len(parts.shape.block_numel) - 2
    budgets = {"memory.gpu": config.memory.gpu, "memory.host": config.memory.host}
    asked = {key for key, value in budgets.items() if value != "auto"}
    asked |= {KEYS[name] for name, value in config.asked().items() if value is not None}
    return Facts(
        cuda=parts.machine.device.type == "cuda",
        compiled=plan.job.compiled,
        tokens_per_step=plan.job.tokens_per_step,
        groups=choices.groups,
        layers=layers,
        recomputed=layers - choices.retained - choices.retained_on_host,
        streams=choices.resident < len(parts.shape.block_numel),
        second_backward=choices.second_backward,
        update_threads=choices.update_threads,
        idle_threads=max(
            0, update_threads(parts.machine.hardware.physical_cores) - choices.update_threads
        ),
        asked=frozenset(asked.difference(KEPT_CHOICES if resumed else ())),
    )


def summarize(
    run: Run, plan: Plan, *, steps: int, tokens: int, seconds: float, stop: StopRequest | None
) -> RunSummary:
    """What this process did, and what the model says now; `stop` is the request that ended the run early, if one did."""
    done = stop is None
    question, reply = (
        sample(run.engine, run.model, run.held_out, run.config.sample_prompt)
        if done
        else (None, None)
    )
    return RunSummary(
        run_dir=run.run_dir,
        steps=steps,
        tokens=tokens,
        seconds=seconds,
        **held_out_losses(run.run_dir),
        best_step=run.best.get("step"),
        final_dir=run.run_dir / "final" if done else None,
        prompt=question,
        answer=reply,
        host=Predicted(plan.host_bytes, peak_host_bytes()),
        gpu=Predicted(plan.gpu_bytes or None, run.meter.peak_bytes()),
        step_s=Predicted(plan.timing.seconds, run.steady.median_s),
        time=run.progress.time,
        economy=spent_economy(run),
        planned_economy=plan.economy,
        eval_s=run.progress.outside_s["evaluating"],
        save_s=run.progress.outside_s["saving"],
        advice=run.advice,
        skipped=run.engine.skipped,
        exit_code=0 if stop is None else stop.exit_code,
    )


def spent_economy(run: Run) -> Economy:
    """Of the steps of this process."""
    host_w = run.config.economy.host_power_w
    given = run.config.economy.gpu_power_w is not None or not run.energy.measures_gpu
    gpu = ("GPU as given" if given else "GPU measured") if run.spent.gpu_j is not None else ""
    host = (
        "the host as given"
        if host_w is not None
        else "processors measured"
        if run.spent.host_j is not None
        else "the host's power is not counted"
    )
    tokens = run.tokens - run.first_tokens
    return Economy(
        tokens,
        run.spent_s,
        run.spent.total_j,
        prices_of(run.config),
        f"{gpu}; {host}" if gpu else host,
    )


def summarize_finished(run_dir: Path) -> RunSummary:
    """The summary of a run that has nothing left to do."""
    return RunSummary(
        run_dir=run_dir,
        steps=0,
        tokens=0,
        seconds=0.0,
        **held_out_losses(run_dir),
        final_dir=run_dir / "final",
    )


def held_out_losses(run_dir: Path) -> dict[str, Any]:
    """The first and the latest held-out loss of the whole run, whichever process computed them."""
    losses = [row["eval_loss"] for row in read_metrics(run_dir) if "eval_loss" in row]
    return {
        "eval_loss_before": losses[0] if losses else None,
        "eval_loss_after": losses[-1] if len(losses) > 1 else None,
    }
