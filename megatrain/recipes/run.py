"""What the commands do: train, resume, plan, show data, evaluate, generate."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from megatrain.checkpoint import find_checkpoint, find_resumable, load_checkpoint
from megatrain.config import Config, load_config
from megatrain.data import Loader, held_out_batches
from megatrain.data.show import describe, show_rows, summary
from megatrain.engine.build import from_pretrained
from megatrain.errors import ConfigError, StorageError
from megatrain.flops import Work
from megatrain.meters import GpuMeter, host_bytes
from megatrain.metrics import MetricsWriter
from megatrain.optim import Frozen
from megatrain.plan import AUTO_MICRO_BATCH_TOKENS, Plan
from megatrain.recipes.changes import check_changes
from megatrain.recipes.loop import Run, fit, mean_loss
from megatrain.recipes.sample import answer, sample
from megatrain.recipes.setup import (
    Machine,
    Model,
    find_machine,
    make_engine,
    make_run_plan,
    make_skeleton,
    pad_id,
    read_model,
    read_rows,
    run_folder_of,
)
from megatrain.recipes.signals import StopRequest, stop_requests
from megatrain.report import Progress, logging_to
from megatrain.run_folder import RunLock, checkpoints
from megatrain.summary import PredictedBytes, RunSummary

if TYPE_CHECKING:
    from megatrain.data.dataset import Rows
    from megatrain.models.skeleton import Skeleton

logger = logging.getLogger("megatrain")


def train(config: Config | str | Path) -> RunSummary:
    """Run a config from its first step. Raises MegaTrainError; on one, everything saved before stays."""
    config = config if isinstance(config, Config) else load_config(config)
    started = [*checkpoints(config.output), *(path for path in [config.output / "final"] if path.exists())]
    if started:
        raise ConfigError(
            f"{config.where('output')}: {config.output} holds a run already; continue it with `megatrain resume {config.output}`, "
            "or choose another folder"
        )
    return _run(config, resuming=None)


def resume(run_dir: str | Path, overrides: Sequence[str] = ()) -> RunSummary:
    """Continue a run from its newest intact checkpoint, bit for bit. Some keys may be changed: see recipes/changes.py."""
    run_dir = Path(run_dir)
    before = load_config(run_dir / "config.yaml")
    config = load_config(run_dir / "config.yaml", [*overrides, f"output={json.dumps(str(run_dir))}"])
    warnings = check_changes(before, config)
    with RunLock(run_dir):
        found = find_resumable(run_dir)
    if found.path is None:
        raise StorageError(f"{run_dir}: has no intact checkpoint to resume from ({'; '.join(found.warnings) or 'none was written'})")
    for warning in (*warnings, *found.warnings):
        logger.warning(warning)
    return _run(config, resuming=found.path)


def _run(config: Config, resuming: Path | None) -> RunSummary:
    """Set everything up, refuse what does not fit before loading it, and train."""
    _quiet_libraries()
    model, machine = read_model(config), find_machine(config)
    skeleton = make_skeleton(config, model, machine)
    make_run_plan(config, skeleton, machine).check()
    console = Console(stderr=True)
    with RunLock(config.output), logging_to(config.output, console), stop_requests() as stop:
        rows, held_out = read_rows(config, model, skeleton.anatomy.vocab_size)
        for line in describe(rows):
            logger.info(line)
        plan, loader = _plan_and_loader(config, skeleton, machine, model, rows)
        plan.check()
        _describe_run(config, plan, machine)
        started = time.perf_counter()
        with ExitStack() as stack:
            engine = stack.enter_context(make_engine(config, model, skeleton, machine, plan, load=resuming is None))
            state = load_checkpoint(resuming, engine, verify=False) if resuming else {}
            if resuming:
                loader.restore(state["position"])
            total = loader.steps_total()
            writer = stack.enter_context(MetricsWriter(config.output))
            writer.truncate_to(state.get("step", 0))
            progress = Progress(console, total_steps=total, first_step=state.get("step", 0), log_every=config.train.log_every)
            run = Run(
                config=config,
                run_dir=config.output,
                model=model,
                engine=engine,
                loader=loader,
                held_out=held_out,
                micro_batch_tokens=plan.choices.micro_batch_tokens,
                sweep_tokens=plan.job.tokens_per_step // plan.choices.groups,
                writer=writer,
                progress=progress,
                meter=stack.enter_context(GpuMeter(machine.device)),
                work=Work.of(skeleton.anatomy, model.config),
                gpu_name=machine.hardware.gpu.name if machine.hardware.gpu else None,
                total_steps=total,
                step=state.get("step", 0),
                tokens=state.get("tokens", 0),
                best=state.get("best", {}),
                non_finite=state.get("non_finite", 0),
            )
            first = run.step, run.tokens
            with progress:
                done = fit(run, stop)
            return _summarize(run, plan, stop, done, first, time.perf_counter() - started)


def _plan_and_loader(config: Config, skeleton: Skeleton, machine: Machine, model: Model, rows: Rows) -> tuple[Plan, Loader]:
    """The plan, now that the number of checkpoints is known, and the loader with the micro-batch that it chose."""
    train = config.train

    def loader_of(plan: Plan) -> Loader:
        return Loader(
            rows,
            micro_batch_tokens=plan.choices.micro_batch_tokens,
            pad_id=pad_id(model.tokenizer),
            seed=train.seed,
            tokens_per_step=train.tokens_per_step,
            rows_per_step=train.rows_per_step,
            epochs=train.epochs,
            max_steps=train.max_steps,
        )

    steps = loader_of(make_run_plan(config, skeleton, machine)).steps_total()
    every = config.checkpoint.every
    plan = make_run_plan(config, skeleton, machine, checkpoints_written=1 if every is None else -(-steps // every))
    return plan, loader_of(plan)


def _describe_run(config: Config, plan: Plan, machine: Machine) -> None:
    """Write what was asked for, what was decided, and what it runs on."""
    choices = plan.choices
    resolved = config.with_values(
        {
            "train.micro_batch_tokens": choices.micro_batch_tokens,
            "train.groups": choices.groups,
            "precision": machine.precision,
            "device": machine.device.type,
            "threads": choices.update_threads,
        }
    )
    packages = ("megatrain", "torch", "transformers", "safetensors", "numba", "numpy", "datasets")
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in packages},
        "hardware": asdict(machine.hardware),
    }
    files = {
        "config.yaml": config.to_yaml(),
        "config.resolved.yaml": resolved.to_yaml(),
        "plan.json": json.dumps(plan.to_dict(), indent=1) + "\n",
        "env.json": json.dumps(environment, indent=1) + "\n",
    }
    for name, text in files.items():
        (config.output / name).write_text(text, encoding="utf-8")
    logger.info(
        f"{machine.precision} on {machine.device.type}: micro-batches of {choices.micro_batch_tokens} tokens, "
        f"{choices.groups} group(s) a step, {choices.update_threads} update thread(s)"
    )


def _summarize(run: Run, plan: Plan, stop: StopRequest, done: bool, first: tuple[int, int], seconds: float) -> RunSummary:
    question, reply = sample(run.engine, run.model, run.held_out, run.config.sample_prompt) if done else (None, None)
    return RunSummary(
        run_dir=run.run_dir,
        steps=run.step - first[0],
        tokens=run.tokens - first[1],
        seconds=seconds,
        eval_loss_before=run.losses[0] if run.losses else None,
        eval_loss_after=run.losses[-1] if run.losses else None,
        best_step=run.best.get("step"),
        final_dir=run.run_dir / "final" if done else None,
        prompt=question,
        answer=reply,
        host=PredictedBytes(plan.host_bytes, host_bytes()),
        gpu=PredictedBytes(plan.gpu_bytes or None, run.meter.peak_bytes()),
        time=run.progress.time,
        skipped=run.engine.skipped,
        exit_code=0 if done else stop.exit_code,
    )


def plan(config: Config | str | Path) -> Plan:
    """What the run would hold in which memory, and whether it fits. Loads no weights and touches no GPU. Raises MegaTrainError."""
    config = config if isinstance(config, Config) else load_config(config)
    _quiet_libraries()
    model, machine = read_model(config), find_machine(config)
    return make_run_plan(config, make_skeleton(config, model, machine), machine)


def show_data(config: Config, rows: int, as_json: bool) -> dict[str, Any] | None:
    """Show rows with their loss mask and the counts on stdout; with `as_json` return the counts instead."""
    _quiet_libraries()
    model = read_model(config)
    trained, held_out = read_rows(config, model, model.config.get_text_config().vocab_size)
    if as_json:
        return {"train": summary(trained), "eval": summary(held_out) if held_out is not None else None}
    console = Console()
    show_rows(trained, model.tokenizer, rows, console)
    if held_out is not None:
        console.print(f"{len(held_out):,} rows are held out for evaluation", highlight=False)
    return None


@contextmanager
def _reader(folder: Path) -> Iterator[Any]:
    """An engine for a model folder that reads only: no optimizer state in RAM."""
    engine = from_pretrained(folder, optimizer=Frozen(), max_grad_norm=None)
    with engine:
        yield engine


def evaluate(folder: Path, data: str | None, as_json: bool = False) -> dict[str, Any]:
    """Held-out loss of a run folder's model or of one checkpoint, on the run's held-out rows or on `data`."""
    _quiet_libraries()
    run_dir = run_folder_of(folder)
    checkpoint = folder if (folder / "config.json").is_file() else find_checkpoint(run_dir)
    config = load_config(run_dir / "config.yaml", [f"data.train={json.dumps(data)}", "data.eval=null"] if data else [])
    model = read_model(config.with_values({"model": str(checkpoint)}))
    trained, held_out = read_rows(config, model, model.config.get_text_config().vocab_size)
    rows = trained if data else held_out
    if rows is None:
        raise ConfigError(f"{run_dir}: holds no rows out (data.eval: null); name some with --data")
    with _reader(checkpoint) as engine:
        size = max(AUTO_MICRO_BATCH_TOKENS[engine.device.type], config.train.seq_len)
        loss, targets = mean_loss(engine, held_out_batches(rows, size, pad_id(model.tokenizer)), 4 * size)
    return {"checkpoint": str(checkpoint), "eval_loss": loss, "perplexity": float(torch.tensor(loss).exp()), "eval_target_tokens": targets}


def generate(folder: Path, prompt: str, max_new_tokens: int) -> str:
    """The model's greedy answer to a prompt. `folder` is a run folder, a checkpoint or any model folder."""
    _quiet_libraries()
    checkpoint = folder if (folder / "config.json").is_file() else find_checkpoint(run_folder_of(folder))
    with _reader(checkpoint) as engine:
        return answer(engine, _model_of(checkpoint), prompt, max_new_tokens)


def _model_of(folder: Path) -> Model:
    from megatrain.models.pretrained import load_config_and_tokenizer, resolve_source

    source = resolve_source(folder, None)
    return Model(source, *load_config_and_tokenizer(source, trust_remote_code=False))


def _quiet_libraries() -> None:
    """Keep transformers' and datasets' advice off the terminal; their errors reach the user through ours."""
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    datasets.disable_progress_bars()
