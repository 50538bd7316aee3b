"""Which rank of a launcher a process is, by its environment."""

from __future__ import annotations

import pytest

from megatrain.errors import ConfigError
from megatrain.machine.launcher import Place, first_host, place_of

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
SLURM_OF_18 = SLURM | {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "18",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),2",
}


def test_a_launcher_says_which_rank_this_is():
    slurm = SLURM | {"SLURM_JOB_ID": "7"}
    places: list[tuple[dict[str, str], Place | None]] = [
        ({}, None),
        (TORCHRUN, Place(3, 4, 1, 2)),
        (SLURM, Place(1, 2, 1, 2)),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "2"}, Place(1, 2, 1, 2)),
        (
            SLURM | {"SLURM_NTASKS_PER_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "2"},
            Place(1, 2, 1, 2),
        ),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}, Place(1, 2, 0, 1)),
        (SLURM_OF_18 | {"SLURM_NODEID": "1"}, Place(9, 18, 1, 8)),
        (SLURM_OF_18 | {"SLURM_NODEID": "2"}, Place(9, 18, 1, 2)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (SLURM | {"WORLD_SIZE": "1"}, None),
        (slurm | {"SLURM_STEP_ID": "0"}, Place(1, 2, 1, 2)),
        (slurm, None),  # the job's script, which is one process
        ({"WORLD_SIZE": "many"}, None),
        ({"WORLD_SIZE": ""}, None),
    ]
    for environ, place in places:
        assert place_of(environ) == place, environ


def test_tasks_of_slurm_meet_on_their_first_host():
    lists = {"gpu[007-008,012],big": "gpu007", "big,gpu[007-008]": "big", "gpu[4,7]": "gpu4"}
    for hosts, first in {**lists, "node-3.site": "node-3.site", "": "127.0.0.1"}.items():
        environ = {"SLURM_STEP_NODELIST": hosts}
        assert first_host(environ, Place(9, 18, 1, 8)) == first
        assert first_host(environ, Place(1, 8, 1, 8)) == "127.0.0.1"


def test_half_a_launcher_is_refused():
    wrong = {"RANK": ("4", "-1"), "LOCAL_RANK": ("2",), "LOCAL_WORLD_SIZE": ("5",)}
    broken = [TORCHRUN | {name: value} for name, values in wrong.items() for value in values]
    for environ in [{"WORLD_SIZE": "2"}, *broken]:
        size = environ["WORLD_SIZE"]
        with pytest.raises(ConfigError, match=rf"WORLD_SIZE={size}.*no rank of a launcher"):
            place_of(environ)
