"""How the command line is used: wrong usage, help, and the config's example and schema."""

import json
from pathlib import Path

import pytest

from megatrain import cli
from megatrain.config import config_schema, example_config
from megatrain.models.shapes import SHAPES


@pytest.mark.parametrize(
    "line", ["trian", "train", "train cfg.yaml --fast", "data cfg.yaml --rows -1", "export run"]
)
def test_wrong_usage_is_2(line):
    assert cli.main(line.split()) == 2


@pytest.mark.parametrize("command", ["train cfg.yaml", "plan cfg.yaml", "bench tiny"])
@pytest.mark.parametrize("option", ["--lr 1e-5", "--set train.seed=1"])
def test_a_key_given_as_an_option_is_told_how_it_is_written(capsys, command, option):
    assert cli.main([*command.split(), *option.split()]) == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"Usage: megatrain {command.split()[0]} ")
    keys = "keys of the config are set as key=value, such as train.learning_rate=1e-5"
    assert error.startswith(f"error: No such option: {option.split()[0]}") and keys in error
    assert error.endswith(f"; see `megatrain {command.split()[0]} --help`")


@pytest.mark.parametrize(
    "line", ["trian", "train", "export run", "data cfg.yaml --rows -1", "--no"]
)
def test_wrong_usage_is_an_error_as_any_other(capsys, line):
    assert cli.main(line.split()) == 2
    said = capsys.readouterr().err
    assert "\nerror: " in said and "Error" not in said and "key=value" not in said


def test_nothing_at_all_is_answered_with_help(capsys):
    assert cli.main([]) == 2
    told = capsys.readouterr()
    assert "doctor" in told.out + told.err


def test_the_help_of_bench_lists_every_shape(capsys):
    assert cli.main(["bench", "--help"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert f"Named shapes: {', '.join(SHAPES)}." in listed


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
