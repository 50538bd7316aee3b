"""Configs of axolotl."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatrain.config import names as n
from megatrain.config.importing import shared
from megatrain.config.importing.sheet import Rules, Sheet, never, nothing, to
from megatrain.config.importing.sources import (
    KNOWN_ROLES,
    TURNS,
    Found,
    paths_of,
    put_sources,
    turns,
)

MARKS = (
    "base_model sequence_len micro_batch_size sample_packing datasets adapter rl lr_scheduler "
    "pretraining_dataset val_set_size dataset_prepared_path evals_per_epoch num_epochs"
)
METHODS = {"dpo": "dpo", "ipo": "dpo", "simpo": "simpo", "orpo": "orpo", "kto": "kto"}
# The same texts as ours; of alpaca, but for white space behind the last answer.
TEMPLATES = {name: name for name in ("chatml", "llama3", "gemma", "alpaca")} | {
    "tokenizer_default": None
}
SPECIAL = {"pad_token", "bos_token", "eos_token", "unk_token"}
# The text's part of a vision-language model, as it is written there.
TEXT_ALONE = {"model.language_model.*", "lm_head", "lm_head.*", "embed_tokens", "embed_tokens.*"}
LONG = {"drop": "drop", "truncate": "keep_start"}
# Formats that are fixed: ours, with columns of ours by theirs.
FORMATS: dict[str, tuple[str, dict[str, str]]] = {
    "alpaca": ("alpaca", {}),
    "completion": ("text", {}),
    "pretrain": ("text", {}),
    "sharegpt": ("sharegpt", {}),
    "chatml.intel": ("preference", {"prompt": "question"}),
    "llama3.intel": ("preference", {"prompt": "question"}),
    "chatml.icr": ("preference", {"prompt": "input"}),
    "llama3.icr": ("preference", {"prompt": "input"}),
    "chatml.prompt_pairs": ("preference", {}),
    "llama3.prompt_pairs": ("preference", {}),
    "chatml.ultra": ("preference", {}),
    "llama3.ultra": ("preference", {}),
    "bradley_terry.chat_template": ("preference", {"prompt": "input"}),
    "chatml.argilla": ("prompt_completion", {"prompt": "instruction"}),
    "llama3.argilla": ("prompt_completion", {"prompt": "instruction"}),
}
_OWN = "prompts of this type are axolotl's own; write the rows as messages"
_VERBATIM = "what stands beside each turn goes to the chat template as it is"
_VOCABULARY = "the tokenizer and its vocabulary stay as they are; add tokens to the model before"
_HARMLESS_PLUGINS = ("liger", "cut_cross_entropy", "kernels", "spectrum", "expert_parallel")


def read(sheet: Sheet, gpus: int, method: str | None) -> None:
    """Decide of every key."""
    method = method or _method(sheet)
    sheet.put("method", method, "rl", "reward_model", "pretraining_dataset")
    _model(sheet)
    packed = ["sample_packing"] if sheet.get("sample_packing") else []
    whole = ["pretraining_dataset"] if method == "pretrain" else []
    rows = ("micro_batch_size", 1)
    if sheet.get("batch_size") is not None and sheet.get("gradient_accumulation_steps") is None:
        rows = ("batch_size", 1)
        sheet.drop("batch_size is its product with the accumulated batches", "micro_batch_size")
    shared.size_of_steps(sheet, rows, ("sequence_len", 512), packed or whole, gpus)
    if method == "sft" and sheet.get("sample_packing") is not None:
        sheet.put("data.packing", sheet.get("sample_packing"), "sample_packing")
    shared.length_of_run(sheet, "num_epochs", 1.0)
    shared.learning_rate(sheet, 2e-5)
    shared.schedule(sheet, "lr_scheduler", "cosine", warmup=0.03)
    if sheet.get("cosine_min_lr_ratio"):
        sheet.put("train.min_lr_ratio", sheet.get("cosine_min_lr_ratio"), "cosine_min_lr_ratio")
    shared.optimizer(sheet, "optimizer")
    shared.precision(sheet)
    of_names = ("wandb_project", "trackio_project_name", "use_tensorboard")
    trackers = ("wandb", "trackio", "tensorboard")
    used = [one for one, name in zip(trackers, of_names, strict=True) if sheet.get(name)]
    if used:
        given = [name for name in of_names if sheet.get(name)]
        sheet.put("track", used, *given, note="project and names by the environment")
    sheet.put("train.seed", sheet.get("seed", 42), "seed")
    _evaluation(sheet)
    shared.how_often(sheet, "save", ("save_strategy",), None)
    shared.how_often(sheet, "logging", ("logging_strategy",), None)
    _data(sheet, method)
    of_method = {"beta": "rl_beta", "simpo_gamma": "simpo_gamma", "cpo_alpha": "cpo_alpha"}
    of_method |= {"desirable_weight": "kto_desirable_weight"}
    of_method |= {"undesirable_weight": "kto_undesirable_weight"}
    of_method |= {"label_smoothing": "dpo_label_smoothing", "loss_type": "dpo_loss_type"}
    of_method |= {"loss_weights": "dpo_loss_weights"}
    of_method |= {"center_rewards_coefficient": "center_rewards_coefficient"}
    if method == "orpo":
        of_method |= {"beta": "orpo_alpha"}
    if sheet.get("rl") == "ipo":
        sheet.put("dpo.loss_type", ["ipo"], "rl")
    if method == "simpo" and sheet.get("cpo_alpha", 1.0) != 0:
        sheet.refuse("rl", "simpo with the likelihood beside it (cpo_alpha, 1 unless set); set 0")
    elif method == "simpo" and sheet.get("rl_beta") is None:
        sheet.put("simpo.beta", 0.1)
    shared.section(sheet, method, of_method)
    sheet.finish(TABLE)


def _method(sheet: Sheet) -> str:
    rl = sheet.get("rl")
    if str(rl) in METHODS:
        return METHODS[str(rl)]
    if rl is not None:
        sheet.refuse("rl", f"{rl} is not built; known are {', '.join(METHODS)}")
    if sheet.get("reward_model"):
        return "reward"
    return "pretrain" if sheet.get("pretraining_dataset") else "sft"


def _model(sheet: Sheet) -> None:
    name = sheet.get("base_model")
    if sheet.get("reinit_weights"):
        sheet.put("model.config", name, "base_model", "reinit_weights")
    elif name:
        sheet.put("model.path", name, "base_model")
    same = (name, None)
    for key in ("base_model_config", "tokenizer_config"):
        if sheet.get(key) in same:
            sheet.drop("the model's own", key)
        else:
            sheet.refuse(key, "shape and tokenizer are the model folder's; put them into one")
    for key in ("special_tokens", "tokens"):  # a mapping of the second is an old form of the first
        special = sheet.get(key)
        if isinstance(special, dict) and not special.keys() - SPECIAL:
            ends = {name: value for name, value in special.items() if name != "pad_token"}
            if any(ends.values()):
                sheet.assume(f"{key}: {ends} are the tokenizer's own; its eos_token ends texts")
            sheet.drop("the tokenizer's own tokens are used, and padding never counts", key)
    unfrozen = sheet.get("unfrozen_parameters")
    unfrozen = set(map(str, unfrozen)) if isinstance(unfrozen, list) else set()
    if TEXT_ALONE >= unfrozen >= {"model.language_model.*"}:
        sheet.drop(
            "towers are carried along unchanged; text alone is trained", "unfrozen_parameters"
        )


def _evaluation(sheet: Sheet) -> None:
    size, names = sheet.get("val_set_size", 0), ("eval_strategy", "evaluation_strategy")
    per_epoch = sheet.get("evals_per_epoch")
    if sheet.get("test_datasets"):
        sheet.drop("test_datasets go before", "val_set_size")
    else:
        share = int(size) if isinstance(size, float) and size >= 1 else size
        sheet.put("data.eval", share or None, "val_set_size")
    off = any(sheet.get(name) in ("no", False) for name in names) or per_epoch == 0
    if off and sheet.get("eval_steps") is None:
        sheet.put("train.eval_every", None, *names, "evals_per_epoch")
    shared.how_often(sheet, "eval", names, None)


def _data(sheet: Sheet, method: str) -> None:
    long = sheet.get("excess_length_strategy", "drop")
    if str(long) not in LONG:
        sheet.refuse("excess_length_strategy", "long rows are dropped or cut, and counted")
    elif method != "pretrain":
        sheet.put("data.truncation_mode", LONG[str(long)], "excess_length_strategy")
    if method == "sft":
        inputs = bool(sheet.get("train_on_inputs"))
        sheet.put("data.train_on", "all" if inputs else "assistant", "train_on_inputs")
    sheet.drop("this method trains on its own tokens", "train_on_inputs")
    name = "pretraining_dataset" if method == "pretrain" else "datasets"
    value = sheet.get(name)
    if isinstance(value, str):
        put_sources(sheet, "data.train", [Found(value)], name)
    for given, key in ((name, "data.train"), ("test_datasets", "data.eval")):
        if isinstance(sheet.get(given), str):
            continue
        found, names = [], []
        for at, one in sheet.open(given):
            found += _sources(sheet, at, one, method)
            names += [at + key for key in one if key in ENTRY]
        put_sources(sheet, key, found, *(name for name in names if name in sheet.left))
    jinja, chosen = sheet.get("chat_template_jinja"), sheet.get("chat_template")
    if "data.chat_template" in sheet.config or method == "pretrain":
        sheet.drop("the type of the rows says", "chat_template", "chat_template_jinja")
    elif chosen is not None and chosen != "jinja":
        shared.template(sheet, "chat_template", chosen, TEMPLATES)
    elif jinja:
        shared.template(sheet, "chat_template_jinja", jinja, TEMPLATES)
        sheet.drop("chat_template_jinja is it", "chat_template")
    if method == "pretrain" and "train.max_steps" in sheet.config:
        sheet.put("data.streaming", True, "streaming", "pretraining_dataset")


def _sources(sheet: Sheet, at: str, given: dict[str, Any], method: str) -> list[Found]:
    """The sources of one entry, of its keys in ENTRY."""
    kind = given.get("type", "pretrain" if method == "pretrain" else None)
    mapping = sheet.typed(at + "message_property_mappings", dict, {})
    role = mapping.get("role", given.get("message_field_role") or "role")
    content = mapping.get("content", given.get("message_field_content") or "content")
    column = str(given.get("field_messages") or "messages")
    thinking = given.get("field_thinking")
    if thinking and thinking != (given.get("template_thinking_key") or "reasoning_content"):
        sheet.refuse(at + "field_thinking", "the template looks for it under another name")
    form: tuple[str, dict[str, str]] | None = None
    if kind == "chat_template":
        form = turns(column, role, content)
    elif kind == "chat_template.default" and method != "sft" and (role, content) in TURNS:
        answers = {name: given.get(f"field_{name}") or name for name in ("chosen", "rejected")}
        columns = {"prompt": column, **answers} if method != "kto" else {"messages": column}
        named = {ours: str(theirs) for ours, theirs in columns.items() if ours != theirs}
        form = ("messages" if method == "kto" else "preference", named)
    elif isinstance(kind, str):
        form = FORMATS.get(kind)
    if form is None:
        sheet.refuse(at + "type", _OWN)
        return []
    name, columns = form
    _about(sheet, at, str(kind))
    text = str(given.get("field") or given.get("text_column") or "text") if name == "text" else None
    text = None if text == "text" else text
    paths = paths_of(sheet, at, given)
    return [replace(one, format=name, columns=columns, text_field=text) for one in paths]


def _about(sheet: Sheet, at: str, kind: str) -> None:
    """Set the template and the prompts that a type implies."""
    family = kind.partition(".")[0]
    if kind == "alpaca":
        sheet.put("data.prompts", "alpaca", at + "type")
    if family in ("chatml", "llama3"):
        sheet.put("data.chat_template", family, at + "type")
    if family in ("chatml", "llama3", "bradley_terry"):
        sheet.put("data.prompts", "chat", at + "type")


def _roles(sheet: Sheet, name: str, value: Any) -> None:
    told = value.items() if isinstance(value, dict) else [("", value)]
    lists = [(role, names if isinstance(names, list) else [names]) for role, names in told]
    each = [(role, name) for role, names in lists for name in names]
    ours = all(isinstance(one, str) and KNOWN_ROLES.get(one) == role for role, one in each)
    if ours:
        sheet.drop("roles that are known anyway", name)
    else:
        sheet.refuse(name, f"known roles are {', '.join(KNOWN_ROLES)}; rename others in the rows")


def _plugins(sheet: Sheet, name: str, value: Any) -> None:
    named = [str(one) for one in (value if isinstance(value, list) else [value])]
    others = [one for one in named if not any(known in one for known in _HARMLESS_PLUGINS)]
    if others:
        sheet.refuse(name, f"{', '.join(others)}: trains otherwise than by its loss on rows")
    else:
        sheet.drop("other kernels, or another distribution of the same work", name)


# Keys of an entry of `datasets` that path and format answer for.
ENTRY = n.of_each(
    "path split type data_files name field text_column field_messages field_chosen "
    "field_rejected message_property_mappings message_field_role message_field_content",
    True,
)
TABLE: Rules = {
    **shared.TABLE,
    "[].ds_type": nothing("the type is found from the file's name"),
    "[].trust_remote_code": never("code of data sets is not run"),
    "[].preprocess_shards": nothing("rows are tokenised by data.processes processes"),
    "[].train_on_eos": never("an answer is trained with its end", "turn"),
    "[].train_on_eot": never("an answer is trained with its end", "turn"),
    "[].roles_to_train": never("the loss is on the assistant's turns", ["assistant"], ["gpt"]),
    "[].roles": _roles,
    "[].message_field_training": nothing("turns may have weight, train, training or loss"),
    "[].field_thinking": nothing(_VERBATIM),
    "[].template_thinking_key": nothing(_VERBATIM),
    "[].field_tools": never("tools stand in a column of this name", "tools"),
    "[].chat_template": lambda sheet, name, value: shared.template(sheet, name, value, TEMPLATES),
    **n.of_each(
        "[].shards [].shards_idx [].skip [].revision [].conversation",
        never("all rows of the newest version are read; write a file of those that are wanted"),
    ),
    **n.of_each(
        "[].drop_system_message [].split_thinking [].message_field_training_detail "
        "[].field_human [].field_model [].field_system [].input_format [].input_transform "
        "[].field_instruction [].field_input [].field_output [].format [].system_prompt "
        "[].no_input_format [].field_prompt [].field_label [].chat_template_jinja "
        "[].logprobs_field [].temperature [].length "
        "[].sequence_length [].seed "
        "[].system_format [].step_separator [].max_completion_length [].train_on_last_step_only",
        never("rows are read as they are; change them in the file"),
    ),
    **n.of_each(
        "wandb_* trackio_* use_wandb use_trackio",
        nothing(n.REFUSED_PREFIXES["wandb_"].reason),
    ),
    **n.of_each(
        "use_swanlab swanlab_* use_mlflow use_comet gradio_* use_otel_metrics otel_* "
        "hf_mlflow_log_artifacts "
        "generate_samples num_generation_samples generation_* do_causal_lm_eval "
        "eval_causal_lm_metrics eval_table_size do_bench_eval bench_* eval_max_new_tokens "
        "dpo_generate_during_eval total_supervised_tokens loss_watchdog_* gc_steps "
        "gc_collect_steps",
        nothing("logs, samples and watchdogs do not change what is learnt"),
    ),
    **n.of_each(
        "dataset_prepared_path push_dataset_to_hub dataset_keep_in_memory skip_prepare_dataset "
        "shuffle_merged_datasets shuffle_before_merging_datasets sample_packing_* "
        "streaming_multipack_buffer_size pretrain_multipack_* pretraining_sample_concatenation "
        "multipack_real_batches batch_flattening eval_sample_packing eval_sequence_len streaming "
        "max_packed_sequence_len group_by_length total_num_tokens "
        "preprocess_iterable num_dataset_shards_to_save is_preprocess",
        nothing("rows are cached, shuffled and cut into steps by MegaTrain itself"),
    ),
    **n.of_each(
        "flash_attention flash_attn_* flash_optimum xformers_attention sdp_attention "
        "flex_attention flex_attn_compile_kwargs eager_attention sage_attention "
        "chunked_cross_entropy chunked_cross_entropy_num_chunks cut_cross_entropy tiled_mlp "
        "tiled_mlp_* use_scattermoe use_sonicmoe fused_attn_kernel sdpa_varlen "
        "large_head_attention lora_*_kernel experimental_skip_move_to_device "
        "embeddings_skip_upcast fsdp_final_state_dict_type selective_checkpointing "
        "layer_offloading torchdistx_path ple_cpu_offload gemma4_hybrid_attn_impl fp32_norms "
        "fp32_norm_classes llama4_linearized_experts dpo_use_logits_to_keep ddp device use_ray "
        "resources_per_worker capabilities env_capabilities axolotl_config_path",
        nothing("another way to compute or place the same; the planner and auto choose ours"),
    ),
    **n.of_each(
        "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model "
        "is_qwen_derived_model tokenizer_use_fast tokenizer_legacy processor_type "
        "tokenizer_save_jinja_files base_model_ignore_patterns processor_kwargs "
        "model_quantization_config model_quantization_config_kwargs branch type_of_model "
        "fp8_enable_fsdp_float8_all_gather fp8_config",
        nothing("the model's folder says so itself; quantised ones are dequantised while read"),
    ),
    **n.of_each(
        "gptq gptq_* lora_* peft_* loftq_config loraplus_* relora_* merge_lora merge_method "
        "quantization vllm",
        nothing("belongs to an adapter, to inference or to quantised weights"),
    ),
    "relora": never("adapters are not built"),
    "auto_resume_from_checkpoints": nothing("`megatrain resume` goes on from the newest"),
    "plugins": _plugins,
    "resize_token_embeddings_to_32x": nothing("adds rows to the embedding that no token has"),
    "revision_of_model": to("model.revision"),
    "dpo_beta": never("is called rl_beta now"),
    "num_labels": never("a reward model has one score", 1),
    "eot_tokens": nothing("an answer ends with what its chat template writes behind it"),
    "cosine_constant_lr_ratio": never("cosine falls over all steps", 1.0),
    "model_config": never(
        "change config.json in the model's folder", {"output_router_logits": True}
    ),
    **n.of_each(
        "tokens special_tokens shrink_embeddings added_tokens_overrides "
        "fix_untrained_tokens mean_resizing_embeddings",
        never(_VOCABULARY),
    ),
    **n.of_each(
        "qat ebft diffusion trl llmcompressor use_eaft use_onebitllms process_reward_model "
        "lisa_n_layers lisa_step_interval lisa_layers_attribute dpo_use_weighting trainer_cls "
        "rpo_alpha lr_quadratic_warmup lr_groups embedding_lr embedding_lr_scale "
        "jagged_restart_steps curriculum_sampling use_pose "
        "dataset_exact_deduplication min_sample_len default_system_message chat_template_kwargs "
        "scaling_softmax dynamic_checkpoint overrides_of_model_config rope_scaling "
        "noisy_embedding_alpha dpo_norm_loss overrides_of_model_kwargs s2_attention float32 "
        "quantize_moe_experts tokenizer_use_mistral_common "
        "max_prompt_len dataset_shard_num dataset_shard_idx freeze_mm_modules",
        never("changes what is learnt, and is not built"),
    ),
    **n.of_each(
        "eaft_* adam_epsilon2 adam_beta3 dion_* qgalore_* eta_min lr_div_factor "
        "scaling_softmax_* pose_* jagged_restart_* cls_model_config",
        nothing("belongs to an optimizer, a schedule or a loss that is refused by its own key"),
    ),
    "dpo_padding_free": nothing("steps are cut by real tokens"),
    "dpo_use_liger_kernel": nothing("the same loss by other kernels"),
}
