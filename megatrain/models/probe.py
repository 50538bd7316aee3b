"""One dry run of a weightless model that finds out how its family is put together, and refuses what cannot be streamed exactly.

Streaming is right only if layers exchange nothing but hidden states, and if every other parameter is used either before the first layer
or after the last. Both are observed here rather than assumed: the model's own forward runs on a few tokens, with spies for layers.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatrain.errors import ModelError
from megatrain.models.recorder import LayerCall, split_hidden

PROBE_TOKENS = 4


@dataclass
class Findings:
    """What the dry run observed."""

    returns_tuple: bool = False  # the layers return (hidden, None, ...) instead of hidden
    before: list[str] = field(default_factory=list)  # parameters used before layer 0, in order of use
    after: list[str] = field(default_factory=list)  # parameters used after the last layer, in order of use


class Spy(nn.Module):
    """Stands in for a layer during the probe and checks what the model hands from layer to layer."""

    def __init__(self, layer: nn.Module, index: int, probe: Probe) -> None:
        super().__init__()
        self.__dict__["layer"] = layer
        self.index = index
        self.__dict__["probe"] = probe

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["probe"].visit(self.index, self.__dict__["layer"], *split_hidden(args, kwargs))


class Probe:
    """The state of one dry run over `model`, whose decoder stack is `layers`."""

    def __init__(self, model: nn.Module, layers: nn.ModuleList) -> None:
        self.model = model
        self.family = type(model).__name__
        self.originals = list(layers)
        self.layers = layers
        self.findings = Findings()
        self.entered: torch.Tensor | None = None  # what layer 0 received
        self.passed_on: torch.Tensor | None = None  # what the previous layer returned
        self.visited = 0

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.family} cannot be streamed exactly: {reason}")

    def visit(self, index: int, layer: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check one layer call, and return the hidden states unchanged in the form in which the layer would."""
        if index != self.visited:
            raise self.refuse(f"its layers do not run once each in order (layer {index} ran as number {self.visited})")
        if index > 0 and hidden is not self.passed_on:
            raise self.refuse(f"the model changes the hidden states between layers {index - 1} and {index}")
        received = pytree.tree_flatten_with_path((args, kwargs), is_leaf=is_open_container)[0]
        for path, value in received:
            name = pytree.keystr(path[1:])
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise self.refuse(f"layer {index} receives {name}, which needs a gradient besides the hidden states")
            if "Cache" in type(value).__name__:
                raise self.refuse(f"layer {index} receives a key-value cache ({name}) although none was asked for")
        containers = {pytree.keystr(path[1:]): value for path, value in received if is_open_container(value)}
        output = self.try_out(layer, hidden, LayerCall(args, kwargs)) if index == 0 or containers else None
        filled = [name for name, container in containers.items() if len(container)]
        if filled:
            raise self.refuse(f"layer {index} puts something into {filled[0]}, where other layers could find it")
        if index == 0:
            self.entered = hidden
            self.findings.returns_tuple = self.returns_tuple(output)
        self.visited += 1
        self.passed_on = hidden.clone()
        if self.visited == len(self.originals):  # cut off, so that whatever else the model's end uses shows in its graph
            self.passed_on = self.passed_on.detach().requires_grad_()
        return (self.passed_on,) if self.findings.returns_tuple else self.passed_on

    def try_out(self, layer: nn.Module, hidden: torch.Tensor, call: LayerCall) -> Any:
        """What the real layer returns on the meta device, where it costs nothing.

        In bfloat16 whatever the model's dtype: on meta, torch knows the grouped matrix product (mixtures of experts) in no other.
        """
        twin = copy.deepcopy(layer).to("meta", torch.bfloat16)
        inputs = to_meta((hidden, call.args, call.kwargs), torch.bfloat16)
        try:
            output = twin(inputs[0], *inputs[1], **inputs[2])
        except Exception as error:  # whatever a layer's code raises on tensors without data
            raise self.refuse(f"its layer {type(layer).__name__} cannot run without data ({type(error).__name__}: {error})") from error
        used = {id(node.variable) for node in graph_of(output) if is_leaf(node)}
        idle = [name for name, parameter in twin.named_parameters() if id(parameter) not in used]
        if idle:  # a plain optimizer leaves these alone, ours would let them decay
            raise self.refuse(f"{idle[0]} of its layer {type(layer).__name__} takes no part in what the layer returns")
        return output

    def returns_tuple(self, output: Any) -> bool:
        """The form of a layer's output: True for (hidden states, None, ...), False for hidden states alone."""
        if isinstance(output, torch.Tensor):
            return False
        if not isinstance(output, tuple) or any(isinstance(extra, torch.Tensor) for extra in output[1:]):
            raise self.refuse("its layers return more than hidden states")
        return True

    def note_use(self, names: list[str], _module: nn.Module, _args: Any) -> None:
        used = self.findings.before if self.visited == 0 else self.findings.after
        used.extend(name for name in names if name not in used)

    def run(self) -> Findings:
        """Run the model's forward on PROBE_TOKENS tokens with spies for layers."""
        handles = []
        for path, module in self.model.named_modules():
            names = [f"{path}.{leaf}" if path else leaf for leaf, p in module._parameters.items() if p is not None]
            if names and not any(module is inner for layer in self.originals for inner in layer.modules()):
                handles.append(module.register_forward_pre_hook(partial(self.note_use, names)))
        replace_all(self.layers, [Spy(layer, i, self) for i, layer in enumerate(self.originals)])
        try:
            with torch.enable_grad():
                output = self.model(input_ids=torch.zeros(1, PROBE_TOKENS, dtype=torch.long), use_cache=False)
        except ModelError:
            raise
        except Exception as error:  # whatever a family's code does with layers that are not its own
            raise self.refuse(f"its forward does not run with stand-ins for its layers ({type(error).__name__}: {error})") from error
        finally:
            replace_all(self.layers, self.originals)
            for handle in handles:
                handle.remove()
        if self.visited != len(self.originals):
            raise self.refuse(f"only {self.visited} of its {len(self.originals)} layers ran")
        shared = graph_of(self.entered) & graph_of(output)
        if not all(is_leaf(node) for node in shared):  # a tied parameter may be used at both ends
            raise self.refuse("what follows its last layer uses more than that layer's output")
        return self.findings


