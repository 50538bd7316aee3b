"""Runs that learn from preferences: their record, their reference, and how they are resumed."""

from __future__ import annotations

import re
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from megatrain.config import Config
from megatrain.data.rows import default_cache
from megatrain.engine.engine import Engine
from megatrain.losses import LOSSES
from megatrain.methods import METHODS
from megatrain.recipes import reference
from megatrain.settings import Settings
from tests.helpers.commands import (
    Answer,
    Command,
    Row,
    chat_rows,
    evaluations_of,
    metrics_of,
    steps_of,
    write_jsonl,
)
from tests.helpers.compare import differing
from tests.helpers.files import flip
from tests.helpers.support import engine_of, plain_model, tiny_config
from tests.recipes.conftest import cut_back
from tests.recipes.same_run import same_run

OF_PAIRS = {f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")}
OF_PAIRS |= {"logps/chosen", "logps/rejected"}
FURTHER = {
    "dpo": OF_PAIRS,
    "orpo": OF_PAIRS | {"nll_loss", "log_odds_ratio", "log_odds_chosen"},
    "simpo": OF_PAIRS | {"nll_loss"},
    "cpo": OF_PAIRS | {"nll_loss"},
    "kto": OF_PAIRS - {"rewards/accuracies"} | {"kl"},
    "reward": {"accuracy", "margin", "mean_reward"},
}
KEYS = {"simpo": ["simpo.beta=2.0"], "kto": ["train.rows_per_step=12"]}
OF_PAIRS_ALONE = {"orpo", "simpo", "cpo"}
REFERRED = [name for name, loss in LOSSES.items() if getattr(loss, "reference", False)]


def pairs(count: int = 60) -> list[Row]:
    """The answers that count right are chosen, those that do not are rejected."""
    rows = []
    for row in chat_rows(count):
        asked, answer = (turn["content"] for turn in row["messages"])
        rows.append({"prompt": asked, "chosen": answer, "rejected": answer[::-1]})
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{s: [{"role": "assistant", "content": row[s]}] for s in ("chosen", "rejected")},
        }
        for row in rows
    ]


def judged(count: int = 60) -> list[Row]:
    return [
        {
            "prompt": row["prompt"],
            "completion": row["chosen" if number % 2 else "rejected"],
            "label": bool(number % 2),
        }
        for number, row in enumerate(pairs(count))
    ]


ROWS = {"pairs": pairs, "judged": judged}


