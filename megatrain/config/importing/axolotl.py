"""Configs of axolotl."""

from __future__ import annotations

from typing import Any

from megatrain.config import names as n
from megatrain.config.importing import shared
from megatrain.config.importing.shared import KNOWN_ROLES, Source, paths_of, put_sources, turns
from megatrain.config.importing.sheet import Sheet, Table, ignored, never, refused

MARKS = (
    "base_model sequence_len micro_batch_size sample_packing datasets adapter rl lr_scheduler "
    "pretraining_dataset val_set_size dataset_prepared_path evals_per_epoch num_epochs"
)
METHODS = {"dpo": "dpo", "ipo": "dpo", "simpo": "simpo", "orpo": "orpo", "kto": "kto"}
# The same texts as ours; of alpaca, but for white space behind the last answer.
TEMPLATES = {name: name for name in ("chatml", "llama3", "gemma", "alpaca")} | {
    "tokenizer_default": None
}
TRACKERS = {
    "wandb_project": "wandb",
    "trackio_project_name": "trackio",
    "use_tensorboard": "tensorboard",
}
# The text's part of a vision-language model, as it is written there.
TEXT_ALONE = {"model.language_model.*", "lm_head", "lm_head.*", "embed_tokens", "embed_tokens.*"}
LONG = {"drop": "drop", "truncate": "keep_start"}
OF_METHOD = {
    "simpo_gamma": "simpo_gamma",
    "cpo_alpha": "cpo_alpha",
    "desirable_weight": "kto_desirable_weight",
    "undesirable_weight": "kto_undesirable_weight",
    "label_smoothing": "dpo_label_smoothing",
    "loss_type": "dpo_loss_type",
    "loss_weights": "dpo_loss_weights",
    "center_rewards_coefficient": "center_rewards_coefficient",
}
# Types of rows that are fixed: our format, and the column of theirs that is the prompt. What
# stands before the dot names the chat template.
FORMATS = {
    "alpaca": ("alpaca", None),
    "completion": ("text", None),
    "pretrain": ("text", None),
    "sharegpt": ("sharegpt", None),
    "bradley_terry.chat_template": ("preference", "input"),
}
for _family in ("chatml", "llama3"):
    FORMATS |= {
        f"{_family}.intel": ("preference", "question"),
        f"{_family}.icr": ("preference", "input"),
        f"{_family}.prompt_pairs": ("preference", None),
        f"{_family}.ultra": ("preference", None),
        f"{_family}.argilla": ("prompt_completion", "instruction"),
    }
# Keys of an entry of `datasets` that path and format answer for.
ENTRY = (
    *("path", "split", "type", "data_files", "name", "field", "text_column", "field_messages"),
    *("field_chosen", "field_rejected", "message_property_mappings"),
    *("message_field_role", "message_field_content"),
)


def read(sheet: Sheet, gpus: int, method: str | None) -> None:
    """Decide of every key."""
    method = method or _method(sheet)
    sheet.put("method", method, "rl", "reward_model", "pretraining_dataset")
    name = sheet.get("base_model")
    if sheet.get("reinit_weights"):
        sheet.put("model.config", name, "base_model", "reinit_weights")
    for key in ("base_model_config", "tokenizer_config"):
        if sheet.get(key) == name:
            sheet.drop("the model's own", key)
    packed = ["sample_packing"] if sheet.get("sample_packing") else []
    rows = ("micro_batch_size", 1)
    if sheet.get("batch_size") is not None and sheet.get("gradient_accumulation_steps") is None:
        rows = ("batch_size", 1)
        sheet.drop("batch_size is its product with the accumulated batches", "micro_batch_size")
    shared.arguments(
        sheet,
        gpus,
        packed or (["pretraining_dataset"] if method == "pretrain" else []),
        rows=rows,
        length=("sequence_len", 512),
        epochs=("num_epochs", 1.0),
        rate=2e-5,
        schedule=("lr_scheduler", "cosine"),
        optimizer="optimizer",
        warmup=0.03,
    )
    if method == "sft" and sheet.get("sample_packing") is not None:
        sheet.put("data.packing", sheet.get("sample_packing"), "sample_packing")
    if ratio := sheet.get("cosine_min_lr_ratio"):
        sheet.put("train.min_lr_ratio", ratio, "cosine_min_lr_ratio")
    if given := [key for key in TRACKERS if sheet.get(key)]:
        used = [TRACKERS[key] for key in given]
        sheet.put("track", used, *given, note="project and names by the environment")
    _evaluation(sheet)
    _data(sheet, method)
    if sheet.get("rl") == "ipo":
        sheet.put("dpo.loss_type", ["ipo"], "rl")
    if method == "simpo" and sheet.get("cpo_alpha", 1.0) != 0:
        sheet.refuse("rl", "simpo with the likelihood beside it (cpo_alpha, 1 unless set); set 0")
    beta = "orpo_alpha" if method == "orpo" else "rl_beta"
    shared.of_method(sheet, OF_METHOD | {"beta": beta})
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


