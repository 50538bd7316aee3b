"""Refuses models that cannot be streamed exactly.

Layers must exchange nothing but hidden states, and every other parameter must be used either before
the first layer or after the last, or not at all. All is observed, not assumed: the model's own
forward runs on a few tokens without weights, with spies in place of its layers, and for a model
that is to see once more on a row with an image. A layer of each kind is tried out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatrain.errors import ModelError
from megatrain.models.constants import (
    OF_TEXT,
    kept_tensors,
    largest_modules,
    persistent_buffers,
    poison,
    trains,
)
from megatrain.models.meta import is_open_container, on_meta, to_meta, zeros_outside
from megatrain.models.recorder import (
    Discarding,
    LayerCall,
    StandIn,
    UnusedOutputUsed,
    form_output,
    kind_of,
    of_dtype,
    split_hidden,
)

PROBE_TOKENS = 4
# Names of the modules between a tower and the language model. Mergers for single layers of a tower
# belong to that, as in other trainers.
PROJECTOR = re.compile(
    r"projector|(?<!deepstack_)(?<!vit_)merger|connector|aligner|newline|(vision|text)_projection|"
    "embed_vision|vision_embed_tokens|visual_embeddings_table"
)


@dataclass
class Findings:
    """The composition of a model, by names of parameters and persistent buffers. Those outside
    the layers are in order of use, those inside begin with the layer's index."""

    # Number of values that layers return beside the hidden states, in a tuple; None: no tuple.
    extras: int | None = None
    before: list[str] = field(default_factory=list)  # used before layer 0
    after: list[str] = field(default_factory=list)  # used after the last layer
    idle: list[str] = field(default_factory=list)  # in layers, without part in what these return
    unused: list[str] = field(default_factory=list)  # used nowhere
    kernels: bool = False  # layers compute with those of a package beside transformers
    of_images: frozenset[str] = frozenset()  # arguments of the forward that tell of images
    sides: bool = False  # features of images are added between layers
    seeing: frozenset[str] = frozenset()  # names of what only images use
    towers: tuple[str, ...] = ()  # patterns of that, but for projectors
    tower_layers: list[nn.Module] = field(default_factory=list)  # modules in lists of it


def probe_model(
    model: nn.Module, layers: nn.ModuleList, image_row: Mapping[str, torch.Tensor] | None = None
) -> Findings:
    """Find the composition of `model`, or raise ModelError; poison what it leaves out.

    image_row: arguments of its forward, of a row with an image; what these reach is used, too.
    """
    was_training = model.training
    model.eval()
    try:
        with zeros_outside(model, list(layers)):
            findings = Probe(model, layers).run()
            if image_row is not None:
                image_row = {k: of_dtype(v, model.dtype) for k, v in image_row.items()}  # type: ignore[arg-type]
                seeing = Probe(model, layers, image_row).run()
                findings.before = [*dict.fromkeys((*findings.before, *seeing.before))]
                new = [n for n in findings.before if n in set(findings.unused)]
                paths = largest_modules(model, [n for n in new if not PROJECTOR.search(n)])
                findings.towers = tuple(p if p in new else f"{p}.*" for p in paths)
                findings.seeing = frozenset(new)
                findings.tower_layers = in_lists(model, new, layers)
                findings.unused = [n for n in findings.unused if n not in set(findings.before)]
                findings.sides = seeing.sides
                findings.of_images = frozenset(image_row) - {*OF_TEXT}
        poison(model, findings.unused)
        return findings
    finally:
        model.train(was_training)


class Spy(StandIn):
    """Reports the calls of a layer to the probe."""

    def __init__(self, layer: nn.Module, index: int, probe: Probe) -> None:
        super().__init__(layer, index)
        self.__dict__["probe"] = probe

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["probe"].visit(self.index, self.layer, *split_hidden(args, kwargs))


