"""Commands that read: plan, data, eval, generate, export. What they print, where, and what they need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatrain.recipes.sample import end_tokens
from megatrain.recipes.setup import describe_model
from tests.commands import Command, chat_rows, environment, evaluations_of, write_jsonl


def without_weights(project: Path) -> None:
    folder = project / "shape"
    folder.mkdir()
    for path in (project / "model").iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).symlink_to(path.resolve())


@pytest.mark.parametrize("command", [["plan", "cfg.yaml"], ["data", "cfg.yaml"]])
def test_plan_and_data_need_no_weights_and_write_nothing(
    megatrain: Command, project: Path, command: list[str]
) -> None:
    without_weights(project)
    assert megatrain(*command, "model=shape").code == 0
    assert not (project / "run").exists()


def test_plan_says_what_goes_where(megatrain: Command) -> None:
    done = megatrain("plan", "cfg.yaml")
    assert done.code == 0
    assert "37,792 parameters" in done.out
    for words in ("boundary activations", "resident state", "checkpoint 1", "predicted", "fits"):
        assert words in done.out


def test_a_plan_that_does_not_fit_is_printed_all_the_same(megatrain: Command) -> None:
    done = megatrain("plan", "cfg.yaml", "memory.host=64MiB")
    assert done.code == 4
    assert "does not fit" in done.out
    assert (
        json.loads(megatrain("plan", "cfg.yaml", "memory.host=64MiB", "--json").out)["fits"]
        is False
    )


def test_data_shows_rows_with_their_targets(megatrain: Command) -> None:
    done = megatrain("data", "cfg.yaml", "--rows", "1")
    assert done.code == 0
    assert (
        "<|im_start|>user\nCount to 7.<|im_end|>\n<|im_start|>assistant\n⟦1 2 3 4 5 6 7 (0)<|im_end|>⟧"
        in done.out
    )
    assert "8 rows are held out for evaluation" in done.out
    assert "\x1b" not in done.out


def test_data_as_json_is_counts(megatrain: Command) -> None:
    found = megatrain("data", "cfg.yaml", "--json").json
    assert (found["train"]["rows"], found["eval"]["rows"]) == (52, 8)
    assert megatrain("data", "cfg.yaml", "data.eval=null", "--json").json["eval"] is None


@pytest.mark.parametrize(
    ("folder", "line"), [("run", 2), ("run/last", 2), ("run/checkpoint-5", 1), ("run/final", 2)]
)
def test_eval_gives_the_loss_of_the_run(
    megatrain: Command, finished: Path, folder: str, line: int
) -> None:
    result = megatrain("eval", folder, "--json").json
    written = evaluations_of(finished)[line]
    assert result["eval_target_tokens"] == written["eval_target_tokens"]
    assert result["eval_loss"] == pytest.approx(written["eval_loss"], rel=1e-5)
    assert result["perplexity"] == pytest.approx(2.718281828 ** result["eval_loss"])


def test_eval_on_other_rows(megatrain: Command, project: Path, finished: Path) -> None:
    write_jsonl(project / "others.jsonl", chat_rows(70)[60:])
    done = megatrain("eval", "run", "--data", str(project / "others.jsonl"))
    assert done.code == 0
    assert [line.partition(": ")[0] for line in done.out.splitlines()] == [
        "checkpoint",
        "eval_loss",
        "perplexity",
        "eval_target_tokens",
    ]


def test_eval_keeps_to_the_precision_of_the_run(megatrain: Command, project: Path) -> None:
    assert (
        megatrain(
            "train", "cfg.yaml", "train.max_steps=2", "precision=float32", "train.eval_rows=5"
        ).code
        == 0
    )
    result, written = megatrain("eval", "run", "--json").json, evaluations_of(project / "run")[-1]
    assert result["eval_target_tokens"] == written["eval_target_tokens"]
    assert result["eval_loss"] == pytest.approx(written["eval_loss"], rel=1e-6)


def test_eval_without_held_out_rows_asks_for_some(megatrain: Command, project: Path) -> None:
    assert megatrain("train", "cfg.yaml", "train.max_steps=1", "data.eval=null").code == 0
    done = megatrain("eval", "run")
    assert done.code == 2
    assert done.err == "error: run: holds no rows out (data.eval: null); name some with --data\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [(["eval"], "is neither a run"), (["generate", "hi"], "has no config.json; name a folder")],
)
def test_a_folder_without_a_model_is_refused(
    megatrain: Command, project: Path, command: list[str], words: str
) -> None:
    (project / "empty").mkdir()
    done = megatrain(command[0], "empty", *command[1:])
    assert done.code == 2
    assert words in done.err


def test_eval_of_a_model_that_no_run_wrote_is_refused(megatrain: Command) -> None:
    done = megatrain("eval", "model")
    assert (done.code, done.err) == (
        2,
        "error: model: is neither a run folder nor one of its checkpoints (no config.yaml)\n",
    )


def test_generate_answers(megatrain: Command, finished: Path) -> None:
    plain = megatrain("generate", "run", "Count to 3.", "--max-new-tokens", "8")
    assert plain.code == 0
    assert plain.out.strip()
    as_json = megatrain(
        "generate", "run/final", "Count to 3.", "--max-new-tokens", "8", "--json"
    ).json
    assert as_json == {"prompt": "Count to 3.", "answer": plain.out.removesuffix("\n")}


def test_generate_takes_any_model_folder(megatrain: Command) -> None:
    assert megatrain("generate", "model", "hi", "--max-new-tokens", "2").code == 0


def test_an_answer_ends_with_the_turn(finished: Path) -> None:
    """The tokenizer's own end is another token than the one that the template writes after a turn."""
    model = describe_model("run/final")
    assert set(end_tokens(model)) == {
        model.tokenizer.eos_token_id,
        model.tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, None), ("bfloat16", torch.bfloat16), ("float32", torch.float32)]
)
def test_export_loads_in_transformers(
    megatrain: Command, finished: Path, tmp_path: Path, dtype: Any, expected: Any
) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "exported"
    done = megatrain("export", "run", str(out), *(["--dtype", dtype] if dtype else []))
    assert (done.code, done.out) == (0, f"{out}\n")
    weights = load_file(out / "model.safetensors")
    assert expected is None or {tensor.dtype for tensor in weights.values()} == {expected}
    assert not (out / "optimizer").exists()
    AutoModelForCausalLM.from_pretrained(out)


def test_export_of_a_checkpoint_by_name(megatrain: Command, finished: Path, tmp_path: Path) -> None:
    assert (
        megatrain("export", "run", str(tmp_path / "early"), "--checkpoint", "checkpoint-5").code
        == 0
    )
    done = megatrain("export", "run", str(tmp_path / "none"), "--checkpoint", "checkpoint-6")
    assert done.code == 2
    assert (
        "has no checkpoint checkpoint-6; there is checkpoint-5, checkpoint-10, last, best, final"
        in done.err
    )


def test_a_pipe_gets_nothing_but_the_result(finished: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatrain", "data", "cfg.yaml", "--json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**environment(), "FORCE_COLOR": ""},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["train"]["rows"] == 52