def _evaluation(sheet: Sheet) -> None:
    size = sheet.get("val_set_size", 0)
    if sheet.get("test_datasets"):
        sheet.drop("test_datasets go before", "val_set_size")
    else:
        share = int(size) if isinstance(size, float) and size >= 1 else size
        sheet.put("data.eval", share or None, "val_set_size")
    off = any(sheet.get(name) in ("no", False) for name in n.STRATEGIES)
    if (off or sheet.get("evals_per_epoch") == 0) and sheet.get("eval_steps") is None:
        sheet.put("train.eval_every", None, *n.STRATEGIES, "evals_per_epoch")


def _data(sheet: Sheet, method: str) -> None:
    long = str(sheet.get("excess_length_strategy", "drop"))
    if long not in LONG:
        sheet.refuse("excess_length_strategy", "long rows are dropped or cut, and counted")
    elif method != "pretrain":
        sheet.put("data.truncation_mode", LONG[long], "excess_length_strategy")
    if method == "sft":
        inputs = bool(sheet.get("train_on_inputs"))
        sheet.put("data.train_on", "all" if inputs else "assistant", "train_on_inputs")
    name = "pretraining_dataset" if method == "pretrain" else "datasets"
    for given, key in ((name, "data.train"), ("test_datasets", "data.eval")):
        value = sheet.get(given)
        if isinstance(value, str) and given == name:
            put_sources(sheet, key, [{"path": value}], given)
        if isinstance(value, str):
            continue
        found: list[Source] = []
        settled = []
        for at, one in sheet.open(given):
            found += _sources(sheet, at, one, method)
            settled += [at + key for key in one if key in ENTRY and at + key not in sheet.refused]
        put_sources(sheet, key, found, *settled)
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


def _sources(sheet: Sheet, at: str, given: dict[str, Any], method: str) -> list[Source]:
    """The sources of one entry, of its keys in ENTRY."""
    kind = str(given.get("type", "pretrain" if method == "pretrain" else None))
    mappings = given.get("message_property_mappings") or {}
    others = mappings if isinstance(mappings, dict) else {"": mappings}
    others = {ours: theirs for ours, theirs in others.items() if ours not in ("role", "content")}
    if any(ours != theirs for ours, theirs in others.items()):
        sheet.refuse(at + "message_property_mappings", "turns have role and content; rename others")
        mappings = {}
    role = mappings.get("role", given.get("message_field_role") or "role")
    content = mappings.get("content", given.get("message_field_content") or "content")
    column = str(given.get("field_messages") or "messages")
    thinking = given.get("field_thinking")
    if thinking and thinking != (given.get("template_thinking_key") or "reasoning_content"):
        sheet.refuse(at + "field_thinking", "the template looks for it under another name")
    form: tuple[str, dict[str, str]] | None = None
    if kind == "chat_template":
        form = turns(column, role, content)
    elif kind == "chat_template.default" and method != "sft" and turns(column, role, content):
        answers = {name: given.get(f"field_{name}") or name for name in ("chosen", "rejected")}
        columns = {"prompt": column, **answers} if method != "kto" else {"messages": column}
        named = {ours: str(theirs) for ours, theirs in columns.items() if ours != theirs}
        form = ("messages" if method == "kto" else "preference", named)
    elif kind in FORMATS:
        name, prompt = FORMATS[kind]
        form = (name, {"prompt": prompt} if prompt else {})
    if form is None:
        reason = "prompts of this type are axolotl's own; write the rows as messages"
        sheet.refuse(at + "type", reason)
        return []
    family = kind.partition(".")[0]
    if family in ("chatml", "llama3"):
        sheet.put("data.chat_template", family, at + "type")
    if family in ("chatml", "llama3", "bradley_terry", "alpaca"):
        sheet.put("data.prompts", "alpaca" if family == "alpaca" else "chat", at + "type")
    text = str(given.get("field") or given.get("text_column") or "text")
    shape = {"format": form[0], "columns": form[1]}
    if form[0] == "text" and text != "text":
        shape["text_field"] = text
    return [one | shape for one in paths_of(sheet, at, given)]


