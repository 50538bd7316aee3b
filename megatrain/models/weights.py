"""A pretrained model's weights, copied tensor by tensor into the arrays they will be trained in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatrain.errors import ModelError
from megatrain.memory.layout import TensorSpec
from megatrain.memory.store import Arrays
from megatrain.models.anatomy import Anatomy
from megatrain.models.names import published_names
from megatrain.models.pretrained import Source, load_config, load_config_and_tokenizer, resolve_source
from megatrain.models.safetensors_io import IO_THREADS, StoredTensor, open_shards, read_chunks
from megatrain.optim.split import split_master

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Source", "load_config_and_tokenizer", "load_gguf", "load_pretrained", "load_weights", "resolve_source"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Constant tables that older releases saved with the weights; models compute them anew.
IGNORED = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|(attn|attention|self_attn|self_attention)\.(bias|masked_bias)|position_ids)$"
)


@dataclass(frozen=True)
class Candidate:
    """A tensor on offer: `chunks()` yields (first element, flat values) in order. `where` names it for people."""

    where: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[tuple[int, torch.Tensor]]]


def load_weights(anatomy: Anatomy, store: Arrays, source: Source) -> None:
    """Fill the store's weights (and remainders) from a resolved source. Raises as `load_pretrained` and `load_gguf`."""
    if source.kind == "gguf":
        load_gguf(anatomy, store, source.file)
    else:
        load_pretrained(anatomy, store, source.path)


def load_pretrained(anatomy: Anatomy, store: Arrays, folder: Path | str) -> None:
    """Fill the store's weights (and remainders) from the safetensors files of a Hugging Face folder, a few megabytes at a time.

    fp32, bf16 and fp16 sources are kept exactly. Names with and without the base model's prefix are understood.

    Raises:
        ModelError: tensors are missing, unexpected, of another shape or dtype, or not finite; the message names them.
        StorageError: a file is missing, truncated or malformed.
    """
    folder = Path(folder)
    copy_in(anatomy, store, {name: _from_file(stored) for name, stored in open_shards(folder).items()}, str(folder))


def _from_file(stored: StoredTensor) -> Candidate:
    return Candidate(f"{stored.path}: {stored.name}", stored.dtype, stored.shape, lambda: read_chunks(stored))


def load_gguf(anatomy: Anatomy, store: Arrays, path: Path | str, config: PretrainedConfig | None = None) -> None:
    """Fill the store from a GGUF file, de-quantised to fp32 by transformers (which holds all of it in RAM meanwhile).

    Its `from_pretrained` would do the same, but wants the accelerate package only to read a file.

    Raises:
        ModelError: transformers cannot read the file, or as `load_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    path = Path(path)
    config = config or load_config(Source("gguf", path.parent, path.name))
    try:
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        with torch.device("meta"):
            names = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)["tensors"]  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TypeError, KeyError, IndexError, ImportError, NotImplementedError) as error:
        raise ModelError(f"{path}: this GGUF file cannot be read ({error}); name the Hugging Face folder of the model instead") from error
    copy_in(anatomy, store, {name: _from_memory(f"{path}: {name}", tensor) for name, tensor in tensors.items()}, str(path))


def _from_memory(where: str, tensor: torch.Tensor) -> Candidate:
    return Candidate(where, tensor.dtype, tuple(tensor.shape), lambda: [(0, tensor.reshape(-1))])


# -- names to places ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a tensor belongs in the store."""

    block: int
    spec: TensorSpec


def copy_in(anatomy: Anatomy, store: Arrays, candidates: Mapping[str, Candidate], where: str) -> None:
    """Check every candidate against the anatomy, then copy them with a few threads. Raises ModelError as `load_pretrained`."""
    places = {spec.name: Place(block.index, spec) for block in anatomy.blocks for spec in block.layout.tensors}
    found = match_names(anatomy, candidates, where)
    twins = _take_aliases(anatomy, found)
    missing = [name for name in places if name not in found]
    if missing:
        raise ModelError(f"{where}: lacks {_listed(missing)}, which a {anatomy.family} model of this configuration needs")
    for name, place in places.items():
        _check_kind(found[name], place.spec)
    jobs = sorted(places.items(), key=lambda item: found[item[0]].where)
    fills = [partial(fill, store, place, found[name]) for name, place in jobs]
    _in_parallel([*fills, *(partial(_check_twins, alias, owner) for alias, owner in twins)])


