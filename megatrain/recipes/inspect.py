"""Commands that read a run, its data or its model: `data`, `eval`, `generate`, `rollout`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from os.path import isfile  # whose pathlib counterpart raises for some paths
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from megatrain.config import Config, load_config
from megatrain.config.fields import TrainOptions
from megatrain.config.resuming import CONFIG_FILE, RESOLVED_FILE, asked_again, resumed_configs
from megatrain.data.build import Expected
from megatrain.data.images import Sight, picture_of
from megatrain.data.micro_batches import MicroBatch, ReferenceArray, check_longest, micro_batches
from megatrain.data.rows import Rows, TokenRows, permutation
from megatrain.data.samples import PROMPTS, Picture, Turns
from megatrain.data.show import held_out_line, show_rows, summary
from megatrain.engine.engine import Engine
from megatrain.engine.request import choose_device, config_of_source, least_tokens
from megatrain.engine.rollout.decode import Answer, AnswerRequest, answers
from megatrain.engine.rollout.draw import Draw
from megatrain.errors import ConfigError, DataError, ModelError, logger, printable
from megatrain.heartbeat import TOKENS_SWEPT, doing
from megatrain.losses import Distillation, SequenceLoss
from megatrain.models.family import regimes_of
from megatrain.models.pretrained import is_classifier, resolve_source
from megatrain.planner.search import AUTO_MICRO_BATCH_TOKENS
from megatrain.recipes import frozen, sample
from megatrain.recipes.loop import SWEEP_MICRO_BATCHES, evaluated, tokens_to_sweep
from megatrain.recipes.model import (
    Model,
    check_weights,
    check_writes,
    describe_model,
    read_model,
    seeing,
    sighted,
    suited,
)
from megatrain.recipes.reference import Batches, Wanted, from_teacher, reference_key, references_of
from megatrain.recipes.rl.prompts import read_prompt_rows
from megatrain.recipes.rl.rollouts import Rollouts
from megatrain.recipes.setup import day_of, make_loss, open_rows, quiet_libraries, say_rows
from megatrain.recipes.signals import StopRequest
from megatrain.recipes.tasks import TaskOptions, load_tasks, run_tasks
from megatrain.reporting.streams import console_on
from megatrain.storage.checkpoint import read_about
from megatrain.storage.run_folder import STATE, with_state

HIGHEST_LOSS = 709.0  # whose perplexity is a float


def show_data(config: Config, rows: int, as_json: bool, full: bool) -> dict[str, Any] | None:
    """Show rows with their loss mask, and counts, on stdout; needs no weights. as_json: return the
    counts instead. full: rows as long as they are, not a screen of each."""
    quiet_libraries()
    model = read_model(config)
    trained, held_out, _ = open_rows(config, model)
    if as_json:
        return {"train": summary(trained), "eval": None if held_out is None else summary(held_out)}
    shown = console_on()
    show_rows(trained, model.tokenizer, rows, shown, held_out, full)
    if about_stops := model.about_stops:
        shown.print(about_stops, soft_wrap=True, markup=False, highlight=False)
    if held_out is not None:
        shown.print(held_out_line(held_out), highlight=False)
    return None


def evaluate(named: str | Path, data: object, trust_remote_code: bool = False) -> dict[str, Any]:
    """Held-out loss of a run folder's model, of one checkpoint or of any other model. data: rows to
    evaluate on, all of them; None: those that the run holds out. trust_remote_code: run code that
    comes with the model; no file says so, as a run's config may be anyone's."""
    quiet_libraries()
    run_dir, checkpoint = run_folder_of(Path(named)), frozen.checkpoint_of(named)
    if run_dir is None and data is None:
        neither = "is neither a run folder nor one of its checkpoints, so nothing is held out"
        raise ConfigError(f"{named}: {neither}; name rows with --data")
    model = describe_model(checkpoint, trust_remote_code=trust_remote_code)
    check_weights(checkpoint)
    config, rows = rows_to_evaluate(run_dir, Path(checkpoint), model, data)
    if rows.kind == PROMPTS:
        way = f"megatrain rollout {run_dir}/config.yaml model.path={checkpoint}"
        raise ConfigError(f"{named}: its rows are prompts and have no loss; judge answers: `{way}`")
    say_rows(rows)
    loss = make_loss(config)
    of_sequences = loss if isinstance(loss, SequenceLoss) else None
    limit = None if data is not None else config.train.eval_rows

    device = choose_device(config.device).type
    size = max(AUTO_MICRO_BATCH_TOKENS[device], least_tokens(loss, config.train.seq_len))
    sweep = SWEEP_MICRO_BATCHES * size

    check_longest(rows, size)
    wanted = Wanted(rows, np.arange(len(rows))[:limit])
    batches = partial(
        micro_batches,
        micro_batch_tokens=size,
        pad_id=model.pad_id,
        regimes=regimes_of(model.config),
        prompts_too=bool(of_sequences and of_sequences.prompts),
    )

    sight = rows.sight if isinstance(rows, TokenRows) and rows.images is not None else None
    opened = partial(reader, run_dir=run_dir, trust_remote_code=trust_remote_code, sight=sight)
    references = None

    def by_sweeps(wanted: Wanted, numbers: ReferenceArray) -> Iterator[list[MicroBatch]]:
        return frozen.sweeps(batches(wanted.rows, wanted.chosen, references=numbers), sweep)

    if of_sequences and of_sequences.reference:
        references = reference_of_run(config, opened, wanted, by_sweeps)
    with ExitStack() as stack:
        engine = stack.enter_context(opened(checkpoint))
        if isinstance(loss, Distillation) and loss.reference:
            both = config, loss, engine.precision, engine.anatomy.vocab_size
            (references,) = from_teacher(*both, [wanted], by_sweeps)
        frozen.open_teacher(config, loss, stack, **frozen.computing_as(engine))
        given = batches(rows, wanted.chosen, references=references)
        with doing("evaluating", tokens_to_sweep(engine, rows, wanted.chosen), TOKENS_SWEPT):
            found = evaluated(engine, given, loss, sweep, StopRequest())
    assert found is not None, "nobody asked it to stop"
    about = {"checkpoint": str(checkpoint), "precision": engine.precision, "eval_loss": found.loss}
    if not of_sequences and not isinstance(loss, Distillation):
        about["perplexity"] = math.exp(found.loss) if found.loss < HIGHEST_LOSS else math.inf
    about |= {f"eval_{name}": value for name, value in found.metrics.items()}
    return about | {"eval_target_tokens": found.target_tokens}


def reference_of_run(
    config: Config, opened: Callable[..., Engine], wanted: Wanted, batches: Batches
) -> ReferenceArray:
    """Log-probabilities of rows under the model that a run began with, which `opened` reads."""
    source = config.model
    if source.init == "random":
        raise ConfigError(
            f"{source.source}: the run began with random weights, which are its reference and are "
            "kept nowhere; evaluate it by another run that begins with its model"
        )
    with opened(source.source) as engine:
        return references_of(engine, reference_key(engine), wanted, batches)


def evaluate_tasks(
    named: str | Path, options: TaskOptions, where: str, trust_remote_code: bool = False
) -> dict[str, Any]:
    """The model that was asked and how it computed, and what tasks of lm-eval found, of any model.
    where: what names the tasks, for errors. Raises ConfigError for unknown tasks, DataError for
    those that fail."""
    checkpoint, model, _ = writer_of(named, trust_remote_code)
    check_weights(checkpoint)
    tasks = load_tasks(options, where)  # before weights are read
    with reader(checkpoint, run_folder_of(Path(named)), trust_remote_code) as engine:
        results = run_tasks(tasks, where, engine, model, longest_row(model))
    return {"checkpoint": str(checkpoint), "precision": engine.precision, "results": results}


def generate(
    prompt: str,
    named: str | Path,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    system: str | None = None,
    trust_remote_code: bool = False,
    images: Sequence[str] = (),
    *,
    show: Callable[[str], object] = str,
) -> str:
    """The model's answer to a prompt. sampling: arguments of `draw_of`. show: gets the text as it
    grows. system: a system prompt. Raises ModelError for a reward model, and one whose chat
    template takes no system prompt."""
    draw = sample.draw_of(**sampling)
    checkpoint, model, pictures = writer_of(named, trust_remote_code, images)
    turns = [*sample.system_turns(model, system), sample.user(prompt, pictures)]
    with reader(checkpoint, run_folder_of(Path(named)), trust_remote_code, model.sight) as engine:
        return sample.answer(engine, model, turns, max_new_tokens, draw, show)


def writer_of(
    named: str | Path, trust_remote_code: bool, images: Sequence[str] = ()
) -> tuple[str | Path, Model, list[Picture]]:
    """(checkpoint, model, pictures) of one that is to write. Raises ModelError if it cannot, and
    DataError for images that it cannot see."""
    quiet_libraries()
    checkpoint = frozen.checkpoint_of(named)
    model = describe_model(checkpoint, trust_remote_code=trust_remote_code)
    check_writes(model, str(named))
    if images:
        model = seeing(model, Path(checkpoint), "--image")
    return checkpoint, model, [picture_of(name, Path()) for name in images]


def reader(
    checkpoint: str | Path,
    run_dir: Path | None,
    trust_remote_code: bool = False,
    sight: Sight | None = None,
) -> Engine:
    """An engine that reads only, with no optimizer state in RAM, computing as the run did, or else
    in float32 if that is the folder's dtype. sight: of one that is shown images."""
    chosen: dict[str, Any] = {"precision": "auto"}
    if run_dir is not None:
        config = load_config(run_dir / CONFIG_FILE, of_run=True)
        chosen = {name: getattr(config, name) for name in ("precision", "attention", "device")}
    if chosen["precision"] == "auto":
        described = config_of_source(resolve_source(checkpoint), trust_remote_code)
        if described.get_text_config().dtype == torch.float32:
            chosen["precision"] = "float32"
    chosen["image_row"] = None if sight is None else sight.row
    engine = frozen.frozen_engine(checkpoint, trust_remote_code=trust_remote_code, **chosen)
    logger.info(f"computing in {engine.precision}")
    return engine