class Probe:
    """The state of one forward of `model`, whose decoder stack is `layers`."""

    def __init__(
        self,
        model: nn.Module,
        layers: nn.ModuleList,
        image_row: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.model, self.image_row = model, image_row
        self.family = type(model).__name__
        self.originals = list(layers)
        self.layers = layers
        self.findings = Findings()
        self.entered: torch.Tensor | None = None  # what layer 0, or with images the last, received
        self.passed_on: torch.Tensor | None = None  # what the previous layer returned
        self.visited = 0
        self.idle_in: dict[Any, list[str]] = {}  # names of idle parameters, by kind of layer

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.family} cannot be streamed exactly: {reason}")

    def run(self) -> Findings:
        """Run the model's forward on PROBE_TOKENS tokens, or on the row with an image."""
        inside = {module for layer in self.originals for module in layer.modules()}
        handles, kept = [], kept_tensors(self.model)
        for path, module in self.model.named_modules():
            leaves = [leaf for leaf, p in module._parameters.items() if p is not None]
            leaves += persistent_buffers(module)
            if leaves and module not in inside:
                names = [f"{path}.{leaf}" if path else leaf for leaf in leaves]
                handles.append(module.register_forward_pre_hook(partial(self.note_use, names)))
        replace_all(self.layers, [Spy(layer, i, self) for i, layer in enumerate(self.originals)])
        given = self.image_row or {"input_ids": torch.zeros(1, PROBE_TOKENS, dtype=torch.long)}
        try:
            with torch.enable_grad():
                output = self.model(**given, use_cache=False)
        except UnusedOutputUsed as error:
            raise self.refuse(str(error)) from error
        except ModelError:
            raise
        except Exception as error:  # whatever a family's code does with layers not its own
            raise self.refuse(
                "its forward does not run with stand-ins for its layers "
                f"({type(error).__name__}: {error})"
            ) from error
        finally:
            replace_all(self.layers, self.originals)
            for handle in handles:
                handle.remove()
        if self.visited != len(self.originals):
            raise self.refuse(f"only {self.visited} of its {len(self.originals)} layers ran")
        # a model hands features of images out beside its logits
        into = graph_of(self.entered)
        out_of = graph_of(output if self.image_row is None else output.logits)
        if not all(map(is_leaf, into & out_of)):  # a tied parameter may be used at both ends
            raise self.refuse("what follows its last layer uses more than that layer's output")
        self.sort_out({id(node.variable) for node in into | out_of if is_leaf(node)}, kept)
        if self.image_row is not None:  # towers use some without their modules' own forward
            before = self.findings.before
            reached = {id(node.variable) for node in into if is_leaf(node)}
            reached -= {id(kept[name]) for name in before}
            before += {id(t): name for name, t in kept.items() if id(t) in reached}.values()
        return self.findings

    def sort_out(self, reached: set[int], kept: dict[str, torch.Tensor]) -> None:
        """Find what neither gradients (`reached`, by id) nor, untrained, a forward has touched."""
        found, seen = self.findings, (*self.findings.before, *self.findings.after)
        used = reached | {id(kept[name]) for name in seen if not trains(kept[name])}
        inside = {id(t) for layer in self.originals for t in kept_tensors(layer).values()}
        found.unused = [name for name, t in kept.items() if id(t) not in used | inside]
        for names in (found.before, found.after):
            names[:] = [name for name in names if id(kept[name]) in used]

    def note_use(self, names: list[str], _module: nn.Module, _args: Any) -> None:
        used = self.findings.before if self.visited == 0 else self.findings.after
        used.extend(name for name in names if name not in used)

    def visit(self, index: int, layer: nn.Module, hidden: torch.Tensor, call: LayerCall) -> Any:
        """Check one layer call; return the hidden states unchanged, in the form the layer uses."""
        if index != self.visited:
            raise self.refuse(
                "its layers do not run once each in order "
                f"(layer {index} ran as number {self.visited})"
            )
        if index > 0 and hidden is not self.passed_on:
            assert self.passed_on is not None
            # what an image adds is 0 while weights are
            if self.image_row is None or not torch.equal(hidden, self.passed_on):
                between = f"between layers {index - 1} and {index}"
                raise self.refuse(f"the model changes the hidden states {between}")
            self.findings.sides = True
        containers = self.check_arguments(index, call)
        kind = kind_of(layer, call, index)
        if self.image_row is not None:  # a layer is what it is on text
            self.idle_in[kind] = []
        elif kind not in self.idle_in or containers:
            extras, self.idle_in[kind] = self.try_out(layer, hidden, call)
            if index == 0:
                self.findings.extras = extras
        self.findings.idle += [f"{index}.{name}" for name in self.idle_in[kind]]
        filled = [name for name, container in containers.items() if len(container)]
        if filled:
            raise self.refuse(
                f"layer {index} puts something into {filled[0]}, where other layers could find it"
            )
        if index == 0 or self.image_row is not None:
            self.entered = hidden
        self.visited += 1
        # with images another value than it received, which tells a sum with it from a product
        self.passed_on = hidden.clone() if self.image_row is None else 0 * hidden + self.visited
        if self.visited == len(self.originals):
            # cut off, so that whatever else the model's end uses shows in its graph
            self.passed_on = self.passed_on.detach().requires_grad_()
        return form_output(self.passed_on, self.findings.extras)

    def check_arguments(self, index: int, call: LayerCall) -> dict[str, Any]:
        """Refuse gradients and caches; returns open containers by name."""
        containers = {}
        received = (call.args, call.kwargs)
        for path, value in pytree.tree_flatten_with_path(received, is_leaf=is_open_container)[0]:
            name = pytree.keystr(path[1:])
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise self.refuse(
                    f"layer {index} receives {name}, which needs a gradient besides the "
                    "hidden states"
                )
            if "Cache" in type(value).__name__:
                raise self.refuse(
                    f"layer {index} receives a key-value cache ({name}) although none was asked for"
                )
            if is_open_container(value) and not isinstance(value, Discarding):
                containers[name] = value
        return containers

    def try_out(
        self, layer: nn.Module, hidden: torch.Tensor, call: LayerCall
    ) -> tuple[int | None, list[str]]:
        """(`extras`, names of idle parameters) of the real layer, run on meta in training."""
        twin = copy.deepcopy(layer).to("meta").train()
        hidden, args, kwargs = to_meta((hidden, call.args, call.kwargs))
        family, before = type(layer).__name__, buffers_of(twin)
        try:
            with on_meta() as replaced:
                output = twin(hidden, *args, **kwargs)
        except UnusedOutputUsed as error:
            raise self.refuse(str(error)) from error
        except Exception as error:  # whatever a layer's code raises on tensors without data
            raise self.refuse(
                f"its layer {family} cannot run without data ({type(error).__name__}: {error})"
            ) from error
        self.findings.kernels |= bool(replaced)
        extras = None if isinstance(output, torch.Tensor) else self.extras_in(output, hidden)
        states = output if extras is None else output[0]
        if written := [name for name, now in buffers_of(twin).items() if now != before[name]]:
            raise self.refuse(
                f"{written[0]} of its layer {family} is changed by every forward in training, "
                "and would be by every recomputation"
            )
        used = {id(node.variable) for node in graph_of(states) if is_leaf(node)}
        return extras, [name for name, p in twin.named_parameters() if id(p) not in used]

    def extras_in(self, output: Any, hidden: torch.Tensor) -> int:
        """Number of values beside the hidden states in a layer's output."""
        first = output[0] if isinstance(output, tuple) and output else None
        if not isinstance(first, torch.Tensor) or first.shape != hidden.shape:
            raise self.refuse(
                "its layers return neither hidden states nor a tuple that begins with them"
            )
        return len(output) - 1


