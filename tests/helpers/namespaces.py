"""Two hosts of one machine: network namespaces, joined by a cable that can be pulled out."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import pytest

from megatrain.recipes.ranks.launch import environment_of

ADDRESS, PORT = "10.77.0.{}", 29400
LIBC = ctypes.CDLL(None, use_errno=True)
NETWORK, NAMES = 0x4000_0000, 0x0400_0000  # CLONE_NEWNET, CLONE_NEWUTS: in `os` from Python 3.12 on


@contextmanager
def two_namespaces(prefix: str) -> Iterator[tuple[str, str]]:
    """Their names. The cable's ends are cable0 and cable1, at ADDRESS 1 and 2.

    Raises CalledProcessError where they cannot be made, FileNotFoundError without iproute2.
    """
    names = f"{prefix}0", f"{prefix}1"
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add cable0 netns {names[0]} type veth peer name cable1 netns {names[1]}")
        for rank, name in enumerate(names):
            ip(f"-n {name} addr add {ADDRESS.format(rank + 1)}/24 dev cable{rank}")
            for link in ("lo", f"cable{rank}"):
                ip(f"-n {name} link set {link} up")
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip(f"netns del {name}")


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)


def about(rank: int) -> dict[str, str]:
    """Environment of the only rank of a host, as a launcher sets it, with the interface to use."""
    there = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ADDRESS.format(1)}
    # by name, since a namespace resolves none
    return {**environment_of(rank, 2, PORT), **there, "GLOO_SOCKET_IFNAME": f"cable{rank}"}


@dataclass(frozen=True)
class TwoHosts:
    """name: what both namespaces' names begin with."""

    name: str

    def enter(self, rank: int) -> None:
        """Become the only process of rank's host. Called before any thread begins."""
        with open(f"/run/netns/{self.name}{rank}") as there:
            assert LIBC.setns(there.fileno(), NETWORK) == 0
        assert LIBC.unshare(NAMES) == 0
        socket.sethostname(f"host-{rank}")
        os.environ |= about(rank)

    def cut(self) -> None:
        for rank in range(2):
            ip(f"-n {self.name}{rank} link set cable{rank} down")


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Skips the test where they cannot be made: by others than root, or in most containers."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    hosts = TwoHosts(f"mega{os.getpid()}-")
    with ExitStack() as stack:
        try:
            stack.enter_context(two_namespaces(hosts.name))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        yield hosts
