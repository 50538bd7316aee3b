"""TRL's own trainers as oracles of preference losses: their batch, loss, gradients and metrics."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.engine.batches import Batch
from megatrain.losses import IGNORE
from megatrain.models.pretrained import as_classifier
from tests.helpers.support import PAD, plain_model, tiny_config

ROWS = 6
WORDS = [
    *("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was"),
    *("for", "on", "are", "as", "with", "his", "they", "at", "be"),
]


@dataclass(frozen=True)
class Verdict:
    """What a trainer of TRL says of a batch.

    Attributes:
        rows: of the batch, as micro-batches of one row of data each.
        gradients: of the loss, by parameter.
        logps: of answers, the chosen ones first, where the trainer says them.
    """

    rows: list[Batch]
    loss: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float]
    logps: Tensor | None = None

    def micro_batches(self, size: int) -> list[Batch]:
        """The rows, `size` at a time; mismatched ones by themselves."""
        alike: dict[bool, list[Batch]] = {}
        for row in self.rows:
            alike.setdefault(bool(row.get("row_mismatched", torch.zeros(1)).any()), []).append(row)
        parts = (rows[i : i + size] for rows in alike.values() for i in range(0, len(rows), size))
        return [joined(part) for part in parts]


def joined(parts: list[Batch]) -> Batch:
    width = max(part["input_ids"].shape[1] for part in parts)
    fill = {"labels": IGNORE}
    return {
        name: torch.cat(
            [
                part[name]
                if name.startswith("row_")
                else nn.functional.pad(
                    part[name], (0, width - part[name].shape[1]), value=fill.get(name, 0)
                )
                for part in parts
            ]
        )
        for name in parts[0]
    }


def texts(seed: int, most: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(2, most, (1,), generator=generator))
    chosen = torch.randint(len(WORDS), (count,), generator=generator).tolist()
    return " ".join(WORDS[i] for i in chosen)


def pairs() -> list[dict[str, str]]:
    return [
        {
            "prompt": texts(3 * i, 6),
            "chosen": " " + texts(3 * i + 1, 9),
            "rejected": " " + texts(3 * i + 2, 7),
        }
        for i in range(ROWS)
    ]


def with_margins() -> list[dict[str, Any]]:
    return [{**row, "margin": 0.3 * i} for i, row in enumerate(pairs())]


def reward_model(config: Any) -> Any:
    return as_classifier(config, pad_id=PAD)


def judged() -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 3 != 0}
        for i, row in enumerate(pairs())
    ]


@cache
def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i + 3 for i, word in enumerate(WORDS)} | {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def judge_by_trl(trainer: Trainer, family: str, folder: Path, **keys: Any) -> Verdict:
    """The first batch of a trainer, of all rows, with another model as its reference."""
    config, keys = trainer.model(tiny_config(family)), {"max_length": 64, **keys}
    return judge(trainer, config, word_tokenizer(), folder, **keys)


def judge(trainer: Trainer, config: Any, processing: Any, folder: Path, **keys: Any) -> Verdict:
    """The same of a model's configuration. processing: a tokenizer, or a processor of images."""
    import datasets

    datasets.disable_progress_bars()
    own = {"per_device_train_batch_size": ROWS, "use_cpu": True, "bf16": False}
    references = {"ref_model": plain_model(config, seed=1)} if trainer.refers else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = trainer.of(
            model=plain_model(config, seed=0),
            args=trainer.config(output_dir=str(folder), report_to="none", **own, **keys),
            train_dataset=datasets.Dataset.from_list(trainer.rows()),
            processing_class=processing,
            **references,
        )
        inputs = next(iter(made.get_train_dataloader()))
        made.model.train().zero_grad()
        loss = made.compute_loss(made.model, inputs)
        loss.backward()
        answers = getattr(made, "compute_ref_log_probs", None)
        logps = None if answers is None else torch.cat(answers(made.model, inputs))
        datasets.enable_progress_bars()  # warns where a recipe ran before, which turns them off
    gradients = {n: p.grad for n, p in made.model.named_parameters() if p.grad is not None}
    metrics = getattr(made, "_stored_metrics", None) or made._metrics
    found = {name: float(values[-1]) for name, values in metrics["train"].items()}
    rows = trainer.ours({n: v for n, v in inputs.items() if isinstance(v, Tensor)})
    if trainer.refers:
        rows = [with_reference(row, references["ref_model"]) for row in rows]
    return Verdict(rows, float(loss.detach()), gradients, found, logps)


@torch.no_grad()
def with_reference(batch: Batch, model: nn.Module) -> Batch:
    """The micro-batch with its answers' log-probabilities under a model."""
    ours = ("labels", "row_of", "row_value", "row_mismatched", "token_answer")
    logits = model.eval()(**{name: batch[name] for name in batch if name not in ours}).logits
    labels = batch["labels"][:, 1:]
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return {**batch, "row_reference": (logprobs * (labels != IGNORE)).sum(1)}


