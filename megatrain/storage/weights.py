"""A pretrained model's weights, copied tensor by tensor into the arrays they will be trained in."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from megatrain.errors import ModelError, StorageError, logger
from megatrain.heartbeat import WEIGHTS_READ, beat, doing, may_end_here
from megatrain.memory.store import Store
from megatrain.models import pretrained
from megatrain.models.anatomy import Anatomy
from megatrain.models.constants import FLOATS, NO_IMAGES, Constants, ParameterPlace, UnusedWeights
from megatrain.models.initialize import NewHead
from megatrain.models.names import Tensors
from megatrain.optim.split import as_weight, split_master
from megatrain.storage import manifest, safetensors
from megatrain.storage.dequantise import Derived, dequantised
from megatrain.storage.hashed_file import WrittenFile
from megatrain.storage.passthrough import NOTHING, Passthrough, passthrough_of, with_frozen
from megatrain.storage.run_folder import CONFIG
from megatrain.storage.safetensors import StoredTensor, dtype_name
from megatrain.storage.sharded_write import readings

# `chunks(start, stop)` yields (first element, flat values) in order: of all of the tensor by
# default, else at least of those elements.
Candidate = StoredTensor | Derived
Chunks = Callable[..., Iterator[tuple[int, torch.Tensor]]]


def load_weights(
    anatomy: Anatomy,
    store: Store,
    source: pretrained.ModelSource,
    constants: Constants,
    head: NewHead | None = None,
) -> tuple[Tensors, Passthrough]:
    """Fill the store's weights (and remainders) and constants from a model folder or a GGUF file.

    Folders are read a few megabytes at a time; one with a MANIFEST.json is checked on the way.
    Of several ranks each reads its own shares, and each file is checked by one of them.
    fp32, bf16 and fp16 are kept exactly. Names with and without the base model's prefix are
    understood, and those that transformers renames on loading.

    head: of a classifier, where the source is its language model.

    Returns:
        The tensors of a model folder, under the names that the source has for them, and what is
        carried along.

    Raises:
        ModelError: tensors are missing, unexpected, of another shape or dtype, or not finite (the
            message names them); or transformers cannot read the GGUF file.
        StorageError: a file is missing, truncated, malformed, or fails its checksum.
    """
    if source.kind == "gguf":
        candidates = with_head(read_gguf(source), head, source)
        copy_in(anatomy, store, candidates, str(source.file), constants)
        return anatomy.published.tensors, NOTHING  # its names are transformers' own
    if how := pretrained.quantisation_in(source.path):
        logger.info(f"{source.path}: its {how.method} weights are dequantised when they are read")
    saved = manifest.manifest_of_model(source.path)
    hashed = saved.files if saved and manifest.verifies() else {}
    sums = {source.path / name: file for name, file in hashed.items()}
    with damage_first(source.path, saved):
        candidates = with_head(open_folder(source), head, source)
        found = copy_in(anatomy, store, candidates, str(source.file), constants, sums)
    kept = passthrough_of(source.path, {name: candidates[name] for name in found.passthrough})
    if head is not None:  # its config.json describes another model
        kept = replace(kept, files={n: text for n, text in kept.files.items() if n != CONFIG})
    dropped = [name for name, place in found.passthrough.items() if place is None]
    if said := describe_passthrough(source.file, kept, dropped, anatomy.unused_weights):
        logger.info(said)
    trained = sorted(name for place, name in found.names.items() if not place.constant)
    wide = [name for name in trained if candidates[name].dtype == torch.float32]
    if store.arrays["weight"].dtype == torch.bfloat16 and 0 < len(wide) < len(trained):
        logger.info(
            f"{source.file}: has {_listed(wide)} in float32, unlike the rest; masters are exact, "
            "but layers compute with bfloat16, and so it is saved (`megatrain export --dtype "
            "float32` has the masters)"
        )
    held = {place: candidates[name] for place, name in found.names.items()}
    return anatomy.published.named_as(found.names), with_frozen(kept, held, store, source.file)


def check_headers(anatomy: Anatomy, constants: Constants, source: pretrained.ModelSource) -> None:
    """Compare a folder's tensors with the model's. Raises ModelError and StorageError."""
    with damage_first(source.path, manifest.manifest_of_model(source.path)):
        match(anatomy, open_folder(source), str(source.file), constants)


def describe_passthrough(
    where: Path, passthrough: Passthrough, dropped: Collection[str], who: UnusedWeights
) -> str:
    """A sentence about unused weights, and others that transformers dropped; empty without any."""
    said = []
    if len(passthrough.tensors) > len(dropped):
        said.append(f"carried along unchanged: {', '.join(who.modules)}")
        said += [NO_IMAGES] * who.multimodal
    if dropped:
        said.append(
            f"carried along and not trained, as transformers does not load them: {min(dropped)}"
            + (f" and {len(dropped) - 1} more" if len(dropped) > 1 else "")
        )
    return f"{where}: {'; '.join(said)}" if said else ""


@contextmanager
def damage_first(folder: Path, saved: manifest.Manifest | None) -> Iterator[None]:
    """Turn an error raised inside into DamagedError if the folder's manifest shows the reason: a
    wrong name or value may be a damaged one."""
    try:
        yield
    except (ModelError, StorageError):
        if saved:
            names = [name for name in saved.files if not name.startswith("optimizer")]
            manifest.check_model_files(folder, saved, names)
        raise


def copy_in(
    anatomy: Anatomy,
    store: Store,
    candidates: Mapping[str, Candidate],
    where: str,
    constants: Constants,
    sums: Mapping[Path, WrittenFile] | None = None,
) -> Found:
    """Check every candidate against the anatomy, then copy them with a few threads. sums: of files
    that are to be checked: each is read once, from beginning to end. Raises as `load_weights`."""
    found, sums = match(anatomy, candidates, where, constants), sums or {}
    constants.expect({p: (name, candidates[name].dtype) for p, name in found.names.items()})

    def copy(place: ParameterPlace, candidate: Candidate, chunks: Chunks) -> None:
        if not place.constant:
            copy_tensor(store, place, candidate, chunks)
            return
        for begin, values in chunks():
            _check_finite(values, candidate.where)
            may_end_here()
            constants.write(place, begin, values)

    def copy_checked(path: Path, how: Mapping[str, bool]) -> None:
        """Copy a file's tensors in one reading of all its bytes, or of this rank's share where
        another one hashes it."""
        with safetensors.HashedReader(path, **how) as file:
            for place, stored in sorted(by_file[path], key=lambda copied: copied[1].offset):
                copy(place, stored, partial(file.chunks, stored))
            if not file.ends_as(sums[path]):
                raise manifest.damaged(path)

    by_file: dict[Path, list[tuple[ParameterPlace, StoredTensor]]] = {
        path: [] for path in sums if path.suffix == ".safetensors"
    }
    copies: list[Callable[[], None]] = []
    for place, name in sorted(found.names.items(), key=lambda item: candidates[item[1]].where):
        candidate = candidates[name]
        if isinstance(candidate, StoredTensor) and candidate.path in by_file:
            by_file[candidate.path].append((place, candidate))
        else:
            copies.append(partial(copy, place, candidate, candidate.chunks))
    carried = (candidates[name] for name in found.passthrough)
    others = {candidate.path for candidate in carried if isinstance(candidate, StoredTensor)}
    sizes = {path: sums[path].nbytes for path in by_file if by_file[path] or path in others}
    copies += [partial(copy_checked, *item) for item in readings(sizes, store.world).items()]
    if store.world.is_first:
        copies += [partial(_check_twins, candidates[a], candidates[o]) for a, o in found.twins]
    numel = sum(math.prod(candidates[name].shape) for name in found.names.values())
    with doing("reading the weights", numel / store.world.size, WEIGHTS_READ):
        safetensors.in_parallel(copies)
    return found


def _check_twins(alias: Candidate, owner: Candidate) -> None:
    # not strict: a dequantised tensor's chunks are cut elsewhere, and its values differ anyway
    pairs = zip(alias.chunks(), owner.chunks(), strict=False)
    same = (torch.equal(one.float(), other.float()) for (_, one), (_, other) in pairs)
    if alias.shape != owner.shape or not all(same):
        raise ModelError(
            f"{alias.where} differs from the embedding that config.json ties it to; "
            "set tie_word_embeddings to false if both are meant"
        )


def copy_tensor(store: Store, place: ParameterPlace, candidate: Candidate, chunks: Chunks) -> None:
    """Copy this rank's share of a tensor as an exact fp32 master: fp32, or bf16 weight and int16
    remainder, which a frozen one lacks. Raises ModelError for a value that is none of bf16's."""
    span = store.span("weight", place.block)
    mine = place.tensor.within(span)
    if not mine.numel:
        return
    frozen = place.tensor.offset >= store.layouts[place.block].trainable
    split = store.arrays["weight"].dtype == torch.bfloat16 and not frozen
    names = ["weight", "remainder"] if split else ["weight"]
    # not soon: the block's other tensors follow
    with store.lease(place.block, names, changes=True, soon=False) as arrays:
        weight, *remainders = (place.tensor.flat_within(arrays[name], span) for name in names)
        for first, read in chunks(*mine):
            start, stop = max(first, mine.start), min(first + len(read), mine.stop)
            begin, values = start - mine.start, read[start - first : max(start, stop) - first]
            if not values.numel():
                continue
            _check_finite(values, candidate.where)
            beat(WEIGHTS_READ, values.numel())
            may_end_here()
            part = weight.narrow(0, begin, values.numel())
            if not split:
                part.copy_(as_weight(values, weight.dtype))
            elif values.dtype == torch.bfloat16:
                part.copy_(values)
                remainders[0].narrow(0, begin, values.numel()).zero_()
            else:
                low = remainders[0].narrow(0, begin, values.numel())
                split_master(values.float(), out=(part, low))
            if values.dtype != part.dtype:
                _check_finite(part, candidate.where)  # rounding up may have overflowed


