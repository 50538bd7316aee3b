"""A transformers model without weights: its modules, with parameters that are views into streamed buffers.

Every decoder layer keeps its own module (it is only Python objects), so whatever depends on a layer's index or type stays right by
construction. Binding is done once: a block always lands in the same slot, so its parameters can point there for good.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatrain.errors import ConfigError, ModelError
from megatrain.memory.layout import FlatLayout
from megatrain.models.anatomy import Anatomy, Block, find_layers, layout_of
from megatrain.models.chunked import chunk, unchunk
from megatrain.models.compiled import Inductor
from megatrain.models.documents import documents_known, documents_of, none_found, separates
from megatrain.models.fp8 import Fp8Policy, apply_fp8
from megatrain.models.probe import probe, replace_all, to_meta, zeros_outside
from megatrain.models.recorder import LayerCall, ReachedEnd, Recorder, Tape
from megatrain.models.skippable import skippable, skipping
from megatrain.models.token_wise import ROWS, TOKENS, Modules, token_wise_modules

# Of one class of layers, for all models of a process together; dynamo runs what goes beyond eagerly, and silently. Its own limit is 8. A
# layer has four (without gradients in training and in evaluation, retained, computed again), each anew for rows of another length, then of
# any length, for padded and for single ones, and for fp8: 25 were counted in one run.
GRAPHS = 64


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Modules built inside get parameters on the meta device, but real buffers (rotary frequencies, scales)."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # a tied parameter is meta already and must stay the same object
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def choose_attention(config: Any, attention: str) -> str:
    """The attention implementation to ask transformers for.

    `auto` is PyTorch's scaled-dot-product attention, except where the family caps attention logits, which that function cannot do.
    """
    if attention != "auto":
        return attention
    text = config.get_text_config()
    return "eager" if getattr(text, "attn_logit_softcapping", None) is not None else "sdpa"


def build_model(config: Any, attention: str, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
    """A causal LM of `config`, in training mode, with meta parameters of `dtype`.

    Raises:
        ModelError: transformers has no causal LM for this configuration, or refuses the attention implementation.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.use_cache = False
    wanted = choose_attention(config, attention)

    def from_config(implementation: str) -> Any:
        return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=implementation, dtype=dtype, trust_remote_code=trust_remote_code
        )

    try:
        with meta_parameters():
            try:
                model = from_config(wanted)
            except ValueError:
                if attention != "auto" or wanted == "eager":
                    raise
                model = from_config("eager")  # `auto` is the fastest that the family supports, and this one has no SDPA (sinks, say)
            model.tie_weights()
    except (ValueError, ImportError, KeyError) as error:
        raise ModelError(f"model type {config.model_type!r} cannot be built as a causal language model: {error}") from error
    return model.train()  # type: ignore[no-any-return]


