"""`megatrain bench`: a model's speed on this machine, from a config, a folder or a name, and
nothing left behind."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from pathlib import Path

import pytest

from megatrain.config.load import bench_config
from megatrain.models.shapes import SHAPES
from megatrain.recipes.model import shape_config
from tests.helpers.commands import steps_of
from tests.helpers.support import plain_model, tiny_config

QUICK = ("--steps", "2", "--warmup", "1", "device=cpu", "threads=1")
TINY_RUN = ("train.seq_len=64", "train.tokens_per_step=256")
SMALL = ("--tokens-per-step", "256", "--seq-len", "64")


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_users_own_config_is_timed_without_its_rows(megatrain, project):
    (project / "rows.jsonl").unlink()
    before = files_in(project)
    done = megatrain("bench cfg.yaml", *QUICK)
    assert files_in(project) == before
    for words in ("2 layers", "256 tokens per step", "median of 2", "TFLOP/s", "planned", "advice"):
        assert words in done.out
    drawing, warming, *steps = (line.split(":")[0] for line in done.err.splitlines()[1:])
    assert drawing == "drawing 37,792 weights at random", done.err
    assert (warming, steps) == ("to warm up", ["step 1/2", "step 2/2"])


@pytest.mark.slow
def test_json_holds_the_figures_and_where_they_come_from(megatrain):
    options = ("--layers", "3", "train.micro_batch_tokens=128", "--json")
    result = megatrain("bench tiny", *SMALL, *QUICK, *options).json
    assert [result[key] for key in ("model", "layers", "tokens")] == ["tiny", 3, 256]
    seconds = statistics.median(step["seconds"] for step in result["steps"])
    assert (result["step_s"], len(result["steps"])) == (seconds, 2)
    assert result["tflops"] == pytest.approx(6 * result["parameters"] * 256 / seconds / 1e12)
    assert result["tokens_per_s"] == pytest.approx(256 / seconds)
    assert sum(result["shares"].values()) == pytest.approx(1)
    assert (result["host_bytes"] > 0, result["gpu_peak_bytes"]) == (True, None)
    assert result["predicted"]["step_s"] == result["plan"]["timing"]["seconds"] > 0
    assert result["predicted"]["host_bytes"] == result["plan"]["totals"]["host"]["need"]
    assert result["plan"]["choices"]["micro_batch_tokens"] == 128
    assert result["config"]["train"]["seq_len"] == 64
    assert result["environment"]["device"] == "cpu"
    assert {"torch", "transformers", "megatrain"} <= result["environment"]["packages"].keys()
    assert len(result["environment"]["rates"]["update"][0]) == 2


def test_how_often_a_gpu_was_full_is_counted_by_steps(megatrain, monkeypatch):
    readings = iter([0, 5, 5, 8, 8, 10])  # before and after each step
    monkeypatch.setattr("megatrain.recipes.bench.allocator_retries", lambda: next(readings))
    result = megatrain("bench tiny", *SMALL, *QUICK, "--json").json
    steps = [*result["warmup_steps"], *result["steps"]]
    assert [step["retries"] for step in steps] == [5, 3, 2]


@pytest.mark.slow
def test_of_a_mixture_both_counts_are_said(megatrain, project):
    config = tiny_config("mixtral", num_local_experts=8)
    config.save_pretrained(project / "mixture")
    active = sum(p.numel() for p in plain_model(config).parameters()) - 3 * 6 * 3 * 32 * 64
    done = megatrain("bench mixture", *SMALL, *QUICK)
    assert f" parameters, {active:,} of them active" in done.out.replace("\n", " ")
    assert f" parameters, {active:,} of them active" in done.err
    result = megatrain("bench mixture", *SMALL, *QUICK, "--json").json
    assert result["active_parameters"] == result["plan"]["active_parameters"] == active
    assert result["tflops"] == pytest.approx(6 * active * 256 / result["step_s"] / 1e12)
    assert f"{active:,} of them active" in megatrain("plan mixture --full", *TINY_RUN).out


@pytest.mark.parametrize("same", [False, True])
def test_a_random_model_begins_at_chance_and_learns_only_tokens_it_sees_again(megatrain, same):
    options = ("--same-batch", "train.learning_rate=1e-2") if same else ()
    result = megatrain("bench tiny", *SMALL, *QUICK, *options, "--json").json
    steps = result["warmup_steps"] + result["steps"]
    losses = [step["loss"] for step in steps]
    at_chance = losses[:1] if same else losses
    assert at_chance == pytest.approx([math.log(512)] * len(at_chance), abs=0.1)
    assert all(step["grad_norm"] > 0 for step in steps)
    assert not same or (losses == sorted(losses, reverse=True) and losses[1] < 6.2)


@pytest.mark.slow
def test_the_timeline_of_one_more_step(megatrain, project):
    options = ("memory.resident=0", "--profile", "trace.json.gz", "--json")
    done = megatrain("bench tiny", *SMALL, *QUICK, *options)
    assert len(done.json["steps"]) == 2
    assert "aten::mm" in done.err
    events = json.loads(gzip.decompress((project / "trace.json.gz").read_bytes()))["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"megatrain-upload", "megatrain-download"} <= rows


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "traced"), [(4, 3), (1, 1)], ids=["third", "last of few"])
def test_training_writes_the_timeline_of_one_step(megatrain, project, steps, traced):
    options = (f"train.max_steps={steps}", "data.eval=null", "--profile", "trace.json")
    done = megatrain("train cfg.yaml", *options)
    assert f"the timeline of step {traced} is in trace.json" in done.err
    assert json.loads((project / "trace.json").read_text())["traceEvents"]
    assert len(steps_of(project / "run")) == steps


@pytest.mark.parametrize("command", [("train", "cfg.yaml"), ("bench", "tiny", *SMALL, *QUICK)])
def test_a_timeline_that_cannot_be_written_is_refused_first(megatrain, project, command):
    done = megatrain(*command, "--profile", "cfg.yaml/trace.json", code=7)
    assert "choose another file for --profile" in done.err
    assert not (project / "run").exists()


def test_what_is_wrong_is_said(megatrain):
    for arguments, words in [
        ("train.seq_len=64", "name a config file, a model folder, a hub id or a shape"),
        ("tiny train.seqlen=64", "did you mean seq_len?"),
        ("train.seqlen=64 tiny", "did you mean seq_len?"),  # in any order
        ("tiny train.seq_len=none", "error: command line: train.seq_len"),
        ("missing.yaml", "missing.yaml"),
        ("no/such-model", "no/such-model"),
    ]:
        assert words in megatrain(f"bench {arguments}", code=2).err


def test_the_model_may_be_an_option(megatrain):
    done = megatrain("bench --model model", *SMALL, *QUICK, "--json")
    assert (done.json["model"], done.json["layers"]) == ("model", 2)


# -- configs and shapes --------------------------------------------------------------------------


def test_a_config_keeps_all_but_its_weights(project):
    config = bench_config("cfg.yaml", ["train.groups=2"])
    assert (config.model.source, config.model.init) == ("model", "random")
    assert (config.method, config.train.tokens_per_step, config.train.groups) == ("sft", 256, 2)


def test_a_folder_of_the_same_name_wins(project):
    (project / "tiny").symlink_to(project / "model")
    assert shape_config(bench_config("tiny")).model_type == "llama"


BILLIONS = {
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.777,
    "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "llama-3-8b": 8.030,
    "llama-3-70b": 70.55,
}


@pytest.mark.slow
def test_named_shapes_have_the_published_sizes():
    import torch
    from transformers import AutoModelForCausalLM

    for name, billions in BILLIONS.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape_config(bench_config(name)))
        found = sum(p.numel() for p in model.parameters()) / 1e9
        assert found == pytest.approx(billions, rel=1e-3), name


def test_another_depth_keeps_the_pattern_of_layers(monkeypatch):
    alternating = {"model_type": "gemma2", "num_hidden_layers": 4}
    monkeypatch.setitem(SHAPES, "alternating", alternating)
    for layers in (1, 3, 9):
        config = shape_config(bench_config("alternating"), layers)
        assert config.num_hidden_layers == layers
        assert config.layer_types == (["sliding_attention", "full_attention"] * 5)[:layers]
