"""The notebooks of examples/, run in a kernel of Jupyter, on a tiny model in place of theirs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.helpers.commands import environment, save_tiny_model, tiny_tokenizer
from tests.helpers.forked import Forked

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "notebooks"
POSITIONS = 256
# What the cell tagged `parameters` says, for the tests: as papermill would set it.
GIVEN = {
    "fine-tune-your-rows": "model, steps, learning_rate = 'model', 4, 1e-2",
    "preference-tuning": "model, steps, learning_rate = 'model', 4, 1e-2",
    "learn-from-rewards": "model, steps, learning_rate = 'model', 3, 1e-2",
    "plan-a-machine": "model, tokens_per_step, seq_len = 'qwen2.5-7b', 8192, 4096\n"
    "machines = [('RTX 4090', '64GiB', 16, None), ('H100', '512GiB', 32, 3.0)]",
}
# One kernel imports torch once for all.
ANEW = """
%reset -s -f
from tests.helpers import once
if not hasattr(once, "kept"):
    once.kept = [once.commands_are_short(), once.runs_are_quick()]
    [one.__enter__() for one in once.kept]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they are run: with a model whose positions their rows fit."""
    folder = tmp_path_factory.mktemp("notebooks")
    model = save_tiny_model(folder / "model", tiny_tokenizer())
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = POSITIONS
    (model / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def outputs(folder: Path) -> dict[str, str]:
    """Everything that each notebook shows, by its name."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setenv("MEGATRAIN_CACHE", str(folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        patch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", Forked)
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(folder / "jupyter"))
        cells: list[Any] = []
        for name in GIVEN:
            cells += cells_of(name)
        whole = nbformat.v4.new_notebook(cells=cells)
        kernel = {"timeout": 120, "kernel_name": "python3"}
        at = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(whole, resources=at, **kernel).execute()
    shown = dict.fromkeys(GIVEN, "")
    for cell in cells:
        for output in cell.get("outputs", ()):
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            shown[cell.metadata.of] += f"{text}\n"
    return shown


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def cells_of(name: str) -> list[Any]:
    """The notebook's cells, with the tests' parameters behind its own."""
    new = nbformat.v4.new_code_cell
    cells = []
    for cell in [new(ANEW), *read(name).cells]:
        cells.append(cell)
        if "parameters" in cell.metadata.get("tags", ()):
            cells.append(new(GIVEN[name]))
    for cell in cells:
        cell.metadata["of"] = name
    return cells


def test_all_are_run():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == GIVEN.keys()


def shows(source: str) -> bool:
    """Whether a cell prints, or ends with a value."""
    body = ast.parse(source).body
    nodes = [node for statement in body for node in ast.walk(statement)]
    prints = any(isinstance(node, ast.Name) and node.id == "print" for node in nodes)
    return prints or isinstance(body[-1], ast.Expr)


@pytest.mark.parametrize("name", GIVEN)
def test_they_take_parameters_and_are_kept_with_what_they_showed(name):
    notebook = read(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.metadata.get("tags") for cell in code].count(["parameters"]) == 1
    again = "run `python -m benchmarks.notebooks`"
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], again
    assert [bool(cell.outputs) for cell in code] == [shows(cell.source) for cell in code], again
    shown = json.dumps([cell.outputs for cell in code], ensure_ascii=False)
    assert re.findall(r"(?<![\w.:/])/\w\S*", shown.replace(r"\n", "\n")) == [], "of one machine"
    assert "error" not in {output.output_type for cell in code for output in cell.outputs}


@pytest.mark.slow
def test_rows_are_fine_tuned(outputs, folder):
    shown = outputs["fine-tune-your-rows"]
    assert "216 rows, " in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("held-out loss: "))
    before, after = (float(word) for word in line.split() if word[0].isdigit() and "." in word)
    assert after < before
    assert "choice" in shown and "micro-batch" in shown, "the plan is shown as its table"
    assert "its rows come from the cache" in shown
    assert (folder / "runs/orders/final/config.json").is_file()


def test_preferences_are_learned(outputs):
    shown = outputs["preference-tuning"]
    assert "24 pairs" in shown or "24 rows" in shown
    evaluations = [line for line in shown.splitlines() if "eval_rewards/margins" in line]
    before, after = (float(line.rpartition(" ")[2]) for line in evaluations)
    assert after > before


@pytest.mark.slow
def test_rewards_are_learned_from(outputs, folder):
    shown = outputs["learn-from-rewards"]
    assert "step 0: eval_reward 0." in shown and "step 3: eval_reward" in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("rewards of the steps"))
    assert len(line.partition(":")[2].split()) == 3
    assert [*(folder / "runs/sums/rollouts").glob("*.jsonl")]


def test_machines_are_planned(outputs):
    shown = outputs["plan-a-machine"]
    assert "RTX 4090, 64GiB, 16 cores: it needs" in shown
    assert "to change: set optimizer.moments" in shown
    assert "H100, 512GiB, 32 cores: " in shown and " USD" in shown
    assert "bytes by tier and array" in shown
