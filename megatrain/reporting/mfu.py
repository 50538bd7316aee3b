"""The arithmetic of a step, and its share of the GPU's peak: the figures `tflops` and `mfu`.

Two conventions, and both are reported. `tflops` is 6 x active parameters x tokens / seconds, the
figure that training systems are compared by. `mfu` (model FLOP utilisation, Chowdhery et al.
2022, PaLM, appendix B) counts what the GPU has to multiply: matmuls and causal attention, neither
the embedding's lookup nor recomputation, over the GPU's peak dense bf16 rate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from transformers import PretrainedConfig

from megatrain.machine.datasheets import peak_tflops
from megatrain.memory.layout import TensorSpec
from megatrain.models.anatomy import Anatomy
from megatrain.models.family import layer_configs
from megatrain.models.freezing import counted_parameters

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")  # not "linear_attention"


@dataclass(frozen=True)
class CausalAttention:
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
    """A model's arithmetic: the FLOP of one step over sequences, forward and backward."""

    # all trained ones but those of idle experts, and frozen ones by the matmuls that they take
    active_parameters: int
    matrix_parameters: int  # of these, the ones that a token is multiplied with
    attention: tuple[CausalAttention, ...]  # one per decoder layer
    first_trained: int = 0  # block: attention has no backward in layers before it
    image_flops: float = 0.0  # a token: of what only images use, by the plan's share of them

    @classmethod
    def of(
        cls,
        anatomy: Anatomy,
        config: PretrainedConfig,
        idle: int,
        seeing: Collection[str] = (),
        image_flops: float = 0.0,
    ) -> ModelFlops:
        """From a model's blocks and configuration. idle: parameters of experts that are not a
        token's own (planner/cost/shape.py). seeing: names of what only images use."""
        attention = tuple(_attention(config, anatomy.layers))
        owners = {owner for _, owner in anatomy.tied}

        def acts(tensor: TensorSpec, block: int) -> bool:
            return tensor.name not in seeing

        def multiplied(tensor: TensorSpec, block: int) -> bool:
            """An embedding is looked up, unless the head is tied; experts' biases are added."""
            looked_up = block == anatomy.embed.index and tensor.name not in owners
            matrix = len(tensor.shape) > 1 and not tensor.name.endswith("bias")
            return matrix and not looked_up and acts(tensor, block)

        every, matrices = (
            counted_parameters(anatomy, idle, wanted) for wanted in (acts, multiplied)
        )
        return cls(every, matrices, attention, anatomy.first_trained, image_flops)

    def flops(self, lengths: Iterable[int]) -> int:
        """FLOP of forward and backward over sequences of these lengths, nothing computed twice. A
        parameter costs a multiplication and an addition per token forward, twice that backward; a
        (query, key) pair two matmuls of `width` forward (scores, values), twice that backward."""
        lengths = list(lengths)
        pairs = sum(
            layer.width * layer.pairs(length) * (3 if block >= self.first_trained else 1)
            for block, layer in enumerate(self.attention, start=1)
            for length in lengths
        )
        each = 6 * self.matrix_parameters + round(self.image_flops)
        return each * sum(lengths) + 4 * pairs

    def tflops(self, tokens: int, seconds: float) -> float:
        """6 x active parameters x tokens / seconds, in TFLOP/s, with the work of images."""
        return (6 * self.active_parameters + self.image_flops) * tokens / seconds / 1e12

    def mfu(self, lengths: Iterable[int], seconds: float, gpu_name: str | None) -> float | None:
        """Share of the GPU's peak, 0 to 1; None where the peak is unknown, as on a CPU."""
        peak = peak_tflops(gpu_name)
        return None if peak is None else self.flops(lengths) / seconds / (peak * 1e12)


def _attention(config: PretrainedConfig, layers: int) -> Iterator[CausalAttention]:
    """Each layer's; `layer_types` names those that slide, and recurrent ones, which have none."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    for kind, of_layer in zip(kinds, layer_configs(config, len(kinds)), strict=True):
        heads = int(getattr(of_layer, "num_attention_heads", None) or 0)
        width = int(getattr(of_layer, "head_dim", 0) or (heads and config.hidden_size // heads))
        attends = kind == "attention" or kind.endswith(ATTENTION)
        window = getattr(of_layer, "sliding_window", None)
        slides = kind == "sliding_attention"
        yield CausalAttention(heads * width * attends, window if slides else None)
