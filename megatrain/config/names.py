"""Names from other trainers and earlier versions: those that mean one of our keys, and those that
cannot be honoured.

Aliases are accepted at the top level and inside `train`, where a list of training arguments stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from megatrain.config.values import INSTEAD_OF_ADAFACTOR, did_you_mean, shown

T = TypeVar("T")
Key = tuple[str, ...]  # ("train", "seq_len"), or ("output",) at the top level

# Keys that exist only until both halves are known: rows per step = rows per device x accumulated
# micro-batches; betas = (beta1, beta2).
ROWS_PER_DEVICE: Key = ("train", "per_device_train_batch_size")
ACCUMULATION: Key = ("train", "gradient_accumulation_steps")
BETA1: Key = ("optimizer", "betas.0")
BETA2: Key = ("optimizer", "betas.1")
ADAM_BETAS = (0.9, 0.999)  # Hugging Face's defaults of the two


@dataclass(frozen=True)
class Alias:
    """Another name of `key`. `convert` turns the value into ours, or raises ValueError."""

    key: Key
    convert: Callable[[object], object] = lambda value: value


@dataclass(frozen=True)
class Refusal:
    """A name that cannot be honoured. Its `harmless` values ask for what is done anyway.

    Attributes:
        teaches: what the name asks for would make other weights: an import without it is no import.
    """

    reason: str
    harmless: tuple[object, ...] = (False, None)
    teaches: bool = False


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other  # 1 is not true here


def _one_of(*pairs: tuple[object, object], **texts: str) -> Callable[[object], object]:
    """The value must be the first of a pair, which means the second. texts: further pairs."""
    known = (*pairs, *texts.items())

    def convert(value: object) -> object:
        for theirs, ours in known:
            if _same(theirs, value):
                return ours
        names = ", ".join(shown(theirs) for theirs, _ in known)
        hint = did_you_mean(value, texts)
        raise ValueError(f"{shown(value)} cannot be honoured; known are {names}{hint}")

    return convert


def _but(theirs: object, ours: object) -> Callable[[object], object]:
    """`theirs` means `ours`; other values are the same."""
    return lambda value: ours if _same(theirs, value) else value


NOTHING = object()  # what an alias's value asks for is done anyway


def _evaluation(value: object) -> object:
    if _same("steps", value) or value is None:
        return NOTHING
    if _same("no", value) or value is False:
        return None
    offered = "only counting steps is offered (train.eval_every), or no evaluation (`no`)"
    raise ValueError(f"{shown(value)} cannot be honoured: {offered}")


def _count(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(f"must be a whole number of at least 1, not {shown(value)}")


def _share(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
        return value
    raise ValueError(f"must be a share of all steps, at least 0 and below 1, not {shown(value)}")


# Of these, `no` asks for no evaluation.
STRATEGIES = ("eval_strategy", "evaluation_strategy")

_dtype = _one_of(
    bfloat16="bfloat16", bf16="bfloat16", float32="float32", fp32="float32", auto="auto"
)
_schedule = _one_of(
    constant="constant",
    constant_with_warmup="constant",
    linear="linear",
    cosine="cosine",
    warmup_stable_decay="wsd",
)
_ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_known_optimizer = _one_of(**dict.fromkeys(_ADAMW, "adamw"), lion="lion", lion_32bit="lion")


def _optimizer(value: object) -> object:
    if _same("adafactor", value):
        raise ValueError(f"adafactor is not offered; {INSTEAD_OF_ADAFACTOR}")
    return _known_optimizer(value)


def _figure(value: object) -> object:
    if value is None:
        return "eval_loss"
    begun = isinstance(value, str) and value.startswith("eval_")
    return value if begun or not isinstance(value, str) else f"eval_{value}"


def of_each(names: str, meaning: T) -> dict[str, T]:
    """Rows of a table for several names that mean the same."""
    return dict.fromkeys(names.split(), meaning)


# Names that mean a key of ours, whose values are the same.
_SAME = {
    "model.path": "model_name_or_path base_model",
    "model.revision": "model_revision revision",
    "model.trust_remote_code": "trust_remote_code",
    "train.epochs": "num_train_epochs num_epochs",
    "train.seq_len": "max_length max_seq_length max_seq_len sequence_len cutoff_len block_size",
    "train.learning_rate": "learning_rate lr",
    "train.warmup": "warmup_steps",
    "train.max_grad_norm": "max_grad_norm",
    "train.router_aux_loss_coef": "router_aux_loss_coef moe_aux_loss_coef",
    "train.freeze": "freeze",
    "train.seed": "seed",
    "train.deterministic": "full_determinism",
    "train.log_every": "logging_steps",
    "train.eval_every": "eval_steps",
    "train.eval_rows": "max_eval_samples",
    "checkpoint.every": "save_steps",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.patience": "early_stopping_patience",
    "output": "output_dir",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.eps": "adam_epsilon",
    "attention": "attn_implementation",
    "data.train": "train_file dataset_name dataset",
    "data.eval": "validation_file eval_file val_set_size",
    "data.split": "dataset_train_split",
    "data.text_field": "dataset_text_field",
    "compile": "torch_compile",
    "data.packing": "packing sample_packing",
}
_PROCESSES = "dataset_num_proc dataset_processes preprocessing_num_workers"
_TEMPLATE = "chat_template chat_template_path"
_ANSWERS = "assistant_only_loss completion_only_loss"
ALIASES: dict[str, Alias] = {
    **{name: Alias((*key.split("."),)) for key, names in _SAME.items() for name in names.split()},
    "adam_beta1": Alias(BETA1),
    "adam_beta2": Alias(BETA2),
    **of_each("per_device_train_batch_size micro_batch_size", Alias(ROWS_PER_DEVICE, _count)),
    "gradient_accumulation_steps": Alias(ACCUMULATION, _count),
    "max_steps": Alias(("train", "max_steps"), _but(-1, None)),
    **of_each("lr_scheduler_type lr_scheduler", Alias(("train", "schedule"), _schedule)),
    "warmup_ratio": Alias(("train", "warmup"), _share),
    "metric_for_best_model": Alias(("checkpoint", "metric"), _figure),
    "greater_is_better": Alias(("checkpoint", "greater_is_better"), _but(None, "auto")),
    "optim": Alias(("optimizer", "name"), _optimizer),
    "bf16": Alias(("precision",), _one_of((True, "bfloat16"), (False, "float32"), auto="auto")),
    "fp8": Alias(("precision",), _one_of((True, "fp8"), (False, "auto"))),
    **of_each("dtype torch_dtype", Alias(("precision",), _dtype)),
    **of_each(_PROCESSES, Alias(("data", "processes"), _but(None, "auto"))),
    **of_each(_ANSWERS, Alias(("data", "train_on"), _one_of((True, "assistant"), (False, "all")))),
    "train_on_inputs": Alias(("data", "train_on"), _one_of((True, "all"), (False, "assistant"))),
    **dict.fromkeys(STRATEGIES, Alias(("data", "eval"), _evaluation)),
    "stage": Alias(("method",), _one_of(sft="sft", pt="pretrain")),
    **of_each(_TEMPLATE, Alias(("data", "chat_template"), _but("tokenizer_default", None))),
    **of_each("use_cpu no_cuda", Alias(("device",), _one_of((True, "cpu"), (False, "auto")))),
    "report_to": Alias(("track",), lambda value: [] if value in ("none", ["none"]) else value),
}

# Keys of which one excludes the others: each inner tuple is one way to say the same thing.
_TOKENS, _ROWS = ("train", "tokens_per_step"), ("train", "rows_per_step")
RIVALS: tuple[tuple[tuple[Key, ...], ...], ...] = (
    ((_TOKENS,), (_ROWS,), (ROWS_PER_DEVICE, ACCUMULATION)),
    ((("model", "path"),), (("model", "config"),)),
)


def _drop(what: str, *harmless: object, teaches: bool = False) -> Refusal:
    """The refusal of a key that can only be removed."""
    return Refusal(f"{what}; remove it", harmless or (False, None), teaches)


_OFF = (False, None)
_NO_ADAPTERS = "MegaTrain trains every parameter and has no adapters"
_ADAPTER = _drop(_NO_ADAPTERS, *_OFF, "", teaches=True)
_OF_ADAPTERS = _drop(_NO_ADAPTERS, *_OFF, "")  # alone it asks for none
_ADAPTERS = "use_peft peft peft_config adapter lora qlora"
_UNQUANTISED = "full-parameter training starts from unquantised weights"
_QUANTISED = _drop(_UNQUANTISED, teaches=True)
_QUANTISATION = "load_in_4bit load_in_8bit quantization_config"
_SHARDING = _drop("MegaTrain streams the model itself and takes no sharding library", *_OFF, "", [])
_MIXTURE = Refusal(
    "training in float16 needs loss scaling and is not offered; use precision: bfloat16 or float32"
)
_PLANNED = "the planner decides what is saved and what is recomputed; set memory.gpu to bound it"
_BY_STEPS = "only counting steps is offered"
_TRACKER = Refusal("not offered; `track` takes wandb, tensorboard and trackio", (None, False))
_WANDB = Refusal("set in the environment, as WANDB_PROJECT; `track: wandb` turns it on", (None,))
_HUB = Refusal("nothing is uploaded; use `megatrain export` and upload the folder")
_COMPILE = _drop("`compile: true` compiles the layers, and nothing of how is left to choose")
# Every earlier run folder has these keys, whatever its optimizer, so `auto` is harmless.
_ADAFACTOR_KEY = Refusal(
    f"was a key of adafactor, which is no longer offered; remove it and {INSTEAD_OF_ADAFACTOR}",
    ("auto",),
)
_PACKING = _drop("`data.packing` packs examples, and steps are cut by real tokens")

REFUSED: dict[str, Refusal] = {
    **of_each("fp16 half", _MIXTURE),
    "tf32": _drop("precision: float32 computes in true fp32"),
    **of_each(_ADAPTERS, _ADAPTER),
    "finetuning_type": _drop(
        "MegaTrain trains every parameter but train.freeze's", "full", teaches=True
    ),
    "unfrozen_parameters": _drop(
        "name what is not trained instead (train.freeze)", None, teaches=True
    ),
    **of_each(_QUANTISATION, _QUANTISED),
    "use_bnb_nested_quant": _drop(_UNQUANTISED),
    **of_each("deepspeed fsdp", _SHARDING),
    "gradient_checkpointing": Refusal(_PLANNED, (True, None)),
    "gradient_checkpointing_kwargs": Refusal(_PLANNED, (None,)),
    "auto_find_batch_size": _drop(
        "the planner sizes micro-batches (train.micro_batch_tokens: auto)"
    ),
    "per_device_eval_batch_size": _drop(
        "evaluation is cut as training is (train.micro_batch_tokens)", None
    ),
    "eval_accumulation_steps": _drop("evaluation keeps no outputs", None),
    "label_smoothing_factor": _drop("label smoothing is not built yet", 0, 0.0, None, teaches=True),
    "neftune_noise_alpha": _drop(
        "noise on embeddings is not built yet", 0, 0.0, None, teaches=True
    ),
    "group_by_length": _drop("rows are already sorted by length inside a step"),
    **of_each("padding_free pad_to_sequence_len", _PACKING),
    "save_strategy": Refusal(
        f"{_BY_STEPS} (checkpoint.every: 200, or null for the end alone)", ("steps", None)
    ),
    "logging_strategy": Refusal(f"{_BY_STEPS} (train.log_every)", ("steps", None)),
    "save_only_model": Refusal(
        "a checkpoint holds what an exact resume needs; `megatrain export` writes the model alone"
    ),
    "load_best_model_at_end": Refusal(
        "`best` in the run folder points at the best checkpoint; export it with --checkpoint best"
    ),
    "lr_scheduler_kwargs": Refusal(
        "use train.min_lr_ratio, train.decay, train.warmup", (None, {}), teaches=True
    ),
    "optim_args": Refusal("use the keys of the optimizer section", (None, ""), teaches=True),
    **of_each("beta2_decay clip_threshold", _ADAFACTOR_KEY),
    "push_to_hub": _HUB,
    "use_liger_kernel": _drop("other kernels are not taken in; logits never exist whole anyway"),
    "resume_from_checkpoint": Refusal(
        "continue a run with `megatrain resume RUN_DIR`", teaches=True
    ),
    "overwrite_output_dir": Refusal("a run folder is never overwritten; choose another `output`"),
    "strict": _drop("unknown keys are always refused", True, False, None),
    "do_train": Refusal("`megatrain train` trains; `megatrain eval` evaluates", (True, None)),
    "do_eval": Refusal("set data.eval: null for no evaluation", (True, None)),
    "do_predict": Refusal("`megatrain generate` answers prompts, `megatrain eval` evaluates"),
    "predict_with_generate": Refusal("`eval.prompts` has evaluations answer"),
    "overwrite_cache": _drop("the rows' cache is made anew where rows change", True, False, None),
    "plot_loss": _drop("no plot is drawn; metrics.jsonl has the losses, `track` shows them"),
    "max_samples": Refusal(
        "all rows of data.train are used; name a smaller file, or set train.max_steps",
        (None,),
        teaches=True,
    ),
    "evals_per_epoch": Refusal(f"{_BY_STEPS}: set train.eval_every", (None,)),
    "saves_per_epoch": Refusal(f"{_BY_STEPS}: set checkpoint.every", (None,)),
    "tokenizer_type": _drop("the model's own tokenizer is used", "AutoTokenizer", None),
    "model_type": _drop(
        "config.json of the model says its type", "AutoModelForCausalLM", "LlamaForCausalLM", None
    ),
    "trackio": Refusal("write `track: trackio`"),
    "data_seed": _drop("train.seed covers shuffling too", None),
    "nproc_per_node": Refusal("one GPU is used; more are not built yet", (None, 1)),
    # Configs of older runs spell out this former key: `auto` and 0 ask for nothing that is gone.
    "nvme_activations": Refusal(
        "activation checkpoints no longer go to NVMe; remove it, and if host RAM has no room for "
        "them, keep them there in fewer bits (memory.offload_activations: true, "
        "memory.activations: int8 or int4), or add RAM",
        ("auto", 0),
    ),
}

# Whole families of names, by how they begin.
REFUSED_PREFIXES: dict[str, Refusal] = {
    **of_each("lora_ qlora_ peft_", _OF_ADAPTERS),
    "bnb_": _drop(_UNQUANTISED),
    **of_each("deepspeed_ fsdp_", _SHARDING),
    "wandb_": _WANDB,
    **of_each("mlflow_ comet_", _TRACKER),
    "hub_": _HUB,
    "torch_compile_": _COMPILE,
    "ddp_": _drop("one GPU is used; data-parallel training is not built yet"),
    "dataloader_": _drop("batches are prepared ahead by MegaTrain itself"),
    "fp16_": _MIXTURE,
}

_TASKS = Refusal(
    "runs have no tasks any more; evaluate a run or a checkpoint with `megatrain eval RUN --tasks`",
    (False, None, [], "end"),
)
_NVME_ARRAYS = Refusal(
    "went: the drive holds optimizer state alone; remove the key", ("auto", "state", None)
)
# Keys of earlier versions. Run folders still hold them.
_GONE = of_each("tasks tasks_at limit num_fewshot include_path apply_chat_template", _TASKS)
REMOVED: dict[Key, Refusal] = {("eval", name): refusal for name, refusal in _GONE.items()}
REMOVED[("memory", "nvme_arrays")] = _NVME_ARRAYS


def refusal_of(name: str) -> Refusal | None:
    """The refusal for a name of another trainer, or None for an unknown name."""
    by_prefix = [refusal for prefix, refusal in REFUSED_PREFIXES.items() if name.startswith(prefix)]
    return REFUSED.get(name) or (by_prefix[0] if by_prefix else None)


def is_harmless(refusal: Refusal, value: object) -> bool:
    """True when the value asks for nothing that would not happen anyway."""
    return any(_same(value, harmless) for harmless in refusal.harmless)
