"""Runs on answers that the model writes, from the command line: rewards rise, and a run that was
killed is the run that was not."""

from __future__ import annotations

import itertools
import shutil
import signal
from pathlib import Path

import pytest

from megatrain.engine.engine import Engine
from megatrain.recipes import report
from tests.helpers.commands import metrics_of, write_jsonl
from tests.helpers.pages import block, curve, data_of
from tests.helpers.ranks import Started
from tests.recipes.same_run import CLOCK, same_run

REWARDS = """
def copies(prompts, completions, **columns):
    pairs = zip(prompts, completions)
    return [sum(a == b for a, b in zip(prompt, text)) / 2 for prompt, text in pairs]

def short(completion_ids, log_metric, weight, **columns):
    assert weight == [1] * len(completion_ids)
    log_metric("drawn", sum(map(len, completion_ids)))
    return [1.0 if len(ids) < 2 else None for ids in completion_ids]
"""
CONFIG = """
model: model
method: grpo
data: {train: prompts.jsonl, eval: null}
train: {max_steps: 10, learning_rate: 0.01, warmup: 0, schedule: constant}
grpo: {num_generations: 4, max_completion_length: 2}
rollout: {generation_batch_size: 16}
rewards: {functions: ["rewards.py:copies"], processes: 1}
checkpoint: {every: 2}
threads: 1
device: cpu
precision: float32
output: run
"""
TRL_NAMES = {
    *("reward", "reward_std", "frac_reward_zero_std", "rewards/copies/mean", "rewards/copies/std"),
    *("completions/mean_length", "completions/min_length", "completions/max_length"),
    *("completions/clipped_ratio", "completions/mean_terminated_length", "entropy"),
    *("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
    *("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
    "sampling/importance_sampling_ratio/mean",
}


@pytest.fixture
def task(project: Path) -> Path:
    (project / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": a + b, "weight": 1} for a, b in itertools.product("abcd", repeat=2)]
    write_jsonl(project / "prompts.jsonl", rows)
    (project / "rl.yaml").write_text(CONFIG)
    return project


def rewards_of(run: Path) -> list[float]:
    return [line["reward"] for line in metrics_of(run) if "reward" in line]


def test_rewards_rise_and_metrics_have_trl_s_names(megatrain, task):
    options = ["train.max_steps=45", "rollout.generation_batch_size=64", "grpo.num_generations=8"]
    megatrain("train rl.yaml", *options, "checkpoint.every=null")
    rewards = rewards_of(task / "run")
    assert len(rewards) == 45 and sum(rewards[:3]) / 3 < 0.05 and sum(rewards[-5:]) / 5 > 0.2
    lines = metrics_of(task / "run")
    assert lines[0].keys() >= TRL_NAMES
    # the sampler computes what the trainer computes
    worst = max(line["sampling/sampling_logp_difference/max"] for line in lines)
    assert worst < 1e-4
    shares = lines[-1]["shares"]
    assert shares["rollout"] > 0 and sum(shares.values()) == pytest.approx(1, abs=0.01)


MODES = {
    "one step": [],
    "two steps, twice": ["rollout.steps_per_generation=2", "grpo.num_iterations=2"],
    "cut tokens, two functions": [
        *("rollout.top_p=0.9", "rollout.top_k=50", "rollout.temperature=1.3", "data.eval=4"),
        *("rewards.functions=[rewards.py:copies, rewards.py:short]", "grpo.loss_type=grpo"),
        *("rewards.reward_weights=[1.0, 0.5]", "grpo.mask_truncated_completions=true"),
        "train.eval_every=5",
    ],
    "prompts without signal replaced": ["grpo.dynamic_sampling=true"],
    "held to a reference": ["grpo.beta=0.1", "grpo.num_iterations=2"],
}


def fails() -> None:
    raise RuntimeError("the machine is gone")


def is_asked_to_stop() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("how", "code"), [(fails, 1), (is_asked_to_stop, 75)])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    megatrain, task, mode, how, code, monkeypatch
):
    """It stops after some answers of a rollout, which are not written again."""
    options = MODES[mode]
    megatrain("train rl.yaml", *options, "output=whole")
    written, whole = [], Engine.rollout

    def stopped(engine, requests, *args):
        for answer in whole(engine, requests, *args):
            written.append((answer.key, answer.number))
            if len(written) == (101 if "replaced" in mode else 41):
                how()
            yield answer

    monkeypatch.setattr(Engine, "rollout", stopped)
    megatrain("train rl.yaml", *options, "output=run", code=code)
    known = {file: file.read_bytes() for file in (task / "run/rollouts").glob("*.jsonl")}
    megatrain("resume run")
    same_run(task / "whole", task / "run", rounding=True)
    for file in filter(Path.exists, known):
        assert file.read_bytes().startswith(known[file]), "an answer on disk is written anew"
    if mode == "two steps, twice":  # it ends amid a rollout
        line = "resume run train.max_steps=12"
        cut = megatrain(line, "rollout.steps_per_generation=1", code=3).err
        assert "within a rollout of another size than" in cut
        more = "rewards.functions=[rewards.py:copies, rewards.py:short]"
        assert "or rewards by these functions" in megatrain(line, more, code=7).err


def test_a_torn_journal_is_cut_and_another_run_s_is_not_used(megatrain, task):
    megatrain("train rl.yaml", "output=whole")
    megatrain("train rl.yaml", "train.max_steps=10", "checkpoint.keep=9")
    run = task / "run"
    newest = run / "rollouts/000008.jsonl"
    lines = newest.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 16 + 4
    changed = lines[3].replace(b'"finish":"', b'"finish":" ')
    newest.write_bytes(b"".join([*lines[:3], changed, *lines[4:]]))
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoint-10")
    assert "torn or changed are cut off" in megatrain("resume run").err
    same_run(task / "whole", run, rounding=True)
    assert newest.read_bytes().splitlines()[:3] == [line[:-1] for line in lines[:3]]
    for path in ("final", "checkpoint-10"):
        shutil.rmtree(run / path)
    said = megatrain("resume run", "train.learning_rate=0.02").err
    assert f"{newest.relative_to(task)}: is of other settings" in said


@pytest.mark.parametrize("packing", ["false", "true"])
def test_two_ranks_write_and_train_the_run_of_one(megatrain, finished_project, task, packing):
    """Also where one of them does not come back."""
    line = f"train rl.yaml data.packing={packing} data.eval=3 train.eval_every=5"
    line += " rollout.steps_per_generation=2 grpo.mask_truncated_completions=true"
    megatrain(f"{line} output=alone")
    assert Started(2, line).wait() == [0, 0]
    run = task / "run"
    known = [*(run / "rollouts").glob("000007*.jsonl")]
    assert len(known) == 2
    for name in ("final", "checkpoint-10"):
        shutil.rmtree(run / name)
    before = [path.read_bytes() for path in known]
    megatrain("resume run")
    assert [path.read_bytes() for path in known] == before, "an answer is written anew"
    for a, b in zip(metrics_of(task / "alone"), metrics_of(run), strict=True):
        figures = {n: v for n, v in a.items() if n not in CLOCK and isinstance(v, float)}
        assert {n: b[n] for n in figures} == pytest.approx(figures, rel=1e-3, abs=1e-5), a["step"]


MARKUP = "<script>document.title = 'broken'</script>"


def test_the_report_shows_rewards_answers_and_where_the_time_goes(megatrain, task, monkeypatch):
    rows = [{"prompt": MARKUP + letter, "weight": 1} for letter in "abcdefghij"]
    write_jsonl(task / "prompts.jsonl", rows)
    functions = "rewards.functions=[rewards.py:copies, rewards.py:short]"
    options = ["rewards.reward_weights=[1.0, 0.5]", "data.eval=2", "train.eval_every=5"]
    shown = "grpo.scale_rewards=none"
    megatrain("train rl.yaml", functions, *options, shown, "train.seq_len=128", "checkpoint.keep=1")
    (task / "run/report.html").unlink()
    megatrain("report run")
    html, lines = (task / "run/report.html").read_text(), metrics_of(task / "run")
    assert "<script>document" not in html
    data = data_of(html)
    curves = {
        ("reward", "reward"): "reward",
        ("reward", "reward (held out)"): "eval_reward",
        ("reward", "copies"): "rewards/copies/mean",
        ("reward", "copies (held out)"): "eval_rewards/copies/mean",
        ("reward_std", "copies"): "rewards/copies/std",
        ("completions", "mean_length"): "completions/mean_length",
        ("completions that ended", "max_terminated_length"): "completions/max_terminated_length",
        ("completions, clipped ratio", "clipped ratio"): "completions/clipped_ratio",
        ("entropy", "entropy"): "entropy",
        ("clip_ratio", "high_mean"): "clip_ratio/high_mean",
        ("sampling_logp_difference", "mean"): "sampling/sampling_logp_difference/mean",
        ("importance_sampling_ratio", "max"): "sampling/importance_sampling_ratio/max",
    }
    for (title, label), name in curves.items():
        expected = {line["step"]: line[name] for line in lines if line.get(name) is not None}
        assert expected and curve(data, title, label) == pytest.approx(expected, rel=1e-5), name
    for words, name in (("writing answers", "rollout"), ("waiting for rewards", "reward")):
        shares = {line["step"]: line["shares"][name] for line in lines if "shares" in line}
        assert curve(data, "where the time of a step goes", words) == shares
    glance = {card["name"]: card["values"][0] for card in data["blocks"][0]["cards"]}
    assert f"{lines[-1]['eval_reward']:.4f} now" in glance["held-out reward"]
    table = block(data, "answers that step 10 learnt from")
    assert table["head"] == ["prompt", "answer", "copies", "short", "advantage"]
    assert len(table["rows"]) == 16 and all(row[0].startswith(MARKUP) for row in table["rows"][::4])
    for group in range(0, 16, 4):
        rows = table["rows"][group : group + 4]
        rewards = [float(a) + 0.5 * float(b.replace("–", "0")) for _, _, a, b, _ in rows]
        worth = [reward - sum(rewards) / 4 for reward in rewards]
        assert [float(row[-1]) for row in rows] == pytest.approx(worth, abs=1e-3)
    last = [line for line in lines if "loss" in line][-1]
    rewards = [float(row[2]) for row in table["rows"]]
    assert sum(rewards) / 16 == pytest.approx(last["rewards/copies/mean"], abs=1e-3)
    monkeypatch.setattr(report, "ROWS", 10)
    megatrain("report run run --output two.html")
    title = "answers that step 10 learnt from, 2 of 4 prompts, run"
    tables = [one for one in data_of(Path("two.html").read_text())["blocks"] if "rows" in one]
    assert [(one["title"], one["rows"]) for one in tables] == [(title, table["rows"][:8])] * 2


def test_held_out_prompts_are_rewarded_and_choose_the_best(megatrain, task):
    options = "data.eval=4 train.eval_every=2 rollout.eval_generations=3"
    megatrain(f"train rl.yaml {options} train.tokens_per_step=null")  # which follows from rollout
    found = [line for line in metrics_of(task / "run") if "eval_reward" in line]
    assert [line["step"] for line in found] == [0, 2, 4, 6, 8, 10]
    assert found[0].keys() >= {"eval_pass@3", "eval_completions/mean_length", "eval_reward_std"}
    assert "judge answers: `megatrain rollout" in megatrain("eval run", code=2).err
    best = max(found[1:], key=lambda line: line["eval_reward"])
    assert (task / "run/best").exists() or best["eval_reward"] == 0


REFUSED = {
    "train.tokens_per_step=100": "follows from rollout.generation_batch_size",
    "grpo.dynamic_sampling=true train.epochs=1": "needs train.max_steps, and no epochs",
    "rollout.generation_batch_size=10": "is no multiple of grpo.num_generations 4",
    "rewards.functions=model": "is a language model, which gives no scores",
    "rewards.functions=[]": "name what rewards answers",
    "rewards.functions=[rewards.py:nothing]": "has no function nothing",
    "rewards.functions=[nothing.py:copies]": "nothing.py: no such file",
    "rewards.reward_weights=[1,2]": "needs a weight for each",
    "grpo.loss_type=sapo": "not built yet",
    "grpo.num_generations=1": "grpo.num_generations",
    "data.train_on=all": "trains on answers",
    "data.truncation_mode=keep_end": "prompts are not cut",
    "data.prompts=alpaca": "a prompt is a text or a turn",
    "rewards.functions=[rewards.py:copies,other.py:copies]": "two are called alike",
    "train.seq_len=2": "leaves no room for a prompt",
    "method=sft": "belongs to method: grpo",
    "rewards.functions=[reward-model]": "is neither FILE.py:NAME nor",
}


def test_groups_without_signal_are_replaced_and_rloo_learns(megatrain, task):
    """Where three times the prompts do not give as many with signal, the rest stays."""
    text = CONFIG.replace("method: grpo", "method: rloo").replace("grpo: {", "rloo: {")
    (task / "rl.yaml").write_text(text)
    more = ["train.max_steps=40", "rollout.generation_batch_size=64", "rloo.num_generations=8"]
    megatrain("train rl.yaml", *more, "rloo.dynamic_sampling=true", "checkpoint.every=null")
    lines = metrics_of(task / "run")
    tried = [line["prompts_tried"] for line in lines]
    assert len(lines) == 40 and set(tried) <= {*range(8, 25)} and max(tried) == 24 > min(tried)
    for line in lines:
        assert line["frac_reward_zero_std"] == 0 or line["prompts_tried"] == 24
    rewards = rewards_of(task / "run")
    assert sum(rewards[-5:]) / 5 > 0.15 > sum(rewards[:3]) / 3


def test_what_cannot_take_effect_is_refused(megatrain, task):
    for words, reason in REFUSED.items():
        assert reason in megatrain("train rl.yaml", *words.split(), code=2).err, words
    write_jsonl(task / "prompts.jsonl", [{"prompt": "ab", "weight": 1}, {"question": "a"}])
    assert "prompts.jsonl:2: field 'prompt'" in megatrain("train rl.yaml", code=3).err
    for name in ("completions", "images", "tools", "system"):
        write_jsonl(task / "prompts.jsonl", [{"prompt": "ab", name: "a"}])
        reason = f"prompts.jsonl:1: field {name!r}: reward func"
        assert reason in megatrain("train rl.yaml", code=3).err
    write_jsonl(task / "prompts.jsonl", [{"prompt": "ab", "images": [], "image": ""}] * 16)
    assert megatrain("data rl.yaml --json").json["train"]["rows"] == 16


def test_rollout_writes_and_judges_without_training(megatrain, task):
    found = megatrain("rollout rl.yaml --prompts 3 --json").json
    assert len(found["answers"]) == 3 * 4 and found["names"] == ["copies"]
    rewards = [one["rewards"][0] for one in found["answers"]]
    assert found["reward"] == pytest.approx(sum(rewards) / 12)
    assert found["pass@1"] == pytest.approx(sum(one >= 1 for one in rewards) / 12)
    assert not (task / "run").exists()
    (task / "rewards.py").write_text(f"{REWARDS}print('imported')")
    assert "imported" in megatrain("rollout rl.yaml --prompts 1").err
    assert megatrain("data rl.yaml --json").json["train"]["rows"] == 16
    assert "rewards/copies/mean" in megatrain("rollout rl.yaml", "rollout.temperature=0.5").out
    assert "writes no answers" in megatrain("rollout cfg.yaml", code=2).err
    (task / "rewards.py").write_text(REWARDS.replace('"drawn"', '"step"'))
    line = "rollout rl.yaml rewards.functions=rewards.py:short"
    assert "logs 'step', which the run logs itself" in megatrain(line, code=3).err
