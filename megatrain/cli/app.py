"""Parts that all commands share: the application, arguments, and how results are printed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import expanduser  # leaves `~nobody` as it is, where Path's raises
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from megatrain.errors import ConfigError, ModelError, if_forbidden, logger, printable
from megatrain.machine.launcher import place_of, started_by
from megatrain.reporting.progress import logging_on
from megatrain.reporting.streams import console_on, result_stream
from megatrain.version import VERSION

app = typer.Typer(
    name="megatrain",
    help="Train models far larger than GPU memory: every parameter, full precision, one command.",
    epilog="Add --debug to any command for the traceback of an error.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: quick to answer, the same in a pipe
)

GIVEN: list[str] = []  # the command line, for those that are started like it


def complete_key(incomplete: str) -> list[str]:
    """Keys of the config that begin so, for the shell."""
    from megatrain.config.load import SECTIONS

    every = (f"{section}.{key}".lstrip(".") for section, keys in SECTIONS.items() for key in keys)
    return [f"{key}=" for key in every if key.startswith(incomplete)]


def complete_shape(incomplete: str) -> list[str]:
    """Named shapes and keys that begin so, for the shell, which adds files where there are none."""
    from megatrain.models.shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)] or complete_key(incomplete)


ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file; `megatrain init` writes one.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Keys set over the file: train.learning_rate=2e-5.",
        autocompletion=complete_key,
    ),
]
ConfigOrModel = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG|MODEL] [KEY=VALUE]...",
        help="YAML file, model folder, hub id or named shape; then keys set over it.",
        autocompletion=complete_shape,
    ),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder.")]
Timeline = Annotated[
    Path | None,
    typer.Option(help="File for the timeline of a steady step, .json or .json.gz, for Perfetto."),
]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code that comes with the model; no file can ask for it."
    ),
]
NoVerify = Annotated[
    bool,
    typer.Option(
        "--no-verify", help="Do not compare files with the hashes of MANIFEST.json, only sizes."
    ),
]
Checkpoint = Annotated[str | None, typer.Option(help="last, best, proven or checkpoint-N.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megatrain {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Train models far larger than GPU memory: every parameter, full precision, one command."""


def one_process() -> None:
    """Raise ConfigError if a launcher started several processes: each would do it on its own."""
    name, size = started_by(os.environ)
    if size > 1:
        raise ConfigError(
            f"{name}={size} in the environment: this is one of {size} processes of a launcher such "
            "as torchrun or srun, which this command does not use; start it by itself, once"
        )


def finish(summary: Any, as_json: bool) -> None:
    """Print a run's summary, on one rank, and leave with its exit code."""
    place = place_of(os.environ)
    if place is None or place.rank == 0:
        show(summary, as_json)
    raise typer.Exit(summary.exit_code)


def show(result: Any, as_json: bool) -> None:
    if as_json:
        print_json(result.to_dict())
    else:
        result.render(console_on())


def print_json(value: object, indent: int | None = 2) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    typer.echo(text, file=result_stream())


def type_out(text: str) -> None:
    """Print a piece of what a model says on a terminal, which it must not steer."""
    typer.echo(printable(text), nl=False)


def need_folder(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(
            f"{path}: no such folder; name the folder that a run wrote (`output` in its config)"
        )


def find_model(source: str, revision: str | None = None) -> None:
    """Look for a model on the hub, unless it is on disk, before torch is imported.

    Raises ModelError.
    """
    path = Path(expanduser(source))
    with if_forbidden(ModelError, path):
        if path.exists():
            if path.is_dir():  # what is missing from it may only be hidden
                next(path.iterdir(), None)
            return
    import huggingface_hub

    from megatrain.models.pretrained import resolve_source

    # it warns of every retry
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    resolve_source(source, revision, weights=False)


@contextmanager
def reading(no_verify: bool) -> Iterator[Console]:
    """Inside, a model is read, and compared with its hashes unless that is not wanted, as is said.
    Yields the console on stderr that the log goes to.

    Commands that write a run's log say it there.
    """
    from megatrain.storage.manifest import UNVERIFIED, verifying

    with logging_on(console := console_on(stderr=True)), verifying(not no_verify):
        if no_verify:
            logger.warning(UNVERIFIED)
        yield console


def find_shape(name: str) -> None:
    """`find_model`, but for the shapes that have a name and no files. Raises ConfigError, too."""
    from megatrain.models.shapes import SHAPES

    if name in SHAPES:
        return
    if "/" not in name and not os.path.exists(expanduser(name)):
        raise ConfigError(
            f"{name}: is no local folder or file; known shapes are {', '.join(SHAPES)}; a model of "
            "the hub is named with its owner: owner/model"
        )
    find_model(name)
