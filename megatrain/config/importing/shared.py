"""Rules that several trainers share: transformers' TrainingArguments, chat templates, sources."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.config import names as n
from megatrain.config.importing.sheet import NOTHING_ASKED, Sheet, Table, ignored, never, refused
from megatrain.config.sections import SECTIONS
from megatrain.config.values import TRACKERS, shown
from megatrain.data.samples import ROLES, SHAREGPT_ROLES
from megatrain.errors import ConfigError

LOADERS = ("json", "csv", "parquet", "text", "arrow")  # of `datasets`, in the place of a path
KNOWN_ROLES = {**ROLES, **SHAREGPT_ROLES}
STRATEGIES = {"eval": n.STRATEGIES, "save": ("save_strategy",), "logging": ("logging_strategy",)}
OFTEN = {
    "eval": ("train.eval_every", 100),
    "save": ("checkpoint.every", 200),
    "logging": ("train.log_every", 1),
}
# Moments in 8 bits, or in 4. `paged_` before a name moves state to host RAM, where ours is.
FEW_BITS = {
    **n.of_each("adamw_bnb_8bit adamw_8bit adamw_torch_8bit adamw_torch_4bit", "adamw"),
    "lion_8bit": "lion",
}
ONE_METHOD = "belongs to another method"

Source = dict[str, Any]  # path, split, format, weight; columns and text_field hold for all of a run


def arguments(
    sheet: Sheet,
    gpus: int,
    packed: Sequence[str] = (),
    *,
    rows: tuple[str, int],
    length: tuple[str, int],
    epochs: tuple[str, float],
    rate: float,
    schedule: tuple[str, str],
    optimizer: str = "optim",
    warmup: float = 0.0,
    precision: str | None = None,
    often: Mapping[str, int] = {},
) -> None:
    """Read the training arguments.

    Args:
        packed: names of the keys by which rows are full sequences, if they are.
        rows, length, epochs, schedule: their names, each with its default: rows a device, the
            longest row, epochs and the schedule.
        rate, warmup, precision: where none is set; precision None is auto.
        often: steps between evaluations, saves and lines of the log, where none are set.
    """
    _size_of_steps(sheet, rows, length, packed, gpus)
    steps = sheet.get("max_steps", -1)
    if isinstance(steps, int) and steps > 0:
        sheet.put("train.max_steps", steps, "max_steps")
        sheet.drop("max_steps ends the run", epochs[0])
    else:
        sheet.put("train.epochs", sheet.get(*epochs), epochs[0])
        sheet.drop("epochs end the run", "max_steps")
    sheet.put("train.learning_rate", sheet.get("learning_rate", rate), "learning_rate")
    _schedule(sheet, schedule[0], sheet.get(*schedule), warmup)
    _optimizer(sheet, optimizer)
    _precision(sheet, precision)
    sheet.put("train.seed", sheet.get("seed", 42), "seed")
    for what in OFTEN:
        _how_often(sheet, what, often.get(what))
    reports = sheet.get("report_to", [])
    reports = [str(name) for name in (reports if isinstance(reports, list) else [reports])]
    if known := [name for name in dict.fromkeys(reports) if name in TRACKERS]:
        sheet.put("track", known, "report_to")
    nothing = NOTHING_ASKED if reports in ([], ["none"]) else n.REFUSED_PREFIXES["mlflow_"].reason
    sheet.drop(nothing, "report_to")


def _size_of_steps(
    sheet: Sheet, rows: tuple[str, int], length: tuple[str, int], packed: Sequence[str], gpus: int
) -> None:
    """Rows or tokens of a step: rows a device x accumulated batches x processes."""
    counts = []
    for name, default in (rows, ("gradient_accumulation_steps", 1), length):
        value = sheet.get(name, default)
        if type(value) is not int or value < 1:
            sheet.refuse(name, f"must be a whole number of at least 1, not {shown(value)}")
            value = default
        counts.append(value)
    a_device, times, tokens = counts
    sheet.put("train.seq_len", tokens, length[0])
    names, total = [rows[0], "gradient_accumulation_steps"], a_device * times * gpus
    words = f"{a_device} x {times} accumulated x {gpus} process{'es' * (gpus > 1)}"
    if packed:
        note = f"{words} x {tokens:,} tokens"
        sheet.put("train.tokens_per_step", total * tokens, *names, length[0], *packed, note=note)
    else:
        sheet.put("train.rows_per_step", total, *names, note=words)


def _schedule(sheet: Sheet, name: str, kind: Any, warmup: float) -> None:
    more = sheet.get("lr_scheduler_kwargs", {})
    more = dict(more) if isinstance(more, dict) else {"": more}
    if kind == "cosine_with_min_lr":
        floor, least = more.pop("min_lr_rate", None), more.pop("min_lr", None)
        rate = sheet.get("learning_rate")
        if floor is None and isinstance(least, float | int) and isinstance(rate, float | int):
            floor = least / rate
        sheet.put("train.min_lr_ratio", floor, "lr_scheduler_kwargs")
        kind = "cosine"
    sheet.follow(name, kind, n.ALIASES["lr_scheduler"])
    if more:
        sheet.refuse("lr_scheduler_kwargs", n.REFUSED["lr_scheduler_kwargs"].reason)
    steps, share = sheet.get("warmup_steps"), sheet.get("warmup_ratio")
    if kind == "constant":
        sheet.put("train.warmup", 0.0, note="constant has no warm-up")
    elif steps or share is None:
        sheet.put("train.warmup", warmup if steps is None else steps, "warmup_steps")
    else:
        sheet.put("train.warmup", share, "warmup_ratio")
    sheet.drop(sheet.origins.get("train.warmup", ""), "warmup_steps", "warmup_ratio")


def _optimizer(sheet: Sheet, name: str) -> None:
    """The optimizer, its moments' type and its betas; theirs are AdamW's for Lion, too."""
    kind = str(sheet.get(name, "adamw_torch")).removeprefix("paged_")
    if kind == "muon":
        reason = "set optimizer.name: muon and its keys yourself"
        sheet.refuse(name, f"scales its rates otherwise here; {reason}")
    elif kind in FEW_BITS:
        sheet.put("optimizer.name", FEW_BITS[kind], name)
        sheet.put("optimizer.moments", "int8", name)
        sheet.assume(
            f"{name}: moments of few bits are int8 with stochastic rounding here, not the same bits"
        )
    else:
        sheet.follow(name, kind.replace("adamw_32bit", "adamw"), n.ALIASES["optim"])
    lion, names = sheet.config.get("optimizer.name") == "lion", ("adam_beta1", "adam_beta2")
    if lion or any(sheet.get(beta) is not None for beta in names):
        pairs = zip(names, n.ADAM_BETAS, strict=True)
        sheet.put("optimizer.betas", [sheet.get(beta, value) for beta, value in pairs], *names)
    if lion:
        sheet.drop("lion has no epsilon", "adam_epsilon")


def _precision(sheet: Sheet, default: str | None) -> None:
    """bf16 and fp8; the type that weights are read in does not count."""
    halves = [name for name in ("fp16", "float16", "half") if sheet.get(name)]
    if sheet.get("fp8"):
        sheet.put("precision", "fp8", "fp8")
    elif halves:
        sheet.drop(n.REFUSED["fp16"].reason, *halves)
        sheet.assume(f"{halves[0]}: computed in bfloat16, or in float32 where that is slow")
    elif sheet.get("pure_bf16"):
        sheet.put("precision", "bfloat16", "pure_bf16")
        sheet.assume("pure_bf16: weights and moments are fp32 here, the computing is bf16")
    elif sheet.get("bf16") is not None:
        sheet.follow("bf16", sheet.get("bf16"), n.ALIASES["bf16"])
    elif default is not None:
        sheet.put("precision", default)
    sheet.drop("fp8, fp16 or pure_bf16 goes before", "bf16")
    types = ("dtype", "torch_dtype", "pure_bf16", "bfloat16")
    sheet.drop("computed over fp32 master weights, in whatever type they are read", *types)


def _how_often(sheet: Sheet, what: str, default: int | None) -> None:
    """Every so many steps, where they count steps. what: eval, save or logging."""
    (key, ours), name = OFTEN[what], f"{what}_steps"
    strategies = STRATEGIES[what]
    strategy = next((v for one in strategies if (v := sheet.get(one)) is not None), "steps")
    every = sheet.get(name, default)
    if strategy in ("no", False):
        if what == "save":
            sheet.put(key, None, *strategies)
        sheet.drop(f"{strategies[0]} says no", *strategies, name)
    elif strategy == "steps" and isinstance(every, int) and every >= 1:
        sheet.put(key, every, name)
        sheet.drop(NOTHING_ASKED, *strategies)
    sheet.drop(f"only counting steps is offered: {key} ({ours} unless set)", *strategies, name)


def of_method(sheet: Sheet, names: Mapping[str, str]) -> None:
    """Keys of the method's own section. names: theirs by ours, of all methods."""
    method = sheet.config["method"]
    own = SECTIONS[method].model_fields if method in SECTIONS else {}
    if method == "simpo" and sheet.get(names["beta"]) is None:
        sheet.put("simpo.beta", 0.1)
    for ours, theirs in names.items():
        value = sheet.get(theirs)
        if ours in own and value is not None:
            sheet.put(f"{method}.{ours}", value, theirs)
        if theirs != "loss_type":  # which all methods of TRL have
            sheet.drop(ONE_METHOD, theirs)


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


