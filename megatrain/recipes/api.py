"""What `megatrain` offers in Python beside the engine: the commands as functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.config import Config, load_config, names_config
from megatrain.errors import ConfigError
from megatrain.planner.plan import Plan
from megatrain.recipes import inspect, run
from megatrain.recipes.another_machine import another_machine
from megatrain.recipes.shapes import bench_config
from megatrain.reporting.summary import RunSummary
from megatrain.storage import export as exporting

ConfigLike = Config | Mapping[str, Any] | str | Path


def plan(
    target: ConfigLike,
    *,
    tokens_per_step: int | None = None,
    seq_len: int | None = None,
    gpu: str | None = None,
    ram: str | None = None,
    cores: int | None = None,
    **keys: Any,
) -> Plan:
    """What a run would hold in which memory, how long a step takes, and whether it fits.

    Loads no weights and touches no GPU. `Engine.from_plan` opens the engine of a plan for this machine.

    Args:
        target: a config (file, mapping or `Config`), or a model: folder, hub id or named shape such as
            "qwen2.5-7b", which is then planned with random weights and rows of full length.
        gpu, ram, cores: of another machine: a GPU's name, RAM such as "128GiB", physical cores.
        keys: keys of the config, by section: `memory={"host": "64GiB"}`, `precision="fp8"`.

    Raises:
        ConfigError: an argument is unknown or out of range.
        ModelError: the family cannot be streamed.
    """
    if (gpu is None) != (ram is None) or (cores is not None and gpu is None):
        raise ConfigError(
            "plan: gpu and ram belong together, and cores to them; give none for this machine"
        )
    given = {"train.tokens_per_step": tokens_per_step, "train.seq_len": seq_len}
    overrides = {key: value for key, value in given.items() if value is not None} | keys
    is_config = isinstance(target, (Config, Mapping)) or names_config(_path_of(target))
    if is_config:
        config = config_of(target, overrides)
    else:
        config = bench_config(str(target), overrides)
    machine = None if gpu is None or ram is None else another_machine(config, gpu, ram, cores)
    return run.plan(config, machine, shape_alone=not is_config)


def train(config: ConfigLike, *, profile: str | Path | None = None, **keys: Any) -> RunSummary:
    """Run a config from its first step; what was saved before an error stays.

    profile: file for the timeline of one steady step, which Perfetto opens. keys: keys of the config, as
        for `plan`. Raises MegaTrainError.
    """
    return run.train(config_of(config, keys), None if profile is None else _path_of(profile))


def resume(run_dir: str | Path, **keys: Any) -> RunSummary:
    """Continue a run from its newest intact checkpoint, bit for bit.

    keys: keys that may change (config/resuming.py). Raises MegaTrainError.
    """
    return run.resume(_path_of(run_dir), keys)


def evaluate(folder: str | Path, data: str | Path | None = None) -> dict[str, Any]:
    """Held-out loss of a run or a checkpoint: checkpoint, eval_loss, perplexity, eval_target_tokens.

    data: rows to evaluate on, as `data.train` in a config; the run's held-out rows unless given.
    """
    return inspect.evaluate(_path_of(folder), None if data is None else str(data))


def export(
    run_dir: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    checkpoint: str | None = None,
) -> Path:
    """Write a run's model as a Hugging Face folder, which is returned.

    dtype: "bfloat16" or "float32"; the checkpoint's own unless given. checkpoint: final, best, last or
        checkpoint-N.
    """
    if dtype not in (None, "bfloat16", "float32"):
        raise ConfigError(f"export: dtype must be 'bfloat16' or 'float32', not {dtype!r}")
    return exporting.export(_path_of(run_dir), _path_of(out), dtype, checkpoint)


def config_of(config: ConfigLike, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Config:
    """The config that a file or mapping describes; a `Config` is itself, with keys replaced."""
    if not isinstance(config, Config):
        return load_config(config, overrides)
    if not overrides:
        return config
    return load_config(config.model_dump(mode="json"), overrides)


def _path_of(path: object) -> Path:
    if not isinstance(path, (str, Path)):
        raise ConfigError(f"{path!r} is neither a path nor a name; give a string or a Path")
    return Path(path)