def run_folder_of(folder: Path) -> Path | None:
    """`folder` itself, or the run folder that it is a checkpoint of; None if it is neither."""
    for place in (folder, folder.resolve().parent):
        if all(isfile(place / name) for name in (CONFIG_FILE, RESOLVED_FILE)):
            return place
    return None


# -- rows to evaluate on --------------------------------------------------------------------------


OF_TRAIN = ("seed", "seq_len", "eval_rows")  # keys that say which rows are held out
ALL_ROWS = {"data.eval": None, "data.streaming": False}  # of a source are evaluated
MAY_MOVE = ("train", "processes")  # of the data section: the same rows may lie elsewhere


def rows_to_evaluate(
    run_dir: Path | None, checkpoint: Path, model: Model, data: object
) -> tuple[Config, Rows]:
    """(the config that says how, the rows); arguments as for `evaluate`."""
    day = None if run_dir is None else day_of(load_config(run_dir / RESOLVED_FILE, of_run=True))
    expected, others = None, {"data.train": data, **ALL_ROWS}
    if run_dir is None:
        whole: dict[str, Any] = {"model": str(checkpoint), "train": {"seq_len": longest_row(model)}}
        whole |= {"method": "reward"} if is_classifier(model.config) else {}
        config = load_config(whole, others)
    elif data is not None:
        config = load_config(run_dir / CONFIG_FILE, others, of_run=True)
    else:
        config, expected = held_out_by(run_dir, checkpoint)
    try:
        rows, held_out, _ = open_rows(config, sighted(model, config, checkpoint), day, expected)
    except DataError as error:
        if data is not None:
            raise
        raise DataError(f"{error}; or name rows to evaluate on with --data") from error
    if data is None and held_out is None:
        raise ConfigError(f"{run_dir}: holds no rows out (data.eval: null); name some with --data")
    return config, rows if held_out is None else held_out


