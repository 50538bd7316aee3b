"""From a request and a machine to a plan: what both decide together, and the planner's question."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, cast

import torch
from torch import Tensor

from megatrain.engine.head import token_logprobs
from megatrain.engine.ranks.context_parallel import AllToAll
from megatrain.engine.request import (
    Request,
    check_positions,
    choose_device,
    choose_precision,
    skeleton_of,
)
from megatrain.engine.routing import balanced_on_meta, check_groups, coefficient_of
from megatrain.errors import ConfigError
from megatrain.losses import SequenceLoss
from megatrain.machine.hardware import (
    Hardware,
    disk_free,
    drive_of,
    keep_caches_small,
    read_hardware,
)
from megatrain.machine.profile import known_or_typical, with_drives
from megatrain.memory.layout import FlatLayout
from megatrain.models.anatomy import layouts_of
from megatrain.models.implementations import holds_experts
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.fp8 import Fp8Policy
from megatrain.models.transforms.kept_attention import NONE_KEPT
from megatrain.models.ulysses import why_not_in_pieces
from megatrain.optim import AdamW, Lion, Muon, Optimizer
from megatrain.optim.muon import check_one_rank
from megatrain.optim.optimizer import MOMENTS
from megatrain.planner.cost.dry_run import layer_chunks, shape_of
from megatrain.planner.cost.shape import ModelShape
from megatrain.planner.job import ImageTokens, Job, WholeUpdate
from megatrain.planner.memory import disk_bytes
from megatrain.planner.plan import Plan
from megatrain.planner.planning import make_plan
from megatrain.planner.question import Site, posed
from megatrain.planner.search import most_micro_batch_tokens
from megatrain.settings import contradiction
from megatrain.world import ALONE, World

logger = logging.getLogger("megatrain")

# Attention computes what the mask hides, and the mask takes a byte an entry: packing short examples
# into longer sequences would cost more than their padding.
AUTO_PACKED_TOKENS = 4096
IMAGES_SHARE = 0.5  # of tokens, until rows are known


@dataclass(frozen=True)
class Machine(Site):
    """The machine of a job, with the device that computes and the ranks that train together."""

    device: torch.device = field(kw_only=True)
    world: World = field(default=ALONE, kw_only=True)

    @classmethod
    def of(cls, request: Request) -> Machine:
        """This machine with one GPU, at rates that are known or typical; nothing is measured."""
        device = choose_device(request.device)
        precision = choose_precision(request.precision, device)
        keep_caches_small()
        hardware = read_hardware(request.output, device.type)
        profile = known_or_typical(hardware)
        profile, assumed = with_drives(profile, request.nvme_folders, hardware)
        return cls(precision, hardware, profile, drives_assumed=assumed, device=device)

    @classmethod
    def of_site(cls, site: Site) -> Machine:
        """The machine of a site, whose device is any GPU if it is only described."""
        if isinstance(site, cls):
            return site
        alone = None if site.alone is None else cls.of_site(site.alone)
        return cls(**{**vars(site), "alone": alone}, device=torch.device("cuda"))


@dataclass(frozen=True)
class Resolved:
    """A request on one machine, with everything decided but what the planner decides."""

    request: Request
    machine: Machine
    skeleton: Skeleton
    shape: ModelShape
    router_aux_loss_coef: float  # weight of the routers' balancing loss; 0: none
    compile: bool | Literal["loss"]  # element-wise parts of layers and loss, or of the "loss"
    packed_to: int | None  # tokens of the sequences into which examples are packed
    lengths_vary: bool  # micro-batches are padded, and seldom have the same shape twice


def resolve(request: Request, machine: Machine) -> Resolved:
    """Decide what depends on model and machine, and dry-run the model; allocates nothing.

    Raises ModelError, and ConfigError for what the model or the machine cannot do.
    """
    where, seq_len, pieces = request.where, request.seq_len, request.context_parallel
    assert seq_len is not None, "only a step of known size is planned"
    check_one_rank(request.optimizer, machine.ranks * machine.hosts)
    skeleton, device = skeleton_of(request, machine.precision), machine.device
    check_positions(skeleton, seq_len, where("seq_len"))
    if request.packing is True and not skeleton.separates_documents(device):
        why = skeleton.why_together(device) if device.type != "cpu" else ""
        why = why or "rows with images are padded" if skeleton.anatomy.of_images else why
        raise ConfigError(
            f"{where('packing')}: a {skeleton.anatomy.family} model does not keep examples apart "
            f"that are packed into one sequence{f' ({why})' if why else ''}; set data.packing: "
            "false"
        )
    name = where("router_aux_loss_coef")
    coefficient = coefficient_of(skeleton, request.router_aux_loss_coef, name)
    check_groups(coefficient, request.asked.get("groups"), "train.", where("groups"))
    asked = request.asked.get("micro_batch_tokens")
    if asked is not None and asked < request.least_tokens:
        row = "one row" if request.least_tokens == seq_len else "a pair of rows"
        raise ConfigError(
            f"{where('micro_batch_tokens')}: {asked} cannot hold {row} of train.seq_len {seq_len} "
            "tokens; raise it or lower seq_len"
        )
    packed = packs(skeleton, request.packing, seq_len, device, pieces)
    lengths_vary = request.packing is not None and not packed
    # what depends on micro-batches is found for pieces of sequences
    compiled = compiles(skeleton, machine, request.compile, lengths_vary or pieces > 1)
    in_pieces = pieces > 1 and not why_not_in_pieces(skeleton)  # others are refused
    least = piece_tokens(request.least_tokens, pieces)
    sizes = [piece_tokens(asked, pieces)] if asked else dry_run_sizes(least, device.type, skeleton)
    with balanced_on_meta(skeleton, coefficient):
        dry_run = partial(
            shape_of,
            skeleton,
            piece_tokens(seq_len, pieces),
            sizes,
            head_loss=next_token_on_meta if skeleton.anatomy.labels is None else scores_on_meta,
            runs_on=device.type,
            padded=packed,  # not rows padded at their ends: causal attention needs no mask for them
            compiled=compiled is True,
            fp8=machine.precision == "fp8",
            layer_chunks=layer_chunks(request.asked.get("layer_chunk_tokens") or None, max(sizes)),
            trade=AllToAll(0, pieces, lambda *_: None) if in_pieces else None,  # with nobody
        )
        shape = machine.world.on_rank0(dry_run)  # all have the same model, or are refused
    packed_to = seq_len if packed else None
    return Resolved(
        request, machine, skeleton, shape, coefficient, compiled, packed_to, lengths_vary
    )


def plan_of(resolved: Resolved, *, suggest: bool = False, **known: Any) -> Plan:
    """The plan of a resolved request. Never raises for lack of memory: `Plan.check` does.

    Args:
        suggest: find out what would make it faster, too.
        known: fields of `planner.job.Job` about rows and checkpoints.

    Raises ConfigError for options that exclude each other.
    """
    request, machine = resolved.request, resolved.machine
    fixed = {**request.asked, "compile": resolved.compile, "nvme_folders": request.nvme_folders}
    fixed["activations"] = request.activations
    # only now is `compile: auto` settled
    of_model = {"layers": resolved.shape.layers, "back": resolved.shape.layers_back}
    if request.asked and (found := contradiction(fixed, in_config=True, **of_model)):
        raise ConfigError(f"{request.where(found[0])}: {found[1]}")
    if fixed.get("keep_attention") and not resolved.shape.cost.kept_attention_bytes:
        raise ConfigError(f"{request.where('memory.keep_attention')}: {NONE_KEPT}")
    job = make_job(resolved, **known)
    room = room_for_nvme(request, machine.hardware, sum(disk_bytes(job, resolved.shape).values()))
    rooms = [room for room in machine.world.all_gather(room) if room is not None]
    planning = partial(
        make_plan,
        job,
        resolved.shape,
        machine.hardware,
        machine.profile,
        suggest=suggest,
        gpu_limit=request.gpu_limit,
        host_limit=request.host_limit,
        nvme_limit=min(rooms, default=None),
    )
    return replace(
        machine.world.on_rank0(planning),
        drives_assumed=tuple(map(str, machine.drives_assumed)),
        ranks_assumed=machine.together_assumed,
        made_of=resolved,
    )


def piece_tokens(tokens: int, pieces: int) -> int:
    """Tokens of a piece, with its padding."""
    return -(-tokens // pieces)


def make_job(resolved: Resolved, **known: Any) -> Job:
    """The planner's question. known: as in `plan_of`."""
    request, machine, skeleton = resolved.request, resolved.machine, resolved.skeleton
    optimizer, pieces, rows = request.optimizer, request.context_parallel, request.rows_per_step
    asked, seq_len, loss = {**request.asked}, request.seq_len, request.loss
    assert seq_len is not None
    if asked.get("micro_batch_tokens") is not None:
        asked["micro_batch_tokens"] = piece_tokens(asked["micro_batch_tokens"], pieces)
    tokens_per_step = request.tokens_per_step or (rows or 1) * seq_len
    if resolved.shape.images is not None:
        guess = ImageTokens(IMAGES_SHARE, IMAGES_SHARE, resolved.shape.images.tokens)
        known = {"images": guess, **known}
    job = Job(
        precision=machine.precision,
        tokens_per_step=max(tokens_per_step, request.least_tokens),  # a row at least
        rows_per_step=None if rows is None else rows * pieces,
        seq_len=piece_tokens(seq_len, pieces),
        least_tokens=piece_tokens(request.least_tokens, pieces),
        pieces=pieces,
        head_twice=isinstance(loss, SequenceLoss),
        refers=isinstance(loss, SequenceLoss) and loss.reference,
        whole_step=isinstance(loss, SequenceLoss) and loss.whole_step,
        clipping=request.max_grad_norm is not None,
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
        activations=request.activations,
        draws_weights=request.source is None,
        lengths_vary=resolved.lengths_vary,
        nvme_drives=len({drive_of(folder) for folder in request.nvme_folders}),
        wire=request.wire,
        checkpoints_kept=request.checkpoints_kept,
        keeps_best=request.keeps_best,
    )
    return posed(job, machine, request.transport, **asked, **known)


