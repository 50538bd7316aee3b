"""Every key of the config: type, default and meaning."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from megatrain.config import sections as s
from megatrain.config import values as v
from megatrain.config.document import write_yaml
from megatrain.config.sections import EVAL_REWARD, HeldOut, Sources
from megatrain.config.values import Options, Places, key, option, refuse
from megatrain.data.files import check_source
from megatrain.data.samples import PROMPTS, Turns, read_prompts
from megatrain.errors import ConfigError, DataError
from megatrain.methods import METHODS, RATE
from megatrain.settings import OPTIONS, contradiction


class DataOptions(Options):
    """Rows to train on, and rows to hold out."""

    train: Sources = Field(
        description="File (json, jsonl, txt, md, csv, tsv, parquet, arrow; also .gz), folder of "
        "such files, folder of save_to_disk, glob, or hub id, with a split after a colon; or a "
        "list of these or of {path, weight, split, format}, which is read as one."
    )
    eval: HeldOut = key(
        0.02, "Share of the rows, number of rows, or sources of its own; null holds nothing out."
    )
    format: v.Format = key("auto", "Row format; auto finds it from the columns.")
    train_on: v.TrainOn = key("assistant", "Loss on the assistant's turns, or on everything.")
    prompts: Literal["text", "chat", "alpaca"] = key(
        "text",
        "Rows of two texts, prompt and completion: text trains them as they are, chat makes a "
        "question and an answer of them; alpaca is text, and has rows of instruction and output in "
        "the Stanford Alpaca prompt, though the model has a chat template.",
    )
    packing: bool | v.Auto = key(
        "auto",
        "sft: pack examples into sequences of seq_len tokens, with attention masked between them; "
        "auto: on CUDA, up to 4,096 tokens, if the model allows it.",
    )
    truncation_mode: Literal["keep_start", "keep_end", "context", "drop"] = key(
        "keep_start",
        "Rows longer than seq_len: keep_start and keep_end cut them, context leaves out the system "
        "prompt, then the oldest turns, drop leaves them out; texts are split. reward has drop "
        "unless it is set.",
    )
    on_bad_row: v.BadRow = key("refuse", "Stop at a broken row, or skip and count it.")
    split: v.Text | None = key(
        None,
        "Split of data.train, if it is a data set or a folder that has splits; null: train, or the "
        "only one.",
    )
    date: v.Day | v.Auto = key(
        "auto", "Date that chat templates are told; auto: of the run's first start."
    )
    text_field: v.Text | None = key(None, "Column that holds plain text; null finds it.")
    chat_template: v.Text | None = key(
        None,
        "Chat template: chatml, llama3, gemma, phi3, mistral, alpaca, or a file; null: the "
        "tokenizer's own.",
    )
    columns: v.Columns | None = key(
        None, "Columns of other names, ours first: {prompt: question, completion: answer}."
    )
    processes: v.Count | v.Auto = key(
        "auto",
        "Processes that tokenise a set of more than a thousand rows; auto: one for each core, "
        "16 at most.",
    )
    streaming: bool = key(
        False,
        "Train on the first rows of a set while later ones are tokenised, shuffled within windows "
        "of 50,000 rows; needs train.max_steps.",
    )


class TrainOptions(Options):
    """Size, number, learning rate and evaluation of the steps."""

    tokens_per_step: v.Count | None = key(
        65536,
        "Tokens of one optimizer step, without padding. Excludes rows_per_step.",
    )
    rows_per_step: v.Count | None = key(None, "Rows of one step. Excludes tokens_per_step.")
    micro_batch_tokens: v.Count | v.Auto = option("micro_batch_tokens")
    groups: v.Count | v.Auto = option("groups")
    head_chunk_tokens: v.Count | v.Auto = option("head_chunk_tokens")
    layer_chunk_tokens: v.Count | v.Auto | None = option("layer_chunk_tokens")
    retained: v.Number | v.Auto = option("retained")
    cheap_retention: bool | v.Auto = option("cheap_retention")
    seq_len: v.SequenceLength = key(
        4096, "Longest row in tokens; longer texts are split, other rows cut."
    )
    epochs: v.Positive | None = key(
        1.0, "Passes over the data; null: max_steps alone ends the run."
    )
    max_steps: v.Count | None = key(None, "Optimizer steps. With epochs, whichever ends first.")
    learning_rate: v.Positive = key(
        RATE,
        "Peak learning rate; methods of preferences have 1e-6 unless it is set, and reward 1e-4.",
    )
    schedule: v.Schedule = key("cosine", "Shape of the learning rate's decay after warm-up.")
    warmup: v.NotNegative = key(
        0.03, "Below 1 a share of all steps, else steps. Step i of w has i/w."
    )
    min_lr_ratio: v.Fraction = key(0.0, "Final learning rate divided by the peak.")
    decay: v.PositiveShare | None = key(
        None, "wsd only: share of all steps in which the rate falls; 0.2 by default."
    )
    max_grad_norm: v.ClipNorm = key(
        1.0, "Global gradient norm to clip to; null does not clip and saves 2 bytes per parameter."
    )
    router_aux_loss_coef: v.NotNegative | v.Auto = key(
        "auto",
        "Weight of the routers' balancing loss over a step, which is then one group; 0: none; "
        "auto: 0.001 if transformers has that loss for the model, whatever config.json says.",
    )
    context_parallel: v.Count = key(
        1,
        "GPUs of a host that share every sequence, a piece each, for long rows; divides their "
        "number. sft and pretrain, of models whose tokens meet in attention alone.",
    )
    wire: Literal["float32", "bfloat16"] = key(
        "float32",
        "Of several hosts: dtype in which sums of gradients cross the network. bfloat16 halves "
        "their bytes: each host's sum is rounded once, and they are added in float32.",
    )
    freeze: v.Patterns = key(
        None,
        "Tensors not to train: names as in the model's folder, or globs; null: none, but where "
        "images are read what sees, except its projector.",
    )
    eval_every: v.Often | None = key(
        100,
        "Steps between evaluations, or a share of an epoch's: 0.25, or epoch; null evaluates only "
        "before and after the run.",
    )
    eval_rows: v.Count | None = key(None, "Largest number of held-out rows per evaluation.")
    log_every: v.Count = key(1, "Steps between terminal lines; metrics.jsonl has every step.")
    seed: v.Seed = key(0, "Seed of shuffling, dropout and random weights.")
    deterministic: bool = key(False, "Bit-identical repeats on CUDA, but slower.")

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, given: object) -> object:
        """Give way where one key replaces the default of another."""
        if not isinstance(given, dict):
            return given
        settled = dict(given)
        if settled.get("rows_per_step") is not None:
            settled.setdefault("tokens_per_step", None)
        if settled.get("max_steps") is not None:
            settled.setdefault("epochs", None)
        if settled.get("schedule") == "wsd" and settled.get("decay") is None:
            settled["decay"] = 0.2
        return settled

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tokens_per_step is None) == (self.rows_per_step is None):
            key = "tokens_per_step" if self.tokens_per_step is None else "rows_per_step"
            refuse(key, "the size of a step is tokens_per_step or rows_per_step; set one of them")
        if self.epochs is None and self.max_steps is None:
            refuse("epochs", "without epochs and max_steps the run has no end; set one")
        if self.warmup >= 1 and not self.warmup.is_integer():
            refuse("warmup", f"must be a share below 1 or a whole number, not {self.warmup}")
        if self.decay is not None and self.schedule != "wsd":
            refuse("decay", f"belongs to schedule: wsd, not to {self.schedule}; remove it")
        if self.decay is not None and self.warmup < 1 and self.warmup + self.decay > 1:
            refuse("decay", f"with warmup {self.warmup} it exceeds the run; they may add up to 1")
        if self.min_lr_ratio and self.schedule == "constant":
            remedy = "remove it or choose another schedule"
            refuse("min_lr_ratio", f"a constant learning rate has no end value; {remedy}")
        return self


class OptimizerOptions(Options):
    """The optimizer and its hyper-parameters."""

    name: v.OptimizerName = key("adamw", "Optimizer.")
    moments: Literal["auto", "float32", "bfloat16", "int8"] = key(
        "auto",
        "adamw, lion: type of the moments, which take 4, 2 or 1 bytes each per parameter; bfloat16 "
        "and int8 use stochastic rounding; auto: float32.",
    )
    betas: v.Betas | v.Auto = key(
        "auto",
        "Decay rates of the moments; auto: adamw and muon's AdamW [0.9, 0.999], lion [0.9, 0.99].",
    )
    eps: v.Positive | v.Auto = key(
        "auto", "Added to the root of the second moment; auto: adamw 1e-8."
    )
    weight_decay: v.NotNegative = key(
        0.0, "Decoupled; on what transformers' Trainer lets decay: no norm, no bias."
    )
    momentum: v.Beta | v.Auto = key("auto", "muon: decay rate of the momentum; auto: 0.95.")
    nesterov: bool | v.Auto = key("auto", "muon: Nesterov's momentum; auto: true.")
    ns_steps: v.Count | v.Auto = key("auto", "muon: Newton-Schulz iterations; auto: 5.")
    adjust_lr_fn: Literal["auto", "match_rms_adamw", "original"] = key(
        "auto",
        "muon: how a matrix's shape scales its learning rate; auto: match_rms_adamw, for which "
        "AdamW's rates are right.",
    )
    adamw_lr: v.Positive | v.Auto = key(
        "auto",
        "muon: peak rate of embedding, head, norms and biases, which AdamW updates; auto: "
        "train.learning_rate.",
    )


class Config(Options):
    """A whole run. Frozen; `with_values` gives a changed copy."""

    model: s.ModelOptions = Field(
        description="Hub id or local folder; or {config: folder, init: random} for pre-training."
    )
    method: v.Method = key(
        "sft",
        "sft: conversations; pretrain: texts; dpo, orpo, simpo, cpo: pairs of answers; kto: "
        "answers that are wanted or not; reward: pairs of answers, for a model that scores them; "
        "grpo, rloo: prompts, whose answers the model writes and functions reward; distill: rows "
        "as of sft, and a teacher.",
    )
    data: DataOptions
    train: TrainOptions = TrainOptions()
    checkpoint: s.CheckpointOptions = s.CheckpointOptions()
    eval: s.EvalOptions = s.EvalOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    memory: s.MemoryOptions = s.MemoryOptions()
    economy: s.EconomyOptions = s.EconomyOptions()
    dpo: s.DpoOptions = s.DpoOptions()
    orpo: s.OrpoOptions = s.OrpoOptions()
    simpo: s.SimpoOptions = s.SimpoOptions()
    cpo: s.CpoOptions = s.CpoOptions()
    kto: s.KtoOptions = s.KtoOptions()
    reward: s.RewardOptions = s.RewardOptions()
    distill: s.DistillOptions = s.DistillOptions()
    grpo: s.GrpoOptions = s.GrpoOptions()
    rloo: s.RlooOptions = s.RlooOptions()
    rollout: s.RolloutOptions = s.RolloutOptions()
    rewards: s.RewardsOptions = s.RewardsOptions()
    tools: s.ToolsOptions = s.ToolsOptions()
    precision: v.Precision = key(
        "auto",
        "bfloat16 computes in bf16 over an exact fp32 master; fp8 also computes the layers' "
        "matmuls in fp8; float32 in fp32; auto: by the hardware, never fp8.",
    )
    attention: v.Attention = key("auto", "auto: the fastest that is correct for the model family.")
    compile: bool | Literal["loss"] | v.Auto = key(
        "auto",
        "torch.compile layers and loss (needs a C compiler), or the loss alone; auto, on CUDA: "
        "both where all rows have one length, as in pretrain, and layers take no kernels of other "
        "packages (fla, mamba-ssm), else the loss.",
    )
    threads: v.Count | v.Auto = option("update_threads")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: CUDA where there is a GPU.")
    gpus: v.Count | v.Auto = key(
        "auto",
        "GPUs of this host that train together; auto: all that are visible, but no more than "
        "train.rows_per_step has rows for. Launchers such as torchrun say it themselves.",
    )
    track: v.Trackers = key(
        (), "Experiment trackers that get every line of metrics.jsonl, the config and the plan."
    )
    on_end: v.Text | None = key(
        None,
        "URL that gets a JSON object (POST), or command that finds its values in MEGATRAIN_RUN, "
        "MEGATRAIN_STATUS (finished, stopped, failed), MEGATRAIN_EXIT_CODE and MEGATRAIN_TEXT, "
        "when a run's process ends.",
    )
    hang_timeout: v.Count | None = key(
        600,
        "Seconds, at least three planned steps, in which nothing moves before a run shows every "
        "thread's stack and ends with exit code 1; null: never. Until the run is planned, "
        "computing, reading and writing count as moving.",
    )
    output: v.FolderPath = key(Path("runs/my-first"), "Run folder.")
    sample_prompt: v.Text | None = key(
        None, "Prompt that the summary at the end answers; null takes a held-out row."
    )

    _places: Places = PrivateAttr(default_factory=Places)

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, given: object) -> object:
        """Pre-training has no turns: its loss is on every token unless `data` says otherwise. And
        each method has defaults of its own."""
        if not isinstance(given, dict):
            return given
        name, settled = given.get("method", "sft"), dict(given)
        data, train = given.get("data"), given.get("train", {})
        if isinstance(data, dict) and name == "pretrain":
            settled["data"] = {"train_on": "all", **data}
        method = METHODS.get(name) if isinstance(name, str) else None
        if method and isinstance(train, dict):
            sizes = {"tokens_per_step", "rows_per_step"}
            if method.kind == PROMPTS and all(train.get(name) is None for name in sizes):
                train = {**train, "rows_per_step": answers_of_a_step(given)}
            settled["train"] = {"learning_rate": method.learning_rate, **train}
        if method and isinstance(data := settled.get("data"), dict):
            settled["data"] = {"truncation_mode": method.truncation_mode, **data}
            saved, holds_out = given.get("checkpoint", {}), data.get("eval", 1) is not None
            if method.kind == PROMPTS and holds_out and isinstance(saved, dict):
                settled["checkpoint"] = {"metric": EVAL_REWARD, **saved}
        return settled

    @model_validator(mode="after")
    def _check(self) -> Self:
        compiles = None if self.compile == "auto" else self.compile
        given = self.asked() | {"compile": compiles, "nvme_folders": self.memory.nvme or ()}
        given["max_grad_norm"] = self.train.max_grad_norm or 0
        given["activations"] = self.memory.activations
        if found := contradiction(given, in_config=True):
            refuse(*found)
        if fault := fault_of_sections(self) or fault_of_streaming(self) or fault_of_rollouts(self):
            refuse(*fault)
        if self.method == "pretrain" and self.data.train_on != "all":
            reason = "method: pretrain trains on every token; remove it or set it to all"
            refuse("data.train_on", reason)
        return self

    @property
    def of_method(self) -> dict[str, Any]:
        """The keys of the method's own section: the arguments of its loss."""
        section = getattr(self, self.method, None)
        return {} if section is None else dict(section)

    @property
    def policy(self) -> s.PolicyOptions:
        """The section of a method whose answers the model writes."""
        return getattr(self, self.method)  # type: ignore[no-any-return]

    def asked(self) -> dict[str, Any]:
        """Options by field as `planner.job.Asked` has them: None for auto, 0 for whole layers."""
        python = {"auto": None, None: 0}
        given = {option.field: attrgetter(option.key)(self) for option in OPTIONS if option.key}
        return {name: python.get(value, value) for name, value in given.items()}

    def where(self, key: str) -> str:
        """A key in an error message: `cfg.yaml:7: train.seq_len`, or the key if it was not set."""
        return self._places.by_key.get(key, key)

    @property
    def rows(self) -> Mapping[str, Any]:
        """Rows that were given in Python, by the name that a source has for them."""
        return self._places.rows

    def with_rows(self, rows: Mapping[str, Any]) -> Self:
        """The same values with these rows beside those that it has."""
        return self.noting(rows={**self.rows, **rows})

    def noting(self, **notes: Any) -> Self:
        """The same values with other `Places`: notes by their fields."""
        copy = self.model_copy()
        copy._places = replace(self._places, **notes)
        return copy

    def with_values(self, values: Mapping[str, object]) -> Config:
        """A validated copy with dotted keys replaced: `{"train.micro_batch_tokens": 8192}`."""
        tree = self.model_dump(mode="json")
        for dotted, value in values.items():
            *sections, name = dotted.split(".")
            target = tree
            for section in sections:
                target = target[section]
            assert name in target, dotted
            target[name] = value
        return Config.model_validate(tree).noting(**vars(self._places))

    def to_yaml(self) -> str:
        """YAML with all defaults, which `load_config` reads back to an equal config."""
        return write_yaml(self.model_dump(mode="json"))


