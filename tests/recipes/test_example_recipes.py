"""The configs in examples/recipes fit the cards that they are for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatrain.config.load import bench_config
from megatrain.planner import planning
from megatrain.recipes.plan import plan

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"


@pytest.mark.slow
def test_every_recipe_fits_its_card(monkeypatch):
    monkeypatch.setattr(planning, "faster", lambda *_: ())  # takes long
    files, table = sorted(FOLDER.glob("*.yaml")), (FOLDER / "README.md").read_text()
    assert len(files) >= 12
    for file in files:
        about, command, shape = file.read_text().splitlines()[:3]
        *_, name, _, gpu, _, ram = shlex.split(command.removeprefix("# "))
        config = bench_config(str(file), [f"model.config={shape.removeprefix('# shape: ')}"])
        found = plan(config, True, {"gpu": gpu, "ram": ram})
        assert (name, found.fits) == (file.name, True), f"{name}: {found.lack}"
        assert str(config.output) == f"runs/{file.stem}"
        row = (
            f"| [{name}]({name}): {about[2:].rstrip('.')} | {gpu} | {ram.replace('GiB', ' GiB')} |"
        )
        assert row in table
    links = re.findall(r"\((\S+\.yaml)\)", table)
    assert links == [file.name for file in files]


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_recipe_is_a_config(file):
    assert bench_config(str(file)).method == (file.stem.split("-")[0].replace("long", "sft"))
