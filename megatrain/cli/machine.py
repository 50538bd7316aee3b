"""Commands about the machine and the config: doctor, init, schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.app import AsJson, app, print_json, show
from megatrain.errors import ConfigError


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
    show(found, as_json)


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
    typer.echo(f"wrote {path}; {then}; `megatrain schema` lists every key", err=True)


@app.command()
def schema() -> None:
    """Print the JSON schema of the config, for editors."""
    from megatrain.config import config_schema

    print_json(config_schema())
