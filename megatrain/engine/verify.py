"""The self-check of a family: its small model, streamed, against plain transformers and autograd.

Random values in every tensor and in every buffer that belongs to the weights, float32, on the CPU:
the folder that transformers saves is read, written again, and trained for three steps, with an
image in each if the model reads some.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.engine.engine import Engine
from megatrain.errors import ModelError, logger
from megatrain.heartbeat import doing
from megatrain.losses import IGNORE
from megatrain.models.constants import kept_tensors
from megatrain.models.meta import torch_paths
from megatrain.models.skeleton import Skeleton
from megatrain.models.trials.small import plain_gradients, plain_model, shrink, small_scale
from megatrain.optim import AdamW
from megatrain.settings import Settings
from megatrain.storage.export import save_pretrained

FORMAT = 3  # of verdicts: another one invalidates those that were kept
STEPS, SHAPES = 3, ((2, 9), (1, 13))  # of micro-batches: rows, tokens
MAX_NORM = 0.5
# An eps far above rounding: a gradient that is zero but for rounding must not become a whole step.
OPTIMIZER = AdamW(lr=1e-3, eps=1e-4)
# layers recomputed and retained; a head in several chunks
SETTINGS = Settings(retained=1, head_chunk_tokens=7, update_threads=1)
# How far a gradient may be off: a share of its own norm, and of the largest tensor's.
SHARE, OF_LARGEST = 1e-3, 1e-5
BY_STEPS = 10  # times as far: steps add up what rounding has moved
# Some small models make much of rounding, recurrent ones: then as far as this many times what one
# rounding of each weight moves in plain PyTorch.
BY_ROUNDING = 10
Row = Mapping[str, Tensor] | None  # as `Skeleton`'s, of the small model's tokens


@dataclass(frozen=True)
class Verdict:
    """The result of a self-check."""

    state: str  # "passed", "failed" or "not checked"
    stage: str = ""  # that failed: loading, saving, running, loss, gradients or steps
    reason: str = ""  # what differs first, or why something was not checked
    images: bool = False  # the rows had some

    @property
    def computes_wrongly(self) -> bool:
        """Training would differ from plain training. (A folder that cannot be loaded says so.)"""
        return self.state == "failed" and self.stage != "loading"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass
class Trace:
    """The same steps in plain transformers, or in the engine."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    changes: dict[str, Tensor] = field(default_factory=dict)  # of the weights, by all steps


class DiffersError(Exception):
    """A stage and what differs there, or what only the engine raises."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Raise DiffersError for errors inside, but for refusals: plain PyTorch runs the model."""
    try:
        with doing(f"comparing a small model with plain PyTorch: {name}"):
            yield
    except (DiffersError, ModelError):
        raise
    except Exception as error:
        raise DiffersError(name, f"{type(error).__name__}: {error}") from error


@contextmanager
def silent() -> Iterator[None]:
    """Inside, nothing is logged: it would be about a small model that nobody named."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def plain_pytorch() -> Iterator[None]:
    """Raise ModelError for whatever a family's code raises inside."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"its small model does not run in plain PyTorch ({reason})") from error


def verify(skeleton: Skeleton, trust_remote_code: bool = False) -> Verdict:
    """Check the family of a model, for its configuration: on text alone where its small model reads
    no images."""
    found = _verify(skeleton, trust_remote_code, skeleton.image_row)
    if skeleton.image_row and (found.state == "not checked" or found.stage == "loading"):
        text = _verify(skeleton, trust_remote_code, None)
        return text if text.reason else replace(text, reason=f"on text alone ({found.reason})")
    return found


def _verify(skeleton: Skeleton, trust_remote_code: bool, row: Row) -> Verdict:
    attention = skeleton.config._attn_implementation
    with silent(), small_scale(), torch_paths(), tempfile.TemporaryDirectory() as folder:
        try:
            small = shrink(skeleton.config, skeleton.layers, attention, trust_remote_code)
            row = row and {
                **row,
                "input_ids": row["input_ids"] % small.get_text_config().vocab_size,
            }
            model = plain_model(small, attention=attention, trust_remote_code=trust_remote_code)
            compare(model, attention, trust_remote_code, Path(folder), row)
        except DiffersError as error:
            return Verdict("failed", *error.args)
        except ModelError as error:
            return Verdict("not checked", reason=str(error))
    return Verdict("passed", images=row is not None)


