"""Sections of the config: model, methods of preferences, memory, costs, checkpoints, evaluations.

Keys and defaults of preference methods are TRL's; a section's keys are the arguments of its
method's loss (`megatrain.losses.LOSSES`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from megatrain.config import values as v
from megatrain.config.values import Options, did_you_mean, key, option, refuse, shown, wrong
from megatrain.errors import ConfigError


def _or_text(schema: dict[str, Any]) -> None:
    """Make the schema of a section also that of a bare text."""
    section = schema.copy()
    schema.clear()
    schema["anyOf"] = [{"type": "string"}, section]


class ModelOptions(Options):
    """The model, and the start of its weights. A bare text is short for `{path: text}`."""

    model_config = ConfigDict(json_schema_extra=_or_text)

    path: v.SourceOrNull = key(None, "Hub id, local folder or GGUF file that holds the weights.")
    config: v.SourceOrNull = key(
        None, "Folder with the shape (config.json) and the tokenizer; the weights are random."
    )
    init: v.Init = key("pretrained", "pretrained reads weights; random draws them from the seed.")
    revision: v.Text | None = key(None, "Branch, tag or commit on the hub.")
    images: bool | v.Auto = key(
        "auto",
        "Read images, and load what the model sees with; auto: if one of the first rows has some.",
    )
    trust_remote_code: bool = key(
        False,
        "Run code that comes with the weights; in a file it counts once a command on this machine "
        "has said so for this model.",
    )

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, given: object) -> object:
        if isinstance(given, str):
            return {"path": given}
        if isinstance(given, dict) and given.get("config") is not None:
            return {"init": "random", **given}  # a shape has no weights to read
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.config is None):
            ways = "`path` (weights) or `config` (a shape, weights at random)"
            refuse("config", f"name either {ways}, not both")
        if self.config is not None and self.init == "pretrained":
            refuse("init", "`config` gives a shape and no weights; use `path`, or init: random")
        return self

    @property
    def source(self) -> str:
        """Hub id, folder or file, whichever of `path` and `config` was given."""
        source = self.path or self.config
        assert source is not None
        return source


NEARER = "How strongly the model is held to the reference; higher stays nearer."
_Smoothing = Annotated[float, Field(ge=0, lt=0.5), "a number from 0 to below 0.5"]
_Range = Annotated[tuple[float, float], v.FROM_LIST, "two numbers"]
_Weights = Annotated[tuple[float, ...], v.FROM_LIST, "a list of numbers"]


class DpoOptions(Options):
    """Direct preference optimisation and its kin: pairs of answers, and a reference model."""

    beta: v.Positive = key(0.1, NEARER)
    loss_type: v.DpoLosses = key(
        ("sigmoid",),
        "Loss, or a list of losses that are added: sigmoid, hinge, ipo, exo_pair, nca_pair, "
        "robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop, sft, "
        "sigmoid_norm.",
    )
    loss_weights: _Weights | None = key(None, "Weight of each loss of a list; null: 1 each.")
    label_smoothing: _Smoothing = key(
        0.0, "Share of preferences that are wrong, for robust, exo_pair, aot and aot_unpaired."
    )
    discopop_tau: v.Positive = key(0.05, "discopop: temperature of its mixture.")


class OrpoOptions(Options):
    """Odds ratio preference optimisation: pairs of answers, no reference."""

    beta: v.Positive = key(0.1, "Weight of the odds ratio beside the chosen answers' likelihood.")


class SimpoOptions(Options):
    """Simple preference optimisation: pairs of answers, no reference."""

    beta: v.Positive | None = key(
        None, "Scale of rewards, which are means over tokens. Required; 2.0 to 2.5 in the paper."
    )
    simpo_gamma: v.NotNegative = key(0.5, "Margin that is wanted between rewards.")


class CpoOptions(Options):
    """Contrastive preference optimisation: pairs of answers, no reference."""

    beta: v.Positive = key(0.1, "Scale of the difference of log-probabilities.")
    cpo_alpha: v.NotNegative = key(1.0, "Weight of the chosen answers' likelihood.")
    loss_type: v.CpoLoss = key("sigmoid", "sigmoid, hinge or ipo; simpo is a method of its own.")
    label_smoothing: _Smoothing = key(0.0, "Share of preferences that are wrong.")


class KtoOptions(Options):
    """Kahneman-Tversky optimisation: answers that are wanted or not, and a reference model."""

    beta: v.Positive = key(0.1, NEARER)
    desirable_weight: v.NotNegative = key(1.0, "Weight of wanted answers' losses.")
    undesirable_weight: v.NotNegative = key(1.0, "Weight of unwanted answers' losses.")


class RewardOptions(Options):
    """A reward model, which scores answers: pairs of them, of which one should score higher."""

    center_rewards_coefficient: v.Positive | None = key(
        None, "Weight of the squared sum of a pair's scores, which holds them near 0; null: none."
    )


class DistillOptions(Options):
    """A teacher whose distributions the model learns, on the rows' answers or its own."""

    teacher_model_name_or_path: v.SourceOrNull = key(
        None, "The teacher, of any size and of the same vocabulary; it stays frozen in host RAM."
    )
    signal: Literal["distribution", "sampled"] = key(
        "distribution", "Of all tokens that may come next, or of those that it drew (lmbda: 1)."
    )
    beta: v.Fraction = key(
        1.0, "0: the forward divergence; 1: the reverse one; between: Jensen and Shannon's."
    )
    teacher_top_k: v.Count | None = key(
        None,
        "Likeliest tokens at each target, which the teacher writes to a file before training, to "
        "be needed no more; null: it stays beside, and gives all.",
    )
    temperature: v.Positive = key(1.0, "Divides both sides' logits, and those that it writes by.")
    lmbda: v.Fraction = key(
        0.0, "Share of the steps whose answers the model writes itself; 0: the rows' own, always."
    )
    max_completion_length: v.Count = key(256, "Longest answer that it writes, in tokens.")


