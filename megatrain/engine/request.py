"""The request for an engine: what keywords in Python, or a config, ask for. Declared once, here."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import expanduser  # leaves `~nobody` as it is, where Path's raises
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack, get_type_hints

import torch
from torch import Tensor

from megatrain.engine.components import PRECISIONS
from megatrain.engine.objective import AnyLoss
from megatrain.errors import ConfigError
from megatrain.losses import SequenceLoss, next_token
from megatrain.machine.datasheets import parse_size
from megatrain.machine.hardware import bf16_is_fast
from megatrain.models.anatomy import Anatomy
from megatrain.models.family import regimes_of
from megatrain.models.freezing import freeze_all
from megatrain.models.pretrained import ModelSource, read_model_config, resolve_source
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.fp8 import fp8_supported
from megatrain.models.ulysses import why_not_in_pieces
from megatrain.optim import AdamW, Optimizer
from megatrain.optim.optimizer import Frozen
from megatrain.schedule import UNCHANGED, layers_back
from megatrain.settings import Settings, contradiction
from megatrain.storage.manifest import check_description
from megatrain.world import World

F = TypeVar("F", bound=Callable[..., Any])


class EngineKeywords(TypedDict, total=False):
    """The keywords of `Engine.from_pretrained` and `Engine.from_config`; both document them."""

    optimizer: Optimizer | None
    precision: str
    attention: str
    max_grad_norm: float | None
    router_aux_loss_coef: float | Literal["auto"]
    device: str
    seed: int
    tokens_per_step: int | None
    seq_len: int | None
    loss: AnyLoss
    settings: Settings | Literal["auto"]
    memory: Mapping[str, Any] | None
    freeze: Sequence[str] | None
    image_row: Mapping[str, Tensor] | None
    trust_remote_code: bool


@dataclass(frozen=True, kw_only=True)
class Request:
    """A job as a user asks for it; nothing of it depends on the machine."""

    config: Any  # a transformers configuration
    source: str | None = None  # folder, GGUF file or hub id; None draws weights
    revision: str | None = None
    trust_remote_code: bool = False
    optimizer: Optimizer = field(default_factory=AdamW)
    precision: str = "auto"
    attention: str = "auto"
    max_grad_norm: float | None = 1.0
    router_aux_loss_coef: float | Literal["auto"] = "auto"
    device: str = "auto"
    seed: int = 0
    tokens_per_step: int | None = None  # None of this or of `seq_len`: no plan can be made
    rows_per_step: int | None = None  # in place of tokens
    seq_len: int | None = None  # tokens of the longest row
    loss: AnyLoss = next_token
    settings: Settings | Literal["auto"] = "auto"  # taken as they are; "auto": the planner's
    # names or globs of tensors that do not train; None: what sees, but for its projector
    freeze: Sequence[str] | None = ()
    # arguments of the model's forward, of a row with an image; None: images are not read
    image_row: Mapping[str, Tensor] | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)  # fixed options of `settings.OPTIONS`
    # into sequences of `seq_len`; None: all rows are full
    packing: bool | Literal["auto"] | None = None
    # element-wise parts of layers and loss, or of the "loss"
    compile: bool | Literal["auto", "loss"] = "auto"
    activations: str = UNCHANGED  # this and the next two: as in `settings.Settings`
    transport: str = "auto"
    wire: str = "float32"
    context_parallel: int = 1  # ranks that share every sequence
    gpu_limit: int | None = None  # bytes to use; None: what is free
    host_limit: int | None = None
    nvme_limit: int | None = None
    nvme_folders: tuple[Path, ...] = ()  # for what host RAM has no room for
    output: Path = Path()  # folder of the checkpoints
    checkpoints_kept: int = 2  # this and the next: as in `planner.job.Job`
    keeps_best: bool = True
    where: Callable[[str], str] = str  # names a field in errors, as its user knows it

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest micro-batch that holds any row: a pair is two sequences."""
        assert self.seq_len is not None, "a plan is asked for"
        return least_tokens(self.loss, self.seq_len)

    @classmethod
    def of_keywords(
        cls,
        config: Any,
        source: str | Path | None = None,
        revision: str | None = None,
        **keywords: Unpack[EngineKeywords],
    ) -> Self:
        """The request that keywords in Python make. Raises ConfigError for one out of range."""
        values: dict[str, Any] = {**keywords}
        memory, freeze = values.pop("memory", None), values.pop("freeze", ())
        request = cls(
            config=config,
            source=None if source is None else str(source),
            revision=revision,
            optimizer=values.pop("optimizer", None) or AdamW(),
            freeze=[freeze] if isinstance(freeze, str) else freeze,
            **_memory(memory),
            **values,
        )
        _check_types(request)
        sizes = {name: getattr(request, name) for name in ("tokens_per_step", "seq_len")}
        if request.settings == "auto" and None not in sizes.values():
            for name, value in sizes.items():
                if type(value) is not int or value < 1:
                    wanted = "give a whole number of at least 1"
                    raise ConfigError(f"{name}: {value!r} is out of range; {wanted}")
        elif memory or any(sizes.values()) or request.loss is not next_token:
            raise ConfigError(
                "settings='auto': a plan needs both tokens_per_step and seq_len"
                if request.settings == "auto"
                else "tokens_per_step, seq_len, loss and memory are for settings='auto'; your "
                "settings say what lies where"
            )
        return request


