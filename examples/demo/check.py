"""Check the demo's result: `python examples/demo/check.py RUN`.

The trained folder loads in transformers, both sides give the same logits, and the held-out loss is
lower than before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import megatrain as mt

PROMPT = "Give three tips for staying healthy."
# Both sides compute in float32 from the same weights with the same attention; only the order of
# sums differs.
LOGIT_TOLERANCE = 2e-4


def main(run_dir: Path) -> None:
    final = run_dir / "final"
    before, after, steps = held_out(run_dir)
    difference = largest_difference(final)
    print(f"steps                 {steps}")
    print(f"held-out loss         {before:.4f} before, {after:.4f} after")
    print(f"logits, transformers  differ from the engine's by at most {difference:.1e}")
    fail_unless(steps >= 20, f"at least 20 steps were to be trained, not {steps}")
    fail_unless(after < before, "the held-out loss did not fall")
    fail_unless(difference <= LOGIT_TOLERANCE, f"{final} does not give the engine's logits")
    print(f"ok: {final} is an ordinary Hugging Face folder")


def held_out(run_dir: Path) -> tuple[float, float, int]:
    """(loss before the first step, loss after the last, number of steps) from the run's metrics."""
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    return losses[0], losses[-1], max(row["step"] for row in rows)


def largest_difference(final: Path) -> float:
    """Largest difference between transformers' logits and the engine's, on one chat prompt."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(final)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    input_ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    model = AutoModelForCausalLM.from_pretrained(
        final, dtype=torch.float32, attn_implementation="sdpa"
    )  # in evaluation mode
    with torch.no_grad():
        expected = model(input_ids).logits
    options: dict[str, Any] = {"precision": "float32", "attention": "sdpa", "device": "cpu"}
    with mt.Engine.from_pretrained(final, tokens_per_step=1024, seq_len=512, **options) as engine:
        actual = engine.logits(input_ids)
    return float((actual.float().view_as(expected) - expected).abs().max())


def fail_unless(passed: bool, message: str) -> None:
    if not passed:
        raise SystemExit(f"error: {message}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/demo/check.py RUN_DIR")
    main(Path(sys.argv[1]))
