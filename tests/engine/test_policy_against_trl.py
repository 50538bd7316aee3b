"""Losses of a model's own answers are those of TRL's trainers, however a step is cut."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain.engine.batches import Batch
from megatrain.engine.engine import Engine
from megatrain.engine.objective import StepResult
from megatrain.engine.verify import gradients_of
from megatrain.errors import ConfigError, DataError
from megatrain.losses import IGNORE, Policy, Rloo
from tests.engine.test_preference_steps import joined, packed
from tests.helpers.support import VOCABULARY, engine_of, plain_model, tiny_config
from tests.helpers.trl_oracle import word_tokenizer

pytest.importorskip("trl")

EOS, ROWS, LONGEST = 1, 6, 8
PROMPTS, ANSWERS = (5, 3, 4, 5, 2, 4), (7, 4, 1, 6, LONGEST, 3)
REWARDS = (0.0, 1.0, 0.5, 0.5, -0.6, 0.3)  # of groups of two, the second of which is without signal
UNCORRECTED = {"importance_sampling_correction": False}
TIGHT = {"importance_sampling_clip_max": 1.02}
PLAIN = UNCORRECTED | {"epsilon": 0.1}  # narrow, so that ratios are clipped

# Keys of Policy, and some of the oracle's alone: whether weights have moved since the rollout,
# whether the sampler says nothing of a token, whether tools wrote some tokens, and whether answers
# without an end are left out.
ORACLE_ONLY = {
    "moved": True,
    "unknown": False,
    "rloo": False,
    "tools": False,
    "mask_truncated_completions": False,
}
CASES: dict[str, dict[str, Any]] = {
    "as-it-is": {},
    "at-once": {"moved": False},
    "at-once-uncorrected": UNCORRECTED | {"moved": False},
    "dapo": PLAIN,
    "bnpo": PLAIN | {"loss_type": "bnpo"},
    "grpo": PLAIN | {"loss_type": "grpo"},
    "grpo-truncated": PLAIN | {"loss_type": "grpo", "mask_truncated_completions": True},
    "dr_grpo": PLAIN | {"loss_type": "dr_grpo"},
    "cispo": PLAIN | {"loss_type": "cispo", "epsilon_high": 1.05},
    "cispo-sequence": {"loss_type": "cispo", "importance_sampling_level": "sequence"},
    "gspo": PLAIN | {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gspo-kl": {"importance_sampling_level": "sequence", "beta": 0.3},
    "asymmetric": UNCORRECTED | {"epsilon": 0.05, "epsilon_high": 0.3},
    "two-sided": PLAIN | {"delta": 1.15, "epsilon_high": 0.05},
    "kl": {"beta": 0.4},
    "kl-biased": {"beta": 0.4, "use_bias_correction_kl": False, "loss_type": "grpo"},
    "off-policy": {"off_policy_mask_threshold": 0.02, "unknown": True},
    "off-policy-uncorrected": UNCORRECTED | {"off_policy_mask_threshold": 0.02},
    "sequence-mask": TIGHT,
    "sequence-truncate": TIGHT | {"importance_sampling_mode": "sequence_truncate"},
    "token-mask": TIGHT | {"importance_sampling_mode": "token_mask", "unknown": True},
    "token-truncate": TIGHT | {"importance_sampling_mode": "token_truncate", "beta": 0.2},
    "tools": TIGHT | {"tools": True, "beta": 0.2},
    "tools-grpo": PLAIN | {"tools": True, "loss_type": "grpo", "mask_truncated_completions": True},
    "tools-gspo": PLAIN | {"tools": True, "importance_sampling_level": "sequence"},
    "temperature": {"temperature": 0.7, "beta": 0.1, "loss_type": "dr_grpo"},
    "rloo": {"rloo": True, "epsilon": 0.8},
    "rloo-cooled": {"rloo": True, "epsilon": 0.9, "epsilon_high": 0.5, "temperature": 0.9},
}
WITHOUT = {"clip_ratio/low_min", "clip_ratio/high_max"}  # TRL's, of single rows
# ours also where nothing is corrected
ALWAYS = {f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max")}
METRICS = ("clip_ratio", "cispo_clip_ratio", "kl", "entropy", "sampling/")


@dataclass(frozen=True)
class Verdict:
    """What TRL's trainer says of a step.

    Attributes:
        rows: micro-batches of one row each.
        gradients: of the loss, by parameter.
    """

    rows: list[Batch]
    loss: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def loss_of(name: str) -> Policy:
    keys = {key: value for key, value in CASES[name].items() if key not in ORACLE_ONLY}
    kind = Rloo if CASES[name].get("rloo") else Policy
    return kind(**keys, max_completion_length=LONGEST)


def keys_of_trl(name: str) -> dict[str, Any]:
    of_sampler = [key for key in Policy.__annotations__ if key.startswith("importance_sampling_")]
    of_sampler.remove("importance_sampling_level")
    renamed = {key: f"vllm_{key}" for key in of_sampler}
    left_out = (
        "moved",
        "unknown",
        "rloo",
        "tools",
        "beta",
    )  # it would load a reference from a folder
    return {renamed.get(k, k): value for k, value in CASES[name].items() if k not in left_out}


def another_model(seed: int) -> nn.Module:
    """The model with other values, some percent away."""
    model, generator = plain_model(tiny_config("llama")), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.08 * noise * parameter.abs().mean())
    return model


@cache
def rollout() -> list[tuple[list[int], list[int], list[float]]]:
    """For each row: its prompt's tokens, its answer's, and their log-probabilities when drawn."""
    generator, model, found = torch.Generator().manual_seed(0), another_model(seed=1), []
    for number, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        ids = torch.randint(3, VOCABULARY, (1, prompt + answer), generator=generator)
        ids[0, -1] = EOS if number % 3 else ids[0, -1]
        with torch.no_grad():
            logits = model.eval()(ids).logits[0, prompt - 1 : -1].log_softmax(-1)
        logprobs = logits.gather(1, ids[0, prompt:, None])[:, 0].tolist()
        found.append((ids[0, :prompt].tolist(), ids[0, prompt:].tolist(), logprobs))
    return found


@cache
def judge_by_trl(name: str) -> Verdict:
    """The loss of one step of a trainer, whose answers are those of `rollout`."""
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        return judged(trainer_of(name, folder), loss_of(name), ORACLE_ONLY | CASES[name])


def trainer_of(name: str, folder: str) -> Any:
    import datasets
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    rloo = CASES[name].get("rloo", False)
    keys: dict[str, Any] = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    keys |= {"per_device_train_batch_size": ROWS, "num_generations": 2, "report_to": "none"}
    keys |= keys_of_trl(name) | {"max_completion_length": LONGEST}
    datasets.disable_progress_bars()
    trainer: Any = RLOOTrainer if rloo else GRPOTrainer
    config: Any = RLOOConfig if rloo else GRPOConfig
    made = trainer(
        model=plain_model(tiny_config("llama")),
        reward_funcs=[lambda completions, **_: [*REWARDS]],
        args=config(output_dir=folder, **({"beta": 0.0} if rloo else {}), **keys),
        train_dataset=datasets.Dataset.from_list([{"prompt": "the of"}] * ROWS),
        processing_class=word_tokenizer(),
    )
    datasets.enable_progress_bars()  # warns where a recipe ran before, which turns them off
    return made


def judged(trainer: Any, loss: Policy, about: dict[str, Any]) -> Verdict:
    from trl.trainer.utils import add_fused_lm_head

    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    if about["moved"]:
        trainer.model.load_state_dict(another_model(seed=2).state_dict())
        trainer.num_iterations = 2  # so that it takes log-probabilities before a step
    # only then it corrects, and it may not be configured without an installed vLLM
    trainer.use_vllm = loss.importance_sampling_correction
    trainer.beta, trainer.current_gradient_accumulation_steps = loss.beta, 1
    if loss.beta:
        trainer.ref_model = another_model(seed=3)
        add_fused_lm_head(trainer.ref_model, temperature=loss.temperature)
    prompts, answers, logprobs = ([*column] for column in zip(*rollout(), strict=True))
    if about["unknown"]:
        logprobs[1] = [None, *logprobs[1][1:]]
    masks: Any = None
    if about["tools"]:
        masks = [[int(n % 4 != 1) for n in range(len(ids))] for ids in answers]
    written: Any = prompts, answers, masks, [""] * ROWS, logprobs, {}, None, None
    if about["rloo"]:
        written = prompts, answers, [""] * ROWS
    trainer._generate = lambda _: written
    inputs = trainer._generate_and_score_completions([{"prompt": "the of"}] * ROWS)
    trainer.model.load_state_dict(weights)
    trainer.model.train().zero_grad()
    found = trainer._compute_loss(trainer.model, inputs)
    found.backward()
    gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    metrics = {n: v[-1] for n, v in trainer._metrics["train"].items() if n.startswith(METRICS)}
    return Verdict(ours(inputs), float(found.detach()), gradients, metrics)


def ours(inputs: dict[str, Tensor]) -> list[Batch]:
    """A batch of TRL's as micro-batches of one row each."""
    names = {
        "token_sampled": "sampling_per_token_logps",
        "token_old": "old_per_token_logps",
        "token_reference": "ref_per_token_logps",
    }
    rows: list[Batch] = []
    for number, (prompt, answer, _) in enumerate(rollout()):
        ids, in_answer = torch.tensor([[*prompt, *answer]]), slice(len(prompt), None)
        trained = inputs["completion_mask"][number, : len(answer)] > 0
        if "tool_mask" in inputs:
            trained &= inputs["tool_mask"][number, : len(answer)] > 0
        labels = torch.full_like(ids, IGNORE)
        labels[0, in_answer] = torch.where(trained, ids[0, in_answer], IGNORE)
        row = {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": torch.ones_like(ids),
            "row_advantage": inputs["advantages"][number, None],
        }
        for name, theirs in names.items():
            if theirs in inputs:
                row[name] = torch.zeros(ids.shape)
                row[name][0, in_answer] = inputs[theirs][number, : len(answer)]
        if "old_logps" in inputs:  # of the whole answer, and only that counts
            row["token_old"] = torch.zeros(ids.shape)
            row["token_old"][0, len(prompt)] = inputs["old_logps"][number]
        rows.append(row)
    return rows


