"""Commands that look at rows, models and the machine, or write configs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from megatrain.cli.app import (
    AsJson,
    Checkpoint,
    ConfigFile,
    NoVerify,
    Overrides,
    RunDir,
    TrustCode,
    app,
    find_model,
    find_shape,
    need_folder,
    one_process,
    print_json,
    reading,
    show,
    type_out,
)
from megatrain.errors import ConfigError, DataError, ModelError, VerificationError, number_of
from megatrain.machine.launcher import HERE
from megatrain.methods import METHODS
from megatrain.reporting.progress import logging_on
from megatrain.reporting.streams import Lasting, console_on, result_stream
from megatrain.reporting.words import human_seconds

ANSWER_TOKENS, CHAT_TOKENS = 128, 1024  # longest answers by default

RunOrModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="Run, checkpoint, model folder, GGUF file or hub id.")
]


@app.command("data")
def data_command(
    config: ConfigFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 3,
    full: Annotated[
        bool, typer.Option("--full", help="Whole rows, however long; default: a screen of each.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show rows with their loss mask, and counts."""
    from megatrain.config import load_run

    settings = load_run(config, overrides or ())
    find_model(settings.model.source, settings.model.revision)
    from megatrain.recipes import inspect

    with logging_on(console_on(stderr=True)):
        counts = inspect.show_data(settings, rows, as_json, full)
    if counts is not None:
        print_json(counts)


@app.command("eval")
def evaluate(
    model: RunOrModel,
    data: Annotated[
        str | None, typer.Option(help="Rows to evaluate on; default: those the run holds out.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Tasks of lm-eval, groups or tags, or YAML files."),
    ] = None,
    limit: Annotated[
        float | None, typer.Option(help="Rows of each task, at most; below 1 a share of them.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question of a task.")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="YAML files of further tasks.")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Ask tasks in the model's chat format.")
    ] = False,
    as_json: AsJson = False,
    no_verify: NoVerify = False,
    trust_remote_code: TrustCode = False,
) -> None:
    """Compute the held-out loss of a run, a checkpoint or any other model, or run tasks on it.

    It computes as the run did, in float32 for a folder in float32, and says in what.
    """
    one_process()
    of_tasks: dict[str, Any] = {"limit": limit, "num_fewshot": num_fewshot}
    of_tasks |= {"include_path": include_path, "apply_chat_template": apply_chat_template or None}
    asked = {name: value for name, value in of_tasks.items() if value is not None}
    names = _names_of(tasks, data, asked)
    find_model(model)
    from megatrain.recipes import inspect
    from megatrain.recipes.tasks import TaskOptions, print_results

    with reading(no_verify):
        if names:
            how = TaskOptions(names, **asked), "--tasks", trust_remote_code
            found = inspect.evaluate_tasks(model, *how)
        else:
            found = inspect.evaluate(model, data, trust_remote_code)
    if as_json:
        print_json(found)
        return
    results = found.pop("results", None)
    for name, value in found.items():
        typer.echo(f"{name}: {value:.6g}" if isinstance(value, float) else f"{name}: {value}")
    if results is not None:
        print_results(console_on(), results)


def _names_of(tasks: str | None, data: str | None, asked: dict[str, Any]) -> tuple[str, ...]:
    """The names in --tasks, if it is given. Raises ConfigError and DataError for options that have
    no effect together, or name nothing."""
    from megatrain.config.sections import check_lm_eval
    from megatrain.data.files import check_source

    if tasks is None:
        if asked:
            option = next(iter(asked)).replace("_", "-")
            raise ConfigError(f"--{option}: has no effect without --tasks; name some")
        try:
            if data is not None:
                check_source(data)
        except DataError as error:
            raise DataError(f"--data: {error}") from error
        return ()
    if data is not None:
        raise ConfigError("--data: excludes --tasks, which bring their own rows; remove one")
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in tasks.split(",")))))
    if not names:
        raise ConfigError("--tasks: names no task; `lm-eval ls tasks` lists them")
    check_lm_eval("--tasks")
    return names


@app.command()
def verify(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder, hub id or named shape.")
    ],
    as_json: AsJson = False,
    trust_remote_code: TrustCode = False,
) -> None:
    """Compare a small model of the same family with plain PyTorch: loss, gradients, steps, folder.

    Needs no GPU. Of a checkpoint or final every file is compared with MANIFEST.json first: exits
    7 for one that was changed. Exits 8 unless all agree.
    """
    find_shape(model)
    from megatrain.recipes.verify import verify as check

    with logging_on(console_on(stderr=True)):
        found = check(model, trust_remote_code)
    show(found, as_json)
    if found.verdict.state != "passed":
        raise typer.Exit(VerificationError.exit_code)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page; default: report.html of the only run."),
    ] = None,
) -> None:
    """Write what became of a run, or of several side by side, as one HTML page.

    A run writes its own while it goes on, and at its end.
    """
    for run in runs:
        need_folder(run)
    from megatrain.recipes.report import write_report

    typer.echo(write_report(runs, output))