def _held_out(config: Config) -> bool:
    return config.data.eval is not None


SMOOTHED = {"robust", "exo_pair", "aot", "aot_unpaired"}  # losses of dpo that read label_smoothing
EVALUATED = "is of evaluations of held-out rows; set data.eval too"
# (key, true for a config in which it is read, what reads it)
READERS: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    ("dpo.label_smoothing", lambda c: bool(SMOOTHED & {*c.dpo.loss_type}),
     f"is read by loss_type {', '.join(sorted(SMOOTHED))}; set one of them"),
    ("dpo.discopop_tau", lambda c: "discopop" in c.dpo.loss_type, "is read by loss_type discopop"),
    ("cpo.label_smoothing", lambda c: c.cpo.loss_type == "sigmoid", "is read by loss_type sigmoid"),
    ("train.eval_rows", _held_out, EVALUATED),
    ("checkpoint.patience", _held_out, EVALUATED),
    ("checkpoint.metric", _held_out, EVALUATED),
    ("checkpoint.greater_is_better", _held_out, EVALUATED),
    ("checkpoint.push_every", lambda c: c.checkpoint.push_to is not None,
     "uploads to checkpoint.push_to; set that"),
    ("eval.prompts", lambda c: isinstance(c.eval.prompts, str) or _held_out(c),
     "a number of held-out rows; set data.eval too, or name a file"),
    ("eval.max_new_tokens", lambda c: c.eval.prompts is not None,
     "has no effect without eval.prompts; set that"),
    ("memory.nvme_size", lambda c: c.memory.nvme is not None,
     "limits folders on NVMe; set memory.nvme: [FOLDER] as well"),
    ("memory.gpu", lambda c: c.device != "cpu", "limits a GPU's memory; set memory.host"),
    ("economy.gpu_power_w", lambda c: c.device != "cpu", "is of a GPU"),
    ("model.revision", lambda c: not os.path.exists(c.model.source),
     "is of a model on the hub, and model.path is here"),
)  # fmt: skip


