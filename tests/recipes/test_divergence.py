"""Steps that go wrong: the way back that is printed works, spikes are seen, and a model that does
not compute is refused."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatrain.engine.gradients import Gradients
from megatrain.recipes import loop
from megatrain.recipes.state import Run
from tests.commands import evaluations_of, steps_of
from tests.files import flip
from tests.recipes.same_run import same_run

LAST = "train.max_steps=9"
COMMAND = re.compile(r"megatrain (.*)$", re.MULTILINE)


@pytest.fixture
def absurd_from_step_4() -> Iterator[pytest.MonkeyPatch]:
    """The learning rate, until it is undone."""
    sane = Run.learning_rate.fget  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        absurd = property(lambda run: 1e30 if run.step >= 3 else sane(run))
        patch.setattr(Run, "learning_rate", absurd)
        yield patch


def printed_command(said: str) -> str:
    (command,) = COMMAND.findall(said)
    return str(command)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "keep"), [("precision=bfloat16", 1), ("train.max_grad_norm=null", 3)]
)
def test_the_printed_way_back_leads_to_the_end(megatrain, project, absurd_from_step_4, how, keep):
    config = (LAST, "checkpoint.every=1", f"checkpoint.keep={keep}", how)
    lost = megatrain("train cfg.yaml", *config, code=6)
    assert "go back to checkpoint-3, the newest that a finite step followed" in lost.err
    absurd_from_step_4.undo()
    command = printed_command(lost.err)
    assert command == "resume run --checkpoint checkpoint-3 train.learning_rate=0.001"
    done = megatrain(*[command], "--json")
    assert done.json["eval_loss_after"] < done.json["eval_loss_before"]
    assert [row["step"] for row in steps_of(project / "run")] == list(range(1, 10))
    assert not any(row["skipped"] for row in steps_of(project / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("every", ["1", "null"])
def test_where_no_checkpoint_is_good_the_way_back_is_the_beginning(megatrain, project, every):
    rates = ("train.learning_rate=1e20", "train.warmup=0")
    lost = megatrain(
        "train cfg.yaml", LAST, *rates, f"checkpoint.every={every}", "data.eval=2", code=6
    )
    assert "no checkpoint was followed by a finite step: start again with a lower" in lost.err
    *command, rate = shlex.split(printed_command(lost.err))
    assert rate == "train.learning_rate=1e+19"
    again = megatrain(
        shlex.join(command), "train.learning_rate=1e-3", "train.max_steps=2", "--json"
    )
    assert again.json["steps"] == 2
    assert (project / "run-2" / "final").is_dir()


@pytest.mark.slow
def test_a_spike_in_a_gradient_is_said_counted_and_its_batch_kept(megatrain, project, monkeypatch):
    original, calls = Gradients.norm, iter(range(1, 999))
    monkeypatch.setattr(
        Gradients, "norm", lambda *given: original(*given) * (99 if next(calls) == 19 else 1)
    )
    done = megatrain("train cfg.yaml train.max_steps=20 --json")
    assert re.search(
        r"warning: step 19: the gradient norm \S+ is far above the median \S+ \(the batch is in "
        r"run/spike-19\.safetensors\)",
        done.err,
    )
    assert done.json["spikes"] == 1
    assert [row["step"] for row in steps_of(project / "run") if row["spike"]] == [19]
    batch = load_file(project / "run" / "spike-19.safetensors")
    assert sum(int((t != -100).sum()) for name, t in batch.items() if "labels" in name)


@pytest.mark.slow
def test_a_model_that_does_not_compute_is_refused_before_its_first_step(megatrain, project):
    broken = Path(shutil.copytree(project / "model", project / "broken")) / "config.json"
    broken.write_text(json.dumps(json.loads(broken.read_text()) | {"rms_norm_eps": float("nan")}))
    done = megatrain("train cfg.yaml model=broken", code=6)
    assert "the held-out loss before the first step is nan: the model's weights or sett" in done.err
    assert steps_of(project / "run") == []
    assert evaluations_of(project / "run")[0]["eval_loss"] is None


# -- another checkpoint than the newest ------------------------------------------------------------


@pytest.mark.parametrize("name", ["5", "proven"])
def test_a_run_goes_on_from_the_checkpoint_that_is_named(
    megatrain, finished_project, copied, name, monkeypatch
):
    seen: list[set[str]] = []
    original = loop.train_step

    def noted(*given: object) -> None:
        seen.append({path.name for path in copied.glob("checkpoint-*")})
        original(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "train_step", noted)
    done = megatrain("resume run --checkpoint", name)
    assert "resuming from run/checkpoint-5" in done.err
    assert seen == [{"checkpoint-5", "checkpoint-10"}] * 5, "until the next save"
    same_run(copied, finished_project / "run")


def test_what_was_abandoned_goes_with_the_next_save(megatrain, copied):
    megatrain("resume run --checkpoint 5 checkpoint.every=2 checkpoint.keep=9")
    steps = {path.name for path in copied.glob("checkpoint-*")}
    assert steps == {"checkpoint-5", "checkpoint-6", "checkpoint-8", "checkpoint-10"}


def test_a_name_without_a_checkpoint_is_refused(megatrain, copied):
    done = megatrain("resume run --checkpoint 7", code=2)
    assert "run: has no checkpoint 7; there is checkpoint-5, checkpoint-10, last, best" in done.err


def test_no_other_is_taken_for_one_that_is_named(megatrain, copied):
    flip(copied / "checkpoint-5" / "optimizer" / "block-00001.safetensors")
    done = megatrain("resume run --checkpoint 5", code=7)
    assert "checkpoint-5/optimizer/block-00001.safetensors: does not match its" in done.err
    assert (copied / "checkpoint-10").is_dir()
