"""SyncBatchNorm on ranks that are threads, against BatchNorm in one process on all of their batches."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import DistributedDataParallel, SyncBatchNorm
from samestep.errors import GradientError, NormalizationError
from samestep.nn.exchange import Exchange, Phase
from samestep.nn.moments import Moments, measure, merge
from samestep.testing import thread_ranks
from samestep.tree import tree_sum
from samestep.virtual import VirtualRanks, virtual_ranks
from tests.ranks.test_shm import shm_ranks
from tests.ranks.wrapping import numbers, seeded

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-12}
SHAPES = {"2-D": (9, 3), "1-D": (9, 3, 5), "2-D images": (9, 3, 4, 5), "3-D images": (9, 3, 2, 3, 4)}
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
# How many of the nine samples each rank has.
CUTS = {1: [9], 2: [4, 5], 3: [0, 7, 2], 4: [3, 1, 0, 5]}


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal within `tolerance`, relative to the largest value there is, or to 1."""
    assert found.shape == expected.shape
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    error = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
    assert error <= tolerance * scale, f"{error} of {scale}"


def layer_for(batch: Tensor, kind: Any, **options: Any) -> Any:
    """A layer of `kind` whose parameters and running statistics are not those of a new one."""
    layer = kind(batch.size(1), **options)
    with torch.no_grad():
        for seed, tensor in enumerate([*layer.parameters(), layer.running_mean, layer.running_var]):
            if tensor is not None:
                tensor.copy_(numbers(batch.size(1), seed=100 + seed).abs() + 0.5)
    return layer


