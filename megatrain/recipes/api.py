"""The commands as Python functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.config import Config, load_config, names_config
from megatrain.config.fields import check_sources
from megatrain.config.load import bench_config
from megatrain.errors import ConfigError
from megatrain.planner.plan import Plan
from megatrain.recipes import inspect, run
from megatrain.recipes.plan import plan as make_plan
from megatrain.recipes.tasks import TaskOptions
from megatrain.reporting.summary import RunSummary
from megatrain.storage import export as exporting
from megatrain.storage import push as pushing
from megatrain.storage.manifest import verifying

ConfigLike = Config | Mapping[str, Any] | str | Path


def plan(
    target: ConfigLike,
    *,
    tokens_per_step: int | None = None,
    seq_len: int | None = None,
    gpu: str | None = None,
    ram: str | None = None,
    cores: int | None = None,
    gpu_memory: str | None = None,
    gpu_tflops: float | None = None,
    pcie: float | None = None,
    gpus: int | None = None,
    hosts: int | None = None,
    network: float | None = None,
    **keys: Any,
) -> Plan:
    """The plan of a run: the bytes in every memory, the time of a step, and whether it fits.

    Loads no weights and touches no GPU. `Engine.from_plan` opens the engine of a plan.

    Args:
        target: a config (file, mapping or `Config`), or a model (folder, hub id or named shape such
            as "qwen2.5-7b"), which is planned with random weights and rows of full length.
        gpu, ram, cores: of another machine: a GPU's name, RAM such as "128GiB", physical cores.
        gpu_memory, gpu_tflops, pcie: of a GPU that is not known by name: "12GiB", dense bf16
            TFLOP/s and GB/s each way to host RAM.
        gpus, hosts, network: GPUs of each host that train together, hosts like it, and Gbit/s of
            each host to the others.
        keys: keys of the config, by section: `memory={"host": "64GiB"}`, `precision="fp8"`.

    Raises:
        ConfigError: an argument is unknown or out of range.
        ModelError: the family cannot be streamed.
    """
    given = {"train.tokens_per_step": tokens_per_step, "train.seq_len": seq_len}
    overrides = {key: value for key, value in given.items() if value is not None} | keys
    is_config = isinstance(target, (Config, Mapping)) or names_config(_path_of(target))
    config = config_of(target, overrides) if is_config else bench_config(str(target), overrides)
    described: dict[str, Any] = {"gpu": gpu, "ram": ram, "cores": cores, "pcie": pcie}
    described |= {"gpu_memory": gpu_memory, "gpu_tflops": gpu_tflops}
    described |= {"gpus": gpus, "hosts": hosts, "network": network}
    return make_plan(config, not is_config, described)


def train(
    config: ConfigLike, *, profile: str | Path | None = None, verify: bool = True, **keys: Any
) -> RunSummary:
    """Run a config from its first step; what was saved before an error stays.

    `data.train` and `data.eval` also take rows: a `datasets.Dataset`, a list of dicts, or a dict of
    columns; so does the `path` of one of several sources. The run's config has their number and
    digest instead, and `resume` takes their tokens from the cache, or the rows once more.

    verify: compare the model's files with the hashes of its MANIFEST.json, if it has one.
    profile: file for the timeline of one steady step, which Perfetto opens.
    keys: keys of the config, as for `plan`.

    Raises MegaTrainError.
    """
    settings = config_of(config, keys)
    check_sources(settings)
    with verifying(verify):
        return run.train(settings, None if profile is None else _path_of(profile))


def resume(
    run_dir: str | Path, *, checkpoint: str | None = None, verify: bool = True, **keys: Any
) -> RunSummary:
    """Continue a run from its newest intact checkpoint, bit for bit.

    verify: false takes a checkpoint for intact whose files have the right sizes.
    keys: keys that may change (config/resuming.py), and `data` with rows that were given to `train`
        where the cache has lost them; others are refused. Raises MegaTrainError.
    checkpoint: another one: proven, best or checkpoint-N.
    """
    with verifying(verify):
        return run.resume(_path_of(run_dir), keys, checkpoint)


def evaluate(
    folder: str | Path,
    data: object = None,
    *,
    tasks: Sequence[str] | str = (),
    limit: float | None = None,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
    apply_chat_template: bool = False,
    verify: bool = True,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Held-out loss of a model: checkpoint, precision, eval_loss, perplexity, eval_target_tokens.

    With `tasks` what these find instead: checkpoint, precision, and results by task.

    Args:
        folder: a run or checkpoint, or any model: a folder, a GGUF file or a hub id.
        data: rows to evaluate on, as `data.train` for `train`; None: the run's held-out rows.
        tasks: of lm-eval (the extra `megatrain[eval]`), groups or tags, or YAML files.
        limit: rows of each task, at most; below 1 a share of them.
        num_fewshot: examples before each question; None: as the task says.
        include_path: folder of further tasks.
        apply_chat_template: ask in the model's chat format.
        verify: as for `train`.
        trust_remote_code: run code that comes with the model; its run's config does not count.

    Raises MegaTrainError.
    """
    names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
    with verifying(verify):
        if not names:
            rows = str(data) if isinstance(data, Path) else data
            return inspect.evaluate(_path_of(folder), rows, trust_remote_code)
        if data is not None:
            raise ConfigError("data: excludes tasks, which bring their own rows; leave one out")
        own = None if include_path is None else _path_of(include_path)
        options = TaskOptions(names, limit, num_fewshot, own, apply_chat_template)
        return inspect.evaluate_tasks(_path_of(folder), options, "tasks", trust_remote_code)


def export(
    run_dir: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    checkpoint: str | None = None,
    format: str = exporting.FOLDER,
    verify: bool = True,
) -> Path:
    """Write a run's model as a Hugging Face folder, which is returned.

    dtype: "bfloat16", "float32" or, for GGUF, "float16"; None: the checkpoint's own.
    format: "safetensors", or "gguf" for a folder with one GGUF file.
    checkpoint: final, best, last or checkpoint-N; None: the newer of final and last.
    verify: as for `train`.
    """
    with verifying(verify):
        return exporting.export(_path_of(run_dir), _path_of(out), dtype, checkpoint, format)


def push(
    run_dir: str | Path, repo_id: str, *, private: bool = False, verify: bool = True
) -> pushing.Pushed:
    """Upload `final/` of a run to a repository of the hub, as one commit.

    private: make the repository private; refused if it is there and public.
    verify: as for `train`.
    """
    with verifying(verify):
        return pushing.push(_path_of(run_dir), repo_id, private)


def config_of(config: ConfigLike, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Config:
    """The config that a file or mapping describes; a `Config` is itself, with keys replaced."""
    if not isinstance(config, Config):
        return load_config(config, overrides)
    if not overrides:
        return config
    return load_config(config.model_dump(mode="json"), overrides).with_rows(config.rows)


def _path_of(path: object) -> Path:
    if not isinstance(path, (str, Path)):
        raise ConfigError(f"{path!r} is neither a path nor a name; give a string or a Path")
    return Path(path)