class PolicyOptions(Options):
    """Answers that the model writes, several to a prompt, and functions that reward them."""

    num_generations: v.Group = key(8, "Answers to each prompt: a group.")
    max_completion_length: v.Count = key(256, "Longest answer in tokens.")
    num_iterations: v.Count = key(1, "Times that the answers of a rollout are trained on.")
    beta: v.NotNegative = key(
        0.0,
        "Weight of the divergence from the model as the run begins, whose weights then stay in "
        "host RAM, too; 0: none.",
    )
    epsilon: v.Positive = key(0.2, "How far a ratio may fall below 1, or rise above it.")
    epsilon_high: v.Positive | None = key(None, "How far it may rise above 1; null: epsilon.")
    mask_truncated_completions: bool = key(False, "Leave answers without an end out of the loss.")
    dynamic_sampling: bool = key(
        False,
        "Answer further prompts in place of those whose answers have equal rewards, up to "
        "three times as many.",
    )


class GrpoOptions(PolicyOptions):
    """Group relative policy optimisation and its kin."""

    loss_type: v.PolicyLoss = key("dapo", "dapo, bnpo, grpo, dr_grpo or cispo.")
    delta: v.Positive | None = key(None, "Largest ratio of answers that did badly; null: any.")
    importance_sampling_level: Literal["token", "sequence"] = key(
        "token", "Ratios of each token, or (GSPO) of whole answers."
    )
    off_policy_mask_threshold: v.Positive | None = key(
        None, "Divergence above which an answer that did badly is left out; null: none is."
    )
    importance_sampling_correction: bool = key(
        True, "Weigh by the ratio of the trainer's to the sampler's probabilities."
    )
    importance_sampling_mode: v.RatioMode = key(
        "sequence_mask",
        "Ratios of tokens or of whole answers; above the limit mask leaves out, truncate cuts.",
    )
    importance_sampling_clip_max: v.Positive = key(3.0, "That limit.")
    scale_rewards: Literal["group", "batch", "none"] = key(
        "group", "Divide by the deviation of a group's rewards, of all rewards, or by none."
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = key(
        "sum_then_normalize", "Of several reward functions."
    )


class RlooOptions(PolicyOptions):
    """REINFORCE whose baseline is the mean of the prompt's other answers."""

    num_generations: v.Group = key(2, "Answers to each prompt: a group.")
    beta: v.NotNegative = key(
        0.05,
        "How much of an answer's divergence from the model as the run begins its reward loses.",
    )
    normalize_advantages: bool = key(False, "Scale the advantages of a rollout to deviation 1.")
    reward_clip_range: _Range | None = key(None, "Lowest and highest reward; null: any.")


class RolloutOptions(Options):
    """The writing of answers: how many, and how their tokens are drawn."""

    generation_batch_size: v.Count = key(
        64, "Answers of one rollout: prompts times num_generations."
    )
    steps_per_generation: v.Count = key(1, "Optimizer steps into which a rollout is cut.")
    temperature: v.Positive = key(1.0, "Divides logits, in writing as in training.")
    top_p: v.Positive | None = key(None, "Draw among the likeliest with this probability together.")
    top_k: v.Count | None = key(None, "Draw among so many of the likeliest.")
    min_p: v.PositiveShare | None = key(
        None, "Draw among those with this share of the likeliest's."
    )
    eval_generations: v.Count = key(
        1, "Answers to each held-out prompt: one is the likeliest, several are drawn."
    )
    vllm_server_base_url: v.UrlOrNull = key(
        None,
        "A vLLM server on the same GPU, which writes the answers; null: they are written here.",
    )
    vllm_server_timeout: v.Positive = key(240.0, "Seconds that it may take for one answer.")


class RewardsOptions(Options):
    """Functions that reward answers."""

    functions: v.Functions = key(
        (),
        "Functions, each as FILE.py:NAME, with TRL's signature, and folders of reward models.",
    )
    reward_weights: _Weights | None = key(None, "Weight of each function; null: 1 each.")
    timeout_s: v.Positive = key(60.0, "Seconds that one call may take.")
    processes: v.Count | v.Auto = key("auto", "Processes that judge; auto: cores, 8 at most.")
    on_bad_reward: Literal["refuse", "none"] = key(
        "refuse", "Stop at a function that fails, or count what it judged as None."
    )


class ToolsOptions(Options):
    """Functions that an answer may call, and the environment that it acts in."""

    functions: v.Functions = key(
        (), "Tools, each as FILE.py:NAME; type hints and docstring tell the model what they do."
    )
    environment_factory: v.Text | None = key(
        None,
        "Class, as FILE.py:NAME, of which each answer has an instance: reset(**row), methods that "
        "are tools, and get_reward() if it rewards.",
    )
    max_tool_calling_iterations: v.Count | None = key(
        None, "Turns of an answer that tools reply to; null: as max_completion_length has room for."
    )
    timeout_s: v.Positive = key(60.0, "Seconds that the calls of one turn may take.")
    max_result_characters: v.Count = key(8192, "Characters of a result that the model reads.")

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.functions, *filter(None, [self.environment_factory]))


