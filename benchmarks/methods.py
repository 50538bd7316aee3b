"""Writes the table of docs/methods.md: each loss against TRL's own trainer on the same rows.

    python -m benchmarks.methods

Float32 on a CPU, tiny models; some 20 seconds. tests/engine/test_preference_losses.py holds every
row of it, and tests/test_docs.py that the page has them all.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, ROOT
from benchmarks.write_page import filled
from megatrain.engine.verify import gradients_of
from tests.engine.test_preference_losses import CASES, WITHOUT
from tests.support import engine_of, tiny_config
from tests.trl_oracle import judge_by_trl, trainers

PAGE, FILE = ROOT / "docs" / "methods.md", RESULTS / "methods.json"
FAMILY = "llama"


def compared(name: str, folder: Path) -> dict[str, Any]:
    """How far a loss is from TRL's on a batch of TRL's."""
    method, keys, loss = CASES[name]
    trainer = trainers()[method]
    theirs = judge_by_trl(trainer, FAMILY, folder, **keys)
    with engine_of(trainer.model(tiny_config(FAMILY))) as engine:
        result = engine.forward_backward(theirs.micro_batches(size=2), loss)
        ours = gradients_of(engine)
    expected = theirs.gradients
    worst = max(float((ours[n] - g).norm() / g.norm()) for n, g in expected.items())
    named = sorted(result.metrics)
    metrics = max(abs(result.metrics[n] - theirs.metrics[n]) for n in named)
    return {
        "case": name,
        "method": method.partition("-")[0],
        "trainer": trainer.of.__name__,
        "keys": dict(keys),
        "loss": abs(result.loss / theirs.loss - 1),
        "gradient": worst,
        "metrics": metrics,
        "names": named,
        "without": sorted(set(theirs.metrics) & WITHOUT),
    }


def table(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The generated part of the page."""
    yield "| method | loss | TRL's trainer | loss off by | worst gradient off by | metrics off by |"
    yield "|---|---|---|---|---|---|"
    for row in found:
        kind = row["keys"].get("loss_type", row["case"].partition("-")[2])
        kind = " + ".join(kind) if isinstance(kind, list) else kind
        figures = (row["loss"], row["gradient"], row["metrics"])
        cells = (row["method"], kind, row["trainer"], *(f"{value:.0e}" for value in figures))
        yield f"| {' | '.join(cells)} |"


def measured(records: dict[str, Any]) -> dict[str, Sequence[str]]:
    versions = " and ".join(f"{name} {records[name]}" for name in ("torch", "transformers"))
    about = f"Measured on {records['date']} with TRL {records['trl']}, {versions}."
    return {"methods": [about, "", *table(records["cases"])]}


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        cases = [compared(name, Path(folder)) for name in CASES]
    versions = {name: version(name) for name in ("trl", "torch", "transformers")}
    records = {"date": date.today().isoformat(), **versions, "cases": cases}
    FILE.write_text(json.dumps(records, indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), measured(records)))


if __name__ == "__main__":
    main()