def match_names(anatomy: Anatomy, candidates: Mapping[str, Candidate], where: str) -> dict[str, Candidate]:
    """Candidates by the model's own names, given those or the published ones, with or without the prefix that a bare base model lacks.

    Raises:
        ModelError: a name means nothing to this model, or two mean the same.
    """
    prefix = anatomy.embed.layout.tensors[0].name.partition(".")[0]
    published = published_names(anatomy)
    known = {name: name for name in published} | {name: own for own, name in published.items()}
    found: dict[str, Candidate] = {}
    unexpected = []
    for name, candidate in candidates.items():
        own = known.get(name) or known.get(f"{prefix}.{name}")
        if own is None:
            if not IGNORED.search(name):
                unexpected.append(name)
        elif own in found:
            raise ModelError(f"{where}: holds {own} twice, under another name too")
        else:
            found[own] = candidate
    if unexpected:
        raise ModelError(f"{where}: holds {_listed(unexpected)}, unknown to a {anatomy.family} model of this config.json")
    return found


def _take_aliases(anatomy: Anatomy, found: dict[str, Candidate]) -> list[tuple[Candidate, Candidate]]:
    """Let an alias stand in for a missing owner; return the (alias, owner) pairs of which both are present."""
    twins = []
    for alias, owner in anatomy.tied:
        if alias in found:
            stand_in = found.pop(alias)
            if owner in found:
                twins.append((stand_in, found[owner]))
            else:
                found[owner] = stand_in
    return twins


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"


def _check_kind(candidate: Candidate, spec: TensorSpec) -> None:
    if candidate.shape != spec.shape:
        raise ModelError(f"{candidate.where} has shape {list(candidate.shape)}, but config.json asks for {list(spec.shape)}")
    if candidate.dtype not in FLOATS:
        name = str(candidate.dtype).removeprefix("torch.")
        raise ModelError(f"{candidate.where} is {name}; training needs the unquantised model in bf16, fp16 or fp32")


def _check_twins(alias: Candidate, owner: Candidate) -> None:
    same = alias.shape == owner.shape and all(
        torch.equal(a.float(), b.float()) for (_, a), (_, b) in zip(alias.chunks(), owner.chunks(), strict=True)
    )
    if not same:
        raise ModelError(
            f"{alias.where} differs from the embedding that config.json ties it to; set tie_word_embeddings to false if both are meant"
        )


# -- copying ------------------------------------------------------------------------------------------------------------------------


def fill(store: Arrays, place: Place, candidate: Candidate) -> None:
    """Copy one tensor into its place as an exact fp32 master: fp32, or bf16 weight and int16 remainder.

    Raises:
        ModelError: a value is NaN, infinite, or too large for bf16.
    """
    spec = place.spec
    names = ["weight", "remainder"] if store.arrays["weight"].dtype == torch.bfloat16 else ["weight"]
    with store.lease(place.block, names, changes=True, soon=False) as arrays:  # the block's other tensors follow
        weight, *remainders = (arrays[name].narrow(0, spec.offset, spec.numel) for name in names)
        for begin, values in candidate.chunks():
            _check_finite(values, candidate.where)
            part = weight.narrow(0, begin, values.numel())
            if not remainders:
                part.copy_(values)
                continue
            low = remainders[0].narrow(0, begin, values.numel())
            if values.dtype == torch.bfloat16:
                part.copy_(values)
                low.zero_()
            else:
                split_master(values.float(), out=(part, low))
                _check_finite(part, candidate.where)


def _check_finite(values: torch.Tensor, where: str) -> None:
    if values.numel() == 0:
        return
    low, high = torch.aminmax(values)  # one pass, no temporaries; NaN comes through
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise ModelError(f"{where} holds NaN, infinity or a value beyond bf16's range; the file is damaged or its training diverged")


def _in_parallel(jobs: list[Callable[[], None]]) -> None:
    """Run jobs on a few threads; the first error cancels what has not started and is raised."""
    with ThreadPoolExecutor(IO_THREADS, thread_name_prefix="load") as pool:
        try:
            for future in [pool.submit(job) for job in jobs]:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