def _roles(sheet: Sheet, name: str, value: Any) -> None:
    told = value.items() if isinstance(value, dict) else [("", value)]
    lists = [(role, names if isinstance(names, list) else [names]) for role, names in told]
    each = [(role, name) for role, names in lists for name in names]
    if all(isinstance(one, str) and KNOWN_ROLES.get(one) == role for role, one in each):
        sheet.drop("roles that are known anyway", name)
    else:
        sheet.refuse(name, f"known roles are {', '.join(KNOWN_ROLES)}; rename others in the rows")


def _plugins(sheet: Sheet, name: str, value: Any) -> None:
    harmless = ("liger", "cut_cross_entropy", "kernels", "spectrum", "expert_parallel")
    named = [str(one) for one in (value if isinstance(value, list) else [value])]
    others = [one for one in named if not any(known in one for known in harmless)]
    if others:
        sheet.refuse(name, f"{', '.join(others)}: trains otherwise than by its loss on rows")
    else:
        sheet.drop("other kernels, or another distribution of the same work", name)


def _tokens(sheet: Sheet, name: str, value: Any) -> None:
    known = ("pad_token", "bos_token", "eos_token", "unk_token")
    if not isinstance(value, dict) or not value.keys() <= {*known}:
        sheet.refuse(name, _VOCABULARY)
        return
    ends = {key: one for key, one in value.items() if key != "pad_token"}
    if any(ends.values()):
        sheet.assume(f"{name}: {ends} are the tokenizer's own; its eos_token ends texts")
    sheet.drop("the tokenizer's own tokens are used, and padding never counts", name)


def _unfrozen(sheet: Sheet, name: str, value: Any) -> None:
    parts = set(map(str, value)) if isinstance(value, list) else set()
    if TEXT_ALONE >= parts >= {"model.language_model.*"}:
        sheet.drop("towers are carried along unchanged; text alone is trained", name)
    else:
        sheet.follow(name, value, n.REFUSED[name])