def least_tokens(loss: AnyLoss, seq_len: int) -> int:
    """`Request.least_tokens`."""
    return 2 * seq_len if isinstance(loss, SequenceLoss) and loss.of_pairs else seq_len


def spelled_out(constructor: F) -> F:
    """Put `EngineKeywords` with their defaults into the signature, for `help` and notebooks."""
    declared = inspect.signature(Request).parameters
    own = [p for p in inspect.signature(constructor).parameters.values() if p.kind != p.VAR_KEYWORD]
    defaults = {"optimizer": None, "memory": None}
    keywords = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[name] if name in defaults else declared[name].default,
            annotation=hint,
        )
        for name, hint in get_type_hints(EngineKeywords).items()
    ]
    constructor.__signature__ = inspect.Signature([*own, *keywords])  # type: ignore[attr-defined]
    return constructor


def choose_device(device: str) -> torch.device:
    """The device of a name; `auto` is the first GPU, or the CPU where there is none."""
    # Segments of memory grow, so that torch holds little more than it uses. Read at the first
    # allocation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # The order of the driver, which the planner asks about GPUs. Read when CUDA is started.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device: {device!r} is unknown; choose auto, cpu, cuda or cuda:N")
    chosen = torch.device(device)
    if chosen.type == "cpu":
        return chosen
    index, count = chosen.index or 0, torch.cuda.device_count()
    if index >= count:
        seen = f"PyTorch sees {count} CUDA devices"
        if not count:
            seen = "PyTorch sees no CUDA device; install its CUDA build or set device: cpu"
        raise ConfigError(f"device: {device} was asked for, but {seen}")
    return torch.device("cuda", index)


def choose_precision(precision: str, device: torch.device) -> str:
    """The precision of a name; `auto` is bfloat16 where the hardware is fast at it."""
    if precision == "auto":
        return "bfloat16" if bf16_is_fast(device.type) else "float32"
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision: {precision!r} is not built; choose one of auto, {', '.join(PRECISIONS)}"
        )
    if precision == "fp8" and device.type == "cuda" and not fp8_supported(device):
        raise ConfigError(
            "precision: fp8 needs a GPU of compute capability 8.9 (Ada) or newer; set precision: "
            "bfloat16"
        )
    return precision


def read_config(config: Any, trust_remote_code: bool) -> Any:
    """A transformers configuration: the argument, or that of a folder or hub id."""
    if isinstance(config, (str, Path)):
        return config_of_source(resolve_source(config, None, weights=False), trust_remote_code)
    if not hasattr(config, "model_type"):
        raise ConfigError(
            f"config: {type(config).__name__} is neither a transformers configuration nor a folder "
            "or hub id"
        )
    return config


def config_of_source(source: ModelSource, trust_remote_code: bool) -> Any:
    """The configuration in a folder or file, compared with its manifest. Raises StorageError."""
    check_description(source.path, trust_remote_code)
    return read_model_config(source, trust_remote_code)


