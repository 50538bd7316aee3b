"""The schedule on which engine, planner and simulation agree: the order in which a step visits
blocks, the buffers that blocks and gradients pass through, which layers save their activations, and
sizes of codecs' codes. (Sizes of memory: memory/sizes.py.)

Pure functions of integers. Blocks are counted in execution order: 0 is the embedding, then come the
layers, the last one is the head. `numels` are the elements of every block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple

LAYER_SLOTS: Final = 2  # device buffers for layers: one computes while the other is filled
TRAVELLING_SUMS: Final = 2  # fp32 accumulators: one is added to while another is on its way
LANDING_BUFFERS: Final = 3  # of gradients applied at once: one arrives, one waits, one is in use


# -- order and weights' slots ----------------------------------------------------------------------


@lru_cache(maxsize=256)
def block_order(blocks: int, first: int = 0) -> tuple[int, ...]:
    """Visits of an accumulation group: forward through all blocks, and back from the head to
    `first`, below which nothing is trained."""
    return (*range(blocks), *reversed(range(first, blocks - 1)))


@lru_cache(maxsize=1024)
def slots_of_blocks(
    blocks: int, resident: int, tied: bool, replicated: int = 0
) -> tuple[int | None, ...]:
    """The slot that each block's weights are streamed into, counted from 0; None: it is resident.

    Layers alternate between LAYER_SLOTS slots. Embedding and head share a slot, unless they are
    tied: then the embedding stays in its slot until the head, whose own tensors have another one.
    The first `replicated` blocks, unless they are resident, have slots of their own.
    """
    here = min(resident, blocks)
    alone = max(here, min(replicated, blocks))
    streamed = range(max(1, alone), blocks - 1)
    layers = [number % LAYER_SLOTS for number in range(len(streamed))]
    edge = min(LAYER_SLOTS, len(streamed))
    first = [] if alone else [edge]
    head = [edge + 1 if tied and first else edge] if alone < blocks else []
    own = len({*first, *layers, *head})
    return (*[None] * here, *range(own, own + alone - here), *first, *layers, *head)


class SlotSizes(NamedTuple):
    """Elements of each slot; the slots of layers are counted first."""

    layers: tuple[int, ...]
    edges: tuple[int, ...]  # of the embedding and the head
    own: tuple[int, ...]  # of replicated blocks


def slot_sizes(numels: Sequence[int], resident: int, tied: bool, replicated: int = 0) -> SlotSizes:
    """Each slot holds the largest block that is streamed into it; those of layers are equal."""
    alone = max(resident, replicated)
    layers = numels[max(1, alone) : -1]
    edges = [numels[block] for block in (0, len(numels) - 1) if block >= alone]
    return SlotSizes(
        (max(layers, default=0),) * min(LAYER_SLOTS, len(layers)),
        tuple(edges) if tied or not edges else (max(edges),),
        tuple(numels[resident:alone]),
    )


@lru_cache(maxsize=256)
def uploads(
    visits: tuple[int, ...], slots: tuple[int | None, ...], replicated: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Blocks whose upload is asked for before each visit: as many of the next ones as find their
    slot free, that is not needed by another block which is visited first."""
    asked, position = [], 0
    for visit in range(len(visits)):
        first = position
        while position < len(visits):
            wanted = visits[position]
            # their slots are always free, but they come no earlier than others would: what is
            # exchanged for a layer that computes would have to wait for them
            if wanted < replicated and position > visit + LAYER_SLOTS:
                break
            before = visits[visit:position]
            slot = slots[wanted]
            if slot is not None and any(slots[b] == slot and b != wanted for b in before):
                break
            position += 1
        asked.append(tuple(block for block in visits[first:position] if slots[block] is not None))
    return tuple(asked)


# -- gradient accumulators -------------------------------------------------------------------------


