"""torch's own distributed features on a world whose backend is "shm". Each case imports what it is about."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn

from samestep.shm import register
from samestep.testing import process_ranks


def over_shm(case, *args):
    """Run `case` with a default group over "shm" instead of Gloo."""
    warnings.simplefilter("ignore")  # torch's own deprecations, in torch's own code
    store = dist.PrefixStore("shm", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # the others may still be connecting
    dist.destroy_process_group()
    register()
    dist.init_process_group("shm", store=store, rank=rank, world_size=size)
    return case(rank, size, *args)


def same_everywhere(value):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    assert all(other == value for other in gathered), gathered


def ddp(model=None, hook=None, **options):
    torch.manual_seed(dist.get_rank())  # torch's DDP makes the models equal
    model = model or nn.Sequential(nn.Linear(10, 300), nn.BatchNorm1d(300), nn.Linear(300, 5))
    model = nn.parallel.DistributedDataParallel(model, **options)
    if hook is not None:
        model.register_comm_hook(*hook)
    return model


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 10)).sum().backward()
        optimizer.step()
    same_everywhere([p.tolist() for p in model.parameters()])


def ddp_and_its_hooks(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

    hooks = [
        None,
        (None, default_hooks.fp16_compress_hook),
        (powerSGD_hook.PowerSGDState(None, 1, 2), powerSGD_hook.powerSGD_hook),
        (
            post_localSGD_hook.PostLocalSGDState(None, dist.new_group(range(size)), 9),
            post_localSGD_hook.post_localSGD_hook,
        ),
    ]
    for hook in hooks:
        # PowerSGD issues collectives when others are done: with several buckets in no order of its own.
        one_bucket = hook is not None and hook[1] is powerSGD_hook.powerSGD_hook
        model = ddp(hook=hook, bucket_cap_mb=None if one_bucket else 0.005)
        train(model, torch.optim.SGD(model.parameters(), lr=0.01))


def join_and_sharded_optimizer(rank, size):
    from torch.distributed.algorithms.join import Join
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    model = ddp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    train(model, optimizer)
    optimizer.consolidate_state_dict(0)
    model = ddp(nn.Linear(10, 5))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    with Join([model, optimizer]):
        for _ in range(2 + rank):
            optimizer.zero_grad()
            model(torch.randn(2, 10)).sum().backward()
            optimizer.step()
    same_everywhere([p.tolist() for p in model.parameters()])
    model = nn.Linear(10, 5)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), PeriodicModelAverager(1))
    train(model, optimizer)


def functional_collectives(rank, size):
    from torch.distributed import _functional_collectives as functional

    group = dist.group.WORLD

    def wait(tensor):
        return functional.wait_tensor(tensor).tolist()

    ones = torch.ones(3)
    assert wait(functional.all_reduce(ones, "sum", group)) == [size] * 3
    assert wait(functional.all_gather_single(ones * rank, 0, group)) == [
        r for r in range(size) for _ in range(3)
    ]
    assert wait(functional.reduce_scatter_single(torch.ones(2 * size), "avg", 0, group)) == [1.0] * 2
    exchanged = functional.all_to_all_single(torch.arange(size) + 10 * rank, None, None, group)
    assert wait(exchanged) == [10 * r + rank for r in range(size)]
    assert wait(functional.broadcast(ones * rank, 1, group)) == [1.0] * 3
    several = functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", group)
    assert [wait(tensor) for tensor in several] == [[size] * 2, [size] * 3]


def sharded_tensors(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    full = torch.arange(24.0).view(6, 4)
    rows = distribute_tensor(full, mesh, [Shard(0)])
    assert torch.equal(rows.full_tensor(), full)
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), full)
    assert rows.sum().full_tensor() == full.sum()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sharded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sharded.load_state_dict(plain.state_dict())
    for layer in (*sharded, sharded):
        fully_shard(layer, mesh=mesh)
    batch = torch.randn(4, 8)
    plain(batch).sum().backward()
    sharded(batch).sum().backward()
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def objects_and_checkpoints(rank, size, folder):
    import torch.distributed.checkpoint as dcp

    listed = [rank, "x"]
    dist.broadcast_object_list(listed, 0)
    assert listed == [0, "x"]
    scattered = [None]
    dist.scatter_object_list(scattered, [str(r) for r in range(size)] if rank == 0 else None, 0)
    assert scattered == [str(rank)]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object({"rank": rank}, gathered, 0)
    assert rank or gathered == [{"rank": r} for r in range(size)]
    if rank == 0:
        dist.send_object_list([1, "a"], 1)
    elif rank == 1:
        got = [None, None]
        dist.recv_object_list(got, 0)
        assert got == [1, "a"]
    model = nn.Linear(4, 4)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    dcp.save(saved, checkpoint_id=folder)
    loaded = {name: torch.zeros_like(value) for name, value in saved.items()}
    dcp.load(loaded, checkpoint_id=folder)
    same_everywhere({name: value.tolist() for name, value in loaded.items()})


def sub_groups(rank, size):
    """Overlapping groups of any ranks, at the same time."""
    from torch.distributed.device_mesh import init_device_mesh

    members = [[r for r in range(size) if mask >> r & 1] for mask in range(1, 1 << size)]
    groups = [dist.new_group(ranks) for ranks in members]
    works = []
    for ranks, group in zip(members, groups, strict=True):
        if rank in ranks:
            tensor = torch.full((1000,), float(rank))
            works.append((ranks, tensor, dist.all_reduce(tensor, group=group, async_op=True)))
    for ranks, tensor, work in reversed(works):
        work.wait()
        assert tensor.unique().tolist() == [float(sum(ranks))]
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner")) if size == 4 else None
    if mesh is not None:
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mesh["inner"].get_group())
        assert tensor.item() == [1.0, 1.0, 5.0, 5.0][rank]


def all_features(rank, size, folder):
    """One after the other in the same processes: what they import takes longer than what they do."""
    ddp_and_its_hooks(rank, size)
    join_and_sharded_optimizer(rank, size)
    functional_collectives(rank, size)
    sharded_tensors(rank, size)
    objects_and_checkpoints(rank, size, folder)


def test_torch_features(tmp_path):
    process_ranks(over_shm, 2, all_features, str(tmp_path / "saved"), timeout=110.0)


def test_sub_groups():
    process_ranks(over_shm, 4, sub_groups)
