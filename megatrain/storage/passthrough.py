"""Tensors and files that go unchanged from a model's source folder into saved folders.

Unused weights (`models/constants.py`), tensors that transformers drops on loading, config.json
as it came and the files of the processor; and frozen tensors (`models/freezing.py`), which are
computed with. A run keeps the tensors once, in a folder of its own: hard links of that are in every
checkpoint, so the run outlives the folder that it began with.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megatrain.errors import StorageError, logger
from megatrain.memory.store import Store
from megatrain.models.constants import ParameterPlace
from megatrain.models.pretrained import KEY
from megatrain.storage import run_folder
from megatrain.storage.dequantise import Derived
from megatrain.storage.hashed_file import WrittenFile, write_bytes
from megatrain.storage.manifest import EVERY_STEP, MANIFEST, Manifest, read_bytes, read_manifest
from megatrain.storage.run_folder import CONFIG, PASSENGERS
from megatrain.storage.safetensors import StoredTensor, TensorSource, dtype_name, read_header
from megatrain.storage.sharded_write import Plan, write_files
from megatrain.world import World

# Files beside the weights that neither the tokenizer nor transformers' configurations write.
OF_PROCESSOR = ("*processor_config.json", "chat_template.json")


@dataclass(frozen=True)
class Passthrough:
    """Tensors and files of a source that saves copy unchanged.

    Attributes:
        tensors: by their names in the source; quantised ones are dequantised.
        files: config.json as it came and the processor's files, by name.
        frozen: frozen tensors whose dtype the engine does not compute in, by the model's own names.
    """

    tensors: Mapping[str, StoredTensor | Derived]
    files: Mapping[str, bytes]
    frozen: Mapping[str, tuple[StoredTensor, ...]] = field(default_factory=dict)

    def sources(self) -> list[TensorSource]:
        """All tensors as sources of a save."""
        return list(map(as_stored, self._all()))

    def _all(self) -> list[StoredTensor | Derived]:
        return [*self.tensors.values(), *(t for parts in self.frozen.values() for t in parts)]


NOTHING = Passthrough({}, {})


def as_stored(stored: StoredTensor | Derived) -> TensorSource:
    """A source that reads a tensor from its file, dequantised if it is quantised."""

    def pieces() -> Iterator[torch.Tensor]:
        yield from (values for _, values in stored.chunks())

    return TensorSource(stored.name, stored.dtype, stored.shape, pieces)


def passthrough_of(folder: Path, tensors: Mapping[str, StoredTensor | Derived]) -> Passthrough:
    """Tensors of a model folder, and the files that go with them. Raises StorageError."""
    files = processor_files(folder)
    if not (tensors or files):
        return NOTHING
    return Passthrough(tensors, {CONFIG: read_bytes(folder / CONFIG), **files})


def processor_files(folder: Path) -> dict[str, bytes]:
    """The files of a model's processor of images, by name. Raises StorageError."""
    found = (path for pattern in OF_PROCESSOR for path in sorted(folder.glob(pattern)))
    return {path.name: read_bytes(path) for path in found if path.is_file()}


def with_frozen(
    passthrough: Passthrough,
    found: Mapping[ParameterPlace, StoredTensor | Derived],
    store: Store,
    where: Path | None = None,
) -> Passthrough:
    """Add the frozen tensors that the store holds in other dtypes. where: logs their size."""
    frozen: dict[str, tuple[StoredTensor, ...]] = defaultdict(tuple)
    held = store.arrays["weight"].dtype
    for place, stored in found.items():
        if place.constant or not isinstance(stored, StoredTensor) or stored.dtype == held:
            continue
        if place.tensor.offset >= store.layouts[place.block].trainable:
            frozen[place.own] += (stored,)
    if frozen and where is not None:
        parts = [part for of_own in frozen.values() for part in of_own]
        dtypes = " and ".join(sorted({dtype_name(part.dtype) for part in parts}))
        logger.info(
            f"{where}: frozen tensors are {dtypes}; they are computed with in {dtype_name(held)} "
            f"and saved as they came, once: {sum(part.nbytes for part in parts) / 1e9:.3g} GB"
        )
    return replace(passthrough, frozen=dict(frozen))


# -- config.json -----------------------------------------------------------------------------------


def with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """config.json for weights of `dtype`; the same bytes if it says so already."""
    stated = json.loads(config)
    before, name = stated.get("dtype", stated.get("torch_dtype")), dtype_name(dtype)
    if before == name and KEY not in stated:
        return config
    for part in (stated, *(value for value in stated.values() if isinstance(value, dict))):
        part.pop(KEY, None)  # its weights are not quantised any more
        own = part.pop("torch_dtype", part.get("dtype"))  # its old name
        if part is stated or (own is not None and own == before):
            part["dtype"] = name
    return json.dumps(stated, indent=2).encode() + b"\n"


# -- in a run folder -------------------------------------------------------------------------------


def is_passthrough(path: Path) -> bool:
    """True for a file of tensors that is the same in all checkpoints. Raises StorageError."""
    return read_header(path).metadata.get("step") == EVERY_STEP


def keep_once(run_dir: Path, plan: Plan, world: World) -> list[WrittenFile]:
    """Write the unchanged tensors into the run's own folder, unless they are there. Those of a
    folder without any checkpoint may be another model's. Raises StorageError."""
    if not plan:
        return []
    folder = run_dir / PASSENGERS
    kept = _kept(folder) if run_folder.has_begun(run_dir) else None
    if kept is None or kept.keys() != plan.keys():
        with run_folder.new_folder(folder, run_dir / f"{PASSENGERS}.tmp") as partial_folder:
            files = write_files(partial_folder, plan, {"format": "pt", "step": EVERY_STEP}, world)
            kept = {file.name: file for file in files}
            write_bytes(partial_folder / MANIFEST, Manifest(0, 0, kept).encode())
    return list(kept.values())


def _kept(folder: Path) -> dict[str, WrittenFile] | None:
    """The files that the run's own folder has; None if one is missing or of another size."""
    try:
        files = read_manifest(folder).files
        sizes = {name: (folder / name).stat().st_size for name in files}
    except (StorageError, OSError):
        return None
    return files if all(sizes[name] == file.nbytes for name, file in files.items()) else None


def at_home(run_dir: Path, passthrough: Passthrough) -> Passthrough:
    """Read it from the run's own folder if the files it came from are gone."""
    if all(path.exists() for path in {tensor.path for tensor in passthrough._all()}):
        return passthrough
    kept = _kept(run_dir / PASSENGERS)
    stored = (read_header(run_dir / PASSENGERS / name).tensors for name in kept or ())
    here = {name: tensor for file in stored for name, tensor in file.items()}
    frozen = {own: tuple(here[t.name] for t in parts) for own, parts in passthrough.frozen.items()}
    return replace(passthrough, tensors={n: here[n] for n in passthrough.tensors}, frozen=frozen)
