"""The right values: dtypes, layouts, sparse, complex, empty; averages, sums and weights; hooks; buffers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)

from samestep import DistributedDataParallel
from samestep.errors import GradientError, ReplicaMismatchError
from samestep.testing import process_ranks, thread_ranks

from .wrapping import assert_same, average, gradients, numbers, on_ranks, seeded

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-12}


class Mixed(nn.Module):
    """Several dtypes, an empty and a zero-dimensional parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.of_half = nn.Parameter(torch.randn(5, dtype=torch.float16))
        self.of_brain = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.of_single = nn.Parameter(torch.randn(5))
        self.of_double = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.of_wave = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.of_empty = nn.Parameter(torch.zeros(0, 3))
        self.of_scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        real = sum(
            (p.to(torch.float64) * x).sum()
            for p in (self.of_half, self.of_brain, self.of_single, self.of_double)
        )
        return (real + (self.of_wave.abs() * x).sum() + self.of_empty.sum()) * self.of_scalar


@pytest.mark.parametrize("world_size", [2, 3])
def test_mixed_dtypes_complex_empty_and_scalar(world_size: int) -> None:
    def alone(rank: int) -> dict[str, Tensor | None]:
        model = seeded(Mixed)
        model(numbers(5, seed=rank)).backward()
        return gradients(model)

    expected = average([alone(rank) for rank in range(world_size)])

    def train(model: DistributedDataParallel, rank: int, _size: int) -> dict[str, Tensor | None]:
        for _ in range(2):
            model.zero_grad()
            model(numbers(5, seed=rank)).backward()
        return gradients(model)

    for found in on_ranks(Mixed, train, world_size):
        for name, gradient in found.items():
            assert gradient is not None
            tolerance = TOLERANCE.get(gradient.dtype, 1e-5)
            torch.testing.assert_close(gradient, expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_a_narrow_dtype_with_an_unused_parameter(dtype: torch.dtype) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=dtype))
            self.spare = nn.Parameter(torch.ones(3, dtype=dtype))

    class Net(Narrow):
        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    def train(model: DistributedDataParallel, rank: int, _size: int) -> tuple[list[float], Tensor | None]:
        model(torch.full((3,), float(rank), dtype=dtype)).backward()
        return model.module.weight.grad.tolist(), model.module.spare.grad

    assert on_ranks(Net, train) == [([0.5] * 3, None)] * 2


def test_channels_last_and_other_strides_are_kept() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(torch.randn(4, 6, dtype=torch.float64).t())

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).sum() + (self.turned * x.mean()).sum()

    def alone(rank: int) -> dict[str, Tensor | None]:
        model = seeded(Strided)
        model(numbers(2, 3, 5, 5, seed=rank)).backward()
        return gradients(model)

    def train(model: DistributedDataParallel, rank: int, _size: int) -> dict[str, Tensor | None]:
        model(numbers(2, 3, 5, 5, seed=rank)).backward()
        for parameter in model.parameters():
            assert parameter.grad.stride() == parameter.stride()
        return gradients(model)

    for found in on_ranks(Strided, train):
        assert_same(found, average([alone(0), alone(1)]), 1e-12)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sparse_gradients(world_size: int) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 3, sparse=True).double()
            self.unused = nn.Embedding(4, 3, sparse=True).double()
            self.head = nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x)) if x.numel() else self.head(x.double().new_ones(1, 3))

    words = [torch.tensor([1, 2, 2]), torch.tensor([2, 9]), torch.tensor([], dtype=torch.int64)]

    def alone(rank: int) -> dict[str, Tensor | None]:
        model = seeded(Words)
        model(words[rank]).sum().backward()
        return gradients(model)

    expected = average([alone(rank) for rank in range(world_size)])

    def train(model: DistributedDataParallel, rank: int, _size: int) -> dict[str, Tensor | None]:
        for _ in range(2):
            model.zero_grad()
            model(words[rank]).sum().backward()
        return gradients(model)

    for found in on_ranks(Words, train, world_size):
        assert found["table.weight"] is not None
        assert found["table.weight"].is_sparse
        assert found["unused.weight"] is None
        dense = {n: g.to_dense() if g is not None and g.is_sparse else g for n, g in found.items()}
        wanted = {n: g.to_dense() if g is not None and g.is_sparse else g for n, g in expected.items()}
        assert_same(dense, wanted, 1e-12)


