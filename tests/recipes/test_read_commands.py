"""Commands that read: plan, data, eval, generate, export. What they print and what they need."""

from __future__ import annotations

import json
import re
import shutil
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import megatrain as mt
from tests.helpers.commands import (
    POSITIONS,
    chat_rows,
    conversation,
    evaluations_of,
    wait_for,
    write_jsonl,
)


def test_plan_and_data_need_no_weights_and_write_nothing(megatrain, project):
    (project / "shape").mkdir()
    for path in (project / "model").iterdir():
        if path.suffix != ".safetensors":
            (project / "shape" / path.name).symlink_to(path.resolve())
    for command in ("plan", "data"):
        megatrain(f"{command} cfg.yaml model=shape")
        assert not (project / "run").exists()


def test_data_shows_rows_with_their_targets(megatrain):
    done = megatrain("data cfg.yaml --rows 1")
    question = "<|im_start|>user\nCount to 7.<|im_end|>\n<|im_start|>assistant\n"
    assert f"{question}⟦1 2 3 4 5 6 7 (0)<|im_end|>⟧" in done.out
    assert "8 rows held out for evaluation" in done.out
    assert "\x1b" not in done.out
    found = megatrain("data cfg.yaml --json").json
    assert (found["train"]["rows"], found["eval"]["rows"]) == (52, 8)
    assert megatrain("data cfg.yaml data.eval=null --json").json["eval"] is None


def test_a_long_row_is_cut_to_a_screen(megatrain, project):
    lines = "\n".join(f"line {n}" for n in range(2_000))
    write_jsonl(project / "rows.jsonl", [conversation(f"Say {lines}", lines)])
    asked = "data cfg.yaml data.eval=null train.seq_len=100000 --rows 1"
    cut, full = megatrain(asked).out, megatrain(f"{asked} --full").out
    assert cut.splitlines()[1:3] == full.splitlines()[1:3]
    assert "characters more; --full shows them ...]" in cut and "--full" not in full
    assert len(cut.splitlines()) < 40 and len(full.splitlines()) > 4_000
    (number,) = re.findall(r"\[\.\.\. ([\d,]+) characters", cut)
    left_out = int(number.replace(",", ""))
    row = full.partition("\n")[2].partition("\n───")[0]
    shown = re.split(r"\n\[\.\.\. .* \.\.\.\]\n", cut.partition("\n")[2].partition("\n───")[0])
    assert row.startswith(shown[0]) and row.endswith(shown[1])
    assert len(shown[0]) + left_out + len(shown[1]) == len(row)


def test_what_libraries_print_stays_out_of_json(megatrain, finished, monkeypatch):
    theirs = AutoTokenizer.from_pretrained

    def talks(*args: Any, **kwargs: Any) -> Any:
        sys.stdout.write("a library's own words\n")
        return theirs(*args, **kwargs)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", talks)
    done = megatrain("generate run 'Count to 2.' --max-new-tokens 1 --json")
    assert done.json["prompt"] == "Count to 2." and "a library's own words" in done.err


def test_eval_gives_the_loss_of_the_run(megatrain, finished):
    for folder, line in [("run", 2), ("run/last", 2), ("run/checkpoint-5", 1), ("run/final", 2)]:
        result = megatrain("eval", folder, "--json").json
        written = evaluations_of(finished)[line]
        assert result["eval_target_tokens"] == written["eval_target_tokens"]
        # micro-batches of another size round otherwise in bfloat16
        assert result["eval_loss"] == pytest.approx(written["eval_loss"], rel=3e-4)
        assert result["perplexity"] == pytest.approx(2.718281828 ** result["eval_loss"])


