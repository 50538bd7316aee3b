"""The planner's tables of bytes: what a run holds on every tier, array by array, under given choices. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from megatrain.activations import UNCHANGED, kept_row_bytes
from megatrain.hardware import COMPILER_BYTES, CUDNN_LIBRARY_BYTES, LARGE_BLOCK_BYTES, MIB, Hardware
from megatrain.nvme_tier import blocks_on_nvme, boundary_pages, boundary_room, boundary_staging, holds, stages
from megatrain.planner_job import Choices, Job
from megatrain.retention import graphs_of_layers, rings
from megatrain.run_folder import SMALL_FILES_BYTES

if TYPE_CHECKING:
    from megatrain.models.shape import CompiledSets, ModelShape

WEIGHT_BYTES = {"bfloat16": 2, "fp8": 2, "float32": 4}  # fp8 lives for one product
REMAINDER_BYTES = {"bfloat16": 2, "fp8": 2, "float32": 0}  # float32's weight is the master itself
INPUT_BYTES = 24  # of a token: its id, its position among the targets and its label, int64 each
SUM_BYTES = 4  # gradients are summed in fp32 whatever the precision

HUGE_PAGE_BYTES = 2 << 20  # the store's slabs are whole huge pages
LAYER_SLOTS = 2  # one computes while the other is filled
TRAVELLING_SUMS = 2  # of gradient sums that wait on the host between groups, one is added to while another leaves
GRADIENT_STAGES = 2  # one is copied to the host while the other is filled
HOST_STAGES = 3  # without a stored gradient: one arrives, one waits, one is used by the update

# What torch's caching allocator reserves and does not use: it grows with the working set, where tensors of many sizes come and go.
# H200 with expandable segments, eager: 37 to 83 MiB for working sets of 0.2 to 1.4 GiB, 300 for 4.9 GiB (benchmarks/plan_check.py).
# Compiled layers that are recomputed and the head take turns in one memory with blocks of other sizes: of what the smaller one needs,
# 10 to 41%, mostly 20, in nine runs; and 60 MiB that the first step alone takes.
# Boundary activations that leave for host RAM come back among other tensors: 21 to 79 MiB more, in four runs.
ALLOCATOR_SLACK_BYTES, ALLOCATOR_SLACK_SHARE = 32 * MIB, 0.05
COMPILED_SLACK_BYTES, COMPILED_SLACK_SHARE = 64 * MIB, 0.2
OFFLOAD_SLACK_BYTES = 64 * MIB
# And of activations where micro-batches have ever new shapes, whose holes nothing else fills. Host: malloc's heap, 24 steps of a 135M
# model with all layers retained. GPU: 2 GiB that came and went had 0.26 of holes after 20 steps. Of retained graphs' blocks, mostly twice
# as large as a micro-batch's hidden states, torch splits nothing off below 1 MiB: half of that at most is lost, 0.9% of graphs in two runs.
VARIED_ROWS_SLACK = {"gpu": 0.1, "host": 0.4}
UNSPLIT_BYTES = MIB // 4  # for each that hidden states take
# On a CPU, of retained activations: graphs of many layers make holes in malloc's heap, where most of their tensors are if hidden states are
# small enough for it; others are mapped. Five runs of 0.1B and 0.3B: 14 to 22%, and 5 and 8%.
HEAP_HOLES_SHARE, MAPPED_HOLES_SHARE = 0.2, 0.05
GPU_RECORDS_SHARE = 0.4 / 1024  # of GPU memory that is in use, what the host keeps to record it: 20 MiB of 89 GiB, 68 of 125
HEAD_SET = "head, one chunk"
NOT_ALLOCATED = ("allocator slack", "CUDA context")  # rows of the device that the driver counts and PyTorch does not


# Bytes that a CPU's kernel libraries hold at the peak for each weight of the head, in their own forms of it: fitted to the host's peak of
# six runs of 8 and 4 layers with 4 and 25 million weights in the head (docs/log.md), which it foretells to 1%.
CPU_HEAD_BYTES = {"bfloat16": 4.6, "fp8": 4.6, "float32": 2.6}
HEAD_COPIES = "the libraries' forms of the head"


def working_sets(choices: Choices, job: Job, shape: ModelShape, hardware: Hardware) -> dict[str, int]:
    """Bytes of the computations that take turns: the device holds the largest."""
    tokens = choices.micro_batch_tokens
    sets = {
        "layer, one micro-batch": _layer_working_set(choices, job, shape),
        "embedding, one micro-batch": embedding_bytes(tokens, job, shape),
        HEAD_SET: head_bytes(choices.head_chunk_tokens, tokens, job, shape, hardware),
    }
    if job.draws_weights:  # one block after another, before there are activations
        drawn = max(shape.block_numel) * SUM_BYTES - sum(activation_bytes(choices, job, shape).values())
        sets["weights at random, one block"] = max(0, drawn)
    return sets


def _layer_working_set(choices: Choices, job: Job, shape: ModelShape) -> int:
    """Of a layer that is recomputed, or of a retained one beyond its graph. An input that a codec had kept is whole meanwhile.

    Layers are recomputed after all retained graphs are gone. Of layers that are not compiled, with graphs in host RAM, or traced in another
    precision, the eager working set less one graph is the bound for both kinds.
    """
    tokens, chunk, sets = choices.micro_batch_tokens, choices.layer_chunk_tokens, _compiled_sets(choices, job, shape)
    decoded = tokens * shape.hidden_size * WEIGHT_BYTES[job.precision] if _decodes(choices, job, shape) else 0
    if sets is None:
        graph = retained_bytes(choices, job, shape) // choices.retained if choices.retained and not chunk else 0
        return shape.layer_bytes(tokens, chunk) + decoded - graph
    recomputed = max(sets.last.at(tokens), sets.recomputed.at(tokens) - _last_input(choices, job, shape))
    recomputed += decoded - _retained_here(choices, job, shape)
    beyond = (sets.beyond_cheap_graph if choices.cheap_retention else sets.beyond_graph).at(tokens)
    return max(recomputed if _recomputed(choices, shape) else 0, beyond if choices.retained else 0)


def _last_input(choices: Choices, job: Job, shape: ModelShape) -> int:
    """Bytes of the last layer's input, if it is on the device while that layer is recomputed, and gone when others are."""
    stays_or_leaves = choices.offload or choices.second_backward or choices.retained or choices.retained_on_host
    return 0 if stays_or_leaves else choices.group_tokens(job) * boundary_row_bytes(job, shape)


