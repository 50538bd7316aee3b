"""A pretrained model's weights, copied tensor by tensor into the arrays they will be trained in."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain.errors import ModelError, StorageError
from megatrain.heartbeat import WEIGHTS_READ, beat, may_end_here
from megatrain.memory.layout import Span, TensorRange
from megatrain.memory.store import Store
from megatrain.models.anatomy import Anatomy
from megatrain.models.constants import FLOATS, Constants, Place
from megatrain.models.initialize import NewHead
from megatrain.models.names import Tensors
from megatrain.models.pretrained import UNUSABLE, ModelSource, quantisation_in, read_model_config
from megatrain.optim.split import as_weight, split_master
from megatrain.storage.dequantise import Dequantised, dequantised
from megatrain.storage.hashed_file import WrittenFile
from megatrain.storage.manifest import (
    Manifest,
    check_model_files,
    damaged,
    manifest_of_model,
    verifies,
)
from megatrain.storage.passthrough import (
    CONFIG,
    NOTHING,
    Passthrough,
    describe_passthrough,
    passthrough_of,
    with_frozen,
)
from megatrain.storage.safetensors import (
    HashedReader,
    StoredTensor,
    in_parallel,
    open_shards,
    read_chunks,
)
from megatrain.storage.sharded_write import Reading, readings

Copied = tuple[Place, StoredTensor]  # a tensor of a block, and its source
SUFFIX = ".safetensors"
logger = logging.getLogger("megatrain")


def load_weights(
    anatomy: Anatomy,
    store: Store,
    source: ModelSource,
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
        found_there = with_head(read_gguf(source), head, source)
        copy_in(anatomy, store, found_there, str(source.file), constants)
        return anatomy.published.tensors, NOTHING  # its names are transformers' own
    manifest = manifest_of_model(source.path)
    hashed = manifest.files if manifest and verifies() else {}
    sums = {source.path / name: file for name, file in hashed.items()}
    with damage_first(source.path, manifest):
        candidates = with_head(open_folder(source), head, source)
        say_dequantised(candidates, store.arrays["weight"].dtype, source)
        found, passthrough = copy_in(anatomy, store, candidates, str(source.file), constants, sums)
    unchanged = (
        (name, candidates[name].stored or candidates[name].quantised) for name in passthrough
    )
    kept = passthrough_of(source.path, {name: tensor for name, tensor in unchanged if tensor})
    if head is not None:  # its config.json describes another model
        kept = replace(kept, files={n: text for n, text in kept.files.items() if n != CONFIG})
    dropped = [name for name, place in passthrough.items() if place is None]
    if said := describe_passthrough(source.file, kept, dropped, anatomy.unused_weights):
        logger.info(said)
    trained = {name: candidates[name].dtype for place, name in found.items() if not place.constant}
    if store.arrays["weight"].dtype == torch.bfloat16 and (said := about_float32(trained)):
        logger.info(f"{source.file}: {said}")
    held = {place: candidates[name].stored for place, name in found.items()}
    return anatomy.published.named_as(found), with_frozen(kept, held, store, source.file)


def check_headers(anatomy: Anatomy, constants: Constants, source: ModelSource) -> None:
    """Look whether a folder's tensors are those of the model, by the headers of its files.

    Raises ModelError and StorageError as `load_weights`, but for what values tell.
    """
    with damage_first(source.path, manifest_of_model(source.path)):
        match(anatomy, open_folder(source), str(source.file), constants)


def about_float32(dtypes: Mapping[str, torch.dtype]) -> str:
    """A sentence about float32 tensors in a folder of other dtypes; empty if there are none."""
    wide = sorted(name for name, dtype in dtypes.items() if dtype == torch.float32)
    if not wide or len(wide) == len(dtypes):
        return ""
    return (
        f"has {listed(wide)} in float32, unlike the rest; masters are exact, but layers compute "
        "with bfloat16, and so it is saved (`megatrain export --dtype float32` has the masters)"
    )


@contextmanager
def damage_first(folder: Path, manifest: Manifest | None) -> Iterator[None]:
    """Turn an error raised inside into DamagedError if the folder's manifest shows the reason: a
    wrong name or value may be a damaged one."""
    try:
        yield
    except (ModelError, StorageError):
        if manifest:
            names = [name for name in manifest.files if not name.startswith("optimizer")]
            check_model_files(folder, manifest, names)
        raise


def copy_in(
    anatomy: Anatomy,
    store: Store,
    candidates: Mapping[str, Candidate],
    where: str,
    constants: Constants,
    sums: Mapping[Path, WrittenFile] | None = None,
) -> tuple[dict[Place, str], dict[str, Place | None]]:
    """Check every candidate against the anatomy, then copy them with a few threads.

    sums: of files that are to be checked: each is read by one thread, from beginning to end.

    Returns the names of those that were copied, by place, and the others as `Found` has them.

    Raises ModelError as `load_weights`, and DamagedError.
    """
    matched = match(anatomy, candidates, where, constants)
    found, twins, passthrough = matched.names, matched.twins, matched.passthrough
    constants.expect({p: (name, candidates[name].dtype) for p, name in found.items()})
    writers = {True: partial(copy_constant, constants), False: partial(copy_tensor, store)}
    by_file: dict[Path, list[Copied]] = {path: [] for path in sums or () if path.suffix == SUFFIX}
    copies: list[Callable[[], None]] = []
    for place, name in sorted(found.items(), key=lambda item: candidates[item[1]].where):
        stored = candidates[name].stored
        if stored is not None and stored.path in by_file:
            by_file[stored.path].append((place, stored))
        else:
            copies.append(partial(writers[place.constant], place, candidates[name]))
    others = {stored.path for name in passthrough if (stored := candidates[name].stored)}
    to_read = [path for path, copied in by_file.items() if copied or path in others]
    if sums is not None:
        sizes = {path: sums[path].nbytes for path in to_read}
        copies += [
            partial(_copy_checked, writers, path, sums[path], by_file[path], how)
            for path, how in readings(sizes, store.world).items()
        ]
    if store.world.is_first:
        copies += [partial(_check_twins, candidates[a], candidates[o]) for a, o in twins]
    in_parallel(copies)
    return found, passthrough


def _copy_checked(
    writers: Mapping[bool, Callable[[Place, Candidate], None]],
    path: Path,
    written: WrittenFile,
    tensors: Iterable[Copied],
    how: Reading,
) -> None:
    """Copy a file's tensors in one reading of all its bytes, or of this rank's share where another
    one hashes it. Raises DamagedError.

    writers: of constants (True), and of all else.
    """
    with HashedReader(path, *how) as file:
        for place, stored in sorted(tensors, key=lambda copied: copied[1].offset):
            chunks = partial(file.chunks, stored)
            candidate = Candidate(stored.where, stored.dtype, stored.shape, chunks)
            writers[place.constant](place, candidate)
        file.skip_to(file.nbytes)
        if file.nbytes != written.nbytes or (how.hashes and file.sha256 != written.sha256):
            raise damaged(path)


def _check_twins(alias: Candidate, owner: Candidate) -> None:
    # not strict: a dequantised tensor's chunks are cut elsewhere, and its values differ anyway
    pairs = zip(alias.chunks(), owner.chunks(), strict=False)
    same = (torch.equal(one.float(), other.float()) for (_, one), (_, other) in pairs)
    if alias.shape != owner.shape or not all(same):
        raise ModelError(
            f"{alias.where} differs from the embedding that config.json ties it to; "
            "set tie_word_embeddings to false if both are meant"
        )


def copy_tensor(store: Store, place: Place, candidate: Candidate) -> None:
    """Copy one tensor as an exact fp32 master: fp32, or bf16 weight and int16 remainder.

    A frozen one has no remainder.

    A rank reads and keeps its share.

    Raises ModelError if a value is NaN, infinite, or too large for bf16.
    """
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
        for first, read in candidate.chunks(*mine):
            begin, values = _within(mine, first, read)
            if not values.numel():
                continue
            _check_finite(values, candidate.where)
            beat(WEIGHTS_READ, values.numel())
            may_end_here()
            part = weight.narrow(0, begin, values.numel())
            if not remainders:
                part.copy_(as_weight(values, weight.dtype))
                if frozen:
                    _check_finite(part, candidate.where)  # rounding up may have overflowed
                continue
            low = remainders[0].narrow(0, begin, values.numel())
            if values.dtype == torch.bfloat16:
                part.copy_(values)
                low.zero_()
            else:
                split_master(values.float(), out=(part, low))
                _check_finite(part, candidate.where)  # rounding up may have overflowed


def _within(mine: Span, first: int, read: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The part of values from element `first` on that lies in `mine`, and its offset there."""
    start, stop = max(first, mine.start), min(first + len(read), mine.stop)
    return start - mine.start, read[start - first : max(start, stop) - first]