def test_autocast_and_grad_scaler() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))

    def train(model: DistributedDataParallel, _rank: int, _size: int) -> list[Tensor]:
        step(model, numbers(6, 4, dtype=torch.float32))  # the same batch on all ranks
        return [p.detach().clone() for p in model.parameters()]

    one = seeded(build)
    step(one, numbers(6, 4, dtype=torch.float32))
    for weights in on_ranks(build, train):
        for mine, expected in zip(weights, one.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_replaced_gradients_find_back_into_the_bucket() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> dict[str, Tensor | None]:
        with model.no_sync():
            model(numbers(3, 4, seed=rank)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 1.0  # what some clipping code does
        model(numbers(3, 4, seed=rank)).sum().backward()
        return gradients(model)

    def alone(rank: int) -> dict[str, Tensor | None]:
        model = seeded(lambda: nn.Linear(4, 2).double())
        model(numbers(3, 4, seed=rank)).sum().backward()
        return {n: None if g is None else 2 * g for n, g in gradients(model).items()}

    for found in on_ranks(lambda: nn.Linear(4, 2).double(), train):
        assert_same(found, average([alone(0), alone(1)]), 1e-12)


# Averages


def token_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean(dim=1).sum()


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("as_mean", [True, False])
def test_weighted_equals_one_process_whatever_the_split(world_size: int, as_mean: bool) -> None:
    x = numbers(23, 4)
    one = seeded(linear)
    (token_loss(one, x) / len(x)).backward()
    expected = gradients(one)
    # Uneven micro-batches: rank r has r + 2 of them, of 0 to 4 rows.
    cuts, start = [], 0
    for i in range(sum(rank + 2 for rank in range(world_size))):
        cuts.append(x[start : start + i % 5])
        start += i % 5
    cuts[-1] = x[start - (len(cuts) - 1) % 5 :]
    batches = [[] for _ in range(world_size)]
    for i, cut in enumerate(cuts):
        batches[i % world_size].append(cut)

    def train(model: DistributedDataParallel, rank: int, _size: int) -> dict[str, Tensor | None]:
        for _ in range(2):
            model.zero_grad()
            for i, batch in enumerate(batches[rank]):
                model.require_backward_grad_sync = i == len(batches[rank]) - 1
                if as_mean and len(batch):
                    loss = model.weigh(token_loss(model, batch) / len(batch), len(batch))
                else:
                    model.count_items(len(batch))
                    loss = token_loss(model, batch)
                loss.backward()
        return gradients(model)

    for found in on_ranks(linear, train, world_size, reduction="weighted", bucket_cap_mb=1e-5):
        assert_same(found, expected, 1e-9)


def test_sum() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> dict[str, Tensor | None]:
        for _ in range(2):
            model.zero_grad(set_to_none=False)
            token_loss(model, numbers(3, 4, seed=rank)).backward()
        return gradients(model)

    one = seeded(linear)
    for rank in range(2):
        token_loss(one, numbers(3, 4, seed=rank)).backward()
    for found in on_ranks(linear, train, reduction="sum"):
        assert_same(found, gradients(one), 1e-12)


def test_a_sum_over_gradients_that_are_synchronised_already_is_refused() -> None:
    def train(model: DistributedDataParallel, _rank: int, _size: int) -> None:
        token_loss(model, numbers(3, 4)).backward()
        with pytest.raises(GradientError, match="zero_grad"):
            token_loss(model, numbers(3, 4)).backward()

    on_ranks(linear, train, reduction="sum")


def test_weights_that_do_not_fit() -> None:
    def train(model: DistributedDataParallel, _rank: int, _size: int) -> None:
        with pytest.raises(GradientError, match="no rank counted any items"):
            token_loss(model, numbers(3, 4)).backward()
        with pytest.raises(GradientError, match="-1 items"):
            model.count_items(-1)

    on_ranks(linear, train, reduction="weighted")

    def plain(model: DistributedDataParallel, _rank: int, _size: int) -> None:
        with pytest.raises(GradientError, match='reduction="weighted"'):
            model.count_items(3)

    on_ranks(linear, plain)


# Communication hooks: torch's own, over a registered group


def _hooks() -> dict[str, Any]:
    group = dist.group.WORLD
    power = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2)
    local = PostLocalSGDState(group, dist.new_group([dist.get_rank()]), start_localSGD_iter=100)
    return {
        "allreduce": (group, default_hooks.allreduce_hook),
        "fp16": (group, default_hooks.fp16_compress_hook),
        "bf16": (group, default_hooks.bf16_compress_hook),
        "fp16 around allreduce": (group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        "bf16 around allreduce": (group, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        "powerSGD": (power, powerSGD_hook.powerSGD_hook),
        "post local SGD": (local, post_localSGD_hook),
        "partial": (None, partial(_scaled_hook, 1.0)),
        "lambda": (None, lambda _state, bucket: _scaled_hook(1.0, None, bucket)),
    }


def _scaled_hook(scale: float, _state: Any, bucket: Any) -> Any:
    tensor = bucket.buffer().div_(dist.get_world_size()).mul_(scale)
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])


class WithSpare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _train_with_each_hook() -> dict[str, tuple[list[Tensor], bool]]:
    """By hook: the weights after four steps, and whether a parameter nobody used has no gradient."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.cat([numbers(4, 8, seed=r, dtype=torch.float32) for r in range(size)])
    found = {"none": (_train_steps(seeded(WithSpare), x), True)}
    for name, (state, hook) in _hooks().items():
        model = DistributedDataParallel(seeded(WithSpare), bucket_cap_mb=3e-4)
        model.register_comm_hook(state, hook)
        weights = _train_steps(model, x[4 * rank : 4 * rank + 4])
        found[name] = weights, model.module.spare.weight.grad is None
    return found


def _train_steps(model: nn.Module, x: Tensor, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore")  # torch's own, of its deprecated functions
def test_torchs_hooks_run_unchanged() -> None:
    one, two = process_ranks(_train_with_each_hook, 2)
    plain, _ = one.pop("none")
    assert len(one) == 9
    for name, (weights, spare_is_none) in one.items():
        assert spare_is_none, name
        assert all(torch.equal(a, b) for a, b in zip(weights, two[name][0], strict=True)), name
        exact = name in ("allreduce", "post local SGD", "partial", "lambda")
        tolerance = 1e-5 if exact else 6e-2
        for mine, expected in zip(weights, plain, strict=True):
            torch.testing.assert_close(
                mine, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def _quantized(ours: bool) -> bool:
    wrap = DistributedDataParallel if ours else nn.parallel.DistributedDataParallel
    model = wrap(nn.Linear(4, 4))
    model.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)
    try:
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return "invalid index of a 0-dim tensor" in str(error)
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ours", [True, False])
def test_torchs_quantization_hooks_fail_over_gloo_with_either_class(ours: bool) -> None:
    """They read NCCL's layout of an all-gather's result. If torch mends that, move them up to the others."""
    assert process_ranks(_quantized, 2, ours) == [True, True]


def test_hooks_that_cannot_be() -> None:
    def train(model: DistributedDataParallel, _rank: int, _size: int) -> None:
        with pytest.raises(TypeError, match="must be callable"):
            model.register_comm_hook(None, 3)
        with pytest.raises(GradientError, match="does not take"):
            model.register_comm_hook(None, lambda bucket: bucket)

        def wrong(state: object, bucket: int) -> Any: ...

        with pytest.raises(ValueError, match="bucket annotation"):
            model.register_comm_hook(None, wrong)
        model.register_comm_hook(None, lambda state, bucket: 7)
        with pytest.raises(GradientError, match="only be called once"):
            model.register_comm_hook(None, lambda state, bucket: None)
        with pytest.raises(GradientError, match="must return a"):
            model(numbers(3, 4)).sum().backward()

    on_ranks(linear, train)


# Buffers


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def test_buffers_are_rank_0s_in_training_and_left_alone_in_eval() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> tuple[Tensor, ...]:
        mean = model.module.norm.running_mean
        x = numbers(8, 4, seed=rank, dtype=torch.float32)
        start = mean.clone()
        model(x).sum().backward()
        after_one = mean.clone()
        if rank == 0:  # alone: no collective in eval, nor without gradients
            model.eval()
            model(x)
            model.train()
            with torch.no_grad():
                model(x)
        model(x)  # begins with a broadcast of rank 0's
        return start, after_one, mean.clone()

    (start0, one0, two0), (start1, one1, two1) = on_ranks(Normed, train)
    assert torch.equal(start0, start1)
    assert not torch.equal(one0, one1)  # each saw its own batch

    def by_hand(begin: Tensor, rank: int, times: int) -> Tensor:
        y = seeded(Normed).first(numbers(8, 4, seed=rank, dtype=torch.float32)).mean(0)
        for _ in range(times):
            begin = 0.9 * begin + 0.1 * y
        return begin

    rank0_after = by_hand(one0, 0, 1)  # its forward under no_grad was in training mode
    torch.testing.assert_close(two0, by_hand(rank0_after, 0, 1))
    torch.testing.assert_close(two1, by_hand(rank0_after, 1, 1))


def test_two_forwards_with_batchnorm_before_one_backward() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> None:
        for _ in range(3):
            x = numbers(8, 4, seed=rank, dtype=torch.float32)
            (model(x) + model(x + 1)).sum().backward()

    on_ranks(Normed, train)


@pytest.mark.parametrize("knob", ["none at all", "not in forward", "on demand"])
def test_each_buffer_knob(knob: str) -> None:
    def run(group: dist.ProcessGroup) -> tuple[float, float]:
        net = seeded(Normed)
        net.norm.running_mean.fill_(float(group.rank()))
        options = {"broadcast_buffers": False} if knob == "none at all" else {"forward_sync_buffers": False}
        model = DistributedDataParallel(net, process_group=group, **options)
        start = net.norm.running_mean[0].item()
        model(numbers(8, 4, dtype=torch.float32)).sum().backward()
        net.norm.running_mean.fill_(10.0 + group.rank())
        if knob == "on demand":
            model.sync_buffers()
        else:
            model.eval()
            model(numbers(8, 4, dtype=torch.float32))
        return start, net.norm.running_mean[0].item()

    with pytest.MonkeyPatch.context():
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            found = thread_ranks(run, 2)
    starts = {"none at all": [0.0, 1.0], "not in forward": [0.0, 0.0], "on demand": [0.0, 0.0]}[knob]
    ends = {"none at all": [10.0, 11.0], "not in forward": [10.0, 11.0], "on demand": [10.0, 10.0]}[knob]
    assert [f[0] for f in found] == starts
    assert [f[1] for f in found] == ends


# At the start


def test_rank_0s_values_go_to_all() -> None:
    def run(group: dist.ProcessGroup) -> list[Tensor]:
        net = seeded(Normed, group.rank())
        return [p.detach().clone() for p in DistributedDataParallel(net, process_group=group).parameters()]

    expected = list(seeded(Normed).parameters())
    for weights in thread_ranks(run, 3):
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_different_models_show_their_difference_on_every_rank() -> None:
    def run(group: dist.ProcessGroup) -> str:
        net = nn.Sequential(nn.Linear(4, 6 + group.rank()), nn.ReLU())
        if group.rank() == 1:
            net.add_module("extra", nn.Linear(2, 2))
        with pytest.raises(ReplicaMismatchError) as caught:
            DistributedDataParallel(net, process_group=group)
        return str(caught.value)

    texts = thread_ranks(run, 2)
    assert texts[0] == texts[1]
    assert "rank 0 has 2, rank 1 has 4 parameters" in texts[0]
    assert "0.weight: rank 0: float32 [6, 4]" in texts[0]
    assert "rank 1: float32 [7, 4]" in texts[0]
    assert "extra.bias: rank 0: absent" in texts[0]


def test_models_that_cannot_be_wrapped() -> None:
    def run(group: dist.ProcessGroup) -> None:
        frozen = nn.Linear(2, 2).requires_grad_(False)
        with pytest.raises(GradientError, match="Linear has no parameter to train"):
            DistributedDataParallel(frozen, process_group=group)
        with pytest.raises(GradientError, match=r"0\.weight is not initialised yet"):
            DistributedDataParallel(nn.Sequential(nn.LazyLinear(2)), process_group=group)
        with pytest.raises(GradientError, match="reduction='median'"):
            DistributedDataParallel(nn.Linear(2, 2), process_group=group, reduction="median")
        with pytest.raises(GradientError, match="drop them"):
            DistributedDataParallel(nn.Linear(2, 2), device_ids=[0], process_group=group)
        with pytest.raises(GradientError, match="must be positive"):
            DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=0, process_group=group)
        both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        with pytest.raises(GradientError, match="same type of devices"):
            DistributedDataParallel(both, process_group=group)

    thread_ranks(run, 1)


def test_copies() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> tuple[Any, Any]:
        twin = copy.deepcopy(model)
        assert twin.process_group is model.process_group
        model(numbers(3, 4, seed=rank)).sum().backward()
        assert all(p.grad is None for p in twin.parameters())
        twin(numbers(3, 4, seed=rank)).sum().backward()
        return gradients(model), gradients(twin)

    for one, two in on_ranks(linear, train):
        assert_same(one, two, 0.0)


def _pickled_and_trained() -> list[Tensor]:
    import io

    model = DistributedDataParallel(seeded(linear))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    again(numbers(3, 4, seed=dist.get_rank())).sum().backward()
    return [p.grad for p in again.parameters()]


def test_a_pickled_wrapper_comes_back_over_the_default_group() -> None:
    one, two = process_ranks(_pickled_and_trained, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(a.abs().sum() > 0 for a in one)
