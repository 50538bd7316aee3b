"""A small configuration of the same family, on which what a family does can be tried in seconds.

Sizes follow a table of keys. All else stays as it is: which layer has which type, what is tied,
biases, norms, caps, the kind of rotary embedding. Only dropout is set to 0. What a model has beside
its language model, a vision tower, shrinks by the same table; on text it does not run.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain.errors import ModelError
from megatrain.losses import IGNORE
from megatrain.models.anatomy import find_layers
from megatrain.models.constants import kept_tensors, parts_of
from megatrain.models.family import build_model, causal_lm, draws_random_numbers, is_foreign
from megatrain.models.pretrained import as_language_model

HEADS, HEAD_DIM, VOCABULARY = 4, 16, 128
MOST_LAYERS = 24
MOST_PARAMETERS = 8 << 20

_KEYS = tomllib.loads(Path(__file__).with_name("small.toml").read_text(encoding="utf-8"))
WHAT = {key: what for what, keys in _KEYS["what"].items() for key in keys.split()}
LIMITS = {key: int(most) for most, keys in _KEYS["at_most"].items() for key in keys.split()}
SHARED_BY = {
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "linear_num_key_heads": "linear_num_value_heads",
}
LAYERS = re.compile("layer|types$|pattern$|idxs$|indices$")
RANDOM = re.compile("drop|jitter")
DEPTH, DEEPSTACK = "num_hidden_layers", "deepstack_visual_indexes"
Batch = Mapping[str, Tensor]


def shrink(
    config: Any, stack: Iterable[nn.Module], attention: str, trust_remote_code: bool = False
) -> Any:
    """A configuration of small sizes with few layers, of every kind. config: of a classifier its
    language model is made. stack: its decoder layers, on meta. Raises ModelError if the family's
    code takes none, or the model is too large."""
    config = as_language_model(config)
    layers = list(stack)
    kinds = kinds_of(config.get_text_config(), layers)
    depths = depths_of(kinds)
    if any(is_foreign(layer) for layer in layers):  # what a layer does may depend on its number
        depths = [min(len(kinds), MOST_LAYERS), *depths]
    reason = ""
    for depth in depths:
        try:
            small = read_changed(config, len(kinds), depth)
            built = build_model(small, attention, torch.float32, trust_remote_code)
            small_stack = find_layers(built, small.get_text_config().num_hidden_layers)[1]
        except ModelError as error:
            reason = str(error)
            continue
        if sum(p.numel() for p in built.parameters()) > MOST_PARAMETERS:
            reason = f"it is too large with {depth} layers"
        elif set(kinds_of(small.get_text_config(), small_stack)) != set(kinds):
            reason = f"{depth} layers have not all kinds"
        elif draws_random_numbers(built):
            reason = "it draws random numbers"
        else:
            return small
    raise ModelError(f"{type(config).__name__} has no small model: {reason}")


class _Sizes:
    """The sizes of a language model, and what they become."""

    def __init__(self, text: Any) -> None:
        self.given = text.to_dict()
        # attribute_map: standard name -> the family's own
        self.standard = {own: name for name, own in text.attribute_map.items()}
        own, given = text.attribute_map, self.given
        self.heads = given.get(own.get("num_attention_heads", "num_attention_heads")) or 0
        width = given.get(own.get("hidden_size", "hidden_size")) or HEADS * HEAD_DIM
        dim = given.get("head_dim") or (width // self.heads if self.heads else 0) or HEAD_DIM
        # a model whose heads do not add up to the hidden size keeps that
        self.hidden = HEADS * HEAD_DIM if dim * self.heads in (0, width) else 3 * HEAD_DIM
        self.of_width, self.of_head = self.hidden / width, HEAD_DIM / dim
        inner = given.get("mamba_d_ssm")
        expand = self.given.get("expand", self.given.get("mamba_expand", 1))
        self.inner = self.width(inner) if inner else int(expand * self.hidden)

    def width(self, value: float) -> int:
        """A width in proportion to the hidden size, in whole eighths."""
        return max(8, -(-round(value * self.of_width) // 8) * 8)

    def smaller(self, own: Any, value: Any) -> Any:
        """The shrunk value of a key of the configuration."""
        key = str(self.standard.get(own, own))
        if isinstance(value, dict):
            return {name: self.smaller(name, inner) for name, inner in value.items()}
        if key.endswith("token_id"):
            return _each(lambda token: token % VOCABULARY if token > 0 else token, value)
        if key == "mrope_section":
            return shares(value, round(sum(value) * self.of_head))
        if key in ("long_factor", "short_factor"):  # one for each pair of a head's dimensions
            return value[: round(len(value) * self.of_head)]
        if isinstance(value, bool) or not isinstance(value, int | list) or not value:
            return value
        return _each(lambda number: self.number(key, number), value)

    def number(self, key: str, value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        what = WHAT.get(key)
        if what == "hidden size":
            return self.hidden
        if what == "heads":
            return HEADS
        if what == "shared heads":
            others = self.given.get(SHARED_BY.get(key), self.heads)
            return HEADS if value == others else min(value, HEADS // 2)
        if what == "dimensions of a recurrent head" or (key == "head_dim" and not self.heads):
            return self.inner // HEADS
        if what == "dimensions of a head":
            return max(2, 2 * round(value * self.of_head / 2))
        return self.width(value) if what == "width" else min(value, LIMITS.get(key, value))


def shares(parts: Sequence[int], total: int) -> list[int]:
    """Whole numbers in proportion to `parts` that sum up to `total`."""
    ends = [round(total * sum(parts[: n + 1]) / sum(parts)) for n in range(len(parts))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    if value is None:
        return None
    return [change(one) for one in value] if isinstance(value, list) else change(value)


# -- layers ----------------------------------------------------------------------------------------


def kinds_of(text: Any, stack: Iterable[nn.Module]) -> list[Any]:
    """Each layer's class, tensors (numbers in names are experts') and configuration."""
    layers, kinds = list(stack), []
    by_layer = [
        value
        for key, value in text.to_dict().items()
        if _is_by_layer(key, value, len(layers)) and key not in WHAT
    ]
    for index, layer in enumerate(layers):
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        names = frozenset((re.sub(r"\d+", "n", name), tensor.ndim) for name, tensor in tensors)
        kinds.append((type(layer).__name__, names, *(repr(given[index]) for given in by_layer)))
    return kinds


def depths_of(kinds: Sequence[Any]) -> list[int]:
    """Numbers of layers from the front that have each kind twice, if it ever is: with a kind that
    stands only at the end, and without."""
    count, places = len(kinds), defaultdict(list)
    for index, kind in enumerate(kinds):
        places[kind].append(index)
    ends = [found[:2][-1] for found in places.values()]
    found = {1 + max((end for end in ends if end < count - 1), default=0), 1 + max(ends)}
    return sorted({min(max(depth, 2), count, MOST_LAYERS) for depth in found})


def _is_by_layer(key: str, value: Any, count: int) -> bool:
    """True for a list that says something of each layer."""
    if not isinstance(value, list) or len(value) != count or _are_indices(key, value):
        return False
    return key in WHAT or bool(LAYERS.search(key))


def _are_indices(key: str, value: Any) -> bool:
    """True for a list of the layers that something is said of."""
    numbers = isinstance(value, list) and all(type(v) is int for v in value)
    return numbers and bool(LAYERS.search(key)) and value == sorted(set(value))


def _first_layers(key: str, value: Any, count: int, depth: int) -> Any:
    """The value of a key for the first `depth` of `count` layers."""
    if key == "per_layer_config" and value:
        return {index: given for index, given in value.items() if int(index) < depth}
    if key == "attention_types":  # GPT-Neo's: patterns, and how often
        return [[pattern, depth // len(pattern)] for pattern, _ in value]
    if key == "moe_layer_end_index":
        return min(value, depth - 1)
    if _are_indices(key, value):
        return [index for index in value if index < depth]
    return value[:depth] if _is_by_layer(key, value, count) else value


def read_changed(config: Any, count: int, depth: int) -> Any:
    """The configuration with `depth` of its `count` layers, small sizes and no dropout, and small
    towers beside the language model. Raises ModelError."""
    text = config.get_text_config()
    try:
        cut = {k: _first_layers(k, v, count, depth) for k, v in text.to_dict().items()}
        found = small_values(_Sizes(text), cut)
        found[text.attribute_map.get(DEPTH, DEPTH)] = depth
        if text is not config:
            whole: dict[str, Any] = config.to_dict()
            for key, part in parts_of(config).items():
                if part is text:
                    whole[key] = found
                elif key in whole:
                    tower = small_values(_Sizes(part), part.to_dict())
                    whole[key] = tower | {k: min(v, 2) for k, v in tower.items() if k == DEPTH}
                    whole[key] |= {k: getattr(part, k) for k in tower if k == "window_size"}
                    whole[key] |= {k: v[:1] for k, v in tower.items() if k == DEEPSTACK}
            tokens = {k: v for k, v in whole.items() if k.endswith(("token_id", "token_index"))}
            found = whole | {k: _Sizes(text).smaller("token_id", v) for k, v in tokens.items()}
        return type(config).from_dict(found)
    except Exception as error:  # whatever a family's code raises on numbers that do not fit
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"it refuses other sizes ({reason})") from error


def small_values(sizes: _Sizes, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration with small sizes and no dropout."""
    return {
        key: 0.0 if isinstance(value, float) and RANDOM.search(key) else sizes.smaller(key, value)
        for key, value in given.items()
    }


