"""Names from other trainers and earlier versions: those that mean one of our keys, and those that
cannot be honoured.

Aliases are accepted at the top level and inside `train`, where a list of training arguments stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatrain.config.values import nearest, shown

Key = tuple[str, ...]  # ("train", "seq_len"), or ("output",) at the top level

# Keys that exist only until both halves are known: rows per step = rows per device x accumulated
# micro-batches; betas = (beta1, beta2).
ROWS_PER_DEVICE: Key = ("train", "per_device_train_batch_size")
ACCUMULATION: Key = ("train", "gradient_accumulation_steps")
BETA1: Key = ("optimizer", "betas.0")
BETA2: Key = ("optimizer", "betas.1")
ADAM_BETAS = (0.9, 0.999)  # Hugging Face's defaults of the two

INSTEAD_OF_ADAFACTOR = (
    "use Lion (optimizer.name: lion), or AdamW with int8 moments (optimizer.moments: int8)"
)


@dataclass(frozen=True)
class Alias:
    """Another name of `key`. `convert` turns the value into ours, or raises ValueError."""

    key: Key
    convert: Callable[[object], object] = lambda value: value


@dataclass(frozen=True)
class Refusal:
    """A name that cannot be honoured. Its `harmless` values ask for what is done anyway."""

    reason: str
    harmless: tuple[object, ...] = (False, None)


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other  # 1 is not true here


def _among(*pairs: tuple[object, object]) -> Callable[[object], object]:
    """The value must be one of the first of each pair; ours is the second."""

    def convert(value: object) -> object:
        for theirs, ours in pairs:
            if _same(theirs, value):
                return ours
        names = [theirs for theirs, _ in pairs if isinstance(theirs, str)]
        near = nearest(value, names) if isinstance(value, str) else None
        hint = f"; did you mean {near}?" if near else ""
        known = ", ".join(shown(theirs) for theirs, _ in pairs)
        raise ValueError(f"{shown(value)} cannot be honoured; known are {known}{hint}")

    return convert


def _unless(theirs: object, ours: object) -> Callable[[object], object]:
    """The value as it is, but for one that has another spelling with us."""
    return lambda value: ours if _same(value, theirs) else value


def _count(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(f"must be a whole number of at least 1, not {shown(value)}")


def _share(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
        return value
    raise ValueError(f"must be a share of all steps, at least 0 and below 1, not {shown(value)}")


_dtype = _among(
    ("bfloat16", "bfloat16"),
    ("bf16", "bfloat16"),
    ("float32", "float32"),
    ("fp32", "float32"),
    ("auto", "auto"),
)
_schedule = _among(
    ("constant", "constant"),
    ("constant_with_warmup", "constant"),
    ("linear", "linear"),
    ("cosine", "cosine"),
    ("warmup_stable_decay", "wsd"),
)
_ADAMW = ["adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"]
_known_optimizer = _among(
    *[(name, "adamw") for name in _ADAMW], ("lion", "lion"), ("lion_32bit", "lion")
)


def _optimizer(value: object) -> object:
    if _same("adafactor", value):
        raise ValueError(f"adafactor is not offered; {INSTEAD_OF_ADAFACTOR}")
    return _known_optimizer(value)


_only_answers = Alias(("data", "train_on"), _among((True, "assistant"), (False, "all")))
_on_cpu = Alias(("device",), _among((True, "cpu"), (False, "auto")))
_SEQ_LEN = [
    "max_length",
    "max_seq_length",
    "max_seq_len",
    "sequence_len",
    "cutoff_len",
    "block_size",
]

ALIASES: dict[str, Alias] = {
    **dict.fromkeys(("model_name_or_path", "base_model"), Alias(("model", "path"))),
    **dict.fromkeys(("model_revision", "revision"), Alias(("model", "revision"))),
    "trust_remote_code": Alias(("model", "trust_remote_code")),
    **dict.fromkeys(
        ("per_device_train_batch_size", "micro_batch_size"), Alias(ROWS_PER_DEVICE, _count)
    ),
    "gradient_accumulation_steps": Alias(ACCUMULATION, _count),
    **dict.fromkeys(("num_train_epochs", "num_epochs"), Alias(("train", "epochs"))),
    "max_steps": Alias(("train", "max_steps"), _unless(-1, None)),
    **dict.fromkeys(_SEQ_LEN, Alias(("train", "seq_len"))),
    **dict.fromkeys(("learning_rate", "lr"), Alias(("train", "learning_rate"))),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), Alias(("train", "schedule"), _schedule)),
    "warmup_ratio": Alias(("train", "warmup"), _share),
    "warmup_steps": Alias(("train", "warmup")),
    "max_grad_norm": Alias(("train", "max_grad_norm")),
    "seed": Alias(("train", "seed")),
    "full_determinism": Alias(("train", "deterministic")),
    "logging_steps": Alias(("train", "log_every")),
    "eval_steps": Alias(("train", "eval_every")),
    "max_eval_samples": Alias(("train", "eval_rows")),
    "save_steps": Alias(("checkpoint", "every")),
    "save_total_limit": Alias(("checkpoint", "keep")),
    "output_dir": Alias(("output",)),
    "optim": Alias(("optimizer", "name"), _optimizer),
    "weight_decay": Alias(("optimizer", "weight_decay")),
    "adam_beta1": Alias(BETA1),
    "adam_beta2": Alias(BETA2),
    "adam_epsilon": Alias(("optimizer", "eps")),
    "bf16": Alias(("precision",), _among((True, "bfloat16"), (False, "float32"), ("auto", "auto"))),
    "fp8": Alias(("precision",), _among((True, "fp8"), (False, "auto"))),
    **dict.fromkeys(("dtype", "torch_dtype"), Alias(("precision",), _dtype)),
    "attn_implementation": Alias(("attention",)),
    **dict.fromkeys(("train_file", "dataset_name", "dataset"), Alias(("data", "train"))),
    **dict.fromkeys(("validation_file", "eval_file", "val_set_size"), Alias(("data", "eval"))),
    "dataset_train_split": Alias(("data", "split")),
    "dataset_text_field": Alias(("data", "text_field")),
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), _only_answers),
    "train_on_inputs": Alias(("data", "train_on"), _among((True, "all"), (False, "assistant"))),
    "torch_compile": Alias(("compile",)),
    **dict.fromkeys(("packing", "sample_packing"), Alias(("data", "packing"))),
    **dict.fromkeys(("use_cpu", "no_cuda"), _on_cpu),
}

# Keys of which one excludes the others: each inner tuple is one way to say the same thing.
RIVALS: tuple[tuple[tuple[Key, ...], ...], ...] = (
    (
        (("train", "tokens_per_step"),),
        (("train", "rows_per_step"),),
        (ROWS_PER_DEVICE, ACCUMULATION),
    ),
    ((("model", "path"),), (("model", "config"),)),
)

_OFF = (False, None)
_ADAPTER = Refusal("MegaTrain trains every parameter and has no adapters; remove it", (*_OFF, ""))
_ADAPTERS = ["use_peft", "peft", "peft_config", "adapter", "lora", "qlora"]
_QUANTISED = Refusal("full-parameter training starts from unquantised weights; remove it")
_QUANTISATION = ["load_in_4bit", "load_in_8bit", "quantization_config", "use_bnb_nested_quant"]
_SHARDING = Refusal(
    "MegaTrain streams the model itself and takes no sharding library; remove it", (*_OFF, "", [])
)
_MIXTURE = Refusal(
    "training in float16 needs loss scaling and is not offered; use precision: bfloat16 or float32"
)
_PLANNED = "the planner decides what is saved and what is recomputed; set memory.gpu to bound it"
_BY_STEPS = "only counting steps is offered"
_NO_EVALUATION = Refusal(
    f"{_BY_STEPS} (train.eval_every), or no evaluation (data.eval: null)", ("steps", None)
)
_TRACKER = Refusal(
    "experiment trackers are not built yet; metrics.jsonl in the run folder has every step",
    (None, "none", [], ["none"]),
)
_HUB = Refusal("nothing is uploaded; use `megatrain export` and upload the folder")
_COMPILE = Refusal(
    "`compile: true` compiles the layers, and nothing of how is left to choose; remove it"
)
# Every earlier run folder has these keys, whatever its optimizer, so `auto` is harmless.
_ADAFACTOR_KEY = Refusal(
    f"was a key of adafactor, which is no longer offered; remove it and {INSTEAD_OF_ADAFACTOR}",
    ("auto",),
)
_PACKING = Refusal("`data.packing` packs examples, and steps are cut by real tokens; remove it")

REFUSED: dict[str, Refusal] = {
    **dict.fromkeys(("fp16", "half"), _MIXTURE),
    "tf32": Refusal("precision: float32 computes in true fp32; remove it"),
    **dict.fromkeys(_ADAPTERS, _ADAPTER),
    "finetuning_type": Refusal("MegaTrain trains every parameter; remove it", ("full",)),
    "freeze": Refusal("freezing parameters is not built yet; remove it"),
    **dict.fromkeys(_QUANTISATION, _QUANTISED),
    **dict.fromkeys(("deepspeed", "fsdp"), _SHARDING),
    "gradient_checkpointing": Refusal(_PLANNED, (True, None)),
    "gradient_checkpointing_kwargs": Refusal(_PLANNED, (None,)),
    "auto_find_batch_size": Refusal(
        "the planner sizes micro-batches before the run (train.micro_batch_tokens: auto); remove it"
    ),
    "per_device_eval_batch_size": Refusal(
        "evaluation is cut as training is (train.micro_batch_tokens); remove it", (None,)
    ),
    "eval_accumulation_steps": Refusal("evaluation keeps no outputs; remove it", (None,)),
    "label_smoothing_factor": Refusal(
        "label smoothing is not built yet; remove it", (0, 0.0, None)
    ),
    "neftune_noise_alpha": Refusal(
        "noise on embeddings is not built yet; remove it", (0, 0.0, None)
    ),
    "group_by_length": Refusal("rows are already sorted by length inside a step; remove it"),
    **dict.fromkeys(("padding_free", "pad_to_sequence_len"), _PACKING),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), _NO_EVALUATION),
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
    "metric_for_best_model": Refusal(
        "best means the lowest held-out loss; remove it", ("loss", "eval_loss", None)
    ),
    "lr_scheduler_kwargs": Refusal(
        "use train.min_lr_ratio, train.decay and train.warmup", (None, {})
    ),
    "optim_args": Refusal("use the keys of the optimizer section", (None, "")),
    **dict.fromkeys(("beta2_decay", "clip_threshold"), _ADAFACTOR_KEY),
    "report_to": _TRACKER,
    "push_to_hub": _HUB,
    "use_liger_kernel": Refusal(
        "other kernels are not taken in; logits never exist whole here anyway; remove it"
    ),
    "resume_from_checkpoint": Refusal("continue a run with `megatrain resume RUN_DIR`"),
    "overwrite_output_dir": Refusal("a run folder is never overwritten; choose another `output`"),
    "chat_template": Refusal(
        "the tokenizer's own chat template is used; change it in the model's folder",
        (None, "tokenizer_default"),
    ),
    "data_seed": Refusal("train.seed covers shuffling too; remove it", (None,)),
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
    **dict.fromkeys(("lora_", "qlora_", "peft_"), _ADAPTER),
    "bnb_": _QUANTISED,
    **dict.fromkeys(("deepspeed_", "fsdp_"), _SHARDING),
    **dict.fromkeys(("wandb_", "mlflow_", "comet_"), _TRACKER),
    "hub_": _HUB,
    "torch_compile_": _COMPILE,
    "ddp_": Refusal("one GPU is used; data-parallel training is not built yet; remove it"),
    "dataloader_": Refusal("batches are prepared ahead by MegaTrain itself; remove it"),
    "fp16_": _MIXTURE,
}


def refusal_of(name: str) -> Refusal | None:
    """The refusal for a name of another trainer, or None for an unknown name."""
    by_prefix = [refusal for prefix, refusal in REFUSED_PREFIXES.items() if name.startswith(prefix)]
    return REFUSED.get(name) or (by_prefix[0] if by_prefix else None)


def is_harmless(refusal: Refusal, value: object) -> bool:
    """True when the value asks for nothing that would not happen anyway."""
    return any(_same(value, harmless) for harmless in refusal.harmless)
