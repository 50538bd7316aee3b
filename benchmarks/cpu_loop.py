r"""A small real model on a CPU: the engine against a plain PyTorch loop in one process.

    python benchmarks/cpu_loop.py --model .cache/demo/SmolLM2-135M-Instruct.Q4_1.gguf \
        --tokens 2048 --seq-len 256 --rounds 3 --settings retained=30 resident=32 --json out.json

Both train the same micro-batches, in turn. The plain loop is what one would write with care:
transformers' model in the same dtype with the same attention, no activation checkpointing,
cross-entropy a chunk of tokens at a time, clip_grad_norm_, fused torch.optim.AdamW on fp32 masters
if the model is bfloat16. CPU seconds count all threads; the best of several steps is little
disturbed by what else the cores do.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from megatrain.engine.build import choose_device, choose_precision
from megatrain.engine.engine import Engine
from megatrain.engine.placement import PRECISIONS
from megatrain.engine.streams import Lane
from megatrain.models.anatomy import decaying
from megatrain.models.family import choose_attention
from megatrain.optim import AdamW
from megatrain.optim.split import join_master
from megatrain.settings import Settings

Batch = dict[str, Tensor]
LR, WEIGHT_DECAY, MAX_NORM = 1e-5, 0.1, 1.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/demo/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--precision", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=2048, help="per optimizer step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--micro-batch-rows", type=int, default=4)
    parser.add_argument(
        "--rounds", type=int, default=3, help="measured steps of each side; one more warms up"
    )
    parser.add_argument(
        "--settings",
        nargs="*",
        default=[],
        metavar="NAME=NUMBER",
        help="fields of megatrain.settings.Settings",
    )
    parser.add_argument(
        "--parts", action="store_true", help="one more step of the engine, its CPU seconds by part"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class PlainLoop:
    """The same model and optimizer in plain PyTorch, begun from the engine's weights.

    Args:
        chunk: tokens whose logits exist at a time.
    """

    def __init__(self, engine: Engine, dtype: torch.dtype, chunk: int) -> None:
        config, self.chunk = engine.hf_config, chunk
        self.model: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=choose_attention(config, "auto"), dtype=dtype
        ).train()
        named = list(self.model.named_parameters())
        weights = masters_of(engine)
        self.parameters = [p for _, p in named]
        self.masters = (
            [nn.Parameter(weights[name].clone()) for name, _ in named]
            if dtype == torch.bfloat16
            else self.parameters
        )
        with torch.no_grad():
            for name, parameter in named:
                parameter.copy_(weights[name])
        decay = decaying(self.model)
        groups: dict[bool, list[nn.Parameter]] = defaultdict(list)
        for (name, _), master in zip(named, self.masters, strict=True):
            groups[name in decay].append(master)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": group, "weight_decay": WEIGHT_DECAY * decay}
                for decay, group in groups.items()
            ],
            lr=LR,
            fused=True,
        )

    def train_step(self, batches: list[Batch]) -> float:
        """One optimizer step; returns the mean loss."""
        targets, total = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches), 0.0
        for batch in batches:
            hidden = self.model.base_model(batch["input_ids"], use_cache=False).last_hidden_state
            total += self.backward(hidden, batch["labels"], targets)
        if self.masters is not self.parameters:
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not self.parameters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
            self.model.zero_grad()
        return total

    def backward(self, hidden: Tensor, labels: Tensor, targets: int) -> float:
        """Cross-entropy and its gradients from the final norm's output; returns this micro-batch's
        share of the mean loss."""
        leaf, total = hidden.detach().requires_grad_(), 0.0
        rows, wanted = leaf[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        for part, expected in zip(rows.split(self.chunk), wanted.split(self.chunk), strict=True):
            logits = self.model.get_output_embeddings()(part).float()
            loss = functional.cross_entropy(logits, expected, reduction="sum") / targets
            loss.backward(retain_graph=True)  # `rows` is one graph for all chunks
            total += float(loss.detach())
        hidden.backward(leaf.grad)
        return total


def masters_of(engine: Engine) -> dict[str, Tensor]:
    """fp32 weights by tensor name."""
    named: dict[str, Tensor] = {}
    for block in engine.anatomy.blocks:
        weight = engine.store.array("weight", block.index)
        master = (
            join_master(weight, engine.store.array("remainder", block.index))
            if engine.precision == "bfloat16"
            else weight
        )
        named |= block.layout.views(master)
    return named


def micro_batches(args: argparse.Namespace, vocabulary: int, step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(
        0, vocabulary, (args.tokens // args.seq_len, args.seq_len), generator=generator
    )
    return [{"input_ids": rows, "labels": rows} for rows in ids.split(args.micro_batch_rows)]


def engine_step(engine: Engine, batches: list[Batch]) -> float:
    """One optimizer step, its update included: it would otherwise run beside the other side's
    step."""
    loss = engine.train_step(batches).loss
    for block in engine.anatomy.blocks:
        engine.wait_ready(block.index)
    return loss


def timed(step: Callable[[], float]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "loss": loss}


# -- parts ---------------------------------------------------------------------------------------


class Parts:
    """CPU seconds by part. Those of the computing thread are of the whole process: they count
    PyTorch's threads, and the lanes' work that happens to run beside; a lane's own seconds are of
    its thread alone, and are part of the others'."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []  # seconds of the parts inside each part that is open

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the calls of `owner.name`, less the parts inside them."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.open(part):
                return original(*args, **kwargs)

        setattr(owner, name, call)

    @contextmanager
    def open(self, part: str) -> Iterator[None]:
        started = time.process_time()
        self._inside.append(0.0)
        yield
        whole = time.process_time() - started
        self.seconds[part] += whole - self._inside.pop()
        if self._inside:
            self._inside[-1] += whole

    def lane(self, lane: Lane) -> None:
        original = lane._perform

        def perform(*args: Any) -> None:
            started = time.thread_time()
            original(*args)
            self.seconds[f"lane: {lane.name}"] += time.thread_time() - started

        lane._perform = perform  # type: ignore[method-assign, assignment]