def compiled_sets(job: Job, shape: ModelShape) -> CompiledSets | None:
    """What compiled layers need, if that is known: not where fp8 is only asked about, and the traces are of bf16."""
    sets = shape.compiled if job.compiled else None
    return sets if sets and sets.fp8 == (job.precision == "fp8") else None


def _compiled_sets(choices: Choices, job: Job, shape: ModelShape) -> CompiledSets | None:
    """Traces know nothing of chunks, and of graphs that come back from host RAM."""
    return None if choices.layer_chunk_tokens or choices.retained_on_host else compiled_sets(job, shape)


def _allocator_slack(sets: Mapping[str, int], choices: Choices, job: Job, shape: ModelShape) -> int:
    """sets: of `working_sets`."""
    compiled, offloaded = _compiled_sets(choices, job, shape), OFFLOAD_SLACK_BYTES if choices.offload else 0
    if compiled is None:
        return offloaded + ALLOCATOR_SLACK_BYTES + int(ALLOCATOR_SLACK_SHARE * max(sets.values()))
    layer = compiled.recomputed.at(choices.micro_batch_tokens) if _recomputed(choices, shape) else 0
    return offloaded + COMPILED_SLACK_BYTES + int(COMPILED_SLACK_SHARE * min(sets[HEAD_SET], layer))


def activation_bytes(choices: Choices, job: Job, shape: ModelShape) -> dict[str, int]:
    """What a group's micro-batches hold on the device from one block to the next."""
    return {
        "boundary activations": _boundaries(choices, job, shape),
        "retained activations": _retained_here(choices, job, shape),
        "token ids and targets": max(job.padded_tokens(choices.micro_batch_tokens), choices.group_tokens(job)) * INPUT_BYTES,
        "rotary tables and masks": choices.micro_batches(job) * shape.calls.at(choices.micro_batch_tokens),
    }


