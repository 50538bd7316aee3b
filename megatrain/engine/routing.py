"""The routers' balancing loss over a whole step, exactly transformers' own, and experts' loads.

coefficient * E * sum over experts e of f_e * P_e, where f_e is the number of choices that fell on e
and P_e the sum of e's probabilities, each over the number of rows: a row is a token in a layer, and
all layers and all tokens of the step are pooled (Fedus et al., JMLR 2022, equations 4 to 6). f has
no gradient. So the forward sweep counts, and logits receive their gradient in backward. It belongs
to the mean loss: 1/targets does not scale it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatrain.engine.batches import MicroBatch
from megatrain.engine.objective import Peers
from megatrain.errors import ConfigError
from megatrain.models.routers import Routers, find_routers, tensors_of
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.chunked import chunks_of
from megatrain.settings import ROUTER_AUX_LOSS_COEF

KEY = "router_aux_loss_coef"
MOST_ROWS = 1 << 40  # more than a router on the meta device ever sees


def coefficient_of(skeleton: Skeleton, asked: Any, name: str = KEY) -> float:
    """The coefficient that holds: as asked; "auto": the usual one if the model has such routers.

    Raises ConfigError, which calls the option `name`.
    """
    if asked == "auto":
        return 0.0 if find_routers(skeleton) is None else ROUTER_AUX_LOSS_COEF
    number = isinstance(asked, (int, float)) and not isinstance(asked, bool)
    if not number or not 0 <= asked < math.inf:
        raise ConfigError(f"{name}: {asked!r} is out of range; give a number of at least 0 or auto")
    if asked:
        _routers_of(skeleton, name)
    return float(asked)


def balancer_of(skeleton: Skeleton, coefficient: float, groups: int) -> Balancer | None:
    """None if the coefficient is 0. Before layers are compiled: they run on the meta device."""
    if not coefficient:
        return None
    check_groups(coefficient, groups)
    return Balancer(_routers_of(skeleton, KEY), coefficient)


@contextmanager
def balanced_on_meta(skeleton: Skeleton, coefficient: float) -> Iterator[None]:
    """Let layers that run inside, on the meta device, save and compute what balancing adds."""
    if not coefficient:
        yield
        return
    balancer, meta = Balancer(_routers_of(skeleton, KEY), coefficient), torch.device("meta")
    every = torch.zeros(1, device=meta).expand(MOST_ROWS)

    def see_all(module: nn.Module, args: Any, output: Any) -> None:
        # a part of what is there already: micro-batches have their own, and layers share it
        balancer.real = every[: len(tensors_of(output)[balancer.place.logits])]

    with ExitStack() as resources, balancer.balancing():
        for _, module in balancer.routers.modules:
            resources.enter_context(module.register_forward_hook(see_all))
        balancer.open((), meta, resources)
        yield


def _routers_of(skeleton: Skeleton, name: str) -> Routers:
    if (found := find_routers(skeleton)) is None:
        raise ConfigError(
            f"{name}: transformers has no balancing loss for routers of "
            f"{skeleton.anatomy.family} models; set it to 0 or remove it"
        )
    return found


def check_groups(coefficient: float, groups: int | None, prefix: str = "", where: str = "") -> None:
    """Raise ConfigError for several groups: their layers run before all choices are counted."""
    if coefficient and groups is not None and groups > 1:
        name = where or f"{prefix}groups"
        raise ConfigError(
            f"{name}: the routers' balancing loss is over a whole step, so a step is one group; "
            f"set {prefix}groups: 1, or {prefix}{KEY}: 0"
        )


# why: decision 0069
class Balancer:
    """Counts the choices of a step's forward sweep, and gives the routers' logits their gradient.

    Attributes:
        sweep: the sweep of a step that runs now, if any.
        in_layer: choices of each expert in the layer that runs; exact below 2^24 of them.
        probabilities: of each expert, summed over the step.
        real: 1 for each row of the router that runs, 0 for padding.
        constants: tensors that graphs save and that are no part of them.
    """

    def __init__(self, routers: Routers, coefficient: float) -> None:
        self.routers, self.coefficient, self.place = routers, coefficient, routers.place
        self.sweep: Literal["", "forward", "backward"] = ""
        self._rows = 0

    def open(self, layers: Sequence[nn.Module], device: torch.device, resources: ExitStack) -> None:
        """Take memory and hook the routers, before the layers first run; `resources` unhooks."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        experts = self.routers.experts
        self.in_layer, self.probabilities = zeros(experts), zeros(experts)
        # what a row's probabilities are worth; read by graphs that were made before it is known
        self.worth = zeros(experts)
        self._micro_batch, self.real = zeros(0), zeros(0)
        self._of_layers: list[Tensor] = []  # choices of each expert, in the layers so far
        self._counts, self._largest = zeros(experts, dtype=torch.float64), zeros()
        for _, module in self.routers.modules:
            resources.enter_context(module.register_forward_hook(self._see))
        for chunks in filter(None, (chunks_of(m) for layer in layers for m in layer.modules())):
            chunks.entered = self._enter  # a router inside sees some of the tokens

    @property
    def constants(self) -> tuple[Tensor, ...]:
        return self.worth, self._micro_batch, self.real

    # -- a step ------------------------------------------------------------------------------------

    @contextmanager
    def balancing(self) -> Iterator[None]:
        """Count layers that run inside as a step's: of its backward until `begin`."""
        self.sweep = "backward"
        try:
            yield
        finally:
            self.sweep = ""

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The forward sweep begins."""
        self._of_layers.clear()
        for tensor in (self.in_layer, self.probabilities):
            tensor.zero_()
        self._rows = len(self.routers.modules) * sum(mb.real_tokens for mb in micro_batches)
        self.sweep = "forward"

    def look_at(self, mb: MicroBatch) -> None:
        """Let layers run on this micro-batch from now on."""
        assert mb.real is not None
        self._micro_batch = mb.real
        self._enter(None)

    def end_layer(self) -> None:
        """Count a layer, through which all micro-batches went forward."""
        self._of_layers.append(self.in_layer.clone())
        self.in_layer.zero_()

    def turn(self, peers: Peers) -> None:
        """End the forward sweep: count all ranks' choices. Waits for the device, unless alone."""
        self.sweep = "backward"
        of_layers = torch.stack(self._of_layers)
        if peers.several:
            mine = self._rows, of_layers.cpu(), self.probabilities.cpu()
            rows, chosen, probabilities = zip(*peers.all_gather(mine), strict=True)
            self._rows = sum(rows)
            of_layers = sum(chosen[1:], chosen[0]).to(of_layers.device)
            self.probabilities.copy_(sum(probabilities[1:], probabilities[0]))
        self._counts = of_layers.double().sum(0)
        means = of_layers.mean(1).clamp(min=1e-9)
        self._largest = (of_layers.amax(1) / means).max()
        worth = self._counts * (self.coefficient * self.routers.experts / self._square)
        self.worth.data.copy_(worth)  # not in place: graphs of retained layers have saved it

    def read(self) -> dict[str, Any]:
        """The last step's metrics, as in `StepResult`. Waits for the device."""
        pooled = (self._counts * self.probabilities).sum() * (self.routers.experts / self._square)
        return {"aux_loss": float(pooled), "expert_load_max": float(self._largest)}

    @property
    def _square(self) -> float:
        return float(max(1, self._rows)) ** 2

    # -- inside a layer, perhaps compiled ----------------------------------------------------------

    def _enter(self, part: slice | None) -> None:
        """Let the router that runs next see these of each sequence's tokens; None: all."""
        real = self._micro_batch
        self.real = (real if part is None else real[:, part]).reshape(-1)

    def _see(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A hook on every router, after its forward."""
        if not self.sweep:
            return None
        parts = tensors_of(output)
        logits = parts[self.place.logits]
        if self.sweep == "forward":
            self._count(logits.detach())
        if not torch.is_grad_enabled():
            return None
        carrier = Attached.apply(parts[self.place.carrier], logits, self.real, self.worth)  # type: ignore[no-untyped-call]
        if not isinstance(output, tuple):
            return carrier
        return *parts[: self.place.carrier], carrier, *parts[self.place.carrier + 1 :]

    def _count(self, logits: Tensor) -> None:
        """Add the choices and probabilities of logits [rows, experts]."""
        p, real = logits.float().softmax(-1), self.real.unsqueeze(1)
        best = p.topk(self.routers.chosen, -1).indices
        # as sums of ones: adding up at indices is in no fixed order on CUDA
        self.in_layer.add_((torch.zeros_like(p).scatter(1, best, 1.0) * real).sum(0))
        self.probabilities.add_((p * real).sum(0))


class Attached(torch.autograd.Function):
    """The carrier unchanged; in backward the logits get the gradient of
    sum over rows and experts of real * softmax(logits) * worth.

    Shapes: logits [rows, experts]; real [rows]; worth [experts]; the carrier's is any.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, logits: Tensor, real: Tensor, worth: Tensor) -> Tensor:
        ctx.save_for_backward(logits, real, worth)
        return carrier.clone()  # layers may write over it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        logits, real, worth = ctx.saved_tensors
        p = logits.float().softmax(-1)
        pulled = p * (worth - (p * worth).sum(-1, keepdim=True)) * real.unsqueeze(1)
        return grads[0], pulled.to(logits.dtype), None, None
