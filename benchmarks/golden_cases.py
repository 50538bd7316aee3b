"""What benchmarks/goldens.py records: families, modes, optimizers, runs, and the plans that it asks
for."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from plan_cases import CUDA_CASES  # type: ignore[import-not-found]

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FALCON_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
FALCON = {key: SIZES[key] for key in FALCON_KEYS}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SIZES, "tie_word_embeddings": False}),
    "mistral, sliding": ("mistral", {**SIZES, "sliding_window": 5}),
    "qwen2, tied": ("qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 8, "tie_word_embeddings": False}),
    "falcon": (
        "falcon",
        {**FALCON, "parallel_attn": True, "multi_query": True, "new_decoder_architecture": False},
    ),
    "falcon, alibi": (
        "falcon",
        {**FALCON, "alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
    ),
    "gpt_neox, dropout": ("gpt_neox", {**SIZES, "hidden_dropout": 0.2, "attention_dropout": 0.2}),
    "gpt2": ("gpt2", GPT2),
    "gemma2": ("gemma2", {**SIZES, "head_dim": 8, "sliding_window": 5}),
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
ALL = 1 << 30
MODES: dict[str, dict[str, Any]] = {
    "one group": {},
    "two groups, sums on the device": {"groups": 2, "sums_on_device": ALL},
    "two groups, sums travel": {"groups": 2},
    "front resident, end retained": {"resident": 2, "retained": 2},
    "whole": {"resident": ALL, "retained": ALL},
    "two groups, front resident": {
        "groups": 2,
        "resident": 2,
        "sums_on_device": 3,
        "retained": ALL,
    },
    "offloaded": {"groups": 2, "offload_activations": True},
    "offloaded by int8": {"offload_activations": True, "activations": "int8"},
    "int6": {"activations": "int6"},
    "offloaded by int4": {"offload_activations": True, "activations": "int4"},
    "saved activations in host RAM": {
        "offload_activations": True,
        "retained": 1,
        "retained_on_host": 2,
    },
    "chunks": {"layer_chunk_tokens": 5, "head_chunk_tokens": 4},
    "gradients twice": {"second_backward": True},
    "state on NVMe": {"nvme_blocks": 3},
    "gradients on NVMe": {"nvme_blocks": 3},
    "weights on NVMe, two groups": {"nvme_blocks": ALL, "groups": 2},
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"AdamW {moments}": ("AdamW", {"moments": moments}) for moments in ("bfloat16", "int8")},
    **{
        f"Lion {moments}": ("Lion", {"moments": moments})
        for moments in ("float32", "bfloat16", "int8")
    },
    "Muon": ("Muon", {}),
}


def engine_cases(device: str) -> Iterator[tuple[str, Any]]:
    """(name, what makes the engine) of every combination that is tried."""

    make = partial(engine_of, device=device)
    for family in FAMILIES:
        for precision in ("bfloat16", "float32"):
            yield f"{family}, {precision}", partial(make, family, precision)
    for mode, settings in MODES.items():
        for family in ("llama", "qwen2, tied"):
            for precision in ("bfloat16", "float32"):
                for clip in (0.5, None):
                    if not (clip is None and settings.get("second_backward")):
                        name = (
                            f"{mode}, {family}, {precision}, {'clipped' if clip else 'unclipped'}"
                        )
                        yield name, partial(make, family, precision, clip=clip, **settings)
    for name, (kind, options) in OPTIMIZERS.items():
        for mode in ("one group", "front resident, end retained", "state on NVMe"):
            for precision in ("bfloat16", "float32"):
                yield (
                    f"{name}, {mode}, {precision}",
                    partial(make, "llama", precision, optimizer=(kind, options), **MODES[mode]),
                )
    if device == "cuda":
        yield (
            "fp8",
            partial(make, "llama", "fp8", sizes={"hidden_size": 64, "intermediate_size": 128}),
        )
        retained: dict[str, Any] = {"retained": ALL}
        for kept in ({}, retained, {**retained, "cheap_retention": True}):
            yield f"compiled, {kept}", partial(make, "llama", "bfloat16", compile=True, **kept)


def engine_of(
    family: str,
    precision: str,
    *,
    device: str,
    clip: float | None = 0.5,
    optimizer: tuple[str, dict[str, Any]] = ("AdamW", {}),
    sizes: Mapping[str, int] | None = None,
    **settings: Any,
) -> Any:
    from transformers import AutoConfig

    import megatrain as mt

    if "nvme_blocks" in settings:
        settings["nvme_folders"] = (Path(tempfile.mkdtemp(dir=os.environ["GOLDENS_SCRATCH"])),)
    kind, arguments = FAMILIES[family]
    name, options = optimizer
    return mt.Engine.from_config(
        AutoConfig.for_model(kind, **{**arguments, **(sizes or {})}),
        optimizer=getattr(mt, name)(**{"lr": 1e-3, "weight_decay": 0.1, **options}),
        precision=precision,
        max_grad_norm=clip,
        device=device,
        seed=3,
        settings=mt.Settings(update_threads=2, **settings),
    )


RUNS: dict[str, tuple[str, ...]] = {
    "sft, padded": ("data.packing=false",),
    "sft, packed, int8 moments": ("data.packing=true", "optimizer.moments=int8", "train.groups=2"),
    "sft, resident, Lion": ("optimizer.name=lion", "memory.resident=2", "train.retained=1"),
    "sft, Muon, unclipped": ("optimizer.name=muon", "train.max_grad_norm=null"),
}


def plan_cases() -> Iterator[tuple[str, list[str]]]:
    """(name, what follows `megatrain plan`): named shapes, single features, then every case of
    plan_cases.py."""
    scratch = os.environ["GOLDENS_SCRATCH"]
    for model in (
        *(f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "7b", "14b", "32b")),
        "llama-3-8b",
        "llama-3-70b",
    ):
        for gpu, ram in (
            ("RTX 4090", "64GiB"),
            ("RTX 4090", "256GiB"),
            ("H100", "128GiB"),
            ("H200", "512GiB"),
        ):
            moments = "int8" if model.endswith(("32b", "70b")) else "float32"
            step = [
                "train.seq_len=2048",
                "train.tokens_per_step=65536",
                f"optimizer.moments={moments}",
            ]
            yield f"{model}, {gpu}, {ram}", [model, "--gpu", gpu, "--ram", ram, *step]
    for name, gpu, ram, keys in (
        ("128k", "H200", "128GiB", ["train.seq_len=131072", "train.tokens_per_step=131072"]),
        ("Lion, unclipped", "H100", "64GiB", ["optimizer.name=lion", "train.max_grad_norm=null"]),
        ("Muon", "H100", "128GiB", ["optimizer.name=muon"]),
    ):
        yield f"qwen2.5-7b, {name}", ["qwen2.5-7b", "--gpu", gpu, "--ram", ram, *keys]
    for name, case in CUDA_CASES.items():
        if case.edge is None:
            folder = Path(scratch) / hashlib.sha256(name.encode()).hexdigest()[:8]
            case.config().save_pretrained(folder)
            yield name, [str(folder), "--gpu", "H200", "--ram", "128GiB", *keys_of(case)]


def keys_of(case: Any) -> list[str]:
    """A case of plan_cases.py as keys of the config."""
    wanted = {
        "train.seq_len": case.seq_len,
        "train.tokens_per_step": case.tokens,
        "train.micro_batch_tokens": case.micro_batch,
        "train.groups": case.groups,
        "train.retained": case.retained,
        "train.cheap_retention": case.cheap if case.compiled else None,
        "train.head_chunk_tokens": case.head_chunk,
        "memory.resident": case.resident,
        "memory.offload_activations": case.offload,
        "memory.retained_on_host": case.on_host,
        "compile": case.compiled,
        "optimizer.moments": case.moments,
        "precision": case.precision,
        "memory.gpu": None if case.gpu_cap is None else f"{case.gpu_cap}GiB",
        "memory.host": None if case.host_cap is None else f"{case.host_cap}GiB",
    }
    keys = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in wanted.items()
        if value is not None
    ]
    return keys if case.clipping else [*keys, "train.max_grad_norm=null"]