@app.command("watch")
def watch_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 0,
) -> None:
    """Show the report in browsers of this machine while the runs go on; Ctrl-C ends it."""
    for run in runs:
        need_folder(run)
    from megatrain.recipes.report import show_live

    show_live(
        runs, port, lambda server: typer.echo(f"http://{HERE}:{server.server_port}", err=True)
    )


@app.command()
def export(
    run_dir: RunDir,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="New folder, which transformers and vLLM load.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float32 or, of GGUF, float16; default: the checkpoint's own."),
    ] = None,
    checkpoint: Checkpoint = None,
    format: Annotated[
        str, typer.Option(help="safetensors, or gguf: a folder with a GGUF file for llama.cpp.")
    ] = "safetensors",
    as_json: AsJson = False,
    no_verify: NoVerify = False,
) -> None:
    """Write a run's model as a Hugging Face folder, or as a GGUF file."""
    one_process()
    need_folder(run_dir)
    from megatrain.storage.export import export as export_model

    with reading(no_verify):
        folder = export_model(run_dir, out, dtype, checkpoint, format)
    if as_json:
        print_json({"folder": str(folder)})
    else:
        typer.echo(folder)


@app.command()
def push(
    run_dir: RunDir,
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID", help="Repository of the hub: owner/name.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Make it private; refused if it is there and public.")
    ] = False,
    as_json: AsJson = False,
    no_verify: NoVerify = False,
) -> None:
    """Publish a finished run's final/ on the hub, with its model card, as one commit.

    The token is HF_TOKEN or that of `hf auth login`. After an interruption the same command goes
    on: what has arrived is not sent again. Exits 7 when the hub cannot be reached.
    """
    one_process()
    need_folder(run_dir)
    from megatrain.storage.push import push as publish

    with reading(no_verify):
        done = publish(run_dir, repo_id, private)
    if as_json:
        print_json(done.to_dict())
    else:
        typer.echo(done.url)


@app.command()
def generate(
    model: RunOrModel,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to answer; default: read stdin.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Converse: each line is a turn, PROMPT the first one.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System prompt, for the chat template.")
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Picture that PROMPT is about; may be given again."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer in tokens; default: 128, with --chat 1024."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; above, tokens are drawn.")
    ] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens of this total probability.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**63 - 1, help="Of the draws; default: 0. The same seed, the same answer."
        ),
    ] = None,
    as_json: AsJson = False,
    no_verify: NoVerify = False,
    trust_remote_code: TrustCode = False,
) -> None:
    """Answer a prompt with a model, or converse with it; on a terminal word by word.

    With --chat, Ctrl-D ends the chat. The oldest turns are forgotten, which is said, where the
    model's positions do not suffice.
    """
    one_process()
    sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
    prompt = _asked(prompt, chat, system)
    find_model(model)
    longest = max_new_tokens or (CHAT_TOKENS if chat else ANSWER_TOKENS)
    given = (model, longest, sampling, system, trust_remote_code, image or ())
    from megatrain.recipes import inspect

    live = sys.stdout.isatty() and not as_json
    show = type_out if live else str  # which shows nothing
    with reading(no_verify) as console:
        if chat:
            converse(given, prompt, show, as_json, console)
            return
        answer = inspect.generate(str(prompt), *given, show=show)
    if as_json:
        print_json({"prompt": prompt, "answer": answer})
    else:
        typer.echo("" if live else answer)


def _asked(prompt: str | None, chat: bool, system: str | None) -> str | None:
    """PROMPT, or what stdin says; None: nothing yet. Raises ConfigError if one of them is empty."""
    if system is not None and not system.strip():
        raise ConfigError("--system: is empty; write something, or leave it out")
    if prompt is None and not chat:
        if sys.stdin.isatty():
            missing = "PROMPT is missing; write it after the model, pipe it in, or add --chat"
            raise ConfigError(f"command line: {missing}")
        prompt = sys.stdin.read()
    if prompt is not None and not prompt.strip():
        raise ConfigError("command line: PROMPT is empty; write something to answer")
    return prompt


def converse(
    given: tuple[Any, ...],
    first: str | None,
    show: Callable[[str], object],
    as_json: bool,
    console: Console,
) -> None:
    """Answer lines of stdin until it ends. given: arguments of `open_chat`. show: gets an answer
    as it grows.

    On a terminal a turn that cannot be asked is passed over with its error; elsewhere it ends the
    chat, as later lines may build on it. Answers go to stdout, all else to stderr.
    """
    from megatrain.recipes.inspect import open_chat

    asks = sys.stdin.isatty()

    def note(words: str) -> None:
        console.print(words, style="dim", highlight=False, markup=False)

    with open_chat(*given) as chat:
        if asks:
            note("Ctrl-D ends the chat")
        for line in _lines(first, asks):
            try:
                reply = chat.answer(line, show)
            except (ConfigError, ModelError) as error:
                if not asks:
                    raise
                note(f"error: {error}")
                continue
            if as_json:
                print_json({"prompt": line, **vars(reply)}, indent=None)
            else:
                typer.echo("" if show is type_out else reply.answer)
            rate = f"{reply.tokens / (reply.seconds or 1.0):.1f} tokens/s"
            cut = ", cut (--max-new-tokens)" if reply.ended == "length" else ""
            note(f"{reply.tokens:,} tokens in {human_seconds(reply.seconds)}, {rate}{cut}")
            out = result_stream()
            if isinstance(out, Lasting) and out.error is not None:
                break  # nobody reads on


