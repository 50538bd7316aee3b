"""Rules that several trainers share: the arguments of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.config import names as n
from megatrain.config.choices import TRACKERS
from megatrain.config.importing.sheet import NOTHING_ASKED, Rules, Sheet, never, nothing, to
from megatrain.config.sections import SECTIONS

STEPS = "only counting steps is offered: {} {}"
# Theirs that keep moments in 8 bits, or in 4; `paged_` before a name moves state to host RAM,
# where ours is.
FEW_BITS = {
    **n.of_each("adamw_bnb_8bit adamw_8bit adamw_torch_8bit adamw_torch_4bit", "adamw"),
    "lion_8bit": "lion",
}
OTHERWISE = {
    "muon": "scales its rates otherwise here; set optimizer.name: muon and its keys yourself"
}
_32_BITS = {"adamw": "adamw_torch", "adamw_32bit": "adamw_torch"}
_BF16 = "computed in bfloat16 over fp32 master weights, in whatever type they are read"
_LOG = "logs and metrics do not change what is learnt"
_STREAMED = "MegaTrain streams the model itself"
_LOADER = "batches are prepared ahead by MegaTrain itself"
_KERNELS = "the same result by other kernels"
_ONE_METHOD = "belongs to another method"
_DATES = "seeds and order of rows are train.seed's"


def size_of_steps(
    sheet: Sheet, rows: tuple[str, int], length: tuple[str, int], packed: Sequence[str], gpus: int
) -> None:
    """Rows or tokens of a step: rows a device x accumulated batches x processes.

    rows, length: their names of rows a device and of the longest row, each with its default.
    packed: names of the keys by which rows are full sequences, if they are.
    """
    (rows_name, default_rows), (length_name, default_length) = rows, length
    a_device = sheet.count(rows_name, default_rows)
    times = sheet.count("gradient_accumulation_steps", 1)
    tokens = sheet.count(length_name, default_length)
    total = a_device * times * gpus
    sheet.put("train.seq_len", tokens, length_name)
    names = [rows_name, "gradient_accumulation_steps"]
    words = f"{a_device} x {times} accumulated x {gpus} process{'es' * (gpus > 1)}"
    if packed:
        note = f"{words} x {tokens:,} tokens"
        sheet.put("train.tokens_per_step", total * tokens, *names, length_name, *packed, note=note)
    else:
        sheet.put("train.rows_per_step", total, *names, note=words)


def length_of_run(sheet: Sheet, epochs: str, default: float) -> None:
    """max_steps where it is set, else epochs."""
    steps = sheet.get("max_steps", -1)
    if isinstance(steps, int) and steps > 0:
        sheet.put("train.max_steps", steps, "max_steps")
        sheet.drop("max_steps ends the run", epochs)
    else:
        sheet.put("train.epochs", sheet.get(epochs, default), epochs)
        sheet.drop("epochs end the run", "max_steps")


def learning_rate(sheet: Sheet, default: float) -> None:
    sheet.put("train.learning_rate", sheet.get("learning_rate", default), "learning_rate")


def schedule(sheet: Sheet, name: str, default: str, warmup: float = 0.0) -> None:
    """The learning rate's warm-up and decay. warmup: where none is set, steps or a share."""
    kind, more = sheet.get(name, default), sheet.get("lr_scheduler_kwargs", {})
    more = dict(more) if isinstance(more, dict) else {"": more}
    rate = sheet.get("learning_rate")
    if kind == "cosine_with_min_lr":
        floor, least = more.pop("min_lr_rate", None), more.pop("min_lr", None)
        if floor is None and isinstance(least, float | int) and isinstance(rate, float | int):
            floor = least / rate
        sheet.put("train.min_lr_ratio", floor, "lr_scheduler_kwargs")
        sheet.put("train.schedule", "cosine", name)
    else:
        to("train.schedule", n.ALIASES["lr_scheduler"].convert)(sheet, name, kind)
    if more:
        sheet.refuse("lr_scheduler_kwargs", n.REFUSED["lr_scheduler_kwargs"].reason)
    steps, share = sheet.get("warmup_steps"), sheet.get("warmup_ratio")
    if kind == "constant":
        sheet.put("train.warmup", 0.0, note="constant has no warm-up")
        sheet.drop("constant has no warm-up", "warmup_steps", "warmup_ratio")
    elif steps or share is None:
        sheet.put("train.warmup", warmup if steps is None else steps, "warmup_steps")
        sheet.drop("warmup_steps goes before", "warmup_ratio")
    else:
        sheet.put("train.warmup", share, "warmup_ratio")
        sheet.drop("0: warmup_ratio counts", "warmup_steps")