def parts_of(engine: Engine, batches: list[Batch]) -> dict[str, float]:
    """CPU seconds of one step by part. Leaves the engine instrumented."""
    parts, passes = Parts(), engine.parts.passes
    skeleton_layer = engine.skeleton.layer
    for name, part in {
        "_forward": "forward: embedding and the rest",
        "_turn": "head, forward and backward",
        "_backward": "backward: embedding and the rest",
        "_backward_layer": "backward: layers",
    }.items():
        parts.wrap(passes, name, part)
    for name in ("open", "add", "close"):
        parts.wrap(engine.parts.gradients, name, f"gradient sums: {name}")

    def layer(*args: Any) -> Tensor:
        with parts.open(
            "layers with graphs: recomputed or retained"
            if torch.is_grad_enabled()
            else "layers without graphs"
        ):
            return skeleton_layer(*args)

    engine.skeleton.layer = layer  # type: ignore[method-assign, assignment]
    for lane in (
        engine.parts.lanes["upload"],
        engine.parts.lanes["download"],
        engine.parts.updater.lane,
    ):
        parts.lane(lane)
    parts.wrap(engine.parts.updater, "wait_ready", "waiting for updates")
    with parts.open("step: the rest"):
        engine.train_step(batches)
    with parts.open("update, after the step"):
        for block in engine.anatomy.blocks:
            engine.parts.updater.wait_ready(block.index)
    return dict(sorted(parts.seconds.items(), key=lambda item: -item[1]))


# -- the comparison ------------------------------------------------------------------------------


def summary(records: list[dict[str, float]], tokens: int) -> dict[str, Any]:
    """The best step: whatever else the machine does makes a step slower, in CPU seconds too, since
    cores share caches and memory."""
    cpu, wall = (min(record[clock] for record in records) for clock in ("cpu_s", "wall_s"))
    return {
        "cpu_s": cpu,
        "wall_s": wall,
        "tokens_per_s": tokens / wall,
        "tokens_per_cpu_s": tokens / cpu,
        "steps": records,
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "update_threads": torch.get_num_threads(),
        **{name: int(value) for name, value in (s.split("=") for s in args.settings)},
    }
    precision = choose_precision(args.precision, choose_device("cpu"))
    optimizer = AdamW(lr=LR, weight_decay=WEIGHT_DECAY)
    settings = Settings(**chosen)
    with Engine.from_pretrained(
        args.model,
        optimizer=optimizer,
        precision=precision,
        max_grad_norm=MAX_NORM,
        device="cpu",
        settings=settings,
    ) as engine:
        plain = PlainLoop(engine, PRECISIONS[precision], settings.head_chunk_tokens)
        records: dict[str, list[dict[str, float]]] = {"plain": [], "engine": []}
        batches: list[Batch] = []
        for step in range(args.rounds + 1):
            batches = micro_batches(args, engine.anatomy.vocab_size, step)
            records["plain"].append(timed(lambda: plain.train_step(batches)))  # noqa: B023  (called at once)
            records["engine"].append(timed(lambda: engine_step(engine, batches)))  # noqa: B023
            print(
                step,
                {
                    side: {k: round(v, 4) for k, v in steps[-1].items()}
                    for side, steps in records.items()
                },
                flush=True,
            )
        sides = {side: summary(steps[1:], args.tokens) for side, steps in records.items()}
        parts = parts_of(engine, batches) if args.parts else {}
    return {
        "precision": precision,
        "settings": chosen,
        **sides,
        "engine_over_plain": {
            key: sides["engine"][key] / sides["plain"][key] for key in ("cpu_s", "wall_s")
        },
        "parts_cpu_s": parts,
    }


def main() -> None:
    args = arguments()
    report = {
        "hardware": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "arguments": {
            k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "json"
        },
        **compare(args),
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    for side in ("plain", "engine"):
        figures = report[side]
        times = f"{figures['cpu_s']:8.2f} CPU s  {figures['wall_s']:8.2f} s"
        print(f"{side:7} {times}  {figures['tokens_per_s']:8.1f} tokens/s")
    print(
        "engine / plain: "
        + ", ".join(f"{key} {value:.3f}" for key, value in report["engine_over_plain"].items())
    )
    for part, seconds in report["parts_cpu_s"].items():
        print(f"  {part:44} {seconds:8.3f} CPU s")


if __name__ == "__main__":
    main()