def example(ids: Tensor, real: Tensor, answer: Tensor, **more: Tensor) -> Batch:
    """A micro-batch of rows: ids, and which tokens are real and of answers, each [rows, tokens]."""
    labels = ids.masked_fill(answer == 0, IGNORE)
    return {"input_ids": ids, "labels": labels, "attention_mask": real, **more}


def of_dpo(inputs: dict[str, Tensor]) -> list[Batch]:
    found = [inputs[name] for name in ("input_ids", "attention_mask", "completion_mask")]
    count = len(found[0]) // 2
    return [example(*(x[[i, count + i]] for x in found)) for i in range(count)]


def of_reward(inputs: dict[str, Tensor]) -> list[Batch]:
    ids, real = inputs["input_ids"], inputs["attention_mask"]
    found, count = [], len(ids) // 2
    for i in range(count):
        both = [i, count + i]
        margin = {"row_value": inputs["margin"][[i, i]]} if "margin" in inputs else {}
        found.append(example(ids[both], real[both], real[both], **margin))
    return found


def of_kto(inputs: dict[str, Tensor]) -> list[Batch]:
    rows = []
    for kind, mismatched in (("", False), ("KL_", True)):
        names = ("input_ids", "attention_mask", "completion_mask")
        found = [inputs[kind + name] for name in names]
        for i, label in enumerate(inputs["label"]):
            given = {"row_value": label[None].float(), "row_mismatched": torch.tensor([mismatched])}
            rows.append(example(*(x[i, None] for x in found), **given))
    return rows


def of_experimental(inputs: dict[str, Tensor], prompts: bool = False) -> list[Batch]:
    rows = []
    for i in range(len(inputs["chosen_labels"])):
        sides = []
        for side in ("chosen", "rejected"):
            ids, real, labels = (
                inputs[f"{side}_{name}"][i, None]
                for name in ("input_ids", "attention_mask", "labels")
            )
            answer = labels != IGNORE
            given = {"token_answer": answer} if prompts else {}
            all_of_it = prompts and side == "chosen"
            sides.append(example(ids, real, real if all_of_it else answer, **given))
        rows.append(joined(sides))
    return rows


@dataclass(frozen=True)
class Trainer:
    """A trainer of TRL, its configuration, the rows that it takes, and its batch as ours."""

    of: Callable[..., Any]
    config: Callable[..., Any]
    ours: Callable[[dict[str, Tensor]], list[Batch]]
    refers: bool = False
    rows: Callable[[], list[dict[str, Any]]] = pairs
    model: Callable[[Any], Any] = lambda config: config  # of a family's configuration


@cache
def trainers() -> dict[str, Trainer]:
    """By method. Imports TRL."""
    import trl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental import cpo, orpo

    of_reward_model = partial(Trainer, trl.RewardTrainer, trl.RewardConfig, of_reward)
    contrastive = Trainer(cpo.CPOTrainer, cpo.CPOConfig, of_experimental)
    return {
        "dpo": Trainer(trl.DPOTrainer, trl.DPOConfig, of_dpo, refers=True),
        "orpo": Trainer(orpo.ORPOTrainer, orpo.ORPOConfig, partial(of_experimental, prompts=True)),
        "cpo": contrastive,
        "simpo": contrastive,
        "kto": Trainer(trl.KTOTrainer, trl.KTOConfig, of_kto, refers=True, rows=judged),
        "reward": of_reward_model(model=reward_model),
        "reward-margins": of_reward_model(model=reward_model, rows=with_margins),
    }


def scored_by_trl(
    folder: Path,
    rows: list[dict[str, Any]],
    completions: list[Any],
    functions: list[Callable[..., Any]],
    *,
    rewards: Tensor | None = None,
    rloo: bool = False,
    **keys: Any,
) -> tuple[list[float], Any]:
    """The advantages that TRL's GRPOTrainer, or RLOOTrainer, gives completions that it is told to
    have written, a
    row for each; and the trainer, with its metrics.

    rewards: [answers, functions], instead of those that the functions give.
    """
    import datasets
    import trl

    trainer: Any = trl.RLOOTrainer if rloo else trl.GRPOTrainer
    config: Any = trl.RLOOConfig if rloo else trl.GRPOConfig
    own = {"per_device_train_batch_size": len(rows), "use_cpu": True, "bf16": False, "beta": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = trainer(
            model=plain_model(tiny_config("llama")),
            args=config(output_dir=str(folder), report_to="none", **own, **keys),
            reward_funcs=functions,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=word_tokenizer(),
        )
        ids = [[3, 4]] * len(rows)
        written: Any = (ids, ids, None, completions, None, {}, None, [])
        made._generate = lambda _: (ids, ids, completions) if rloo else written
        if rewards is not None:
            made._calculate_rewards = lambda *_: rewards
            made.reward_weights = made.reward_weights.double()
        made.model.train()
        found = made._generate_and_score_completions(rows)
    return found["advantages"].tolist(), made
