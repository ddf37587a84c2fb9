"""The life of a process group, in processes: torch keeps one default group in each."""

from __future__ import annotations

import os
import random
import socket
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import samestep
from samestep import shm
from samestep.environment import num_usable_cores
from samestep.errors import LaunchError, WorldError
from samestep.observe.bars import _Silent
from samestep.process_group import abort_process_group
from samestep.testing import process_ranks


def _alone() -> None:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def _no_launcher() -> tuple[object, ...]:
    _alone()
    assert not samestep.is_initialized()
    assert samestep.is_main()
    calls = [samestep.get_rank, samestep.get_local_rank, samestep.get_world_size, samestep.device]
    for call in [*calls, samestep.barrier, samestep.destroy_process_group]:
        with pytest.raises(WorldError, match=r"call samestep.init_process_group\(\)"):
            call()
    samestep.init_process_group()
    found = samestep.get_rank(), samestep.get_local_rank(), samestep.get_world_size(), samestep.is_main()
    with pytest.raises(WorldError, match=r"already \(rank 0 of 1\)"):
        samestep.init_process_group()
    assert samestep.device() == torch.device("cpu")
    samestep.barrier()
    samestep.destroy_process_group()
    assert not samestep.is_initialized()
    if not torch.cuda.is_available():
        with pytest.raises(WorldError, match="needs an NVIDIA GPU, and there is none here"):
            samestep.init_process_group("nccl")
    samestep.init_process_group("gloo")  # and again
    samestep.destroy_process_group()
    return found


def test_a_world_of_one_needs_no_variables() -> None:
    assert process_ranks(_no_launcher, 1) == [(0, 0, 1, True)]


def _explicit() -> None:
    dist.destroy_process_group()
    with pytest.raises(WorldError, match="rank=0, world_size=3 were asked for"):
        samestep.init_process_group("gloo", rank=0, world_size=3, store=dist.HashStore())
    with pytest.raises(WorldError, match="give both of them"):
        samestep.init_process_group("gloo", rank=0)
    with pytest.raises(WorldError, match="a store alone"):
        samestep.init_process_group("gloo", store=dist.HashStore())
    del os.environ["RANK"]
    with pytest.raises(LaunchError, match="RANK is not set"):
        samestep.init_process_group("gloo")
    del os.environ["WORLD_SIZE"]
    with pytest.raises(WorldError, match="rank=5 is not in"):
        samestep.init_process_group("gloo", rank=5, world_size=3, store=dist.HashStore())
    samestep.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    samestep.destroy_process_group()


def test_arguments_that_do_not_fit() -> None:
    process_ranks(_explicit, 1)


def _rendezvous(folder: str) -> tuple[int, int, float]:
    dist.destroy_process_group()
    samestep.init_process_group(init_method=f"file://{folder}/store")
    total = torch.tensor([float(samestep.get_rank())])
    dist.all_reduce(total)
    samestep.destroy_process_group()
    return samestep.environment.read_environment().rank, 0, total.item()


def test_an_init_method_takes_ranks_from_the_variables(tmp_path: object) -> None:
    assert process_ranks(_rendezvous, 3, str(tmp_path)) == [(0, 0, 3.0), (1, 0, 3.0), (2, 0, 3.0)]


def _default_backends(init_method: str) -> tuple[str, str, str]:
    dist.destroy_process_group()
    found = []
    address = os.environ["MASTER_ADDR"]
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    for variables in ({}, {"LOCAL_WORLD_SIZE": None, "MASTER_ADDR": "192.0.2.1"}):
        for name, value in variables.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        samestep.init_process_group(init_method=f"{init_method}-{len(found)}")
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == samestep.get_world_size()
        assert samestep.device() == torch.device("cpu")
        found.append(dist.get_backend())
        samestep.destroy_process_group()
    os.environ["MASTER_ADDR"] = address
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    with samestep.World():
        found.append(dist.get_backend())
    return found[0], found[1], found[2]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the accelerator's own backend is the default")
def test_the_default_is_shm_where_all_ranks_are_known_to_be_on_one_host(tmp_path: object) -> None:
    expected = ("shm" if shm.is_available() else "gloo", "gloo", "shm" if shm.is_available() else "gloo")
    assert process_ranks(_default_backends, 2, f"file://{tmp_path}/store") == [expected] * 2


def _comes_and_goes(folder: str, backend: str) -> None:
    dist.destroy_process_group()
    for number in range(12):
        samestep.init_process_group(backend, init_method=f"file://{folder}/{number}")
        samestep.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_with_nothing_to_do_may_leave_at_once(tmp_path: object, backend: str) -> None:
    process_ranks(_comes_and_goes, 3, str(tmp_path), backend)