def held_out_by(run_dir: Path, checkpoint: Path) -> tuple[Config, Expected | None]:
    """The run's config with what decided which rows are held out when the checkpoint was saved, and
    digests of these rows. Says what was edited since, and where nothing is known."""
    asked, source = asked_again(run_dir, ()), with_state(checkpoint)
    state: dict[str, Any] = read_about(source)["state"] if isfile(source / STATE) else {}
    if "config" not in state:
        logger.warning(
            f"{checkpoint}: no checkpoint is left that says which rows were held out; those that "
            f"{run_dir / CONFIG_FILE} holds out now are evaluated"
        )
        return asked, None
    then, _ = resumed_configs(run_dir, asked, state)
    before, now = about_rows(then), about_rows(asked)
    for key, value in before.items():
        if now.get(key) not in (value, "auto"):
            logger.warning(
                f"{run_dir / CONFIG_FILE}: {key} was changed from {value!r} to {now.get(key)!r}; "
                "rows are evaluated as they were held out"
            )
    # where the held-out rows have a source of their own, others may be trained on by now
    of_source = not isinstance(then.data.eval, int | float | None)
    train = None if of_source else state["position"]["data"]
    return asked.with_values(before), Expected(train, state.get("held_out"))


def about_rows(config: Config) -> dict[str, Any]:
    """The keys that decide which rows are held out and what their loss is."""
    given = config.model_dump(mode="json")
    data = {f"data.{name}": value for name, value in given["data"].items() if name not in MAY_MOVE}
    train = {f"train.{name}": given["train"][name] for name in OF_TRAIN}
    method = {f"{config.method}.{name}": value for name, value in config.of_method.items()}
    return {"method": config.method, **data, **train, **method}