class MemoryOptions(Options):
    """Budgets of the memory tiers, and what is placed on which."""

    gpu: v.Size | v.Auto = key("auto", "GPU memory to use, such as 70GiB; auto: all that is free.")
    host: v.Size | v.Auto = key(
        "auto", "Host RAM to use, such as 120GiB; auto: what the machine or its container has."
    )
    resident: v.Number | v.Auto = option("resident")
    replicated: v.Number | v.Auto = option("replicated")
    offload_activations: bool | v.Auto = option("offload_activations")
    retained_on_host: v.Number | v.Auto = option("retained_on_host")
    keep_attention: v.Number | v.Auto = option("keep_attention")
    second_backward: bool | v.Number | v.Auto = option("second_backward")
    sums_on_device: v.Number | v.Auto = option("sums_on_device")
    activations: Literal["none", "int8", "int6", "int4"] = key(
        "none",
        "Codec of recomputed layers' activation checkpoints: int8 takes 52% of bf16's bytes, int6 "
        "39%, int4 28%. The loss stays exact, gradients are near; with none they are exact.",
    )
    nvme: v.Folders | None = key(
        None,
        "Folder on NVMe, or folders on several drives, for what host RAM lacks room for; or null.",
    )
    nvme_size: v.Size | v.Auto = key(
        "auto", "NVMe space to use, such as 800GiB; auto: all that is free."
    )
    nvme_blocks: v.Number | v.Auto = option("nvme_blocks")
    transport: Literal["auto", "gather", "read"] = key(
        "auto",
        "How weights in host RAM come to several GPUs: each uploads its share and they gather the "
        "rest, or all read the host's one copy; the result is the same. auto: read where GPUs do "
        "not reach each other's memory (RTX 4090, 5090).",
    )


