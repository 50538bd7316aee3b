"""Times steps of a vision-language model's shape beside its language model alone, on a GPU.

    python -m benchmarks.images qwen3-vl-8b --freeze none
    python -m benchmarks.images qwen3-vl-30b-a3b --layers 25

Weights are random. A row has 1,024 tokens, of which a picture of 512 x 512 takes 256; rows of text
have as many. Prints a JSON line for each, with the plan beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from benchmarks.grpo_step import timed

SIDE, TOKENS, ROWS, PICTURES = 512, 1024, 1024, 64
DRAW = Path(__file__).parents[1] / "examples" / "images" / "draw.py"
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
TEXT = {"vocab_size": 151_936, "head_dim": 128, "num_attention_heads": 32, "rope_parameters": ROPE}
EIGHT = {"hidden_size": 4096, "intermediate_size": 12_288, "num_key_value_heads": 8}
THIRTY = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_key_value_heads": 4}
THIRTY |= {"num_experts": 128, "num_experts_per_tok": 8}
TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
TOWER |= {"patch_size": 16, "num_position_embeddings": 2304, "spatial_merge_size": 2}
# name -> (class of vision-language models, of the language model, sizes of text, layers)
SHAPES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "qwen3-vl-8b": ("Qwen3VL", "Qwen3", TEXT | EIGHT, 36),
    "qwen3-vl-30b-a3b": ("Qwen3VLMoe", "Qwen3Moe", TEXT | THIRTY, 48),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer than the shape's own")
    parser.add_argument("--freeze", choices=("tower", "none"), default="tower")
    parser.add_argument("--only", choices=("images", "text"))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--keys", nargs="*", default=[], help="further keys, such as gpus=2")
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        work = Path(name)
        prepare(work, args.shape, args.layers)
        for kind in (args.only,) if args.only else ("images", "text"):
            freeze = ["train.freeze=[]"] if args.freeze == "none" and kind == "images" else []
            keys = [f"model.config={work}/{kind}", f"data.train={work}/{kind}.jsonl"]
            keys += [f"output={work}/run-{kind}", f"train.max_steps={args.steps + 1}"]
            keys += [*freeze, *args.keys]
            found = {"gpu": torch.cuda.get_device_name(), "shape": args.shape, "rows": kind}
            figures = timed(work / "sft.yaml", work / f"run-{kind}", keys, args.steps)
            print(json.dumps({**found, "keys": keys, **figures}), flush=True)


def prepare(work: Path, shape: str, layers: int | None) -> None:
    """Write both models' folders, their rows and a config."""
    sees, reads, sizes, own = SHAPES[shape]
    sizes = sizes | {"num_hidden_layers": layers or own}
    draw = runpy.run_path(str(DRAW))
    for kind in ("images", "text"):
        draw["model"](work / kind)  # a tokenizer and a processor
    ids = json.loads((work / "images" / "config.json").read_text())
    tokens = {name: ids[name] for name in ids if name.endswith("_token_id")}
    tower = TOWER | {"out_hidden_size": sizes["hidden_size"]}
    tower |= {"deepstack_visual_indexes": [8, 16, 24]}
    parts = {"text_config": sizes, "vision_config": tower, **tokens}
    for kind, family, values in (("images", sees, parts), ("text", reads, sizes)):
        name = "ForConditionalGeneration" if kind == "images" else "ForCausalLM"
        more: dict[str, Any] = {"architectures": [family + name], "dtype": "bfloat16"}
        if kind == "text":
            more["rope_parameters"] = {k: v for k, v in ROPE.items() if k != "mrope_section"}
        getattr(transformers, f"{family}Config")(**(values | more)).save_pretrained(work / kind)
    pixels: dict[str, Any] = {"min_pixels": SIDE * SIDE, "max_pixels": SIDE * SIDE}
    processor: Any = transformers.Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, **pixels)
    processor.save_pretrained(work / "images")
    draws = random.Random(0)
    for number in range(PICTURES):
        what = draws.choice(draw["SHAPES"]), draws.choice(draw["DIGITS"])
        image = draw["picture"](draws.choice([*draw["COLOURS"]]), *what, draws)
        image.resize((SIDE, SIDE)).save(work / f"{number}.png")
    words = " ".join(draw["QUESTIONS"]).replace("?", "").split()
    for kind in ("images", "text"):
        lines = (json.dumps({"messages": row}) for row in rows(kind, words, draws))
        (work / f"{kind}.jsonl").write_text("\n".join(lines))
    (work / "sft.yaml").write_text(
        "model: {init: random}\nmethod: sft\ndata: {eval: null}\ntrain: {schedule: constant, "
        f"warmup: 0, seq_len: {TOKENS}, tokens_per_step: {64 * TOKENS}}}\n"
        "checkpoint: {every: null, final: none}\n"
    )


def rows(kind: str, words: list[str], draws: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Conversations that all have as many tokens."""
    image = (SIDE // 32) ** 2 + 2 if kind == "images" else 0  # with its begin and end
    marks = 4  # two roles, and two ends of turns
    for number in range(ROWS):
        asked = TOKENS // 2 - image
        text = " ".join(draws.choices(words, k=asked))
        content = [{"type": "text", "text": text}]
        if kind == "images":
            content.insert(0, {"type": "image", "image": f"{number % PICTURES}.png"})
        answer = " ".join(draws.choices(words, k=TOKENS - asked - image - marks))
        yield [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    main()