def _retained_here(choices: Choices, job: Job, shape: ModelShape) -> int:
    """Bytes of a group's graphs on the device."""
    return retained_bytes(choices, job, shape) * choices.group_tokens(job) // choices.micro_batch_tokens


def device_bytes(choices: Choices, job: Job, shape: ModelShape, hardware: Hardware) -> dict[str, int]:
    """What lies where the model computes: the GPU, or host RAM when training on the CPU."""
    sets = working_sets(choices, job, shape, hardware)
    working_set = max(sets.values())
    table = block_bytes(choices, job, shape, hardware) | activation_bytes(choices, job, shape) | {"working set": working_set}
    retained, passing = table["retained activations"], table["boundary activations"] + working_set
    hidden_states = choices.micro_batch_tokens * shape.hidden_size * WEIGHT_BYTES[job.precision]
    if hardware.gpu:
        varied = int(VARIED_ROWS_SLACK["gpu"] * passing + min(VARIED_ROWS_SLACK["gpu"], UNSPLIT_BYTES / hidden_states) * retained)
        table |= {
            "cuBLAS workspaces": hardware.workspace_bytes,
            "allocator slack": _allocator_slack(sets, choices, job, shape) + (varied if job.pads else 0),
            "CUDA context": hardware.context_bytes,
        }
    elif job.pads:
        table["allocator slack"] = int(VARIED_ROWS_SLACK["host"] * (passing + retained))
    elif choices.retained:
        table["allocator slack"] = int((HEAP_HOLES_SHARE if hidden_states < LARGE_BLOCK_BYTES else MAPPED_HOLES_SHARE) * retained)
    return table


def block_bytes(choices: Choices, job: Job, shape: ModelShape, hardware: Hardware) -> dict[str, int]:
    """Of `device_bytes` all that depends on where blocks and their gradient sums live."""
    weight, sizes = WEIGHT_BYTES[job.precision], shape.block_numel
    layers = sizes[max(choices.resident, 1) : -1]  # those that are streamed
    table = {
        "layer slots": min(LAYER_SLOTS, len(layers)) * max(layers, default=0) * weight,
        "embedding and head slot": _edge_slot(choices, shape) * weight,
        "resident state": _resident_state(choices, job, shape),
        "gradient sums": _device_sums(choices, shape) * SUM_BYTES,
        "gradient staging": GRADIENT_STAGES * max(sizes) * weight,
    }
    if job.whole_update is not None and (choices.resident or any(job.whole_update.product_flops)):
        products = any(job.whole_update.product_flops)  # on a stream that has a workspace of its own
        table["update's scratch"] = job.whole_update.device_scratch + (hardware.workspace_bytes if hardware.gpu and products else 0)
    return table


def state_bytes_per_parameter(job: Job) -> float:
    """Weight, remainder and the optimizer's arrays."""
    of_tensors = job.whole_update.bytes_per_parameter if job.whole_update is not None else 0.0
    return WEIGHT_BYTES[job.precision] + REMAINDER_BYTES[job.precision] + sum(size for _, size in job.state_bytes) + of_tensors


def resident_bytes_per_parameter(choices: Choices, job: Job) -> float:
    """Of a resident block: its state, and its gradient where that waits for the norm. Sums that stay on the device hold it already."""
    stored = choices.stores_gradients(job) and choices.groups == 1
    return state_bytes_per_parameter(job) + (WEIGHT_BYTES[job.precision] if stored else 0)


def _resident_state(choices: Choices, job: Job, shape: ModelShape) -> int:
    numel, whole = _numel(shape.block_numel, choices.resident), job.whole_update
    if whole is None:
        return int(numel * resident_bytes_per_parameter(choices, job))
    uniform = resident_bytes_per_parameter(choices, job) - whole.bytes_per_parameter
    return int(numel * uniform) + sum(whole.of_blocks(0, choices.resident).values())


def retained_bytes(choices: Choices, job: Job, shape: ModelShape) -> int:
    """What the retained layers' graphs hold for one micro-batch, beyond their outputs, which are boundaries."""
    if choices.retained == 0:
        return 0
    tokens, cheap = choices.micro_batch_tokens, choices.cheap_retention
    return shape.retained_bytes(tokens, choices.retained, compiled=job.compiled, cheap=cheap)