def optimizer(sheet: Sheet, name: str) -> None:
    """The optimizer, its moments' type and its betas; theirs are AdamW's for Lion, too."""
    kind = str(sheet.get(name, "adamw_torch")).removeprefix("paged_")
    kind = _32_BITS.get(kind, kind)
    if ours := FEW_BITS.get(kind):
        sheet.put("optimizer.name", ours, name)
        sheet.put("optimizer.moments", "int8", name)
        sheet.assume(
            f"{name}: moments of few bits are int8 with stochastic rounding here, not the same bits"
        )
    elif kind in OTHERWISE:
        sheet.refuse(name, OTHERWISE[kind])
    else:
        to("optimizer.name", n.ALIASES["optim"].convert)(sheet, name, kind)
    lion = sheet.config.get("optimizer.name") == "lion"
    names = ("adam_beta1", "adam_beta2")
    if lion or any(sheet.get(beta) is not None for beta in names):
        pairs = zip(names, n.ADAM_BETAS, strict=True)
        sheet.put("optimizer.betas", [sheet.get(beta, value) for beta, value in pairs], *names)
    if lion:
        sheet.drop("lion has no epsilon", "adam_epsilon")


def precision(sheet: Sheet, default: str | None = None) -> None:
    """bf16 and fp8; the type that weights are read in does not count. default: None is auto."""
    bf16, types = sheet.get("bf16"), ("dtype", "torch_dtype", "pure_bf16", "bfloat16")
    halves = [name for name in ("fp16", "float16", "half") if sheet.get(name)]
    if sheet.get("fp8"):
        sheet.put("precision", "fp8", "fp8")
        sheet.drop("fp8 goes before", "bf16")
    elif halves:
        sheet.drop(n.REFUSED["fp16"].reason, *halves)
        sheet.drop(f"{halves[0]} goes before", "bf16")
        sheet.assume(f"{halves[0]}: computed in bfloat16, or in float32 where that is slow")
    elif sheet.get("pure_bf16"):
        sheet.put("precision", "bfloat16", "pure_bf16")
        sheet.assume("pure_bf16: weights and moments are fp32 here, the computing is bf16")
        sheet.drop("pure_bf16 goes before", "bf16")
    elif default is not None and bf16 is None:
        sheet.put("precision", default)
    elif bf16 is not None:
        to("precision", n.ALIASES["bf16"].convert)(sheet, "bf16", bf16)
    sheet.drop(_BF16, *types)


def trackers(sheet: Sheet, *also: str) -> None:
    """Those of report_to that are offered, and `also`."""
    value = sheet.get("report_to", [])
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    known = list(dict.fromkeys([*(name for name in names if name in TRACKERS), *also]))
    if known:
        sheet.put("track", known, "report_to")
    off = names in ([], ["none"])
    sheet.drop(NOTHING_ASKED if off else n.REFUSED_PREFIXES["mlflow_"].reason, "report_to")


def how_often(sheet: Sheet, what: str, strategies: Sequence[str], default: int | None) -> None:
    """`what` is eval, save or logging: every so many steps, where they count steps."""
    key, ours = OFTEN[what]
    strategy = next((v for name in strategies if (v := sheet.get(name)) is not None), "steps")
    every, name = sheet.get(f"{what}_steps", default), f"{what}_steps"
    if strategy in ("no", False):
        if what == "save":
            sheet.put(key, None, *strategies)
        sheet.drop(f"{strategies[0]} says no", *strategies, name)
    elif strategy == "steps" and isinstance(every, int) and every >= 1:
        sheet.put(key, every, name)
        sheet.drop(NOTHING_ASKED, *strategies)
    sheet.drop(STEPS.format(key, f"({ours} unless set)"), *strategies, name)


OFTEN = {
    "eval": ("train.eval_every", 100),
    "save": ("checkpoint.every", 200),
    "logging": ("train.log_every", 1),
}


def section(sheet: Sheet, method: str, names: dict[str, str]) -> None:
    """Keys of the method's own section. names: theirs by ours, of all methods."""
    own = SECTIONS[method].model_fields if method in SECTIONS else {}
    for ours, theirs in names.items():
        value = sheet.get(theirs)
        if ours in own and value is not None:
            sheet.put(f"{method}.{ours}", value, theirs)
        if theirs != "loss_type":  # which all methods of TRL have
            sheet.drop(_ONE_METHOD, theirs)


