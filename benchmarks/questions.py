"""Works out the questions of the named shapes that the package ships: planner/questions.json.gz.

    python -m benchmarks.questions [--compare]

Where layers, dry runs or default options change, tests/planner/test_question.py says that they are
no longer what is shipped. A release of torch or transformers that works out the same of a shape is
added to its row; another answer replaces the row, unless --compare is given.
"""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import asdict
from typing import Any

from megatrain.config.load import bench_config
from megatrain.data.samples import name_for
from megatrain.engine.resolved import Machine, make_job
from megatrain.models.shapes import SHAPES
from megatrain.planner.question import SHIPPED, Question, releases
from megatrain.recipes.model import shape_model
from megatrain.recipes.plan import question_causes
from megatrain.recipes.planned_site import planned_site
from megatrain.recipes.setup import quiet_libraries, resolve_run


def worked_out(name: str) -> tuple[dict[str, Any], Question]:
    """The causes and the question of a named shape with default options, on a GPU with bf16."""
    config = bench_config(name)
    site = planned_site(config, gpu="RTX 4090", ram="64GiB")
    causes = question_causes(config, site)
    assert causes is not None, "a named shape has nothing that is not looked at"
    resolved = resolve_run(config, shape_model(config), Machine.of_site(site))
    return causes, Question(make_job(resolved), resolved.shape, resolved.compile)


def main() -> None:
    quiet_libraries()
    before = json.loads(gzip.decompress(SHIPPED.read_bytes()))
    rows = {}
    for name in SHAPES:
        causes, question = worked_out(name)
        plain = json.loads(json.dumps(asdict(question)))
        row = {"causes": name_for(causes), "releases": [], "question": plain}
        known = before.get(name, row)
        same = (known["causes"], known["question"]) == (row["causes"], row["question"])
        if same or "--compare" in sys.argv:
            row = known
        if same or "--compare" not in sys.argv:
            row["releases"] = [*filter(releases().__ne__, row["releases"]), releases()]
        rows[name] = row
        print(name, "the same" if same else "other figures")
    SHIPPED.write_bytes(gzip.compress(json.dumps(rows).encode(), mtime=0))


if __name__ == "__main__":
    main()
