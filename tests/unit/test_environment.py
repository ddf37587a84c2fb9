"""Launcher variables -> `Environment`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.environment import Environment, expand_task_counts, first_host, read_environment
from samestep.errors import LaunchError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def slurm(**changes: str | None) -> dict[str, str]:
    """Rank 6 of 7, on the last of three nodes."""
    variables: dict[str, str | None] = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "2",
        "SLURM_NODEID": "2",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_NTASKS": "14",  # of the job: the step has fewer
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
        "SLURM_STEP_NODELIST": "gpu[03-04,9]",
    }
    return {name: value for name, value in {**variables, **changes}.items() if value is not None}


def test_no_launcher_is_a_world_of_one() -> None:
    assert read_environment({"HOME": "/root"}) == Environment()


def test_torchrun() -> None:
    assert read_environment(TORCHRUN) == Environment(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        one_host=False,
        master_addr="host-a",
        master_port=29500,
        launcher="torchrun",
        run_id="abc",
        restart_count=2,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "RANK=8 is not in 0..WORLD_SIZE-1"),
        ({"RANK": "-1"}, "RANK=-1 is not in"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not in"),
        ({"MASTER_PORT": ""}, "MASTER_PORT='' is not a whole number"),
    ],
)
def test_torchrun_contradictions(changes: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_environment({**TORCHRUN, **changes})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_torchrun_variable_missing(name: str) -> None:
    with pytest.raises(LaunchError, match=f"{name} is not set"):
        read_environment({k: v for k, v in TORCHRUN.items() if k != name})


@pytest.mark.parametrize(
    ("changes", "one_host"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, True),  # the launcher said so, whatever it calls its host
        ({}, False),
        ({"LOCAL_WORLD_SIZE": None, "LOCAL_RANK": None}, False),  # set by hand, perhaps on two hosts
        ({"LOCAL_WORLD_SIZE": None, "LOCAL_RANK": None, "MASTER_ADDR": "127.0.0.1"}, True),
        ({"LOCAL_WORLD_SIZE": None, "LOCAL_RANK": None, "MASTER_ADDR": "localhost"}, True),
        ({"LOCAL_WORLD_SIZE": None, "LOCAL_RANK": None, "MASTER_ADDR": "127.0.0.1.example.org"}, False),
    ],
)
def test_all_ranks_are_on_this_host_only_if_that_is_known(
    changes: dict[str, str | None], one_host: bool
) -> None:
    variables = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    assert read_environment(variables).one_host is one_host


def test_slurm() -> None:
    environment = read_environment(slurm())
    assert environment == Environment(
        rank=6,
        world_size=7,
        local_rank=2,
        local_world_size=3,
        one_host=False,
        master_addr="gpu03",
        master_port=environment.master_port,
        launcher="slurm",
        run_id="4711",
    )


def test_slurm_on_one_node_stays_on_loopback() -> None:
    variables = slurm(SLURM_STEP_TASKS_PER_NODE="7", SLURM_NODEID="0", SLURM_LOCALID="6")
    environment = read_environment(variables)
    assert (environment.master_addr, environment.one_host) == ("127.0.0.1", True)


def test_slurm_without_step_variables_uses_the_jobs() -> None:
    variables = slurm(
        SLURM_STEP_NUM_TASKS=None,
        SLURM_NTASKS="7",
        SLURM_STEP_TASKS_PER_NODE=None,
        SLURM_TASKS_PER_NODE="2(x2),3",
        SLURM_STEP_NODELIST=None,
        SLURM_JOB_NODELIST="a1,b2,c3",
    )
    environment = read_environment(variables)
    assert (environment.world_size, environment.local_world_size, environment.master_addr) == (7, 3, "a1")


@pytest.mark.parametrize(
    "variables",
    [
        slurm(SLURM_STEP_ID=None, SLURM_PROCID="0"),  # the shell of sbatch
        slurm(SLURM_STEP_ID=None, SLURM_PROCID=None),  # the shell of salloc
        slurm(SLURM_STEP_ID=str(0xFFFFFFFA), SLURM_PROCID="0"),  # salloc's own step
        slurm(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0"),  # srun -n 1
    ],
)
def test_slurm_shells_and_single_tasks_are_a_world_of_one(variables: dict[str, str]) -> None:
    environment = read_environment(variables)
    assert (environment.launcher, environment.world_size, environment.master_addr) == ("none", 1, None)


def test_torchrun_wins_over_slurm() -> None:
    assert read_environment({**slurm(), **TORCHRUN}).launcher == "torchrun"


def test_master_variables_win_over_slurms() -> None:
    environment = read_environment({**slurm(), "MASTER_ADDR": "here", "MASTER_PORT": "1234"})
    assert (environment.master_addr, environment.master_port) == ("here", 1234)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID=7 is not in"),
        ({"SLURM_LOCALID": "3"}, "SLURM_LOCALID=3 does not fit the 3 task"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3 is not among the 3 node"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2"}, "not a list of counts"),
        ({"SLURM_STEP_NODELIST": "[1-2"}, "names no host"),
        ({"SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST is not set"),
    ],
)
def test_slurm_contradictions(changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_environment(slurm(**changes))


@settings(deadline=None)  # the machine may be busy
@given(job=st.integers(0, 2**31), step=st.integers(0, 10_000))
def test_slurm_port_is_one_for_all_tasks_and_below_the_systems_own(job: int, step: int) -> None:
    ports = {
        read_environment(
            slurm(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step), SLURM_PROCID=rank, SLURM_NODEID=node)
        ).master_port
        for rank, node in (("6", "2"), ("4", "2"))
    }
    assert len(ports) == 1
    assert all(port is not None and 1024 < port < 32768 for port in ports)
    following = slurm(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step + 1))
    assert read_environment(following).master_port not in ports


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.tuples(st.integers(1, 128), st.integers(1, 9)), min_size=1, max_size=5))
def test_task_counts_round_trip(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_task_counts(text) == [count for count, times in runs for _ in range(times)]


@settings(deadline=None)  # the machine may be busy
@given(
    prefix=st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True),
    width=st.integers(1, 4),
    first=st.integers(0, 9),
    suffix=st.sampled_from(["", "-ib", ".cluster.example"]),
    rest=st.sampled_from(["", "-9", ",7", "-8,9"]),
    more=st.sampled_from(["", ",login1", ",x[1-3]"]),
)
def test_first_host_is_the_first_of_a_bracket(
    prefix: str, width: int, first: int, suffix: str, rest: str, more: str
) -> None:
    assert (
        first_host(f"{prefix}[{first:0{width}}{rest}]{suffix}{more}") == f"{prefix}{first:0{width}}{suffix}"
    )


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node[03-05,9],login1", "node03"),
        ("login1,node[03-05]", "login1"),
        ("single", "single"),
        ("rack[1-2]node[10-12]", "rack1node10"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@settings(deadline=None)  # the machine may be busy
@given(st.dictionaries(st.sampled_from([*TORCHRUN, *slurm()]), st.text(max_size=8)))
def test_whatever_the_variables_hold_it_is_an_environment_or_a_launch_error(
    variables: dict[str, str],
) -> None:
    try:
        environment = read_environment(variables)
    except LaunchError as error:
        environment, message = Environment(), str(error)
    else:
        message = ""
    assert "\n" not in message
    assert 0 <= environment.rank < environment.world_size


def test_torch_is_not_imported() -> None:
    code = "import sys, samestep.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