class Skeleton:
    """The modules of one model, without weights, and its anatomy.

    Args:
        config: a transformers configuration of a decoder-only family.
        attention: "auto" or a name that transformers knows.
        dtype: of the parameters and of the computation.

    Raises:
        ModelError: the family cannot be streamed exactly; the message says why.
    """

    def __init__(
        self, config: Any, *, attention: str = "auto", dtype: torch.dtype = torch.bfloat16, trust_remote_code: bool = False
    ) -> None:
        self.dtype = dtype
        self.model = build_model(config, attention, dtype, trust_remote_code)
        self.config: Any = self.model.config
        text = config.get_text_config()
        self._refuse_what_is_not_built(text)
        path, stack = find_layers(self.model, text.num_hidden_layers)
        findings = probe(self.model, stack)
        self.layers: list[nn.Module] = list(stack)
        self.recorders = [Recorder(m, i, i == len(self.layers) - 1, findings.returns_tuple) for i, m in enumerate(self.layers)]
        self._embedding_width = self.model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
        self.anatomy = self._dissect(path, findings.before, findings.after, text)
        self.has_dropout = self._draws_random_numbers()
        replace_all(stack, self.recorders)
        self._skippable: list[tuple[str, ...]] = [()] * len(self.layers)
        self._retaining: Sequence[Callable[..., Any]] = self.layers
        self._training: bool | None = None  # not known yet
        self._separates: bool | None = None
        self._again = False  # a layer is being computed again: its graph is used at once
        self._try_head()

    def _refuse_what_is_not_built(self, text: Any) -> None:
        """Raise ModelError for settings and kinds of weights that would be ignored in silence."""
        family = type(self.model).__name__
        trained = {name for name, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad}
        others = [name for name in self.model.state_dict() if name not in trained]
        if others:  # nothing here would load, keep or save it
            raise ModelError(f"{family} has {others[0]}, which belongs to its weights but is not trained; it cannot be streamed yet")
        settings = text.to_dict()
        if settings.get("output_router_logits"):
            raise ModelError(
                f"{family}: output_router_logits asks for the routers' balancing loss, which is not built; set it to false in config.json"
            )
        if settings.get("use_bidirectional_attention") in (True, "all"):
            raise ModelError(f"{family}: use_bidirectional_attention shows every token the one it should predict; set it to false")
        skipping = [key for key, rate in settings.items() if "layerdrop" in key and rate]
        if skipping:
            raise ModelError(f"{family}: {skipping[0]} leaves out whole layers at random, which is not built; set it to 0 in config.json")

    def _dissect(self, path: str, before: list[str], after: list[str], text: Any) -> Anatomy:
        """Assign every parameter to one block."""
        by_name = dict(self.model.named_parameters(remove_duplicate=False))
        owner_of: dict[int, str] = {}
        tied = []
        members: list[list[str]] = [[] for _ in range(len(self.layers) + 2)]
        prefixes = [f"{path}.{i}." for i in range(len(self.layers))]
        in_layers = [[n for n in by_name if n.startswith(prefix)] for prefix in prefixes]
        for index, names in enumerate([before, *in_layers, after]):
            for name in names:
                owner = owner_of.setdefault(id(by_name[name]), name)
                if owner == name and name not in members[0]:
                    members[index].append(name)
                elif owner == name:
                    raise ModelError(f"{type(self.model).__name__}: {name} is used at both ends of the model; it cannot be streamed yet")
                elif index == len(self.layers) + 1 and owner in members[0]:
                    tied.append((name, owner))
                else:
                    raise ModelError(f"{type(self.model).__name__}: {name} shares its weights with {owner}, which cannot be streamed yet")
        homeless = [name for name, p in by_name.items() if id(p) not in owner_of]
        if homeless:
            raise ModelError(f"{type(self.model).__name__}: {homeless[0]} is used neither before the first nor after the last layer")
        names_of_blocks = ["embed", *(f"layers.{i}" for i in range(len(self.layers))), "head"]
        blocks = tuple(
            Block(i, label, layout_of(((n, by_name[n]) for n in names), layer=0 < i <= len(self.layers)))
            for i, (label, names) in enumerate(zip(names_of_blocks, members, strict=True))
        )
        positions = getattr(text, "max_position_embeddings", None)
        return Anatomy(blocks, tuple(tied), text.model_type, text.hidden_size, text.vocab_size, positions)

    # -- binding ----------------------------------------------------------------------------------------------------------------

    def bind(self, block: Block, flat: torch.Tensor) -> list[nn.Parameter]:
        """Make the block's parameters views into `flat` (the block's layout, any device). Returns them in layout order.

        Autograd sees `flat` as the parameters' memory; whoever re-fills it must write through another tensor on the same storage, which
        has its own version counter, or graphs retained over a re-fill would be refused.
        """
        parameters = [nn.Parameter(view) for view in block.layout.views(flat).values()]
        for spec, parameter in zip(block.layout.tensors, parameters, strict=True):
            self._set(spec.name, parameter)
            for alias, owner in self.anatomy.tied:
                if owner == spec.name:
                    self._set(alias, parameter)
        return parameters

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        module, leaf = self.owner(name)
        module._parameters[leaf] = parameter

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """(module, attribute) that holds a parameter, looking through the recorders at the layers."""
        module: nn.Module = self.model
        *path, leaf = name.split(".")
        for part in path:
            module = module[int(part)] if isinstance(module, nn.ModuleList) else getattr(module, part)
            if isinstance(module, Recorder):
                module = module.__dict__["layer"]
        return module, leaf

    def move_buffers(self, device: torch.device) -> None:
        """Move the model's buffers, which are few and small, to where it computes."""
        for root in (self.model, *self.layers):
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(device)

    def set_training(self, training: bool) -> None:
        """Training mode (dropout active) or evaluation mode, for everything including the layers. Walking through all modules takes
        milliseconds of every step, so it is done when the mode changes."""
        if training == self._training:
            return
        self._training = None  # if this is interrupted
        for root in (self.model, *self.layers):
            root.train(training)
        self._training = training

    def use_fp8(self, policy: Fp8Policy) -> None:
        """Give the linear modules of decoder layers fp8 products, where `policy` wants them.

        Raises:
            ConfigError: it takes none of this model's.
        """
        taken = sum(apply_fp8(layer, policy.of_layer(index, len(self.layers))) for index, layer in enumerate(self.layers))
        if taken == 0:
            raise ConfigError(f"precision: fp8 suits no layer of this {type(self.model).__name__}; set precision: bfloat16")

    def chunk_layers(self, tokens: int, compiled: bool = False) -> None:
        """Have layers compute what treats every token alike, such as MLPs, so many tokens at a time. Before `find_skippable`.

        compiled: torch.compile makes the chunks' graphs; for layers that are compiled too, whose graphs break there.
        """
        chunk(self._token_wise, tokens, compiled)

    @contextmanager
    def chunked(self, tokens: int) -> Iterator[None]:
        """`chunk_layers` while the context lasts."""
        self.chunk_layers(tokens)
        try:
            yield
        finally:
            unchunk(self._token_wise)

    def find_token_wise(self) -> None:
        """Find out what treats every token alike, if that is not known: with products in bf16 it takes less than in fp8."""
        _ = self._token_wise

    @cached_property
    def _token_wise(self) -> Modules:
        with torch.random.fork_rng(devices=[]):
            hidden, calls = self.dry_call(ROWS, TOKENS)
        return token_wise_modules(self.layers, self.dtype, hidden.shape[-1], calls)

    def compile_layers(self, cheap: bool = False, *, lengths_vary: bool = False) -> None:
        """Have torch.compile fuse what lies between the matrix products of every layer, when it first runs.

        cheap: graphs of `layer` keep only what products and attention need; their backward computes what lies between again.
        lengths_vary: what `fastest_attention` is told while layers run.

        Raises:
            ModelError: the model uses dropout. Compiled with and without gradients a layer draws different masks, so that its
                recomputation would not be its forward.
        """
        if self.has_dropout:
            raise ModelError(f"{type(self.model).__name__}: compile: true cannot replay this model's dropout; set compile: false")
        from torch._dynamo import config as dynamo
        from torch._inductor import config as inductor

        inductor.compile_threads = 1  # its pool of worker processes would take gigabytes of host RAM
        inductor.triton.autotune_pointwise = False  # which keeps copies of what kernels write over in pinned host RAM, for good
        dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
        for layer in self.layers:
            layer.compile(backend=Inductor(lengths_vary))
        if cheap:  # beside the others: what recomputation keeps is used at once, and not worth computing twice
            self._retaining = [torch.compile(layer.forward, backend=Inductor(lengths_vary, cheap)) for layer in self.layers]

    def _draws_random_numbers(self) -> bool:
        """Whether any part of the model does, in training mode."""
        drops = any(isinstance(m, nn.Dropout) and m.p > 0 for root in (self.model, *self.layers) for m in root.modules())
        unused = ("classifier", "summary", "encoder")  # of other heads than the language model's, and of no decoder
        settings = {k: v for k, v in self.config.get_text_config().to_dict().items() if not k.startswith(unused)}
        rates = {key: value for key, value in settings.items() if "drop" in key or "jitter" in key}
        return drops or any(isinstance(rate, float) and rate > 0 for rate in rates.values())

    # -- computing --------------------------------------------------------------------------------------------------------------

    def _play(self, tape: Tape, **inputs: Any) -> Any:
        """Run the model's own forward with `tape` in every recorder, and take it out again: a tape holds on to activations."""
        try:
            for recorder in self.recorders:
                recorder.tape = tape
            with documents_known(documents_of if "position_ids" in inputs else none_found):
                return self.model(use_cache=False, **inputs)
        finally:
            for recorder in self.recorders:
                recorder.tape = None

    def embed(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[LayerCall]]:
        """The input of layer 0, [batch, tokens, hidden], and what every layer receives besides it.

        `inputs` holds input_ids [batch, tokens] and whatever else the model's forward takes, on the computing device.
        """
        tape = Tape()
        try:
            self._play(tape, **inputs)
        except ReachedEnd:
            pass
        assert tape.hidden is not None and len(tape.calls) == len(self.layers)
        return tape.hidden, tape.calls

    def layer(self, index: int, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Run decoder layer `index` on hidden states [batch, tokens, hidden]."""
        retained = torch.is_grad_enabled() and not self._again
        output = (self._retaining if retained else self.layers)[index](hidden, *call.args, **call.kwargs)
        hidden_states: torch.Tensor = output[0] if self.recorders[index].returns_tuple else output
        return hidden_states

    def layer_again(self, index: int, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Run a layer for its gradients alone: what they do not need is left out, so that the output's values mean nothing."""
        self._again = True
        try:
            with skipping(self.layers[index], self._skippable[index]):
                return self.layer(index, hidden, call)
        finally:
            self._again = False

    def separates_documents(self) -> bool:
        """Whether documents that share a sequence, told apart by positions that begin anew, cannot see each other in any layer.

        Seen in the masks that layers receive. On zeros, which take no memory; once, before the model is bound to a device.
        """
        if self._separates is None:
            self._separates = self._masks_separate_documents()
        return self._separates

    def _masks_separate_documents(self) -> bool:
        inputs = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 0, 1]])}
        try:
            with zeros_outside(self.model, self.layers), torch.no_grad():
                _, calls = self.embed(inputs)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            return False  # a family that takes no positions
        return all(any(map(separates, pytree.tree_leaves((call.args, call.kwargs)))) for call in calls)

    def find_skippable(self) -> None:
        """See what `layer_again` may leave out. Before the layers are compiled, whose graphs it would disturb."""
        with torch.random.fork_rng(devices=[]):
            hidden, calls = self.dry_call(1, 2)
        shape = (1, 2, hidden.shape[-1])
        self._skippable = [skippable(layer, shape, self.dtype, call) for layer, call in zip(self.layers, calls, strict=True)]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of n positions from the last layer's output [n, hidden], through the model's own norm, head, scale and cap.

        Every position enters as a sequence of one token, since nothing after the last layer mixes tokens.
        """
        # What goes in at the front is never seen; it is not `hidden` because some families scale their input in place.
        unseen = hidden.new_zeros(len(hidden), 1, self._embedding_width)
        output = self._play(Tape(injected=hidden.unsqueeze(1)), inputs_embeds=unseen)
        return output.logits.squeeze(1)  # type: ignore[no-any-return]

    def _try_head(self) -> None:
        """Raise ModelError unless the head can be run on single positions, as `head` does. On zeros, which take no memory."""
        hidden = torch.zeros(2, self.anatomy.hidden_size, dtype=self.dtype)
        try:
            with zeros_outside(self.model, self.layers), torch.no_grad():
                shape = tuple(self.head(hidden).shape)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise ModelError(f"{type(self.model).__name__}: its head cannot run by itself ({error}); it cannot be streamed yet") from error
        if shape != (2, self.anatomy.vocab_size):
            raise ModelError(f"{type(self.model).__name__}: its head returns {list(shape)} for 2 positions; it cannot be streamed yet")

    def dry_call(self, rows: int, tokens: int) -> tuple[torch.Tensor, list[LayerCall]]:
        """What `embed` returns for a micro-batch of this shape, as meta tensors: for the planner, which must allocate nothing large."""
        with zeros_outside(self.model, self.layers), torch.no_grad():
            hidden, calls = self.embed({"input_ids": torch.zeros(rows, tokens, dtype=torch.long)})
        return to_meta(hidden), [LayerCall(to_meta(c.args), to_meta(c.kwargs)) for c in calls]


def layouts_of(anatomy: Anatomy) -> tuple[FlatLayout, ...]:
    """The layouts of all blocks, in execution order."""
    return tuple(block.layout for block in anatomy.blocks)
