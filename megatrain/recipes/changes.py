"""Which keys of a config may differ when a run is resumed."""

from __future__ import annotations

from typing import Any

from megatrain.config import Config
from megatrain.errors import ConfigError

# Key or section -> what a change of it means for a resumed run. What is not listed may change freely: it decides speed, memory or
# what is shown, never a result (memory, threads, micro_batch_tokens, groups, log_every, eval_every, checkpoint, sample_prompt, device).
REFUSED = {
    "model": "the checkpoint is of that model",
    "method": "the rows would be other rows",
    "data": "the data position belongs to those rows",
    "precision": "the arrays are kept in that precision",
    "optimizer.name": "the state is that optimizer's",
    "train.seed": "the order of the rows follows from it",
    "train.seq_len": "the rows were cut to it",
}
FLAGGED = {
    "optimizer": "the update differs from here on",
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
    "attention": "results differ in rounding from here on",
}


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