def _check_finite(values: torch.Tensor, where: str) -> None:
    if not values.numel():
        return
    low, high = torch.aminmax(values)  # one pass, no temporaries; NaN comes through
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ModelError(
            f"{where} holds NaN, infinity or a value beyond bf16's range; "
            "the file is damaged or its training diverged"
        )


# Constant tables that older releases saved with the weights; models compute them.
IGNORED = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|(attn|attention|self_attn|self_attention)\.(bias|masked_bias)|position_ids)$"
)


@dataclass(frozen=True)
class Found:
    """The tensors of a folder.

    Attributes:
        names: by their places in the model.
        twins: tied ones as (alias, owner).
        passthrough: the places of those that are carried along; None for what transformers drops.
    """

    names: dict[ParameterPlace, str]
    twins: list[tuple[str, str]]
    passthrough: dict[str, ParameterPlace | None]


def match(
    anatomy: Anatomy, candidates: Mapping[str, Candidate], where: str, constants: Constants
) -> Found:
    """Match a folder's tensors to the model's and check shapes and dtypes. Raises ModelError."""
    matched = find_tensors(anatomy, candidates, where)
    carried = {place: name for name, place in matched.passthrough.items() if place is not None}
    for place, name in (matched.names | carried).items():
        candidate, wanted = candidates[name], place.tensor.shape
        if candidate.shape != wanted:
            raise ModelError(
                f"{candidate.where} has shape {list(candidate.shape)}, but config.json asks for "
                f"{list(wanted)}"
            )
        own = constants[place.own].dtype if place.constant else FLOATS[0]
        dtypes = FLOATS if own in FLOATS else (own,)
        if place not in carried and candidate.dtype not in dtypes:
            raise ModelError(
                f"{candidate.where} is {dtype_name(candidate.dtype)}; "
                "training needs the unquantised model in bf16, fp16 or fp32"
            )
    return matched