def test_eval_of_a_model_that_no_run_wrote_is_transformers_loss(megatrain, project):
    """Rows with a loss on the answers alone; one is longer than the model reads, and is cut."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [*chat_rows(9), conversation("Count.", "1 2 3 4 5 6 7 8 9 " * 40)]
    write_jsonl(project / "some.jsonl", rows)
    done = megatrain("eval model --data some.jsonl --json")
    model: Any = AutoModelForCausalLM.from_pretrained("model", dtype="float32")
    tokenizer: Any = AutoTokenizer.from_pretrained("model")
    total, targets = 0.0, 0
    for row in rows:
        ids, prompt = (
            tokenizer.apply_chat_template(
                turns, add_generation_prompt=len(turns) == 1, return_dict=True
            )["input_ids"]
            for turns in (row["messages"], row["messages"][:1])
        )
        end = min(len(ids) - 1, POSITIONS)  # the line end after the turn is the template's
        labels = torch.tensor([[-100] * len(prompt) + ids[len(prompt) : end]])
        count = int((labels != -100).sum())
        with torch.no_grad():
            total += count * float(model(torch.tensor([ids[:end]]), labels=labels).loss)
        targets += count
    assert done.json["eval_target_tokens"] == targets
    assert done.json["eval_loss"] == pytest.approx(total / targets, rel=1e-5)
    assert done.json["checkpoint"] == "model"
    assert "1 row cut to seq_len" in done.err
    assert mt.evaluate("model", data="some.jsonl") == done.json


def test_eval_keeps_to_the_precision_of_the_run(megatrain, project):
    megatrain("train cfg.yaml train.max_steps=2 precision=float32 train.eval_rows=5")
    result, written = megatrain("eval run --json").json, evaluations_of(project / "run")[-1]
    assert result["eval_target_tokens"] == written["eval_target_tokens"]
    assert result["eval_loss"] == pytest.approx(written["eval_loss"], rel=1e-6)


def test_a_model_computes_in_its_own_dtype_where_bfloat16_is_fast(megatrain, project, monkeypatch):
    monkeypatch.setattr("megatrain.engine.request.bf16_is_fast", lambda kind: True)
    found = [megatrain("eval model --data rows.jsonl --json").json["precision"]]
    assert "computing in float32" in megatrain("generate model hello --max-new-tokens 1").err
    config = json.loads((project / "model" / "config.json").read_text())
    half = shutil.copytree(project / "model", project / "half")
    (half / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    found.append(megatrain("eval half --data rows.jsonl --json").json["precision"])
    assert found == ["float32", "bfloat16"]


def test_eval_without_held_out_rows_asks_for_some(megatrain, project):
    megatrain("train cfg.yaml train.max_steps=1 data.eval=null")
    done = megatrain("eval run", code=2)
    assert done.err == "error: run: holds no rows out (data.eval: null); name some with --data\n"


def test_a_folder_without_a_model_is_refused(megatrain, project):
    (project / "empty").mkdir()
    for command, words in [
        ("eval empty --data rows.jsonl", "empty: has no config.json; name a folder"),
        ("eval model", "model: is neither a run folder nor one of its checkpoints, so nothing is"),
        ("eval no/where --data rows.jsonl", "no/where: is no local folder"),
        ("generate empty hi", "empty: has no config.json; name a folder"),
    ]:
        assert megatrain(command, code=2).err.startswith(f"error: {words}")


def test_tasks_without_lm_eval_say_how_to_install_it(megatrain, monkeypatch):
    monkeypatch.setattr("megatrain.config.sections.find_spec", lambda name: None)
    sentence = "lm-eval is not installed; pip install 'megatrain[eval]'"
    done = megatrain("eval model --tasks mmlu", code=2)
    assert done.err == f"error: --tasks: {sentence}\n"


def test_generate_answers(megatrain, finished):
    plain = megatrain("generate run 'Count to 3.' --max-new-tokens 8")
    assert plain.out.strip()
    as_json = megatrain("generate run/final 'Count to 3.' --max-new-tokens 8 --json").json
    assert as_json == {"prompt": "Count to 3.", "answer": plain.out.removesuffix("\n")}


def test_export_loads_in_transformers(megatrain, finished, tmp_path):
    from transformers import AutoModelForCausalLM

    for dtype in ("", "bfloat16", "float32"):
        out = tmp_path / f"exported{dtype}"
        done = megatrain(f"export run {out}" + f" --dtype {dtype}" * bool(dtype))
        assert done.out == f"{out}\n"
        found = {str(tensor.dtype) for tensor in load_file(out / "model.safetensors").values()}
        assert not dtype or found == {f"torch.{dtype}"}
        assert not (out / "optimizer").exists()
        AutoModelForCausalLM.from_pretrained(out)


def test_an_export_as_gguf_is_read_as_the_run_is(megatrain, finished, tmp_path):
    out = tmp_path / "gguf"
    assert megatrain(f"export run {out} --format gguf").out.strip() == str(out)
    losses = [
        megatrain(f"eval {m} --data rows.jsonl --json").json["eval_loss"] for m in ("run", out)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert "format must be safetensors or gguf" in megatrain("export run x --format q", code=2).err


def test_export_of_a_checkpoint_by_name(megatrain, finished, tmp_path):
    megatrain("export run --checkpoint checkpoint-5", str(tmp_path / "early"))
    done = megatrain("export run --checkpoint checkpoint-6", str(tmp_path / "none"), code=2)
    assert "has no checkpoint checkpoint-6; there is checkpoint-5, checkpoint-10, last" in done.err


@pytest.mark.slow
def test_a_pipe_gets_nothing_but_the_result(finished, forker, tmp_path):
    pipes = {name: f"dd of={tmp_path / name} status=none" for name in ("stdout", "stderr")}
    colour = "os.environ['FORCE_COLOR'] = ''"
    forker.start("data", "cfg.yaml", "--json", first=colour, **pipes)
    assert forker.wait() == 0
    wait_for(lambda: (tmp_path / "stdout").read_text().endswith("}\n"))
    assert (tmp_path / "stderr").read_text() == ""
    assert json.loads((tmp_path / "stdout").read_text())["train"]["rows"] == 52