def template(
    sheet: Sheet, name: str, value: Any, known: Mapping[str, str | None], own: bool = True
) -> None:
    """A chat template by their name, as text or of a file.

    known: ours by theirs, None for the model's own, which other names are taken for if `own`.
    """
    if not isinstance(value, str):
        sheet.refuse(name, "must be a template's name, its text or a file")
        return
    files = [] if len(value) > 255 else [Path(value), sheet.folder / value]
    found = next((str(file) for file in files if file.is_file()), None)
    if "{%" in value:
        sheet.files["chat_template.jinja"] = value
        sheet.put("data.chat_template", "chat_template.jinja", name)
    elif value in known or found:
        sheet.put("data.chat_template", known.get(value, found), name)
    elif own:
        sheet.put("data.chat_template", None, name)
        sheet.assume(
            f"{name}: {value}: the model's own chat template is used, which may differ from "
            f"{sheet.trainer}'s in its system prompt or in white space; `megatrain data` shows it"
        )
    else:
        sheet.refuse(name, "another model's; save it as a file and name that")


# Names of transformers' TrainingArguments and of TRL's own that do not change what is learnt here.
TABLE: Rules = {
    **n.of_each(
        "log_level log_level_replica log_on_each_node logging_dir logging_first_step run_name "
        "logging_nan_inf_filter disable_tqdm include_num_input_tokens_seen include_for_metrics "
        "include_tokens_per_second include_tkps project trackio_space_id trackio_bucket_id "
        "trackio_static_space_id skip_memory_metrics debug plot_loss",
        nothing(_LOG),
    ),
    **n.of_each(
        "batch_eval_metrics prediction_loss_only eval_on_start eval_delay eval_do_concat_batches "
        "eval_use_gather_object generate_during_eval bf16_full_eval fp16_full_eval",
        nothing("evaluations have the held-out loss, at the start and at the end, too"),
    ),
    **n.of_each(
        "torch_empty_cache_steps save_safetensors save_on_each_node save_first_step local_rank "
        "enable_jit_checkpoint restore_callback_states_from_checkpoint ignore_data_skip world_size "
        "jit_mode_eval past_index tpu_* use_mps_device env label_names length_column_name "
        "remove_unused_columns use_cache ray_* profiler_* hf_use_auth_token",
        nothing("how the other trainer keeps files, columns and processes"),
    ),
    **n.of_each(
        "accelerator_config parallelism_config fsdp_version activation_checkpointing "
        "activation_checkpointing_kwargs activation_offloading device_map low_cpu_mem_usage "
        "ddp_* tp_size context_parallel_size tensor_parallel_size dp_shard_size dp_replicate_size "
        "sequence_parallel_degree heads_k_stride ring_attn_func expert_parallel_size deepcompile "
        "max_memory gpu_memory_limit auto_find_batch_size eval_batch_size",
        nothing(_STREAMED),
    ),
    **n.of_each(
        "use_liger_kernel liger_kernel_config liger_* attn_implementation use_kernels "
        "torch_compile torch_compile_* experts_implementation",
        nothing(_KERNELS),
    ),
    **n.of_each(
        "dataloader_* dataset_kwargs dataset_batch_size pad_to_multiple_of padding_free pad_token "
        "padding_value eval_packing average_tokens_across_devices",
        nothing(_LOADER),
    ),
    **n.of_each("data_seed train_sampling_strategy shuffle_dataset", nothing(_DATES)),
    "max_grad_norm": to("train.max_grad_norm", lambda norm: None if norm == 0 else norm),
    "save_total_limit": to("checkpoint.keep", lambda kept: kept or n.NOTHING),
    "dataset_text_field": to("data.text_field", lambda name: n.NOTHING if name == "text" else name),
    **n.of_each(
        "model_revision revision",
        to("model.revision", lambda name: n.NOTHING if name == "main" else name),
    ),
    "precompute_ref_log_probs": nothing("the reference is always computed before the first step"),
    "precompute_ref_batch_size": nothing("the planner sizes micro-batches"),
    "disable_dropout": nothing("dropout of the model's configuration holds, which is mostly 0"),
    "optim_target_modules": never("the optimizer is one for all tensors"),
    "is_encoder_decoder": never("only decoders are trained"),
    "sync_ref_model": never("the reference stays as it began"),
    **n.of_each("ref_model_mixup_alpha ref_model_sync_steps", nothing(_ONE_METHOD)),
}
