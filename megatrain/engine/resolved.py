"""A training job on one machine, with everything decided but what the planner decides."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import torch

from megatrain.engine.head import token_logprobs
from megatrain.engine.objective import AnyLoss
from megatrain.engine.routing import balanced_on_meta
from megatrain.losses import SequenceLoss, next_token
from megatrain.machine.hardware import Hardware, drive_of
from megatrain.machine.profile import MachineProfile
from megatrain.memory.layout import FlatLayout
from megatrain.models.anatomy import layouts_of
from megatrain.models.experts import holds_experts
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.fp8 import Fp8Policy
from megatrain.optim import AdamW, Lion, Muon, Optimizer
from megatrain.optim.elementwise import MOMENTS
from megatrain.optim.muon import check_ranks
from megatrain.planner.cost.shape import ModelShape, layer_chunks, shape_of
from megatrain.planner.job import Job, WholeUpdate
from megatrain.planner.search import most_micro_batch_tokens
from megatrain.world import ALONE, World

logger = logging.getLogger("megatrain")

# Attention computes what the mask hides, and the mask takes a byte an entry: packing short examples
# into longer sequences would cost more than their padding.
AUTO_PACKED_TOKENS = 4096


@dataclass(frozen=True)
class Machine:
    """Where a job computes, in which precision, and how fast.

    Attributes:
        compiles: a C compiler and Triton are at hand; None: look for them here.
        drives_assumed: folders for NVMe on drives that were not measured.
        here: False for a machine that is only described.
        world: the ranks that compute, this one with the device.
        ranks, hosts: GPUs of a host that train together, and hosts. `hardware` and `profile` are
            then what each has, and reaches while all work.
        together_assumed: nobody measured that.
        peers: the GPUs of a host reach each other's memory.
        alone: the same machine with one GPU at work.
    """

    device: torch.device
    precision: str
    hardware: Hardware
    profile: MachineProfile
    compiles: bool | None = None
    drives_assumed: tuple[Path, ...] = ()
    here: bool = True
    world: World = ALONE
    ranks: int = 1
    hosts: int = 1
    together_assumed: bool = False
    peers: bool = True
    alone: Machine | None = None


@dataclass(frozen=True)
class Weights:
    """Where weights come from: a folder, a GGUF file or a hub id; None draws them at random."""

    source: str | None
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Resolved:
    """A job on one machine, decided once from a config or from keywords; nothing is allocated yet.

    Attributes:
        compile: fuse the element-wise parts of layers and loss, or of the "loss" alone.
        router_aux_loss_coef: weight of the routers' balancing loss; 0: none.
        packed_to: tokens of the sequences into which examples are packed; None: one example each.
        lengths_vary: sequences are of variable length, so that micro-batches are padded and seldom
            have the same shape twice.
        nvme_folders: folders for what host RAM has no room for.
        gpu_limit: bytes of GPU memory to use; None: what is free.
        loss: what is minimised.
        pieces: of each sequence, on as many ranks that share it.
    """

    machine: Machine
    skeleton: Skeleton
    shape: ModelShape
    optimizer: Optimizer
    max_grad_norm: float | None
    router_aux_loss_coef: float
    seq_len: int
    compile: bool | Literal["loss"]
    packed_to: int | None
    lengths_vary: bool
    weights: Weights
    seed: int = 0
    attention: str = "auto"
    nvme_folders: tuple[Path, ...] = ()
    gpu_limit: int | None = None
    loss: AnyLoss = next_token
    pieces: int = 1

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest micro-batch that holds any row: a pair is two sequences."""
        return least_tokens(self.loss, self.seq_len)


def least_tokens(loss: AnyLoss, seq_len: int) -> int:
    """`Resolved.least_tokens`."""
    return 2 * seq_len if isinstance(loss, SequenceLoss) and loss.of_pairs else seq_len