def summed_blocks(blocks: int, groups: int, resident: int, sums_on_device: int) -> int:
    """Number of blocks, the first ones, whose fp32 accumulators stay between groups."""
    return min(max(sums_on_device, resident), blocks) if groups > 1 else 0


def own_sums(summed: int, tied: bool) -> int:
    """Number of blocks, the first ones, that each have an fp32 accumulator for the whole step: a
    tied embedding's begins at the head and ends at the embedding."""
    return max(summed, 1) if tied else summed


def sum_buffers(numels: Sequence[int], travel: bool) -> tuple[int, ...]:
    """Elements of the accumulators on the device that blocks of `numels` take in turn. travel:
    between groups the sums wait in host RAM, or after the last one they are exchanged."""
    return (max(numels),) * (TRAVELLING_SUMS if travel else 1) if numels else ()


# -- activations -----------------------------------------------------------------------------------

# Pieces, each of what one micro-batch leaves behind in a layer, in rings on the device: one arrives
# while the other is read, and saved activations take longer to leave than the next micro-batch to
# compute.
LEAVING, COMING = 3, 2

# Of a layer's saved activations; "nowhere": it is recomputed from its activation checkpoint;
# "unneeded": backward ends above it.
Where = Literal["device", "host", "nowhere", "unneeded"]


def leaving(micro_batches: float, layers_on_host: int) -> int:
    """Pieces of a group that may be on their way to the host."""
    # a lone checkpoint leaves while a whole layer computes
    return 1 if micro_batches <= 1 and not layers_on_host else LEAVING


class Rings(NamedTuple):
    """Bytes of the rings for activations on their way down, and for those that come up: checkpoints
    and saved activations apart, or small pieces would lie where the next large one has to be."""

    down: int
    checkpoints: int
    graphs: int


def rings(micro_batches: float, layers_on_host: int, checkpoint: int, graph: int) -> Rings:
    """The rings of a group. checkpoint, graph: bytes of the largest piece; graph 0: none."""
    down = leaving(micro_batches, layers_on_host) * max(checkpoint, graph)
    return Rings(down, COMING * checkpoint, COMING * graph)


def layers_back(layers: int, first: int) -> int:
    """Layers that backward visits, the last ones. first: the first block that is trained."""
    return min(layers, layers + 1 - first)


@lru_cache(maxsize=256)
def graphs_of_layers(layers: int, retained: int, on_host: int, first: int = 0) -> tuple[Where, ...]:
    """The place of each layer's saved activations: on the device for the last `retained` layers, in
    host RAM for `on_host` others, spread evenly so that they leave while layers between compute.
    first: the first block that is trained; layers before it need none."""
    back = layers_back(layers, first)
    others = back - min(retained, back)
    sent = min(on_host, others)
    spread: list[Where] = [
        "host" if (i + 1) * sent // others > i * sent // others else "nowhere"
        for i in range(others)
    ]
    staying: list[Where] = ["device"] * (back - others)
    before: list[Where] = ["unneeded"] * (layers - back)
    return (*before, *spread, *staying)


# -- codecs of activation checkpoints --------------------------------------------------------------

SCALE_BYTES = 2  # a bfloat16


@dataclass(frozen=True)
class Form:
    """Elements in groups, row after row: a code of `bits` each, and a scale for every group."""

    bits: int
    group: int  # a multiple of 8, so that codes fill whole bytes

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements; the last group is whole."""
        return self.groups(numel) * (self.group * self.bits // 8 + SCALE_BYTES)

    def groups(self, numel: int) -> int:
        """Groups of `numel` elements."""
        return -(-numel // self.group)


FORMS = {"int8": Form(8, 64), "int6": Form(6, 64), "int4": Form(4, 32)}
UNCHANGED = "none"


def kept_row_bytes(activations: str, width: int, element_bytes: int) -> int:
    """The most bytes of a token's hidden state of `width` elements, as a codec keeps it."""
    return width * element_bytes if activations == UNCHANGED else FORMS[activations].nbytes(width)
