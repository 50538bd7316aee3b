"""Commands that need no recipe: help, init, schema, and what starts without importing much."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import megatrain
from megatrain import cli
from megatrain.config import config_schema, example_config
from megatrain.models.shapes import SHAPES

ENV = {"PYTHONPATH": str(Path(next(iter(megatrain.__path__))).parent)}
HEAVY = ("torch", "transformers", "numba", "datasets", "numpy")


def test_nothing_at_all_is_answered_with_help(capsys):
    assert cli.main([]) == 2
    told = capsys.readouterr()
    assert "doctor" in told.out + told.err


def test_the_help_of_bench_lists_every_shape(capsys):
    assert cli.main(["bench", "--help"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert f"Named shapes: {', '.join(SHAPES)}." in listed


def test_a_config_error_needs_no_recipes(capsys):
    assert cli.main(["train", "nowhere.yaml"]) == 2
    words = "error: nowhere.yaml: no such file; write one with `megatrain init nowhere.yaml`\n"
    assert capsys.readouterr().err == words


def test_init_writes_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    assert capsys.readouterr().out == example_config()
    assert cli.main(["init", "mine.yaml"]) == 0
    assert "`megatrain schema` lists every key" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == example_config()
    Path("mine.yaml").write_text("precious")
    assert cli.main(["init", "mine.yaml"]) == 2
    assert Path("mine.yaml").read_text() == "precious"
    assert cli.main(["init", "mine.yaml", "--force"]) == 0
    assert Path("mine.yaml").read_text() == example_config()
    assert cli.main(["init", "nowhere/mine.yaml"]) == 2
    assert "error: nowhere/mine.yaml: cannot be written" in capsys.readouterr().err


def test_schema_is_json(capsys):
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == config_schema()


MAIN = "from megatrain.cli import main; main"


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


STATEMENTS = (
    *(f"import megatrain{name}" for name in ("", ".errors", ".config", ".cli")),
    f"{MAIN}(['--help'])",
    f"{MAIN}(['train', '--help'])",
    f"{MAIN}(['schema'])",
    f"{MAIN}(['train', 'nowhere.yaml'])",
    f"{MAIN}(['generate', 'some/model', 'hi'])",
    f"{MAIN}(['plan', 'qwen2.5-8b'])",
)


def test_help_and_config_import_nothing_heavy():
    """One after the other: what one imports is found behind it."""
    found = f"found = [name for name in {HEAVY} if name in sys.modules]"
    behind = "assert not found, (statement, found)"
    code = f"import sys\nfor statement in {STATEMENTS}:\n exec(statement)\n {found}\n {behind}"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


REFUSED = {
    "train mine.yaml": "holds a run already; continue it with `megatrain resume run`",
    "rollout mine.yaml": "method: sft writes no answers",
    "rollout mine.yaml method=grpo rewards.functions=none.py:f": "functions: none.py: no such file",
    "push run me/mine": "nothing is uploaded without a token",
    "plan qwen2.5-7b --gpu nothing --ram 64GiB": "'nothing' is not known; choose one of",
}


def test_what_names_and_files_tell_is_told_before_anything_heavy_is_imported(tmp_path):
    (tmp_path / "run/checkpoint-3").mkdir(parents=True)
    (tmp_path / "run/config.resolved.yaml").touch()
    (tmp_path / "mine.yaml").write_text("model: some/model\ndata: {train: rows.jsonl}\noutput: run")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    behind = f"print(*(name for name in {HEAVY[:-1]} if name in sys.modules), file=sys.stderr)"
    lines = [f"{MAIN}({shlex.split(line)!r}); {behind}" for line in REFUSED]
    done = run_python("-c", "import sys\n" + "\n".join(lines), cwd=tmp_path, env=ENV)
    told = done.stderr.splitlines()
    assert len(told) == 2 * len(REFUSED), done.stderr
    for words, sentence, heavy in zip(REFUSED.values(), told[::2], told[1::2], strict=True):
        assert words in sentence and heavy == ""


COMPLETED = {
    "megatrain wat": ["watch"],
    "megatrain train my.yaml train.learn": ["train.learning_rate="],
    "megatrain plan qwen2.5-1": ["qwen2.5-1.5b", "qwen2.5-14b"],
    "megatrain bench qwen2.5-7b hang": ["hang_timeout="],
}


def test_a_shell_completes_commands_keys_and_shapes(monkeypatch, capsys):
    monkeypatch.setenv("_MEGATRAIN_COMPLETE", "complete_bash")
    for line, expected in COMPLETED.items():
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
        assert cli.main([]) == 0
        assert capsys.readouterr().out.split() == expected


def test_libraries_draw_no_progress_bars_into_a_pipe():
    code = "from megatrain.reporting.streams import lasting_streams as quiet; import tqdm\n"
    done = run_python("-c", code + "with quiet(): list(tqdm.tqdm(range(3)))", env=ENV)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_is_a_command(tmp_path):
    done = run_python("-m", "megatrain", "train", "nowhere.yaml", cwd=tmp_path, env=ENV)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: nowhere.yaml: no such file")