def _spawned_by_a_script(port: int) -> tuple[int, int, int, str]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _alone()
    with pytest.raises(WorldError, match=f"rank {rank} of 2 does not know where to meet the others"):
        samestep.init_process_group(rank=rank, world_size=world_size)
    os.environ["MASTER_ADDR"] = "localhost"
    with pytest.raises(LaunchError, match="MASTER_PORT is not set"):
        samestep.init_process_group(rank=rank, world_size=world_size)
    os.environ["MASTER_PORT"] = str(port)
    samestep.init_process_group(rank=rank, world_size=world_size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3.0
    assert samestep.is_main() is (rank == 0)
    bar = samestep.progress([1, 2])
    assert isinstance(bar._display, _Silent) is (rank == 1)
    found = samestep.get_rank(), samestep.get_world_size(), samestep.get_local_rank(), dist.get_backend()
    samestep.destroy_process_group()
    return found


def test_ranks_that_only_their_script_numbers() -> None:
    """As torch's tutorial has it: multiprocessing.spawn, MASTER_ADDR and MASTER_PORT, rank and world_size."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    zero, one = process_ranks(_spawned_by_a_script, 2, port)
    backend = zero[3]
    assert (zero, one) == ((0, 2, 0, backend), (1, 2, 1, backend))


def _in_a_world() -> tuple[object, ...]:
    _alone()
    with samestep.World(seed=3) as world:
        first = torch.rand(1).item(), float(np.random.rand()), random.random()
        world.seed_ranks()
        second = torch.rand(1).item(), float(np.random.rand()), random.random()
        text = repr(world)
        found = world.rank, world.local_rank, world.size, world.is_main, str(world.device), world.seed
        world.barrier()
    assert not samestep.is_initialized()
    assert "not entered" in repr(world)
    with samestep.World(seed=3) as world:
        assert (torch.rand(1).item(), float(np.random.rand()), random.random()) == first
        world.seed_ranks()
        assert (torch.rand(1).item(), float(np.random.rand()), random.random()) == second
    assert first != second
    return (*found, text)


def test_world_does_all_of_it() -> None:
    (found,) = process_ranks(_in_a_world, 1)
    assert found == (0, 0, 1, True, "cpu", 3, "World(rank=0, size=1, device='cpu', seed=3)")


def _seeds(folder: str) -> tuple[float, float]:
    dist.destroy_process_group()
    with pytest.raises(WorldError, match="seed=-1 is negative"):
        samestep.World(seed=-1)
    samestep.init_process_group(init_method=f"file://{folder}/store")
    world = samestep.World(seed=11)
    with pytest.raises(WorldError, match="already"), world:
        pass
    abort_process_group()
    assert not samestep.is_initialized()
    abort_process_group()  # nothing to do
    return 0.0, 0.0


def test_entering_twice_is_refused_and_abort_needs_nobody(tmp_path: object) -> None:
    process_ranks(_seeds, 2, str(tmp_path))


def _one_fails(folder: str, backend: str, catch: bool) -> tuple[str, float]:
    dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    start = time.monotonic()
    try:
        init_method = f"file://{folder}/store"
        samestep.init_process_group(backend, init_method=init_method, timeout=timedelta(seconds=60))
        world = samestep.World(seed=0)
        try:
            if rank == 1:
                raise ZeroDivisionError("rank 1 has had enough")
            dist.all_reduce(torch.ones(1))  # rank 1 never comes
        except BaseException as error:
            world.__exit__(type(error), error, None)
            raise
    except (ZeroDivisionError, RuntimeError) as error:
        if rank == 1 and catch:
            time.sleep(3)  # it goes on living: the others must not wait for its end
        return type(error).__name__, time.monotonic() - start
    return "nothing", 0.0


@pytest.mark.parametrize("catch", [False, True])
@pytest.mark.parametrize(("backend", "error"), [("gloo", "RuntimeError"), ("shm", "CollectiveError")])
def test_no_rank_waits_for_one_that_failed(tmp_path: object, backend: str, error: str, catch: bool) -> None:
    zero, one = process_ranks(_one_fails, 2, str(tmp_path), backend, catch)
    assert one[0] == "ZeroDivisionError"
    assert zero[0] == error
    assert zero[1] < 20


def _virtual() -> tuple[object, ...]:
    _alone()
    torch.set_num_threads(2)
    with samestep.World(virtual_size=3, seed=5, deterministic_algorithms=True) as world:
        assert torch.get_num_threads() == max(1, num_usable_cores() // 3)
        assert torch.are_deterministic_algorithms_enabled()
        assert world.mean([1.0, 2.0, 6.0]).item() == 3.0
        mine = world.virtual
        with mine.play(0, 0):
            drawn = torch.rand(1).item()
        with mine.play(1, 0):
            assert torch.rand(1).item() != drawn
        found = tuple(mine.block), mine.seed, mine.is_fixed
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()
    return found


def test_a_world_has_virtual_ranks() -> None:
    assert process_ranks(_virtual, 1) == [((0, 3), 5, True)]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"virtual_size": 0}, "at least 1"), ({"seed": None}, "seed"), ({"num_threads": 0}, "1 thread")],
)
def test_virtual_ranks_that_cannot_be(options: dict[str, int | None], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        samestep.World(**{"virtual_size": 2, **options})  # type: ignore[arg-type]