def cut(rows: list[Batch], size: int) -> list[Batch]:
    """Micro-batches of `size` padded rows."""
    return [joined(rows[i : i + size]) for i in range(0, len(rows), size)]


CUTS: dict[str, Callable[[list[Batch]], list[Batch]]] = {
    "in one": lambda rows: cut(rows, ROWS),
    "in twos": lambda rows: cut(rows, 2),
    "in ones": lambda rows: cut(rows, 1),
    "packed": lambda rows: [packed(rows[:3]), packed(rows[3:])],
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of("llama") as made:
        yield made


def computed(
    engine: Engine, batches: list[Batch], loss: Policy
) -> tuple[StepResult, dict[str, Tensor]]:
    """The result of a step that changes nothing, and its gradients."""
    result = engine.forward_backward(batches, loss)
    gradients = gradients_of(engine)
    engine.step(lr=0.0)
    return result, gradients


def compare(theirs: Verdict, result: StepResult, gradients: dict[str, Tensor]) -> None:
    """The loss and every parameter's gradient."""
    assert abs(result.loss - theirs.loss) < 1e-6
    assert gradients.keys() == theirs.gradients.keys()
    for tensor, expected in theirs.gradients.items():
        apart = (gradients[tensor] - expected).abs().max() / expected.abs().max()
        assert float(apart) < 1e-5, tensor


def cases(*fast: tuple[str, str], without_reference: bool = False) -> list[Any]:
    """(case, cut), slow but for some."""
    return [
        pytest.param(name, how, marks=[] if (name, how) in fast else pytest.mark.slow)
        for name, keys in CASES.items()
        for how in CUTS
        if not (without_reference and "beta" in keys)
    ]


IN_TWOS, PACKED = [(name, "in twos") for name in CASES], ("gspo-kl", "packed")


@pytest.mark.parametrize(("name", "how"), cases(*IN_TWOS, PACKED))
def test_loss_gradients_and_metrics_are_those_of_trl(name, how, engine):
    theirs, loss = judge_by_trl(name), loss_of(name)
    wanted = theirs.metrics.keys() - WITHOUT
    result, gradients = computed(engine, CUTS[how](theirs.rows), loss)
    compare(theirs, result, gradients)
    assert result.metrics.keys() - ALWAYS == wanted - ALWAYS
    for metric in wanted:
        expected = pytest.approx(theirs.metrics[metric], rel=1e-5, abs=1e-6)
        assert result.metrics[metric] == expected, metric


FAST = [("dapo", "in twos"), ("grpo", "in ones"), ("gspo", "packed")]


@pytest.mark.parametrize(("name", "how"), cases(*FAST, without_reference=True))
def test_rows_without_advantage_may_be_left_out(name, how, engine):
    theirs, loss = judge_by_trl(name), loss_of(name)
    kept, left_out = [[*theirs.rows[:2], *theirs.rows[4:]], theirs.rows[2:4]]
    assert not any(row["row_advantage"].any() for row in left_out)
    tokens = sum(int((row["labels"] != IGNORE).sum()) for row in left_out)
    more = {"step_tokens": torch.tensor([tokens]), "step_rows": torch.tensor([len(left_out)])}
    first, *others = CUTS[how](kept)
    result, gradients = computed(engine, [{**first, **more}, *others], loss)
    compare(theirs, result, gradients)
    for metric in result.metrics:
        if "clip_ratio" in metric:
            assert result.metrics[metric] == pytest.approx(theirs.metrics[metric], rel=1e-5)


def test_without_other_weights_before_the_step_they_are_its_own(engine):
    theirs, loss = judge_by_trl("at-once"), loss_of("at-once")
    assert all("token_old" in row for row in theirs.rows)
    rows: list[Batch] = [
        {key: value for key, value in row.items() if key != "token_old"} for row in theirs.rows
    ]
    compare(theirs, *computed(engine, cut(rows, 2), loss))


def test_rows_none_of_whose_answers_count_teach_nothing():
    rows: list[Batch] = [
        {**row, "labels": torch.full_like(row["labels"], IGNORE)} for row in ours_at_once()
    ]
    with engine_of("mixtral", router_aux_loss_coef=0.1) as engine:
        result = engine.forward_backward(cut(rows, 2), Policy())
    assert (result.loss, result.metrics) == (0.0, {})


def ours_at_once() -> list[Batch]:
    return judge_by_trl("at-once").rows


def test_what_is_no_option_and_what_a_micro_batch_lacks_is_said(engine):
    for key in ("loss_type", "importance_sampling_level", "importance_sampling_mode"):
        with pytest.raises(ConfigError, match=f"{key}: 'vespo' is unknown; use one of"):
            Policy(**{key: "vespo"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="temperature: must be above 0"):
        Policy(temperature=0.0)
    batch = {**cut(ours_at_once(), ROWS)[0]}
    without = {key: value for key, value in batch.items() if key != "token_sampled"}
    wrong: list[tuple[Batch, Policy, str]] = [
        (without, Policy(), "no token_sampled"),
        (batch, Policy(beta=0.1), "no token_reference"),
        (batch | {"token_old": torch.zeros(2, 2)}, Policy(), "token_old of micro-batch 0 must"),
        (batch | {"row_advantage": torch.zeros(2)}, Policy(), "row_advantage of micro-batch 0"),
        (
            batch | {"token_reference": batch["token_sampled"], "step_rows": torch.ones(1)},
            Policy(beta=0.1),
            "leaves out rows",
        ),
    ]
    for changed, loss, reason in wrong:
        with pytest.raises(DataError, match=reason):
            engine.forward_backward([changed], loss)
