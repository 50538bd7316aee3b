"""A transformers model without weights: its modules, with parameters that view streamed buffers.

Every decoder layer keeps its own module, so what depends on a layer's index or type stays right. A
block always lands in the same slot, so its parameters are bound once, for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megatrain.errors import ConfigError, ModelError
from megatrain.models.anatomy import Anatomy, divide, find_layers
from megatrain.models.constants import Block, Constants, dtype_of, find_unused_weights, poison
from megatrain.models.family import (
    build_model,
    draws_random_numbers,
    forget_lengths,
    growing,
    layers_in,
    longest_sequence,
    refuse_what_is_not_built,
)
from megatrain.models.freezing import freeze
from megatrain.models.meta import to_meta, zeros_outside
from megatrain.models.names import published
from megatrain.models.pretrained import is_classifier
from megatrain.models.recorder import (
    BEGINNINGS,
    LayerCall,
    ReachedEnd,
    Recorder,
    Tape,
    documents_known,
    documents_of,
    none_found,
    separates,
    told,
    with_places,
)
from megatrain.models.transforms.chunked import chunk, unchunk
from megatrain.models.transforms.compiled import compile_when_run, fuse_rotary
from megatrain.models.transforms.fp8 import Fp8Policy, apply_fp8
from megatrain.models.transforms.skippable import (
    Modules,
    recompute_inside,
    skippable_in,
    skipping,
    token_wise_modules,
)
from megatrain.models.trials.behaviour import (
    behaviour_of,
    images_pack,
    refuse_misbehaving,
    why_together,
)
from megatrain.models.trials.probe import probe_model, replace_all

# What a family's code raises on arguments that it does not support.
UNSUPPORTED = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)


# why: decision 0004
class Skeleton:
    """The modules of one model, without weights, and its anatomy.

    Args:
        config: a transformers configuration of a decoder-only family.
        attention: "auto" or a name that transformers knows.
        dtype: of the parameters and of the computation.
        image_row: arguments of the model's forward, of a row with an image; None: none are read.

    Raises ModelError if the family cannot be streamed exactly; the message says why.
    """

    def __init__(
        self,
        config: Any,
        *,
        attention: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        trust_remote_code: bool = False,
        image_row: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.dtype = dtype
        self.model = build_model(config, attention, dtype, trust_remote_code)
        self.config: Any = self.model.config
        self.image_row = image_row
        self.source_dtype = dtype_of(config)  # that of a folder with this configuration
        text = config.get_text_config()
        refuse_what_is_not_built(self.model, text)
        path, stack = find_layers(self.model, layers_in(text))
        self.findings = findings = probe_model(self.model, stack, image_row)
        unused_weights = find_unused_weights(self.model, findings.unused, config)
        behaviour = behaviour_of(self.model, stack, trust_remote_code)
        self.behaviour = behaviour  # None: its small model does not tell, or images do not pack
        self.layers: list[nn.Module] = list(stack)
        extras, last = findings.extras, len(stack) - 1
        self.recorders = [Recorder(one, n, n == last, extras) for n, one in enumerate(self.layers)]
        self.stack, self._path = stack, path
        self._embedding_width = self.model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
        for name in findings.idle:
            self.model.get_parameter(f"{path}.{name}").requires_grad_(False)
        used = findings.before, findings.after, unused_weights.names
        blocks, tied = divide(self.model, path, len(stack), *used)
        refuse_misbehaving(self.model, behaviour)
        self.anatomy = Anatomy(
            blocks,
            tied,
            family=text.model_type,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            max_positions=longest_sequence(text),
            published=published(self.model, text.model_type, blocks, tied, unused_weights.names),
            unused_weights=unused_weights,
            labels=config.num_labels if is_classifier(config) else None,
            of_images=findings.of_images,
        )
        places = self.anatomy.published.constants
        self.constants = Constants(self.model, blocks, places, self.owner)
        self.has_dropout = draws_random_numbers(self.model, unused_weights.modules)
        self.has_kernels = findings.kernels
        self._growing = growing(self.model.modules())
        replace_all(stack, self.recorders)
        self._skippable: list[tuple[str, ...]] = [()] * len(self.layers)
        self._retaining: Sequence[Callable[..., Any]] = self.layers  # run where graphs are kept
        self._training: bool | None = None  # not known yet
        self._again = False  # a layer is being recomputed: its graph is used at once
        self.trust_remote_code = trust_remote_code
        self._why_together: dict[torch.device, str | None] = {}
        self._try_head()
        if not images_pack(dtype, self.embed, self.zeros(), image_row):
            self.behaviour = None
        self.masked = self._masked_layers()

    # -- binding -----------------------------------------------------------------------------------

    def freeze(self, patterns: Sequence[str], name: str = "freeze") -> None:
        """Before anything is bound: as `models.freezing.freeze`, which raises ConfigError."""
        if patterns:
            self.train_as(freeze(self.anatomy, patterns, name))

    def train_as(self, anatomy: Anatomy) -> None:
        """Before anything is bound: train what is not frozen in `anatomy`, which is this one's."""
        self.anatomy = anatomy
        # layers' own stay as they are until they are bound: fp8 leaves alone what does not train
        for block in (self.anatomy.embed, self.anatomy.head):
            for spec in block.layout.tensors:
                module, leaf = self.owner(spec.name)
                module.get_parameter(leaf).requires_grad_(not spec.frozen)

    def frozen_in(self, layer: int) -> frozenset[str]:
        """The frozen tensors of a decoder layer, named as in its module."""
        prefix = f"{self._path}.{layer}."
        tensors = self.anatomy.blocks[layer + 1].layout.tensors
        return frozenset(t.name.removeprefix(prefix) for t in tensors if t.frozen)

    def bind(self, block: Block, flat: torch.Tensor) -> list[nn.Parameter]:
        """Make the block's parameters views of `flat` (any device); returns those that train, in
        layout order.

        Whoever re-fills `flat` must write through another tensor on its storage, with a version
        counter of its own: autograd refuses graphs whose parameters changed.
        """
        views = block.layout.views(flat).values()
        parameters = [
            nn.Parameter(view, requires_grad=not spec.frozen)
            for spec, view in zip(block.layout.tensors, views, strict=True)
        ]
        self.place(block, parameters)
        return [parameter for parameter in parameters if parameter.requires_grad]

    def place(self, block: Block, parameters: Sequence[nn.Parameter | None]) -> None:
        """Give the block's modules these parameters, in layout order."""
        for spec, parameter in zip(block.layout.tensors, parameters, strict=True):
            aliases = [alias for alias, owner in self.anatomy.tied if owner == spec.name]
            for name in (spec.name, *aliases):
                module, leaf = self.owner(name)
                module._parameters[leaf] = parameter

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """(module, attribute) that holds a tensor, looking through the layers' recorders."""
        module = self.model
        *path, leaf = name.split(".")
        for part in path:
            module = module.get_submodule(part)
            if isinstance(module, Recorder):
                module = module.layer
        return module, leaf

    def move_buffers(self, device: torch.device) -> None:
        """Move buffers, constants and what stands in for unused weights to where it computes."""
        self.constants.move(device)
        poison(self.model, self.anatomy.unused_weights.names, device)
        for root in (self.model, *self.layers):
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(device)

    def forget_lengths(self) -> None:
        """Undo what a long sequence has done to rotary factors."""
        forget_lengths(self._growing)

    def set_training(self, training: bool) -> None:
        if training == self._training:  # walking through all modules takes milliseconds
            return
        self._training = None  # if this is interrupted
        for root in (self.model, *self.layers):
            root.train(training)
        self._training = training

    # -- transforms of the layers, in this order: fp8, chunks, skippable, compilation --------------

    def use_fp8(self, policy: Fp8Policy) -> None:
        """Give the linear modules of decoder layers fp8 matmuls, where `policy` wants them."""
        count = len(self.layers)
        policies = [policy.of_layer(index, count) for index in range(count)]
        if not sum(map(apply_fp8, self.layers, policies)):
            raise ConfigError(
                f"precision: fp8 suits no layer of this {type(self.model).__name__}; "
                "set precision: bfloat16"
            )

    def chunk_layers(self, tokens: int, compiled: bool = False) -> None:
        """Have layers compute token-wise modules, such as MLPs, `tokens` at a time. compiled:
        layers break there, and chunks have graphs of their own."""
        chunk(self.token_wise, tokens, compiled)

    @contextmanager
    def chunked(self, tokens: int) -> Iterator[None]:
        """`chunk_layers` inside the context."""
        self.chunk_layers(tokens)
        try:
            yield
        finally:
            unchunk(self.token_wise)

    @cached_property
    def token_wise(self) -> Modules:
        """Modules of layers that can be computed in chunks; sooner found in bf16 than in fp8."""
        return token_wise_modules(self.layers, self.dtype, self.dry_call)

    def find_skippable(self) -> None:
        """Find what `layer_again` may leave out; before compilation, whose graphs it disturbs."""
        recompute_inside(self.findings.tower_layers)
        hidden, calls = self.dry_call(1, 2)
        self._skippable = skippable_in(self.layers, hidden.shape, self.dtype, calls)

    def compile_layers(self, cheap: bool = False, *, lengths_vary: bool = False) -> None:
        """Have torch.compile fuse what lies between the matmuls of each layer, when it first runs.
        cheap: graphs of `layer`, not of `layer_again`, keep only what matmuls and attention need;
        backward recomputes the rest. lengths_vary: what `fastest_attention` is told while layers
        run."""
        if self.has_dropout:  # with and without gradients, a compiled layer draws different masks
            raise ModelError(
                f"{type(self.model).__name__}: compile: true cannot replay this model's dropout; "
                "set compile: false"
            )
        fuse_rotary(self.findings.tower_layers)
        self._retaining = compile_when_run(self.layers, lengths_vary, cheap)

    # -- computing ---------------------------------------------------------------------------------

    def embed(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[LayerCall]]:
        """The input of layer 0, [batch, tokens, hidden], and every layer's other arguments.

        inputs: of the model's forward, such as input_ids [batch, tokens]. With what `boundaries_of`
            finds, layers that get no mask have kernels that are told of documents.
        """
        tape = Tape(sides=self.findings.sides)
        with suppress(ReachedEnd):
            self._play(tape, **with_places(self.model, inputs))
        assert tape.hidden is not None and len(tape.calls) == len(self.layers)
        if BEGINNINGS in inputs:
            return tape.hidden, told(tape.calls, self.masked, inputs["input_ids"].shape)
        return tape.hidden, tape.calls

    def layer(self, index: int, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Run decoder layer `index` on hidden states [batch, tokens, hidden]."""
        retained = torch.is_grad_enabled() and not self._again
        run = (self._retaining if retained else self.layers)[index]
        hidden = call.with_side(hidden)
        given = hidden.flatten(0, 1).unsqueeze(0) if call.end_to_end else hidden
        with call.around():
            output = run(given, *call.args, **call.kwargs)
        output = output[0] if isinstance(output, tuple) else output
        return output.reshape(hidden.shape) if call.end_to_end else output  # type: ignore[no-any-return]

    def layer_again(self, index: int, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Recompute a layer for its gradients alone: the output's values mean nothing."""
        self._again = True
        try:
            with skipping(self.layers[index], self._skippable[index]):
                return self.layer(index, hidden, call)
        finally:
            self._again = False

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] or scores [n, labels] from the last layer's output [n, hidden]. Every
        position enters as a sequence of one token: nothing after the last layer mixes tokens."""
        # never seen; not `hidden`, because some families scale their input in place
        unseen = hidden.new_zeros(len(hidden), 1, self._embedding_width)
        output = self._play(Tape(injected=hidden.unsqueeze(1)), inputs_embeds=unseen)
        return output.logits.flatten(1)  # type: ignore[no-any-return]

    def _play(self, tape: Tape, **inputs: Any) -> Any:
        """Run the model's own forward with `tape` in every recorder."""
        self.forget_lengths()
        try:
            for recorder in self.recorders:
                recorder.tape = tape
            with documents_known(documents_of if "position_ids" in inputs else none_found):
                return self.model(use_cache=False, **inputs)
        finally:
            for recorder in self.recorders:
                recorder.tape = None  # it holds on to activations

    # -- trying out, before a device is bound ------------------------------------------------------

    def zeros(self) -> AbstractContextManager[None]:
        return zeros_outside(self.model, self.layers, self.anatomy.unused_weights.names)

    def dry_call(self, rows: int, tokens: int) -> tuple[torch.Tensor, list[LayerCall]]:
        """`embed` for `rows` sequences of `tokens`, as meta tensors: nothing large is allocated."""
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        with self.zeros(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            hidden, calls = self.embed({"input_ids": ids})
        return to_meta(hidden), [LayerCall(to_meta(c.args), to_meta(c.kwargs)) for c in calls]

    def separates_documents(self, device: torch.device) -> bool:
        """True if documents packed into one sequence cannot see each other in any layer: by the
        masks for positions that begin anew, or by kernels on `device` that are told of documents.
        """
        return self._by_masks or self.told_documents(device)

    def told_documents(self, device: torch.device) -> bool:
        """True if kernels on `device`, told by `boundaries_of`, keep documents apart, no masks."""
        return not self._by_masks and self.why_together(device) is None

    def why_together(self, device: torch.device) -> str | None:
        """The reason for which kernels on `device` do not keep packed documents apart; None: they
        do, where they are told of them. "": there are none. Tried once."""
        found, attention = self.behaviour, self.config._attn_implementation
        if found is None or found.between is None or found.separates or not self.has_kernels:
            return ""
        if device not in self._why_together:
            where = device, self.dtype, self.trust_remote_code
            self._why_together[device] = why_together(found.small, attention, *where)
        return self._why_together[device]

    @property
    def _by_masks(self) -> bool:
        return bool(self.behaviour and self.behaviour.separates and all(self.masked))

    def _masked_layers(self) -> list[bool]:
        """For each layer, whether its mask for positions that begin anew keeps documents apart."""
        none = [False] * len(self.layers)
        if self.behaviour is None or self.behaviour.between is None:
            return none
        ids, positions = torch.zeros(1, 4, dtype=torch.long), torch.tensor([[0, 1] * 2])
        try:
            with self.zeros(), torch.no_grad():
                _, calls = self.embed({"input_ids": ids, "position_ids": positions})
        except UNSUPPORTED:  # a family that takes no positions
            return none
        return [separates(call) for call in calls]

    def _try_head(self) -> None:
        """Raise ModelError unless `head` runs on single positions."""
        family = type(self.model).__name__
        hidden = torch.zeros(2, self.anatomy.hidden_size, dtype=self.dtype)
        try:
            with self.zeros(), torch.no_grad():
                shape = tuple(self.head(hidden).shape)
        except UNSUPPORTED as error:
            raise ModelError(
                f"{family}: its head cannot run by itself ({error}); it cannot be streamed yet"
            ) from error
        if shape != (2, self.anatomy.outputs):
            what = f"its head returns {list(shape)} for 2 positions"
            raise ModelError(f"{family}: {what}; it cannot be streamed yet")
