"""Hugging Face model folders from engines and checkpoints; transformers and vLLM load them."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from megatrain.errors import ConfigError, ModelError, StorageError, logger
from megatrain.heartbeat import BYTES_WRITTEN, doing
from megatrain.memory.layout import TensorRange
from megatrain.memory.store import Store
from megatrain.models import pretrained
from megatrain.models.anatomy import Anatomy
from megatrain.models.constants import Constants, without_source
from megatrain.models.names import Tensors
from megatrain.models.tokenizer_file import TOKENIZER_FILE, published_file
from megatrain.optim.split import join_master
from megatrain.storage import run_folder, safetensors
from megatrain.storage.gguf_file import DTYPES as GGUF_DTYPES
from megatrain.storage.gguf_file import FILE, family_of, write_gguf
from megatrain.storage.hashed_file import sync_tree, write_bytes
from megatrain.storage.manifest import MANIFEST, Manifest, stray_files, verify_checkpoint
from megatrain.storage.passthrough import Passthrough, as_stored, is_passthrough, with_dtype
from megatrain.storage.run_folder import CONFIG, find_checkpoint
from megatrain.storage.safetensors import StoredTensor, TensorSource, open_shards, plan_shards
from megatrain.storage.sharded_write import led, write_model

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


def converted(
    checkpoint: Path, stored: Mapping[str, StoredTensor], dtype: torch.dtype
) -> list[TensorSource]:
    """The weights in another dtype: float32 exactly, from the remainders; bfloat16 by rounding."""
    if dtype == torch.bfloat16:
        return [TensorSource(t.name, dtype, t.shape, partial(_rounded, t)) for t in stored.values()]
    files = sorted((checkpoint / "optimizer").glob("*.safetensors"))
    states = {n: t for path in files for n, t in safetensors.read_header(path).tensors.items()}
    lost = [name for name in stored if f"remainder/{name}" not in states]
    if lost:
        raise ModelError(
            f"{checkpoint}: has no remainder of {lost[0]}, so its float32 master is unknown; "
            "export it as bfloat16"
        )
    return [
        TensorSource(name, dtype, t.shape, partial(_joined, t, states[f"remainder/{name}"]))
        for name, t in stored.items()
    ]


def _rounded(stored: StoredTensor) -> Iterator[torch.Tensor]:
    """bfloat16, to nearest even."""
    for _, values in stored.chunks():
        yield values.to(torch.bfloat16)


def _joined(weight: StoredTensor, remainder: StoredTensor) -> Iterator[torch.Tensor]:
    for (_, high), (_, low) in zip(weight.chunks(), remainder.chunks(), strict=True):
        yield join_master(high, low)


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FOLDER, GGUF = "safetensors", "gguf"
FORMATS = {FOLDER: DTYPES, GGUF: GGUF_DTYPES}  # and the dtypes that each may have

T = TypeVar("T")


class Exportable(Protocol):
    """An engine as a model folder sees it."""

    published: Tensors  # of its model folder, under the names that its source has for them
    passthrough: Passthrough  # what its source holds besides

    @property
    def anatomy(self) -> Anatomy: ...
    @property
    def store(self) -> Store: ...
    @property
    def constants(self) -> Constants: ...
    @property
    def hf_config(self) -> Any: ...

    def wait_ready(self, block: int) -> None:
        """Return once the block's pending update is done; called from several threads."""


def array_sources(
    engine: Exportable, array: str, block: int, tensors: Iterable[TensorRange]
) -> list[TensorSource]:
    """These tensors of one array of one block, to be written."""
    dtype, store = engine.store.arrays[array].dtype, engine.store

    def pieces(tensor: TensorRange) -> Iterator[torch.Tensor]:
        engine.wait_ready(block)  # wait: when its turn to be written comes, not before
        yield from store.pieces(array, block, tensor.offset, tensor.numel)

    def owned(tensor: TensorRange) -> dict[int, int]:
        ranks = [] if store.world.is_alone else store.world.owners
        return {rank: tensor.within(store.span(array, block, rank)).numel for rank in ranks}

    return [TensorSource(t.name, dtype, t.shape, partial(pieces, t), owned(t)) for t in tensors]


def weight_plan(engine: Exportable) -> dict[str, list[TensorSource]]:
    """The weight files of a model folder: tied tensors once, constants in their own dtype; what no
    step changes in files of its own. Raises ModelError."""
    unused = engine.anatomy.unused_weights
    if unused.names and not engine.passthrough.tensors:
        raise ModelError(without_source(unused))
    own = []
    for block, tensors in enumerate(engine.published):
        trainable = engine.store.layouts[block].trainable
        trained = (tensor for tensor in tensors if tensor.offset < trainable)
        own += array_sources(engine, "weight", block, trained)
        for name, values in engine.constants.of_block(block):
            whole = partial(iter, [values])
            own.append(TensorSource(name, values.dtype, tuple(values.shape), whole))
    return plan_shards(own, unchanged(engine))


