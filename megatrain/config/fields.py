"""Every key of the config, its type, its default and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, PrivateAttr, model_validator
from pydantic_core import CoreSchema

from megatrain.config import values as v
from megatrain.config.document import write_yaml
from megatrain.config.values import choice, wrong

NOT_BUILT = "not built yet"
DEFAULT_TOKENS_PER_STEP = 65536
DEFAULT_DECAY_SHARE = 0.2  # of all steps, the last stretch of `wsd`

_METHOD = Literal["sft", "pretrain"]
_INIT = Literal["pretrained", "random"]
_FORMAT = Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt", "text"]
_TRAIN_ON = Literal["assistant", "all"]
_BAD_ROW = Literal["refuse", "skip"]
_SCHEDULE = Literal["constant", "linear", "cosine", "wsd"]
_OPTIMIZER = Literal["adamw", "lion", "adafactor", "muon"]
_MOMENTS = Literal["auto", "float32", "bfloat16", "int8"]
_ADJUST_LR = Literal["auto", "match_rms_adamw", "original"]
_PRECISION = Literal["auto", "bfloat16", "float32", "fp8"]
_ATTENTION = Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]
_ACTIVATIONS = Literal["none", "fp8", "int8", "int6", "int4"]
_NVME_ARRAYS = Literal["auto", "state", "gradients", "all"]
_DEVICE = Literal["auto", "cpu", "cuda"]

_OTHER_METHODS = dict.fromkeys(("dpo", "kto", "orpo", "simpo", "cpo", "ppo", "grpo", "rloo", "reward", "distill", "gkd"), NOT_BUILT)
_OTHER_OPTIMIZERS = dict.fromkeys(("adam", "sgd", "lamb", "adagrad", "rmsprop", "sophia"), NOT_BUILT)
_OTHER_PRECISIONS = {
    "float8": "called fp8 here",
    "float16": "not offered, since it needs loss scaling and bfloat16 does not",
    "fp16": "not offered, since it needs loss scaling and bfloat16 does not",
}


_NumberOrAuto = Annotated[Annotated[int, Field(ge=0)] | v.Auto, v.wanted("a whole number of at least 0, or auto")]


class Options(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelOptions(Options):
    """Which model, and where its weights start from. A bare text is short for `{path: text}`."""

    path: v.SourceOrNull = Field(default=None, description="Hub id, local folder or GGUF file that holds the weights.")
    config: v.SourceOrNull = Field(
        default=None, description="Folder that gives the shape (config.json) and the tokenizer; the weights start at random."
    )
    init: Annotated[_INIT, choice(_INIT)] = Field(
        default="pretrained", description="pretrained reads the weights; random draws them from the seed."
    )
    revision: v.TextOrNull = Field(default=None, description="Branch, tag or commit on the hub.")
    trust_remote_code: v.Flag = Field(
        default=False, description="Run code that comes with the weights; no file of the model can ask for it."
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
            raise wrong("name either `path` (weights) or `config` (a shape, weights at random), and only one of them", key="config")
        if self.config is not None and self.init == "pretrained":
            raise wrong("`config` gives a shape and no weights; use `path`, or init: random", key="init")
        return self

    @property
    def source(self) -> str:
        """Hub id, folder or file, whichever of `path` and `config` was given."""
        source = self.path or self.config
        assert source is not None
        return source

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler.resolve_ref_schema(handler(core_schema))]}


class DataOptions(Options):
    """What is trained on, and what is held out."""

    train: v.Source = Field(description="File (json, jsonl, txt, csv, parquet), folder of such files, or hub id.")
    eval: v.HeldOut = Field(default=0.02, description="Share of the rows, number of rows, or a source of its own; null holds nothing out.")
    format: Annotated[_FORMAT, choice(_FORMAT)] = Field(default="auto", description="Row format; auto finds it from the columns.")
    train_on: Annotated[_TRAIN_ON, choice(_TRAIN_ON)] = Field(
        default="assistant", description="Loss on the assistant's turns, or on everything."
    )
    packing: v.FlagOrAuto = Field(
        default="auto",
        description="Rows of sft share sequences of seq_len tokens, unseen by each other; auto: on CUDA, up to 4,096, if the model can.",
    )
    on_bad_row: Annotated[_BAD_ROW, choice(_BAD_ROW)] = Field(default="refuse", description="Stop at a broken row, or skip and count it.")
    split: v.TextOrNull = Field(default=None, description="Split of a hub data set, such as train.")
    text_field: v.TextOrNull = Field(default=None, description="Column that holds plain text; null finds it.")


class TrainOptions(Options):
    """The steps: their size, number, rate and evaluation."""

    tokens_per_step: v.CountOrNull = Field(
        default=DEFAULT_TOKENS_PER_STEP, description="Real tokens of one optimizer step. Excludes rows_per_step."
    )
    rows_per_step: v.CountOrNull = Field(default=None, description="Rows of one optimizer step. Excludes tokens_per_step.")
    micro_batch_tokens: v.CountOrAuto = Field(
        default="auto", description="Padded tokens computed at once; changes memory and speed, not the result."
    )
    groups: v.CountOrAuto = Field(default="auto", description="Groups of micro-batches that share one trip of the weights; not the result.")
    head_chunk_tokens: v.CountOrAuto = Field(
        default="auto", description="Targets whose logits exist at a time; changes memory and speed, not the result."
    )
    layer_chunk_tokens: v.CountAutoOrNull = Field(
        default="auto", description="Tokens that a layer's MLP and norms take at a time; null: a micro-batch. Memory, not the result."
    )
    retained: _NumberOrAuto = Field(
        default="auto", description="The last so many layers keep what their backward needs; the others compute it twice. Not the result."
    )
    cheap_retention: v.FlagOrAuto = Field(
        default="auto", description="Retained layers keep what products and attention need, and compute the rest again (needs compile)."
    )
    seq_len: v.SequenceLength = Field(default=4096, description="Longest row in tokens; longer ones are cut, and counted.")
    epochs: v.PositiveOrNull = Field(default=1.0, description="Passes over the data. null when max_steps alone decides.")
    max_steps: v.CountOrNull = Field(default=None, description="Optimizer steps. With epochs as well, whichever ends first.")
    learning_rate: v.Positive = Field(default=1e-5, description="Peak learning rate.")
    schedule: Annotated[_SCHEDULE, choice(_SCHEDULE)] = Field(default="cosine", description="Course of the learning rate after warm-up.")
    warmup: v.NotNegative = Field(default=0.03, description="Below 1 a share of all steps, else steps.")
    min_lr_ratio: v.Fraction = Field(default=0.0, description="Learning rate at the end over its peak.")
    decay: v.FractionOrNull = Field(default=None, description="wsd only: share of all steps in which the rate falls (0.2 unless said).")
    max_grad_norm: v.ClipNorm = Field(
        default=1.0, description="Global gradient norm to clip to; null does not clip and saves 2 bytes a parameter."
    )
    eval_every: v.CountOrNull = Field(default=100, description="Steps between evaluations; null evaluates before and after alone.")
    eval_rows: v.CountOrNull = Field(default=None, description="At most so many held-out rows an evaluation.")
    log_every: v.Count = Field(default=1, description="Steps between lines on the terminal; metrics.jsonl has every step.")
    seed: v.Seed = Field(default=0, description="Of shuffling, dropout and random weights.")
    deterministic: v.Flag = Field(default=False, description="Bit-identical repeats on CUDA, at the price of speed.")

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
            settled["decay"] = DEFAULT_DECAY_SHARE
        return settled

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tokens_per_step is None) == (self.rows_per_step is None):
            key = "tokens_per_step" if self.tokens_per_step is None else "rows_per_step"
            raise wrong("the size of a step is tokens_per_step or rows_per_step, and one excludes the other; set one", key)
        if self.epochs is None and self.max_steps is None:
            raise wrong("without epochs and max_steps the run has no end; set one", key="epochs")
        if self.warmup >= 1 and not self.warmup.is_integer():
            raise wrong(f"must be a share below 1 or a whole number of steps, not {self.warmup}", key="warmup")
        if self.decay is not None and self.schedule != "wsd":
            raise wrong(f"belongs to schedule: wsd, and the schedule is {self.schedule}; remove it", key="decay")
        if self.decay is not None and self.warmup < 1 and self.warmup + self.decay > 1:
            raise wrong(f"with warmup {self.warmup} it exceeds the whole run; their sum may be 1 at most", key="decay")
        if self.min_lr_ratio and self.schedule == "constant":
            raise wrong("a constant learning rate has no end value; remove it or choose another schedule", key="min_lr_ratio")
        return self


class CheckpointOptions(Options):
    """When the run is saved."""

    every: v.CountOrNull = Field(
        default=200, description="Steps between checkpoints; the last step is always kept. null saves at the end alone."
    )
    keep: v.Count = Field(default=2, description="Newest checkpoints that stay on disk, besides the best.")


class OptimizerOptions(Options):
    """How gradients become updates."""

    name: Annotated[_OPTIMIZER, choice(_OPTIMIZER, _OTHER_OPTIMIZERS)] = Field(default="adamw", description="Optimizer.")
    moments: Annotated[_MOMENTS, choice(_MOMENTS)] = Field(
        default="auto",
        description="adamw, lion: type the moments are kept in, 4, 2 or 1 bytes each a parameter; bfloat16 and int8 are rounded "
        "stochastically; auto: float32.",
    )
    betas: v.BetasOrAuto = Field(
        default="auto", description="Decay rates of the moments; auto: adamw and muon's AdamW [0.9, 0.999], lion [0.9, 0.99]."
    )
    eps: v.PositiveOrAuto = Field(default="auto", description="Added to the root of the second moment; auto: adamw 1e-8.")
    weight_decay: v.NotNegative = Field(default=0.0, description="Decoupled; norms and biases are spared.")
    beta2_decay: v.NotPositiveOrAuto = Field(
        default="auto", description="adafactor: a new gradient counts step ** beta2_decay in the second moment; auto: -0.8."
    )
    clip_threshold: v.AtLeastOneOrAuto = Field(
        default="auto", description="adafactor: an update whose root mean square is larger is scaled down to it; auto: 1."
    )
    momentum: v.BetaOrAuto = Field(default="auto", description="muon: decay rate of the momentum; auto: 0.95.")
    nesterov: v.FlagOrAuto = Field(default="auto", description="muon: Nesterov's momentum; auto: true.")
    ns_steps: v.CountOrAuto = Field(default="auto", description="muon: Newton-Schulz iterations; auto: 5.")
    adjust_lr_fn: Annotated[_ADJUST_LR, choice(_ADJUST_LR)] = Field(
        default="auto", description="muon: a matrix's rate by its shape; auto: match_rms_adamw, for which AdamW's rates are right."
    )
    adamw_lr: v.PositiveOrAuto = Field(
        default="auto", description="muon: peak rate of embedding, head, norms and biases, which are AdamW's; auto: train.learning_rate."
    )


class MemoryOptions(Options):
    """Budgets of the tiers, in bytes, and what lies where."""

    gpu: v.SizeOrAuto = Field(default="auto", description="GPU memory to use, such as 70GiB; auto is what the GPU has.")
    host: v.SizeOrAuto = Field(
        default="auto", description="Host RAM to use, such as 120GiB; auto is what the machine or its container has."
    )
    resident: _NumberOrAuto = Field(
        default="auto", description="The first so many blocks (embedding, layers, head) stay on the GPU with their optimizer state."
    )
    offload_activations: v.FlagOrAuto = Field(default="auto", description="Layers' inputs wait in host RAM between forward and backward.")
    retained_on_host: _NumberOrAuto = Field(
        default="auto", description="Of the layers that train.retained leaves out, so many send what their backward needs to host RAM."
    )
    second_backward: v.FlagOrAuto = Field(
        default="auto",
        description="Clip without stored gradients, which are computed twice: 2 bytes a parameter less; auto: if it must be.",
    )
    activations: Annotated[_ACTIVATIONS, choice(_ACTIVATIONS)] = Field(
        default="none",
        description="Inputs of recomputed layers wait for backward in fewer bits, wherever that is: int8 takes 52% of bf16's bytes, "
        "int6 39%, int4 28%. The loss stays exact and gradients are near; with none they are exact.",
    )
    nvme: v.FoldersOrNull = Field(
        default=None, description="Folder on an NVMe drive, or folders on several, for what host RAM has no room for; null uses none."
    )
    nvme_size: v.SizeOrAuto = Field(default="auto", description="Space to use there, such as 800GiB; auto is what is free.")
    nvme_blocks: _NumberOrAuto = Field(default="auto", description="So many streamed blocks keep arrays there, the last layers first.")
    nvme_arrays: Annotated[_NVME_ARRAYS, choice(_NVME_ARRAYS)] = Field(
        default="auto", description="state (the fp32 remainder and the optimizer's arrays), gradients (those too), or all (weights too)."
    )
    nvme_activations: _NumberOrAuto = Field(
        default="auto", description="Of recomputed layers' inputs, as much as so many layers' are goes on from host RAM to there."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("nvme_blocks", "nvme_activations"):
            if self.nvme is None and getattr(self, key) not in ("auto", 0):
                raise wrong("needs a folder to keep them in; set memory.nvme as well", key=key)
        if self.nvme is None and self.nvme_size != "auto":
            raise wrong("is the space of folders that are not named; set memory.nvme as well", key="nvme_size")
        if self.offload_activations is False and self.nvme_activations not in ("auto", 0):
            raise wrong("layers' inputs get there through host RAM; set offload_activations: true as well", key="nvme_activations")
        if self.offload_activations is False and self.retained_on_host not in ("auto", 0):
            raise wrong("what is sent to host RAM includes layers' inputs; set offload_activations: true as well", key="retained_on_host")
        return self


class EconomyOptions(Options):
    """What the machine costs and draws, for the figures that a plan and a run show. No price is assumed."""

    price_per_hour: v.PositiveOrNull = Field(default=None, description="Price of the whole machine for an hour; null shows no cost.")
    price_per_kwh: v.PositiveOrNull = Field(default=None, description="Price of electricity, added where it is paid besides.")
    currency: v.Text = Field(default="USD", description="Of the prices; only shown.")
    gpu_power_w: v.PositiveOrNull = Field(
        default=None,
        description="Watts that the GPU draws; null measures them in a run, and assumes a share of its data sheet's in a plan.",
    )
    host_power_w: v.PositiveOrNull = Field(
        default=None,
        description="Watts of everything but the GPU; null counts what the processors' own counters show, if they can be read.",
    )


@dataclass(frozen=True)
class Places:
    """Where each key was set: dotted name -> `cfg.yaml:7: train.seq_len`. Two configs with equal values are equal whatever their places."""

    by_key: Mapping[str, str] = field(default_factory=dict, compare=False)


class Config(Options):
    """A whole run. Frozen; `with_values` gives a changed copy."""

    model: ModelOptions = Field(description="Hub id or local folder; or {config: folder, init: random} for pre-training.")
    method: Annotated[_METHOD, choice(_METHOD, _OTHER_METHODS)] = Field(
        default="sft", description="Instruction tuning, or next-token pre-training."
    )
    data: DataOptions
    train: TrainOptions = TrainOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    memory: MemoryOptions = MemoryOptions()
    economy: EconomyOptions = EconomyOptions()
    precision: Annotated[_PRECISION, choice(_PRECISION, _OTHER_PRECISIONS)] = Field(
        default="auto",
        description="bfloat16 computes in bf16 over an exact fp32 master; fp8 does so with fp8 operands in the layers' matrix products; "
        "float32 in fp32; auto looks at the hardware, and is never fp8.",
    )
    attention: Annotated[_ATTENTION, choice(_ATTENTION)] = Field(
        default="auto", description="auto is the fastest that computes the family rightly."
    )
    compile: v.FlagOrAuto = Field(
        default="auto",
        description="torch.compile the layers (needs a C compiler); auto: on CUDA, where all rows have one length, as in pretrain.",
    )
    threads: v.CountOrAuto = Field(default="auto", description="Host threads that update weights.")
    device: Annotated[_DEVICE, choice(_DEVICE)] = Field(default="auto", description="auto is CUDA where there is a GPU.")
    output: v.FolderPath = Field(default=Path("runs/my-first"), description="Run folder.")
    sample_prompt: v.TextOrNull = Field(
        default=None, description="Prompt whose answer the summary at the end shows; null takes a held-out row."
    )

    _places: Places = PrivateAttr(default_factory=Places)

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, given: object) -> object:
        """Pre-training has no turns: its loss is on every token unless the data section says otherwise."""
        data = given.get("data") if isinstance(given, dict) else None
        if isinstance(given, dict) and isinstance(data, dict) and given.get("method") == "pretrain":
            return {**given, "data": {"train_on": "all", **data}}
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.memory.second_backward is True:
            self._check_second_backward()
        if self.method == "pretrain" and self.data.train_on != "all":
            raise wrong("method: pretrain trains on every token; remove data.train_on or set it to all", key="data.train_on")
        return self

    def _check_second_backward(self) -> None:
        key = "memory.second_backward"
        if self.train.max_grad_norm is None:
            raise wrong("without train.max_grad_norm there is no norm to wait for; set a norm, or remove this key", key)
        if self.train.groups not in ("auto", 1) or self.train.retained not in ("auto", 0):
            raise wrong("it begins with the inputs of all layers of all micro-batches; set train.groups: 1 and train.retained: 0", key)
        if self.memory.retained_on_host not in ("auto", 0):
            raise wrong("it begins with the inputs of all layers; set memory.retained_on_host: 0", key)

    def where(self, key: str) -> str:
        """Name a key in an error message: `cfg.yaml:7: train.seq_len` as its user wrote it, or `train.seq_len` where a default stands."""
        return self._places.by_key.get(key, key)

    def with_places(self, by_key: Mapping[str, str]) -> Self:
        """The same values with a note of where they were set."""
        copy = self.model_copy()
        copy._places = Places(by_key)
        return copy

    def with_values(self, values: Mapping[str, object]) -> Config:
        """A copy with dotted keys replaced, validated anew: `config.with_values({"train.micro_batch_tokens": 8192})`."""
        tree = self.model_dump(mode="json")
        for key, value in values.items():
            *sections, name = key.split(".")
            target = tree
            for section in sections:
                target = target[section]
            assert name in target, key
            target[name] = value
        return Config.model_validate(tree).with_places(self._places.by_key)

    def to_yaml(self) -> str:
        """The whole config, defaults written out, as YAML that `load_config` reads back to an equal one."""
        return write_yaml(self.model_dump(mode="json"))