def find_tensors(anatomy: Anatomy, names: Iterable[str], where: str) -> Found:
    """Match names, any that transformers knows, to the model's tensors. Raises ModelError if one is
    unknown, missing or there twice."""
    found, dropped = _match_names(anatomy, names, where)
    twins = []
    for alias in [place for place in found if place.alias]:
        owner, stand_in = replace(alias, alias=False), found.pop(alias)
        if owner in found:
            twins.append((stand_in, found[owner]))
        else:
            found[owner] = stand_in
    missing = anatomy.published.missing(found.keys())
    if missing:
        raise ModelError(
            f"{where}: lacks {_listed(missing)}, which a {anatomy.family} model of this "
            "configuration needs"
        )
    passthrough: dict[str, ParameterPlace | None] = dict.fromkeys(dropped)
    for place in [place for place in found if place.passenger]:
        passthrough[found.pop(place)] = place
    return Found(found, twins, passthrough)


def _match_names(
    anatomy: Anatomy, names: Iterable[str], where: str
) -> tuple[dict[ParameterPlace, str], list[str]]:
    """(names by place, names of what transformers drops)."""
    found: dict[ParameterPlace, str] = {}
    unexpected, dropped = [], []
    for name, place in anatomy.published.places_of(names).items():
        if place is None:
            if IGNORED.search(name):
                continue
            if any(re.search(pattern, name) for pattern in anatomy.published.unread):
                dropped.append(name)
            else:
                unexpected.append(name)
        elif place in found:
            raise ModelError(f"{where}: holds {place.own} twice, under another name too")
        else:
            found[place] = name
    if unexpected:
        raise ModelError(
            f"{where}: holds {_listed(unexpected)}, unknown to a {anatomy.family} model of this "
            "config.json"
        )
    whole = {place.own for place in found if place.whole}
    for place in found:
        if place.own in whole and not place.whole:
            raise ModelError(f"{where}: holds {place.own} twice, whole and in parts")
    return found, dropped


