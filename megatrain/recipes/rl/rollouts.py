"""Steps of answers that the model writes: the loader of methods whose rows are prompts.

A rollout takes some prompts, has the engine write several answers to each, has them judged while
others are still written, and hands them out as the micro-batches of one or several steps.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.config import Config
from megatrain.config.fields import is_function
from megatrain.data.loader import StepBatch
from megatrain.data.micro_batches import MicroBatch, Regimes, dealt, micro_batches
from megatrain.data.rows import TokenRows, check_digest, permutation
from megatrain.engine.engine import Engine
from megatrain.engine.rollout.decode import Answer, AnswerRequest
from megatrain.engine.rollout.draw import Draw
from megatrain.errors import DataError, StorageError
from megatrain.heartbeat import doing
from megatrain.losses import IGNORE, LOSSES
from megatrain.recipes import frozen
from megatrain.recipes.model import Model
from megatrain.recipes.rl.advantages import OF_METHODS, Advantages
from megatrain.recipes.rl.episodes import Episodes
from megatrain.recipes.rl.journal import Journal, forget
from megatrain.recipes.rl.judges import Group, Judges, judges_of
from megatrain.recipes.rl.own_answers import answered_rows
from megatrain.recipes.rl.prompts import Prompt, PromptRows
from megatrain.recipes.rl.vllm import VllmServer
from megatrain.recipes.sample import end_tokens
from megatrain.recipes.signals import Stopped, StopRequest
from megatrain.storage.run_folder import checkpoints, sequence_of
from megatrain.version import VERSION
from megatrain.world import ALONE, World

HELD_OUT = 1 << 40  # keys of held-out prompts begin here
MOST_TRIES = 3  # times the prompts of a rollout, where those without signal are replaced
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
        reference: the same under the reference; None: there is none.
        taken: prompts that were answered for it, those replaced included.
    """

    prompts: Sequence[Prompt]
    answers: Sequence[Answer]
    judged: Advantages
    metrics: Mapping[str, float]
    spent_s: Mapping[str, float]
    old: Sequence[Sequence[float]] | None = None
    reference: Sequence[Sequence[float]] | None = None
    taken: int = 0