def copy_constant(constants: Constants, place: Place, candidate: Candidate) -> None:
    """Copy one constant as it is. Raises ModelError if a value is NaN or infinite."""
    for begin, values in candidate.chunks():
        _check_finite(values, candidate.where)
        may_end_here()
        constants.write(place, begin, values)


def _check_finite(values: torch.Tensor, where: str) -> None:
    if values.numel() == 0:
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

    names: dict[Place, str]
    twins: list[tuple[str, str]]
    passthrough: dict[str, Place | None]


def match(
    anatomy: Anatomy, candidates: Mapping[str, Candidate], where: str, constants: Constants
) -> Found:
    """Match a folder's tensors to the model's and check shapes and dtypes. Raises ModelError."""
    matched = find_tensors(anatomy, candidates, where)
    for place, name in matched.names.items():
        dtypes = constants.may_be(place) if place.constant else FLOATS
        _check_kind(candidates[name], place.tensor, dtypes)
    for name, passenger in matched.passthrough.items():
        if passenger is not None:
            _check_shape(candidates[name], passenger.tensor)
    return matched


def find_tensors(anatomy: Anatomy, names: Iterable[str], where: str) -> Found:
    """Match names to the model's tensors. Any name that transformers knows will do.

    Raises ModelError if a name is unknown to this model, two are of one tensor, or one is missing.
    """
    found, dropped = _match_names(anatomy, names, where)
    twins = _take_aliases(found)
    missing = anatomy.published.missing(found.keys())
    if missing:
        raise ModelError(
            f"{where}: lacks {listed(missing)}, which a {anatomy.family} model of this "
            "configuration needs"
        )
    passthrough: dict[str, Place | None] = dict.fromkeys(dropped)
    for place in [place for place in found if place.passenger]:
        passthrough[found.pop(place)] = place
    return Found(found, twins, passthrough)