# -- a folder's tensors --


def open_folder(source: pretrained.ModelSource) -> dict[str, Candidate]:
    """A model folder's tensors, by the headers of its files. Raises ModelError and StorageError."""
    stored, how = safetensors.open_shards(source.path), pretrained.quantisation_in(source.path)
    if how is None:
        return {**stored}
    quantised, others = dequantised(stored, how)
    return {**quantised, **others}


def read_gguf(source: pretrained.ModelSource) -> dict[str, Candidate]:
    """The tensors of a GGUF file, in RAM, de-quantised to fp32 by transformers, whose
    `from_pretrained` wants the accelerate package for that."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file, read = source.file, cast(Any, load_gguf_checkpoint)
    try:
        with pretrained.reading_once(source):
            config = pretrained.read_model_config(source)
            with torch.device("meta"):
                names = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            tensors = read(str(file), return_tensors=True, model_to_load=names)["tensors"]
    except pretrained.UNUSABLE as error:
        raise ModelError(
            f"{file}: this GGUF file cannot be read ({error}); "
            "name the Hugging Face folder of the model instead"
        ) from error
    return {name: in_memory(name, file, tensor) for name, tensor in tensors.items()}


def in_memory(name: str, source: Path, values: torch.Tensor) -> Derived:
    """A tensor of a model that no safetensors file has."""
    flat = [(0, values.reshape(-1))]
    about = values.dtype, tuple(values.shape)
    return Derived(name, source, f"{source}: {name}", *about, lambda *_: iter(flat))


def with_head(
    candidates: Mapping[str, Candidate], head: NewHead | None, source: pretrained.ModelSource
) -> dict[str, Candidate]:
    """The tensors of a language model's folder, and those that its classifier has besides, without
    those that this has no use for. Logs the difference."""
    if head is None:
        return dict(candidates)
    found = {name: c for name, c in candidates.items() if name not in head.unused}
    drawn = {name: values for name, values in head.drawn.items() if name not in found}
    found |= {name: in_memory(name, source.file, values) for name, values in drawn.items()}
    if drawn:
        logger.info(f"{source.file}: has no {_listed(sorted(drawn))}, which is drawn at random")
    if left := sorted(candidates.keys() & head.unused):
        logger.info(f"{source.file}: {_listed(left)} is not used: a reward model has another head")
    return found


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