def _lines(first: str | None, asks: bool) -> Iterator[str]:
    """The first line and those of stdin, but for blank ones. asks: at a terminal."""
    if first is not None:
        yield first.strip()
    try:
        for line in iter(lambda: input("> "), None) if asks else sys.stdin:
            if line.strip():
                yield line.strip()
    except EOFError:  # Ctrl-D
        typer.echo("")
    except UnicodeDecodeError:
        raise ConfigError("stdin: is no UTF-8 text; convert it") from None


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
    gpus: Annotated[
        int, typer.Option(min=1, help="GPUs that are also measured with all at work together.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, once, for the plans of all runs, and say what keeps it slow."""
    from megatrain.recipes import doctor as recipe

    one_process()

    def note(what: str) -> None:
        typer.echo(f"measuring {what}", err=True)

    found = recipe.examine(output, quick, note, nvme or (), gpus)
    show(found, as_json)


@app.command()
def init(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE | MODEL DATA]",
            help="File for the template, default: stdout; or a model and rows to look at.",
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Default: the one that rows of such a form are for.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Fit a machine with this GPU, not this one; needs --ram.")
    ] = None,
    ram: Annotated[str | None, typer.Option(help="RAM of that machine, such as 128GiB.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Config to write; default: by the model.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a config: a commented template, or one for a model and rows that fits the machine."""
    from megatrain.config import config_schema, example_config

    given, mode = arguments or [], "w" if force else "x"
    if len(given) > 2 or (len(given) < 2 and (method or gpu or ram or output)):
        raise typer.BadParameter("name a model and rows: megatrain init MODEL DATA")
    if not given:
        typer.echo(example_config(), nl=False)
        return
    if len(given) == 1:
        path = Path(given[0])
        _write(path, example_config(), "or add --force", mode)
        then = f"name your model and data in it, then `megatrain plan {path}`"
        typer.echo(f"wrote {path}; {then}; `megatrain schema` lists every key", err=True)
        return
    from megatrain.planner.plan import verdict
    from megatrain.recipes import first_config as recipe

    if method is not None and method not in METHODS:
        raise typer.BadParameter(f"{method} is no method; choose from {', '.join(METHODS)}")
    if output is not None and output.exists() and not force:
        raise ConfigError(f"{output}: exists already; choose another name or add --force")
    described = {"gpu": gpu, "ram": ram} if gpu or ram else None
    with logging_on(console_on(stderr=True)):
        name, text, plan = recipe.config_for(given[0], given[1], method, described)
    path = output or Path(f"{name}.yaml")
    _write(path, text, "with --output, or add --force", mode)
    if not (schema := path.with_name(recipe.SCHEMA)).exists():
        _write(schema, json.dumps(config_schema(), indent=1) + "\n", "")
    told = f" --gpu {shlex.quote(gpu or '')} --ram {ram}" if described else ""
    typer.echo(f"wrote {path}: {verdict(plan)}", err=True)
    for command, why in (
        (f"megatrain data {path}", "what is trained on, row by row"),
        (f"megatrain plan {path}{told}", "what is where, and what would be faster"),
        (f"megatrain train {path}", "do it"),
    ):
        typer.echo(f"  {command:<40} {why}", err=True)


@app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML or JSON of another trainer.")],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; default: stdout.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="axolotl, llama-factory, trl or megatrain-upstream; default: by its keys.",
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Method, where the file does not say it, as TRL's.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs that it was made for, which multiply a step; default: 1."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write it without what is impossible or unknown.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a config of one of axolotl, LLaMA-Factory or TRL, and say what became of each key.

    Writes nothing and exits 2 where a key is unknown, or asks for what would give another result.
    """
    from megatrain.config.importing import import_config as convert

    found = convert(file, trainer, processes, method, overrides or (), output)
    wanted = not found.missing and (force or found.faithful)
    if wanted and output is not None:
        _write(output, found.text, "or remove it")
    for path, text in found.files.items() if wanted else ():
        _write(Path(path), text, "or remove it")
    if as_json:
        print_json(found.to_dict())
    else:
        typer.echo(found.report(), err=wanted and output is None)
    if wanted and output is None and not as_json:
        typer.echo(found.text, nl=False)
    if not wanted:
        lost = len(found.refused) + len(found.unknown)
        ways = f"{number_of(lost, 'key')} would be lost; --force writes a config without them"
        raise ConfigError(
            "nothing is written: " + ("what is missing is listed" if found.missing else ways)
        )
    if output is not None:
        typer.echo(f"wrote {output}; `megatrain plan {output}` says whether it fits", err=True)


def _write(path: Path, text: str, otherwise: str, mode: str = "x") -> None:
    """Write a new file. Raises ConfigError."""
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; choose another name {otherwise}") from None
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


@app.command()
def schema() -> None:
    """Print the JSON schema of the config, for editors."""
    from megatrain.config import config_schema

    print_json(config_schema())
