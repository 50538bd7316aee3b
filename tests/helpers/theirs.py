"""Configs of other trainers for tests of their import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatrain.config.document import write_yaml
from megatrain.config.importing import import_config
from megatrain.config.importing.sheet import Sheet

Given = dict[str, Any]
AXOLOTL: Given = {
    "base_model": "org/base",
    "datasets": [{"path": "org/rows", "type": "chat_template"}],
    "sequence_len": 2048,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 2,
    "learning_rate": 1e-5,
    "output_dir": "out",
}
FACTORY: Given = {
    "model_name_or_path": "org/base",
    "stage": "sft",
    "finetuning_type": "full",
    "dataset": "ours",
    "dataset_dir": "sets",
    "template": "qwen3",
    "cutoff_len": 512,
    "output_dir": "out",
}
TRL: Given = {
    "model_name_or_path": "org/base",
    "dataset_name": "org/rows",
    "per_device_train_batch_size": 2,
    "max_length": 512,
    "learning_rate": 1e-5,
    "output_dir": "out",
}
UPSTREAM: Given = {
    "model": {"name": "org/base", "dtype": "bfloat16", "devices": [0, 1]},
    "dataset": {"name": "ours", "dataset_dir": "sets", "max_seq_len": 512},
    "training": {"batch_size": 6, "gradient_accumulation_steps": 2, "num_steps": 50},
    "optimizer": {"type": "deepspeed_adam", "beta1": 0.8},
    "memory": {"checkpoint_interval": 2, "num_grad_slabs": 8},
}
BASES = {"axolotl": AXOLOTL, "llama-factory": FACTORY, "trl": TRL}
ROWS = [{"instruction": "Add 2 and 2.", "output": "4"}] * 3


def make_sets() -> None:
    """`sets` with a dataset_info.json in the current folder."""
    info = {
        "ours": {"file_name": "ours.json"},
        "more": {
            "hf_hub_url": "org/more",
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user"},
        },
        "pairs": {
            "hf_hub_url": "org/pairs",
            "subset": "en",
            "ranking": True,
            "formatting": "sharegpt",
            "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
        },
        "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "body"}},
        "seen": {"hf_hub_url": "org/seen", "columns": {"prompt": "q", "images": "pictures"}},
        "films": {"hf_hub_url": "org/films", "columns": {"prompt": "q", "videos": "videos"}},
        "judged": {
            "hf_hub_url": "org/judged",
            "columns": {"prompt": "question", "response": "answer", "kto_tag": "good"},
        },
        "odd": {"hf_hub_url": "org/odd", "formatting": "sharegpt", "tags": {"user_tag": "me"}},
        "script": {"script_url": "make.py"},
    }
    Path("sets").mkdir()
    Path("sets/dataset_info.json").write_text(json.dumps(info))
    Path("sets/ours.json").write_text(json.dumps(ROWS))
    Path("sets/texts.jsonl").write_text('{"body": "a"}\n')


def imported(trainer: str, /, processes: int = 1, method: str | None = None, **keys: Any) -> Sheet:
    """Of the trainer's base with `keys` over it, of which None takes one away."""
    given = {name: value for name, value in (BASES[trainer] | keys).items() if value is not None}
    Path("theirs.yaml").write_text(write_yaml(given))
    return import_config("theirs.yaml", trainer, processes, method)


def value(found: Sheet, dotted: str) -> Any:
    node: Any = found.tree()
    for name in dotted.split("."):
        node = node[name]
    return node