class EconomyOptions(Options):
    """Prices and power, for the costs that a plan and a run show. No price is assumed."""

    price_per_hour: v.Positive | None = key(
        None, "Price of the whole machine for an hour; null shows no cost."
    )
    price_per_kwh: v.Positive | None = key(None, "Price of electricity, if paid on top of that.")
    currency: v.Text = key("USD", "Currency of the prices; only shown.")
    gpu_power_w: v.Positive | None = key(
        None,
        "Watts that the GPU draws; null: measured in a run, a share of the data sheet's in a plan.",
    )
    host_power_w: v.Positive | None = key(
        None,
        "Watts of everything but the GPU; null: what the processors' counters show, if readable.",
    )


EVAL_LOSS, EVAL_REWARD = "eval_loss", "eval_reward"
MAX_NEW_TOKENS = 128


class CheckpointOptions(Options):
    """Times at which the run is saved, and what is kept."""

    every: v.Often | None = key(
        200,
        "Steps between checkpoints, or a share of an epoch's; the last step is always kept. null "
        "saves only at the end.",
    )
    keep: v.Count = key(
        2,
        "Newest checkpoints that stay on disk, besides the best, which is saved at any evaluation.",
    )
    patience: v.Count | None = key(
        None, "Evaluations without a better figure that end the run; null: it goes on."
    )
    metric: v.Text = key(
        EVAL_LOSS, "Figure of an evaluation by which it is the best, as metrics.jsonl names it."
    )
    greater_is_better: bool | v.Auto = key(
        "auto", "Of that figure; auto: unless its name ends with loss."
    )
    push_to: v.Text | None = key(
        None,
        "Repository of the hub (owner/name), made private if it is not there, that gets final/, "
        "and checkpoints meanwhile by push_every.",
    )
    push_every: v.Often | None = key(
        None, "Steps between uploads to push_to, as in every; null uploads final/ alone."
    )
    final: Literal["model", "full", "none"] = key(
        "model",
        "final/ at the end: model, ready to upload; full, with the state to train on; or none.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.metric.startswith("eval_"):
            near = f"whose names begin with eval_; did you mean eval_{self.metric}?"
            refuse("metric", f"must be a figure of an evaluation, {near}")
        return self


class EvalOptions(Options):
    """Prompts that evaluations answer. Tasks of lm-eval are run by `megatrain eval RUN --tasks`."""

    prompts: v.FileOrCount = key(
        None,
        "Prompts that every evaluation answers into samples.jsonl: a number of held-out rows, up "
        "to their answers; or a file of text, one a line, or jsonl with `prompt` or `messages`.",
    )
    max_new_tokens: v.Count = key(MAX_NEW_TOKENS, "Longest answer to one of them in tokens.")


def check_lm_eval(where: str) -> None:
    """Raise ConfigError if lm-eval is not installed. where: the flag that needs it."""
    if find_spec("lm_eval") is None:
        raise ConfigError(f"{where}: lm-eval is not installed; pip install 'megatrain[eval]'")


ONE = "a file, a folder, a glob, a hub id, or {path, weight, split, format}"
SEVERAL = f"{ONE}, or a list of these"
SHARE = "a share of the rows above 0 and below 1, a number of rows"


class SourceOptions(Options):
    """One of several sources. A bare text is short for `{path: text}`."""

    path: v.Source
    weight: v.Positive | None = key(None, "Share of an epoch's rows, relative to other weights.")
    split: v.Text | None = key(None, "Split of this source; null: data.split.")
    format: v.Format = key("auto", "Row format of this source; auto: data.format.")

    @model_serializer
    def _short(self) -> str | dict[str, Any]:
        given = {name: getattr(self, name) for name in self.own()}
        return self.path if len(given) == 1 else given


def _one(given: object, place: str = "") -> SourceOptions:
    if isinstance(given, SourceOptions):
        return given
    if not isinstance(given, dict | str):
        raise wrong(f"{place}must be {ONE}, not {shown(given)}")
    fields = {"path": given} if isinstance(given, str) else given
    if unknown := next((name for name in fields if name not in SourceOptions.model_fields), None):
        known = ", ".join(SourceOptions.model_fields)
        near = did_you_mean(unknown, SourceOptions.model_fields)
        raise wrong(f"{place}must be {ONE}; {unknown} is none of {known}{near}")
    try:
        return SourceOptions.model_validate(fields)
    except ValidationError as error:
        fault = error.errors()[0]
        if fault["type"] == "missing":
            raise wrong(f"{place}must be {ONE}; path is missing") from None
        inside = "" if isinstance(given, str) else f"{fault['loc'][0]}: "
        raise wrong(f"{place}{inside}{fault['msg']}") from None


def _several(given: object) -> tuple[SourceOptions, ...]:
    if not isinstance(given, list | tuple):
        return (_one(given),)
    if not given:
        raise wrong(f"must be {SEVERAL}, not an empty list")
    found = tuple(_one(one, f"source {n}: ") for n, one in enumerate(given, start=1))
    missing = next((one.path for one in found if one.weight is None), None)
    if missing is not None and any(one.weight is not None for one in found):
        raise wrong(f"{missing} must be given a weight, too: all sources have one, or none has")
    return found


def _held_out(given: object) -> float | int | tuple[SourceOptions, ...] | None:
    if isinstance(given, str | dict | list | tuple | SourceOptions):
        found = _several(given)
        for one in (one for one in found if one.weight is not None):
            raise wrong(f"{one.path}: a weight is for data.train; every held-out row counts once")
        return found
    is_share = isinstance(given, float) and 0 < given < 1
    is_count = isinstance(given, int) and not isinstance(given, bool) and given >= 1
    if given is None or is_share or is_count:
        return given  # type: ignore[return-value]
    raise wrong(f"must be {SHARE}, null, {SEVERAL}, not {shown(given)}")


def _short(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    dumped = [one.model_dump(mode="json") for one in value]
    return dumped[0] if len(dumped) == 1 and isinstance(dumped[0], str) else dumped


_TEXT, _MAPPING = {"type": "string"}, SourceOptions.model_json_schema()
_ANY = [_TEXT, _MAPPING, {"type": "array", "items": {"anyOf": [_TEXT, _MAPPING]}}]
_NUMBERS = [
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "integer", "minimum": 1},
]
Sources = Annotated[
    tuple[SourceOptions, ...],
    PlainValidator(_several),
    PlainSerializer(_short),
    WithJsonSchema({"anyOf": _ANY}),
]
HeldOut = Annotated[
    float | int | tuple[SourceOptions, ...] | None,
    PlainValidator(_held_out),
    PlainSerializer(_short),
    WithJsonSchema({"anyOf": [*_NUMBERS, *_ANY, {"type": "null"}]}),
]