def longest_row(model: Model) -> int:
    """Tokens of the longest row that a model which no run wrote is evaluated on."""
    default: int = TrainOptions().seq_len
    return min(default, sample.positions_of(model) or default)


# -- conversations ---------------------------------------------------------------------------------

HELD_TOKENS = 8192  # of a conversation whose weights stay on the device
LEAST_SHARE = 4  # an answer may have this part of the model's positions, at least


@dataclass(frozen=True)
class Reply:
    """An answer."""

    answer: str
    tokens: int  # the end included
    seconds: float  # from the question to the last
    ended: str  # "end" by itself, "length" at the longest that it may be


@dataclass
class Conversation:
    """Turns of a user and answers to them. Weights stay on the device where they have room."""

    engine: Engine
    model: Model
    max_new_tokens: int
    draw: Draw
    system: Turns
    pictures: Sequence[Picture] = ()  # of the first question

    def __post_init__(self) -> None:
        self._turns: list[dict[str, Any]] = []  # but for the system prompt
        self._answers, self._positions, self._held = 0, sample.positions_of(self.model), ExitStack()
        # for whose keys and values there is room beside the weights
        self._tokens = min(HELD_TOKENS, self._positions or HELD_TOKENS)
        self._whole: Any = self._held.enter_context(self.engine.whole(self._tokens))
        if self._whole is None:
            logger.warning(
                "the weights have no room to stay on the device: each answer fetches them, or each "
                "token streams all of them once"
            )

    def answer(self, prompt: str, show: Callable[[str], object] = str) -> Reply:
        """Answer a prompt; both become turns. Raises ConfigError and ModelError if it cannot be."""
        began = time.perf_counter()
        pictures, self.pictures = self.pictures, ()
        turns, ids = self._fitting([*self._turns, sample.user(prompt, pictures)])
        about = self.model, turns, ids, self.max_new_tokens, self.draw, show, self._answers
        made = sample.written(self._rollout, *about)
        text = sample.text_of(self.model, made.ids)
        ended = "length" if made.finish == "length" else "end"
        self._answers += 1
        self._turns = [*turns, {"role": "assistant", "content": text}]
        return Reply(text, len(made.ids), time.perf_counter() - began, ended)

    def _fitting(self, turns: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
        """(the newest turns that leave room for an answer, their token ids with the system's)."""
        longest, asked = self._positions, len(turns)
        while longest is not None and len(turns) > 1:
            kept = min(self.max_new_tokens, longest // LEAST_SHARE)
            if len(sample.rendered_ids(self.model, [*self.system, *turns])) + kept <= longest:
                break
            turns = turns[2:]  # a question and its answer
        if len(turns) < asked:
            words = f"the model reads {longest:,} tokens, an answer included: the oldest"
            logger.warning(f"{words} {(asked - len(turns)) // 2} questions are forgotten")
        return turns, sample.ids_of(self.model, [*self.system, *turns])

    def _rollout(self, requests: Sequence[AnswerRequest], *how: Any) -> Iterator[Answer]:
        """As `Engine.rollout`, by the weights that stay on the device, if they do."""
        (asked,) = requests
        if self._whole is not None and len(asked.ids) + asked.most <= self._tokens:
            return answers(self._whole, requests, *how)
        self.close()  # what is free is known only without them
        return self.engine.rollout(requests, *how)

    def close(self) -> None:
        self._whole = None
        self._held.close()


@contextmanager
def open_chat(
    named: str | Path,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    system: str | None,
    trust_remote_code: bool,
    images: Sequence[str] = (),
) -> Iterator[Conversation]:
    """A conversation with a model; arguments as `generate` has them. Raises ModelError for
    a template that is missing, or takes no system prompt."""
    draw = sample.draw_of(**sampling)
    checkpoint, model, pictures = writer_of(named, trust_remote_code, images)
    if model.tokenizer.chat_template is None:
        raise ModelError(
            f"{named}: has no chat template, which says how turns are written; leave --chat out to "
            "have a text continued, or put a chat_template.jinja into the model's folder"
        )
    turns = sample.system_turns(model, system)
    with reader(checkpoint, run_folder_of(Path(named)), trust_remote_code, model.sight) as engine:
        chat = Conversation(engine, model, max_new_tokens, draw, turns, pictures)
        with closing(chat):
            yield chat


# -- a rollout without training --------------------------------------------------------------------

SHOWN = 200  # characters of a prompt or an answer


def try_out(config: Config, prompts: int) -> dict[str, Any]:
    """Write `num_generations` answers to each of some prompts, the first of a run, and judge
    them. config: of a method of prompts."""
    quiet_libraries()
    model = suited(read_model(config), config)
    rows, _ = read_prompt_rows(config, model, day_of(config))
    chosen: Any = rows.choose(permutation(len(rows), config.train.seed, 0)[:prompts])
    with ExitStack() as stack:
        computing = {"precision": config.precision, "device": config.device}
        engine = stack.enter_context(frozen.first_model(config, **computing))
        log = Path(stack.enter_context(TemporaryDirectory())) / "printed"
        stack.callback(lambda: log.exists() and sys.stderr.write(log.read_text(errors="replace")))
        rollouts = Rollouts(
            rows=chosen, held_out=None, config=config, model=model, micro_batch_tokens=0
        )
        rollouts.begin(engine, stack, log, trains=False)
        began = time.perf_counter()
        count = config.policy.num_generations
        figures, groups = rollouts.answered(chosen, None, count, StopRequest())
        answers = [
            {"prompt": one["prompt"], "answer": answer, "rewards": rewards}
            for one in groups
            for answer, *rewards in zip(one["completions"], *one["rewards"], strict=True)
        ]
        seconds, names = time.perf_counter() - began, rollouts.judges.names
        return {**figures, "seconds": seconds, "names": names, "answers": answers}


def print_answers(found: dict[str, Any]) -> None:
    """Print the figures, and the first answer to each prompt with its rewards."""
    table = Table("prompt", "answer", *found["names"])
    firsts = {str(one["prompt"]): one for one in reversed(found["answers"])}
    for one in firsts.values():
        texts = (_text(one[name]) for name in ("prompt", "answer"))
        table.add_row(*texts, *("-" if x is None else f"{x:.3g}" for x in one["rewards"]))
    console = Console()
    console.print(table)
    for name, value in found.items():
        if isinstance(value, float):
            console.print(f"{name:<42} {value:.4g}", highlight=False)


def _text(given: Any) -> str:
    text = given if isinstance(given, str) else str(given[-1]["content"])
    return printable(text[-SHOWN:]).replace("[", r"\[")
