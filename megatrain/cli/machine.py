"""Commands about the machine and the config: doctor, init, import, schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.app import AsJson, Overrides, app, one_process, print_json, show
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
    _write(path, example_config(), "or add --force", "w" if force else "x")
    then = f"name your model and data in it, then `megatrain plan {path}`"
    typer.echo(f"wrote {path}; {then}; `megatrain schema` lists every key", err=True)


@app.command("import")
def import_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML or JSON of another trainer.")],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; default: stdout.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option("--from", help="axolotl, llama-factory or trl; default: by its keys."),
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
        ways = f"{lost} keys would be lost; --force writes a config without them"
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
