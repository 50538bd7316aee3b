"""Two checkouts held against each other, bit for bit: losses, arrays, checkpoints and plans.

    make goldens                                         # the working tree against the commit below
    # the same, any commit, or a folder that holds the package
    python -m benchmarks.goldens --against d89c17a
    python -m benchmarks.goldens --parts engines runs --device cuda

Bits depend on processor, thread count and PyTorch release. So no digest is stored in the
repository: both sides are recorded on one machine, each in a process of its own, with one thread
and PyTorch's deterministic algorithms. What was recorded of a commit is kept in `.cache/goldens`
and used again.

Parts: `engines` trains tiny models of many families in many modes, optimizers and precisions, and
digests losses, norms and every array of the store; `runs` trains through the command line and
digests metrics and checkpoints; `plans` asks `megatrain plan --json` about known GPUs, for the
configurations of plan_cases.py and for named shapes; `schema` lists the config's keys. Exits 1 and
lists what differs, if anything does.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # run as a script, too
from golden_cases import RUNS, SIZES, engine_cases, plan_cases  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "goldens"
BASE = "0c22418a"
PARTS = ("engines", "runs", "plans", "schema")
# what a process is taken to hold when it plans: the true figure is never the same twice
PROCESS_BYTES = 450 << 20

# What a later commit removed or renamed on purpose; everything else has to be equal. Fields of
# plans and of the config.
REMOVED: set[str] = set()
RENAMED: dict[str, str] = {}  # before -> now
# Words for readers, which may be rewritten: what they are about is compared, they are not.
WORDS = {"reasons", "why", "cost"}
# (end of a place, before, now)
EXPLAINED: set[tuple[str, object, object]] = set()


# -- recording, in a process that imports one of the two packages --------------------------------


def record(parts: Iterable[str], device: str) -> dict[str, Any]:
    """Everything that is compared, by name."""
    recorders = {
        "engines": record_engines,
        "runs": record_runs,
        "plans": record_plans,
        "schema": record_schema,
    }
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in recorders[part](device):
            found[f"{part}: {name}"] = value
    return found


def digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(
        tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()[:16]


def record_engines(device: str) -> Iterator[tuple[str, Any]]:
    for name, make in engine_cases(device):
        with make() as engine:
            yield name, trained(engine)


def trained(engine: Any, steps: int = 3) -> dict[str, Any]:
    """Losses and norms as exact text, and a digest of each array of each block that outlives a
    step."""
    results = [engine.train_step(batches(step), lr=1e-3 * (step + 1)) for step in range(steps)]
    found: dict[str, Any] = {
        "losses": [r.loss.hex() for r in results],
        "norms": [float(r.grad_norm).hex() for r in results],
    }
    found["evaluation"] = engine.evaluate(batches(steps)).loss.hex()
    arrays = [name for name in engine.store.arrays if name not in ("grad", "grad_sum")]
    for block in range(len(engine.store.layouts)):
        engine.wait_ready(block)
        for name in arrays:
            with engine.store.lease(block, [name]) as views:
                found[f"{name} {block}"] = digest(views[name].reshape(-1))
    return found


def batches(step: int) -> list[dict[str, Any]]:
    """Three micro-batches: two of rows of unequal lengths, padded, and a full one."""
    import torch

    generator = torch.Generator().manual_seed(step)
    made = []
    for rows, tokens, padded in ((2, 9, True), (3, 13, True), (1, 6, False)):
        ids = torch.randint(3, 97, (rows, tokens), generator=generator)
        lengths = torch.randint(tokens // 2 + 1, tokens + 1, (rows,), generator=generator)
        lengths[0] = tokens
        mask = (torch.arange(tokens) < lengths[:, None]).long()
        labels = ids.masked_fill(mask == 0, -100)
        made.append(
            {"input_ids": ids, "labels": labels, **({"attention_mask": mask} if padded else {})}
        )
    return made


# -- through the command line --------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str]:
    """The exit code and standard output of `megatrain ARGUMENTS`, in this process."""
    from megatrain.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue()


STEPS = {"max_steps": 4, "eval_every": 2, "deterministic": True}
KEPT = ("loss", "grad_norm", "eval_loss", "lr", "tokens", "target_tokens")


def record_runs(device: str) -> Iterator[tuple[str, Any]]:
    folder = Path(tempfile.mkdtemp(dir=os.environ["GOLDENS_SCRATCH"]))
    write_model(folder / "model")
    asked = [f"what is {n} and {n * 7 % 13}" for n in range(40)]
    rows = [
        {"prompt": prompt, "completion": "it is " + "many more " * (n % 5 + 1)}
        for n, prompt in enumerate(asked)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, (name, overrides) in enumerate(RUNS.items()):
        output = folder / f"run{number}"
        config = {
            "model": str(folder / "model"),
            "data": {"train": str(folder / "rows.jsonl"), "eval": 0.2},
            "train": {"tokens_per_step": 128, "seq_len": 64, **STEPS},
            "checkpoint": {"every": 2},
            "device": device,
            "precision": "bfloat16",
            "threads": 2,
            "output": str(output),
        }
        (folder / "config.json").write_text(json.dumps(config))  # JSON is YAML, too
        code, _ = command("train", str(folder / "config.json"), *overrides)
        found: dict[str, Any] = {"exit code": code}
        for line in (output / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line)
            kept = {key: values[key] for key in KEPT if key in values}
            found[f"step {values['step']}, {'eval' if 'eval_loss' in values else 'train'}"] = (
                kept | {"keys": sorted(values)}
            )
        for file in sorted(output.rglob("*")):
            if file.suffix in (".safetensors", ".bin") and not file.is_symlink():
                found[str(file.relative_to(output))] = hashlib.sha256(
                    file.read_bytes()
                ).hexdigest()[:16]
        yield name, found


def write_model(folder: Path) -> None:
    """A tiny Llama with a word-level tokenizer, as transformers saves them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    plain = ["<pad>", "<s>", "</s>", "<unk>", "what", "is", "and", "it", "many", "more"]
    words = [*plain, *map(str, range(60))]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).save_pretrained(folder)


