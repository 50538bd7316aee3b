"""Configs of LLaMA-Factory, with the data sets of its dataset_info.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain.config import names as n
from megatrain.config.importing import shared
from megatrain.config.importing.shared import KNOWN_ROLES, Source, put_sources, read_json, turns
from megatrain.config.importing.sheet import Sheet, Table, ignored, never, refused

MARKS = (
    "stage finetuning_type template cutoff_len dataset_dir dataset val_size pref_beta pref_loss "
    "plot_loss overwrite_cache max_samples train_dataset "
    "model_class neat_packing"
)
METHODS = {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "kto", "rm": "reward"}
OF_LOSS = ("orpo", "simpo")
OF_METHOD = {
    "beta": "pref_beta",
    "label_smoothing": "dpo_label_smoothing",
    "desirable_weight": "kto_chosen_weight",
    "undesirable_weight": "kto_rejected_weight",
    "simpo_gamma": "simpo_gamma",
}
INFO = "dataset_info.json"
# Theirs in `columns` of a set: our names. A set that lists some has no others.
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "assistant",
}


def read(sheet: Sheet, gpus: int, method: str | None) -> None:
    """Decide of every key."""
    stage, loss = str(sheet.get("stage", "sft")), str(sheet.get("pref_loss", "sigmoid"))
    found = METHODS.get(stage)
    if found is None:
        sheet.refuse("stage", f"{stage} is not built; known are {', '.join(METHODS)}")
    of_loss = loss in OF_LOSS
    method = method or (loss if found == "dpo" and of_loss else found) or "sft"
    sheet.put("method", method, "stage", *(["pref_loss"] if of_loss else []))
    kind = sheet.get("finetuning_type", "lora")
    if kind != "full":
        why = "parts of layers by their number" if kind == "freeze" else "adapters are not built"
        sheet.refuse("finetuning_type", f"{kind}: {why}; finetuning_type: full is what trains here")
    if sheet.get("train_from_scratch"):
        sheet.put("model.config", sheet.get("model_name_or_path"), "model_name_or_path")
        sheet.put("model.init", "random", "train_from_scratch")
    packing = [name for name in ("packing", "neat_packing") if sheet.get(name)]
    shared.arguments(
        sheet,
        gpus,
        packing or (["stage"] if stage == "pt" and sheet.get("packing") is None else []),
        rows=("per_device_train_batch_size", 8),
        length=("cutoff_len", 2048),
        epochs=("num_train_epochs", 3.0),
        rate=5e-5,
        schedule=("lr_scheduler_type", "linear"),
        precision="float32",
        often={"save": 500},
    )
    if method == "sft" and (packing or sheet.get("packing") is False):
        sheet.put("data.packing", bool(packing), *packing, "packing")
    if packing == ["packing"] and method == "sft":
        sheet.assume("packing: rows of one sequence do not see each other here (neat_packing)")
    _data(sheet, method)
    shared.of_method(sheet, OF_METHOD | ({} if of_loss else {"loss_type": "pref_loss"}))
    sheet.finish(TABLE)


def _data(sheet: Sheet, method: str) -> None:
    if method == "sft":
        every = bool(sheet.get("train_on_prompt"))
        sheet.put("data.train_on", "all" if every else "assistant", "train_on_prompt")
    if method == "reward":  # ours drops long rows unless it is told
        sheet.put("data.truncation_mode", "keep_start")
    name = sheet.get("template")
    if name in ("default", "empty", "fewshot", "alpaca") and method != "pretrain":
        sheet.refuse("template", "of no model; name a model's, or write one into a jinja file")
    elif name is not None and method != "pretrain":
        shared.template(sheet, "template", name, {"chatml": "chatml", "llama3": "llama3"})
    size = sheet.get("val_size", 0)
    if sheet.get("eval_dataset") is None:
        share = int(size) if isinstance(size, float) and size >= 1 else size
        sheet.put("data.eval", share or None, "val_size")
    info, folder = _info(sheet)
    for name, key in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        given = sheet.get(name, [])
        sets = given.split(",") if isinstance(given, str) else given
        if not isinstance(sets, list):
            sheet.refuse(name, "must be a text or a list")
            sets = []
        each = [_set(sheet, name, str(one).strip(), info, folder) for one in sets]
        put_sources(sheet, key, [one for one in each if one], name)
        if len(each) > 1 and name == "dataset" and sheet.get("mix_strategy", "concat") != "concat":
            reason = "sets follow each other; give each of data.train a weight"
            sheet.refuse("mix_strategy", reason)
    sheet.drop("sets follow each other", "mix_strategy", "interleave_probs")


def _info(sheet: Sheet) -> tuple[dict[str, Any], Path]:
    """dataset_info.json and its folder: dataset_dir here or above the file, or beside the file."""
    named = Path(str(sheet.get("dataset_dir", "data")))
    folders = [named, *(above / named for above in (sheet.folder, *sheet.folder.parents))]
    for folder in [*folders, sheet.folder]:
        if (folder / INFO).is_file():
            found = read_json(folder / INFO)
            return (found if isinstance(found, dict) else {}), folder
    return {}, named


def _set(sheet: Sheet, name: str, wanted: str, info: dict[str, Any], folder: Path) -> Source | None:
    """The source of a set of dataset_info.json; None, and the key refused, if there is none."""
    entry = info.get(wanted)
    if not isinstance(entry, dict):
        sheet.refuse(name, f"{wanted} is not in {INFO}; name its folder (dataset_dir)")
        return None
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if not isinstance(columns, dict) or not isinstance(tags, dict):
        sheet.refuse(name, f"{wanted}: columns and tags must be mappings")
        return None
    if media := [kind for kind in ("images", "videos", "audios") if columns.get(kind)]:
        sheet.refuse(name, f"{wanted} has {', '.join(media)}; only text can be trained on")
    shape = _shape(sheet.config["method"], entry, columns, tags)
    if shape is None or any(
        KNOWN_ROLES.get(tags.get(tag, role)) != role for tag, role in TAGS.items()
    ):
        sheet.refuse(name, f"{wanted}: roles or turns of other names; known are {[*KNOWN_ROLES]}")
        return None
    if entry.get("num_samples"):
        sheet.refuse(name, f"{wanted}: num_samples draws some rows; write a file of them")
    split = None if entry.get("split", "train") == "train" else str(entry["split"])
    hub, subset = entry.get("hf_hub_url"), entry.get("subset")
    file = folder / str(entry.get("file_name"))
    if hub and subset:
        shape |= {"path": f"{hub}:{subset}:{split or 'train'}"}
    elif hub or "file_name" in entry:
        shape |= {"path": str(hub or file), "split": split}
    else:
        sheet.refuse(name, f"{wanted} is run by a script or lies elsewhere; download its rows")
        return None
    rows = None if hub else _rows_in(file)
    most = sheet.get("max_samples")
    if isinstance(most, int) and (rows is None or rows > most):
        known = "are not known" if rows is None else f"are {rows:,}"
        reason = n.REFUSED["max_samples"].reason
        sheet.refuse("max_samples", f"rows of {wanted} {known}; {reason}")
    return shape


def _rows_in(path: Path) -> int | None:
    """Number of rows of a json or jsonl file; None for others."""
    if path.suffix == ".jsonl" and path.is_file():
        return sum(bool(line.strip()) for line in path.read_bytes().splitlines())
    rows = read_json(path) if path.suffix == ".json" and path.is_file() else None
    return len(rows) if isinstance(rows, list) else None


def _shape(
    method: str, entry: dict[str, Any], columns: dict[str, str], tags: dict[str, str]
) -> Source | None:
    """Format, columns (ours by theirs) and text column of a set; None for unknown turns."""
    if method == "pretrain":
        text = columns.get("prompt", "text")
        return {"format": "text", "text_field": None if text == "text" else text}
    form, ranking = entry.get("formatting", "alpaca"), bool(entry.get("ranking"))
    theirs = COLUMNS if form == "alpaca" else {}
    named = {{"kto_tag": "label", **theirs}.get(name, name): one for name, one in columns.items()}
    if form == "alpaca":
        name = "alpaca_ranking" if ranking else "alpaca"
    else:
        column, role, content = named.pop("messages", "conversations"), "from", "value"
        role, content = tags.get("role_tag", role), tags.get("content_tag", content)
        if form == "openai":
            column, role, content = columns.get("messages", "messages"), "role", "content"
        found = turns(column, role, content)
        if found is None:
            return None
        name, of_turns = found
        if ranking:
            name, of_turns = "ranking", {"conversations": column}
        named |= of_turns
    return {"format": name, "columns": {k: v for k, v in named.items() if k != v}}


TABLE: Table = {
    **shared.TABLE,
    **ignored(
        {
            "of generation, export or inference": """
                max_length temperature top_p top_k num_beams max_new_tokens repetition_penalty
                do_sample length_penalty skip_special_tokens predict_with_generate infer_*
                export_* vllm_* sglang_* eval_num_beams task task_dir n_shot lang save_dir
                download_mode offload_folder use_kv_cache compute_accuracy do_predict batch_size
                model_max_length compute_dtype""",
            "how rows and files are read, cached and logged there": """
                dataset_dir cache_dir use_fast_tokenizer hf_hub_token ms_hub_token om_hub_token
                print_param_status overwrite_output_dir preprocessing_batch_size buffer_size
                data_shared_file_system tokenized_path media_dir swanlab_* use_swanlab ray_*
                include_effective_tokens_per_second enable_torch_profiler profiler_*
                profile_modules master_* ms_* streaming eval_on_each_dataset image_* video_*
                audio_* crop_to_patches use_audio_in_video""",
            "another way to compute or place the same; the planner and auto choose ours": """
                flash_attn shift_attn_ use_unsloth use_unsloth_gc enable_liger_kernel
                use_v1_kernels disable_gradient_checkpointing use_reentrant_gc upcast_layernorm
                upcast_lmhead_output low_cpu_mem_usage use_mca use_hyper_parallel use_kt kt_*
                hyper_parallel_args fp8_backend fp8_enable_fsdp_float8_all_gather
                tensor_model_parallel_size pipeline_model_parallel_size overlap_*
                expert_model_parallel_size virtual_pipeline_model_parallel_size
                sequence_parallel bias_activation_fusion apply_rope_fusion moe_grouped_gemm
                use_distributed_optimizer moe_token_dispatcher_type recompute_granularity""",
            "belongs to what another key asks for": """
                lora_* oft_* loraplus_* use_rslora use_dora pissa_* additional_target
                create_new_adapter module_dropout adapter_folder quantization_method
                quantization_type quantization_device_map double_quantization ppo_*
                reward_model_* ref_model_adapters ref_model_quantization_bit
                freeze_trainable_* freeze_extra_modules galore_* apollo_* badam_* asft_alpha
                eaft_alpha init_special_tokens model_class dist_config kernel_config quant_config
                init_config sample_backend batching_strategy global_batch_size""",
            "texts have no turns": "template",
            "steps are cut by real tokens, and rows never see each other": "neat_packing packing",
            "this method trains on its own tokens": "train_on_prompt",
            "eval_dataset goes before": "val_size",
            "no set has more rows": "max_samples",
            "carried along unchanged; text alone is trained": """
                freeze_vision_tower freeze_multi_modal_projector""",
        }
    ),
    **refused(
        {
            "another loss or update, which is not built": """
                use_galore use_apollo use_badam use_muon use_adam_mini use_dft_loss use_asft_loss
                use_eaft_loss use_llama_pro mixture_of_depths shift_attn pref_ftx pref_bco_weight
                ld_alpha ref_model reward_model block_diag_attn""",
            "model and tokenizer stay as they are; change them before": """
                add_tokens add_special_tokens new_special_tokens_config resize_vocab rope_scaling
                split_special_tokens""",
            "adapters are not built; merge it into the model first": "adapter_name_or_path",
            n.REFUSED["load_in_4bit"].reason: "quantization_bit",
            "earlier answers are trained, too; give their turns weight 0": "mask_history",
            "write the system prompt into the rows (column system)": "default_system",
            "tools and thinking are written as the chat template has them": """
                tool_format preserve_thinking""",
            "rows are shuffled, by train.seed": "disable_shuffling",
            "it is what is trained": "freeze_language_model",
            "LLaMA-Factory's v1 configs are not read": "model train_dataset",
        }
    ),
    "enable_thinking": never("thinking is written as the chat template has it", True),
    "ignore_pad_token_for_loss": never("padding is never trained on", True),
    "early_stopping_steps": n.Alias(("checkpoint", "patience")),
}
