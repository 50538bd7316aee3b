"""Configs of LLaMA-Factory, with the data sets of its dataset_info.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain.config import names as n
from megatrain.config.document import read_yaml
from megatrain.config.importing import shared
from megatrain.config.importing.sheet import Rules, Sheet, never, nothing, to
from megatrain.config.importing.sources import (
    KNOWN_ROLES,
    Found,
    put_sources,
    read_json,
    rows_in,
    turns,
)

MARKS = (
    "stage finetuning_type template cutoff_len dataset_dir dataset val_size pref_beta pref_loss "
    "plot_loss overwrite_cache max_samples train_dataset model_class neat_packing"
)
METHODS = {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "kto", "rm": "reward"}
OF_LOSS = {"orpo": "orpo", "simpo": "simpo"}
TEMPLATES: dict[str, str | None] = {"chatml": "chatml", "llama3": "llama3"}
OF_NO_MODEL = ("default", "empty", "fewshot", "alpaca")
INFO = "dataset_info.json"
OF_V1 = (
    *("model", "train_dataset", "model_class", "dist_config", "peft_config", "kernel_config"),
    *("quant_config", "init_config", "sample_backend", "batching_strategy", "global_batch_size"),
)
# Theirs in `columns` of a set, by format: our names. A set that lists some has no others.
COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"tools": "tools"},
}
SAME = ("system", "history", "chosen", "rejected")
MEDIA = ("images", "videos", "audios")
TAGS = {"user_tag": "human", "assistant_tag": "gpt", "system_tag": "system"}
TAGS |= {"observation_tag": "observation", "function_tag": "function_call"}
ROLE_OF = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}
ROLE_OF |= {"observation_tag": "tool", "function_tag": "assistant"}


def read(sheet: Sheet, gpus: int, method: str | None) -> None:
    """Decide of every key."""
    stage, loss = str(sheet.get("stage", "sft")), str(sheet.get("pref_loss", "sigmoid"))
    found = METHODS.get(stage)
    if found is None:
        sheet.refuse("stage", f"{stage} is not built; known are {', '.join(METHODS)}")
    method = method or (OF_LOSS.get(loss) if found == "dpo" else None) or found or "sft"
    sheet.put("method", method, "stage", *(["pref_loss"] if loss in OF_LOSS else []))
    _what_trains(sheet)
    if sheet.get("train_from_scratch"):
        sheet.put("model.config", sheet.get("model_name_or_path"), "model_name_or_path")
        sheet.put("model.init", "random", "train_from_scratch")
    packing = [name for name in ("packing", "neat_packing") if sheet.get(name)]
    whole = packing or (["stage"] if stage == "pt" and sheet.get("packing") is None else [])
    rows, length = ("per_device_train_batch_size", 8), ("cutoff_len", 2048)
    shared.size_of_steps(sheet, rows, length, whole, gpus)
    if method == "sft" and (packing or sheet.get("packing") is False):
        sheet.put("data.packing", bool(packing), *packing, "packing")
    if packing == ["packing"] and method == "sft":
        sheet.assume("packing: rows of one sequence do not see each other here (neat_packing)")
    shared.length_of_run(sheet, "num_train_epochs", 3.0)
    shared.learning_rate(sheet, 5e-5)
    shared.schedule(sheet, "lr_scheduler_type", "linear")
    shared.optimizer(sheet, "optim")
    shared.precision(sheet, default="float32")
    shared.trackers(sheet)
    sheet.put("train.seed", sheet.get("seed", 42), "seed")
    shared.how_often(sheet, "eval", ("eval_strategy", "evaluation_strategy"), None)
    shared.how_often(sheet, "save", ("save_strategy",), 500)
    shared.how_often(sheet, "logging", ("logging_strategy",), None)
    _data(sheet, method)
    names = {"beta": "pref_beta", "label_smoothing": "dpo_label_smoothing"}
    names |= {"desirable_weight": "kto_chosen_weight", "undesirable_weight": "kto_rejected_weight"}
    names |= {"simpo_gamma": "simpo_gamma"} | (
        {} if loss in OF_LOSS else {"loss_type": "pref_loss"}
    )
    if method == "simpo" and sheet.get("pref_beta") is None:
        sheet.put("simpo.beta", 0.1)
    shared.section(sheet, method, names)
    sheet.finish(TABLE)


def _what_trains(sheet: Sheet) -> None:
    kind = sheet.get("finetuning_type", "lora")
    if kind != "full" and not any(name in sheet.given for name in OF_V1):
        why = "parts of layers by their number" if kind == "freeze" else "adapters are not built"
        sheet.refuse("finetuning_type", f"{kind}: {why}; finetuning_type: full is what trains here")


def _data(sheet: Sheet, method: str) -> None:
    if method == "sft":
        every = bool(sheet.get("train_on_prompt"))
        sheet.put("data.train_on", "all" if every else "assistant", "train_on_prompt")
    if method == "reward":  # ours drops long rows unless it is told
        sheet.put("data.truncation_mode", "keep_start")
    if (name := sheet.get("template")) is not None and method != "pretrain":
        if name in OF_NO_MODEL:
            sheet.refuse("template", "of no model; name a model's, or write one into a jinja file")
        else:
            shared.template(sheet, "template", name, TEMPLATES)
    size = sheet.get("val_size", 0)
    if sheet.get("eval_dataset") is None:
        share = int(size) if isinstance(size, float) and size >= 1 else size
        sheet.put("data.eval", share or None, "val_size")
    info, folder = _info(sheet)
    for name, key in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        given = sheet.get(name, [])
        sets = given.split(",") if isinstance(given, str) else sheet.typed(name, list, [])
        found = [one for each in sets for one in _set(sheet, name, str(each).strip(), info, folder)]
        weights = _weights(sheet, len(found)) if name == "dataset" else [None] * len(found)
        pairs = zip(found, weights, strict=True)
        ours = [Found(**{**vars(one), "weight": weight}) for one, weight in pairs]
        put_sources(sheet, key, ours, name)
    sheet.drop("where dataset_info.json lies", "dataset_dir")
    sheet.drop("no set has more rows", "max_samples")


def _weights(sheet: Sheet, number: int) -> list[float | None]:
    strategy, shares = sheet.get("mix_strategy", "concat"), sheet.get("interleave_probs")
    if isinstance(shares, str):
        shares = [read_yaml(share, "").value for share in shares.split(",")]
    if strategy == "concat" or number < 2:
        sheet.drop("sets follow each other", "mix_strategy", "interleave_probs")
        return [None] * number
    wrong = not isinstance(shares, list) or len(shares) != number
    if shares is not None and (wrong or not all(isinstance(one, float | int) for one in shares)):
        sheet.refuse("interleave_probs", f"must be {number} numbers, one for each set")
        shares = None
    names = ("mix_strategy", "interleave_probs")
    sheet.assume(f"mix_strategy: {strategy}: an epoch has as many rows as all sets together")
    for name in names:
        if name in sheet.left:
            sheet.drop("weight of each of data.train", name)
    return list(shares or [1 / number] * number)


def _info(sheet: Sheet) -> tuple[dict[str, Any], Path]:
    """dataset_info.json and its folder: dataset_dir here or above the file, or beside the file."""
    named = Path(str(sheet.get("dataset_dir", "data")))
    folders = [named, *(above / named for above in (sheet.folder, *sheet.folder.parents))]
    for folder in [*folders, sheet.folder]:
        if (folder / INFO).is_file():
            found = read_json(folder / INFO)
            return (found if isinstance(found, dict) else {}), folder
    return {}, named


def _set(
    sheet: Sheet, name: str, wanted: str, info: dict[str, Any], folder: Path
) -> Iterator[Found]:
    """The source of a set of dataset_info.json."""
    entry = info.get(wanted)
    if not isinstance(entry, dict):
        sheet.refuse(name, f"{wanted} is not in {INFO}; name its folder (dataset_dir)")
        return
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    form = str(entry.get("formatting", "alpaca"))
    if not isinstance(columns, dict) or not isinstance(tags, dict):
        sheet.refuse(name, f"{wanted}: columns and tags must be mappings")
        return
    if media := [kind for kind in MEDIA if columns.get(kind)]:
        sheet.refuse(name, f"{wanted} has {', '.join(media)}; only text can be trained on")
    wrong = [tag for tag in tags if tag in TAGS and KNOWN_ROLES.get(tags[tag]) != ROLE_OF[tag]]
    found = _form(sheet, form, columns, tags, bool(entry.get("ranking")))
    if wrong or found is None:
        sheet.refuse(name, f"{wanted}: roles or turns of other names; known are {TAGS}")
        return
    if entry.get("num_samples"):
        sheet.refuse(name, f"{wanted}: num_samples draws some rows; write a file of them")
    path, split = _path(entry, folder)
    if path is None:
        sheet.refuse(name, f"{wanted} is run by a script or lies elsewhere; download its rows")
        return
    most, rows = sheet.get("max_samples"), rows_in(Path(path)) if Path(path).is_file() else None
    if isinstance(most, int) and (rows is None or rows > most):
        known = "are not known" if rows is None else f"are {rows:,}"
        reason = n.REFUSED["max_samples"].reason
        sheet.refuse("max_samples", f"rows of {wanted} {known}; {reason}")
    format, named, text = found
    yield Found(path, split, format, None, named, text)


def _path(entry: dict[str, Any], folder: Path) -> tuple[str | None, str | None]:
    split = None if entry.get("split", "train") == "train" else str(entry["split"])
    if hub := entry.get("hf_hub_url"):
        subset = entry.get("subset")
        return (f"{hub}:{subset}:{split or 'train'}", None) if subset else (str(hub), split)
    file = entry.get("file_name")
    return (str(folder / file) if file else None), split


def _form(
    sheet: Sheet, form: str, columns: dict[str, str], tags: dict[str, str], ranking: bool
) -> tuple[str, dict[str, str], str | None] | None:
    """(format, columns of ours by theirs, text column)."""
    if sheet.config["method"] == "pretrain":
        text = str(columns.get("prompt", "text"))
        return "text", {}, None if text == "text" else text
    named = {
        COLUMNS.get(form, {}).get(theirs, theirs): column for theirs, column in columns.items()
    }
    if "kto_tag" in named:
        named["label"] = named.pop("kto_tag")
    if form == "alpaca":
        name = "alpaca_ranking" if ranking else "alpaca"
    else:
        column = named.pop("messages", "conversations")
        role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
        if form == "openai":
            column, role, content = columns.get("messages", "messages"), "role", "content"
        found = turns(column, role, content)
        if found is None:
            return None
        name, of_turns = found
        named |= of_turns
        if ranking:
            of_turns = {} if column == "conversations" else {"conversations": column}
            name, named = "ranking", {k: v for k, v in named.items() if k != "messages"} | of_turns
    return name, {ours: theirs for ours, theirs in named.items() if ours != theirs}, None


_GENERATION = "of generation, export or inference"
_OTHER_LOSS = "another loss or update, which is not built"
TABLE: Rules = {
    **shared.TABLE,
    **n.of_each(
        "max_length temperature top_p top_k num_beams max_new_tokens repetition_penalty do_sample "
        "length_penalty skip_special_tokens predict_with_generate infer_* export_* vllm_* sglang_* "
        "eval_num_beams task task_dir n_shot lang save_dir download_mode offload_folder "
        "use_kv_cache compute_accuracy do_predict batch_size model_max_length compute_dtype",
        nothing(_GENERATION),
    ),
    **n.of_each(
        "cache_dir use_fast_tokenizer hf_hub_token ms_hub_token om_hub_token print_param_status "
        "overwrite_output_dir preprocessing_batch_size buffer_size data_shared_file_system "
        "tokenized_path media_dir include_effective_tokens_per_second swanlab_* use_swanlab "
        "ray_* enable_torch_profiler profiler_* profile_modules master_* ms_* streaming "
        "eval_on_each_dataset image_* video_* audio_* crop_to_patches use_audio_in_video",
        nothing("how rows and files are read, cached and logged there"),
    ),
    **n.of_each(
        "flash_attn shift_attn_ use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels "
        "disable_gradient_checkpointing use_reentrant_gc upcast_layernorm upcast_lmhead_output "
        "low_cpu_mem_usage use_mca use_hyper_parallel hyper_parallel_args use_kt kt_* fp8_backend "
        "fp8_enable_fsdp_float8_all_gather tensor_model_parallel_size pipeline_model_parallel_size "
        "expert_model_parallel_size virtual_pipeline_model_parallel_size sequence_parallel "
        "bias_activation_fusion apply_rope_fusion use_distributed_optimizer overlap_* "
        "moe_grouped_gemm moe_token_dispatcher_type recompute_granularity",
        nothing("another way to compute or place the same; the planner and auto choose ours"),
    ),
    **n.of_each(
        "lora_* oft_* loraplus_* use_rslora use_dora pissa_* additional_target create_new_adapter "
        "module_dropout adapter_folder quantization_method quantization_type "
        "quantization_device_map double_quantization ppo_* reward_model_* ref_model_adapters "
        "ref_model_quantization_bit freeze_trainable_* freeze_extra_modules galore_* apollo_* "
        "badam_* asft_alpha eaft_alpha",
        nothing("belongs to what another key asks for"),
    ),
    **n.of_each(
        "use_galore use_apollo use_badam use_muon use_adam_mini use_dft_loss use_asft_loss "
        "use_eaft_loss use_llama_pro mixture_of_depths shift_attn pref_ftx pref_bco_weight "
        "ld_alpha ref_model reward_model block_diag_attn",
        never(_OTHER_LOSS),
    ),
    **n.of_each(
        "add_tokens add_special_tokens new_special_tokens_config resize_vocab rope_scaling "
        "split_special_tokens",
        never("model and tokenizer stay as they are; change them before"),
    ),
    "template": nothing("texts have no turns"),
    "neat_packing": nothing("steps are cut by real tokens, and rows never see each other"),
    "packing": nothing("steps are cut by real tokens, and rows never see each other"),
    "train_on_prompt": nothing("this method trains on its own tokens"),
    "val_size": nothing("eval_dataset goes before"),
    "init_special_tokens": nothing("belongs to what another key asks for"),
    "adapter_name_or_path": never("adapters are not built; merge it into the model first"),
    "quantization_bit": never(n.REFUSED["load_in_4bit"].reason),
    "mask_history": never("earlier answers are trained, too; give their turns weight 0"),
    "default_system": never("write the system prompt into the rows (column system)"),
    "tool_format": never("tools are written as the chat template has them"),
    "enable_thinking": never("thinking is written as the chat template has it", True),
    "preserve_thinking": never("thinking is written as the chat template has it"),
    "ignore_pad_token_for_loss": never("padding is never trained on", True),
    "disable_shuffling": never("rows are shuffled, by train.seed"),
    "freeze_vision_tower": nothing("towers are carried along unchanged; text alone is trained"),
    "freeze_multi_modal_projector": nothing("carried along unchanged; text alone is trained"),
    "freeze_language_model": never("it is what is trained"),
    "early_stopping_steps": to("checkpoint.patience"),
    **n.of_each("model train_dataset", never("LLaMA-Factory's v1 configs are not read")),
    **n.of_each(" ".join(OF_V1[2:]), nothing("belongs to what another key asks for")),
}
