"""The options that trade memory against speed: their table, which of them exclude each other, and
the settings that the engine takes. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatrain.errors import ConfigError
from megatrain.schedule import FORMS, UNCHANGED, Where, layers_back

ROUTER_AUX_LOSS_COEF = 0.001  # of a mixture, unless the user says otherwise
ALL = 1 << 30  # for numbers of blocks or layers: all that the model has
REORDERS = "sums are rounded in another order from here on"
RECOMPILES = "compiled layers may round otherwise from here on"


@dataclass(frozen=True)
class Option:
    """One option: a field of the planner's `Asked` and `Choices`, and a key of the config.

    Attributes:
        field: its name in Python.
        key: its name in the config; empty if users cannot ask the planner for it.
        group: "placing" decides where arrays are, "cutting" how a step is divided. Suggestions
            open one group after the other.
        heading: its row in the plan's table; empty if another option's row tells it.
        least: the smallest number allowed; None if it is not a number.
        resumed: what another value means for a resumed run, which therefore keeps the value it
            was started with; empty if the planner chooses anew.
        words: its meaning, as the config's schema gives it.
    """

    field: str
    key: str
    group: Literal["placing", "cutting", "threads"]
    heading: str
    least: int | None
    resumed: str
    words: str


OPTIONS = (
    Option("micro_batch_tokens", "train.micro_batch_tokens", "cutting", "micro-batch", 1, REORDERS,
           "Padded tokens computed at once; changes memory, speed and rounding."),
    Option("groups", "train.groups", "cutting", "groups", 1, REORDERS,
           "Accumulation groups of a step; each streams all weights once forward and once "
           "backward, and holds only its own micro-batches' activations."),
    Option("head_chunk_tokens", "train.head_chunk_tokens", "cutting", "head chunk", 1, REORDERS,
           "Targets whose logits exist at a time; changes memory and speed, not the result."),
    Option("layer_chunk_tokens", "train.layer_chunk_tokens", "cutting", "layer chunk", 1, REORDERS,
           "Tokens that a layer's MLP and norms compute at a time; null: a whole micro-batch. "
           "Changes memory and speed, not the result."),
    Option("resident", "memory.resident", "placing", "resident", 0, "",
           "Number of blocks (embedding, layers, head), the first ones, that stay on the GPU with "
           "their optimizer state."),
    Option("replicated", "memory.replicated", "placing", "replicated", 0, "",
           "Of several GPUs: number of blocks (embedding, layers, head), the first ones, whose "
           "whole weights stay on each from an update to the next, so that they are gathered once "
           "a step and not at every visit; 2 bytes per parameter. Changes no result."),
    Option("retained", "train.retained", "placing", "retained", 0, RECOMPILES,
           "Number of layers, the last ones, whose activations are saved for backward instead of "
           "being recomputed."),
    Option("cheap_retention", "train.cheap_retention", "placing", "", None, RECOMPILES,
           "Selective activation checkpointing: retained layers save what matmuls and attention "
           "need and recompute the rest (needs compile)."),
    Option("offload_activations", "memory.offload_activations", "placing", "boundaries", None, "",
           "Keep activation checkpoints (layers' inputs) in host RAM from forward to backward."),
    Option("retained_on_host", "memory.retained_on_host", "placing", "", 0, RECOMPILES,
           "Number of further layers whose saved activations are offloaded to host RAM instead of "
           "being recomputed."),
    Option("keep_attention", "memory.keep_attention", "placing", "", 0, RECOMPILES,
           "Number of recomputed layers, the last ones, whose attention's output is kept from "
           "forward to backward with their input instead of being computed again; about as many "
           "bytes as the input's."),
    Option("second_backward", "memory.second_backward", "placing", "gradients", 0, "",
           "Two-pass gradient clipping: number of layers, the first ones that are trained, whose "
           "gradients are computed twice instead of being stored, which saves 2 bytes per "
           "parameter; true: all layers and the head; auto: as few as fit."),
    Option("sums_on_device", "memory.sums_on_device", "placing", "gradient sums", 0, "",
           "Number of blocks, the first ones, whose fp32 gradient accumulators stay on the device "
           "between groups, as those of resident blocks always do. Several GPUs exchange these "
           "once a step, the others once a group."),
    Option("nvme_blocks", "memory.nvme_blocks", "placing", "NVMe", 0, "",
           "Number of streamed blocks whose optimizer state (fp32 remainder and the optimizer's "
           "arrays) is on NVMe, last layers first."),
    Option("update_threads", "threads", "threads", "update threads", 1, "",
           "Host threads that update weights."),
)  # fmt: skip
OPTION = {option.field: option for option in OPTIONS}
FOLDER, NORM = ANY = "[FOLDER]", "1.0"  # examples: any other value will do, too
KEYS = {option.field: option.key for option in OPTIONS if option.key} | {
    "compile": "compile",
    "nvme_folders": "memory.nvme",
    "max_grad_norm": "train.max_grad_norm",
    "activations": "memory.activations",
}


@dataclass(frozen=True)
class Exclusion:
    """An option which, unless it is 0 or false, needs another one to have a certain value."""

    field: str
    other: str
    needs: object
    why: str


_CHECKPOINTS = "its first pass keeps nothing but the activation checkpoints of a whole step"
EXCLUSIONS = (
    Exclusion("nvme_blocks", "nvme_folders", FOLDER, "no folder on NVMe is named"),
    Exclusion("cheap_retention", "compile", True, "only compiled layers can save selectively"),
    Exclusion("retained_on_host", "offload_activations", True,
              "saved activations are offloaded together with activation checkpoints"),
    Exclusion("keep_attention", "activations", UNCHANGED,
              "attention of a decoded input is not that of the input itself"),
    Exclusion("second_backward", "max_grad_norm", NORM, "without clipping no norm is waited for"),
    Exclusion("second_backward", "groups", 1, _CHECKPOINTS),
    Exclusion("second_backward", "retained_on_host", 0, _CHECKPOINTS),
)  # fmt: skip
_SPENT = "its first pass spends what retained layers save"
SPENT = Exclusion("second_backward", "retained", 0, _SPENT)  # but for layers computed once


def contradiction(
    values: Mapping[str, Any], *, in_config: bool, layers: int = ALL, back: int = ALL
) -> tuple[str, str] | None:
    """(name, problem) of the first option that another one or the model excludes, or None. values:
    by field. None leaves an option open, which contradicts nothing. in_config: name keys of the
    config and YAML values, not fields and Python values. layers: of the model, if that is known;
    `back` of them are visited by backward."""
    for rule in EXCLUSIONS:
        other = values.get(rule.other)
        met = bool(other) if rule.needs in ANY else other == rule.needs
        if values[rule.field] and other is not None and not met:
            if in_config:
                needed = "true" if rule.needs is True else rule.needs
                return KEYS[rule.field], f"{rule.why}; set {KEYS[rule.other]}: {needed} as well"
            return rule.field, f"{rule.why}; set {rule.other}={rule.needs} as well"
    name, other = SPENT.field, SPENT.other
    twice, retained = values[name] or 0, min(values[other] or 0, back)
    twice, name = ALL if twice is True else twice, KEYS[name] if in_config else name
    if layers < twice != ALL:
        return name, f"{twice} is out of range: the model has {layers} layers; give 0 to {layers}"
    if twice and retained and min(twice, back) + retained > back:
        other = KEYS[other] if in_config else other
        return name, f"{SPENT.why}; lower it or {other}"
    return None


def count_layers(options: Any) -> None:
    """Let `second_backward` of options be a number of layers where it was true or false."""
    if isinstance(options.second_backward, bool):
        object.__setattr__(options, "second_backward", ALL * options.second_backward)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Options that the planner chooses and the engine obeys; `OPTIONS` explains each field.

    Blocks are counted in execution order: the embedding, the layers, the head. A number beyond
    what the model has means all of it.
    """

    groups: int = 1
    head_chunk_tokens: int = 2048
    layer_chunk_tokens: int | None = None  # None: whole layers
    resident: int = 0
    replicated: int = 0  # of several ranks; one has whole weights of resident blocks anyway
    retained: int = 0
    cheap_retention: bool = False
    offload_activations: bool = False
    retained_on_host: int = 0  # evenly spread over the layers that are not retained
    keep_attention: int = 0
    second_backward: int = 0  # layers; True: all
    sums_on_device: int = 0
    nvme_blocks: int = 0
    update_threads: int = 2

    def __post_init__(self) -> None:
        count_layers(self)

    def keeps(self, graphs: Sequence[Where]) -> list[bool]:
        """A flag for each layer: it is one of the recomputed ones that keep their attention."""
        recomputed = [index for index, where in enumerate(graphs) if where == "nowhere"]
        keep = {*recomputed[max(0, len(recomputed) - self.keep_attention) :]}
        return [index in keep for index in range(len(graphs))]

    def stored(self, layers: int, first: int, tied: bool, clips: bool = True) -> frozenset[int]:
        """Blocks whose gradients a step that clips stores until the norm is known. Backward runs
        twice through the others: the lowest layers from block `first` on and the embedding, unless
        a tied head begins its gradient; or through everything, if that is all layers."""
        back, twice = layers_back(layers, first), self.second_backward
        if not clips or (twice and twice >= back):
            return frozenset()
        below = layers + 1 - back + twice if twice else 0
        return frozenset(range(below, layers + 2)) | ({0} if tied else set())