_VOCABULARY = "the tokenizer and its vocabulary stay as they are; add tokens to the model before"
_FLAGS = ("weight", "train", "training", "loss")
TABLE: Table = {
    **shared.TABLE,
    **ignored(
        {
            "the type is found from the file's name": "[].ds_type",
            "rows are tokenised by data.processes processes": "[].preprocess_shards",
            n.REFUSED_PREFIXES["wandb_"].reason: "wandb_* trackio_* use_wandb use_trackio",
            "logs, samples and watchdogs do not change what is learnt": """
                use_swanlab swanlab_* use_mlflow use_comet gradio_* use_otel_metrics otel_*
                hf_mlflow_log_artifacts generate_samples num_generation_samples generation_*
                do_causal_lm_eval bench_* eval_causal_lm_metrics eval_table_size do_bench_eval
                eval_max_new_tokens dpo_generate_during_eval total_supervised_tokens
                loss_watchdog_* gc_steps gc_collect_steps""",
            "rows are cached, shuffled and cut into steps by MegaTrain itself": """
                streaming dataset_prepared_path push_dataset_to_hub dataset_keep_in_memory
                sample_packing_* skip_prepare_dataset shuffle_merged_datasets
                shuffle_before_merging_datasets streaming_multipack_buffer_size
                pretrain_multipack_* multipack_real_batches pretraining_sample_concatenation
                batch_flattening eval_sample_packing eval_sequence_len max_packed_sequence_len
                group_by_length total_num_tokens preprocess_iterable num_dataset_shards_to_save
                is_preprocess""",
            "another way to compute or place the same; the planner and auto choose ours": """
                ddp flash_attention flash_attn_* flash_optimum xformers_attention sdp_attention
                flex_attention flex_attn_compile_kwargs eager_attention sage_attention device
                chunked_cross_entropy chunked_cross_entropy_num_chunks cut_cross_entropy
                tiled_mlp tiled_mlp_* use_scattermoe use_sonicmoe fused_attn_kernel sdpa_varlen
                use_ray large_head_attention experimental_skip_move_to_device
                fp32_norms embeddings_skip_upcast fsdp_final_state_dict_type
                selective_checkpointing layer_offloading torchdistx_path ple_cpu_offload
                gemma4_hybrid_attn_impl fp32_norm_classes llama4_linearized_experts
                dpo_use_logits_to_keep resources_per_worker capabilities env_capabilities
                axolotl_config_path""",
            "the model's folder says so itself; quantised ones are dequantised while read": """
                is_falcon_derived_model is_llama_derived_model is_mistral_derived_model
                is_qwen_derived_model tokenizer_use_fast tokenizer_legacy processor_type
                tokenizer_save_jinja_files base_model_ignore_patterns processor_kwargs
                model_quantization_config model_quantization_config_kwargs branch type_of_model
                fp8_enable_fsdp_float8_all_gather fp8_config""",
            "belongs to an adapter, to inference or to quantised weights": """
                gptq gptq_* lora_* peft_* loftq_config loraplus_* relora_* merge_lora
                merge_method quantization vllm""",
            "belongs to an optimizer, a schedule or a loss that is refused by its own key": """
                eaft_* adam_epsilon2 adam_beta3 dion_* qgalore_* eta_min lr_div_factor
                scaling_softmax_* pose_* jagged_restart_* cls_model_config""",
            "`megatrain resume` goes on from the newest": "auto_resume_from_checkpoints",
            "adds rows to the embedding that no token has": "resize_token_embeddings_to_32x",
            "an answer ends with what its chat template writes behind it": "eot_tokens",
            "steps are cut by real tokens": "dpo_padding_free",
            "what stands beside each turn goes to the chat template as it is": """
                [].field_thinking [].template_thinking_key""",
            "the same loss by other kernels": "dpo_use_liger_kernel",
            "this method trains on its own tokens": "train_on_inputs",
        }
    ),
    **refused(
        {
            "code of data sets is not run": "[].trust_remote_code",
            "all rows of the newest version are read; write a file of those that are wanted": """
                [].shards [].shards_idx [].skip [].revision [].conversation""",
            "rows are read as they are; change them in the file": """
                [].drop_system_message [].split_thinking [].message_field_training_detail
                [].field_human [].field_model [].field_system [].input_format
                [].input_transform [].field_instruction [].field_input [].field_output
                [].format [].system_prompt [].no_input_format [].field_prompt [].field_label
                [].chat_template_jinja [].logprobs_field [].temperature [].length
                [].sequence_length [].seed [].system_format [].step_separator
                [].max_completion_length [].train_on_last_step_only""",
            "shape and tokenizer are the model folder's; put them into one": """
                base_model_config tokenizer_config""",
            "adapters are not built": "relora",
            "is called rl_beta now": "dpo_beta",
            _VOCABULARY: """
                shrink_embeddings added_tokens_overrides fix_untrained_tokens
                mean_resizing_embeddings""",
            "changes what is learnt, and is not built": """
                qat ebft diffusion trl llmcompressor use_eaft use_onebitllms
                process_reward_model lisa_n_layers lisa_step_interval lisa_layers_attribute
                dpo_use_weighting trainer_cls rpo_alpha lr_quadratic_warmup lr_groups
                embedding_lr embedding_lr_scale jagged_restart_steps curriculum_sampling
                use_pose dataset_exact_deduplication min_sample_len default_system_message
                chat_template_kwargs scaling_softmax dynamic_checkpoint
                overrides_of_model_config rope_scaling noisy_embedding_alpha dpo_norm_loss
                overrides_of_model_kwargs s2_attention float32 quantize_moe_experts
                tokenizer_use_mistral_common max_prompt_len dataset_shard_num dataset_shard_idx
                freeze_mm_modules""",
        }
    ),
    **n.of_each(
        "[].train_on_eos [].train_on_eot", never("answers are trained with their end", "turn")
    ),
    **n.of_each("special_tokens tokens", _tokens),
    "[].roles_to_train": never("the loss is on the assistant's turns", ["assistant"], ["gpt"]),
    "[].roles": _roles,
    "[].message_field_training": never(f"turns say so as one of {', '.join(_FLAGS)}", *_FLAGS),
    "[].field_tools": never("tools stand in a column of this name", "tools"),
    "[].chat_template": lambda sheet, name, value: shared.template(sheet, name, value, TEMPLATES),
    "plugins": _plugins,
    "unfrozen_parameters": _unfrozen,
    "revision_of_model": n.Alias(("model", "revision")),
    "num_labels": never("a reward model has one score", 1),
    "cosine_constant_lr_ratio": never("cosine falls over all steps", 1, 1.0),
    "model_config": never("change the model's config.json", {"output_router_logits": True}),
}  # fmt: skip
