"""Writes the prompts of examples/tools: products to work out, and questions about documents.

python examples/tools/rows.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

TOWNS = ("Aldry", "Bessin", "Corvale", "Dunmere", "Estley", "Farrow", "Gant", "Hollin")
TRADES = ("baker", "smith", "weaver", "potter", "miller", "tanner", "cooper", "mason")


def products(draws: random.Random) -> dict[str, object]:
    a, b, c = (draws.randint(100, 999) for _ in range(3))
    question = f"What is {a} * {b} + {c}? End with the number."
    return {"prompt": [{"role": "user", "content": question}], "answer": str(a * b + c)}


def letters(draws: random.Random) -> dict[str, object]:
    towns, trades = draws.sample(TOWNS, 4), draws.sample(TRADES, 4)
    places = zip(towns, trades, strict=True)
    documents = {
        f"letter {number}": f"In {town} there lives a {trade}, who is well known."
        for number, (town, trade) in enumerate(places, 1)
    }
    question = f"Where does the {trades[2]} live? Search the documents and give the answer."
    asked = [{"role": "user", "content": question}]
    return {"prompt": asked, "documents": documents, "answer": towns[2]}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, row in (("products", products), ("letters", letters)):
        draws = random.Random(0)
        lines = (json.dumps(row(draws)) + "\n" for _ in range(200))
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
