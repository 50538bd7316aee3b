"""Draw pictures of shapes and digits, questions about them, and a tiny model that sees.

    python examples/images/draw.py FOLDER

writes train.jsonl and eval.jsonl with their pictures, and `model/`: a configuration, a tokenizer
of these words and a processor of images, for weights that start at random.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

import transformers
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers

COLOURS = {"red": "#d22", "green": "#2a2", "blue": "#24d", "yellow": "#ec2", "purple": "#a2a"}
SHAPES = ("circle", "square", "triangle")
DIGITS = "0123456789"
QUESTIONS = ("what colour is the shape ?", "what shape is it ?", "which digit do you see ?")
SIDE, TRAINED, HELD_OUT = 48, 5_000, 200
SPECIAL = (
    *("<|end|>", "<|user|>", "<|assistant|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
TEMPLATE = """{%- for turn in messages -%}
<|{{ turn.role }}|>
{%- if turn.content is string -%}{{ turn.content }}
{%- else -%}{%- for part in turn.content -%}
{%- if part.type == "image" -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def picture(colour: str, shape: str, digit: str, draws: random.Random) -> Image.Image:
    """A shape in a colour somewhere, and a digit beside it."""
    image = Image.new("RGB", (2 * SIDE, SIDE), draws.choice(("#fff", "#eee", "#ddf", "#ffe")))
    pen, size = ImageDraw.Draw(image), draws.randint(24, 36)
    x, y = draws.randint(2, SIDE - size - 2), draws.randint(2, SIDE - size - 2)
    box = (x, y, x + size, y + size)
    if shape == "circle":
        pen.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle(box, fill=COLOURS[colour])
    else:
        pen.polygon([(x, y + size), (x + size, y + size), (x + size / 2, y)], COLOURS[colour])
    place = SIDE + draws.randint(6, 14), draws.randint(-4, 2)
    pen.text(place, digit, "#000", font_size=44)
    return image


def rows(folder: Path, name: str, count: int, seed: int) -> None:
    """Write pictures and a question about each."""
    draws, lines = random.Random(seed), list[str]()
    (folder / name).mkdir(parents=True)
    things = list(product(COLOURS, SHAPES, DIGITS))
    for number in range(count):
        what = draws.choice(things)
        path = Path(name) / f"{number}.png"
        picture(*what, draws).save(folder / path)
        asked_of = draws.randrange(len(QUESTIONS))
        asked = [
            {"type": "image", "image": str(path)},
            {"type": "text", "text": QUESTIONS[asked_of]},
        ]
        turns = [{"role": "user", "content": asked}]
        turns.append({"role": "assistant", "content": what[asked_of]})
        lines.append(json.dumps({"messages": turns}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines))


def model(folder: Path) -> None:
    """A configuration of 1.2M parameters in Qwen3-VL's shape, its tokenizer and processor."""
    words = {*COLOURS, *SHAPES, *DIGITS, *" ".join(QUESTIONS).split()}
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, "[UNK]", *sorted(words)))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>", unk_token="[UNK]"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    tokenizer.chat_template = TEMPLATE
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    config = transformers.Qwen3VLConfig(
        text_config={
            "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
            "vocab_size": 64, "max_position_embeddings": 512, "rope_parameters": rope,
        },
        vision_config={
            "depth": 4, "hidden_size": 96, "num_heads": 4, "intermediate_size": 192,
            "patch_size": 8, "spatial_merge_size": 2, "out_hidden_size": 128,
            "num_position_embeddings": 256, "deepstack_visual_indexes": [1, 2],
        },
        image_token_id=vocabulary["<|image_pad|>"], video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
        architectures=["Qwen3VLForConditionalGeneration"], dtype="float32",
    )  # fmt: skip
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, min_pixels=SIDE * SIDE, max_pixels=2 * SIDE * SIDE
    )
    for part in (config, tokenizer, images):
        part.save_pretrained(folder)


def main(folder: Path) -> None:
    model(folder / "model")
    rows(folder, "train", TRAINED, seed=0)
    rows(folder, "eval", HELD_OUT, seed=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
