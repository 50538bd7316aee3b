"""Steps of answers that the model writes: the loader of methods whose rows are prompts.

A rollout takes some prompts, has the engine write several answers to each, has them judged while
others are still written, and hands them out as the micro-batches of one or several steps.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.config import Config
from megatrain.data.loader import StepBatch
from megatrain.data.micro_batches import MicroBatch, Regimes, runs_of
from megatrain.data.rows import SHUFFLE, check_digest, permutation
from megatrain.data.samples import PLAIN
from megatrain.engine.engine import Engine
from megatrain.engine.rollout.decode import Answer, AnswerRequest
from megatrain.engine.rollout.draw import Draw
from megatrain.errors import DataError, StorageError
from megatrain.losses import IGNORE
from megatrain.recipes.model import Model
from megatrain.recipes.rl.advantages import Advantages, advantages
from megatrain.recipes.rl.journal import Journal, forget
from megatrain.recipes.rl.judges import Group, Judgement, Judges, judges_of
from megatrain.recipes.rl.prompts import Prompt, PromptRows
from megatrain.recipes.sample import end_tokens
from megatrain.recipes.signals import Stopped
from megatrain.storage.run_folder import checkpoints, sequence_of
from megatrain.version import VERSION

HELD_OUT = 1 << 40  # keys of held-out prompts begin here
OF_WEIGHTS = (
    *("seed", "learning_rate", "schedule", "warmup", "min_lr_ratio", "decay", "epochs"),
    *("max_steps", "max_grad_norm", "freeze"),
)  # keys of train


@dataclass(frozen=True)
class RolloutPosition:
    """The position of a run: `step` steps were handed out, of which `part` are of the rollout whose
    first prompt is number `index` of the shuffle of `epoch`."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    part: int = 0


