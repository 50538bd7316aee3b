"""The routers' balancing loss over a whole step, exactly transformers' own, and experts' loads.

coefficient * E * sum over experts e of f_e * P_e, where f_e is the number of choices that fell on e
and P_e the sum of e's probabilities, each over the number of rows: a row is a token in a layer, and
all layers and all tokens of the step are pooled (Fedus et al., JMLR 2022, equations 4 to 6). f has
no gradient. So the forward sweep counts, and logits receive their gradient in backward. It belongs
to the mean loss: 1/targets does not scale it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from megatrain.engine.batches import MicroBatch
from megatrain.engine.objective import Peers
from megatrain.errors import ConfigError
from megatrain.models.meta import blank_call, without_data
from megatrain.models.recorder import kind_of
from megatrain.models.skeleton import UNSUPPORTED, Skeleton
from megatrain.models.transforms.chunked import chunks_of
from megatrain.models.trials.probe import graph_of
from megatrain.settings import ROUTER_AUX_LOSS_COEF

# -- routers: where transformers reads their logits for its balancing loss ------------------------

# Found by what transformers records and by a run on the meta device, not by a family's name.

ROWS, TOKENS = 1, 3  # of the try-out
LOSS = "load_balancing_loss_func"  # what transformers calls it in every family that has it


class LogitsPlace(NamedTuple):
    """The position of logits in a router's output, counted in a tuple of tensors, and what carries
    their gradient: a part of the output that the layer's own output is computed from."""

    logits: int
    carrier: int


@dataclass(frozen=True)
class Routers:
    """All routers of a model."""

    modules: tuple[tuple[int, nn.Module], ...]  # at most one a layer, with the layer's index
    experts: int  # that a router chooses from, all of one number
    chosen: int  # experts for each token
    place: LogitsPlace


def find_routers(skeleton: Skeleton) -> Routers | None:
    """A model's routers, before it is bound; None: transformers balances none, or not by logits."""
    recorded, model = _recorded(skeleton.model), skeleton.model
    if recorded is None or LOSS not in vars(sys.modules[type(model).__module__]):
        return None
    text = skeleton.config.get_text_config()
    chosen = getattr(model, "num_experts_per_tok", getattr(text, "num_experts_per_tok", None))
    modules = tuple(
        (index, module)
        for index, layer in enumerate(skeleton.layers)
        for name, module in layer.named_modules()
        if isinstance(module, recorded.target_class) and (recorded.layer_name or "") in name
    )
    widths = set(_tried_out(skeleton, dict(modules), recorded.index))
    if type(chosen) is not int or len(widths) != 1 or None in widths:
        return None
    ((experts, place),) = (found for found in widths if found)
    return Routers(modules, experts, chosen, place) if chosen <= experts else None


def _tensors_of(output: Any) -> tuple[Any, ...]:
    """A module's output as a tuple."""
    return output if isinstance(output, tuple) else (output,)


def _recorded(model: nn.Module) -> Any:
    """transformers' note of which modules return router logits; None if there is no single one."""
    from transformers.utils.output_capturing import OutputRecorder

    for module in model.modules():
        if note := (getattr(module, "_can_record_outputs", None) or {}).get("router_logits"):
            note = note if isinstance(note, OutputRecorder) else OutputRecorder(note)
            many: bool = isinstance(note.target_class, (list, tuple))
            return None if many else note
    return None


def _tried_out(
    skeleton: Skeleton, routers: dict[int, nn.Module], index: int
) -> Iterator[tuple[int, LogitsPlace] | None]:
    """(number of experts, place) of every kind of layer with a router; None for one whose router
    does not run once, or whose logits have another form or no gradient."""
    hidden, calls = skeleton.dry_call(ROWS, TOKENS)
    kinds = set()
    for number, module in routers.items():
        layer, call = skeleton.layers[number], calls[number]
        if (kind := kind_of(layer, call, number)) in kinds:
            continue
        kinds.add(kind)
        outputs: list[tuple[Any, ...]] = []
        forward, _ = blank_call(layer, (ROWS, TOKENS, hidden.shape[-1]), skeleton.dtype, call)
        noted = module.register_forward_hook(lambda *seen: outputs.append(_tensors_of(seen[2])))  # noqa: B023
        try:
            with noted, without_data(), torch.enable_grad():
                yield _found(forward(), outputs, index)
        except UNSUPPORTED:  # it cannot run without data
            yield None


def _found(
    hidden: Tensor, outputs: list[tuple[Any, ...]], index: int
) -> tuple[int, LogitsPlace] | None:
    """The result that `_tried_out` wants of a layer that has returned `hidden`."""
    if len(outputs) != 1 or len(outputs[0]) <= index:
        return None
    logits, used = outputs[0][index], graph_of(hidden)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != ROWS * TOKENS:
        return None
    carriers = [
        place
        for place, part in enumerate(outputs[0])
        if isinstance(part, Tensor) and part.requires_grad and part.grad_fn in used
    ]
    # the logits themselves last: most layers drop them
    carriers.sort(key=lambda place: place == index)
    return (logits.shape[-1], LogitsPlace(index, carriers[0])) if carriers else None


# -- balancing -------------------------------------------------------------------------------------

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
        balancer.real = every[: len(_tensors_of(output)[balancer.place.logits])]

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
        parts = _tensors_of(output)
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
