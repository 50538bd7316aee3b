"""Commands that train, or say how a run would go: train, resume, plan, bench."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatrain.cli.app import (
    GIVEN,
    AsJson,
    Checkpoint,
    ConfigFile,
    ConfigOrModel,
    NoVerify,
    Overrides,
    RunDir,
    Timeline,
    app,
    find_model,
    find_shape,
    finish,
    need_folder,
    print_json,
)
from megatrain.errors import ConfigError, PlanError, exit_code_of, printable
from megatrain.machine.launcher import place_of, started_by
from megatrain.methods import METHODS
from megatrain.models.shapes import SHAPES, named_shape
from megatrain.recipes.signals import INTERRUPTED, SAVES, stop_requests, watchdog
from megatrain.reporting.progress import logging_on
from megatrain.reporting.streams import console_on
from megatrain.reporting.trackers import tell_end

if TYPE_CHECKING:
    from megatrain.config import Config

# A machine that is planned for.
GpuMemory = Annotated[
    str | None, typer.Option(help="Memory of a GPU that is not known by name, such as 12GiB.")
]
GpuTflops = Annotated[
    float | None, typer.Option(help="Its dense bf16 matmul rate in TFLOP/s, such as 60.")
]
Pcie = Annotated[
    float | None, typer.Option(help="GB/s each way between it and host RAM, such as 25.")
]
Gpus = Annotated[
    int | None,
    typer.Option(min=1, help="GPUs of each host that train together; compares 1, 2, 4 and 8."),
]
Restarts = Annotated[
    int,
    typer.Option(
        min=0, help="Times to start again, from the newest checkpoint, a run that died or crashed."
    ),
]
Hosts = Annotated[int | None, typer.Option(min=1, help="Hosts like it; needs --network.")]
Network = Annotated[
    float | None, typer.Option(help="Gbit/s of each host to the others, such as 400.")
]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    profile: Timeline = None,
    no_verify: NoVerify = False,
    restarts: Restarts = 0,
) -> None:
    """Train a model as a config file says, on the host's GPUs."""
    from megatrain.config import load_run
    from megatrain.config.resuming import RESOLVED_FILE
    from megatrain.recipes.ranks.launch import goes_on

    settings = load_run(config, overrides or ())  # a typo is reported before torch is imported
    if (settings.output / RESOLVED_FILE).is_file():  # and so is another run
        goes_on(settings)
    on_several(settings, restarts, settings.output)
    with telling_end(settings, settings.output), stop_requests():
        with watchdog(settings.hang_timeout):
            find_model(settings.model.source, settings.model.revision)
        from megatrain.recipes import run
        from megatrain.storage.manifest import verifying

        with verifying(not no_verify):
            summary = run.train(settings, profile)
        finish(summary, as_json)


@app.command()
def resume(
    run_dir: RunDir,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
    no_verify: NoVerify = False,
    restarts: Restarts = 0,
) -> None:
    """Continue a run from its newest complete checkpoint."""
    need_folder(run_dir)
    if restarts and checkpoint:
        raise ConfigError(
            "command line: --restarts goes on from the newest checkpoint; remove it or --checkpoint"
        )
    from megatrain.config.resuming import CONFIG_FILE, asked_again

    settings = None
    if (run_dir / CONFIG_FILE).is_file():
        settings = asked_again(run_dir, overrides or [])
        on_several(settings, restarts, run_dir)
    with telling_end(settings, run_dir), stop_requests():
        from megatrain.recipes import run
        from megatrain.storage.manifest import verifying

        with verifying(not no_verify):
            summary = run.resume(run_dir, overrides or [], checkpoint)
        finish(summary, as_json)


@app.command("save")
def save_command(run_dir: RunDir) -> None:
    """Ask a run of this host for a checkpoint after its step; it goes on. So does SIGUSR2."""
    need_folder(run_dir)
    from megatrain.storage.run_folder import holder

    os.kill(process := holder(run_dir), SAVES)
    typer.echo(f"process {process} saves a checkpoint after its step")


