"""Names that users of other trainers type: those that mean one of our keys, and those that cannot be honoured.

Aliases are accepted at the top level and inside `train`, as a list of training arguments is written there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatrain.config.values import nearest, shown

Key = tuple[str, ...]  # ("train", "seq_len"), or ("output",) at the top level

# Keys that exist only until both halves are known: rows a step = rows a device x accumulated micro-batches; betas = (beta1, beta2).
ROWS_PER_DEVICE: Key = ("train", "per_device_train_batch_size")
ACCUMULATION: Key = ("train", "gradient_accumulation_steps")
BETA1: Key = ("optimizer", "betas.0")
BETA2: Key = ("optimizer", "betas.1")
ADAM_BETAS = (0.9, 0.999)  # Hugging Face's defaults of the two


@dataclass(frozen=True)
class Alias:
    """Another name of `key`. `convert` turns the value into ours; it raises ValueError with the reason when that cannot be done."""

    key: Key
    convert: Callable[[object], object] = lambda value: value


@dataclass(frozen=True)
class Refusal:
    """A name we know and cannot honour. Values in `harmless` ask for what we do anyway, and are accepted."""

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
        near = nearest(value, [theirs for theirs, _ in pairs if isinstance(theirs, str)]) if isinstance(value, str) else None
        hint = f"; did you mean {near}?" if near else ""
        raise ValueError(f"{shown(value)} cannot be honoured; known are {', '.join(shown(theirs) for theirs, _ in pairs)}{hint}")

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


_dtype = _among(("bfloat16", "bfloat16"), ("bf16", "bfloat16"), ("float32", "float32"), ("fp32", "float32"), ("auto", "auto"))
_schedule = _among(
    ("constant", "constant"),
    ("constant_with_warmup", "constant"),
    ("linear", "linear"),
    ("cosine", "cosine"),
    ("warmup_stable_decay", "wsd"),
)
_known_optimizer = _among(
    *[(name, "adamw") for name in ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")],
    *[(name, "lion") for name in ("lion", "lion_32bit")],
)


def _optimizer(value: object) -> object:
    if _same("adafactor", value):
        raise ValueError(
            "transformers' adafactor cannot be honoured: its rate is not relative to the size of the weights, as torch's and ours is; set "
            "optimizer.name: adafactor, and a train.learning_rate for it, such as 2e-4"
        )
    return _known_optimizer(value)


_only_answers = _among((True, "assistant"), (False, "all"))
_seq_len = Alias(("train", "seq_len"))
_model = Alias(("model", "path"))
_data = Alias(("data", "train"))
_held_out = Alias(("data", "eval"))
_epochs = Alias(("train", "epochs"))
_rows = Alias(ROWS_PER_DEVICE, _count)

ALIASES: dict[str, Alias] = {
    "model_name_or_path": _model,
    "base_model": _model,
    "model_revision": Alias(("model", "revision")),
    "revision": Alias(("model", "revision")),
    "trust_remote_code": Alias(("model", "trust_remote_code")),
    "per_device_train_batch_size": _rows,
    "micro_batch_size": _rows,
    "gradient_accumulation_steps": Alias(ACCUMULATION, _count),
    "num_train_epochs": _epochs,
    "num_epochs": _epochs,
    "max_steps": Alias(("train", "max_steps"), _unless(-1, None)),
    "max_length": _seq_len,
    "max_seq_length": _seq_len,
    "max_seq_len": _seq_len,
    "sequence_len": _seq_len,
    "cutoff_len": _seq_len,
    "block_size": _seq_len,
    "learning_rate": Alias(("train", "learning_rate")),
    "lr": Alias(("train", "learning_rate")),
    "lr_scheduler_type": Alias(("train", "schedule"), _schedule),
    "lr_scheduler": Alias(("train", "schedule"), _schedule),
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
    "dtype": Alias(("precision",), _dtype),
    "torch_dtype": Alias(("precision",), _dtype),
    "attn_implementation": Alias(("attention",)),
    "train_file": _data,
    "dataset_name": _data,
    "dataset": _data,
    "validation_file": _held_out,
    "eval_file": _held_out,
    "val_set_size": _held_out,
    "dataset_train_split": Alias(("data", "split")),
    "dataset_text_field": Alias(("data", "text_field")),
    "assistant_only_loss": Alias(("data", "train_on"), _only_answers),
    "completion_only_loss": Alias(("data", "train_on"), _only_answers),
    "train_on_inputs": Alias(("data", "train_on"), _among((True, "all"), (False, "assistant"))),
    "torch_compile": Alias(("compile",)),
    "packing": Alias(("data", "packing")),
    "sample_packing": Alias(("data", "packing")),
    "use_cpu": Alias(("device",), _among((True, "cpu"), (False, "auto"))),
    "no_cuda": Alias(("device",), _among((True, "cpu"), (False, "auto"))),
}

# Keys of which one excludes the others: each inner tuple is one way to say the same thing.
RIVALS: tuple[tuple[tuple[Key, ...], ...], ...] = (
    ((("train", "tokens_per_step"),), (("train", "rows_per_step"),), (ROWS_PER_DEVICE, ACCUMULATION)),
    ((("model", "path"),), (("model", "config"),)),
)

_ADAPTER = Refusal("MegaTrain trains every parameter and has no adapters; remove it", (False, None, ""))
_QUANTISED = Refusal("full-parameter training starts from unquantised weights; remove it")
_SHARDING = Refusal("MegaTrain streams the model itself and takes no sharding library; remove it", (False, None, "", []))
_MIXTURE = "training in float16 needs loss scaling and is not offered; use precision: bfloat16 or float32"
_PLANNED = "the planner decides what is kept and what is recomputed; set memory.gpu to bound it"
_BY_STEPS = "only counting steps is offered"
_TRACKER = Refusal("experiment trackers are not built yet; metrics.jsonl in the run folder has every step", (None, "none", [], ["none"]))
_HUB = Refusal("nothing is uploaded; use `megatrain export` and upload the folder")
_COMPILE = Refusal("`compile: true` compiles the layers, and nothing of how is left to choose; remove it")
_PACKING = Refusal("rows share sequences where `data.packing` says so, and steps are cut by real tokens; remove it")

REFUSED: dict[str, Refusal] = {
    "fp16": Refusal(_MIXTURE),
    "half": Refusal(_MIXTURE),
    "tf32": Refusal("precision: float32 computes in true fp32; remove it"),
    "use_peft": _ADAPTER,
    "peft": _ADAPTER,
    "peft_config": _ADAPTER,
    "adapter": _ADAPTER,
    "lora": _ADAPTER,
    "qlora": _ADAPTER,
    "finetuning_type": Refusal("MegaTrain trains every parameter; remove it", ("full",)),
    "freeze": Refusal("freezing parameters is not built yet; remove it"),
    "load_in_4bit": _QUANTISED,
    "load_in_8bit": _QUANTISED,
    "quantization_config": _QUANTISED,
    "use_bnb_nested_quant": _QUANTISED,
    "deepspeed": _SHARDING,
    "fsdp": _SHARDING,
    "gradient_checkpointing": Refusal(_PLANNED, (True, None)),
    "gradient_checkpointing_kwargs": Refusal(_PLANNED, (None,)),
    "auto_find_batch_size": Refusal("the planner sizes micro-batches before the run (train.micro_batch_tokens: auto); remove it"),
    "per_device_eval_batch_size": Refusal("evaluation is cut as training is (train.micro_batch_tokens); remove it", (None,)),
    "eval_accumulation_steps": Refusal("evaluation keeps no outputs; remove it", (None,)),
    "label_smoothing_factor": Refusal("label smoothing is not built yet; remove it", (0, 0.0, None)),
    "neftune_noise_alpha": Refusal("noise on embeddings is not built yet; remove it", (0, 0.0, None)),
    "group_by_length": Refusal("rows are already sorted by length inside a step; remove it"),
    "padding_free": _PACKING,
    "pad_to_sequence_len": _PACKING,
    "eval_strategy": Refusal(f"{_BY_STEPS} (train.eval_every), or no evaluation (data.eval: null)", ("steps", None)),
    "evaluation_strategy": Refusal(f"{_BY_STEPS} (train.eval_every), or no evaluation (data.eval: null)", ("steps", None)),
    "save_strategy": Refusal(f"{_BY_STEPS} (checkpoint.every: 200, or null for the end alone)", ("steps", None)),
    "logging_strategy": Refusal(f"{_BY_STEPS} (train.log_every)", ("steps", None)),
    "save_only_model": Refusal("a checkpoint holds what an exact resume needs; `megatrain export` writes the model alone"),
    "load_best_model_at_end": Refusal("`best` in the run folder points at the best checkpoint; export it with --checkpoint best"),
    "metric_for_best_model": Refusal("best means the lowest held-out loss; remove it", ("loss", "eval_loss", None)),
    "lr_scheduler_kwargs": Refusal("use train.min_lr_ratio, train.decay and train.warmup", (None, {})),
    "optim_args": Refusal("use the keys of the optimizer section", (None, "")),
    "report_to": _TRACKER,
    "push_to_hub": _HUB,
    "use_liger_kernel": Refusal("other kernels are not taken in; logits never exist whole here anyway; remove it"),
    "resume_from_checkpoint": Refusal("continue a run with `megatrain resume RUN_DIR`", (False, None)),
    "overwrite_output_dir": Refusal("a run folder is never overwritten; choose another `output`"),
    "chat_template": Refusal("the tokenizer's own chat template is used; change it in the model's folder", (None, "tokenizer_default")),
    "data_seed": Refusal("train.seed covers shuffling too; remove it", (None,)),
    "nproc_per_node": Refusal("one GPU is used; more are not built yet", (None, 1)),
}

# Whole families of names, by how they begin.
REFUSED_PREFIXES: dict[str, Refusal] = {
    "lora_": _ADAPTER,
    "qlora_": _ADAPTER,
    "peft_": _ADAPTER,
    "bnb_": _QUANTISED,
    "deepspeed_": _SHARDING,
    "fsdp_": _SHARDING,
    "wandb_": _TRACKER,
    "mlflow_": _TRACKER,
    "comet_": _TRACKER,
    "hub_": _HUB,
    "torch_compile_": _COMPILE,
    "ddp_": Refusal("one GPU is used; data-parallel training is not built yet; remove it"),
    "dataloader_": Refusal("batches are prepared ahead by MegaTrain itself; remove it"),
    "fp16_": Refusal(_MIXTURE),
}


def refusal_of(name: str) -> Refusal | None:
    """The refusal for a name of another trainer, or None when we do not know the name."""
    by_prefix: Sequence[Refusal] = [refusal for prefix, refusal in REFUSED_PREFIXES.items() if name.startswith(prefix)]
    return REFUSED.get(name) or (by_prefix[0] if by_prefix else None)


def is_harmless(refusal: Refusal, value: object) -> bool:
    """True when the value asks for nothing that we would not do anyway."""
    return any(_same(value, harmless) for harmless in refusal.harmless)
