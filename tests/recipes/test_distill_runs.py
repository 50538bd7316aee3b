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
from megatrain.losses import Distillation, SampledDistillation
from megatrain.losses.divergence import divergences, likeliest
from megatrain.optim.optimizer import Frozen
from megatrain.recipes import frozen
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


def by_top_k(logits: Any, theirs: Any, top_k: int, beta: float, temperature: float) -> Any:
    kept = likeliest(theirs, top_k, temperature)
    ids, logps = kept[:, :top_k], kept[:, top_k:].contiguous().view(torch.float32)
    return divergences(logits, logps, beta, temperature, ids)


@pytest.mark.parametrize("beta", BETAS)
def test_likeliest_tokens_have_trl_s_divergence_and_autograd_s_gradients(beta, monkeypatch):
    """With TRL's bucket for all other tokens; exact where there are none."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.iw_opd.iw_opd_trainer import _add_tail_bucket, _jsd_divergence

    divergence: Any = _jsd_divergence
    generator = torch.Generator().manual_seed(0)
    logits, theirs = (3 * torch.randn(12, 40, generator=generator) for _ in range(2))
    logits.requires_grad_()
    for top_k, temperature in ((1, 1.0), (5, 1.5), (12, 1.0)):
        sides = [(one.double() / temperature).log_softmax(1) for one in (logits, theirs)]
        ids = sides[1].topk(top_k).indices
        known = torch.ones_like(ids, dtype=torch.bool)
        buckets = [_add_tail_bucket(side.gather(1, ids), known)[0] for side in sides]
        wanted = divergence(*buckets, beta, torch.ones_like(buckets[0], dtype=torch.bool))
        found = by_top_k(logits, theirs, top_k, beta, temperature).mean()
        wanted = wanted.sum(1).mean()
        assert found.item() == pytest.approx(wanted.item(), abs=1e-6)
        both = [torch.autograd.grad(one, logits)[0] for one in (found, wanted)]
        torch.testing.assert_close(*both, atol=1e-6, rtol=1e-5)
    for temperature in (1.0, 0.02):  # which leaves most tokens no probability in float32
        both = [
            by_top_k(logits, theirs, 40, beta, temperature),
            divergences(logits, theirs.clone(), beta, temperature),
        ]
        torch.testing.assert_close(*both, atol=1e-6, rtol=1e-6)
        grads = [torch.autograd.grad(one.mean(), logits)[0] for one in both]
        assert grads[0].isfinite().all() and both[0].isfinite().all()
        torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-5)


def test_a_teacher_s_judgement_of_sampled_tokens_is_plain_pytorch_s():
    configs = [tiny_config("llama", hidden_size=size) for size in (32, 48)]
    models = [plain_model(config, seed=seed) for seed, config in enumerate(configs)]
    loss, batches = SampledDistillation(temperature=2.0), full_batches(0)
    student = engine_of(configs[0], weights=models[0], max_grad_norm=1e9)
    loss.whole.temperature = 2.0
    loss.whole.teacher = engine_of(
        configs[1], weights=models[1], max_grad_norm=1e9, optimizer=Frozen()
    )
    with student, loss.whole.teacher:
        with taught(loss, batches) as given:
            found = student.forward_backward(given, loss).loss
        gradients = gradients_of(student)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    flat = [(m(ids).logits[:, :-1] / 2.0).log_softmax(-1) for m in models]
    ours, theirs = (one.gather(-1, ids[:, 1:, None]) for one in flat)
    assert found == pytest.approx((ours - theirs).mean().item(), abs=1e-6)
    (-((theirs - ours).detach() * ours).mean()).backward()
    for name, parameter in models[0].named_parameters():
        if name in gradients:
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4)


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
    for key, named, words in (
        ("signal=sampled", "signal", "is the reverse divergence at tokens that the model draws"),
        ("signal=sampled lmbda=1 beta=0.5", "signal", "set lmbda: 1 and beta: 1"),
        ("teacher_top_k=4 lmbda=0.5", "teacher_top_k", "is of all rows, before"),
        ("teacher_top_k=4 data.streaming=true", "teacher_top_k", "before the first step"),
        ("lmbda=1", "max_completion_length", "leaves no room for a prompt in train.seq_len 64"),
        ("teacher_top_k=4000", "teacher_top_k", "4000, and the vocabulary has 300 tokens"),
    ):
        asked = [one if one.startswith("data.") else f"distill.{one}" for one in key.split()]
        for command in ("train", "plan"):
            refused = megatrain(f"{command} cfg.yaml", *KEYS, *asked, code=2).err
            assert f"distill.{named}: " in refused and words in refused
    plan = megatrain("plan cfg.yaml --json", *KEYS, "distill.teacher_top_k=4").json
    assert "teacher's weights" not in plan["host"] and "teacher" not in plan["timing"]["phases"]
    about = (teacher / "config.json").read_text()
    (teacher / "config.json").write_text(about.replace('vocab_size": 300', 'vocab_size": 299'))
    short = "distill.max_completion_length=6"
    for more, source in (((), "rows"), (("distill.lmbda=1", short), "answers (distill.lmbda)")):
        narrow = megatrain("train cfg.yaml", *KEYS, *more, code=2).err
        assert f"has logits of 299 tokens, and {source} may have any of 300" in narrow
    (teacher / "config.json").write_text(about)
    described = json.loads((teacher / "tokenizer.json").read_text())
    merges = described["model"]["merges"]
    described["model"]["merges"] = merges[::-1]
    (teacher / "tokenizer.json").write_text(json.dumps(described))
    cut = megatrain("train cfg.yaml", *KEYS, code=2).err
    assert "teacher: cuts text into other tokens of the same vocabulary" in cut
    described["model"]["merges"] = merges
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


def test_a_teacher_that_has_written_a_file_is_needed_no_more(
    megatrain, project, teacher, monkeypatch
):
    """Of all tokens it is the teacher beside; a damaged file is written again, and no other."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(project / "cache"))
    learn = ("train.learning_rate=0.01", "train.schedule=constant", "checkpoint.every=3")
    short = (*KEYS, "distill.beta=0.5", *learn)
    keys = (*short, "train.max_steps=6")
    size = len(transformers.AutoTokenizer.from_pretrained(teacher))
    megatrain("train cfg.yaml", *keys, "output=live")
    said = megatrain("train cfg.yaml", *keys, "output=all", f"distill.teacher_top_k={size}").err
    assert f"the teacher's {size} likeliest tokens" in said and "100.00% at most" in said
    for read in (steps_of, evaluations_of):
        name = "loss" if read is steps_of else "eval_loss"
        live, whole = ([row[name] for row in read(project / one)] for one in ("live", "all"))
        assert whole == pytest.approx(live, abs=1e-6)

    few = ("distill.teacher_top_k=4", "data.packing=true")
    monkeypatch.setattr(frozen, "SWEPT_TOKENS", 256)
    asked = "of the teacher's tokens"
    assert asked in megatrain("train cfg.yaml", *keys, *few, "output=few").err
    assert asked not in megatrain("train cfg.yaml", *short, *few, "train.max_steps=3").err
    evaluated = megatrain("eval run --json")
    assert asked not in evaluated.err
    found = evaluated.json["eval_loss"]
    assert found == pytest.approx(evaluations_of(project / "run")[-1]["eval_loss"], rel=1e-5)
    files = sorted((project / "cache" / "teacher").glob("*/*"), key=lambda one: one.stat().st_size)
    changed, kept = files[0], {file: file.stat().st_mtime_ns for file in files[1:]}
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    again = megatrain("resume run train.max_steps=6").err
    assert "is damaged; what the teacher had there is computed anew" in again
    assert again.count(asked) == 1
    assert kept == {file: file.stat().st_mtime_ns for file in kept} and changed.is_file()
    whole, run = ([row["loss"] for row in steps_of(project / one)] for one in ("few", "run"))
    assert whole == run and len(run) == 6


def test_a_model_learns_from_the_judgement_of_what_it_writes(megatrain, project, teacher):
    keys = (*KEYS, "distill.signal=sampled", "distill.lmbda=1", "distill.max_completion_length=8")
    learn = ("train.learning_rate=0.01", "train.schedule=constant", "train.max_steps=24")
    done = megatrain("train cfg.yaml --json", *keys, *learn).json
    assert done["eval_loss_after"] < 0.9 * done["eval_loss_before"]
    found = megatrain("eval run --json").json
    last = evaluations_of(project / "run")[-1]["eval_loss"]  # the whole divergence
    assert found["eval_loss"] == pytest.approx(last, rel=1e-5)
