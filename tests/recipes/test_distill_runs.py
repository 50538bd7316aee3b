"""Distillation by a frozen teacher: divergences and gradients are TRL's, and a student learns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.engine.verify import gradients_of
from megatrain.losses import Distillation
from megatrain.losses.divergence import divergences
from megatrain.optim.optimizer import Frozen
from megatrain.recipes.frozen import taught
from megatrain.settings import Settings
from tests.helpers.commands import evaluations_of, steps_of
from tests.helpers.support import engine_of, full_batches, plain_model, tiny_config

BETAS = (0.0, 0.3, 1.0)
KEYS = ("method=distill", "distill.teacher_model_name_or_path=teacher", "precision=float32")


def of_trl(hidden: Any, theirs: Any, heads: Any, mask: Any, beta: float, temperature: float) -> Any:
    from trl.trainer.distillation_trainer import _chunked_divergence_loss as divergence_loss

    ask: Any = divergence_loss
    return ask(hidden, theirs, *heads, mask, beta, temperature=temperature)[0]


@pytest.mark.parametrize("beta", BETAS)
def test_divergences_and_gradients_are_trl_s(beta):
    generator = torch.Generator().manual_seed(0)
    hidden, theirs = (torch.randn(1, 12, size, generator=generator) for size in (8, 16))
    heads = [torch.randn(40, size, generator=generator) for size in (8, 16)]
    for tensor in (hidden, heads[0]):
        tensor.requires_grad_()
    wanted = of_trl(hidden, theirs, heads, torch.ones(1, 12), beta, 1.5)
    expected = torch.autograd.grad(wanted, [hidden, heads[0]])
    logits = hidden[0] @ heads[0].T
    found = divergences(logits, theirs[0] @ heads[1].T, beta, 1.5).mean()
    assert found.item() == pytest.approx(wanted.item(), abs=1e-6)
    for ours, trls in zip(torch.autograd.grad(found, [hidden, heads[0]]), expected, strict=True):
        torch.testing.assert_close(ours, trls, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_engine_s_loss_and_gradients_are_plain_pytorch_s(tied):
    """Streamed teacher and student, whose logits never exist whole."""
    sizes = ({"hidden_size": 32}, {"hidden_size": 48})
    configs = [tiny_config("llama", tie_word_embeddings=tied, **size) for size in sizes]
    models = [plain_model(config, seed=seed) for seed, config in enumerate(configs)]
    loss, batches = Distillation(0.3, 2.0), full_batches(0)
    settings = Settings(head_chunk_tokens=4)
    student = engine_of(configs[0], weights=models[0], max_grad_norm=1e9, settings=settings)
    loss.teacher = engine_of(
        configs[1], weights=models[1], max_grad_norm=1e9, optimizer=Frozen(), settings=settings
    )
    with student, loss.teacher:
        with taught(loss, batches) as given:
            held_out = student.evaluate(given, loss).loss
            found = student.forward_backward(given, loss).loss
        gradients = gradients_of(student)
        ids = torch.cat([batch["input_ids"] for batch in batches])
        flat = [model(ids).logits[:, :-1].flatten(0, 1) for model in models]
        plain = divergences(flat[0] * 1.0, flat[1].detach(), 0.3, 2.0).mean()
        plain.backward()
    assert found == pytest.approx(plain.item(), rel=1e-5) and held_out == pytest.approx(found)
    for name, parameter in models[0].named_parameters():
        if name in gradients:
            wanted = parameter.grad
            torch.testing.assert_close(gradients[name], wanted, atol=1e-6, rtol=1e-4)


@pytest.fixture
def teacher(project: Path) -> Path:
    """A wider model of the same vocabulary."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(project / "model")
    sizes: Any = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512}
    counts: Any = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **counts, initializer_range=0.1)
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(project / "teacher")
    tokenizer.save_pretrained(project / "teacher")
    return project / "teacher"


