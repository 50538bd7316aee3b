"""Compiled layers: torch.compile's backend, what its graphs keep (decision 0013), its failures.

Only this file of the room uses torch's private compiler API: `torch._dynamo` (limit of graphs,
exceptions), `torch._inductor` (compile_fx, settings), `torch._functorch` (what graphs recompute).
If torch changes it, `compile: true` breaks. planner/cost/compiled.py predicts compiled layers.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from megatrain.errors import ConfigError, logger
from megatrain.machine.profile import cache_folder
from megatrain.version import VERSION

# Graphs for one class of layers, in all models of a process. Beyond dynamo's own limit of 8, layers
# run eagerly without a word. A layer has four graphs (without gradients in training and evaluation,
# retained, recomputed), each again for another sequence length, then for any length, for padded
# batches, for single sequences and for fp8: one run needed 25.
GRAPHS = 64
FUSED = ("RMSNorm", "LayerNorm", "MLP")  # ends of names of classes whose kernels are many and small
ROTARY = ("_vision", "_2d")  # ends of names of functions that towers have
# Errors of a file that is not whole.
TORN = (OSError, ImportError, EOFError, pickle.UnpicklingError)

# By default torch keeps whatever a matmul of backward reads. Without these bans it still keeps what
# does not fuse, such as matmuls and attention, but of the rest only what it recomputes it from.
CHEAP_RETENTION = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
}


@dataclass(frozen=True)
class Inductor:
    """Inductor, with the order of attention kernels as a part of its cache's keys.

    The kernel is chosen while a layer is traced, and neither the process nor the cache on disk asks
    in which order they were tried. https://github.com/pytorch/pytorch/issues/185449

    lengths_vary: which order, as `fastest_attention` knows it.
    cheap: graphs keep only what matmuls and attention need.
    """

    lengths_vary: bool = False
    cheap: bool = False

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx
        from torch.compiler import config

        def compiled() -> Any:
            tag = f"{config.cache_key_tag} lengths_vary={self.lengths_vary}"
            tagged = config.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
            with tagged, cheap_retention() if self.cheap else nullcontext():
                return compile_fx(graph, inputs)

        try:
            return compiled()  # type: ignore[no-any-return]
        except Exception as error:
            if not forget_if_torn(error):
                raise
            return compiled()  # type: ignore[no-any-return]


def own_cache() -> Path:
    """The folder of what torch.compile keeps, unless the user names one."""
    return cache_folder() / f"compiled-{torch.__version__}-{VERSION}"


def forget_if_torn(error: Exception) -> bool:
    """True if a file that torch.compile keeps is not whole, since a process was killed that wrote
    it. Our folder of them is removed then; a user's may hold other things."""
    from torch._inductor import utils
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    torn = getattr(error, "inner_exception", error)  # torch's backend errors carry one
    if not isinstance(torn, TORN) or isinstance(torn, ModuleNotFoundError):
        return False
    # a full disk, say, has a number; another rank may have removed the folder
    if isinstance(torn, OSError) and torn.errno not in (None, errno.ENOENT):
        return False
    if isinstance(torn, OSError) and str(own_cache()) not in str(torn):
        return False
    if Path(cache_dir()) != own_cache():
        return False
    logger.warning(f"{own_cache()}: is torn ({torn}); it is removed, and all is compiled anew")
    shutil.rmtree(own_cache(), ignore_errors=True)
    utils.clear_caches()
    return True


def cheap_retention() -> AbstractContextManager[None]:
    """Graphs that are cut inside keep as little as `CHEAP_RETENTION` allows."""
    from torch._functorch import config

    return config.patch(CHEAP_RETENTION)  # type: ignore[no-any-return]


def compile_when_run(
    layers: Sequence[nn.Module], lengths_vary: bool, cheap: bool
) -> Sequence[Callable[..., Any]]:
    """Have each layer compiled when it first runs; returns what to call where it is retained."""
    _configure()
    for layer in layers:
        layer.compile(backend=Inductor(lengths_vary))
    if not cheap:
        return layers
    return [torch.compile(layer.forward, backend=Inductor(lengths_vary, cheap)) for layer in layers]


def fuse_rotary(layers: Sequence[nn.Module]) -> None:
    """Compile what towers, which run eagerly, turn queries and keys with: a dozen kernels in fp32,
    and more bytes than all else in their layers. It is a function of the file of their classes."""
    for name in {type(part).__module__ for layer in layers for part in layer.modules()}:
        file = vars(sys.modules[name])
        for own in [n for n in file if n.startswith("apply_rotary") and n.endswith(ROTARY)]:
            if not hasattr(file[own], "_torchdynamo_orig_callable"):
                file[own] = torch.compile(file[own], dynamic=True)


def _configure() -> None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(own_cache()))  # before torch sets its own
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    inductor.compile_threads = 1  # a pool of worker processes would take gigabytes of host RAM
    # Autotuning keeps copies of what kernels write over in pinned host RAM, for good.
    inductor.triton.autotune_pointwise = False
    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)


def _is_plain(part: nn.Module) -> bool:
    weighty = (child for child in part.children() if any(True for _ in child.parameters()))
    return all(isinstance(child, nn.Linear) for child in weighty)


@contextmanager
def fused_parts(model: nn.Module) -> Iterator[None]:
    """Inside, norms and MLPs of a model that runs eagerly are compiled, once for any number of
    tokens; but for those that were replaced, and mixtures, which may need to know of rows."""
    _configure()
    found = [one for one in model.modules() if type(one).__name__.endswith(FUSED)]
    parts = [one for one in found if "forward" not in vars(one) and _is_plain(one)]

    def run(compiled: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        with torch.compiler.set_stance("default"):  # whatever the layers' is
            return compiled(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)

    for part in parts:
        part.forward = partial(run, torch.compile(part.forward, dynamic=True))
    try:
        yield
    finally:
        for part in parts:
            del part.forward


@contextmanager
def naming_the_compiler() -> Iterator[None]:
    """Turn torch.compile's failures into ConfigError, but for torch.OutOfMemoryError."""
    try:
        yield
    except RuntimeError as error:
        exceptions: Any = sys.modules.get("torch._dynamo.exc")  # there once something was compiled
        if exceptions is None or not isinstance(error, exceptions.TorchDynamoException):
            raise
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, torch.OutOfMemoryError):
            raise inner from error
        if forget_if_torn(inner):  # of a backward pass, which is compiled when it runs
            raise ConfigError(
                f"compile: {own_cache()} was torn and is removed; start again"
            ) from error
        reason = (str(inner).strip().splitlines() or [type(inner).__name__])[0]
        raise ConfigError(
            "compile: torch.compile could not compile this model on this machine "
            f"({reason}); set compile: false"
        ) from error