def check_readers(config: Config) -> None:
    """Raise ConfigError for a key that was set and that nothing reads as the config stands."""
    for name, is_read, reason in READERS:
        section, field = name.split(".")
        if field in getattr(config, section).own() and not is_read(config):
            raise ConfigError(f"{config.where(name)}: {reason}, or remove it")


NO_ROOM = "leaves no room for a prompt in train.seq_len {}; raise that, or set less"


def fault_of_sections(config: Config) -> tuple[str, str] | None:
    """The first key that the config's method cannot honour, and why; None if there is none."""
    method = config.method
    writing = [name for name in METHODS if METHODS[name].kind == PROMPTS]
    owners = {name: [name] for name in METHODS if name in Config.model_fields}
    owners |= dict.fromkeys(("rollout", "rewards", "tools"), writing)
    for name, its in owners.items():
        if method not in its and (own := getattr(config, name).own()):
            return f"{name}.{own[0]}", f"belongs to method: {' or '.join(its)}, not to {method}"
    if method == "simpo" and config.simpo.beta is None:
        return "simpo.beta", "method: simpo has no default of it; set 2.0, say"
    if METHODS[method].kind != "plain" and config.data.train_on != "assistant":
        return "data.train_on", f"method: {method} trains on answers; remove it"
    if method == "distill" and config.distill.teacher_model_name_or_path is None:
        return "distill.teacher_model_name_or_path", "is missing: name the teacher's folder or id"
    if config.distill.lmbda and config.data.train_on != "assistant":
        return "distill.lmbda", "writes answers to prompts: set data.train_on: assistant, or 0"
    if config.distill.signal == "sampled" and (config.distill.lmbda, config.distill.beta) != (1, 1):
        why = "the reverse divergence at tokens that the model draws: set lmbda: 1 and beta: 1"
        return "distill.signal", f"sampled: is {why}"
    if config.distill.teacher_top_k and (config.distill.lmbda or config.data.streaming):
        why = "is of all rows, before the first step: set lmbda: 0 and data.streaming: false"
        return "distill.teacher_top_k", why
    if config.distill.lmbda and config.distill.max_completion_length >= config.train.seq_len:
        return "distill.max_completion_length", NO_ROOM.format(config.train.seq_len)
    of_text = {"sample_prompt": config.sample_prompt, "eval.prompts": config.eval.prompts}
    asked = [name for name, value in of_text.items() if value is not None]
    if METHODS[method].scores and asked:
        return asked[0], f"method: {method} trains a model that writes no text; remove it"
    return None