@app.command()
def plan(
    arguments: ConfigOrModel = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Plan for a machine with this GPU, such as 'RTX 4090'; needs --ram."),
    ] = None,
    ram: Annotated[str | None, typer.Option(help="RAM of that machine, such as 128GiB.")] = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Its physical cores; default: typical for the GPU.")
    ] = None,
    gpu_memory: GpuMemory = None,
    gpu_tflops: GpuTflops = None,
    pcie: Pcie = None,
    gpus: Gpus = None,
    hosts: Hosts = None,
    network: Network = None,
    full: Annotated[
        bool, typer.Option("--full", help="Print every choice, phase and array, and why.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether a run fits this machine, or one that you do not have yet, and how.

    Loads no weights. Exits 4 when the run does not fit.
    """
    described: dict[str, Any] = {"gpu": gpu, "ram": ram, "cores": cores, "pcie": pcie}
    described |= {"gpu_memory": gpu_memory, "gpu_tflops": gpu_tflops}
    described |= {"gpus": gpus, "hosts": hosts, "network": network}
    from megatrain.config import load_config, names_config
    from megatrain.config.load import bench_config

    target, given = _target_of(arguments, "plan")
    is_config = names_config(target)
    settings = (load_config if is_config else bench_config)(target, given)
    if not is_config or named_shape(settings.model.source):
        find_shape(settings.model.source)
    else:
        find_model(settings.model.source, settings.model.revision)
    from megatrain.planner.plan import render
    from megatrain.recipes.plan import plan as make_plan

    with logging_on(console_on(stderr=True)):
        found = make_plan(settings, not is_config, described)
    if as_json:
        print_json(found.to_dict())
        found.check()
    else:
        render(found, console_on(), full=full)
    if not found.fits:  # which the table's first line says
        raise typer.Exit(PlanError.exit_code)


@app.command()
def rollout(
    config: ConfigFile,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to answer.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Write answers to some prompts of a grpo config and judge them, without training.

    Shows the first answer to each prompt, rewards by function, lengths, and the shares of answers
    (pass@1) and of prompts (pass@k) with a reward of 1 or more.
    """
    from megatrain.config import load_run

    settings = load_run(config, overrides or ())
    if METHODS[settings.method].kind != "prompts":
        words = "writes no answers; name a config of method: grpo, say"
        raise ConfigError(f"{settings.where('method')}: {settings.method} {words}")
    from megatrain.recipes import inspect

    with logging_on(console_on(stderr=True)):
        found = inspect.try_out(settings, prompts)
    if as_json:
        print_json(found)
    else:
        inspect.print_answers(found)


@app.command(
    help="Time a model's training on this machine: random weights, random tokens, no data.\n\n"
    + fill(f"Named shapes: {', '.join(SHAPES)}.", 100)
)
def bench(
    arguments: ConfigOrModel = None,
    model: Annotated[str | None, typer.Option(help="Model, if not the first argument.")] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Short for train.tokens_per_step=N.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Short for train.seq_len=N.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Depth, if not the model's.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 2,
    as_json: AsJson = False,
    same_batch: Annotated[
        bool, typer.Option("--same-batch", help="The same tokens every step: the loss must fall.")
    ] = False,
    profile: Timeline = None,
) -> None:
    """Time a model's training on this machine."""
    target, given = (model, list(arguments or [])) if model else _target_of(arguments, "bench")
    short = {"train.tokens_per_step": tokens_per_step, "train.seq_len": seq_len}
    shorts = [f"{key}={value}" for key, value in short.items() if value is not None]
    from megatrain.config import names_config
    from megatrain.config.load import bench_config

    if not names_config(target):
        find_shape(target)
    settings = bench_config(target, [*shorts, *given])
    on_several(settings)
    from megatrain.recipes.bench import bench as time_steps

    found = time_steps(
        settings, steps=steps, warmup=warmup, layers=layers, same_batch=same_batch, profile=profile
    )
    finish(found, as_json)


@contextmanager
def telling_end(settings: Config | None, run_dir: Path) -> Iterator[None]:
    """Tell the config's `on_end` how the run inside ends, on the first rank."""
    place, code, reason = place_of(os.environ), 0, ""
    try:
        yield
    except typer.Exit as end:
        code = end.exit_code
        raise
    except BaseException as error:
        code, reason = exit_code_of(error) if isinstance(error, Exception) else (INTERRUPTED, "")
        raise
    finally:
        target = settings.on_end if settings and (place is None or place.rank == 0) else None
        if target and (failure := tell_end(target, run_dir, code, reason)):
            typer.echo(f"warning: on_end: {printable(failure)}", err=True)


def on_several(settings: Config, restarts: int = 0, run_dir: Path = Path()) -> None:
    """Start this command once a GPU, if the config takes several, and leave with their code. So,
    too, where it is to be started again when it dies. Raises ConfigError."""
    from megatrain.recipes.ranks import launch

    if started_by(os.environ)[1] > 1:  # in a rank that a launcher has started, too
        os.environ |= {**launch.QUIET, **os.environ}
    if launch.is_launched():
        return
    if restarts and place_of(os.environ) is not None:
        raise ConfigError(
            "command line: --restarts: a launcher has started this process as one of several; let "
            "that one start all again, as `torchrun --max-restarts` does"
        )
    if (size := launch.ranks_for(settings)) > 1 or restarts:
        again = launch.Restarts(restarts, run_dir)
        raise typer.Exit(launch.run_ranks(GIVEN, size, restarts=again))


def _target_of(arguments: list[str] | None, command: str) -> tuple[str, list[str]]:
    """(the first that is no key=value, the others). Raises ConfigError."""
    given = list(arguments or [])
    target = next((argument for argument in given if "=" not in argument), None)
    if target is None:
        raise ConfigError(
            "command line: name a config file, a model folder, a hub id or a shape, such as "
            f"`megatrain {command} qwen2.5-7b`"
        )
    given.remove(target)
    return target, given
