"""The blocks of a Hugging Face decoder: what is streamed, in which order, and where each parameter belongs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from megatrain.errors import ModelError
from megatrain.memory.layout import FlatLayout


@dataclass(frozen=True)
class Block:
    """One streaming unit. Its layout names tensors as the model's state dict does."""

    index: int  # execution order: 0 is embed, then the decoder layers, then the head
    name: str
    layout: FlatLayout


@dataclass(frozen=True)
class Anatomy:
    """A model as blocks in execution order, and the few sizes that the rest of the house needs."""

    blocks: tuple[Block, ...]
    tied: tuple[tuple[str, str], ...]  # (alias, owner): the alias has no storage, its owner lives in `embed`
    family: str  # the configuration's model_type
    hidden_size: int
    vocab_size: int
    max_positions: int | None

    @property
    def parameters(self) -> int:
        """Trained parameters; a tied tensor counts once."""
        return sum(block.layout.parameters for block in self.blocks)

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
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


def find_layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """The decoder stack of `model`: the one ModuleList with as many entries as the configuration has layers.

    Raises:
        ModelError: there is no such list, or more than one (an encoder beside the decoder, say).
    """
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and any(True for _ in module.parameters())
    ]
    outermost = [(path, module) for path, module in lists if not any(path.startswith(other + ".") for other, _ in lists)]
    if len(outermost) != 1:
        found = ", ".join(path for path, _ in outermost) or "none"
        raise ModelError(
            f"{type(model).__name__}: expected exactly one list of {count} decoder layers, found {found}; it cannot be streamed yet"
        )
    return outermost[0]


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies: not to norms and biases, as transformers' Trainer does."""
    return len(shape) > 1 and not name.endswith("bias")


def layout_of(parameters: Iterable[tuple[str, nn.Parameter]], *, layer: bool = False) -> FlatLayout:
    """Pack parameters into one block's layout: first those that decay, for the device updates each kind by one launch."""
    tensors = [(name, tuple(p.shape), decays(name, tuple(p.shape))) for name, p in parameters]
    return FlatLayout.pack(sorted(tensors, key=lambda tensor: not tensor[2]), layer=layer)
