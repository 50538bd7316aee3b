"""Commands that look at rows and models: data, eval, export, generate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.app import (
    AsJson,
    Checkpoint,
    ConfigFile,
    Overrides,
    RunDir,
    app,
    need_folder,
    print_json,
)
from megatrain.errors import ConfigError


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
        print_json(counts)


@app.command("eval")
def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder or checkpoint.")],
    data: Annotated[
        str | None, typer.Option(help="Rows to evaluate on; default: those the run holds out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the held-out loss of a run or checkpoint."""
    need_folder(folder)
    from megatrain.recipes import inspect

    result = inspect.evaluate(folder, data)
    if as_json:
        print_json(result)
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
    need_folder(run_dir)
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
        need_folder(folder)
    if prompt is None and sys.stdin.isatty():
        missing = "PROMPT is missing; write it after the folder, or pipe it in"
        raise ConfigError(f"command line: {missing}")
    question = sys.stdin.read() if prompt is None else prompt
    if not question.strip():
        raise ConfigError("command line: PROMPT is empty; write something to answer")
    from megatrain.recipes import inspect

    answer = inspect.generate(folder, question, max_new_tokens)
    if as_json:
        print_json({"prompt": question, "answer": answer})
    else:
        typer.echo(answer)