# -- plain transformers and autograd on random values ----------------------------------------------


@contextmanager
def small_scale() -> Iterator[None]:
    """For work on small models: in one thread; the random state stays as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


def plain_model(
    config: Any, *, seed: int = 0, attention: str = "auto", trust_remote_code: bool = False
) -> nn.Module:
    """The family's own model in float32 on the CPU, in training mode. Every parameter and
    persistent buffer is random: zero biases and unit norms would hide a mix-up. But zeros beside
    other values stay, which may be a mask. Raises ModelError."""
    with small_scale():
        torch.default_generator.manual_seed(seed)  # not CUDA's
        try:
            model = causal_lm(copy.deepcopy(config), attention, torch.float32, trust_remote_code)
        except Exception as error:  # whatever a family's code raises
            raise ModelError(f"it cannot be built ({type(error).__name__}: {error})") from error
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.ndim > 1 else parameter + noise * 0.1)
        for tensor in kept_tensors(model).values():
            if not isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator) * 0.1
                tensor.copy_(tensor * (1 + noise) if tensor.any() else noise)
    return model.train()  # type: ignore[no-any-return]


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Summed cross-entropy of the next token, as transformers shifts it."""
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in batch.items()}
    labels = inputs.pop("labels")[:, 1:].flatten()
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    return functional.cross_entropy(
        logits.flatten(0, 1), labels, reduction="sum", ignore_index=IGNORE
    )


def plain_gradients(
    model: nn.Module, batches: Iterable[Batch], denominator: float | None = None
) -> float:
    """Accumulate into .grad; returns the loss, over all targets unless told otherwise."""
    batches = list(batches)
    total = 0.0
    for batch in batches:
        loss = plain_loss(model, batch) / (denominator or count_targets(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def count_targets(batches: Iterable[Batch]) -> float:
    """Tokens with a target, of all micro-batches."""
    return float(sum((batch["labels"][:, 1:] != IGNORE).sum() for batch in batches))
