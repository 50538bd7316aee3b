"""What torch.compile makes of a layer: the activations it keeps for the backward pass, its traffic with memory, and what lives there.

It can be made to keep less (decision 0013). To know the figures nothing is compiled: the layer is traced on the meta device, forward and
backward at once, and cut in two by the same code of torch that cuts it for the real compiler. What the cut keeps is exact; kernels, their
traffic and what lives meanwhile are estimates, by a simple rule of fusion.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from megatrain.errors import ConfigError
from megatrain.models.footprint import FusedAttention, additive
from megatrain.models.recorder import LayerCall
from megatrain.models.skippable import skipping
from megatrain.models.traced import Alive, alive, keeps_input, saved_bytes, traffic
from megatrain.models.work import Traffic

aten = torch.ops.aten


# By default torch keeps whatever a product of the backward pass reads. Without these bans it still keeps all that does not fuse, such as
# products and attention, but of what lies between only as much as the rest can be computed from.
CHEAP_RETENTION = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
}


@dataclass(frozen=True)
class CompiledLayer:
    """A compiled layer. `saved_bytes` lie between forward and backward of the rows that were traced, beyond inputs, weights and output."""

    saved_bytes: int
    forward: Traffic
    backward: Traffic
    cheap_saved_bytes: int  # with cheap retention
    cheap_backward: Traffic
    keeps_input: bool
    cheap_keeps_input: bool
    again: Alive  # where it is run for its gradients alone
    beyond: Alive  # where it was retained, beyond what its graph holds
    cheap_beyond: Alive


@contextmanager
def naming_the_compiler() -> Iterator[None]:
    """Turn torch.compile's failure into our error, which says how to do without. Memory that ran out meanwhile stays what it is."""
    try:
        yield
    except RuntimeError as error:
        exceptions: Any = sys.modules.get("torch._dynamo.exc")  # there only once something was compiled
        if exceptions is None or not isinstance(error, exceptions.TorchDynamoException):
            raise
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, torch.OutOfMemoryError):
            raise inner from error
        reason = (str(inner).strip().splitlines() or [type(inner).__name__])[0]
        raise ConfigError(
            f"compile: torch.compile could not compile the model's layers on this machine ({reason}); set compile: false"
        ) from error


@dataclass(frozen=True)
class Inductor:
    """A backend of torch.compile: inductor, whose graphs are found again only where attention's kernels are tried in the same order.

    They are chosen while a layer is traced, and neither the process nor the cache on disk asks by which order. Graphs of equal backends
    are shared. https://github.com/pytorch/pytorch/issues/185449

    lengths_vary: which order, as `fastest_attention` knows it.
    cheap: graphs keep only what products and attention need.
    """

    lengths_vary: bool = False
    cheap: bool = False

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx
        from torch.compiler import config

        tag = f"{config.cache_key_tag} lengths_vary={self.lengths_vary}"
        with config.patch(cache_key_tag=tag), cheap_retention() if self.cheap else nullcontext():  # type: ignore[attr-defined]
            compiled: Any = compile_fx(graph, inputs)
        return compiled  # type: ignore[no-any-return]


def cheap_retention() -> AbstractContextManager[None]:
    """Graphs that are cut while it lasts keep as little as `CHEAP_RETENTION` allows."""
    from torch._functorch import config

    return config.patch(CHEAP_RETENTION)  # type: ignore[no-any-return]


def trace_compiled(
    layer: nn.Module,
    hidden_shape: tuple[int, int, int],
    dtype: torch.dtype,
    call: LayerCall,
    *,
    fused_attention: bool,
    runs_on: str,
    skipped: Sequence[str] = (),
) -> CompiledLayer | None:
    """What torch.compile would make of a decoder layer. None if it cannot be traced whole, because what it computes depends on values.

    layer: parameters on any device; only shapes are read. hidden_shape: (batch, tokens, hidden). dtype: of parameters and hidden states.
    call: what the layer receives besides hidden states. fused_attention: False for eager attention. runs_on: "cpu" or "cuda".
    skipped: modules whose products are left out when it is run for its gradients alone (models/skippable.py).
    """
    rows = hidden_shape[0]
    function, inputs = _as_function(layer, hidden_shape, dtype, call)
    with torch.random.fork_rng(devices=[]), FusedAttention(runs_on, _traced_attention) if fused_attention else nullcontext():
        try:
            (forward, backward), (cheap_forward, cheap_backward) = _cut(function, inputs)
            with skipping(layer, skipped):
                again = _cut(function, inputs)[0] if skipped else (forward, backward)
        except (RuntimeError, NotImplementedError):
            return None
    saved, cheap_saved = saved_bytes(forward), saved_bytes(cheap_forward)
    return CompiledLayer(
        saved,
        traffic(forward),
        traffic(backward),
        cheap_saved,
        traffic(cheap_backward),
        keeps_input(forward),
        keeps_input(cheap_forward),
        again=alive(*again, rows, runs_on),
        beyond=alive(forward, backward, rows, runs_on).beyond(saved // rows),
        cheap_beyond=alive(cheap_forward, cheap_backward, rows, runs_on).beyond(cheap_saved // rows),
    )


# -- tracing ------------------------------------------------------------------------------------------------------------------------


def _as_function(
    layer: nn.Module, hidden_shape: tuple[int, int, int], dtype: torch.dtype, call: LayerCall
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The layer as a function of tensors alone, and such tensors: hidden states, weights, buffers, and those of the call."""
    weights, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    names = [*weights, *buffers]
    inputs = [torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)]
    inputs += [torch.empty_like(p, dtype=dtype, device="meta", requires_grad=p.requires_grad) for p in weights.values()]
    inputs += [torch.empty_like(tensor, device="meta") for tensor in (*buffers.values(), *(leaves[i] for i in places))]

    def function(hidden: Tensor, *tensors: Tensor) -> Tensor:
        filled = list(leaves)
        for place, tensor in zip(places, tensors[len(names) :], strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, structure)
        out = torch.func.functional_call(layer, dict(zip(names, tensors, strict=False)), (hidden, *args), kwargs)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return function, inputs


def _cut(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[tuple[fx.Graph, fx.Graph], tuple[fx.Graph, fx.Graph]]:
    """The graphs of forward and backward as torch.compile would hand them to its code generator, and those of cheap retention."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    pairs: list[tuple[fx.Graph, fx.Graph]] = []
    weights = [place for place, tensor in enumerate(inputs) if place and tensor.requires_grad]

    def cut(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        options["static_lifetime_input_indices"] = weights  # as dynamo says of parameters: keeping one costs nothing
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **options)
        pairs.append((forward.graph, backward.graph))
        return forward, backward

    def cut_twice(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        halves = cut(joint, joint_inputs, **options)
        with cheap_retention():
            cut(joint, joint_inputs, **options)
        return halves

    def as_it_is(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        return gm

    fake = FakeTensorMode(allow_non_fake_inputs=True)  # some layers make small tensors of their own
    traced = aot_function(function, as_it_is, as_it_is, cut_twice, decompositions=select_decomp_table())
    traced(*[fake.from_tensor(tensor) for tensor in inputs])
    full, cheap = pairs
    return full, cheap


def _traced_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> Tensor:
    """Takes the arguments of scaled_dot_product_attention. Every fused kernel keeps the same tensors; this one takes any mask."""
    out: Tensor = aten._scaled_dot_product_cudnn_attention(query, key, value, additive(attn_mask, query), True, dropout_p, is_causal)[0]
    return out