def unchanged(engine: Exportable) -> list[TensorSource]:
    """Sources of tensors that no step changes: unused weights, and frozen tensors as read."""
    found = engine.passthrough.sources()
    for block, layout in enumerate(engine.store.layouts):
        named = zip(engine.anatomy.published.places[block], engine.published[block], strict=True)
        held = (
            tensor
            for place, tensor in named
            if tensor.offset >= layout.trainable and place.own not in engine.passthrough.frozen
        )
        found += array_sources(engine, "weight", block, held)
    return found


def save_pretrained(
    engine: Exportable,
    folder: Path | str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: GenerationConfig | None = None,
) -> Path:
    """Write the engine's weights, configuration and tokenizer as a Hugging Face folder.

    All ranks call it at the same place.

    Raises:
        ConfigError: the folder exists and is not empty.
        ModelError: the model's unused weights are nowhere.
        StorageError: the disk is full or fails; nothing is left behind.
    """
    world = engine.store.world

    def lead() -> Path:
        plan = weight_plan(engine)
        with _model_folder(Path(folder)) as partial_folder:
            write_model(partial_folder, plan, {"format": "pt"}, world=world)
            added = write_description(partial_folder, engine, tokenizer, generation_config)
        if added:
            logger.info(pretrained.about_added(added))
        return Path(folder)

    return led(world, lead, partial(weight_plan, engine))


def describe_source(
    source: pretrained.ModelSource | None, trust_remote_code: bool
) -> tuple[PreTrainedTokenizerBase | None, GenerationConfig | None]:
    """Tokenizer and generation settings of an engine's source, for `save_pretrained`. None, and a
    warning, for one that cannot be read: trained weights must not be lost for it."""
    if source is None:
        return None, None
    if source.kind == "gguf":
        found = _or_none(partial(pretrained.load_config_and_tokenizer, source, trust_remote_code))
        return found[1:] if found else (None, None)
    tokenizer = _or_none(partial(pretrained.load_tokenizer, source, trust_remote_code))
    return tokenizer, _or_none(partial(pretrained.load_generation_config, source))


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except ModelError as error:
        logger.warning(f"the model is saved without this: {error}")
        return None