def graph_bytes(choices: Choices, job: Job, shape: ModelShape) -> tuple[int, ...]:
    """What the graphs of the layers that send theirs to host RAM hold for one micro-batch, each beyond its input and its output."""
    layers, tokens, cheap = len(shape.block_numel) - 2, choices.micro_batch_tokens, choices.cheap_retention
    of_last = [shape.retained_bytes(tokens, count, compiled=job.compiled, cheap=cheap) for count in range(layers + 1)]
    graphs = graphs_of_layers(layers, choices.retained, choices.retained_on_host)
    return tuple(of_last[layers - i] - of_last[layers - i - 1] for i, where in enumerate(graphs) if where == "host")


def head_bytes(chunk_tokens: int, micro_batch_tokens: int, job: Job, shape: ModelShape, hardware: Hardware) -> int:
    """A chunk's working set and hidden states, the gradient of the chunk before, and the micro-batch's gradient that the chunks fill.

    Its products add the weights' gradients to the fp32 sums. Of two types, as bf16 products and fp32 sums, only CUDA has such a product;
    elsewhere the gradient exists for a moment.
    """
    direct = hardware.gpu is not None or job.precision == "float32"
    never_stored = shape.vocab_size * shape.hidden_size if direct else 0
    previous = chunk_tokens if chunk_tokens < micro_batch_tokens else 0
    rows = (chunk_tokens + previous + micro_batch_tokens) * shape.hidden_size
    return shape.head.at(chunk_tokens) + (rows - never_stored) * WEIGHT_BYTES[job.precision]


def embedding_bytes(micro_batch_tokens: int, job: Job, shape: ModelShape) -> int:
    """The embedding's working set; its gradient, rows of fp32, is added to the sum where it belongs, and never stored whole."""
    stored_whole = shape.vocab_size * shape.hidden_size * WEIGHT_BYTES[job.precision]
    return shape.embed.at(micro_batch_tokens) - stored_whole + micro_batch_tokens * shape.hidden_size * SUM_BYTES


def _edge_slot(choices: Choices, shape: ModelShape) -> int:
    """Elements: a tied embedding stays for the head; otherwise the two take turns."""
    blocks = len(shape.block_numel)
    streamed = [shape.block_numel[block] for block in (0, blocks - 1) if block >= choices.resident]
    return sum(streamed) if shape.tied else max(streamed, default=0)


def _device_sums(choices: Choices, shape: ModelShape) -> int:
    """Elements of fp32 gradient sums on the device."""
    sizes = shape.block_numel
    staying = choices.sums_on_device if choices.groups > 1 else 0
    if shape.tied:  # the embedding's gradient begins at the head and ends at the embedding, so it has sums of its own all the way
        staying = max(staying, 1)
    buffers = TRAVELLING_SUMS if choices.groups > 1 else 1
    return _numel(sizes, staying) + buffers * max(sizes[staying:], default=0)


def boundary_row_bytes(job: Job, shape: ModelShape) -> int:
    """Of a token's hidden state, as the input of a recomputed layer is kept."""
    return kept_row_bytes(job.activations, shape.hidden_size, WEIGHT_BYTES[job.precision])


def sent_row_bytes(choices: Choices, job: Job, shape: ModelShape) -> int:
    """Of a token's hidden state, as the input of a layer whose graph is sent to host RAM: it goes along if the graph holds it."""
    eager, compiled, cheap = shape.graphs_keep_inputs
    kept = (cheap if choices.cheap_retention else compiled) if job.compiled else eager
    return shape.hidden_size * WEIGHT_BYTES[job.precision] if kept else 0


def _recomputed(choices: Choices, shape: ModelShape) -> int:
    """Layers."""
    return len(shape.block_numel) - 2 - choices.retained - choices.retained_on_host


def _decodes(choices: Choices, job: Job, shape: ModelShape) -> bool:
    return job.activations != UNCHANGED and _recomputed(choices, shape) > 0