def answers_of_a_step(given: Mapping[str, Any]) -> int | None:
    """Rows of a step that follow from `rollout`; None where it holds no numbers of its keys."""
    try:
        asked = s.RolloutOptions.model_validate(given.get("rollout") or {})
    except ValidationError:
        return None
    return max(1, asked.generation_batch_size // asked.steps_per_generation)


# (key, its values, why others are refused) of methods that write their rows themselves
OF_ROLLOUTS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("data.truncation_mode", ("keep_start",), "prompts are not cut; longer ones are bad rows"),
    ("data.prompts", ("text", "chat"), "a prompt is a text or a turn"),
    ("data.streaming", (False,), "prompts are read whole"),
    ("data.format", ("auto",), "rows hold `prompt` or `messages`, and columns of any name"),
    ("data.text_field", (None,), "rows hold `prompt` or `messages`, and columns of any name"),
    ("train.context_parallel", (1,), "its loss is over whole sequences"),
    ("eval.prompts", (None,), "held-out prompts are answered; set data.eval"),
)


def fault_of_rollouts(config: Config) -> tuple[str, str] | None:
    """The first key that a method of prompts cannot honour, and why; None if there is none."""
    if METHODS[config.method].kind != PROMPTS:
        return None
    method, policy, rollout, rewards = config.method, config.policy, config.rollout, config.rewards
    for name, values, reason in OF_ROLLOUTS:
        if attrgetter(name)(config) not in values:
            return name, f"method: {method} has only {values[0]}: {reason}; remove it"
    if policy.dynamic_sampling and (config.train.epochs or not config.train.max_steps):
        needs = "needs train.max_steps, and no epochs: how many prompts a step takes is not known"
        return f"{method}.dynamic_sampling", needs
    if "vllm_server_timeout" in rollout.own() and not rollout.vllm_server_base_url:
        return "rollout.vllm_server_timeout", "is of rollout.vllm_server_base_url; set that"
    for name in ("top_p", "top_k", "min_p") if rollout.vllm_server_base_url else ():
        if getattr(rollout, name) is not None:
            reason = "a vLLM server does not say how likely what it left out was; remove it"
            return f"rollout.{name}", reason
    answers = policy.num_generations
    size, steps = rollout.generation_batch_size, rollout.steps_per_generation
    if size % (answers * steps):
        parts = f"{method}.num_generations {answers} x rollout.steps_per_generation {steps}"
        return "rollout.generation_batch_size", f"{size} is no multiple of {parts}; set one"
    if config.train.rows_per_step != size // steps:
        asked = "rows_per_step" if config.train.rows_per_step else "tokens_per_step"
        return f"train.{asked}", "follows from rollout.generation_batch_size; remove it"
    if not config.tools.files and (own := config.tools.own()):
        return f"tools.{own[0]}", "no tools are named; set tools.functions, or remove it"
    if not (rewards.functions or config.tools.environment_factory):
        why = "is missing: name what rewards answers, such as rewards.py:check"
        return "rewards.functions", why
    if len(set(map(judge_name, rewards.functions))) < len(rewards.functions):
        return "rewards.functions", "two are called alike; rename one"
    if rewards.reward_weights and len(rewards.reward_weights) != len(rewards.functions):
        return "rewards.reward_weights", "needs a weight for each of rewards.functions"
    if policy.max_completion_length >= config.train.seq_len:
        return f"{method}.max_completion_length", NO_ROOM.format(config.train.seq_len)
    return None