def put_sources(sheet: Sheet, key: str, found: Sequence[Source], *names: str) -> None:
    """Set data.train or data.eval, and the columns of all sources."""
    if not found:
        sheet.drop("of a set that cannot be read", *names)
        return
    of_one = ("path", "weight", "split", "format")
    short = [{name: one[name] for name in of_one if one.get(name) is not None} for one in found]
    entries = [one["path"] if len(one) == 1 else one for one in short]
    sheet.put(key, entries[0] if len(entries) == 1 else entries, *names)
    for ours in ("columns", "text_field"):
        every = [one.get(ours) or None for one in found]
        if any(one != every[0] for one in every):
            reason = f"data.{ours} is one for all sources, and these differ in it"
            sheet.refuse(names[0], f"{reason}; rename columns in the files")
        elif every[0]:
            sheet.put(f"data.{ours}", every[0], *names)


def paths_of(sheet: Sheet, at: str, given: Mapping[str, Any], config: str = "name") -> list[Source]:
    """Files or a set of the hub, of their path, data_files, split and configuration.

    at: how the names of these keys begin. config: name of the key of the configuration.
    """
    path, split, files = str(given.get("path") or ""), given.get("split"), given.get("data_files")
    files = [] if files is None else files if isinstance(files, list) else [files]
    if path in LOADERS or (not path and files):
        paths = [str(file) for file in files]
    elif files and Path(path).is_dir():
        paths = [f"{path}/{file}" for file in files]
    else:
        paths = [path]
        if files:
            sheet.refuse(f"{at}data_files", "one file of a set of the hub; download and name it")
    split = None if split == "train" else split
    if any(Path(one).is_file() for one in paths) or path in LOADERS:
        if split is not None:
            sheet.refuse(f"{at}split", "a file has no splits; name a file of these rows")
        return [{"path": one} for one in paths]
    if (named := given.get(config)) not in (None, "default"):
        return [{"path": f"{path}:{named}:{split or 'train'}"}]
    return [{"path": one, "split": split} for one in paths]


