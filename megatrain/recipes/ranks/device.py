"""The GPU and the cores of a rank."""

from __future__ import annotations

import os
import socket

import torch

from megatrain.errors import ConfigError
from megatrain.machine.hardware import built_for_cuda, physical_cores, visible_gpus
from megatrain.machine.launcher import Place, share_of_cores
from megatrain.world import World


def own_device(place: Place, device: str) -> torch.device:
    """The GPU of a rank, the only one that it sees from now on, or the CPU. Raises ConfigError.

    CUDA is not asked which there are: it would see all of them ever after.
    """
    gpus = visible_gpus() if device != "cpu" and built_for_cuda() else []
    if not gpus:
        if device == "cuda":
            raise ConfigError(f"device: {device} was asked for, but PyTorch sees no CUDA device")
        return torch.device("cpu")
    # a launcher may show each rank its own already
    index = 0 if len(gpus) == 1 and place.local_size > 1 else place.local_rank
    if index >= len(gpus):
        raise ConfigError(
            f"{place.local_size} ranks on {socket.gethostname()}, which has {len(gpus)} GPUs; "
            "start as many"
        )
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # in which they were counted
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[index]
    return torch.device("cuda", 0)


def bind(world: World, device: torch.device) -> None:
    """Keep this rank to its share of the host's cores: threads that begin from now on, and memory
    that they touch first. All ranks call it.

    On a CPU PyTorch computes with as many threads, since more would wait for each other.
    """
    if world.is_alone:
        return
    number, of = on_the_same_cores(world)
    cores = max(1, physical_cores() // of)
    os.sched_setaffinity(0, share_of_cores(number, of))
    if device.type == "cpu":
        torch.set_num_threads(min(cores, torch.get_num_threads()))


def cores_of_host(world: World) -> int:
    """Physical cores of all ranks of this host. All ranks call it."""
    _, sharing = on_the_same_cores(world)
    return physical_cores() * world.local_size // sharing


def on_the_same_cores(world: World) -> tuple[int, int]:
    """(number of this rank, count) among this host's ranks that may use the same cores.

    Launchers, such as Slurm's, may have bound each rank to its own. All ranks call it.
    """
    masks = world.all_gather(os.sched_getaffinity(0))
    first = world.rank - world.local_rank
    here = masks[first : first + world.local_size]
    same = [number for number, mask in enumerate(here) if mask == here[world.local_rank]]
    return same.index(world.local_rank), len(same)
