"""`megatrain bench`: a model's speed on this machine, from a config, a folder or a name, and nothing left behind."""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path

import pytest

from megatrain.errors import ConfigError
from megatrain.models.shapes import SHAPES
from megatrain.recipes.shapes import bench_config, shape_config
from tests.commands import Command, steps_of

QUICK = ("--steps", "2", "--warmup", "1", "device=cpu", "threads=1")
SMALL = ("--tokens-per-step", "256", "--seq-len", "64")


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_users_own_config_is_timed_without_its_rows(megatrain: Command, project: Path) -> None:
    (project / "rows.jsonl").unlink()
    before = files_in(project)
    done = megatrain("bench", "cfg.yaml", *QUICK)
    assert done.code == 0, done.err
    assert files_in(project) == before
    for words in (
        "2 layers",
        "256 tokens per step",
        "median of 2",
        "TFLOP/s",
        "host memory",
        "planned",
        "backward",
        "advice",
    ):
        assert words in done.out
    said = [line.split(":")[0] for line in done.err.splitlines()]
    assert said[1:] == [
        f"drawing {int(said[0].split()[0].replace(',', '')):,} weights at random",
        "to warm up",
        "step 1/2",
        "step 2/2",
    ]


def test_json_holds_the_figures_and_where_they_come_from(megatrain: Command) -> None:
    result = megatrain(
        "bench", "tiny", *SMALL, *QUICK, "--layers", "3", "train.micro_batch_tokens=128", "--json"
    ).json
    assert (result["model"], result["layers"], result["tokens"], len(result["steps"])) == (
        "tiny",
        3,
        256,
        2,
    )
    assert result["step_s"] == statistics.median(step["seconds"] for step in result["steps"])
    assert result["tflops"] == pytest.approx(
        6 * result["parameters"] * 256 / result["step_s"] / 1e12
    )
    assert result["tokens_per_s"] == pytest.approx(256 / result["step_s"])
    assert sum(result["shares"].values()) == pytest.approx(1)
    assert (result["host_bytes"] > 0, result["gpu_peak_bytes"]) == (True, None)
    assert result["predicted"]["step_s"] == result["plan"]["timing"]["seconds"] > 0
    assert result["predicted"]["host_bytes"] == result["plan"]["totals"]["host"]["need"]
    assert result["plan"]["choices"]["micro_batch_tokens"] == 128
    assert result["config"]["train"]["seq_len"] == 64
    assert result["environment"]["device"] == "cpu"
    assert {"torch", "transformers", "megatrain"} <= result["environment"]["packages"].keys()


def test_random_tokens_of_a_random_model_are_learnt_at_chance(megatrain: Command) -> None:
    result = megatrain("bench", "tiny", *SMALL, *QUICK, "--json").json
    for step in result["steps"]:
        assert step["loss"] == pytest.approx(6.24, abs=0.1), "ln(512)"
        assert step["grad_norm"] > 0


def test_the_same_tokens_in_every_step_are_learnt(megatrain: Command) -> None:
    result = megatrain(
        "bench", "tiny", *SMALL, *QUICK, "--same-batch", "train.learning_rate=1e-2", "--json"
    ).json
    losses = [step["loss"] for step in result["warmup_steps"] + result["steps"]]
    assert losses[0] == pytest.approx(6.24, abs=0.1), "ln(512)"
    assert losses == sorted(losses, reverse=True) and losses[1] < 6.2


def test_the_timeline_of_one_more_step(megatrain: Command, project: Path) -> None:
    done = megatrain(
        "bench", "tiny", *SMALL, *QUICK, "memory.resident=0", "--profile", "trace.json.gz", "--json"
    )
    assert len(done.json["steps"]) == 2
    assert "aten::mm" in done.err
    trace = json.loads(gzip.decompress((project / "trace.json.gz").read_bytes()))
    rows = {
        event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"
    }
    assert {"megatrain-upload", "megatrain-download"} <= rows


def test_training_writes_the_timeline_of_its_third_step(megatrain: Command, project: Path) -> None:
    done = megatrain(
        "train", "cfg.yaml", "train.max_steps=4", "data.eval=null", "--profile", "trace.json"
    )
    assert done.code == 0, done.err
    assert "the timeline of step 3 is in trace.json" in done.err
    assert json.loads((project / "trace.json").read_text())["traceEvents"]
    assert len(steps_of(project / "run")) == 4


def test_a_short_run_traces_its_last_step(megatrain: Command) -> None:
    done = megatrain(
        "train", "cfg.yaml", "train.max_steps=1", "data.eval=null", "--profile", "trace.json"
    )
    assert "the timeline of step 1 is in trace.json" in done.err


@pytest.mark.parametrize("command", [("train", "cfg.yaml"), ("bench", "tiny", *SMALL, *QUICK)])
def test_a_timeline_that_cannot_be_written_is_refused_first(
    megatrain: Command, project: Path, command: tuple[str, ...]
) -> None:
    done = megatrain(*command, "--profile", "cfg.yaml/trace.json")
    assert done.code == 7
    assert "choose another file for --profile" in done.err
    assert not (project / "run").exists()


def test_what_does_not_fit_is_refused_as_a_run_is(megatrain: Command) -> None:
    done = megatrain(
        "bench",
        "qwen2.5-7b",
        *QUICK,
        "--tokens-per-step",
        "256",
        "--seq-len",
        "64",
        "memory.host=1GiB",
    )
    assert done.code == 4
    assert "does not fit" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.seq_len=64"], "name a config file, a model folder, a hub id or a shape"),
        (["tiny", "train.seqlen=64"], "did you mean seq_len?"),
        (["missing.yaml"], "missing.yaml"),
        (["no/such-model"], "no/such-model"),
    ],
)
def test_what_is_wrong_is_said(megatrain: Command, arguments: list[str], words: str) -> None:
    done = megatrain("bench", *arguments)
    assert done.code == 2
    assert words in done.err


def test_the_model_may_be_an_option(megatrain: Command) -> None:
    done = megatrain("bench", "--model", "model", *SMALL, *QUICK, "--json")
    assert (done.json["model"], done.json["layers"]) == ("model", 2)


# -- configs and shapes -------------------------------------------------------------------------------------------------------------


def test_a_config_keeps_all_but_its_weights(project: Path) -> None:
    config = bench_config("cfg.yaml", ["train.groups=2"])
    assert (config.model.source, config.model.init) == ("model", "random")
    assert (config.method, config.train.tokens_per_step, config.train.groups) == ("sft", 256, 2)


def test_a_mistake_in_an_override_is_the_command_lines() -> None:
    with pytest.raises(ConfigError, match=r"^command line: train\.seq_len"):
        bench_config("tiny", ["train.seq_len=none"])


def test_a_folder_of_the_same_name_wins(project: Path) -> None:
    (project / "tiny").symlink_to(project / "model")
    assert shape_config(bench_config("tiny")).model_type == "llama"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.777),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-14b", 14.77),
        ("qwen2.5-32b", 32.76),
        ("llama-3-8b", 8.030),
        ("llama-3-70b", 70.55),
    ],
)
def test_named_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(bench_config(name)))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert name in SHAPES


@pytest.mark.parametrize("layers", [1, 3, 9])
def test_another_depth_keeps_the_pattern_of_layers(
    monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    alternating = {"model_type": "gemma2", "num_hidden_layers": 4}
    monkeypatch.setitem(SHAPES, "alternating", alternating)
    config = shape_config(bench_config("alternating"), layers)
    assert config.num_hidden_layers == layers
    assert config.layer_types == (["sliding_attention", "full_attention"] * 5)[:layers]
