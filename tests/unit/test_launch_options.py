"""Options are checked before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import LaunchError
from samestep.launch.options import RunOptions, parse_endpoint, parse_nnodes, resolve_nproc
from samestep.launch.rank import Place, rank_variables


@settings(deadline=None)  # the machine may be busy
@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_nnodes(fewest: int, more: int) -> None:
    assert parse_nnodes(f"{fewest}:{fewest + more}") == (fewest, fewest + more)
    assert parse_nnodes(str(fewest)) == (fewest, fewest)


@pytest.mark.parametrize("text", ["", "0", "2:1", "-1", "two", "1:2:3", "1:", ":2", "1.5"])
def test_bad_nnodes(text: str) -> None:
    with pytest.raises(LaunchError, match="--nnodes"):
        parse_nnodes(text)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("node01", ("node01", 29400)),
        ("node01:1", ("node01", 1)),
        ("10.0.0.7:65535", ("10.0.0.7", 65535)),
        ("[fe80::1]:80", ("fe80::1", 80)),
    ],
)
def test_endpoint(text: str, place: tuple[str, int]) -> None:
    assert parse_endpoint(text) == place


@pytest.mark.parametrize(
    "text", ["", ":80", "host:0", "host:65536", "host:http", "a b:80", "fe80::1", "[::1"]
)
def test_bad_endpoint(text: str) -> None:
    with pytest.raises(LaunchError, match="--rdzv-endpoint"):
        parse_endpoint(text)


@pytest.mark.parametrize("text", ["0", "-1", "", "many", "1.5", "GPU", "9999999"])
def test_bad_nproc(text: str) -> None:
    with pytest.raises(LaunchError, match="--nproc"):
        resolve_nproc(text)


def test_nproc() -> None:
    assert resolve_nproc("3") == 3
    assert resolve_nproc("cpu") == len(os.sched_getaffinity(0))
    assert resolve_nproc("auto") >= 1


def test_bad_options_are_one_clear_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    cases: list[tuple[dict[str, object], str]] = [
        ({"target": str(tmp_path / "none.py")}, "there is no script"),
        ({"target": str(tmp_path)}, "is a directory"),
        ({"num_ranks": 0}, "--nproc 0"),
        ({"max_restarts": -1}, "--max-restarts -1"),
        ({"max_hosts": 2}, "--nnodes needs --rdzv-endpoint"),
        ({"rdzv_id": ""}, "--rdzv-id is empty"),
        ({"log_dir": script}, "is not a directory"),
        ({"target": "no_such_package.train", "is_module": True}, "no module 'no_such_package'"),
        ({"target": "train.py ", "is_module": True}, "not a module's name"),
    ]
    for changes, message in cases:
        with pytest.raises(LaunchError, match=message) as caught:
            RunOptions(**{"target": str(script), **changes})  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


@settings(deadline=None)  # the machine may be busy
@given(first=st.integers(0, 100), local=st.integers(1, 8), inherited=st.booleans())
def test_rank_variables(first: int, local: int, inherited: bool) -> None:
    place = Place(first, local, first + local, 1, 2, "host", 1234, "id", 2, 3)
    tuning = ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    own = dict.fromkeys(tuning, "5") if inherited else {}
    for local_rank in range(local):
        variables = rank_variables(place, local_rank, own)
        assert variables["RANK"] == variables["ROLE_RANK"] == str(first + local_rank)
        assert variables["TORCHELASTIC_RESTART_COUNT"] == "2"
        assert all((name in variables) != inherited for name in tuning)
        assert "GLOO_SOCKET_IFNAME" not in variables  # between hosts, loopback will not do