def room_for_nvme(request: Request, hardware: Hardware, checkpoint_bytes: int) -> int | None:
    """Bytes that fit into the folders on NVMe, which hold equal shares; None without folders.

    checkpoint_bytes: these take room on the drive of the run's own folder.
    """
    folders, limit, own = request.nvme_folders, request.nvme_limit, drive_of(request.output)
    if not folders:
        return None
    free = {drive_of(folder): disk_free(folder) for folder in folders}
    free |= {own: hardware.disk_free_bytes - checkpoint_bytes}
    # shares are equal: the fullest drive decides
    on_drive = Counter(drive_of(folder) for folder in folders)
    room = len(folders) * min(free[drive] // count for drive, count in on_drive.items())
    return max(0, room if limit is None else min(room, limit))


# why: decision 0016
def packs(
    skeleton: Skeleton,
    packing: bool | Literal["auto"] | None,
    seq_len: int,
    device: torch.device,
    pieces: int = 1,
) -> bool:
    """True if examples are packed; "auto": on a GPU, if sequences are short, and whole."""
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


# why: decision 0007
def compiles(
    skeleton: Skeleton, machine: Machine, wanted: bool | Literal["auto", "loss"], lengths_vary: bool
) -> bool | Literal["loss"]:
    """`Resolved.compile`. "auto": on a GPU where a compiler is at hand the loss, and layers too if
    all rows have one length and layers compute in PyTorch alone, without dropout.

    lengths_vary: of rows, or they come in pieces.
    """
    if wanted != "auto":
        return wanted
    found = machine.compiles
    if found is None:
        compilers = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
        found = compilers and find_spec("triton") is not None
    if machine.device.type != "cuda" or not found:
        return False
    # compiled, dropout's masks would not come back; kernels of other packages leave the compiler's
    # graphs, and plans would count others
    whole = not (lengths_vary or skeleton.has_dropout or skeleton.has_kernels)
    return whole or "loss"


def dry_run_sizes(least: int, device_type: str, skeleton: Skeleton) -> list[int]:
    """Tokens of micro-batches of one row, and their doublings up to the largest that pays."""
    largest = most_micro_batch_tokens(device_type, holds_experts(skeleton.layers))
    return [least << i for i in range((max(least, largest) // least).bit_length())]


def next_token_on_meta(logits: Tensor) -> Tensor:
    """The next-token loss of logits [n, vocab] without data, for the planner's dry run."""
    labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return -token_logprobs(logits, labels).sum()


def scores_on_meta(scores: Tensor) -> Tensor:
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
    layouts = [layout.trained for layout in layouts_of(skeleton.anatomy)]
    numel = sum(layout.numel for layout in layouts)
    return tuple((name, sum(sizes) / numel) for name, sizes in _bytes_of(optimizer, layouts))


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
