"""Count the held-out questions that a run's model answers right, by transformers alone.

    python examples/images/check.py shapes/run shapes/eval.jsonl

An answer is right if each of its tokens, its end included, is the likeliest.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from megatrain.data.build import load_data
from megatrain.data.encoding import RowOptions
from megatrain.data.images import Sight
from megatrain.data.micro_batches import collate


@torch.no_grad()
def main(run: Path, data: Path) -> None:
    folder, right, asked = run / "final", Counter[str](), Counter[str]()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    sight = Sight.of(folder, tokenizer, model.config.model_type)
    rows, _ = load_data(str(data), None, tokenizer, RowOptions(64, sight=sight), seed=0)
    questions = [json.loads(line)["messages"][0]["content"][1]["text"] for line in data.open()]
    for number, question in enumerate(questions):
        batch = collate(rows, [[number]], 0)
        labels = batch.pop("labels")[0, 1:]
        likeliest = model(**batch).logits[0, :-1].argmax(-1)
        asked[question] += 1
        right[question] += int((likeliest == labels)[labels >= 0].all())
    found = {question: f"{right[question]} of {count}" for question, count in asked.items()}
    print(json.dumps(found | {"right": right.total() / asked.total()}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
