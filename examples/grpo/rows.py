"""Writes the prompts of examples/grpo: sums of two digits after two examples, and words to count.

python examples/grpo/rows.py FOLDER
"""

import itertools
import json
import sys
from pathlib import Path

SHOTS = "2+3=5\n6+1=7\n"
SUBJECTS = (
    *("the sea", "a winter morning", "bread", "a train", "the moon", "an old house", "rain"),
    *("a cat", "the city at night", "a garden", "coffee", "a long walk", "the library", "snow"),
)


def main(folder: Path) -> None:
    digits = itertools.product(range(10), repeat=2)
    sums: list[dict[str, object]] = [
        {"prompt": f"{SHOTS}{a}+{b}=", "answer": str(a + b)} for a, b in digits
    ]
    asked: list[dict[str, object]] = [
        {"prompt": [{"role": "user", "content": f"Write {n} words about {what}."}], "count": n}
        for n, what in itertools.product(range(4, 13), SUBJECTS)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("sums", sums), ("words", asked)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