def turns(field: str, role: str, content: str) -> tuple[str, dict[str, str]] | None:
    """(format, columns) of rows whose conversations lie in a column, or None for unknown turns."""
    if (role, content) not in (("role", "content"), ("from", "value")):
        return None
    if role == "role" and field != "conversations":
        return "messages", {} if field == "messages" else {"messages": field}
    return "sharegpt", {} if field == "conversations" else {"conversations": field}


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ConfigError for one that is broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None


# Names of transformers' TrainingArguments and of TRL's own.
TABLE: Table = {
    **ignored(
        {
            "logs and metrics do not change what is learnt": """
                log_level log_level_replica log_on_each_node logging_dir logging_first_step
                run_name logging_nan_inf_filter disable_tqdm include_num_input_tokens_seen
                include_for_metrics include_tkps project include_tokens_per_second
                trackio_space_id trackio_bucket_id trackio_static_space_id skip_memory_metrics
                debug plot_loss""",
            "evaluations have the held-out loss, at the start and at the end, too": """
                eval_delay batch_eval_metrics prediction_loss_only eval_on_start
                eval_do_concat_batches eval_use_gather_object generate_during_eval
                bf16_full_eval fp16_full_eval""",
            "how the other trainer keeps files, columns and processes": """
                torch_empty_cache_steps save_safetensors save_on_each_node save_first_step
                local_rank enable_jit_checkpoint restore_callback_states_from_checkpoint
                ignore_data_skip world_size jit_mode_eval past_index tpu_* use_mps_device env
                label_names length_column_name remove_unused_columns use_cache ray_* profiler_*
                hf_use_auth_token""",
            "MegaTrain streams the model itself": """
                accelerator_config parallelism_config fsdp_version activation_checkpointing
                activation_checkpointing_kwargs max_memory activation_offloading device_map
                low_cpu_mem_usage ddp_* tp_size eval_batch_size context_parallel_size
                tensor_parallel_size dp_shard_size dp_replicate_size sequence_parallel_degree
                heads_k_stride ring_attn_func expert_parallel_size deepcompile gpu_memory_limit
                auto_find_batch_size""",
            "the same result by other kernels": """
                use_liger_kernel liger_kernel_config liger_* attn_implementation use_kernels
                torch_compile torch_compile_* experts_implementation""",
            "batches are prepared ahead by MegaTrain itself": """
                dataloader_* dataset_kwargs dataset_batch_size pad_to_multiple_of padding_free
                pad_token padding_value eval_packing average_tokens_across_devices""",
            "seeds and order of rows are train.seed's": "data_seed shuffle_dataset",
            "the reference is always computed before the first step": "precompute_ref_log_probs",
            "the planner sizes micro-batches": "precompute_ref_batch_size",
            "off in methods of preferences, in others the model's own": "disable_dropout",
            ONE_METHOD: "ref_model_mixup_alpha ref_model_sync_steps",
        }
    ),
    **refused(
        {
            "the optimizer is one for all tensors": "optim_target_modules",
            "only decoders are trained": "is_encoder_decoder",
            "the reference stays as it began": "sync_ref_model",
        }
    ),
    "train_sampling_strategy": never(
        "rows are shuffled, by train.seed", "random", "group_by_length", "batch_rebalance"
    ),
    "max_grad_norm": n.Alias(("train", "max_grad_norm"), lambda norm: None if norm == 0 else norm),
    "save_total_limit": n.Alias(("checkpoint", "keep"), lambda kept: kept or n.NOTHING),
    "dataset_text_field": n.Alias(
        ("data", "text_field"), lambda name: n.NOTHING if name == "text" else name
    ),
    **n.of_each(
        "model_revision revision",
        n.Alias(("model", "revision"), lambda name: n.NOTHING if name == "main" else name),
    ),
}