def resolve(
    skeleton: Skeleton,
    machine: Machine,
    *,
    optimizer: Optimizer,
    max_grad_norm: float | None,
    router_aux_loss_coef: float,
    seq_len: int,
    weights: Weights,
    packing: bool | Literal["auto"] | None = None,
    compile: bool | Literal["auto", "loss"] = "auto",
    micro_batch_tokens: int | None = None,
    layer_chunk_tokens: int | Literal["auto"] | None = "auto",
    seed: int = 0,
    attention: str = "auto",
    nvme_folders: Sequence[Path] = (),
    gpu_limit: int | None = None,
    loss: AnyLoss = next_token,
    pieces: int = 1,
) -> Resolved:
    """Decide what depends on model and machine, and dry-run the model. Raises ModelError, and
    ConfigError for an optimizer that several ranks cannot use.

    Args:
        packing: of examples into sequences of `seq_len`; None: all rows are full.
        micro_batch_tokens, layer_chunk_tokens: the user's, or None and "auto".
        pieces: as `Resolved` has it. What depends on micro-batches is found for pieces.
    """
    check_ranks(optimizer, machine.ranks * machine.hosts)
    packed = packs(skeleton, packing, seq_len, machine.device, pieces)
    lengths_vary = packing is not None and not packed
    compiled = compiles(skeleton, machine, compile, lengths_vary or pieces > 1)
    device, mixture = machine.device.type, holds_experts(skeleton.layers)
    least = piece_tokens(least_tokens(loss, seq_len), pieces)
    sizes = micro_batch_sizes(least, device, micro_batch_tokens, mixture, pieces)
    with balanced_on_meta(skeleton, router_aux_loss_coef):
        shape = shape_of(
            skeleton,
            piece_tokens(seq_len, pieces),
            sizes,
            head_loss=next_token_on_meta if skeleton.anatomy.labels is None else scores_on_meta,
            runs_on=device,
            padded=packed,  # not rows padded at their ends: causal attention needs no mask for them
            compiled=compiled is True,
            fp8=machine.precision == "fp8",
            layer_chunks=layer_chunks(layer_chunk_tokens, max(sizes)),
        )
    return Resolved(
        *(machine, skeleton, shape, optimizer, max_grad_norm, router_aux_loss_coef, seq_len),
        compile=compiled,
        packed_to=seq_len if packed else None,
        lengths_vary=lengths_vary,
        weights=weights,
        seed=seed,
        attention=attention,
        nvme_folders=tuple(nvme_folders),
        gpu_limit=gpu_limit,
        loss=loss,
        pieces=pieces,
    )