@dataclass(frozen=True)
class Rollout:
    """Answers of a rollout, group by group, with what they are worth.

    Attributes:
        old: log-probabilities of each answer's tokens under the weights that wrote it, where it is
            trained on more than once; None: the loss's own.
    """

    prompts: Sequence[Prompt]
    answers: Sequence[Answer]
    judged: Advantages
    metrics: Mapping[str, float]
    spent_s: Mapping[str, float]
    old: Sequence[Sequence[float]] | None = None

    def length(self, number: int, answers: int) -> int:
        """Tokens of an answer with its prompt; `answers`: to each prompt."""
        return len(self.prompts[number // answers].ids) + len(self.answers[number].ids)


@dataclass(eq=False, kw_only=True)
class Rollouts:
    """Iterates over StepBatch, as a Loader does, from its place to the end of the run.

    Each epoch is shuffled by (seed, epoch). A rollout takes `generation_batch_size` answers' worth
    of prompts, an epoch's last one what is left; it is cut into `steps_per_generation` steps of
    whole groups, and these are handed out `num_iterations` times. An answer follows from the
    weights, the seed, its prompt's number in the run and its own number.

    Raises DataError for prompts that fit no micro-batch.
    """

    rows: PromptRows
    held_out: PromptRows | None
    config: Config
    model: Model
    micro_batch_tokens: int
    regimes: Regimes = ()
    shuffle: int = SHUFFLE
    engine: Engine | None = None  # from the run's beginning on
    judges: Judges | None = None
    windows: None = None  # as a loader has them
    references: None = None
    place: RolloutPosition = field(default_factory=RolloutPosition)

    def __post_init__(self) -> None:
        options, rollout = self.config.grpo, self.config.rollout
        self.answers, self.iterations = options.num_generations, options.num_iterations
        self.prompts = rollout.generation_batch_size // self.answers
        self.draw = Draw(
            seed=self.config.train.seed,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
        )
        self.ends = end_tokens(self.model)

    # -- where the run stands --------------------------------------------------------------------

    def position(self) -> dict[str, int | str]:
        order = {"seed": self.config.train.seed, "shuffle": self.shuffle}
        return {**asdict(self.place), **order, "data": self.rows.digest}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises DataError if it is of other data or another seed,
        or broken."""
        check_digest(self.rows.digest, position.get("data"))
        numbers = [position.get(name) for name in asdict(self.place)]
        whole = all(type(number) is int and number >= 0 for number in numbers)
        known = {"seed": self.config.train.seed, "shuffle": self.shuffle}
        if not whole or any(position.get(name) != value for name, value in known.items()):
            raise DataError(
                f"the checkpoint's position is of another train.seed, or broken: {dict(position)}"
            )
        self.place = RolloutPosition(*numbers)  # type: ignore[arg-type]

    def used(self) -> str:
        return ""

    def steps_total(self) -> int:
        """Steps of the whole run, those handed out included."""
        options, place = self.config.train, self.place
        if options.epochs is None:
            assert options.max_steps is not None
            return options.max_steps
        total = place.step - place.part
        place = replace(place, step=total, part=0)
        while (count := self._count(place)) > 0:
            total += self._steps_of(count)
            place = self._next(place, count)
        return total if options.max_steps is None else min(total, options.max_steps)

    def _epoch_prompts(self, epoch: int) -> int:
        """Prompts of this epoch: all, or a share in a fraction of an epoch."""
        epochs = self.config.train.epochs
        share = 1.0 if epochs is None else min(1.0, epochs - epoch)
        return max(0, math.ceil(share * len(self.rows) - 1e-9))

    def _count(self, place: RolloutPosition) -> int:
        """Prompts of the rollout at a place; 0 at the end of the run."""
        return min(self.prompts, self._epoch_prompts(place.epoch) - place.index)

    def _steps_of(self, prompts: int) -> int:
        """Steps that a rollout of so many prompts is handed out in."""
        return min(self.config.rollout.steps_per_generation, prompts) * self.iterations

    def _next(self, place: RolloutPosition, count: int) -> RolloutPosition:
        """The place behind a rollout of `count` prompts, whose steps were handed out."""
        epochs, index = divmod(place.index + count, len(self.rows))
        return RolloutPosition(place.step, place.epoch + epochs, index)

    # -- steps -----------------------------------------------------------------------------------

    def batches(self, stop: Callable[[], bool]) -> Iterator[StepBatch]:
        """Steps from the place on. stop: asked while answers are written; Stopped is raised where
        it is true, and the answers so far are in the journal."""
        most = self.config.train.max_steps
        while (count := self._count(self.place)) > 0:
            if most is not None and self.place.step >= most:
                return
            rollout = self._rollout(self.place, count, stop)
            steps = self._steps_of(count)
            parts = [
                list(part) for part in np.array_split(np.arange(count), steps // self.iterations)
            ]
            began = self.place.part
            for number in range(began, steps):
                if most is not None and self.place.step >= most:
                    return
                groups = parts[number % len(parts)]
                after = replace(self.place, step=self.place.step + 1, part=number + 1)
                if number + 1 == steps:
                    after = self._next(replace(after, part=0), count)
                epoch = self.place.epoch + (self.place.index + count) / len(self.rows)
                batch = self._batch(rollout, groups, epoch, after)
                if number == 0:
                    batch = replace(batch, metrics=rollout.metrics)
                if number == began:
                    batch = replace(batch, spent_s=rollout.spent_s)
                self.place = after
                yield batch

    def _batch(
        self, rollout: Rollout, groups: Sequence[int], epoch: float, after: RolloutPosition
    ) -> StepBatch:
        """The step of some groups. Answers of groups without signal teach nothing and are left
        out; losses are means over all."""
        chosen = [group * self.answers + n for group in groups for n in range(self.answers)]
        taught = [number for number in chosen if not rollout.judged.without_signal[number]]
        if not taught:
            taught = [min(chosen, key=lambda number: len(rollout.answers[number].ids))]
        left_out = sorted({*chosen} - {*taught})
        batches = [batch for _, batch in self._cut(rollout, taught)]
        tokens = sum(self._trained(rollout.answers[number]) for number in left_out)
        batches[0]["step_tokens"] = torch.tensor([float(tokens)])
        batches[0]["step_rows"] = torch.tensor([float(len(left_out))])
        lengths = tuple(rollout.length(number, self.answers) for number in taught)
        return StepBatch(batches, lengths, epoch, after)

    def _cut(
        self, rollout: Rollout, numbers: Sequence[int]
    ) -> Iterator[tuple[list[int], MicroBatch]]:
        """Answers, by number, in micro-batches of rows, longest first."""
        lengths = np.array([[rollout.length(number, self.answers)] for number in numbers])
        for run in runs_of(lengths, PLAIN, None, self.regimes):
            for start, stop in run.cuts(self.micro_batch_tokens):
                members = [numbers[example] for (example,) in run.examples[start:stop]]
                rows = [self._row(rollout, number) for number in members]
                yield members, as_micro_batch(rows, self.model.pad_id)

    def _trained(self, answer: Answer) -> int:
        """Tokens of an answer that are trained on."""
        masked = self.config.grpo.mask_truncated_completions and answer.finish == "length"
        return 0 if masked else len(answer.ids)

    def _row(self, rollout: Rollout, number: int) -> dict[str, Any]:
        """An answer behind its prompt; arrays by the name of a micro-batch's tensor."""
        answer, prompt = rollout.answers[number], rollout.prompts[number // self.answers].ids
        before, trained = len(prompt), self._trained(answer) > 0
        row: dict[str, Any] = {
            "input_ids": [*prompt, *answer.ids],
            "labels": [
                *[IGNORE] * before,
                *(answer.ids if trained else [IGNORE] * len(answer.ids)),
            ],
            "token_sampled": [*[0.0] * before, *answer.logprobs],
            "row_advantage": float(rollout.judged.values[number]),
        }
        if rollout.old is not None:
            row["token_old"] = [*[0.0] * before, *rollout.old[number]]
        return row

    def begin(self, engine: Engine, stack: ExitStack, log: Path) -> None:
        """Write with this engine, and judge in processes that the stack ends. log: for what reward
        functions print."""
        self.engine = engine
        self.judges = stack.enter_context(judges_of(self.config, log))

    def evaluate(self, limit: int | None, stop: Callable[[], bool]) -> dict[str, float] | None:
        """Rewards of held-out prompts' answers, by TRL's names; None if asked to stop, or if
        nothing is held out. pass@k: the share of prompts with an answer whose reward is 1 or more.
        """
        if self.held_out is None:
            return None
        count = self.config.rollout.eval_generations
        found = self.answered(self.held_out, limit, count, stop)
        return None if found is None else found[0]

    def answered(
        self, rows: PromptRows, limit: int | None, count: int, stop: Callable[[], bool]
    ) -> tuple[dict[str, float], list[Group], list[Judgement]] | None:
        """The figures of `count` answers to each prompt, and these with their rewards; one answer
        is the likeliest. None if asked to stop."""
        assert self.engine is not None and self.judges is not None
        draw = self.draw if count > 1 else Draw(temperature=0.0)
        prompts = {HELD_OUT + n: rows.prompt(n) for n in range(len(rows))[:limit]}
        most, groups = self.config.grpo.max_completion_length, dict[int, Group]()
        requests = [
            AnswerRequest(key, prompt.ids, tuple(range(count)), most)
            for key, prompt in prompts.items()
        ]
        written = defaultdict[int, dict[int, Answer]](dict)
        for answer in self.engine.rollout(requests, draw, self.ends):
            key = answer.key
            written[key][answer.number] = answer
            if len(written[key]) == count:
                ordered = [written[key][number] for number in range(count)]
                groups[key] = self._group(key, prompts[key], ordered, 0)
                self.judges.submit(groups[key])
            if stop():
                return None
        judgements = [self.judges.result(key) for key in prompts]
        judged = self._advantages([one.rewards for one in judgements], count)
        right = judged.rewards.reshape(-1, count) >= 1
        metrics = {
            **judged.metrics,
            **lengths_of([a for k in prompts for a in written[k].values()]),
        }
        del metrics["frac_reward_zero_std"]
        metrics |= {f"pass@{count}": float(right.any(1).mean()), "pass@1": float(right.mean())}
        return metrics, [groups[key] for key in prompts], judgements

    # -- a rollout -------------------------------------------------------------------------------

    def _rollout(self, place: RolloutPosition, count: int, stop: Callable[[], bool]) -> Rollout:
        """Write, or take from the journal, the answers to the prompts at a place, with rewards."""
        assert self.engine is not None and self.judges is not None
        began, run_dir = time.perf_counter(), self.config.output
        begin = place.step - place.part
        order = permutation(len(self.rows), self.config.train.seed, place.epoch, 0, self.shuffle)
        numbers = order[place.index : place.index + count].tolist()
        keys = [place.epoch * len(self.rows) + number for number in numbers]
        prompts = dict(zip(keys, map(self.rows.prompt, numbers), strict=True))
        # what some steps were trained on is trained on, whatever has changed since
        with closing(Journal.open(run_dir, begin, self.origin, place.part > 0)) as journal:
            if len(journal.rewards) < count:
                self._check_first(journal)
            answers = self._written(journal, prompts, stop, begin)
            rollout_s = time.perf_counter() - began
            for key in keys:
                self._collect(journal, key)
            reward_s = time.perf_counter() - began - rollout_s
            judged = self._advantages(
                [journal.rewards[key]["rewards"] for key in keys], self.answers
            )
            ordered = [answers[key, n] for key in keys for n in range(self.answers)]
            logged = means_of([journal.rewards[key]["logged"] for key in keys])
            metrics = {**judged.metrics, **lengths_of(ordered), **logged}
            spent = {"rollout": rollout_s, "reward": reward_s}
            rollout = Rollout([prompts[key] for key in keys], ordered, judged, metrics, spent)
            if self._steps_of(count) > 1:
                rollout = replace(rollout, old=self._old(journal, rollout))
        forget(run_dir, int(min(map(sequence_of, checkpoints(run_dir)), default=0)))
        return rollout

    @cached_property
    def origin(self) -> dict[str, Any]:
        """The causes of a rollout's answers: every key that a step's weights, an answer or
        a reward follows from, in words that a resumed run has, too."""
        tree, rewards = self.config.model_dump(mode="json"), self.config.rewards
        about = [tree[name] for name in ("grpo", "rollout")]
        about += [tree["train"][name] for name in OF_WEIGHTS]
        about += [tree["optimizer"][name] for name in ("name", "weight_decay")]
        about += [tree["rewards"][name] for name in ("reward_weights", "on_bad_reward")]
        digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8)
        for function in rewards.functions:
            file, _, name = function.rpartition(":")
            digest.update(name.encode() + Path(file).read_bytes())
        found = {"settings": digest.hexdigest(), "prompts": self.rows.digest}
        return {**found, "megatrain": VERSION}

    def _written(
        self,
        journal: Journal,
        prompts: Mapping[int, Prompt],
        stop: Callable[[], bool],
        step: int,
    ) -> dict[tuple[int, int], Answer]:
        """All answers to these prompts, by key and number: those that the journal lacks are
        written. A group is handed to the judges when its last answer ends."""
        assert self.engine is not None and self.judges is not None
        groups = defaultdict[int, dict[int, Answer]](dict)
        for (key, number), answer in journal.answers.items():
            if key in prompts:
                groups[key][number] = answer

        def judge_if_whole(key: int) -> None:
            assert self.judges is not None
            if len(groups[key]) == self.answers and key not in journal.rewards:
                ordered = [groups[key][number] for number in range(self.answers)]
                self.judges.submit(self._group(key, prompts[key], ordered, step))

        for key in prompts:
            judge_if_whole(key)
        most = self.config.grpo.max_completion_length
        requests = [
            AnswerRequest(
                key, prompt.ids, tuple(set(range(self.answers)) - groups[key].keys()), most
            )
            for key, prompt in prompts.items()
            if len(groups[key]) < self.answers
        ]
        if requests:
            for answer in self.engine.rollout(requests, self.draw, self.ends):
                journal.add(answer)
                groups[answer.key][answer.number] = answer
                judge_if_whole(answer.key)
                if stop():
                    raise Stopped
        return {(key, number): one for key, all_ in groups.items() for number, one in all_.items()}

    def _group(self, key: int, prompt: Prompt, answers: Sequence[Answer], step: int) -> Group:
        """A prompt and its answers as reward functions are given them."""
        decode = self.model.tokenizer.decode
        texts: list[Any] = [decode(one.ids, skip_special_tokens=True) for one in answers]
        if not isinstance(prompt.about.asked, str):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        return Group(
            key=key,
            prompt=prompt.about.asked,
            completions=texts,
            completion_ids=[list(one.ids) for one in answers],
            columns=prompt.about.columns,
            where=prompt.about.where,
            step=step,
        )

    def _collect(self, journal: Journal, key: int) -> None:
        """Wait for a group's rewards, and write them."""
        assert self.judges is not None
        if key not in journal.rewards:
            judgement = self.judges.result(key)
            journal.judge(
                key, judgement.rewards, {"logged": judgement.metrics, "extra": judgement.extra}
            )

    def _advantages(
        self, rewards: Sequence[Sequence[Sequence[float | None]]], answers: int
    ) -> Advantages:
        """rewards: of each group [functions][answers]."""
        assert self.judges is not None
        by_answer = [np.array(group, float).T for group in rewards]  # None becomes nan
        options = self.config.grpo
        return advantages(
            np.concatenate(by_answer),
            self.judges.names,
            self.config.rewards.reward_weights,
            answers,
            scale_rewards=options.scale_rewards,
            aggregation=options.multi_objective_aggregation,
        )

    def _old(self, journal: Journal, rollout: Rollout) -> list[list[float]]:
        """Log-probabilities of all answers under the weights of now, in one sweep; where a run goes
        on in the midst of a rollout, those that the journal has."""
        assert self.engine is not None
        keys = [(answer.key, answer.number) for answer in rollout.answers]
        if not all(key in journal.old for key in keys):
            self._check_first(journal)
            parts = [*self._cut(rollout, range(len(keys)))]
            temperature = self.config.rollout.temperature
            found = self.engine.logprobs([batch for _, batch in parts], temperature)
            for (members, _), values in zip(parts, found, strict=True):
                for row, number in zip(values, members, strict=True):
                    answer = rollout.answers[number]
                    stop = rollout.length(number, self.answers)
                    journal.remember(answer, row[stop - len(answer.ids) : stop].tolist())
        return [journal.old[key] for key in keys]

    def _check_first(self, journal: Journal) -> None:
        """Raise StorageError where steps of this rollout are taken already: other weights now would
        write other answers."""
        if self.place.part:
            raise StorageError(
                f"{journal.path}: lacks answers that the checkpoint's next step trains on; resume "
                "from another checkpoint (--checkpoint NAME)"
            )


# -- figures and tensors ---------------------------------------------------------------------------


def as_micro_batch(rows: Sequence[Mapping[str, Any]], pad_id: int) -> MicroBatch:
    """Rows padded on the right: tensors [rows, longest], and what is of a whole row [rows]."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": pad_id, "labels": IGNORE}
    found = dict[str, torch.Tensor]()
    for name, value in rows[0].items():
        if not isinstance(value, list):
            found[name] = torch.tensor([row[name] for row in rows])
            continue
        padded = [[*row[name], *[fill.get(name, 0.0)] * (longest - len(row[name]))] for row in rows]
        found[name] = torch.tensor(padded)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    if int(lengths.min()) < longest:
        found["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return found


def lengths_of(answers: Sequence[Answer]) -> dict[str, float]:
    """TRL's figures of answers' tokens; terminated ones have an end."""
    lengths = np.array([len(answer.ids) for answer in answers], float)
    ended = np.array([answer.finish == "stop" for answer in answers])
    figures: dict[str, Any] = {"mean": np.mean, "min": np.min, "max": np.max}
    found = {f"completions/{name}_length": float(of(lengths)) for name, of in figures.items()}
    terminated = lengths[ended] if ended.any() else np.zeros(1)
    for name, of in figures.items():
        found[f"completions/{name}_terminated_length"] = float(of(terminated))
    return {**found, "completions/clipped_ratio": float(1 - ended.mean())}


def means_of(logged: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the groups that logged it."""
    names = dict.fromkeys(name for one in logged for name in one)
    return {name: float(np.mean([one[name] for one in logged if name in one])) for name in names}