@pytest.mark.parametrize("packing", ["false", "true"])
def test_half_of_the_steps_are_of_its_own_answers(megatrain, project, teacher, packing):
    keys = (
        *(*KEYS, "distill.lmbda=0.5", "distill.max_completion_length=6"),
        *(f"data.packing={packing}", "train.learning_rate=0.01", "train.schedule=constant"),
        "train.max_steps=12",
    )
    megatrain("train cfg.yaml checkpoint.every=4", *keys, "output=whole")
    steps = steps_of(project / "whole")
    written = [row for row in steps if row["shares"].get("rollout", 0) > 0]
    assert 2 < len(written) < 10 and all(row["tokens"] > 0 for row in steps)
    losses = [row["eval_loss"] for row in evaluations_of(project / "whole")]
    assert losses[-1] < 0.8 * losses[0]
    megatrain("train cfg.yaml checkpoint.every=4", *keys[:-1], "train.max_steps=4")
    megatrain("resume run train.max_steps=12")
    assert [row["loss"] for row in steps_of(project / "run")] == [row["loss"] for row in steps]


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_student_comes_nearer_to_its_teacher(megatrain, project, teacher, beta):
    keys = (*KEYS, f"distill.beta={beta}")
    more = ("train.learning_rate=0.01", "train.max_steps=20")
    done = megatrain("train cfg.yaml --json", *keys, *more)
    assert done.json["eval_loss_after"] < 0.6 * done.json["eval_loss_before"]
    assert len(steps_of(project / "run")) == 20
    found = megatrain("eval run --json").json
    last = evaluations_of(project / "run")[-1]["eval_loss"]
    assert found["eval_loss"] == pytest.approx(last, rel=1e-5) and "perplexity" not in found
    # the teacher alone is at no distance from itself
    same = megatrain("train cfg.yaml --json", *keys, "model=teacher", "output=same").json
    assert same["eval_loss_before"] < 1e-6


def test_a_run_that_goes_on_is_the_run_that_never_stopped(megatrain, project, teacher, monkeypatch):
    keys = (*KEYS, "train.learning_rate=0.01", "train.schedule=constant", "checkpoint.every=3")
    megatrain("train cfg.yaml", *keys, "output=whole", "train.max_steps=6")
    megatrain("train cfg.yaml", *keys, "train.max_steps=3")
    shutil.copytree(project / "run", project / "other", symlinks=True)
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    megatrain("resume ../run train.max_steps=6")
    monkeypatch.chdir(project)
    weights = teacher / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + bytes(8))
    swapped = megatrain("resume other train.max_steps=6", code=7).err
    assert "its teacher has changed since; bring that model back" in swapped
    losses = [[row["loss"] for row in steps_of(project / name)] for name in ("whole", "run")]
    assert losses[0] == losses[1] and len(losses[1]) == 6


def test_what_cannot_teach_is_refused_and_what_teaches_is_planned(megatrain, project, teacher):
    missing = megatrain("train cfg.yaml method=distill", code=2).err
    assert "distill.teacher_model_name_or_path: is missing: name the teacher's" in missing
    described = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    first, *_, last = vocabulary
    vocabulary[first], vocabulary[last] = vocabulary[last], vocabulary[first]
    (teacher / "tokenizer.json").write_text(json.dumps(described))
    other = megatrain("train cfg.yaml", *KEYS, code=2).err
    assert "teacher: has another vocabulary: " in other and "'s token" not in other
    texts = megatrain("train cfg.yaml", *KEYS, "distill.lmbda=1", "data.train_on=all", code=2).err
    assert "distill.lmbda: writes answers to prompts: set data.train_on: assistant" in texts
    plan = megatrain("plan cfg.yaml --json", *KEYS).json
    assert plan["host"]["teacher's weights"] > 4 * 64 * 64 and plan["timing"]["phases"]["teacher"]
    several = ("--gpu", "H100", "--ram", "256GiB", "--gpus", "2")
    ranks = megatrain("plan cfg.yaml", *KEYS, *several, code=2).err
    assert "frozen models beside a run on several GPUs are not built yet" in ranks