@dataclass(eq=False, kw_only=True)
class Rollouts:
    """Iterates over StepBatch, as a Loader does, from its place to the end of the run.

    Each epoch is shuffled by (seed, epoch). A rollout takes `generation_batch_size` answers' worth
    of prompts, an epoch's last one what is left; it is cut into `steps_per_generation` steps of
    whole groups, and these are handed out `num_iterations` times. An answer follows from the
    weights, the seed, its prompt's number in the run and its own number.

    Of several ranks each writes the answers to some of the prompts, and has them judged; then all
    have all, and each is handed some of a step's rows, as by a Loader.

    Raises DataError for prompts that fit no micro-batch.
    """

    rows: PromptRows
    held_out: PromptRows | None
    config: Config
    model: Model
    micro_batch_tokens: int
    regimes: Regimes = ()
    pack_to: int | None = None
    world: World = ALONE
    engine: Engine = field(init=False)  # as the next two, from the run's beginning on
    write: Callable[..., Generator[Answer, None, None]] = field(init=False)  # as Engine.rollout
    judges: Judges = field(init=False)
    reference: Engine | None = None
    windows: None = None  # as a loader has them
    place: RolloutPosition = field(default_factory=RolloutPosition)

    def __post_init__(self) -> None:
        options, rollout = self.config.policy, self.config.rollout
        self.answers, self.iterations = options.num_generations, options.num_iterations
        self.prompts = rollout.generation_batch_size // self.answers
        steps = f"{rollout.steps_per_generation} x {self.iterations} steps"
        self.cut = f"{self.prompts} prompts, {steps}"
        told = rollout.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
        self.draw = Draw(seed=self.config.train.seed, **told)
        self.ends = end_tokens(self.model)
        of_loss: Any = LOSSES[self.config.method]
        self.held = bool(options.beta) and not of_loss.in_rewards  # the loss holds to the reference

    # -- where the run stands --------------------------------------------------------------------

    def position(self) -> dict[str, int | str]:
        seed = self.config.train.seed
        return {**asdict(self.place), "seed": seed, "data": self.rows.digest, "cut": self.cut}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises DataError if it is of other data or another seed,
        or broken."""
        check_digest(self.rows.digest, position.get("data"))
        numbers = [position.get(name) for name in asdict(self.place)]
        whole = all(type(number) is int and number >= 0 for number in numbers)
        whole &= not numbers[-1] or position.get("cut", self.cut) == self.cut
        if not whole or position.get("seed") != self.config.train.seed:
            raise DataError(
                "the checkpoint's position is of another train.seed, or within a rollout of "
                f"another size than {self.cut}, or broken: {dict(position)}; set that back, or "
                "resume from another checkpoint (--checkpoint NAME)"
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

    def steps_of_epoch(self) -> float:
        """Steps of a whole epoch, no prompts replaced."""
        return len(self.rows) / self.prompts * self._steps_of(self.prompts)

    def _count(self, place: RolloutPosition) -> int:
        """Prompts of the rollout at a place; 0 at the end of the run."""
        epochs, most = self.config.train.epochs, self.config.train.max_steps
        if most is not None and place.step >= most:
            return 0
        if self.config.policy.dynamic_sampling:  # all have as many, and epochs do not end one
            return self.prompts
        share = 1.0 if epochs is None else min(1.0, epochs - place.epoch)
        of_epoch = max(0, math.ceil(share * len(self.rows) - 1e-9))
        return min(self.prompts, of_epoch - place.index)

    def _steps_of(self, prompts: int) -> int:
        """Steps that a rollout of so many prompts is handed out in."""
        return min(self.config.rollout.steps_per_generation, prompts) * self.iterations

    def _next(self, place: RolloutPosition, count: int) -> RolloutPosition:
        """The place behind a rollout of `count` prompts, whose steps were handed out."""
        epochs, index = divmod(place.index + count, len(self.rows))
        return RolloutPosition(place.step, place.epoch + epochs, index)

    # -- steps -----------------------------------------------------------------------------------

    def batches(self, stop: StopRequest) -> Iterator[StepBatch]:
        """Steps from the place on. Raises Stopped where that is asked for while answers are
        written, which are in the journal so far."""
        most = self.config.train.max_steps
        while (count := self._count(self.place)) > 0:
            rollout, began = self._rollout(self.place, count, stop), self.place.part
            steps = self._steps_of(count)
            parts = np.array_split(np.arange(count), steps // self.iterations)
            for number in range(began, steps):
                if most is not None and self.place.step >= most:
                    return
                groups = parts[number % len(parts)].tolist()
                after = replace(self.place, step=self.place.step + 1, part=number + 1)
                if number + 1 == steps:
                    after = self._next(after, rollout.taken)
                epoch = self.place.epoch + (self.place.index + rollout.taken) / len(self.rows)
                batch = self._batch(rollout, groups, epoch, after)
                metrics = rollout.metrics if number == 0 else {}
                spent_s = rollout.spent_s if number == began else {}
                self.place = after
                yield replace(batch, metrics=metrics, spent_s=spent_s)

    def _batch(
        self, rollout: Rollout, groups: Sequence[int], epoch: float, after: RolloutPosition
    ) -> StepBatch:
        """The step of some groups. Answers of groups without signal teach nothing and are left
        out, unless the loss holds all to a reference; losses are means over all."""
        chosen = [group * self.answers + n for group in groups for n in range(self.answers)]
        silent = rollout.judged.without_signal
        taught = [one for one in chosen if self.held or not silent[one]]
        taught = taught or [min(chosen, key=lambda number: len(rollout.answers[number].ids))]
        left_out = sorted({*chosen} - {*taught})
        rows = self._rows(rollout, taught, rollout.judged.values[taught])
        batches = [*self._micro_batches(rows)]
        for batch in batches:
            batch["row_advantage"] = batch.pop("row_value")
        if self.world.dp_rank == 0:  # which has one
            tokens = sum(self._trained(rollout.answers[number]) for number in left_out)
            batches[0]["step_tokens"] = torch.tensor([float(tokens)])
            batches[0]["step_rows"] = torch.tensor([float(len(left_out))])
        return StepBatch(batches, tuple(rows.lengths.tolist()), epoch, after)

    def _micro_batches(self, rows: TokenRows) -> Iterator[MicroBatch]:
        """Those of this rank."""
        own = dealt(rows.side_lengths, self.world.dp_rank, self.world.dp_size)
        about = self.micro_batch_tokens, self.model.pad_id, self.pack_to, self.regimes
        return micro_batches(rows, own, *about)

    def _trained(self, answer: Answer) -> int:
        """Tokens of an answer that are trained on."""
        masked = self.config.policy.mask_truncated_completions and answer.finish == "length"
        return 0 if masked else answer.drawn

    def _rows(
        self, rollout: Rollout, numbers: Sequence[int], values: Any, *, whole: bool = False
    ) -> TokenRows:
        """Answers, by number, behind their prompts, and a value of each. whole: with those that are
        not trained on."""
        prompts = [rollout.prompts[number // self.answers].ids for number in numbers]
        answers = [rollout.answers[number] for number in numbers]
        given = {"token_sampled": [answer.logprobs for answer in answers]}
        if rollout.old is not None:
            given["token_old"] = [[*rollout.old[number]] for number in numbers]
        if rollout.reference is not None and self.held:
            given["token_reference"] = [[*rollout.reference[number]] for number in numbers]
        trained = [whole or (self._trained(one) > 0 and (one.mask or True)) for one in answers]
        return answered_rows(prompts, [one.ids for one in answers], trained, values, given)

    def begin(self, engine: Engine, stack: ExitStack, log: Path, *, trains: bool = True) -> None:
        """Write with this engine, and judge in processes that the stack ends. log: for what reward
        functions print. trains: false needs no reference."""
        self.engine, self.write = engine, engine.rollout
        rollout, box = self.config.rollout, self.rows.toolbox
        if (url := rollout.vllm_server_base_url) is not None:
            self.write = VllmServer(engine, url, rollout.vllm_server_timeout).rollout
        self.judges = judges_of(self.config, stack, log, box is not None and box.rewarding)
        if self.config.policy.beta and trains:
            held_to = frozen.first_model(self.config, **frozen.computing_as(engine))
            self.reference = stack.enter_context(held_to)

    def evaluate(self, limit: int | None, stop: StopRequest) -> dict[str, float] | None:
        """Rewards of held-out prompts' answers, by TRL's names; None if asked to stop, or if
        nothing is held out. pass@k: the share of prompts with an answer whose reward is 1 or more.
        """
        if self.held_out is None:
            return None
        count = self.config.rollout.eval_generations
        with suppress(Stopped):
            return self.answered(self.held_out, limit, count, stop)[0]
        return None

    def answered(
        self, rows: PromptRows, limit: int | None, count: int, stop: StopRequest
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The figures of `count` answers to each prompt, and the texts and rewards of each group;
        one answer is the likeliest. Raises Stopped."""
        draw = self.draw if count > 1 else Draw(temperature=0.0)
        prompts = {HELD_OUT + n: rows.prompt(n) for n in range(len(rows))[:limit]}
        journal = Journal()
        self._fill(journal, prompts, count, draw, stop)
        judged, metrics = self._judged(journal, prompts, count)
        right = judged.rewards.reshape(-1, count) >= 1
        del metrics["frac_reward_zero_std"]
        metrics |= {f"pass@{count}": float(right.any(1).mean()), "pass@1": float(right.mean())}
        return metrics, [journal.rewards[key] for key in prompts]

    # -- a rollout -------------------------------------------------------------------------------

    def _rollout(self, place: RolloutPosition, count: int, stop: StopRequest) -> Rollout:
        """Write, or take from the journal, the answers to the prompts at a place, with rewards."""
        begin, run_dir = place.step - place.part, self.config.output
        tries = count * (MOST_TRIES if self.config.policy.dynamic_sampling else 1)
        taken, spent, found, spare = 0, Counter[str](), dict[int, Prompt](), dict[int, Prompt]()
        # what some steps were trained on is trained on, whatever has changed since
        about = run_dir, begin, self.origin, place.part > 0, self.world
        with closing(Journal.open(*about)) as journal:
            while len(found) < count and taken < tries:
                asked = self._prompts(place, taken, min(count - len(found), tries - taken))
                taken += len(asked)
                given = (len(journal.rewards.get(key, {}).get("rewards", ())) for key in asked)
                if {*given} != {len(self.judges.names)}:  # by other functions, or not at all
                    self._check_first(journal)
                spent.update(self._fill(journal, asked, self.answers, self.draw, stop, begin))
                teach = [True] * len(asked)
                if tries > count:
                    silent = self._judged(journal, asked, self.answers)[0].without_signal
                    teach = np.any(~silent.reshape(-1, self.answers), 1).tolist()
                for (key, prompt), has_signal in zip(asked.items(), teach, strict=True):
                    (found if has_signal else spare)[key] = prompt
            found |= dict(islice(spare.items(), count - len(found)))
            judged, metrics = self._judged(journal, found, self.answers)
            answers = [journal.answers[key, n] for key in found for n in range(self.answers)]
            rollout = Rollout([*found.values()], answers, judged, metrics, spent, taken=taken)
            if self._steps_of(count) > 1:
                rollout = replace(rollout, old=self._old(journal, rollout))
            if self.reference is not None:
                rollout = self._referred(journal, found, rollout)
            if tries > count:
                rollout = replace(rollout, metrics={**rollout.metrics, "prompts_tried": taken})
        if self.world.is_first:
            forget(run_dir, int(min(map(sequence_of, checkpoints(run_dir)), default=0)))
        return rollout

    def _prompts(self, place: RolloutPosition, skipped: int, count: int) -> dict[int, Prompt]:
        """Prompts from a place on, by keys that are their numbers in the run."""
        found, size, seed = dict[int, Prompt](), len(self.rows), self.config.train.seed
        order = lru_cache(lambda epoch: permutation(size, seed, epoch))
        for number in range(place.index + skipped, place.index + skipped + count):
            epoch = place.epoch + number // size
            row = int(order(epoch)[number % size])
            found[epoch * size + row] = self.rows.prompt(row)
        return found

    @cached_property
    def origin(self) -> dict[str, Any]:
        """The causes of a rollout's answers: every key that a step's weights, an answer or
        a reward follows from, in words that a resumed run has, too."""
        tree, rewards = self.config.model_dump(mode="json"), self.config.rewards
        writer = tree["rollout"]  # it matters who writes, and not where
        writer["vllm_server_base_url"] = writer["vllm_server_base_url"] is not None
        del writer["vllm_server_timeout"]
        about = [tree[name] for name in (self.config.method, "rollout")]
        about += [tree["train"][name] for name in OF_WEIGHTS]
        about += [tree["optimizer"][name] for name in ("name", "weight_decay")]
        about += [tree["rewards"][name] for name in ("reward_weights", "on_bad_reward")]
        about += [tree["tools"]] if self.config.tools.files else []
        digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8)
        for one in (*rewards.functions, *self.config.tools.files):
            if is_function(one):
                file, _, name = one.rpartition(":")
                digest.update(name.encode() + Path(file).read_bytes())
            else:
                digest.update(json.dumps(frozen.digests_of_model(one), sort_keys=True).encode())
        found = {"settings": digest.hexdigest(), "prompts": self.rows.digest}
        return {**found, "megatrain": VERSION}

    def _fill(
        self,
        journal: Journal,
        prompts: Mapping[int, Prompt],
        count: int,
        draw: Draw,
        stop: StopRequest,
        step: int = 0,
    ) -> dict[str, float]:
        """Have what the journal lacks of `count` answers to each of these prompts written, and each
        group judged when its last answer ends; returns seconds by cause. Raises Stopped."""
        began, most = time.perf_counter(), self.config.policy.max_completion_length
        own = [*prompts][self.world.rank :: self.world.size]
        toolbox, known = self.rows.toolbox, {*journal.answers}
        if self.config.tools.environment_factory:  # whose environments are no more unless judged
            known = {one for one in known if one[0] in journal.rewards}
        lacking = {key: {n for n in range(count) if (key, n) not in known} for key in own}
        requests = [
            AnswerRequest(key, prompts[key].ids, tuple(numbers), most)
            for key, numbers in lacking.items()
            if numbers
        ]
        judging = [key for key in own if key not in journal.rewards]

        def judge_if_whole(key: int) -> None:
            if not lacking[key]:
                answers = [journal.answers[key, number] for number in range(count)]
                self.judges.submit(self._group(key, prompts[key], answers, step))

        writes = any(self.world.all_gather(bool(requests)))
        with self.world.together():
            for key in judging:
                judge_if_whole(key)
            # all ranks take part, as the weights are gathered
            write = self.write
            if toolbox is not None:
                turns = self.config.tools.max_tool_calling_iterations
                episodes = Episodes(toolbox, self.judges, prompts, stop, most, turns)
                write = partial(episodes.written, write)
            answers = write(requests, draw, self.ends)
            with closing(answers):
                for answer in answers if writes else ():
                    journal.add(answer)
                    lacking[answer.key].remove(answer.number)
                    judge_if_whole(answer.key)
                    if stop.here:
                        break
        rollout_s = time.perf_counter() - began
        if stop.came():
            raise Stopped
        with self.world.together():
            self.judges.score(judging)
            for key in judging:
                journal.judge(key, self.judges.result(key))
        journal.share(self.world)
        return {"rollout": rollout_s, "reward": time.perf_counter() - began - rollout_s}

    def _judged(
        self, journal: Journal, prompts: Mapping[int, Prompt], count: int, divergences: Any = None
    ) -> tuple[Advantages, dict[str, float]]:
        """The worth of `count` answers to each prompt, and all figures of them. divergences: of
        each answer from the reference, where rewards lose by them."""
        found, weights = [journal.rewards[key] for key in prompts], self.config.rewards
        # [functions][answers] of each group; None becomes nan
        rewards = np.concatenate([np.array(one["rewards"], float).T for one in found])
        weighted = weights.reward_weights and (*weights.reward_weights, 1.0)[: len(rewards.T)]
        given = rewards, self.judges.names, weighted, count  # that of an environment is 1
        judge = OF_METHODS[self.config.method]
        judged = judge(*given, divergences=divergences, **self.config.of_method)
        answers = [journal.answers[key, n] for key in prompts for n in range(count)]
        logged = defaultdict[str, list[float]](list)
        for name, value in (pair for one in found for pair in one["logged"].items()):
            logged[name].append(value)
        means = {name: float(np.mean(values)) for name, values in logged.items()}
        if self.rows.toolbox is not None:
            calls = sum(one.calls for one in answers)
            means["tools/call_frequency"] = calls / len(answers)
            failures = sum(one.failures for one in answers)
            means["tools/failure_frequency"] = failures / max(1, calls)
        return judged, {**judged.metrics, **lengths_of(answers), **means}

    def _group(self, key: int, prompt: Prompt, answers: Sequence[Answer], step: int) -> Group:
        """A prompt and its answers as reward functions are given them."""
        decode = self.model.tokenizer.decode
        texts: list[Any] = [decode(one.ids, skip_special_tokens=True) for one in answers]
        if not isinstance(prompt.asked, str):
            turns = [[{"role": "assistant", "content": text}] for text in texts]
            texts = [one.turns or plain for one, plain in zip(answers, turns, strict=True)]
        return Group(
            key=key,
            prompt=prompt.asked,
            completions=texts,
            completion_ids=[list(one.ids) for one in answers],
            columns=prompt.columns,
            where=prompt.where,
            step=step,
            begins=prompt.begins,
        )

    def _old(self, journal: Journal, rollout: Rollout) -> list[list[float]]:
        """Log-probabilities of all answers under the weights of now, in one sweep; where a run goes
        on in the midst of a rollout, those that the journal has."""
        keys = [(answer.key, answer.number) for answer in rollout.answers]
        if not all(key in journal.old for key in keys):
            self._check_first(journal)
            for number, of_answer in self._logprobs(self.engine, rollout):
                journal.remember(rollout.answers[number], of_answer)
            journal.share(self.world)
        return [journal.old[key] for key in keys]

    def _logprobs(self, engine: Engine, rollout: Rollout) -> Iterator[tuple[int, list[float]]]:
        """Each answer's number and the log-probabilities of its tokens, of this rank's answers, in
        sweeps of up to SWEPT_TOKENS."""
        numbers = range(len(rollout.answers))
        batches = [*self._micro_batches(self._rows(rollout, numbers, numbers, whole=True))]
        cooled = partial(engine.logprobs, temperature=self.config.rollout.temperature)
        parts = frozen.sweeps(batches, frozen.SWEPT_TOKENS)
        found = (one for part in parts for one in cooled(part))
        for batch, values in zip(batches, found, strict=True):
            targets = batch["labels"] != IGNORE
            for row, number in enumerate(batch["row_value"].int().tolist()):
                yield number, values[targets & (batch["row_of"] == row)].tolist()

    def _referred(
        self, journal: Journal, prompts: Mapping[int, Prompt], rollout: Rollout
    ) -> Rollout:
        """The rollout with what the reference gives its answers, and, where rewards lose by the
        divergence from it, with other advantages."""
        assert self.reference is not None
        began = time.perf_counter()
        with doing("asking the reference", aloud=False):
            found = dict(self._logprobs(self.reference, rollout))
        spent = Counter[str](rollout.spent_s)
        spent.update({"rollout": time.perf_counter() - began})
        reference = [found[number] for number in range(len(found))]
        rollout = replace(rollout, reference=reference, spent_s=spent)
        if self.held:
            return rollout
        now = rollout.old or [answer.logprobs for answer in rollout.answers]
        apart = [
            math.fsum(np.subtract(own, held)[np.array(answer.mask or [1] * len(own)) > 0])
            if self._trained(answer)
            else 0.0
            for answer, own, held in zip(rollout.answers, now, reference, strict=True)
        ]
        judged, metrics = self._judged(journal, prompts, self.answers, np.array(apart))
        metrics["kl"] = math.fsum(apart) / max(1, sum(map(self._trained, rollout.answers)))
        return replace(rollout, judged=judged, metrics=metrics)

    def _check_first(self, journal: Journal) -> None:
        """Raise StorageError where steps of this rollout are taken already: other weights now would
        write other answers."""
        if self.place.part:
            raise StorageError(
                f"{journal.path}: lacks answers that the checkpoint's next step trains on, or "
                "rewards by these functions; resume from another checkpoint (--checkpoint NAME)"
            )


# -- figures ---------------------------------------------------------------------------------------


def lengths_of(answers: Sequence[Answer]) -> dict[str, float]:
    """TRL's figures of answers' tokens; terminated ones have an end."""
    lengths = np.array([answer.drawn for answer in answers], float)
    ended = np.array([answer.finish == "stop" for answer in answers])
    kinds = {"length": lengths, "terminated_length": lengths[ended] if ended.any() else np.zeros(1)}
    found = {
        f"completions/{name}_{kind}": float(getattr(np, name)(some))
        for kind, some in kinds.items()
        for name in ("mean", "min", "max")
    }
    return {**found, "completions/clipped_ratio": float(1 - ended.mean())}