def _match_names(
    anatomy: Anatomy, names: Iterable[str], where: str
) -> tuple[dict[Place, str], list[str]]:
    """(names by place, names of what transformers drops)."""
    found: dict[Place, str] = {}
    unexpected, dropped = [], []
    for name, place in anatomy.published.places_of(names).items():
        if place is None:
            if anatomy.published.is_dropped(name) and not IGNORED.search(name):
                dropped.append(name)
            elif not IGNORED.search(name):
                unexpected.append(name)
        elif place in found:
            raise ModelError(f"{where}: holds {place.own} twice, under another name too")
        else:
            found[place] = name
    if unexpected:
        raise ModelError(
            f"{where}: holds {listed(unexpected)}, unknown to a {anatomy.family} model of this "
            "config.json"
        )
    whole = {place.own for place in found if place.whole}
    for place in found:
        if place.own in whole and not place.whole:
            raise ModelError(f"{where}: holds {place.own} twice, whole and in parts")
    return found, dropped


def _take_aliases(found: dict[Place, str]) -> list[tuple[str, str]]:
    """Remove tied tensors from `found`; one replaces its owner if that is missing.

    Returns the names of (alias, owner) where both are present.
    """
    twins = []
    for alias in [place for place in found if place.alias]:
        owner, stand_in = replace(alias, alias=False), found.pop(alias)
        if owner in found:
            twins.append((stand_in, found[owner]))
        else:
            found[owner] = stand_in
    return twins


def _check_shape(candidate: Candidate, tensor: TensorRange) -> None:
    if candidate.shape != tensor.shape:
        raise ModelError(
            f"{candidate.where} has shape {list(candidate.shape)}, but config.json asks for "
            f"{list(tensor.shape)}"
        )