def piece_tokens(tokens: int, pieces: int) -> int:
    """Tokens of a piece, with its padding."""
    return -(-tokens // pieces)


def make_job(resolved: Resolved, *, tokens_per_step: int, **given: Any) -> Job:
    """The planner's question.

    given: options that the user sets, in tokens and rows of whole sequences, and further fields of
        `planner.job.Job` that follow neither from the model nor from the machine.
    """
    optimizer, skeleton, pieces = resolved.optimizer, resolved.skeleton, resolved.pieces
    if given.get("micro_batch_tokens") is not None:
        given["micro_batch_tokens"] = piece_tokens(given["micro_batch_tokens"], pieces)
    if given.get("rows_per_step") is not None:
        given["rows_per_step"] *= pieces
    return Job(
        precision=resolved.machine.precision,
        tokens_per_step=max(tokens_per_step, resolved.least_tokens),  # a row at least
        seq_len=piece_tokens(resolved.seq_len, pieces),
        least_tokens=piece_tokens(resolved.least_tokens, pieces),
        pieces=pieces,
        head_twice=isinstance(resolved.loss, SequenceLoss),
        refers=isinstance(resolved.loss, SequenceLoss) and resolved.loss.reference,
        whole_step=isinstance(resolved.loss, SequenceLoss) and resolved.loss.whole_step,
        clipping=resolved.max_grad_norm is not None,
        balances_routers=resolved.router_aux_loss_coef > 0,
        state_bytes=state_bytes(optimizer, skeleton),
        whole_update=whole_update(optimizer, skeleton),
        update_arithmetic=optimizer.arithmetic,
        lighter_moments=tuple(
            (moments, state_bytes(lighter, skeleton), lighter.arithmetic)
            for moments, lighter in with_lighter_moments(optimizer)
        ),
        fp8_share=Fp8Policy().share(skeleton.layers),
        compiled=resolved.compile is True,
        fused_loss=bool(resolved.compile),
        draws_weights=resolved.weights.source is None,
        lengths_vary=resolved.lengths_vary,
        nvme_drives=len({drive_of(folder) for folder in resolved.nvme_folders}),
        ranks=resolved.machine.ranks,
        hosts=resolved.machine.hosts,
        peers=resolved.machine.peers,
        **given,
    )


def room_on_drives(
    folders: Sequence[Path], free: Callable[[Path], int], limit: int | None
) -> int | None:
    """Bytes that fit into folders which hold an equal share each; None without folders.

    Args:
        free: bytes free on a folder's drive, which folders on the same drive share.
        limit: the user's own, for all folders together.
    """
    if not folders:
        return None
    on_drive = Counter(drive_of(folder) for folder in folders)
    # shares are equal: the fullest drive decides
    room = len(folders) * min(free(folder) // on_drive[drive_of(folder)] for folder in folders)
    return max(0, room if limit is None else min(room, limit))


def packs(
    skeleton: Skeleton,
    packing: bool | Literal["auto"] | None,
    seq_len: int,
    device: torch.device,
    pieces: int = 1,
) -> bool:
    """True if examples are packed into sequences; "auto": on a GPU, if sequences are short, and
    whole."""
    pays = device.type == "cuda" and seq_len <= AUTO_PACKED_TOKENS and pieces == 1
    if not (packing is True or (packing == "auto" and pays)):
        return False
    apart = skeleton.separates_documents(device)
    why = None if apart else skeleton.why_together(device)
    if why and packing == "auto":
        logger.warning(
            f"examples are padded, not packed: a {skeleton.anatomy.family} model does not keep "
            f"them apart in one sequence ({why})"
        )
    return apart


def compiles(
    skeleton: Skeleton, machine: Machine, wanted: bool | Literal["auto", "loss"], lengths_vary: bool
) -> bool | Literal["loss"]:
    """`Resolved.compile`. "auto": on a GPU where a compiler is at hand the loss, and layers too if
    all rows have one length and layers compute in PyTorch alone, without dropout.

    lengths_vary: of rows, or they come in pieces.
    """
    if wanted != "auto":
        return wanted
    if not can_compile(machine):
        return False
    # compiled, dropout's masks would not come back; kernels of other packages leave the compiler's
    # graphs, and plans would count others
    whole = not (lengths_vary or skeleton.has_dropout or skeleton.has_kernels)
    return whole or "loss"


def can_compile(machine: Machine) -> bool:
    """True if that machine has a GPU, and torch.compile can work there."""
    if machine.device.type != "cuda":
        return False
    if machine.compiles is not None:
        return machine.compiles
    compilers = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    return compilers and find_spec("triton") is not None


def micro_batch_sizes(
    least: int, device_type: str, wanted: int | None, mixture: bool, pieces: int = 1
) -> list[int]:
    """Micro-batch sizes in tokens that are dry-run for the planner: the one asked for, which has
    whole sequences, or that of one row and its doublings up to the largest that pays."""
    if wanted is not None:
        return [piece_tokens(wanted, pieces)]
    largest = max(least, most_micro_batch_tokens(device_type, mixture))
    return [least << i for i in range((largest // least).bit_length())]


def next_token_on_meta(logits: torch.Tensor) -> torch.Tensor:
    """The next-token loss of logits [n, vocab] without data, for the planner's dry run."""
    labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return -token_logprobs(logits, labels).sum()


def scores_on_meta(scores: torch.Tensor) -> torch.Tensor:
    """The same for a reward model's scores [n, labels]."""
    return scores[:, 0].float().sum()


# -- what the planner needs to know of an optimizer ------------------------------------------------


def with_lighter_moments(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The optimizer with every type of moments that is narrower than its own."""
    if isinstance(optimizer, (AdamW, Lion)):
        names = [*MOMENTS]
        for moments in names[names.index(optimizer.moments) + 1 :]:
            yield moments, replace(optimizer, moments=moments)


def state_bytes(optimizer: Optimizer, skeleton: Skeleton) -> tuple[tuple[str, float], ...]:
    """Bytes per parameter of each array; empty where blocks differ, as `whole_update` tells."""
    if optimizer.whole_tensors:
        return ()
    layouts = trained_layouts(skeleton)
    numel = sum(layout.numel for layout in layouts)
    return tuple((name, sum(sizes) / numel) for name, sizes in _bytes_of(optimizer, layouts))


def trained_layouts(skeleton: Skeleton) -> list[FlatLayout]:
    """Of what an update reads and writes."""
    return [layout.trained for layout in layouts_of(skeleton.anatomy)]


def _bytes_of(
    optimizer: Optimizer, layouts: Sequence[FlatLayout]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, bytes of every block) of each array of state; layouts: of trained tensors."""
    for array in optimizer.state_arrays:
        sizes = (layout.per(array.per).numel * array.dtype.itemsize for layout in layouts)
        yield array.name, tuple(sizes)


def whole_update(optimizer: Optimizer, skeleton: Skeleton) -> WholeUpdate | None:
    """Memory and work of an optimizer of whole tensors for every block; None for any other."""
    if not optimizer.whole_tensors:
        return None
    whole, layouts = cast(Muon, optimizer), layouts_of(skeleton.anatomy)
    scratch = whole.scratch(layouts)
    state = tuple(_bytes_of(optimizer, [layout.trained for layout in layouts]))
    numel = sum(layout.trainable for layout in layouts)
    return WholeUpdate(
        state_bytes=state,
        product_flops=tuple(whole.product_flops(layout) for layout in layouts),
        bytes_per_parameter=sum(sum(sizes) for _, sizes in state) / numel,
        passes_bytes=whole.passes_bytes,
        host_scratch=scratch.host,
        device_scratch=scratch.device,
    )