def replace_all(stack: nn.ModuleList, modules: Sequence[nn.Module]) -> None:
    """Put `modules` in the places of a stack, one for one."""
    for index, module in enumerate(modules):
        stack[index] = module


def is_open_container(value: Any) -> bool:
    """Whether a layer could leave something here: an empty list or dictionary, or a dictionary of a kind of its own."""
    return isinstance(value, (MutableMapping, MutableSequence)) and (not len(value) or not isinstance(value, (dict, list)))


def graph_of(tree: Any) -> set[Any]:
    """The autograd nodes behind all tensors of a nested structure, down to those that accumulate a parameter's gradient."""
    found: set[Any] = set()
    ahead = [leaf.grad_fn for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead += [before for before, _ in node.next_functions]
    return found


def is_leaf(node: Any) -> bool:
    """Whether an autograd node stands for a parameter; its `variable` is the parameter then."""
    return node.name() == "torch::autograd::AccumulateGrad"  # type: ignore[no-any-return]


def to_meta(tree: Any, floats: torch.dtype | None = None) -> Any:
    """Every tensor of a nested structure on the meta device: shapes and dtypes without data; floating-point ones as `floats`, if given.

    Containers that a layer could fill stay the same objects.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("meta", floats if tensor.is_floating_point() else None)

    return pytree.tree_map_only(torch.Tensor, moved, tree, is_leaf=is_open_container)


@contextmanager
def zeros_outside(model: nn.Module, layers: list[nn.Module]) -> Iterator[None]:
    """Give the parameters outside the layers real, all-zero CPU memory while the context lasts. Nobody may write to it.

    They share one anonymous mapping that is never written, so the operating system backs all of it by its page of zeros
    (torch.zeros would write them: gigabytes for a large vocabulary).
    """
    inside = {id(p) for layer in layers for p in layer.parameters()}
    places = [(m, leaf, p) for m in model.modules() for leaf, p in m._parameters.items() if p is not None and id(p) not in inside]
    zeros = torch.frombuffer(
        mmap.mmap(-1, max((p.nbytes for _, _, p in places), default=1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    )
    stand_ins = {id(p): nn.Parameter(zeros[: p.nbytes].view(p.dtype).view(p.shape)) for _, _, p in places}  # one for tied parameters
    for module, leaf, parameter in places:
        module._parameters[leaf] = stand_ins[id(parameter)]
    try:
        yield
    finally:
        for module, leaf, parameter in places:
            module._parameters[leaf] = parameter


def probe(model: nn.Module, layers: nn.ModuleList) -> Findings:
    """How `model` is put together.

    Raises:
        ModelError: naming the family and the reason for which streaming it would not be exact.
    """
    was_training = model.training
    model.eval()
    try:
        with zeros_outside(model, list(layers)):
            return Probe(model, layers).run()
    finally:
        model.train(was_training)
