"""The blocks of a Hugging Face decoder: what is streamed, in which order, and which parameters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.memory.layout import FlatLayout
from megatrain.models.constants import (
    NOBODY,
    Block,
    UnusedWeights,
    kept_tensors,
    refuse_large,
    trains,
)
from megatrain.models.names import Published

# Of a parameter, in lower case: by these the Trainer of transformers knows norms and biases.
NORM_OR_BIAS = re.compile(r"bias|layernorm|rmsnorm|(?:\.|_|^)norm(?:\.|$)")


@dataclass(frozen=True)
class Anatomy:
    """A model as blocks in execution order, and the few sizes that other rooms need. `tied` holds
    (alias, owner) pairs: the alias has no storage, its owner lives in `embed`."""

    blocks: tuple[Block, ...]
    tied: tuple[tuple[str, str], ...]
    family: str  # the configuration's model_type
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    published: Published
    unused_weights: UnusedWeights = NOBODY
    labels: int | None = None  # of a classifier, which has a score for each instead of logits
    of_images: frozenset[str] = frozenset()  # arguments of the forward that tell of images

    @property
    def parameters(self) -> int:
        """Number of trained parameters; a tied tensor counts once."""
        return sum(block.layout.trained.parameters for block in self.blocks)

    @property
    def frozen_parameters(self) -> int:
        """Number of those that are streamed and not trained."""
        return sum(block.layout.parameters for block in self.blocks) - self.parameters

    @property
    def frozen(self) -> tuple[str, ...]:
        return tuple(t.name for block in self.blocks for t in block.layout.tensors if t.frozen)

    @property
    def first_trained(self) -> int:
        """The first block that a step updates: backward ends there. The head where none does."""
        return next((block.index for block in self.blocks if block.trains), self.head.index)

    @property
    def outputs(self) -> int:
        """The size of the head's output for a token: logits of the vocabulary, or scores."""
        return self.labels or self.vocab_size

    @property
    def layers(self) -> int:
        return len(self.blocks) - 2

    @property
    def embed(self) -> Block:
        return self.blocks[0]

    @property
    def head(self) -> Block:
        return self.blocks[-1]

    @property
    def embed_feeds_head(self) -> bool:
        """True if the head computes with a tensor that lives in `embed` (tied embeddings)."""
        return bool(self.tied)


def layouts_of(anatomy: Anatomy) -> tuple[FlatLayout, ...]:
    """The layouts of all blocks, in execution order."""
    return tuple(block.layout for block in anatomy.blocks)


def find_layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """(path, stack): the one ModuleList of `count` entries with parameters, or ModelError."""
    decoder = model.get_decoder()  # type: ignore[operator]
    found = [path for path, m in model.named_modules() if m is decoder and path]
    if found and len(of_it := _stacks(decoder, count)) == 1:  # a vision tower may have as many
        ((path, stack),) = of_it.items()
        return f"{found[0]}.{path}", stack
    lists = _stacks(model, count)
    if len(lists) != 1:
        raise ModelError(
            f"{type(model).__name__}: expected exactly one list of {count} decoder layers, found "
            f"{', '.join(lists) or 'none'}; it cannot be streamed yet"
        )
    ((path, stack),) = lists.items()
    return path, stack


def _stacks(root: nn.Module, count: int) -> dict[str, nn.ModuleList]:
    """The outermost lists of `count` modules with parameters, by path."""
    stacks = ((path, m) for path, m in root.named_modules() if isinstance(m, nn.ModuleList))
    lists = {path: m for path, m in stacks if len(m) == count and any(True for _ in m.parameters())}
    return {p: m for p, m in lists.items() if not any(p.startswith(f"{o}.") for o in lists)}


def divide(
    model: nn.Module,
    stack: str,
    layers: int,
    before: Sequence[str],
    after: Sequence[str],
    unused_weights: Collection[str],
) -> tuple[tuple[Block, ...], tuple[tuple[str, str], ...]]:
    """Assign every parameter to one block; returns (blocks, tied) as `Anatomy` holds them.

    Args:
        stack: path of the decoder stack.
        before, after: names of the tensors used before its first and after its last layer.
        unused_weights: names of those that are used nowhere.
    """
    family = type(model).__name__
    by_name = kept_tensors(model)
    prefixes = [f"{stack}.{i}." for i in range(layers)]
    in_layers = [[name for name in by_name if name.startswith(prefix)] for prefix in prefixes]
    owner_of: dict[int, str] = {}
    members: list[list[str]] = [[] for _ in range(layers + 2)]
    tied = []
    for index, names in enumerate([before, *in_layers, after]):
        for name in names:
            owner = owner_of.setdefault(id(by_name[name]), name)
            if owner == name and name not in members[0]:
                members[index].append(name)
            elif owner == name and not trains(by_name[name]):
                continue  # a constant may be used at both ends
            elif owner != name and index == layers + 1 and owner in members[0]:
                tied.append((name, owner))
            else:
                reason = f"shares its weights with {owner}, which"
                if owner == name:
                    reason = "is used at both ends of the model; it"
                raise ModelError(f"{family}: {name} {reason} cannot be streamed yet")
    at_home = {*owner_of, *(id(by_name[name]) for name in unused_weights if name in by_name)}
    homeless = [name for name, p in by_name.items() if id(p) not in at_home]
    if homeless:
        unseen = "is used without its module's own forward; it cannot be streamed yet"
        raise ModelError(f"{family}: {homeless[0]} {unseen}")
    labels = ["embed", *(f"layers.{i}" for i in range(layers)), "head"]
    decay = decaying(model)
    blocks = []
    for index, (label, names) in enumerate(zip(labels, members, strict=True)):
        trained = ((name, by_name[name]) for name in names if trains(by_name[name]))
        layout = layout_of(trained, decay, layer=0 < index <= layers)
        constants = {name: by_name[name] for name in names if not trains(by_name[name])}
        refuse_large(family, label, layout, constants)
        packed = FlatLayout.pack((name, tuple(t.shape), False) for name, t in constants.items())
        blocks.append(Block(index, label, layout, packed))
    return tuple(blocks), tuple(tied)


def decaying(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to, as transformers' Trainer has them.
    Everything but layer norms, by their class or their names, and biases, by their names: vectors
    such as attention sinks decay, norms of two dimensions do not."""
    return {
        f"{path}.{leaf}" if path else leaf
        for path, module in model.named_modules(remove_duplicate=False)
        if not isinstance(module, nn.LayerNorm)
        for leaf in module._parameters
        if not NORM_OR_BIAS.search(f"{path}.{leaf}".lower())
    }


def layout_of(
    parameters: Iterable[tuple[str, Tensor]], decay: Collection[str], *, layer: bool = False
) -> FlatLayout:
    """One block's layout: parameters that decay first, so that one launch updates each kind."""
    tensors = [(name, tuple(p.shape), name in decay) for name, p in parameters]
    return FlatLayout.pack(sorted(tensors, key=lambda tensor: not tensor[2]), layer=layer)