def check_prompts(config: Config) -> list[Turns]:
    """Read `eval.prompts`, if it is a file. Raises DataError with the place of the key."""
    if not isinstance(config.eval.prompts, str):
        return []
    try:
        return read_prompts(config.eval.prompts)
    except DataError as error:
        raise DataError(f"{config.where('eval.prompts')}: {error}") from None


def fault_of_streaming(config: Config) -> tuple[str, str] | None:
    """The first key that cannot go with data.streaming, and why; None if there is none."""
    data, train = config.data, config.train
    unknown = "whose size is not known with data.streaming"
    if not data.streaming:
        return None
    if train.max_steps is None:
        return "data.streaming", "needs train.max_steps: how long an epoch is is not known before"
    if train.epochs is not None:
        return "train.epochs", "how long they are is not known with data.streaming; remove it"
    if isinstance(data.eval, float):
        ways = "a number of rows, which come from the first window, a source of its own, or null"
        return "data.eval", f"a share is of the whole set, {unknown}; set {ways}"
    often = {"train.eval_every": train.eval_every, "checkpoint.every": config.checkpoint.every}
    often["checkpoint.push_every"] = config.checkpoint.push_every
    for name, every in often.items():
        if isinstance(every, float | str):
            return name, f"a share is of an epoch, {unknown}; set a number of steps"
    if any(one.weight is not None for one in data.train):
        return "data.train", f"weights are of whole sets, {unknown}; remove them"
    return None