def in_lists(model: nn.Module, names: Collection[str], but: nn.ModuleList) -> list[nn.Module]:
    """Outermost modules in lists, `but` for those of one, with parameters of these names."""
    wanted = {id(p) for name, p in model.named_parameters() if name in names}
    inside, found = set(but.modules()), list[nn.Module]()
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList) and stack not in inside:
            inside.update(stack.modules())
            found += (m for m in stack if any(id(p) in wanted for p in m.parameters()))
    return found


def replace_all(stack: nn.ModuleList, modules: Sequence[nn.Module]) -> None:
    """Put `modules` in the places of a stack, one for one."""
    for index, module in enumerate(modules):
        stack[index] = module


def buffers_of(layer: nn.Module) -> dict[str, tuple[int, int]]:
    """Persistent buffers by name, as numbers that change when something is written there."""
    return {
        f"{path}.{leaf}" if path else leaf: (id(buffer), buffer._version)
        for path, module in layer.named_modules()
        for leaf, buffer in persistent_buffers(module).items()
    }


def graph_of(tree: Any) -> set[Any]:
    """The autograd nodes behind all tensors of a nested structure, down to the parameters."""
    found: set[Any] = set()
    ahead = [leaf.grad_fn for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead += [before for before, _ in node.next_functions]
    return found


def is_leaf(node: Any) -> bool:
    """True if an autograd node stands for a parameter, which is its `variable` then."""
    return node.name() == "torch::autograd::AccumulateGrad"  # type: ignore[no-any-return]
