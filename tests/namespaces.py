"""Two hosts of one machine: network namespaces, joined by a cable that can be pulled out."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from benchmarks.hosts import about, ip, two_namespaces

LIBC = ctypes.CDLL(None, use_errno=True)
NETWORK, NAMES = 0x4000_0000, 0x0400_0000  # CLONE_NEWNET, CLONE_NEWUTS: in `os` from Python 3.12 on


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