def _boundaries(choices: Choices, job: Job, shape: ModelShape) -> int:
    """Bytes of a group's boundary activations on the device: every layer's input and the head's, less those that wait in host RAM.

    The gradient that goes back through the layers takes the place of the head's input, which a second backward still needs. Whatever the
    codec, inputs of retained layers and the head's are whole.
    """
    recomputed = _recomputed(choices, shape)
    row, kept_row = shape.hidden_size * WEIGHT_BYTES[job.precision], boundary_row_bytes(job, shape)
    graph = 0
    if choices.retained_on_host:
        graph = max(graph_bytes(choices, job, shape)) + choices.micro_batch_tokens * sent_row_bytes(choices, job, shape)
    travelling = max(graph, choices.micro_batch_tokens * kept_row)
    on_their_way = sum(rings(choices.micro_batches(job), choices.retained_on_host)) * travelling
    here = on_their_way if choices.offload else choices.group_tokens(job) * kept_row * recomputed
    return choices.group_tokens(job) * row * (choices.retained + 1 + choices.second_backward) + here


def _offloaded(choices: Choices, job: Job, shape: ModelShape) -> int:
    """Bytes of a group's boundary activations in host RAM: of all layers but those whose graphs stay on the device, less what goes on to a
    drive."""
    near = _recomputed(choices, shape) - far_inputs(choices, shape)
    of_graphs = choices.retained_on_host * sent_row_bytes(choices, job, shape)
    return choices.group_tokens(job) * (near * boundary_row_bytes(job, shape) + of_graphs) if choices.offload else 0


def _graphs_on_host(choices: Choices, job: Job, shape: ModelShape) -> int:
    """Bytes of a group's graphs in host RAM, less the inputs, which are boundaries."""
    if not choices.retained_on_host:
        return 0
    return sum(graph_bytes(choices, job, shape)) * choices.group_tokens(job) // choices.micro_batch_tokens


def host_bytes(choices: Choices, job: Job, shape: ModelShape, hardware: Hardware) -> dict[str, int]:
    """What lies in host RAM: every array of the streamed blocks, and the process itself."""
    sizes = shape.block_numel
    numel = sum(sizes) - _numel(sizes, choices.resident)
    weight = WEIGHT_BYTES[job.precision]
    far = _arrays_on_nvme(choices, job, shape)
    table = {name: int(numel * size) for name, size in array_bytes(choices, job).items()}
    if job.whole_update is not None:
        table |= job.whole_update.of_blocks(choices.resident)
    table = {name: size - far.get(name, 0) for name, size in table.items()}
    if job.whole_update is not None and choices.resident < len(sizes):
        table["update's scratch"] = job.whole_update.host_scratch
    table |= {
        "gradient staging": 0 if choices.stores_gradients(job) else HOST_STAGES * max(sizes[choices.resident :], default=0) * weight,
        "NVMe staging": _nvme_staging(choices, job, shape) + _input_staging(choices, job, shape),
        "gradient sums": (sum(sizes) - _numel(sizes, choices.sums_on_device)) * SUM_BYTES if choices.groups > 1 else 0,
        "boundary activations": _offloaded(choices, job, shape),
        "retained activations": _graphs_on_host(choices, job, shape),
    }
    slabs = {name: -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES for name, size in table.items() if size}
    libraries = hardware.library_bytes + (COMPILER_BYTES if job.compiled else 0)
    libraries -= CUDNN_LIBRARY_BYTES if hardware.gpu and job.precision == "float32" else 0
    head = {} if hardware.gpu else {HEAD_COPIES: round(CPU_HEAD_BYTES[job.precision] * shape.vocab_size * shape.hidden_size)}
    if hardware.gpu:
        libraries += int(GPU_RECORDS_SHARE * sum(device_bytes(choices, job, shape, hardware).values()))
    return slabs | {"the process so far": hardware.resident_bytes, "libraries at work": libraries} | head


def array_bytes(choices: Choices, job: Job) -> dict[str, float]:
    """Bytes per parameter of each array of a streamed block, but for those in which blocks differ."""
    weight = WEIGHT_BYTES[job.precision]
    table: dict[str, float] = {"weight": weight, "remainder": REMAINDER_BYTES[job.precision], **dict(job.state_bytes)}
    return {name: size for name, size in {**table, "grad": weight if choices.stores_gradients(job) else 0}.items() if size}


