"""How much arithmetic a step is, and how much of it the GPU could do: the figures `tflops` and `mfu`.

Two conventions, and both are reported. `tflops` is 6 x all trained parameters x tokens / seconds, the figure that training systems are
compared by. `mfu` (model FLOP utilisation, Chowdhery et al. 2022, PaLM, appendix B) counts what the GPU has to multiply: matrix products
and causal attention, neither the embedding's lookup nor recomputation, over the GPU's peak dense bf16 rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megatrain.models.anatomy import Anatomy

# Peak dense bf16 products with fp32 accumulation, TFLOP/s, from NVIDIA's data sheets and architecture papers (without sparsity).
# The first row whose words all occur in the device's name counts, so variants come before the plain name.
PEAK_BF16_TFLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 PCIe", 756.4),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("A100", 312.0),
    ("L40S", 362.1),
    ("L4", 121.0),
    ("A10", 125.0),
    ("RTX 6000 Ada", 364.2),
    ("RTX A6000", 154.8),
    ("RTX 5090", 209.5),
    ("RTX 5080", 112.6),
    ("RTX 4090", 165.2),
    ("RTX 4080 SUPER", 104.4),
    ("RTX 4080", 97.5),
    ("RTX 3090 Ti", 80.0),
    ("RTX 3090", 71.0),
    ("RTX 3080 Ti", 68.2),
    ("RTX 3080", 59.5),
)


def peak_tflops(gpu_name: str | None) -> float | None:
    """Peak dense bf16 TFLOP/s of a GPU by the name its driver gives, or None for one that the table lacks."""
    words = set((gpu_name or "").replace("-", " ").split())
    if "Laptop" in words:  # the same names, but the rate follows the case it was built into
        return None
    for name, peak in PEAK_BF16_TFLOPS:
        if words.issuperset(name.split()):
            return peak
    return None


@dataclass(frozen=True)
class Attention:
    """The attention of one decoder layer: `width` is heads x head size, `window` the sliding window in tokens, if there is one."""

    width: int
    window: int | None = None

    def pairs(self, length: int) -> int:
        """(query, key) pairs that a causal sequence of `length` tokens looks at."""
        if self.window is None or length <= self.window:
            return length * (length + 1) // 2
        return self.window * (self.window + 1) // 2 + (length - self.window) * self.window


@dataclass(frozen=True)
class Work:
    """A model's arithmetic: what one step over given sequences has to multiply, forward and backward."""

    parameters: int  # all trained ones
    matrix_parameters: int  # those that every token is multiplied with
    attention: tuple[Attention, ...]  # one per decoder layer

    @classmethod
    def of(cls, anatomy: Anatomy, config: PretrainedConfig) -> Work:
        """Read off a model's blocks and its configuration. Dense decoders only: a mixture's idle experts would be counted."""
        attention = tuple(Attention(_attention_width(config), window) for window in _windows(config, anatomy.layers))
        return cls(anatomy.parameters, _matrix_parameters(anatomy), attention)

    def flops(self, lengths: Iterable[int]) -> int:
        """Floating point operations of forward and backward over sequences of these lengths, nothing computed twice.

        A parameter costs a multiplication and an addition per token forward, and twice that backward; a (query, key) pair costs two
        products of `width` multiplications and additions forward (scores, values), and twice that backward.
        """
        lengths = list(lengths)
        pairs = sum(layer.width * layer.pairs(length) for layer in self.attention for length in lengths)
        return 6 * self.matrix_parameters * sum(lengths) + 12 * pairs

    def tflops(self, tokens: int, seconds: float) -> float:
        """6 x all trained parameters x tokens / seconds, in TFLOP/s."""
        return 6 * self.parameters * tokens / seconds / 1e12

    def mfu(self, lengths: Iterable[int], seconds: float, gpu_name: str | None) -> float | None:
        """Share of the GPU's peak, 0 to 1; None where the peak is unknown, as on a CPU."""
        peak = peak_tflops(gpu_name)
        return None if peak is None else self.flops(lengths) / seconds / (peak * 1e12)


def _matrix_parameters(anatomy: Anatomy) -> int:
    """Elements of all matrices that tokens are multiplied with: an embedding is only looked up, unless the head is tied to it."""
    tied_to = {owner for _, owner in anatomy.tied}
    first, *others = anatomy.blocks
    matrices = [tensor for block in others for tensor in block.layout.tensors]
    matrices += [tensor for tensor in first.layout.tensors if tensor.name in tied_to]
    return sum(tensor.numel for tensor in matrices if len(tensor.shape) > 1)


def _attention_width(config: PretrainedConfig) -> int:
    heads = int(config.num_attention_heads)
    return heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _windows(config: PretrainedConfig, layers: int) -> list[int | None]:
    """The sliding window of each layer. transformers names the layers that slide where not all do (`layer_types`)."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
