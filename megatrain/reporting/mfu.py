"""The arithmetic of a step, and its share of the GPU's peak: the figures `tflops` and `mfu`.

Two conventions, and both are reported. `tflops` is 6 x all trained parameters x tokens / seconds,
the figure that training systems are compared by. `mfu` (model FLOP utilisation, Chowdhery et al.
2022, PaLM, appendix B) counts what the GPU has to multiply: matmuls and causal attention, neither
the embedding's lookup nor recomputation, over the GPU's peak dense bf16 rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.machine.datasheets import peak_tflops

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megatrain.models.anatomy import Anatomy


@dataclass(frozen=True)
class Attention:
    """The attention of one decoder layer."""

    width: int  # heads x head size
    window: int | None = None  # tokens of a sliding window

    def pairs(self, length: int) -> int:
        """(query, key) pairs of a causal sequence of `length` tokens."""
        if self.window is None or length <= self.window:
            return length * (length + 1) // 2
        return self.window * (self.window + 1) // 2 + (length - self.window) * self.window


@dataclass(frozen=True)
class ModelFlops:
    """A model's arithmetic: the FLOP of one step over given sequences, forward and backward."""

    parameters: int  # all trained ones
    matrix_parameters: int  # those that every token is multiplied with
    attention: tuple[Attention, ...]  # one per decoder layer

    @classmethod
    def of(cls, anatomy: Anatomy, config: PretrainedConfig) -> ModelFlops:
        """From a model's blocks and configuration. Of a mixture, idle experts would be counted."""
        heads = int(config.num_attention_heads)
        width = heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        windows = _windows(config, anatomy.layers)
        attention = tuple(Attention(width, window) for window in windows)
        return cls(anatomy.parameters, _matrix_parameters(anatomy), attention)

    def flops(self, lengths: Iterable[int]) -> int:
        """FLOP of forward and backward over sequences of these lengths, nothing computed twice.

        A parameter costs a multiplication and an addition per token forward, twice that backward;
        a (query, key) pair two matmuls of `width` forward (scores, values), twice that backward.
        """
        lengths = list(lengths)
        pairs = sum(
            layer.width * layer.pairs(length) for layer in self.attention for length in lengths
        )
        return 6 * self.matrix_parameters * sum(lengths) + 12 * pairs

    def tflops(self, tokens: int, seconds: float) -> float:
        """6 x all trained parameters x tokens / seconds, in TFLOP/s."""
        return 6 * self.parameters * tokens / seconds / 1e12

    def mfu(self, lengths: Iterable[int], seconds: float, gpu_name: str | None) -> float | None:
        """Share of the GPU's peak, 0 to 1; None where the peak is unknown, as on a CPU."""
        peak = peak_tflops(gpu_name)
        return None if peak is None else self.flops(lengths) / seconds / (peak * 1e12)


def _matrix_parameters(anatomy: Anatomy) -> int:
    """Elements of multiplied matrices: an embedding is only looked up, unless the head is tied."""
    tied_to = {owner for _, owner in anatomy.tied}
    first, *others = anatomy.blocks
    matrices = [tensor for block in others for tensor in block.layout.tensors]
    matrices += [tensor for tensor in first.layout.tensors if tensor.name in tied_to]
    return sum(tensor.numel for tensor in matrices if len(tensor.shape) > 1)


def _windows(config: PretrainedConfig, layers: int) -> list[int | None]:
    """Each layer's sliding window; `layer_types` names the layers that slide, where not all do."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