def record_plans(device: str) -> Iterator[tuple[str, Any]]:
    """Plans for GPUs of the table, so that they say the same on every machine."""
    import psutil

    held = psutil.Process().memory_info()._replace(rss=PROCESS_BYTES)
    psutil.Process.memory_info = lambda self: held  # type: ignore[method-assign]
    for name, arguments in plan_cases():
        code, text = command("plan", *arguments, "--json")
        yield name, {"exit code": code, "plan": json.loads(text) if text else None}


def record_schema(device: str) -> Iterator[tuple[str, Any]]:
    schema = json.loads(command("schema")[1])
    for section, node in {"Config": schema, **schema["$defs"]}.items():
        yield section, dict.fromkeys(node.get("properties", {}), "a key")


# -- comparing -----------------------------------------------------------------------------------


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """One line for each place where two recordings differ, but for what was removed or renamed on
    purpose."""
    if isinstance(before, dict) and isinstance(now, dict):
        before = {
            RENAMED.get(key, key): value for key, value in before.items() if key not in REMOVED
        }
        for key in sorted({*before, *now}, key=str):
            place = f"{where} / {key}" if where else str(key)
            if key not in now:
                yield f"{place}: gone"
            elif key not in before:
                yield f"{place}: new"
            else:
                yield from differences(before[key], now[key], place)
    elif isinstance(before, list) and isinstance(now, list) and len(kept(before)) == len(now):
        for number, pair in enumerate(zip(kept(before), now, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif before != now and not explained(before, now, where):
        yield f"{where}: {before!r} before, {now!r} now"


def kept(items: list[Any]) -> list[Any]:
    """A list without the keys of the config that were removed on purpose."""
    return [item for item in items if str(item).rpartition(".")[2] not in REMOVED]


def explained(before: Any, now: Any, where: str) -> bool:
    words = isinstance(before, str) and isinstance(now, str) and WORDS & {*where.split(" / ")}
    return bool(words) or any(
        where.endswith(end) and (before, now) == (a, b) for end, a, b in EXPLAINED
    )


def recording(
    package: Path, parts: Sequence[str], device: str, kept_as: Path | None
) -> dict[str, Any]:
    """What the package in this folder does, recorded in a process of its own or read from an
    earlier recording."""
    if kept_as is not None and kept_as.is_file():
        return dict(json.loads(kept_as.read_text()))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "recorded.json"
        environment = {
            **os.environ,
            "PYTHONPATH": str(package),
            "GOLDENS_SCRATCH": scratch,
            "OMP_NUM_THREADS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "TQDM_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        arguments = [sys.executable, __file__, "--record", str(out), "--device", device]
        arguments += ["--parts", *parts]
        subprocess.run(arguments, env=environment, cwd=scratch, check=True)
        text = out.read_text()
    if kept_as is not None:
        kept_as.parent.mkdir(parents=True, exist_ok=True)
        kept_as.write_text(text)
    return dict(json.loads(text))


def checkout(commit: str) -> Path:
    """A folder with the package as it was at a commit."""
    folder = CACHE / commit
    if not folder.is_dir():
        archive = subprocess.run(
            ["git", "archive", commit, "megatrain"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--against", default=BASE, help="a commit, or a folder that holds a megatrain package"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.record is not None:
        import torch

        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
        given.record.write_text(json.dumps(record(given.parts, given.device)))
        return 0
    before: dict[str, Any] = {}
    now: dict[str, Any] = {}
    known = Path(given.against).is_dir()
    package = Path(given.against).resolve() if known else checkout(given.against)
    for part in given.parts:
        kept_as = None if known else CACHE / f"{given.against}-{given.device}-{part}.json"
        before |= recording(package, [part], given.device, kept_as)
        now |= recording(ROOT, [part], given.device, None)
    found = [*differences(before, now)]
    for line in found:
        print(line)
    result = f"{len(found)} differences" if found else "all equal"
    print(f"{len(now)} recordings on {given.device}: {result}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