_LEAST = {
    name: option.least
    for name, option in OPTION.items()
    if option.least is not None and name != "micro_batch_tokens"
} | {"group_size": 1}
TRANSPORTS = ("auto", "gather", "read")
WIRES = {"float32": 4, "bfloat16": 2}  # bytes
_KNOWN = {"activations": (UNCHANGED, *FORMS), "transport": TRANSPORTS, "wire": WIRES}


@dataclass(frozen=True, kw_only=True)
class Settings(Chosen):
    """The engine's division of a step and of memory: the options of `OPTIONS`, and

    Attributes:
        group_size: with several groups, the most micro-batches of one; a step with more than
            `groups` times this many has more groups.
        activations: codec of the activation checkpoints of recomputed layers, which makes their
            gradients approximate (engine/codecs.py), or "none".
        compile: fuse the element-wise parts of every layer with torch.compile. Pays where
            micro-batches have few different shapes.
        fused_loss: compute the loss' passes over the logits as one kernel each, whatever layers do.
        lengths_vary: micro-batches seldom have the same shape twice, so kernels that are planned
            for one shape are avoided.
        nvme_folders: folders on the drives that hold what `nvme_blocks` names.
        transport: how weights in host RAM come to several ranks: each uploads its share and they
            "gather" the rest, or each uploads all and "read"s the one copy of its host, to the same
            bits. "auto": read where GPUs of the host do not reach each other's memory.
        wire: dtype of gradient sums between hosts: "float32", or "bfloat16", to which each host's
            is rounded once; they are added in fp32.

    Raises ConfigError for a number out of range, an unknown choice, and what `EXCLUSIONS` names.
    """

    group_size: int | None = None
    activations: str = UNCHANGED
    compile: bool = False
    fused_loss: bool = False
    lengths_vary: bool = False
    nvme_folders: tuple[Path, ...] = ()
    transport: str = "auto"
    wire: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        values = vars(self)
        for name, least in _LEAST.items():
            value = values[name]
            optional = name in ("group_size", "layer_chunk_tokens") and value is None
            if not optional and (type(value) is not int or value < least):
                raise ConfigError(
                    f"{name}: {value!r} is out of range; it must be a whole number of at least "
                    f"{least}"
                )
        for name, known in _KNOWN.items():
            if values[name] not in known:
                raise ConfigError(
                    f"{name}: {values[name]!r} is unknown; choose one of {', '.join(known)}"
                )
        if found := contradiction(values, in_config=False):
            raise ConfigError(": ".join(found))