def _check_kind(candidate: Candidate, tensor: TensorRange, dtypes: Collection[torch.dtype]) -> None:
    _check_shape(candidate, tensor)
    if candidate.dtype not in dtypes:
        name = str(candidate.dtype).removeprefix("torch.")
        raise ModelError(
            f"{candidate.where} is {name}; "
            "training needs the unquantised model in bf16, fp16 or fp32"
        )


# -- a folder's tensors --


@dataclass(frozen=True)
class Candidate:
    """A tensor of the source. `chunks(start, stop)` yields (first element, flat values) in order:
    of all of it by default, else at least of those elements.

    stored: where it lies in a safetensors file; None for other sources and quantised tensors.
    quantised: how those are read.
    """

    where: str  # file and name, for error messages
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[..., Iterable[tuple[int, torch.Tensor]]]
    stored: StoredTensor | None = None
    quantised: Dequantised | None = None


def open_folder(source: ModelSource) -> dict[str, Candidate]:
    """The tensors of a model folder, by the headers of its files.

    Raises ModelError and StorageError, as `open_shards` and `dequantised`.
    """
    stored, how = open_shards(source.path), quantisation_in(source.path)
    found = {}
    if how is not None:
        quantised, stored = dequantised(stored, how)
        for name, q in quantised.items():
            found[name] = Candidate(q.values.where, q.dtype, q.shape, q.chunks, quantised=q)
    for name, t in stored.items():
        found[name] = Candidate(t.where, t.dtype, t.shape, partial(read_chunks, t), t)
    return found


def say_dequantised(
    candidates: Mapping[str, Candidate], dtype: torch.dtype, source: ModelSource
) -> None:
    """Log that quantised weights are dequantised, and the size that all take in `dtype`."""
    how = quantisation_in(source.path)
    if how is not None and any(c.quantised is not None for c in candidates.values()):
        nbytes = sum(math.prod(c.shape) for c in candidates.values()) * dtype.itemsize
        logger.info(
            f"{source.path}: its {how.method} weights are dequantised when they are read; all are "
            f"{str(dtype).removeprefix('torch.')} from then on, {nbytes / 1e9:.3g} GB"
        )


def read_gguf(source: ModelSource) -> dict[str, Candidate]:
    """The tensors of a GGUF file, all of them in RAM, de-quantised to fp32 by transformers.

    Its `from_pretrained` would do the same, but wants the accelerate package only to read a file.
    """
    from transformers import AutoModelForCausalLM

    config, file = read_model_config(source), source.file
    try:
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        with torch.device("meta"):
            names = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        read: Any = load_gguf_checkpoint
        tensors = read(str(file), return_tensors=True, model_to_load=names)["tensors"]
    except UNUSABLE as error:
        raise ModelError(
            f"{file}: this GGUF file cannot be read ({error}); "
            "name the Hugging Face folder of the model instead"
        ) from error
    return {
        name: Candidate(f"{file}: {name}", t.dtype, tuple(t.shape), partial(_whole, t))
        for name, t in tensors.items()
    }


def _whole(tensor: torch.Tensor, *_: int) -> list[tuple[int, torch.Tensor]]:
    return [(0, tensor.reshape(-1))]


def with_head(
    candidates: Mapping[str, Candidate], head: NewHead | None, source: ModelSource
) -> dict[str, Candidate]:
    """The tensors of a language model's folder, and those that its classifier has besides, without
    those that this has no use for. Logs the difference."""
    if head is None:
        return dict(candidates)
    found = {name: c for name, c in candidates.items() if name not in head.unused}
    drawn = {name: values for name, values in head.drawn.items() if name not in found}
    for name, values in drawn.items():
        whole = partial(_whole, values)
        found[name] = Candidate(name, values.dtype, tuple(values.shape), whole)
    if drawn:
        logger.info(f"{source.file}: has no {listed(sorted(drawn))}, which is drawn at random")
    if unused := sorted(candidates.keys() & head.unused):
        logger.info(f"{source.file}: {listed(unused)} is not used: a reward model has another head")
    return found


def listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
