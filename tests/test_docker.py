"""What can be said of the Dockerfile without Docker."""

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINES = [
    line
    for line in (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]
DOCKER_PAGE = (ROOT / "docs" / "docker.md").read_text()


def instructions(name: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{name} ")]


def test_only_what_is_copied_is_sent_to_the_daemon_and_it_is_there():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line]
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source
        for copy in instructions("COPY")
        for source in shlex.split(copy)[:-1]
        if not source.startswith("--")
    }
    assert "*" in ignored and sent == copied
    assert all((ROOT / source).exists() for source in copied)
    assert any(fnmatch("megatrain/x.pyc", pattern.removeprefix("**/")) for pattern in ignored)


def test_the_image_runs_as_a_user_who_is_not_root_and_gets_signals_itself():
    assert instructions("USER")[-1] not in ("root", "0")
    assert instructions("ENTRYPOINT") == ['["megatrain"]']  # a shell would keep signals to itself


def test_nothing_secret_is_asked_for_while_building():
    names = [line.partition("=")[0] for line in instructions("ARG")]
    assert not [name for name in names if re.search("TOKEN|KEY|PASSWORD|SECRET", name)]


def test_the_page_tells_every_argument_and_only_those():
    arguments = {line.partition("=")[0] for line in instructions("ARG")}
    assert arguments == set(re.findall(r"^\| `([A-Z]+)` \|", DOCKER_PAGE, re.MULTILINE))
    assert arguments >= set(re.findall(r"--build-arg (\w+)=", DOCKER_PAGE))


def test_the_image_has_the_release_of_transformers_that_is_tested():
    (release,) = re.findall(r"^TRANSFORMERS \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert f'TRANSFORMERS="{release}"' in instructions("ARG")