def train(layer: Any, batches: Sequence[Tensor], weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """Some steps: the last one's output and gradients, and what the layer keeps."""
    for batch, weight in zip(batches, weights, strict=True):
        layer.zero_grad()
        batch = batch.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        output = layer(batch)
        output.backward(weight)
    found = {"output": output.detach(), "input": batch.grad}
    found |= {name: p.grad for name, p in layer.named_parameters()}
    return found | {name: b.clone() for name, b in layer.named_buffers()}


def compare_with_plain(
    shape: Sequence[int],
    size: int,
    dtype: torch.dtype = torch.float64,
    memory_format: torch.memory_format = torch.contiguous_format,
    layer_dtype: torch.dtype | None = None,
    ranks: Any = thread_ranks,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """Two steps on `size` ranks equal those of one process on the joined batches, in float64."""
    batches = [(numbers(*shape, seed=i) * (i + 1) + 3).to(dtype) for i in range(2)]
    weights = [numbers(*shape, seed=10 + i).to(dtype) for i in range(2)]

    def run(group: dist.ProcessGroup) -> dict[str, Tensor]:
        rank = group.rank()
        layer = layer_for(
            batches[0], SyncBatchNorm, process_group=group, dtype=layer_dtype or dtype, **options
        )
        mine = [b.split(CUTS[size])[rank].to(memory_format=memory_format) for b in batches]
        return train(layer, mine, [w.split(CUTS[size])[rank] for w in weights])

    per_rank = ranks(run, size)
    plain = layer_for(batches[0], PLAIN[len(shape)], dtype=torch.float64, **options)
    if layer_dtype or dtype != torch.float64:  # the parameters that the ranks had, rounded
        plain.load_state_dict(
            layer_for(batches[0], PLAIN[len(shape)], dtype=layer_dtype or dtype, **options).state_dict()
        )
    expected = train(plain, [b.double() for b in batches], [w.double() for w in weights])
    tolerance = TOLERANCE[dtype]
    for name in ("output", "input"):
        found = [rank[name] for rank in per_rank]
        assert all(f.dtype == dtype for f in found)
        assert all(f.is_contiguous(memory_format=memory_format) for f in found)
        close(torch.cat(found), expected[name], tolerance)
    for name, _ in plain.named_parameters():
        close(sum(rank[name].double() for rank in per_rank), expected[name], tolerance)
    for name, _ in plain.named_buffers():
        for rank in per_rank:
            assert torch.equal(rank[name], per_rank[0][name])
        close(per_rank[0][name], expected[name], tolerance)
    return per_rank


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_batchnorm_on_the_joined_batch(shape: Sequence[int], size: int) -> None:
    compare_with_plain(shape, size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_in_float32(shape: Sequence[int], size: int) -> None:
    compare_with_plain(shape, size, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [(SHAPES["2-D images"], torch.channels_last), (SHAPES["3-D images"], torch.channels_last_3d)],
)
def test_channels_last_is_kept(
    shape: Sequence[int], memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    compare_with_plain(shape, 3, dtype, memory_format)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layer_dtype", [torch.float32, None])
def test_half_precision(dtype: torch.dtype, layer_dtype: torch.dtype | None) -> None:
    compare_with_plain((9, 3, 4, 5), 3, dtype, layer_dtype=layer_dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"momentum": None},
        {"momentum": 0.5, "eps": 0.1},
        {"track_running_stats": False},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    compare_with_plain((9, 3, 4, 5), 3, **options)


def test_the_same_bits_over_gloo_and_shm_and_on_all_ranks() -> None:
    shape = (9, 3, 4, 5)
    over_gloo = compare_with_plain(shape, 4, torch.float32)
    over_shm = compare_with_plain(shape, 4, torch.float32, ranks=shm_ranks)
    for one, other in zip(over_gloo, over_shm, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


class _Joined(torch.autograd.Function):
    """The function of the joined batch that three ranks compute together."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(batch, weight, bias)
        return torch.cat([output for output, _ in _three_ranks(batch, weight, bias, None)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        found = [grads for _, grads in _three_ranks(*ctx.saved_tensors, gradient)]
        by_batch, by_weight, by_bias = zip(*found, strict=True)
        return torch.cat(by_batch), sum(by_weight), sum(by_bias)


def _three_ranks(batch: Tensor, weight: Tensor, bias: Tensor, gradient: Tensor | None) -> list[Any]:
    cuts = [2, 0, 3]

    def run(group: dist.ProcessGroup) -> Any:
        layer = SyncBatchNorm(batch.size(1), process_group=group, dtype=torch.float64)
        mine = batch.detach().split(cuts)[group.rank()].clone().requires_grad_()
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        output = layer(mine)
        if gradient is None:
            return output.detach(), None
        output.backward(gradient.split(cuts)[group.rank()])
        return output.detach(), (mine.grad, layer.weight.grad, layer.bias.grad)

    return thread_ranks(run, 3)


def test_gradcheck() -> None:
    batch, weight, bias = (numbers(*shape, seed=i) for i, shape in enumerate([(5, 2), (2,), (2,)]))
    assert torch.autograd.gradcheck(
        _Joined.apply, [t.requires_grad_() for t in (batch, weight, bias)], fast_mode=True
    )


# Numbers


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_large_mean_does_not_cost_the_variance(memory_format: torch.memory_format) -> None:
    batch = (numbers(8, 3, 16, 16) + 1e4).float()

    def run(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        layer = SyncBatchNorm(3, process_group=group, momentum=1.0)
        layer(batch.chunk(4)[group.rank()].to(memory_format=memory_format))
        return layer.running_mean, layer.running_var

    variance, mean = torch.var_mean(batch.double(), (0, 2, 3))
    for found_mean, found_variance in thread_ranks(run, 4):
        torch.testing.assert_close(found_mean.double(), mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(found_variance.double(), variance, rtol=1e-6, atol=0)


def test_counts_are_whole_numbers_of_any_size() -> None:
    count = 2**24 + 1  # float32 does not have it; 2**53 + 1, which float64 does not have, is below

    def run(group: dist.ProcessGroup) -> int:
        cpu = torch.device("cpu")
        exchange = Exchange(lambda row: gather(row, group), wire=cpu, device=cpu, dtype=torch.float64)
        zeros = torch.zeros(2)
        return int(exchange.rows(Phase.FORWARD, (zeros, zeros), count=count).moments().count)

    def gather(row: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        rows = [torch.empty_like(row) for _ in range(group.size())]
        group.allgather([rows], [row]).wait()
        return rows

    assert thread_ranks(run, 3) == [3 * count] * 3
    big = Moments(torch.tensor(2**53), torch.zeros(1), torch.zeros(1))
    one = Moments(torch.tensor(1), torch.zeros(1), torch.zeros(1))
    assert int(merge(big, one).count) == 2**53 + 1


def test_merging_parts_gives_the_moments_of_all() -> None:
    batch = numbers(12, 2, 3) * 5 + 7
    parts = [
        Moments(torch.tensor(count), mean, square_sum)
        for count, mean, square_sum in map(measure, batch.split([0, 1, 5, 0, 6]))
    ]
    whole = tree_sum(parts, merge)
    assert int(whole.count) == 36
    variance, mean = torch.var_mean(batch, (0, 2), correction=1)
    torch.testing.assert_close(whole.mean, mean)
    torch.testing.assert_close(whole.unbiased_variance, variance)
    torch.testing.assert_close(whole.variance, variance * 35 / 36)


# Batches that are none


@pytest.mark.parametrize("sizes", [(1, 0, 0), (0, 0, 1)])
def test_one_value_per_channel_on_all_ranks_together_is_refused_on_all(sizes: tuple[int, ...]) -> None:
    def run(group: dist.ProcessGroup) -> str:
        layer = SyncBatchNorm(2, process_group=group)
        with pytest.raises(
            ValueError, match="Expected more than 1 value per channel when training"
        ) as caught:
            layer(torch.ones(sizes[group.rank()], 2))
        return str(caught.value)

    assert all("all ranks together have 1" in text for text in thread_ranks(run, 3))


def test_one_value_on_each_rank_is_enough() -> None:
    def run(group: dist.ProcessGroup) -> Tensor:
        return SyncBatchNorm(1, process_group=group, eps=0)(torch.tensor([[float(group.rank())]]))

    assert torch.cat(thread_ranks(run, 2)).flatten().tolist() == [-1.0, 1.0]


def test_no_values_at_all_leave_the_running_statistics_alone() -> None:
    def run(group: dist.ProcessGroup) -> None:
        layer = SyncBatchNorm(2, process_group=group)
        batch = torch.ones(0, 2, 3, requires_grad=True)
        layer(batch).sum().backward()
        assert batch.grad is not None
        assert batch.grad.shape == (0, 2, 3)
        assert layer.running_mean.tolist() == [0, 0]
        assert layer.running_var.tolist() == [1, 1]
        assert layer.weight.grad.tolist() == [0, 0]

    thread_ranks(run, 2)


# Who takes part


@pytest.mark.parametrize("affine", [True, False])
def test_an_input_that_needs_no_gradient_on_some_ranks(affine: bool) -> None:
    batch, weights = numbers(6, 3) + 1, numbers(6, 3, seed=1)

    def run(group: dist.ProcessGroup) -> Tensor | None:
        rank = group.rank()
        layer = SyncBatchNorm(3, process_group=group, affine=affine, dtype=torch.float64)
        mine = batch.split(2)[rank].clone().requires_grad_(rank == 1)
        layer(mine).backward(weights.split(2)[rank])
        return mine.grad

    joined = batch.clone().requires_grad_()
    nn.BatchNorm1d(3, dtype=torch.float64)(joined).backward(weights)
    assert joined.grad is not None
    found = thread_ranks(run, 3)
    assert found[0] is None
    assert found[2] is None
    close(found[1], joined.grad[2:4], 1e-12)


def test_no_input_needs_a_gradient() -> None:
    def run(group: dist.ProcessGroup) -> bool:
        rank = group.rank()
        layer = SyncBatchNorm(3, process_group=group)
        assert layer(numbers(2, 3, dtype=torch.float32)).requires_grad
        if rank == 0:  # parameters need no collective: nobody waits for the other rank
            layer(numbers(2, 3, dtype=torch.float32)).sum().backward()
        else:
            layer(numbers(2, 3, dtype=torch.float32))
        layer.requires_grad_(False)
        return layer(numbers(2, 3, dtype=torch.float32)).requires_grad

    assert thread_ranks(run, 2) == [False, False]


def test_a_rank_without_gradients_is_named_by_the_backward_that_would_wait_for_it() -> None:
    def run(group: dist.ProcessGroup) -> None:
        layer = SyncBatchNorm(3, process_group=group)
        batch = numbers(4, 3, dtype=torch.float32).requires_grad_()
        if group.rank() == 1:
            with torch.no_grad():
                layer(batch)
            return
        loss = layer(batch).sum()
        with pytest.raises(NormalizationError, match=r"rank 1 ran this forward .* without gradients"):
            loss.backward()

    thread_ranks(run, 3)


def test_training_statistics_without_gradients_are_those_of_all() -> None:
    batch = numbers(6, 3) + 1

    @torch.no_grad()
    def run(group: dist.ProcessGroup) -> Tensor:
        return SyncBatchNorm(3, process_group=group)(batch.split([2, 4])[group.rank()].float())

    close(torch.cat(thread_ranks(run, 2)), nn.BatchNorm1d(3)(batch.float()), 1e-6)


@pytest.mark.parametrize("track", [True, False])
def test_eval_communicates_nothing(track: bool) -> None:
    def run(group: dist.ProcessGroup) -> None:
        layer = SyncBatchNorm(3, process_group=group, track_running_stats=track).eval()
        if group.rank() == 0:  # alone: a collective would wait until the time-out, and raise
            batch = numbers(4, 3, dtype=torch.float32).requires_grad_()
            output = layer(batch)
            output.sum().backward()
            plain = nn.BatchNorm1d(3, track_running_stats=track).eval()
            assert torch.equal(output, plain(batch))

    thread_ranks(run, 2)


def test_without_a_process_group_it_is_batchnorm() -> None:
    batch = numbers(4, 3, dtype=torch.float32)
    assert torch.equal(SyncBatchNorm(3)(batch), nn.BatchNorm1d(3)(batch))


def test_layers_in_another_order_are_noticed() -> None:
    def run(group: dist.ProcessGroup) -> None:
        one, two = (SyncBatchNorm(3, process_group=group) for _ in range(2))
        output = one(numbers(4, 3, dtype=torch.float32).requires_grad_())
        with pytest.raises(NormalizationError, match=r"in its (forward|backward) here and rank"):
            output.sum().backward() if group.rank() else two(output)

    thread_ranks(run, 2)


def test_virtual_ranks_that_share_a_process_are_refused() -> None:
    def run(group: dist.ProcessGroup) -> None:
        virtual_ranks(group, attach=VirtualRanks(group.rank(), group.size(), virtual_size=4))
        with pytest.raises(NormalizationError, match="4 are played by 2 processes"):
            SyncBatchNorm(3, process_group=group)(torch.ones(4, 3))

    thread_ranks(run, 2)


@pytest.mark.parametrize("shape", [(4, 5), (4, 1, 3), (4,)])
def test_inputs_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    def run(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"expected (3 channels|at least 2D)"):
            SyncBatchNorm(3, process_group=group)(torch.ones(shape))

    thread_ranks(run, 2)


def test_a_second_derivative_is_refused() -> None:
    def run(group: dist.ProcessGroup) -> None:
        batch = numbers(4, 3, dtype=torch.float32).requires_grad_()
        output = SyncBatchNorm(3, process_group=group)(batch)
        (gradient,) = torch.autograd.grad(output.pow(2).sum(), batch, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.sum().backward()

    thread_ranks(run, 2)


# Beside the rest of torch


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )


def test_a_wrapped_model_takes_the_steps_of_one_process() -> None:
    batches = [numbers(8, 2, 3, 3, seed=i) for i in range(4)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, scale: float) -> None:
        optimizer.zero_grad()
        (model(batch).pow(2).sum() * scale).backward()
        optimizer.step()

    def run(group: dist.ProcessGroup) -> list[Tensor]:
        net = SyncBatchNorm.convert_sync_batchnorm(seeded(_net).double(), group)
        model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=1e-4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for batch in batches:
            step(model, optimizer, batch.split([1, 5, 2])[group.rank()], 3.0)
        assert model._get_ddp_logging_data()["has_sync_bn"]
        return [t.detach() for t in net.state_dict().values()]

    net = seeded(_net).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for batch in batches:
        step(net, optimizer, batch, 1.0)
    for state in thread_ranks(run, 3):
        for mine, expected in zip(state, net.state_dict().values(), strict=True):
            close(mine, expected, 1e-12)


def test_checkpointed_and_repeated_layers() -> None:
    batch = numbers(6, 3)

    def loss_of(layer: nn.Module, batch: Tensor) -> Tensor:
        once = torch.utils.checkpoint.checkpoint(layer, batch, use_reentrant=False)
        return layer(once * 2 + batch).pow(3).sum()

    def run(group: dist.ProcessGroup) -> Tensor:
        mine = batch.split([2, 4])[group.rank()].clone().requires_grad_()
        loss_of(SyncBatchNorm(3, process_group=group, dtype=torch.float64), mine).backward()
        assert mine.grad is not None
        return mine.grad

    joined = batch.clone().requires_grad_()
    loss_of(nn.BatchNorm1d(3, dtype=torch.float64), joined).backward()
    assert joined.grad is not None
    close(torch.cat(thread_ranks(run, 2)), joined.grad, 1e-12)


def test_autocast() -> None:
    batch = numbers(6, 2, 3, 3, dtype=torch.float32)

    def output_of(net: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = net[:2](batch)
        assert output.dtype == torch.bfloat16
        output.float().pow(2).sum().backward()
        assert net[1].weight.grad.dtype == torch.float32
        return output.detach().float()

    def run(group: dist.ProcessGroup) -> Tensor:
        net = SyncBatchNorm.convert_sync_batchnorm(seeded(_net), group)
        return output_of(net, batch.split(3)[group.rank()])

    close(torch.cat(thread_ranks(run, 2)), output_of(seeded(_net), batch), TOLERANCE[torch.bfloat16])


# Conversion and copies


def test_conversion_and_back_keep_everything_but_the_class() -> None:
    def run(group: dist.ProcessGroup) -> None:
        shared = nn.BatchNorm1d(4, affine=False, momentum=None)
        net = nn.Sequential(nn.BatchNorm3d(2), nn.ModuleDict({"a": shared, "b": shared}), nn.SyncBatchNorm(5))
        net[0].register_forward_hook(lambda module, args, output: output + 100)
        net[2].eval()
        before, state = list(net[0].parameters()), net.state_dict()
        assert SyncBatchNorm.convert_sync_batchnorm(net, group) is net
        assert all(type(m) is SyncBatchNorm for m in (net[0], net[1]["a"], net[2]))
        assert net[1]["a"] is net[1]["b"]
        assert net[0].process_group is group
        assert (net[1]["a"].momentum, net[1]["a"].affine, net[2].training) == (None, False, False)
        assert all(one is other for one, other in zip(net[0].parameters(), before, strict=True))
        assert net[0](torch.ones(2, 2, 3)).min() > 50
        again = SyncBatchNorm.convert_sync_batchnorm(net)
        assert again[0].process_group is None
        net.load_state_dict(state)

        assert SyncBatchNorm.revert(net) is net
        assert [type(net[0]), type(net[1]["a"])] == [nn.BatchNorm3d, nn.BatchNorm1d]
        assert net[1]["a"] is net[1]["b"]
        assert all(one is other for one, other in zip(net[0].parameters(), before, strict=True))
        assert not hasattr(net[0], "process_group")
        assert net[2](torch.ones(2, 5)).shape == (2, 5)  # it was made as a SyncBatchNorm
        net.load_state_dict(state)
        assert repr(net[0]) == repr(nn.BatchNorm3d(2))

    thread_ranks(run, 2)


def test_a_layer_alone_is_converted_to_a_new_one() -> None:
    plain = nn.BatchNorm2d(3)
    layer = SyncBatchNorm.convert_sync_batchnorm(plain)
    assert type(plain) is nn.BatchNorm2d
    assert type(layer) is SyncBatchNorm
    assert repr(layer) == repr(nn.SyncBatchNorm(3))
    assert type(SyncBatchNorm.revert(layer)) is nn.BatchNorm2d
    assert SyncBatchNorm.revert(plain) is plain


def test_a_lazy_layer_is_not_converted_before_its_first_batch() -> None:
    net = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(NormalizationError, match="LazyBatchNorm1d does not know its number of features"):
        SyncBatchNorm.convert_sync_batchnorm(net)
    net(torch.ones(2, 3))
    assert SyncBatchNorm.convert_sync_batchnorm(net)[0].num_features == 3


def test_copies() -> None:
    def run(group: dist.ProcessGroup) -> None:
        layer = SyncBatchNorm(3, process_group=group)
        twin = copy.deepcopy(layer)
        assert twin.process_group is group
        assert twin.weight is not layer.weight
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert loaded.process_group is None
        loaded.load_state_dict(nn.BatchNorm2d(3).state_dict())
        batch = numbers(4, 3, dtype=torch.float32)
        assert torch.equal(layer(batch), twin(batch))

    thread_ranks(run, 2)


def test_the_bias_alone_may_be_missing() -> None:
    layer = SyncBatchNorm(3, bias=False)
    assert layer.bias is None
    assert SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, bias=False)).weight is not None


def test_public_names() -> None:
    import samestep

    assert samestep.nn.SyncBatchNorm is SyncBatchNorm
    assert issubclass(NormalizationError, ValueError)
    assert not issubclass(NormalizationError, GradientError)
