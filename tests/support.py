"""Tiny models of every family, engines on them, and the plain PyTorch loop that the engine has to agree with."""

from __future__ import annotations

import copy
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from megatrain.engine.build import prepare
from megatrain.engine.engine import Engine
from megatrain.engine.landing import AppliedGradients
from megatrain.engine.masters import write_master
from megatrain.engine.resolved import Weights
from megatrain.engine.step import mix
from megatrain.models.anatomy import decays
from megatrain.models.family import choose_attention
from megatrain.optim import AdamW
from megatrain.optim.split import join_master
from megatrain.settings import Settings
from megatrain.storage.checkpoint import save_checkpoint
from megatrain.storage.restore import load_checkpoint

VOCABULARY = 97
PAD = 0
Batch = dict[str, Tensor]
State = dict[tuple[str, int], Tensor]

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FALCON = {
    name: SIZES[name]
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "bos_token_id",
        "eos_token_id",
    )
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# name -> (configuration class, its arguments)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SIZES, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
    "mistral-sliding": ("MistralConfig", {**SIZES, "sliding_window": 5}),
    "qwen2": ("Qwen2Config", {**SIZES, "tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2Config", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 8, "tie_word_embeddings": False}),
    "falcon-7b": (
        "FalconConfig",
        {**FALCON, "parallel_attn": True, "multi_query": True, "new_decoder_architecture": False, "tie_word_embeddings": True},
    ),
    "falcon-7b-untied": (
        "FalconConfig",
        {**FALCON, "parallel_attn": True, "multi_query": True, "new_decoder_architecture": False, "tie_word_embeddings": False},
    ),
    "falcon-rw": ("FalconConfig", {**FALCON, "alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}),
    "falcon-40b": ("FalconConfig", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt-neox": ("GPTNeoXConfig", {**SIZES, "tie_word_embeddings": False}),
    "gpt-neox-tied": ("GPTNeoXConfig", {**SIZES, "tie_word_embeddings": True}),
}  # fmt: skip

# Tried the same way, beyond the families that are promised.
MORE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, **NO_DROPOUT}),
    "opt": (
        "OPTConfig",
        {**FALCON, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": PAD},
    ),
    "gemma2": ("Gemma2Config", {**SIZES, "head_dim": 8, "sliding_window": 5}),
    "gemma3": (
        "Gemma3TextConfig",
        {**SIZES, "head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "phi3": ("Phi3Config", SIZES),
    "olmo2": ("Olmo2Config", SIZES),
    "cohere": ("CohereConfig", SIZES),
    "stablelm": ("StableLmConfig", SIZES),
    "ctrl": (
        "CTRLConfig",  # scales the embeddings in place
        {
            "vocab_size": VOCABULARY, "n_embd": 32, "dff": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
    ),
    "gpt-bigcode": (
        "GPTBigCodeConfig",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 64, **NO_DROPOUT},
    ),
    "opt-projected": (
        "OPTConfig",  # as the 350m: embeddings narrower than the hidden states, no final norm
        {
            **FALCON, "ffn_dim": 64, "word_embed_proj_dim": 16, "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": PAD,
            "do_layer_norm_before": False,
        },
    ),
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model of one of the families above."""
    name, arguments = {**FAMILIES, **MORE_FAMILIES}[family]
    arguments = {**arguments, **changes}
    if "layer_types" in arguments:
        arguments["layer_types"] = arguments["layer_types"][: arguments["num_hidden_layers"]]
    return getattr(transformers, name)(**arguments)


def plain_model(
    config: Any,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attention: str = "auto",
    device: str = "cpu",
) -> nn.Module:
    """The family's own model in training mode, every parameter random: zero biases and unit norms would hide a mix-up."""
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(
            config
        ),  # transformers notes the attention in the config, which a model built earlier would share
        attn_implementation=choose_attention(config, attention),
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.ndim > 1 else parameter + noise * 0.1)
    return model.to(device=device, dtype=dtype).train()  # type: ignore[no-any-return]


def engine_of(
    config: Any, *, model: nn.Module | None = None, settings: Settings | None = None, **options: Any
) -> Engine:
    """A float32 CPU engine, unless told otherwise, with the weights of `model` (default: those of `plain_model`)."""
    options = {
        "precision": "float32",
        "device": "cpu",
        "optimizer": AdamW(lr=1e-3, weight_decay=0.1),
        "max_grad_norm": 0.5,
        **options,
    }
    settings = settings or Settings(head_chunk_tokens=7)
    prepared = prepare(config, settings=settings, weights=Weights(None), **options)
    engine = Engine(**prepared.arguments())
    load(engine, model if model is not None else plain_model(config))
    return engine


def load(engine: Engine, model: nn.Module) -> None:
    """Copy a plain model's weights into the engine's store."""
    weights = model.state_dict()
    for block in engine.anatomy.blocks:
        master = torch.zeros(block.layout.numel)
        for name, view in block.layout.views(master).items():
            view.copy_(weights[name])
        write_master(engine.store, block.index, master)


def micro_batches(
    seed: int,
    shapes: Sequence[tuple[int, int]] = ((2, 9), (3, 13), (1, 6)),
    *,
    pad_left: bool = False,
) -> list[Batch]:
    """Random micro-batches of these (rows, tokens), whose rows have unequal real lengths; the beginning of each row is no target."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for rows, tokens in shapes:
        ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
        lengths = torch.randint(tokens // 2 + 1, tokens + 1, (rows,), generator=generator)
        lengths[0] = tokens
        mask = (torch.arange(tokens) < lengths[:, None]).long()
        if pad_left:
            mask = mask.flip(1)
        ids[mask == 0] = PAD
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :2] = -100
        batches.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return batches


def full_batches(seed: int, shapes: Sequence[tuple[int, int]] = ((2, 8), (2, 8))) -> list[Batch]:
    """Random micro-batches without padding, every token a target."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCABULARY, shape, generator=generator) for shape in shapes]
    return [{"input_ids": x, "labels": x.clone()} for x in ids]


# -- the plain loop ---------------------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """What a run leaves behind: the loss and the norm before clipping of every step, and the final tensors by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Summed cross-entropy of the next token, as transformers shifts it."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    return functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )


def plain_gradients(model: nn.Module, batches: Iterable[Batch], denominator: float) -> float:
    """Accumulate into .grad; returns the loss."""
    total = 0.0
    for batch in batches:
        loss = plain_loss(model, batch) / denominator
        loss.backward()
        total += float(loss.detach())
    return total


def count_targets(batches: Iterable[Batch]) -> float:
    return float(sum((batch["labels"][:, 1:] != -100).sum() for batch in batches))


def plain_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """torch.optim.AdamW with the usual exclusions from weight decay."""
    named = list(model.named_parameters())
    groups = [
        {
            "params": [p for n, p in named if decays(n, tuple(p.shape)) == wanted],
            "weight_decay": weight_decay if wanted else 0.0,
        }
        for wanted in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=lr)


def train_plain(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    rates: Sequence[float],
    *,
    weight_decay: float,
    max_norm: float,
    backwards: bool = False,
) -> Trace:
    """What the engine must reproduce: accumulate, clip_grad_norm_, AdamW. `backwards` takes each step's micro-batches in opposite order."""
    optimizer, trace = plain_optimizer(model, rates[0], weight_decay), Trace()
    device = next(model.parameters()).device
    for batches, lr in zip(steps, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        moved = [
            {k: v.to(device) for k, v in batch.items()}
            for batch in (reversed(batches) if backwards else batches)
        ]
        trace.losses.append(plain_gradients(model, moved, count_targets(batches)))
        trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return trace


def train_engine(
    engine: Engine, steps: Sequence[Sequence[Batch]], rates: Sequence[float] | None = None
) -> Trace:
    """The same steps through the engine; `train_step` where gradients are not kept."""
    trace = Trace()
    for batches, lr in zip(steps, rates or [engine.optimizer.lr] * len(steps), strict=True):
        result = engine.train_step(batches, lr=lr)
        assert result.grad_norm is not None
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    trace.weights = {name: weight.clone() for name, weight in engine.iter_weights()}
    return trace


def cosine(steps: int, lr: float) -> list[float]:
    """A learning rate for each step, falling from `lr` towards zero."""
    return [lr * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]


def gradients_without_recompute(
    model: nn.Module, batches: Sequence[Batch], engine: Engine, step: int
) -> float:
    """Plain autograd over whole graphs, its dropout seeded before each block as the engine says it seeds. Returns the loss."""
    number = 0

    def seed(block: int) -> None:
        torch.manual_seed(mix(engine.seed, step, block, number))

    path = engine.anatomy.blocks[1].layout.tensors[0].name.split(".0.")[0]
    layers: Any = model.get_submodule(path)
    handles = [model.register_forward_pre_hook(lambda *_: seed(0))]
    handles += [
        layer.register_forward_pre_hook(lambda *_, block=i + 1: seed(block))
        for i, layer in enumerate(layers)
    ]
    total = 0.0
    for number, batch in enumerate(batches):  # noqa: B007  (`seed` reads it)
        total += plain_gradients(model, [batch], count_targets(batches))
    for handle in handles:
        handle.remove()
    return total


def masters_of(engine: Engine) -> dict[str, Tensor]:
    """The fp32 master weights of a bfloat16 engine, by tensor name."""
    named: dict[str, Tensor] = {}
    for block in engine.anatomy.blocks:
        engine.wait_ready(block.index)
        with engine.store.lease(block.index, ["weight", "remainder"]) as arrays:
            master = join_master(*(array.cpu() for array in arrays.values()))
        named |= block.layout.views(master)
    return named


def follow_in_fp32(engine: Engine, rates: Sequence[float]) -> dict[str, Tensor]:
    """Train a bfloat16 engine, and beside it fp32 masters by torch.optim.AdamW on the engine's own bf16 gradients; returns the latter."""
    assert engine.max_grad_norm is not None
    masters = nn.ParameterDict(
        {
            name.replace(".", "/"): nn.Parameter(master.clone())
            for name, master in masters_of(engine).items()
        }
    )
    optimizer = plain_optimizer(masters, rates[0], engine.optimizer.weight_decay)
    for step, lr in enumerate(rates):
        engine.forward_backward(micro_batches(step))
        for name, gradient in gradients_of(engine).items():
            assert gradient.dtype == torch.bfloat16
            masters[name.replace(".", "/")].grad = gradient.float()
        for group in optimizer.param_groups:
            group["lr"] = lr
        norm = float(nn.utils.clip_grad_norm_(masters.parameters(), engine.max_grad_norm))
        assert norm > engine.max_grad_norm, "clipping must be active"
        optimizer.step()
        assert abs(engine.step(lr) - norm) <= 1e-6 * norm
    return {name.replace("/", "."): master.detach() for name, master in masters.items()}


def train_with_a_break(
    make: Callable[[], Engine], steps: Sequence[Sequence[Batch]], folder: Path
) -> tuple[list[float], State]:
    """Train half of the steps, save, and let a new engine load and train the rest; returns all losses and the final state."""
    half = len(steps) // 2
    with make() as engine:
        losses = train_engine(engine, steps[:half]).losses
        checkpoint = save_checkpoint(folder, half, engine, None, {"position": half})
    with make() as engine:
        assert load_checkpoint(checkpoint, engine) == {"position": half}
        losses += train_engine(engine, steps[half:]).losses
        return losses, state_of(engine)


# -- comparing ----------------------------------------------------------------------------------------------------------------------


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def state_of(engine: Engine, names: Iterable[str] | None = None) -> State:
    """A copy of every array that must survive, after each block's update."""
    chosen = (
        [n for n in engine.store.arrays if n not in ("grad", "grad_sum")]
        if names is None
        else list(names)
    )
    state = {}
    for block in engine.anatomy.blocks:
        engine.wait_ready(block.index)
        for name in chosen:
            with engine.store.lease(block.index, [name]) as arrays:
                state[name, block.index] = arrays[name].cpu().clone()
    return state


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    """Copies of the gradients of the last `forward_backward`, by tensor name, once they have landed."""
    finished = engine.parts.sink.finished()
    assert finished, "call forward_backward first"
    named: dict[str, Tensor] = {}
    for gradient in finished:
        gradient.landed.synchronize()
        named |= engine.anatomy.blocks[gradient.block].layout.views(gradient.values.clone())
    return named


def differing(a: Mapping[Any, Tensor], b: Mapping[Any, Tensor]) -> list[Any]:
    """Keys whose tensors are not bit for bit the same."""
    assert a.keys() == b.keys()
    return [key for key in a if not torch.equal(bits(a[key]), bits(b[key]))]


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, so that NaN equals NaN and 0 differs from -0."""
    return tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


# -- delays -------------------------------------------------------------------------------------------------------------------------

LANES = ("upload", "download", "fetch", "update")


def sleeper(seed: int, shortest_s: float, longest_s: float) -> Callable[..., None]:
    """A delay of random length; safe to call from any thread."""
    draw, lock = random.Random(seed), threading.Lock()

    def sleep(*_: object) -> None:
        with lock:
            seconds = draw.uniform(shortest_s, longest_s)
        time.sleep(seconds)

    return sleep


def take_staging_at_once(engine: Engine) -> None:
    """Take away the wait for the update that still reads a staging buffer of gradients."""
    sink = engine.parts.sink
    assert isinstance(sink, AppliedGradients)
    take = sink.ring.take
    sink.ring.take = lambda block: (take(block)[0], None)  # type: ignore[method-assign]


class NoUpdates:
    """In the place of an engine's updates, for a streamer that is not to wait for any."""

    def wait_ready(self, block: int) -> None: ...

    def is_ready(self, block: int) -> bool:
        return True


def delay(
    engine: Engine, lanes: Iterable[str], longest_s: float, shortest_s: float = 0.0, seed: int = 0
) -> Engine:
    """Slow these lanes down by random sleeps before every job."""
    for number, lane in enumerate(lanes):
        sleep = sleeper(seed * 1000 + number, shortest_s, longest_s)
        if lane == "update":
            engine.parts.updater.delay = sleep
        else:
            engine.parts.lanes[lane].delay = sleep
    return engine