def compare(model: Any, attention: str, trust_remote_code: bool, folder: Path, row: Row) -> None:
    """Raise DiffersError if a plain model and its like in an engine, by way of `folder`, differ.

    Raises ModelError if the family refuses the small model, or plain PyTorch cannot run it.
    """
    given, written = folder / "given", folder / "written"
    with plain_pytorch():
        model.save_pretrained(given)
    options: dict[str, Any] = {"attention": attention, "trust_remote_code": trust_remote_code}
    options |= {"optimizer": OPTIMIZER, "max_grad_norm": MAX_NORM, "settings": SETTINGS}
    options |= {"router_aux_loss_coef": 0.0, "precision": "float32", "device": "cpu"}
    options |= {"image_row": row}
    try:
        with stage("loading"):
            engine = Engine.from_pretrained(given, **options)
    except ModelError as error:
        raise DiffersError("loading", str(error).replace(f"{given}", "its folder")) from error
    with engine:
        with stage("saving"):
            save_pretrained(engine, written)
            same_bits(tensors_of(given), tensors_of(written))
        vocabulary = engine.anatomy.vocab_size
        steps = [_micro_batches(seed, vocabulary, row) for seed in range(STEPS)]
        untrained = copy.deepcopy(model)
        expected = plain_trace(model, steps)
        leave_out_unused(expected, engine.anatomy.unused_weights.names)
        with stage("running"):
            found = engine_trace(engine, steps)
    refuse_changed(engine.constants, expected)
    try:
        same_steps(found, expected, expected)
    except DiffersError:
        same_steps(found, expected, plain_trace(rounded_once(untrained), steps))


# -- the two sides ---------------------------------------------------------------------------------


def _micro_batches(seed: int, vocabulary: int, row: Row) -> list[Any]:
    """Random tokens; the first micro-batch has a row that is padded at its end. row: with an image,
    which the last one has between texts."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(vocabulary, shape, generator=generator) for shape in SHAPES]
    mask = torch.ones_like(ids[0])
    mask[0, -3:] = 0
    padded = {"attention_mask": mask, "labels": ids[0].masked_fill(mask == 0, IGNORE)}
    found = [{"input_ids": ids[0]} | padded, *({"input_ids": x, "labels": x} for x in ids[1:])]
    if row is None:
        return found
    image, text = row["input_ids"], ids[1][:, ~torch.isin(ids[1][0], row["input_ids"])]
    sides, tokens = (4, text.shape[1] - 4), torch.cat([text[:, :4], image, text[:, 4:]], 1)
    marks = {n: nn.functional.pad(v, sides) for n, v in row.items() if v.shape == image.shape}
    labels = tokens.masked_fill(torch.isin(tokens, image), IGNORE)
    return [*found, {**row, **marks, "input_ids": tokens, "labels": labels}]


def plain_trace(model: nn.Module, steps: Sequence[Sequence[Mapping[str, Tensor]]]) -> Trace:
    """Autograd, clip_grad_norm_ and torch's AdamW. Raises ModelError."""
    named, trace = dict(model.named_parameters()), Trace()
    kept = {name: t for name, t in kept_tensors(model).items() if not isinstance(t, nn.Parameter)}
    kept |= named  # tied parameters once
    before = {name: tensor.detach().clone() for name, tensor in kept.items()}
    torchs = torch.optim.AdamW(
        named.values(), OPTIMIZER.lr, OPTIMIZER.betas, OPTIMIZER.eps, weight_decay=0.0
    )
    for batches in steps:
        with plain_pytorch():
            trace.losses.append(plain_gradients(model, batches))
        if not math.isfinite(trace.losses[-1]):
            raise ModelError("the loss of its small model is not finite")
        trace.gradients = trace.gradients or {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in named.items()
        }
        nn.utils.clip_grad_norm_(named.values(), MAX_NORM)
        torchs.step()
        torchs.zero_grad()
    trace.changes = {name: tensor.detach() - before[name] for name, tensor in kept.items()}
    return trace