def is_function(judge: str) -> bool:
    """True for one of `rewards.functions` that is FILE.py:NAME; the others are reward models."""
    return re.fullmatch(r".+\.py:[A-Za-z_]\w*", judge) is not None


def judge_name(judge: str) -> str:
    """The name of one of `rewards.functions`, in metrics."""
    return judge.rpartition(":")[2] if is_function(judge) else Path(judge).name


def check_functions(config: Config) -> None:
    """Raise ConfigError for a function or an environment whose file is not there, or a model whose
    folder is not."""
    for one in config.tools.files:
        if not is_function(one) or not Path(one.rpartition(":")[0]).is_file():
            raise ConfigError(f"{config.where('tools')}: {one}: is no FILE.py:NAME of a file here")
    for one in config.rewards.functions:
        where, file = config.where("rewards.functions"), one.rpartition(":")[0]
        if is_function(one) and not Path(file).is_file():
            raise ConfigError(f"{where}: {file}: no such file")
        if not is_function(one) and not Path(one).is_dir():
            raise ConfigError(
                f"{where}: {one}: is neither FILE.py:NAME nor the folder of a reward model"
            )


def check_sources(config: Config) -> None:
    """Look whether what the config names as data and prompts is there, without reading anything
    large.

    Raises DataError with the place of the key: `cfg.yaml:3: data.train: rows.jsonl: no such file`;
    ConfigError for a file of reward functions.
    """
    check_functions(config)
    check_prompts(config)
    for name in ("train", "eval"):
        given = getattr(config.data, name)
        for one in given if isinstance(given, tuple) else ():
            if one.path in config.rows:
                continue
            try:
                check_source(one.path)
            except DataError as error:
                raise DataError(f"{config.where(f'data.{name}')}: {error}") from None
