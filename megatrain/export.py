"""A Hugging Face model folder, from a live engine or from a checkpoint: loads in transformers and vLLM as it is."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatrain.errors import ConfigError, ModelError, StorageError
from megatrain.manifest import verify_checkpoint
from megatrain.memory.layout import TensorSpec
from megatrain.memory.store import Arrays
from megatrain.models.anatomy import Anatomy
from megatrain.models.names import published_names
from megatrain.models.safetensors_io import StoredTensor, open_shards, read_chunks, read_header, storage_error
from megatrain.models.safetensors_writer import TensorSource, encode_index, plan_shards, write_bytes, write_files
from megatrain.optim.split import join_master
from megatrain.run_folder import find_checkpoint, link_or_copy, sync_folder

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CHECKPOINT_ONLY = ("MANIFEST.json", "state.json", "optimizer")  # what a checkpoint has beyond a model folder
INDEX = "model.safetensors.index.json"


class Trained(Protocol):
    """What saving needs of an engine."""

    @property
    def anatomy(self) -> Anatomy: ...
    @property
    def store(self) -> Arrays: ...
    @property
    def hf_config(self) -> Any: ...

    def wait_ready(self, block: int) -> None:
        """Return once the block's pending update is done; called from several threads."""


def array_sources(engine: Trained, array: str, block: int, names: Mapping[str, str]) -> list[TensorSource]:
    """The tensors of one array of one block under the given names; each waits for the block's update when its turn to be written comes."""
    dtype, store = engine.store.arrays[array].dtype, engine.store

    def pieces(spec: TensorSpec) -> Iterator[torch.Tensor]:
        engine.wait_ready(block)
        yield from store.pieces(array, block, spec.offset, spec.numel)

    return [TensorSource(names[spec.name], dtype, spec.shape, partial(pieces, spec)) for spec in store.layout(array, block).tensors]


def weight_plan(engine: Trained) -> dict[str, list[TensorSource]]:
    """The weight files of a model folder: tied tensors once, in the dtype the store computes with."""
    names = published_names(engine.anatomy)
    return plan_shards([source for block in engine.anatomy.blocks for source in array_sources(engine, "weight", block.index, names)])


def save_pretrained(
    engine: Trained,
    folder: Path | str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: GenerationConfig | None = None,
) -> Path:
    """Write the engine's weights, configuration and tokenizer as a Hugging Face folder. Bytes on disk: those of the weights.

    Raises:
        ConfigError: the folder exists and is not empty.
        StorageError: the disk is full or fails; nothing is left behind.
    """
    plan = weight_plan(engine)
    dtype = next(iter(plan.values()))[0].dtype
    with NewFolder(Path(folder)) as partial_folder:
        write_model(partial_folder, plan, {"format": "pt"})
        write_description(partial_folder, engine.hf_config, generation_config, tokenizer, dtype)
    return Path(folder)


