"""The command line: parses arguments, calls one function, prints its result.

torch is imported only by what a command calls. Results go to stdout, logs to stderr. Exit codes: 0
ok, 1 unexpected, 2 usage or config, 3 data, 4 does not fit, 5 out of memory, 6 diverged, 7 storage,
8 verification, 75 stopped by a signal with a checkpoint, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from megatrain.errors import ConfigError, StorageError, exit_code_of, printable
from megatrain.reporting.streams import console_on, lasting_streams, unwritable

INTERRUPTED = 130

app = typer.Typer(
    name="megatrain",
    help="Train models far larger than GPU memory: every parameter, full precision, one command.",
    epilog="Add --debug to any command for the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: quick to answer, the same in a pipe
)

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file; `megatrain init` writes one.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys set over the file: train.learning_rate=2e-5."),
]
ConfigOrModel = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG|MODEL] [KEY=VALUE]...",
        help="YAML file, model folder, hub id or named shape; then keys set over it.",
    ),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder.")]
Timeline = Annotated[
    Path | None,
    typer.Option(help="File for the timeline of a steady step, .json or .json.gz, for Perfetto."),
]
Checkpoint = Annotated[str | None, typer.Option(help="last, best, proven or checkpoint-N.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    profile: Timeline = None,
) -> None:
    """Train a model as a config file says."""
    from megatrain.config import load_run

    settings = load_run(config, overrides or ())  # a typo is reported before torch is imported
    from megatrain.recipes import run

    _finish(run.train(settings, profile), as_json)


@app.command()
def resume(
    run_dir: RunDir,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its newest complete checkpoint."""
    _need_folder(run_dir)
    from megatrain.recipes import run

    _finish(run.resume(run_dir, overrides or [], checkpoint), as_json)


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
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of a GPU that is not known by name, such as 12GiB.")
    ] = None,
    gpu_tflops: Annotated[
        float | None, typer.Option(help="Its dense bf16 matmul rate in TFLOP/s, such as 60.")
    ] = None,
    pcie: Annotated[
        float | None, typer.Option(help="GB/s each way between it and host RAM, such as 25.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a run fits this machine, or one that you do not have yet, and how.

    Loads no weights. Exits 4 when the run does not fit.
    """
    described: dict[str, Any] = {"gpu": gpu, "ram": ram, "cores": cores, "pcie": pcie}
    described |= {"gpu_memory": gpu_memory, "gpu_tflops": gpu_tflops}
    from megatrain.config import load_config, names_config

    target, given = _target_of(arguments, "plan")
    shape_alone = not names_config(target)
    if shape_alone:
        from megatrain.recipes.shapes import bench_config

        settings = bench_config(target, given)
    else:
        settings = load_config(target, given)
    from megatrain.planner.explain import render
    from megatrain.recipes import run
    from megatrain.reporting.progress import logging_on

    with logging_on(console_on(stderr=True)):
        found = run.plan(settings, shape_alone, described)
    if as_json:
        _print_json(found.to_dict())
    else:
        render(found, console_on())
    found.check()


@app.command()
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
    """Time a model's training on this machine: random weights, random tokens, no data.

    Named shapes: qwen2.5-0.5b, -1.5b, -7b, -14b, -32b, llama-3-8b, -70b.
    """
    target, given = (model, list(arguments or [])) if model else _target_of(arguments, "bench")
    short = {"train.tokens_per_step": tokens_per_step, "train.seq_len": seq_len}
    shorts = [f"{key}={value}" for key, value in short.items() if value is not None]
    from megatrain.recipes.shapes import bench_config

    settings = bench_config(target, [*shorts, *given])
    from megatrain.recipes.bench import bench as time_steps

    found = time_steps(
        settings, steps=steps, warmup=warmup, layers=layers, same_batch=same_batch, profile=profile
    )
    _show(found, as_json)


def _target_of(arguments: list[str] | None, command: str) -> tuple[str, list[str]]:
    """(what is named first, the keys after it). Raises ConfigError."""
    given = list(arguments or [])
    if not given or "=" in given[0]:
        raise ConfigError(
            "command line: name a config file, a model folder, a hub id or a shape, such as "
            f"`megatrain {command} qwen2.5-7b`"
        )
    return given[0], given[1:]


@app.command("data")
def show_data(
    config: ConfigFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show rows with their loss mask, and counts."""
    from megatrain.config import load_run

    settings = load_run(config, overrides or ())
    from megatrain.recipes import inspect

    counts = inspect.show_data(settings, rows, as_json)
    if counts is not None:
        _print_json(counts)


@app.command("eval")
def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder or checkpoint.")],
    data: Annotated[
        str | None, typer.Option(help="Rows to evaluate on; default: those the run holds out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the held-out loss of a run or checkpoint."""
    _need_folder(folder)
    from megatrain.recipes import inspect

    result = inspect.evaluate(folder, data)
    if as_json:
        _print_json(result)
        return
    for name, value in result.items():
        typer.echo(f"{name}: {value:.6g}" if isinstance(value, float) else f"{name}: {value}")


@app.command()
def export(
    run_dir: RunDir,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="New folder, which transformers and vLLM load.")
    ],
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float32; default: the checkpoint's own.")
    ] = None,
    checkpoint: Checkpoint = None,
) -> None:
    """Write a run's model as a Hugging Face folder."""
    _need_folder(run_dir)
    from megatrain.storage.export import export as export_model

    typer.echo(export_model(run_dir, out, dtype, checkpoint))


@app.command()
def generate(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Run, checkpoint, model folder or GGUF file.")
    ],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to answer; default: read stdin.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 128,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt, greedily, with a trained model."""
    if not folder.is_file():
        _need_folder(folder)
    if prompt is None and sys.stdin.isatty():
        missing = "PROMPT is missing; write it after the folder, or pipe it in"
        raise ConfigError(f"command line: {missing}")
    question = sys.stdin.read() if prompt is None else prompt
    if not question.strip():
        raise ConfigError("command line: PROMPT is empty; write something to answer")
    from megatrain.recipes import inspect

    answer = inspect.generate(folder, question, max_new_tokens)
    if as_json:
        _print_json({"prompt": question, "answer": answer})
    else:
        typer.echo(answer)


@app.command()
def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the measurements that the planner needs.")
    ] = False,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder whose disk is measured.")
    ] = Path(),
    nvme: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Folder for memory.nvme, to measure its drive, too."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, once, for the plans of all runs, and say what keeps it slow."""
    from megatrain.recipes import doctor as recipe

    def note(what: str) -> None:
        typer.echo(f"measuring {what}", err=True)

    found = recipe.examine(output, quick, note, nvme or ())
    _show(found, as_json)


@app.command()
def init(
    path: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="File to write; default: stdout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a commented config to start from."""
    from megatrain.config import example_config

    if path is None:
        typer.echo(example_config(), nl=False)
        return
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(example_config())
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; choose another name or add --force") from None
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    then = f"name your model and data in it, then `megatrain plan {path}`"
    typer.echo(f"wrote {path}; {then}", err=True)


@app.command()
def schema() -> None:
    """Print the JSON schema of the config, for editors."""
    from megatrain.config import config_schema

    _print_json(config_schema())


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"megatrain {version('megatrain')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Train models far larger than GPU memory: every parameter, full precision, one command."""


def _finish(summary: Any, as_json: bool) -> None:
    """Print a run's summary and leave with its exit code."""
    _show(summary, as_json)
    raise typer.Exit(summary.exit_code)


def _show(result: Any, as_json: bool) -> None:
    if as_json:
        _print_json(result.to_dict())
    else:
        result.render(console_on())


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _need_folder(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(
            f"{path}: no such folder; name the folder that a run wrote (`output` in its config)"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `--debug` anywhere prints an error's traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [argument for argument in given if argument != "--debug"]
    with lasting_streams() as stdout:
        if not sys.stderr.isatty():
            # read when tqdm is imported: libraries draw progress bars into pipes and logs, too
            os.environ.setdefault("TQDM_DISABLE", "1")
        code = _code_of(words, debug=words != given)
        stdout.flush()
        if unwritable(stdout.error):
            lost = f"stdout cannot be written: {os.strerror(stdout.error.errno or 0)}"
            if words[0] in ("train", "resume"):
                typer.echo(f"warning: {lost}; the summary is lost, the run is not", err=True)
            else:
                typer.echo(f"error: {lost}; free some space or send it elsewhere", err=True)
                code = code or StorageError.exit_code
    return code


def _code_of(words: list[str], debug: bool) -> int:
    """The exit code of a command, which is run; its error is printed."""
    try:
        app(args=words, prog_name="megatrain")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  every error becomes a sentence and a code
        code, sentence = exit_code_of(error)
        if debug:
            traceback.print_exception(error)
        for line in sentence.splitlines():
            typer.echo(f"error: {printable(line)}", err=True)
        return code
    return 0
