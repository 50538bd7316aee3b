"""Which keys of a config may differ when a run is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain.config import Config, load_config
from megatrain.config.document import COMMAND_LINE
from megatrain.errors import ConfigError

CONFIG_FILE, RESOLVED_FILE = "config.yaml", "config.resolved.yaml"  # of a run folder: as asked for, and with what was decided

# Key or section -> what a change of it means for a resumed run. What is not listed may change freely: it decides speed, memory or
# what is shown, and results beyond rounding never (memory otherwise, threads, log_every, eval_every, checkpoint,
# sample_prompt, device, economy).
REFUSED = {
    "model.config": "the checkpoint is of that model",
    "model.init": "the weights are the checkpoint's",
    "method": "the rows would be other rows",
    "precision": "the arrays are kept in that precision",
    "optimizer.name": "the state is that optimizer's",
    "optimizer.moments": "the state is kept in that type",
    "train.seed": "the order of the rows follows from it",
    "output": "a run stays in its folder, which may be moved as a whole",
}
FLAGGED = {
    "model": "configuration and tokenizer are read from there; the weights are the checkpoint's",
    "data": "the rows are read anew, and must be those of the checkpoint",
    "optimizer": "the update differs from here on",
    "train.seq_len": "the rows are cut anew, and must be those of the checkpoint",
    "train.tokens_per_step": "steps differ in size from here on",
    "train.rows_per_step": "steps differ in size from here on",
    "train.learning_rate": "the schedule jumps to the new rate",
    "train.schedule": "the schedule jumps to the new one",
    "train.warmup": "the schedule jumps to the new one",
    "train.min_lr_ratio": "the schedule jumps to the new one",
    "train.decay": "the schedule jumps to the new one",
    "train.epochs": "the schedule is stretched to the new length",
    "train.max_steps": "the schedule is stretched to the new length",
    "train.max_grad_norm": "gradients are clipped otherwise from here on",
    "train.micro_batch_tokens": "sums are rounded in another order from here on",
    "train.groups": "sums are rounded in another order from here on",
    "data.packing": "rows are summed in another order from here on",
    "train.head_chunk_tokens": "sums are rounded in another order from here on",
    "train.layer_chunk_tokens": "sums are rounded in another order from here on",
    "train.cheap_retention": "compiled layers may round otherwise from here on",
    "train.retained": "compiled layers may round otherwise where they are computed again",
    "memory.retained_on_host": "compiled layers may round otherwise where they are computed again",
    "memory.activations": "gradients round otherwise from here on",
    "train.deterministic": "other kernels round otherwise from here on",
    "attention": "other kernels round otherwise from here on",
    "compile": "other kernels round otherwise from here on",
}
# What the planner chose stays chosen when a run is resumed, or sums would be rounded in another order.
KEPT_CHOICES = (
    "train.micro_batch_tokens",
    "train.groups",
    "train.head_chunk_tokens",
    "train.layer_chunk_tokens",
    "train.retained",
    "train.cheap_retention",
    "memory.retained_on_host",
    "data.packing",
    "precision",
    "optimizer.moments",
    "compile",
)


def resumed_configs(run_dir: Path, overrides: Sequence[str]) -> tuple[Config, Config]:
    """(the run's config, the config that it shall go on with). What the planner chose at its start is asked for, unless set anew.

    Raises ConfigError for a folder that holds no run, and for wrong overrides.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{run_dir}: is not a run folder (no {CONFIG_FILE}); name the folder that a run wrote (`output` in its config)")
    kept: dict[str, object] = {"output": str(run_dir)}  # the folder may have been moved
    if (run_dir / RESOLVED_FILE).is_file():
        decided = flatten(load_config(run_dir / RESOLVED_FILE).model_dump(mode="json"))
        kept |= {key: decided[key] for key in KEPT_CHOICES}
    asked = load_config(path, overrides)
    if asked.memory.offload_activations is False:
        kept["memory.retained_on_host"] = 0  # the one excludes the other
    if asked.memory.second_backward is True:
        kept |= {"train.groups": 1, "train.retained": 0, "memory.retained_on_host": 0}  # so does it
    return load_config(path).with_values(kept), unless_set(asked, kept)


def unless_set(config: Config, values: dict[str, object]) -> Config:
    """The config with these values, but for keys that were set on the command line."""
    return config.with_values({key: value for key, value in values.items() if not config.where(key).startswith(COMMAND_LINE)})


def check_changes(before: Config, after: Config) -> list[str]:
    """Warnings for changed keys that alter the run. Raises ConfigError for one that cannot change."""
    old, new = flatten(before.model_dump(mode="json")), flatten(after.model_dump(mode="json"))
    warnings = []
    for key in old:
        if old[key] == new[key]:
            continue
        for listed, reason in REFUSED.items():
            if belongs(key, listed):
                raise ConfigError(f"{after.where(key)}: cannot change from {old[key]!r} to {new[key]!r} in a resumed run, since {reason}")
        for listed, reason in FLAGGED.items():
            if belongs(key, listed):
                warnings.append(f"{key} changed from {old[key]!r} to {new[key]!r}: {reason}")
                break
    return warnings


def belongs(key: str, listed: str) -> bool:
    return key == listed or key.startswith(listed + ".")


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a nested dict."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