def engine_trace(engine: Engine, steps: Sequence[Sequence[Mapping[str, Tensor]]]) -> Trace:
    """The same in the engine."""
    trace, before = Trace(), weights_of(engine)
    for batches in steps:
        trace.losses.append(engine.forward_backward([dict(batch) for batch in batches]).loss)
        trace.gradients = trace.gradients or gradients_of(engine)
        engine.step()
    trace.changes = {name: weight - before[name] for name, weight in weights_of(engine).items()}
    return trace


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    """Copies of the last `forward_backward`'s gradients, by tensor name, once they have landed."""
    finished = engine.parts.sink.finished
    assert finished, "call forward_backward first"
    named: dict[str, Tensor] = {}
    for gradient in finished:
        gradient.landed.synchronize()
        layout = engine.anatomy.blocks[gradient.block].layout.trained
        named |= layout.views(gradient.values.clone())
    return named


def weights_of(engine: Engine) -> dict[str, Tensor]:
    """Copies of the weights as the device computes with them, by the model's own names."""
    named: dict[str, Tensor] = {}
    for block in engine.anatomy.blocks:
        engine.wait_ready(block.index)
        named |= block.layout.views(engine.store.lasting("weight", block.index).clone())
    return named


def leave_out_unused(trace: Trace, names: Sequence[str]) -> None:
    """Drop tensors that do not train. Raises DiffersError if in plain PyTorch they do."""
    for name in names:
        gradient = trace.gradients.pop(name, None)  # None: a buffer, or of a tensor with two names
        trace.changes.pop(name, None)
        if gradient is not None and gradient.count_nonzero():
            raise DiffersError("gradients", f"{name} has one, and would be carried along unchanged")


# -- what differs ----------------------------------------------------------------------------------


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def same_bits(given: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> None:
    """Raise DiffersError for the first tensor whose bits were not written as they were given."""
    for name in [*given, *(name for name in written if name not in given)]:
        if name not in written or name not in given:
            where = "read, but not written" if name in given else "written, but was not read"
            raise DiffersError("saving", f"{name} is {where}")
        one, other = given[name], written[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape) or not torch.equal(one, other):
            raise DiffersError("saving", f"{name} is not written as it was read")


def refuse_changed(constants: Iterable[str], plain: Trace) -> None:
    """Take constants out of a trace. Raises DiffersError if one has a gradient or changes."""
    for name in constants:
        if plain.gradients.pop(name, torch.zeros(())).any():
            raise DiffersError("gradients", f"{name} has a gradient, and is taken for a constant")
        if plain.changes.pop(name).any():
            raise DiffersError("steps", f"{name} is changed by steps, and is taken for a constant")


def rounded_once(model: Any) -> Any:
    """The model, each of its weights moved by one rounding, up or down."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            ups = torch.rand(parameter.shape, generator=generator) < 0.5
            towards = torch.where(ups, math.inf, -math.inf)
            parameter.copy_(torch.nextafter(parameter, towards))
    return model


def same_steps(found: Trace, expected: Trace, rounded: Trace) -> None:
    """Raise DiffersError for what is off by more than rounding, that of weights included."""
    for ours, theirs, moved in zip(found.losses, expected.losses, rounded.losses, strict=True):
        allowed = SHARE * abs(theirs) + BY_ROUNDING * abs(moved - theirs)
        if not abs(ours - theirs) <= allowed:  # NaN, too
            raise DiffersError("loss", f"{ours} in place of {theirs}")
    close("gradients", found.gradients, expected.gradients, rounded.gradients)
    close("steps", found.changes, expected.changes, rounded.changes, BY_STEPS)


def close(
    name: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    rounded: Mapping[str, Tensor],
    times: int = 1,
) -> None:
    """Raise DiffersError at stage `name` for the first tensor that is off by more than rounding."""
    largest = max(float(tensor.norm()) for tensor in expected.values())
    for tensor, values in expected.items():
        if tensor not in found:
            raise DiffersError(name, f"{tensor} is missing")
        off, norm = float((found[tensor] - values).norm()), float(values.norm())
        allowed = times * (SHARE * norm + OF_LARGEST * largest)
        allowed += BY_ROUNDING * float((rounded[tensor] - values).norm())
        if not off <= allowed:  # NaN, too
            raise DiffersError(name, f"{tensor} is off by {off / max(norm, 1e-12):.2g} of its norm")