class NewFolder:
    """`with NewFolder(out) as partial:` fill `partial`; it becomes `out` at the end, or vanishes on any failure."""

    def __init__(self, out: Path) -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out}: exists and is not an empty folder; choose another name or remove it")
        self.out = out
        self.partial = out.with_name(f"{out.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Path:
        try:
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise storage_error(self.partial, error, "create it") from error
        return self.partial

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                sync_folder(self.partial)
                self.partial.rename(self.out)  # replaces an empty folder
                sync_folder(self.out.parent)
        except OSError as failed:
            raise storage_error(self.out, failed, "finish it") from failed
        finally:
            shutil.rmtree(self.partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise storage_error(self.out, error, "write it") from error


def write_model(folder: Path, plan: Mapping[str, list[TensorSource]], metadata: Mapping[str, str]) -> None:
    """Write weight files and, for several, their index."""
    write_files(folder, plan, metadata)
    if len(plan) > 1:
        write_bytes(folder / INDEX, encode_index(plan))


def write_description(folder: Path, config: Any, generation: Any, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype) -> None:
    """Write everything of a model folder that is not weights. May raise OSError."""
    write_bytes(folder / "config.json", encode_config(config, dtype))
    if generation is not None:
        # not its save_pretrained, which refuses settings that many published models ship with
        write_bytes(folder / "generation_config.json", generation.to_json_string().encode())
    if tokenizer is not None:
        try:
            tokenizer.save_pretrained(folder)
        except OSError:
            raise
        except Exception as error:
            if "os error" not in str(error):  # how the tokenizers package reports a full disk
                raise
            raise StorageError(f"{folder}: cannot write the tokenizer: {error}; free space there or choose another folder") from error


def encode_config(config: Any, dtype: torch.dtype) -> bytes:
    """config.json for weights of `dtype`; with `architectures`, which vLLM needs and a configuration made by hand lacks."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    config = copy.deepcopy(config)
    config.dtype = dtype
    config.use_cache = True  # training turns it off; a folder that is served wants it
    if not config.architectures and config.model_type in CAUSAL:
        config.architectures = [CAUSAL[config.model_type]]
    text: str = config.to_json_string(use_diff=True)
    return text.encode()


# -- from a checkpoint --------------------------------------------------------------------------------------------------------------


def export(run_dir: Path | str, out: Path | str, dtype: str | None = None, checkpoint: str | None = None) -> Path:
    """Make a model folder from a checkpoint without loading the model: weights are linked, or re-written piece by piece.

    Args:
        run_dir: a run folder, or one checkpoint's folder.
        out: must not exist, or be empty.
        dtype: "bfloat16" or "float32" (the exact master weights); None keeps what the checkpoint holds.
        checkpoint: "best", "last", "final" or "checkpoint-200"; by default final, else last.

    Raises:
        ConfigError: `out` is not empty, there is no such checkpoint, or the dtype is unknown.
        StorageError: a file of the checkpoint fails its checksum, or the disk is full.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    out = Path(out)
    source = find_checkpoint(Path(run_dir), checkpoint)
    with NewFolder(out) as folder:
        verify_checkpoint(source)
        stored = open_shards(source)
        held = next(iter(stored.values())).dtype
        wanted = held if dtype is None else DTYPES[dtype]
        for path in sorted(source.iterdir()):
            if path.name in CHECKPOINT_ONLY:
                continue
            if path.is_dir():  # of several chat templates
                shutil.copytree(path, folder / path.name)
            elif path.suffix != ".safetensors":
                _copy_description(path, folder / path.name, wanted)
            elif wanted == held:
                link_or_copy(path, folder / path.name)
        if wanted != held:
            (folder / INDEX).unlink(missing_ok=True)
            write_model(folder, plan_shards(_converted(source, stored, wanted)), {"format": "pt"})
    return out


def _copy_description(path: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy a small file (a link would let an edit reach the checkpoint); config.json tells the exported dtype."""
    if path.name != "config.json":
        shutil.copyfile(path, target)
        return
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)  # its old name
    write_bytes(target, json.dumps(config, indent=2).encode() + b"\n")


def _converted(checkpoint: Path, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> list[TensorSource]:
    """The weights in another dtype: to float32 exactly, with the remainders; to bfloat16 rounded to nearest even."""
    if dtype == torch.bfloat16:
        return [TensorSource(t.name, dtype, t.shape, partial(_rounded, t)) for t in stored.values()]
    remainders: dict[str, StoredTensor] = {}
    for path in sorted((checkpoint / "optimizer").glob("*.safetensors")):
        header = read_header(path)
        remainders.update({n.removeprefix("remainder/"): t for n, t in header.tensors.items() if n.startswith("remainder/")})
    lost = [name for name in stored if name not in remainders]
    if lost:
        raise ModelError(f"{checkpoint}: has no remainder of {lost[0]}, so its float32 master is unknown; export it as bfloat16")
    return [TensorSource(t.name, dtype, t.shape, partial(_joined, t, remainders[t.name])) for t in stored.values()]


def _rounded(stored: StoredTensor) -> Iterator[torch.Tensor]:
    for _, values in read_chunks(stored):
        yield values.to(torch.bfloat16)


def _joined(weight: StoredTensor, remainder: StoredTensor) -> Iterator[torch.Tensor]:
    for (_, high), (_, low) in zip(read_chunks(weight), read_chunks(remainder), strict=True):
        yield join_master(high, low)
