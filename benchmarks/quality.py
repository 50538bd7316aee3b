"""What smaller numbers cost in loss: the same model on the same rows, trained with each variant.

    python benchmarks/quality.py --json out.json train.max_steps=100
    python benchmarks/quality.py --variants bfloat16 int8-activations int4-activations
    python benchmarks/quality.py --variants bfloat16 bf16-moments --config my.yaml device=cuda

The config is that of `make demo` unless another is named, and any key can be set after it. Every
variant starts from the same weights and sees the same batches. Prints how far mean training loss,
held-out loss before and after, and any single step's loss are from the first variant's, and writes
all losses as JSON. On the CPU fp8 products are emulated: right, and slow.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

import megatrain
from megatrain.config import Config, load_config
from megatrain.data.dataset import Rows
from megatrain.data.loader import Loader
from megatrain.data.micro_batches import held_out_batches
from megatrain.engine.activations.codecs import CODECS, GroupScaled
from megatrain.engine.engine import Engine
from megatrain.machine.hardware import update_threads
from megatrain.models.transforms.fp8 import ATTENTION, ROUTERS, Fp8Policy, apply_fp8
from megatrain.optim.schedules import SCHEDULES, warmup_steps
from megatrain.recipes import rows as rows_of
from megatrain.recipes import setup
from megatrain.recipes.model import Model, read_model
from megatrain.recipes.optimizers import make_optimizer
from megatrain.recipes.this_machine import find_machine
from megatrain.schedule import UNCHANGED, kept_row_bytes
from megatrain.settings import Settings


@dataclass(frozen=True)
class Variant:
    """What is different: keys of the config, fp8 products by a policy, or how layers' inputs are
    kept; all layers are recomputed."""

    overrides: dict[str, object] = field(default_factory=dict)
    policy: Fp8Policy | None = None
    activations: str = UNCHANGED


VARIANTS = {
    "bfloat16": Variant(),
    "float32": Variant({"precision": "float32"}),  # how far bf16 is itself from something better
    "bf16-moments": Variant({"optimizer.moments": "bfloat16"}),
    "int8-moments": Variant({"optimizer.moments": "int8"}),
    "lion": Variant({"optimizer.name": "lion", "train.learning_rate": 1e-5}),
    "lion-int8": Variant(
        {"optimizer.name": "lion", "optimizer.moments": "int8", "train.learning_rate": 1e-5}
    ),
    "muon": Variant({"optimizer.name": "muon"}),
    "fp8": Variant(policy=Fp8Policy()),
    "fp8-attention-in-bf16": Variant(policy=Fp8Policy(keep=(*ROUTERS, *ATTENTION))),
    "fp8-attention-too": Variant(policy=Fp8Policy(keep_output=())),
    "fp8-everywhere": Variant(policy=Fp8Policy(keep_output=(), ends=0)),
    "fp8-fast": Variant(policy=Fp8Policy(grad_input="fp8_fast", grad_weight="fp8_fast")),
    "fp8-grad-weight-bf16": Variant(policy=Fp8Policy(grad_weight="bfloat16")),
    **{f"{name}-activations": Variant(activations=name) for name in CODECS},
}


@dataclass
class Watched:
    """A codec, and how far from what was kept it is: the relative error of every boundary, in the
    order of their keeping."""

    codec: GroupScaled
    errors: list[float] = field(default_factory=list)

    def nbytes(self, numel: int) -> int:
        return self.codec.nbytes(numel)

    def encode(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        self.codec.encode(hidden, out)
        apart = self.decode(out, hidden.shape, hidden.dtype).float() - hidden.float()
        self.errors.append(float(apart.norm() / hidden.float().norm()))

    def decode(self, flat: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return self.codec.decode(flat, shape, dtype)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("examples/demo/config.yaml"))
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=["bfloat16", "fp8"],
        help="the first is compared with",
    )
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--compile", action="store_true", help="torch.compile every decoder layer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args()


def make_engine(config: Config, model: Model, variant: Variant, compile_layers: bool) -> Engine:
    resolved, policy = setup.prepare(config, model).resolved, variant.policy
    machine, skeleton = resolved.machine, resolved.skeleton
    if policy is not None:
        count = len(skeleton.layers)
        taken = sum(
            apply_fp8(layer, policy.of_layer(index, count))
            for index, layer in enumerate(skeleton.layers)
        )
        print(f"{taken} linear modules of {count} layers in fp8")
    engine = Engine(
        skeleton,
        optimizer=make_optimizer(config),
        precision=machine.precision,
        max_grad_norm=config.train.max_grad_norm,
        device=machine.device,
        settings=Settings(
            update_threads=update_threads(), compile=compile_layers, activations=variant.activations
        ),
        seed=config.train.seed,
    )
    setup.fill(engine, config)
    return engine


def make_loader(args: argparse.Namespace, config: Config, model: Model, rows: Rows) -> Loader:
    return Loader(
        rows,
        micro_batch_tokens=args.micro_batch_tokens,
        pad_id=model.pad_id,
        seed=config.train.seed,
        tokens_per_step=config.train.tokens_per_step,
        rows_per_step=config.train.rows_per_step,
        epochs=config.train.epochs,
        max_steps=config.train.max_steps,
    )


def train(
    args: argparse.Namespace,
    config: Config,
    model: Model,
    rows: Rows,
    held_out: Rows,
    name: str,
) -> dict[str, Any]:
    """Losses of all steps and of the held-out rows before and after, of one variant."""
    variant = VARIANTS[name]
    config = config.with_values(variant.overrides)
    steps = config.train.max_steps
    assert steps is not None
    warmup = warmup_steps(config.train.warmup, steps)
    losses, norms, seconds = [], [], []
    with make_engine(config, model, variant, args.compile) as engine:
        boundaries = engine.parts.boundaries
        watched: Watched | None = None
        if boundaries.codec is not None:
            watched = Watched(boundaries.codec)
            boundaries.codec = watched  # type: ignore[assignment]

        def evaluate() -> float:
            return engine.evaluate(
                list(held_out_batches(held_out, args.micro_batch_tokens, model.pad_id))
            ).loss

        before = evaluate()
        for step, batch in enumerate(make_loader(args, config, model, rows)):
            started = time.perf_counter()
            rate = SCHEDULES[config.train.schedule](
                step, base=config.train.learning_rate, total_steps=steps, warmup_steps=warmup
            )
            result = engine.train_step(batch.micro_batches, lr=rate)
            losses.append(result.loss)
            norms.append(result.grad_norm)
            seconds.append(time.perf_counter() - started)
            if watched is not None:
                boundaries.codec = watched.codec  # one step has shown enough
            found = f"loss {result.loss:.4f}, norm {result.grad_norm:.3f}, {seconds[-1]:.2f} s"
            print(f"{name} step {step}: {found}", flush=True)
        after = evaluate()
        width = engine.anatomy.hidden_size
    return {
        "overrides": variant.overrides,
        "policy": variant.policy and asdict(variant.policy),
        "boundary_bytes_per_token": kept_row_bytes(variant.activations, width, 2),
        "boundary_relative_errors": watched and watched.errors,
        "losses": losses,
        "grad_norms": norms,
        "mean_loss": statistics.fmean(losses),
        "held_out_before": before,
        "held_out_after": after,
        "seconds_per_step": statistics.median(seconds),
    }


def compare(results: dict[str, dict[str, Any]]) -> None:
    """Print every variant's losses and their distance from the first variant's, in percent, and
    note the distances in the results."""
    reference = next(iter(results.values()))
    columns = ("mean_loss", "held_out_before", "held_out_after")
    print("\n" + " " * 24 + "".join(f"{column:>20}" for column in (*columns, "largest_of_a_step")))
    for name, result in results.items():
        apart = {column: 100 * (result[column] / reference[column] - 1) for column in columns}
        of_steps = (
            100 * abs(a / b - 1) for a, b in zip(result["losses"], reference["losses"], strict=True)
        )
        result["percent_apart"] = {**apart, "largest_of_a_step": max(of_steps)}
        cells = [f"{result[column]:11.4f} {apart[column]:+7.2f}%" for column in columns]
        print(
            f"{name:24}" + "".join(cells) + f"{result['percent_apart']['largest_of_a_step']:19.2f}%"
        )


def main() -> None:
    args = arguments()
    config = load_config(
        args.config, ["precision=bfloat16", "train.max_steps=100", *args.overrides]
    )
    setup.quiet_libraries()
    model = read_model(config)
    rows, held_out = rows_of.read_rows(config, model)
    assert held_out is not None, "data.eval must hold rows out"
    results = {name: train(args, config, model, rows, held_out, name) for name in args.variants}
    compare(results)
    device = find_machine(config).device
    report = {
        "date": date.today().isoformat(),
        "hardware": torch.cuda.get_device_name()
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        "versions": {
            "megatrain": megatrain.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "arguments": {
            "variants": args.variants,
            "micro_batch_tokens": args.micro_batch_tokens,
            "compile": args.compile,
        },
        "overrides": args.overrides,
        "results": results,
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