@contextmanager
def _model_folder(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` once it is complete. Raises ConfigError if `out` is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out}: exists and is not an empty folder; choose another name or remove it"
        )
    # of a process that died, too: `new_folder` removes what it left
    with run_folder.new_folder(out, out.with_name(f"{out.name}.tmp")) as folder:
        yield folder
        sync_tree(folder)


def write_description(
    folder: Path,
    engine: Exportable,
    tokenizer: PreTrainedTokenizerBase | None,
    generation: GenerationConfig | None,
) -> list[str]:
    """Write all of a model folder but its weights. Returns the tokens that end answers and that the
    generation settings lacked. May raise OSError."""
    dtype, as_they_came = engine.store.arrays["weight"].dtype, dict(engine.passthrough.files)
    came = as_they_came.pop(CONFIG, None)
    config = with_dtype(came, dtype) if came else encode_config(engine.hf_config, dtype)
    write_bytes(folder / CONFIG, config)
    for name, text in as_they_came.items():
        write_bytes(folder / name, text)
    added: list[str] = []
    if tokenizer is not None:
        generation, added = pretrained.with_stops(engine.hf_config, tokenizer, generation)
        _save_tokenizer(folder, tokenizer)
    if generation is not None and not pretrained.is_classifier(engine.hf_config):
        # not its save_pretrained, which refuses settings that many published models ship with
        settings: str = generation.to_json_string()
        write_bytes(folder / "generation_config.json", settings.encode())
    return added


def _save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    try:
        tokenizer.save_pretrained(folder)  # its chat templates, too
        if (data := published_file(tokenizer)) is not None:
            (folder / TOKENIZER_FILE).write_bytes(data)
    except OSError:
        raise
    except Exception as error:
        if "os error" not in str(error):  # how the tokenizers package reports a full disk
            raise
        raise StorageError(
            f"{folder}: cannot write the tokenizer: {error}; "
            "free space there or choose another folder"
        ) from error


def encode_config(config: Any, dtype: torch.dtype) -> bytes:
    """config.json for weights of `dtype`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    config = copy.deepcopy(config)
    config.dtype = dtype
    config.use_cache = True  # training turns it off; a folder that is served wants it
    if not config.architectures and config.model_type in CAUSAL:
        config.architectures = [CAUSAL[config.model_type]]  # vLLM needs it
    text: str = config.to_json_string(use_diff=True)
    return text.encode()


def export(
    run_dir: Path | str,
    out: Path | str,
    dtype: str | None = None,
    checkpoint: str | None = None,
    format: str = FOLDER,
) -> Path:
    """Make a model folder from a checkpoint without loading the model.

    Files are copied, and weights rewritten piece by piece if they are to be of another dtype.

    Args:
        run_dir: a run folder, or one checkpoint's folder.
        out: must not exist, or be empty.
        dtype: "bfloat16", "float32" (the exact master weights) or, for GGUF, "float16"; None: the
            checkpoint's.
        checkpoint: "best", "last", "final" or "checkpoint-200"; by default the newer of final
            and last.
        format: one of FORMATS; "gguf" makes a folder with a GGUF file, which is not quantised.

    Raises:
        ConfigError: `out` is not empty, there is no such checkpoint, or the dtype is unknown.
        ModelError: the model or its tokenizer cannot be written in this format.
        StorageError: a file of the checkpoint fails its checksum, or the disk is full.
    """
    if format not in FORMATS:
        raise ConfigError(f"format must be {' or '.join(FORMATS)}, not {format!r}")
    if dtype is not None and dtype not in FORMATS[format]:
        raise ConfigError(f"dtype must be {' or '.join(FORMATS[format])}, not {dtype!r}")
    out, run_dir = Path(out), Path(run_dir)
    if format == GGUF and out.suffix == f".{GGUF}":
        raise ConfigError(f"{out}: is to be a folder, which will hold {FILE}; name it {out.stem}")
    source = find_checkpoint(run_dir, checkpoint)
    if dtype in ("float32", "float16"):
        source = run_folder.with_state(source)  # which has the other half of the master weights
    save = run_folder.sequence_of(source)
    with _model_folder(out) as folder:
        try:
            if format == GGUF:
                _fill_gguf(folder, source, dtype, out.resolve().name)
            else:
                _fill(folder, source, dtype)
        finally:
            if run_folder.sequence_of(source) != save or not os.path.isfile(source / MANIFEST):
                raise StorageError(
                    f"{source}: was removed by its run while it was read; export the next one, or "
                    "raise checkpoint.keep"
                )
    return out


def _opened(
    source: Path,
) -> tuple[Manifest, dict[str, StoredTensor], dict[str, StoredTensor], torch.dtype]:
    """A whole checkpoint's manifest, all tensors, and weights with dtype. Raises StorageError."""
    manifest = verify_checkpoint(source)
    for name in stray_files(source, manifest):
        logger.warning(f"{source / name}: does not belong to this checkpoint; left out")
    stored, others = open_shards(source), {*manifest.constants}
    weights = {n: t for n, t in stored.items() if n not in others and not is_passthrough(t.path)}
    return manifest, stored, weights, next(t.dtype for t in weights.values())


def _fill_gguf(folder: Path, source: Path, dtype: str | None, name: str) -> None:
    """Write the model of a checkpoint as a GGUF file. Raises as `export`."""
    _, stored, weights, held = _opened(source)
    folder_of = pretrained.ModelSource("folder", source)
    config, tokenizer, _ = pretrained.load_config_and_tokenizer(folder_of)
    family_of(config)  # refuses before anything is written
    wanted = held if dtype is None else GGUF_DTYPES[dtype]
    has_masters = (source / "optimizer").is_dir()
    changed = {}
    if held == torch.bfloat16 and (wanted == torch.float32 or (wanted != held and has_masters)):
        changed = {t.name: t for t in converted(source, weights, torch.float32)}
    sources = [changed.get(name) or as_stored(tensor) for name, tensor in stored.items()]
    with doing("writing the model", _size(stored, wanted), BYTES_WRITTEN):
        write_gguf(folder / FILE, name, config, tokenizer, sources, wanted)


def _fill(folder: Path, source: Path, dtype: str | None) -> None:
    """Copy the model of a checkpoint. Raises as `export`."""
    manifest, stored, weights, held = _opened(source)
    wanted = held if dtype is None else DTYPES[dtype]
    for name in run_folder.model_files(manifest):
        path, target = source / name, folder / name
        if wanted != held and name.endswith((".safetensors", ".safetensors.index.json")):
            continue
        target.parent.mkdir(exist_ok=True)  # of several chat templates
        if name == CONFIG:
            write_bytes(target, with_dtype(path.read_bytes(), wanted))
        else:
            shutil.copyfile(path, target)
    if wanted != held:
        changed = {t.name: t for t in converted(source, weights, wanted)}
        kept = [t for t in stored.values() if is_passthrough(t.path)]
        own = (t for t in stored.values() if not is_passthrough(t.path))
        sources = [changed.get(t.name) or as_stored(t) for t in own]
        with doing("writing the model", _size(stored, wanted), BYTES_WRITTEN):
            write_model(folder, plan_shards(sources, list(map(as_stored, kept))), {"format": "pt"})


def _size(stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> int:
    """Bytes of the tensors in this dtype."""
    return sum(tensor.numel for tensor in stored.values()) * dtype.itemsize
