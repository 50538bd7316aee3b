"""What is released: a wheel and an sdist, what lies in them, and that the wheel works where nothing
else of the repository is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from megatrain.version import VERSION
from tests.helpers.commands import make_project, save_tiny_model, steps_of, tiny_tokenizer

ROOT = Path(__file__).parent.parent
WHEEL = f"megatrain-{VERSION}-py3-none-any.whl"
RECORD = f"megatrain-{VERSION}.dist-info/RECORD"  # names, digests and sizes of all that it installs
# What Python files are not, and would be missed last.
DATA = {
    *("py.typed", "models/transforms/fp8.cu", "optim/elementwise.cu", "planner/questions.json.gz"),
    *(
        f"recipes/assets/{name}"
        for name in ("page.html", "page.css", "page.js", "uPlot.iife.min.js")
    ),
    *("recipes/assets/uPlot.LICENSE", "config/example.yaml", "data/templates/chatml.jinja"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # pip installs torch for one of them


def pip(*arguments: str | Path, python: str | Path = sys.executable) -> None:
    said = subprocess.run(
        [python, "-m", "pip", *arguments, "--quiet"],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    if said.returncode:
        words = "a release is tested with packages from pip's index: is it reachable?"
        pytest.fail(f"pip {arguments[0]} failed; {words}\n{said.stderr[-3000:]}")


def pinned(name: str) -> str:
    """The release that `make` installs."""
    return str(re.findall(rf"{name}==[\d.]+", (ROOT / "Makefile").read_text())[0])


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("release")
    pip("install", "--target", folder / "tools", "hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder / "dist")]
    tools = {**os.environ, "PYTHONPATH": str(folder / "tools")}
    subprocess.run(build, cwd=ROOT, env=tools, check=True, capture_output=True)
    return folder / "dist"


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as opened:
        return opened.read(name).decode()


def files_of_sdist(dist: Path) -> set[str]:
    with tarfile.open(dist / f"megatrain-{VERSION}.tar.gz") as opened:
        return {member.name.partition("/")[2] for member in opened if member.isfile()}


def test_the_wheel_is_the_package_and_its_licences(dist):
    with zipfile.ZipFile(dist / WHEEL) as opened:
        held = {name for name in opened.namelist() if ".dist-info/" not in name}
    package = [path for path in (ROOT / "megatrain").rglob("*") if path.is_file()]
    cached = {path for path in package if path.parent.name == "__pycache__"}
    assert held == {str(path.relative_to(ROOT)) for path in package if path not in cached}
    assert {f"megatrain/{name}" for name in DATA} <= held
    licences = ("LICENSE", "megatrain/recipes/assets/uPlot.LICENSE")
    for licence in licences:
        inside = read(dist / WHEEL, RECORD.replace("RECORD", f"licenses/{licence}"))
        assert inside == (ROOT / licence).read_text()


def test_one_version_is_told_everywhere(dist):
    about = read(dist / WHEEL, RECORD.replace("RECORD", "METADATA"))
    newest = re.findall(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f"\nVersion: {VERSION}\n" in about
    assert [newest, *cited] == [VERSION, VERSION]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git knows what belongs to the sources")
def test_the_sdist_is_the_repository(dist):
    """With all that `make test` reads, and without what git ignores."""

    def listed(*options: str) -> set[str]:
        command = ["git", "ls-files", "-z", *options]
        named = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        return {name for name in named.split("\0") if (ROOT / name).is_file()}

    held = files_of_sdist(dist)
    assert listed() - held == set()
    new = listed("--others", "--exclude-standard")
    assert held - listed() - new == {"PKG-INFO"}


def test_the_sdist_makes_the_same_wheel(dist, tmp_path):
    pip("wheel", "--no-deps", "--wheel-dir", tmp_path, dist / f"megatrain-{VERSION}.tar.gz")
    assert read(tmp_path / WHEEL, RECORD) == read(dist / WHEEL, RECORD)


def test_the_wheel_is_all_that_a_user_needs(dist, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    release = (pinned("torch"), pinned("transformers"), dist / WHEEL)
    pip("install", "--no-compile", *release, python=python)
    project = make_project(
        tmp_path / "project", save_tiny_model(tmp_path / "model", tiny_tokenizer())
    )
    clean = {"PATH": os.defpath, "HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}

    def run(*arguments: str) -> str:
        command = [python.parent / "megatrain", *arguments]
        done = subprocess.run(command, cwd=project, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--help").startswith("Usage: megatrain ")
    assert run("--version").split()[-1] == VERSION
    assert run("plan", "qwen2.5-7b", "--gpu", "RTX 4090", "--ram", "128GiB").startswith("fits: ")
    assert "trained        2 steps" in run("train", "cfg.yaml", "train.max_steps=2")
    assert [row["step"] for row in steps_of(project / "run")] == [1, 2]
    assert "uPlot" in (project / "run" / "report.html").read_text()