def skeleton_of(request: Request, precision: str) -> Skeleton:
    """The request's model without weights. Raises ModelError and ConfigError."""
    skeleton = Skeleton(
        request.config,
        attention=request.attention,
        dtype=PRECISIONS[precision],
        trust_remote_code=request.trust_remote_code,
        image_row=request.image_row,
    )
    patterns = skeleton.findings.towers if request.freeze is None else request.freeze
    skeleton.freeze(patterns, request.where("freeze"))
    if isinstance(request.optimizer, Frozen):
        skeleton.train_as(freeze_all(skeleton.anatomy))
    return skeleton


def _memory(memory: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields that the keyword `memory` sets. Raises ConfigError."""
    values = dict(memory or {})
    folders = values.pop("nvme", None) or ()
    folders = [folders] if isinstance(folders, (str, Path)) else folders
    fields: dict[str, Any] = {"nvme_folders": tuple(Path(expanduser(each)) for each in folders)}
    for name, value in values.items():
        size = None if value == "auto" else parse_size(value)
        if name not in ("gpu", "host"):
            raise ConfigError(f"memory: {name!r} is unknown; choose from gpu, host and nvme")
        if size is not None and (type(size) is not int or size <= 0):
            raise ConfigError(f"memory: {name} must be a size such as '80GiB', not {value!r}")
        fields[f"{name}_limit"] = size
    return fields


def _check_types(request: Request) -> None:
    """Raise ConfigError for values of wrong types, which no type checker may have seen."""
    given: Any = request
    number = type(given.max_grad_norm) in (int, float) and 0 < given.max_grad_norm <= math.inf
    checks = {
        "optimizer": (
            isinstance(given.optimizer, Optimizer) and not isinstance(given.optimizer, type),
            "is none; give one such as mt.AdamW(lr=1e-5), or None for AdamW",
        ),
        "loss": (
            callable(given.loss) and not isinstance(given.loss, type),
            "is none; give one such as mt.losses.Dpo()",
        ),
        "settings": (
            isinstance(given.settings, Settings) or given.settings == "auto",
            "is neither 'auto' nor an mt.Settings",
        ),
        "seed": (type(given.seed) is int, "is not a whole number"),
        "max_grad_norm": (
            given.max_grad_norm is None or number,
            "is out of range; give a number above 0, or None for no clipping",
        ),
    }
    for name, (fits, words) in checks.items():
        if not fits:
            raise ConfigError(f"{name}: {getattr(given, name)!r} {words}")


def check_positions(skeleton: Skeleton, seq_len: int, name: str) -> None:
    """Raise ConfigError if sequences are longer than the model can read. `name`: of the option."""
    longest = skeleton.anatomy.max_positions
    if longest is not None and seq_len > longest:
        raise ConfigError(
            f"{name}: {seq_len} exceeds the {longest} positions of this model; set "
            f"{name.rpartition(' ')[2]}: {longest}"
        )


def check_settings(
    settings: Settings, max_grad_norm: float | None, world: World, anatomy: Anatomy
) -> None:
    """Raise ConfigError if settings exclude each other, name layers that the model does not have,
    or lack a norm to clip to."""
    values = {**vars(settings), "max_grad_norm": max_grad_norm or 0}
    layers = len(anatomy.blocks) - 2
    back = layers_back(layers, anatomy.first_trained)
    if found := contradiction(values, in_config=False, layers=layers, back=back):
        raise ConfigError(": ".join(found))
    if settings.transport == "read" and world.hosts > 1:
        raise ConfigError(
            f"{world.size} ranks: the ranks of several hosts cannot read weights from one copy; "
            "set transport: gather"
        )


def check_context_parallel(
    cp_size: int, skeleton: Skeleton, compiled: bool, balances: bool, name: str = "context_parallel"
) -> None:
    """Raise ConfigError for what does not compute parts of sequences as it does whole ones."""
    refused = {
        "compiled layers (set compile: loss)": compiled,
        "a balancing loss of routers (set router_aux_loss_coef: 0)": balances,
        "dropout": skeleton.has_dropout,
        "rotary factors that follow the length of sequences": bool(regimes_of(skeleton.config)),
        "images": bool(skeleton.anatomy.of_images),
    }
    if found := [what for what, there in refused.items() if there]:
        raise ConfigError(f"{name}: {cp_size} does not work with {found[0]}; set 1")
    if why := why_not_in_pieces(skeleton):
        family = skeleton.anatomy.family
        raise ConfigError(f"{name}: {cp_size} does not work with a {family} model ({why}); set 1")