@pytest.fixture
def of_method(project: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the rows of a method's kind; the words of a config for it. The cache is empty."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(project / "cache"))

    def options(method: str) -> list[str]:
        write_jsonl(project / "rows.jsonl", ROWS[METHODS[method].kind]())
        return [f"method={method}", "train.learning_rate=1e-3", *KEYS.get(method, [])]

    return options


OF_ANSWERS = [name for name in METHODS if METHODS[name].kind not in ("plain", "prompts")]


def test_each_method_has_a_loss_and_each_key_of_a_section_is_an_argument_of_it():
    assert list(METHODS) == list(LOSSES)
    for name in OF_ANSWERS:  # other sections also say who writes or teaches
        section = dict(Config.model_fields[name].default)
        loss = LOSSES[name](**{key: value for key, value in section.items() if value})
        for key, value in section.items():
            if value is not None and key != "loss_type":
                assert getattr(loss, key) == value, f"{name}.{key}"


@pytest.mark.slow
@pytest.mark.parametrize("method", OF_ANSWERS)
def test_a_run_learns_writes_trl_s_metrics_and_halves_are_one_run(
    megatrain, project, of_method, method
):
    """And `eval` says of it what its last evaluation said. Those of pairs without a reference all
    go on in one way, which is that of an sft run."""
    options = of_method(method)
    megatrain("train cfg.yaml", *options, "output=whole")
    steps, held_out = steps_of(project / "whole"), evaluations_of(project / "whole")
    assert {*FURTHER[method]} <= steps[0].keys()
    assert {f"eval_{name}" for name in FURTHER[method]} <= held_out[0].keys()
    assert held_out[-1]["eval_loss"] < held_out[0]["eval_loss"]
    if method in REFERRED:
        assert held_out[0]["eval_rewards/chosen"] == pytest.approx(0, abs=1e-4), "its own reference"
        assert held_out[-1]["eval_rewards/margins"] > held_out[0]["eval_rewards/margins"]
    last, found = held_out[-1], megatrain("eval whole --json").json
    assert found["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    for name in FURTHER[method]:
        assert found[f"eval_{name}"] == pytest.approx(last[f"eval_{name}"], rel=1e-4, abs=1e-5)
    assert "perplexity" not in found
    if method not in OF_PAIRS_ALONE:
        resumed_from_the_middle(megatrain, project)


def resumed_from_the_middle(megatrain: Command, project: Path) -> Answer:
    """The finished run `whole` of ten steps is that of five and five more."""
    cut_back(Path(shutil.copytree(project / "whole", project / "halves", symlinks=True)))
    resumed = megatrain("resume halves")
    same_run(project / "whole", project / "halves")
    return resumed


def references() -> list[Path]:
    return sorted((default_cache() / "reference").iterdir())


@pytest.mark.slow
def test_the_reference_is_computed_once_unless_what_is_kept_is_damaged(
    megatrain, project, of_method
):
    options = [*of_method("dpo"), "train.max_steps=1"]
    once = "log-probabilities: a forward over"
    assert megatrain("train cfg.yaml", *options, "output=one").err.count(once) == 2, "held out, too"
    whole = [path.read_bytes() for path in references()]
    assert len(whole) == 2
    again = megatrain("train cfg.yaml", *options, "dpo.beta=0.5", "output=two")
    assert once not in again.err
    for path in references():
        flip(path)
    again = megatrain("train cfg.yaml", *options, "output=three")
    assert again.err.count("is damaged; the reference's log-probabilities are computed") == 2
    assert [path.read_bytes() for path in references()] == whole
    changed = megatrain("train cfg.yaml", *options, "precision=bfloat16", "output=four")
    assert once in changed.err


def test_a_reference_of_another_model_is_noticed_at_the_first_step(
    megatrain, project, of_method, monkeypatch
):
    for method in REFERRED:
        options = [*of_method(method), "train.max_steps=2", f"output={method}"]
        with monkeypatch.context() as patch:
            patch.setattr(
                reference, "kept", lambda of_model, rows: np.zeros((len(rows), rows.sides))
            )
            error = megatrain("train cfg.yaml", *options, code=3).err
        assert re.search(r"step 1: rewards/chosen is -\d.* where it begins at 0: the refer", error)
        assert not (project / method / "checkpoint-2").exists()


def test_a_reference_has_a_name_of_all_that_it_follows_from_and_of_nothing_else(monkeypatch):
    def name(seed: int = 0, precision: str = "float32", **changes: Any) -> str:
        settings = changes.pop("settings", None)
        config = tiny_config("llama", **changes)
        weights = plain_model(config, seed=seed)
        given: Any = {"weights": weights, "precision": precision, "settings": settings}
        with engine_of(config, **given) as engine:
            return reference.reference_key(engine)

    rope = {"rope_type": "default", "rope_theta": 100.0}
    names = [
        *(name(), name(seed=1), name(precision="bfloat16")),
        *(name(rms_norm_eps=0.1), name(rope_parameters=rope), name(max_position_embeddings=99)),
    ]
    assert len({*names}) == len(names)
    assert name(settings=Settings(retained=1), name_or_path="elsewhere") == names[0]
    monkeypatch.setattr("megatrain.recipes.verify.installed_version", lambda package: "another")
    assert name() not in names


def forwards(said: str) -> list[int]:
    """Tokens of each pass of the reference."""
    found = re.findall("log-probabilities: a forward over ([0-9,]+) tokens", said)
    return [int(tokens.replace(",", "")) for tokens in found]


@pytest.mark.slow
def test_only_rows_that_the_run_takes_have_a_reference(megatrain, project, of_method):
    options = [*of_method("dpo"), "train.epochs=null", "train.eval_rows=3", "train.rows_per_step=4"]
    options.append("train.tokens_per_step=null")
    epoch = "train.max_steps=null", "train.epochs=1"
    whole = megatrain("train cfg.yaml", *of_method("dpo"), *epoch, "output=all")
    shutil.rmtree(default_cache() / "reference")
    short, held_out = forwards(
        megatrain("train cfg.yaml", *options, "train.max_steps=2", "output=a").err
    )
    (more,) = forwards(megatrain("train cfg.yaml", *options, "train.max_steps=4", "output=b").err)
    every, every_held_out = forwards(whole.err)
    assert 0 < short < every / 3 and 0 < more < every / 3 and 0 < held_out < every_held_out
    again = megatrain("train cfg.yaml", *options, "train.max_steps=4", "output=c").err
    assert forwards(again) == []
    one, two = (load_file(project / run / "final" / "model.safetensors") for run in ("b", "c"))
    assert differing(one, two) == []


@pytest.mark.slow
def test_a_run_that_is_made_longer_asks_the_model_that_it_began_with(megatrain, project, of_method):
    steps = ["train.rows_per_step=4", "train.tokens_per_step=null", "train.epochs=null"]
    steps.append("train.schedule=constant")
    options = [*of_method("dpo"), *steps, "train.warmup=0", "checkpoint.final=full"]
    megatrain("train cfg.yaml", *options, "train.max_steps=2", "output=longer")
    assert len(forwards(megatrain("resume longer train.max_steps=4").err)) == 1
    shutil.rmtree(default_cache() / "reference")
    megatrain("train cfg.yaml", *options, "train.max_steps=4", "output=whole")
    losses = [[row["loss"] for row in steps_of(project / run)] for run in ("longer", "whole")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == 4
    # smaller steps from the start would not come as far
    megatrain("resume longer train.max_steps=6 train.rows_per_step=2")
    assert [row["skipped"] for row in steps_of(project / "longer")] == 6 * [False]


def test_what_is_known_outlives_a_kill(megatrain, of_method, monkeypatch):
    options = [*of_method("dpo"), "train.max_steps=8"]
    monkeypatch.setattr("megatrain.recipes.reference.KEEP_EVERY_S", 0.0)
    asked, original = count(1), Engine.logprobs

    def killed(self: Engine, *given: Any) -> Any:
        if next(asked) == 3:
            raise KeyboardInterrupt
        return original(self, *given)

    monkeypatch.setattr(Engine, "logprobs", killed)
    first = forwards(megatrain("train cfg.yaml", *options, code=130).err)
    second = forwards(megatrain("train cfg.yaml", *options).err)
    assert 0 < second[0] < first[0] and len(second) == 2


@pytest.mark.slow
def test_a_run_whose_reference_is_gone_reads_the_model_that_it_began_with(
    megatrain, project, of_method
):
    megatrain("train cfg.yaml", *of_method("dpo"), "output=whole")
    for path in references():
        path.unlink()
    said = resumed_from_the_middle(megatrain, project).err
    assert "log-probabilities: a forward over" in said


def test_and_refuses_another_model(megatrain, project, of_method, stop_after):
    stop_after(2)
    megatrain("train cfg.yaml", *of_method("dpo"), "output=run", code=75)
    for path in references():
        path.unlink()
    # the trained weights in place of those that it began with
    model, trained = (project / "model").resolve(), project / "run" / "last"
    (project / "model").unlink()
    (project / "model").mkdir()
    for file in model.iterdir():
        source = trained / file.name if file.suffix == ".safetensors" else file
        (project / "model" / file.name).write_bytes(source.read_bytes())
    refused = megatrain("resume run", code=7)
    assert "is not the model that this run began with" in refused.err


def test_what_cannot_be_is_refused_in_a_sentence(megatrain, project):
    for options, reason in [
        (["method=dpo"], "is for method: sft"),
        (["method=simpo"], "simpo.beta: method: simpo has no default"),
        (["method=sft", "dpo.beta=0.3"], "dpo.beta: belongs to method: dpo, not to sft"),
        (["method=dpo", "dpo.loss_type=exo_pair"], "set it above 0"),
        (["method=dpo", "dpo.loss_weights=[1,2]"], "2 weights for 1 loss types"),
        (["method=kto", "train.groups=2"], "the loss is over a whole step"),
        (["method=dpo", "train.micro_batch_tokens=64"], "64 cannot hold a pair of rows"),
        (["method=dpo", "data.train_on=all"], "method: dpo trains on answers"),
        (["method=reward", "sample_prompt=hello"], "method: reward trains a model that writes no"),
        (["method=reward", "reward.center_rewards_coefficient=-1"], "must be a number above 0"),
    ]:
        code = 3 if reason == "is for method: sft" else 2
        refused = megatrain("train cfg.yaml", *options, code=code).err
        assert "Traceback" not in refused
        if code == 2:
            assert reason in refused


# How a step's work is cut and where it lies: speed and memory alone.
WAYS = (
    "data.packing=true",
    "train.micro_batch_tokens=128",
    "train.groups=3 train.micro_batch_tokens=128",
    "train.retained=0 memory.resident=0 train.head_chunk_tokens=16",
    "memory.offload_activations=true train.retained=1 memory.retained_on_host=1",
    "memory.second_backward=true memory.resident=0",
)
MIXTURE = ("model=mixture", "train.router_aux_loss_coef=0.05")
METHODS_OF = {"llama": ["sft", *FURTHER], "mixtral": ["sft", "dpo", "kto"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method"), [(m, each) for m in METHODS_OF for each in METHODS_OF[m]]
)
def test_how_a_step_is_computed_is_not_its_result(megatrain, project, of_method, method, model):
    keys = ["train.max_steps=3", "precision=float32", "checkpoint.final=none", "train.eval_every=2"]
    keys += of_method(method) if method in FURTHER else []
    if model == "mixtral":
        config = tiny_config("mixtral", vocab_size=320, max_position_embeddings=128)
        mixture: Any = plain_model(config)
        mixture.save_pretrained(project / "mixture")
        for file in (project / "model").glob("*t*.j*"):
            shutil.copy(file, project / "mixture")
        keys += MIXTURE
    names, expected = [*FURTHER.get(method, ()), "loss", "aux_loss", "grad_norm", "eval_loss"], None
    for number, way in enumerate(("train.groups=1", *WAYS)):
        if "groups=3" in way and (model == "mixtral" or method == "kto"):
            continue  # refused: balancing and kto's kl are of a whole step
        megatrain("train cfg.yaml", *keys, *way.split(), f"output=run-{number}")
        rows = metrics_of(project / f"run-{number}")
        found = [row[name] for row in rows for name in names if row.get(name) is not None]
        expected = expected or found
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-5), way