def nvme_bytes(choices: Choices, job: Job, shape: ModelShape) -> dict[str, int]:
    """What lies on NVMe, by array."""
    row = boundary_row_bytes(job, shape)
    sizes = (tokens * row for tokens in choices.largest_group(job))
    inputs = boundary_room(sizes, far_inputs(choices, shape), _recomputed(choices, shape), job.lengths_vary)
    return _arrays_on_nvme(choices, job, shape) | ({"boundary activations": inputs} if inputs else {})


def _arrays_on_nvme(choices: Choices, job: Job, shape: ModelShape) -> dict[str, int]:
    return {name: int(size) for name, size in far_arrays(far_blocks(choices, shape), sum, choices, job, shape).items()}


def far_arrays(
    blocks: Sequence[int], combined: Callable[[Iterable[int]], int], choices: Choices, job: Job, shape: ModelShape
) -> dict[str, float]:
    """Of each array that is taken to NVMe, the bytes in these blocks, combined: their sum, or the largest."""
    if not blocks:
        return {}
    numel = combined(shape.block_numel[block] for block in blocks)
    arrays = {name: numel * size for name, size in array_bytes(choices, job).items()}
    if job.whole_update is not None:
        arrays |= {name: combined(sizes[block] for block in blocks) for name, sizes in job.whole_update.state_bytes}
    return {name: size for name, size in arrays.items() if holds(choices.nvme_arrays, name)}


def far_blocks(choices: Choices, shape: ModelShape) -> tuple[int, ...]:
    return blocks_on_nvme(len(shape.block_numel), choices.resident, choices.nvme_blocks)


def far_inputs(choices: Choices, shape: ModelShape) -> int:
    """Layers that have as much input as waits on NVMe of all."""
    return min(choices.nvme_activations, _recomputed(choices, shape)) if choices.offload else 0


def nvme_traffic(choices: Choices, job: Job, shape: ModelShape) -> tuple[int, int]:
    """Bytes that a step (reads, writes): the update reads and writes arrays, sweeps read weights, backward reads inputs."""
    far = _arrays_on_nvme(choices, job, shape)
    once, weight = sum(far.values()), far.get("weight", 0)  # a gradient is written when it has landed, and read by the update
    sweeps, backwards = 2 * choices.groups + choices.second_backward, 1 + choices.second_backward
    inputs = far_inputs(choices, shape) * int(job.computed_tokens(choices.micro_batch_tokens)) * boundary_row_bytes(job, shape)
    return once + sweeps * weight + backwards * inputs, once + inputs


def _nvme_staging(choices: Choices, job: Job, shape: ModelShape) -> int:
    """Bytes of host RAM through which the arrays on NVMe pass."""
    blocks = far_blocks(choices, shape)
    return int(sum(stages(name, len(blocks)) * size for name, size in far_arrays(blocks, max, choices, job, shape).items()))


def _input_staging(choices: Choices, job: Job, shape: ModelShape) -> int:
    """Bytes of host RAM through which layers' inputs pass on their way to NVMe and back."""
    whole = choices.micro_batch_tokens * boundary_row_bytes(job, shape)
    pieces, nbytes = boundary_staging(boundary_pages(whole, far_inputs(choices, shape), _recomputed(choices, shape), job.lengths_vary))
    return pieces * nbytes


def disk_bytes(job: Job, shape: ModelShape) -> dict[str, int]:
    """Checkpoints at the worst moment: those kept, `best` if it is older, and the one being written (`final` is hard links)."""
    copies = job.checkpoints_kept + int(job.keeps_best) + 1
    if job.checkpoints_written is not None:
        copies = min(copies, job.checkpoints_written)
    tensors = int(shape.parameters * state_bytes_per_parameter(job))
    return {f"checkpoint {i + 1}": tensors for i in range(copies)} | {"their other files, at most": copies * SMALL_FILES_BYTES}


def _numel(sizes: tuple[int, ...], blocks: int) -> int:
    """Elements of the first so many blocks."""
    return _sums(sizes)[blocks]


@lru_cache(maxsize=8)
def _sums(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))
