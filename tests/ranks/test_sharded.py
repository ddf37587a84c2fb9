"""The sharded optimizer makes the bits of the plain one, in weights and in state."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch import nn, optim

from samestep import DistributedDataParallel, ShardedOptimizer, checkpoint
from samestep.errors import GradientError, OptimizerError
from samestep.testing import thread_ranks
from samestep.virtual import VirtualRanks, virtual_ranks

from .sharding import CAP_MB, Lion, Net, assert_same_bits, batch, plain, sharded, train
from .test_shm import shm_ranks
from .wrapping import seeded

CLASSES = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.01}),
    (optim.NAdam, {"lr": 0.01}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (Lion, {"lr": 0.01}),
]
IDS = [cls.__name__ for cls, _ in CLASSES]
EVERYWHERE = [(thread_ranks, 1), (thread_ranks, 2), (shm_ranks, 3), (shm_ranks, 4)]
PLACES = pytest.mark.parametrize(
    ("ranks", "size"), EVERYWHERE, ids=[f"{r.__name__.partition('_')[0]}-{n}" for r, n in EVERYWHERE]
)


def compare(ranks, size, cls, options, *, stage=1, **how):
    """Train with both on each rank; weights and states must be equal, and equal on all ranks."""

    def rank_main(group):
        expected = train(group, plain(cls, **options), **how)
        found = train(group, sharded(cls, stage=stage, **options), **how)
        assert_same_bits(found[0], expected[0], "weights")
        assert_same_bits(found[1], expected[1], "state_dict")
        return found[0]

    for weights in ranks(rank_main, size)[1:]:
        assert weights  # `rank_main` has compared them


@pytest.mark.parametrize("stage", [1, 2])
@PLACES
@pytest.mark.parametrize(("cls", "options"), CLASSES, ids=IDS)
def test_the_bits_are_those_of_the_plain_optimizer(ranks, size, cls, options, stage):
    compare(ranks, size, cls, options, stage=stage)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (optim.AdamW, {"lr": 0.01, "foreach": True}),
        (optim.AdamW, {"lr": 0.01, "fused": True}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (optim.Adagrad, {"lr": 0.1, "fused": True}),
        (optim.RMSprop, {"lr": 0.01, "foreach": True}),
        (optim.Adam, {"lr": torch.tensor(0.01)}),
        (optim.ASGD, {"lr": 0.01}),
        (optim.Rprop, {"lr": 0.01}),
        (optim.RAdam, {"lr": 0.01}),
        (optim.Adadelta, {}),
        (optim.Adamax, {"lr": 0.01}),
        (optim.Adafactor, {"lr": 0.01}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value),
)
def test_variants_of_implementation_and_all_other_classes(cls, options):
    # torch's fused SGD does not take a parameter whose momentum begins later than others'.
    compare(shm_ranks, 2, cls, options, use_in=() if cls is optim.SGD else (2,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cls", "options"), [CLASSES[0], CLASSES[2]], ids=["SGD", "AdamW"])
def test_other_dtypes_keep_their_bits(cls, options, dtype):
    compare(shm_ranks, 3, cls, options, dtype=dtype)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_that_a_step_leaves_out_does_not_move(stage):
    # Used in steps 1 and 4 only: momentum must not move it in between, and its step count lags behind.
    for cls, options in (CLASSES[0], CLASSES[2]):
        compare(shm_ranks, 2, cls, options, stage=stage, steps=range(6), use_in=(1, 4))


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_accumulate_under_no_sync(stage):
    compare(thread_ranks, 2, optim.AdamW, {"lr": 0.01}, stage=stage, micro_batches=3)


@pytest.mark.parametrize("size", [3, 4])
def test_slices_are_summed_along_the_tree_over_gloo_too(size):
    compare(thread_ranks, size, optim.AdamW, {"lr": 0.01}, stage=2, deterministic=True)


@pytest.mark.parametrize("ranks", [thread_ranks, shm_ranks])
def test_virtual_ranks_have_the_same_bits_whoever_plays_them(ranks):
    def rank_main(group, make):
        virtual = VirtualRanks(group.rank(), group.size(), virtual_size=4)
        virtual_ranks(group, attach=virtual)
        model = DistributedDataParallel(seeded(Net), process_group=group, bucket_cap_mb=CAP_MB)
        optimizer = make(model)
        for step in range(3):
            optimizer.zero_grad()
            for position in range(*virtual.block):
                with virtual.play(position, step):
                    model(batch(step, position), use=step == position == 1).square().mean().backward()
            optimizer.step()
        return dict(model.module.state_dict()), optimizer.state_dict()

    (expected,) = ranks(rank_main, 1, plain(optim.AdamW, lr=0.01))
    for size in (1, 2, 3, 4):
        for stage in (1, 2):
            for found in ranks(rank_main, size, sharded(optim.AdamW, lr=0.01, stage=stage)):
                assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_groups_with_their_own_options_and_a_scheduler(stage):
    def groups(model):
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.03}]

    def rank_main(group):
        results = []
        for make in (
            lambda model: optim.AdamW(groups(model), lr=0.01),
            lambda model: ShardedOptimizer(groups(model), optim.AdamW, stage=stage, lr=0.01),
        ):
            schedulers = []

            def scheduled(model, make=make, schedulers=schedulers):
                optimizer = make(model)
                schedulers.append(optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=8))
                return optimizer

            results.append(
                train(group, scheduled, each_step=lambda *_, s=schedulers: s[0].step(), steps=range(5))
            )
        assert_same_bits(results[0][0], results[1][0])
        assert_same_bits(results[0][1], results[1][1])

    shm_ranks(rank_main, 3)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_group_is_added_and_a_layer_thawed(stage):
    def run(group, make):
        extra = nn.Parameter(torch.ones(130))

        def thaw(step, model, optimizer):
            if step == 1:
                model.module.frozen.requires_grad_(True)
            if step == 2:
                optimizer.add_param_group({"params": [extra], "lr": 0.5})
            if step >= 2:
                extra.grad = torch.full_like(extra, step)

        return (*train(group, make, range(6), each_step=thaw)[:2], extra.detach().clone())

    def rank_main(group):
        expected = run(group, plain(optim.AdamW, lr=0.01))
        assert_same_bits(run(group, sharded(optim.AdamW, lr=0.01, stage=stage)), expected)

    shm_ranks(rank_main, 2)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_wrapper_plans_its_buckets_anew(stage):
    def replan(step, model, optimizer):
        if step == 1:
            names = [slot.name for slot in model._reducer.slots]
            plan = model.bucket_plan.regrouped([names[:5], names[5:]])
            model.use_bucket_plan(plan)

    compare(shm_ranks, 2, optim.AdamW, {"lr": 0.01}, stage=stage, each_step=replan)
    # This one is planned anew between the first backward and its step.
    how = {"skip_all_reduce_unused_params": True}
    compare(shm_ranks, 2, optim.AdamW, {"lr": 0.01}, stage=stage, **how)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by torch's Adagrad
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("cls", [optim.SGD, optim.Adagrad, optim.SparseAdam])
def test_sparse_embeddings_stay_whole(cls, stage):
    def build():
        tables = nn.ModuleList(nn.Embedding(30, 7, sparse=True) for _ in range(3))
        return tables if cls is optim.SparseAdam else nn.ModuleList([*tables, nn.Linear(7, 70)])

    def rank_main(group):
        results = []
        for make in (plain(cls, lr=0.1), sharded(cls, lr=0.1, stage=stage)):
            module = seeded(build)
            module.forward = lambda rows, m=module: sum(
                layer(rows) if isinstance(layer, nn.Embedding) else layer.weight.square().sum() for layer in m
            )
            model = DistributedDataParallel(module, process_group=group)
            optimizer = make(model)
            for step in range(3):
                optimizer.zero_grad()
                rows = torch.arange(4) * (step + 1) + group.rank()
                model(rows).square().sum().backward()
                optimizer.step()
            results.append((dict(module.state_dict()), optimizer.state_dict()))
        assert_same_bits(results[1], results[0])

    thread_ranks(rank_main, 2)


def test_muon_is_dealt_out_by_whole_matrices():
    def build():
        return nn.Sequential(*(nn.Linear(27, 27, bias=False) for _ in range(5)))

    compare(shm_ranks, 3, optim.Muon, {"lr": 0.01}, build=build)
    with pytest.raises(ValueError, match="only supports 2D"):
        thread_ranks(partial(train, make=sharded(optim.Muon)), 2)


def test_an_optimizer_that_was_made_before_the_wrapper():
    def rank_main(group):
        results = []
        for make in (
            optim.AdamW,
            partial(ShardedOptimizer, optimizer_class=optim.AdamW, process_group=group),
        ):
            net = seeded(Net)
            optimizer = make(net.named_parameters(), lr=0.01)
            model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=CAP_MB)
            for step in range(3):
                optimizer.zero_grad()
                model(batch(step, group.rank())).square().mean().backward()
                optimizer.step()
            results.append((dict(net.state_dict()), optimizer.state_dict()))
        assert_same_bits(results[1], results[0])
        assert "head.weight" in results[1][1]["param_groups"][0]["param_names"]

    shm_ranks(rank_main, 2)


def test_checkpoints_hold_it(tmp_path):
    def rank_main(group, steps, *, load):
        def begin(model):
            optimizer = ShardedOptimizer(model, optim.AdamW, lr=0.01)
            if load:
                checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer}, **alone)
            return optimizer

        alone = {"process_group": group, "random_states": False}
        weights, state, model, optimizer = train(group, begin, steps, use_in=(1,))
        if not load:
            checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=steps.stop, **alone)
        return weights, state

    shm_ranks(partial(rank_main, load=False), 3, range(3))
    both = shm_ranks(partial(rank_main, load=True), 2, range(3, 5))
    saved = shm_ranks(partial(rank_main, load=True), 2, range(3, 3))
    assert_same_bits(both[0], both[1])
    assert saved[0][1]["state"][1]["step"] == 3.0


def test_closures_and_hooks_run_once():
    def rank_main(group):
        results = []
        for make in (plain(optim.SGD, lr=0.1), sharded(optim.SGD, lr=0.1)):
            calls = []
            model = DistributedDataParallel(seeded(Net), process_group=group)
            optimizer = make(model)
            optimizer.register_step_pre_hook(lambda *_, c=calls: c.append("before"))
            optimizer.register_step_post_hook(lambda *_, c=calls: c.append("after"))

            def closure(model=model, optimizer=optimizer, calls=calls):
                calls.append("closure")
                optimizer.zero_grad()
                loss = model(batch(0, group.rank())).square().mean()
                loss.backward()
                return loss

            losses = [optimizer.step(closure).item() for _ in range(2)]
            results.append((calls, losses, dict(model.module.state_dict())))
        assert_same_bits(results[0], results[1])
        assert results[1][0] == ["before", "closure", "after"] * 2

    thread_ranks(rank_main, 2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_grad_scaler_skips_the_step_on_all_ranks(stage, fused):
    def rank_main(group):
        results = []
        options = {"lr": 0.01, "fused": fused}
        for make in (plain(optim.AdamW, **options), sharded(optim.AdamW, stage=stage, **options)):
            model = DistributedDataParallel(seeded(Net), process_group=group, bucket_cap_mb=CAP_MB)
            optimizer = make(model)
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
            scales = []
            for step in range(5):
                optimizer.zero_grad()
                loss = model(batch(step, group.rank())).square().mean()
                scaler.scale(loss).backward()
                if step == 2:  # an infinity in one element, which at stage 2 only its owner sees
                    model._reducer.slots[-1].view.view(-1)[3] = torch.inf
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            results.append((scales, dict(model.module.state_dict()), optimizer.state_dict()))
        assert results[0][0] == [256.0, 512.0, 256.0, 256.0, 512.0]  # the third step was skipped
        assert_same_bits(results[0], results[1])

    thread_ranks(rank_main, 2)


def test_unscaled_and_clipped_in_slices():
    def rank_main(group):
        found = []
        for stage in (1, 2):
            model = DistributedDataParallel(seeded(Net), process_group=group, bucket_cap_mb=CAP_MB)
            optimizer = ShardedOptimizer(model, optim.SGD, stage=stage, lr=1.0)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(model(batch(0, group.rank())).square().mean()).backward()
            scaler.unscale_(optimizer)
            found.append(optimizer.clip_grad_norm_(0.1))
            scaler.step(optimizer)
            found += [p.detach().clone() for p in model.parameters()]
        for one, other in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
            torch.testing.assert_close(one, other)

    shm_ranks(rank_main, 2)


def test_a_wrapper_goes_though_its_optimizer_stays():
    def rank_main(group):
        net = seeded(Net)
        model = DistributedDataParallel(net, process_group=group)
        optimizer = ShardedOptimizer(model, optim.AdamW, lr=0.01)
        model(batch(0, group.rank())).sum().backward()
        optimizer.step()
        reducer = weakref.ref(model._reducer)
        del model
        assert reducer() is None
        optimizer.zero_grad()
        net(batch(0, 0)).square().mean().backward()  # the script's own affair now
        optimizer.step()
        return dict(net.state_dict())

    found = thread_ranks(rank_main, 2)
    assert_same_bits(found[0], found[1])


def test_sliced_gradients_say_so_and_can_be_gathered():
    def rank_main(group):
        model = DistributedDataParallel(seeded(Net), process_group=group, bucket_cap_mb=CAP_MB)
        reference = DistributedDataParallel(seeded(Net), process_group=group, bucket_cap_mb=CAP_MB)
        optimizer = ShardedOptimizer(model, optim.SGD, lr=0.1, stage=2)
        for module in (model, reference):
            module(batch(0, group.rank())).square().mean().backward()
        with pytest.raises(GradientError, match="only its slice"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(GradientError, match="norm of the gradient of"):
            model.module.head.weight.grad.norm()
        with pytest.raises(GradientError, match="call zero_grad"):
            model(batch(1, group.rank())).square().mean().backward()
        optimizer.zero_grad()
        model(batch(0, group.rank())).square().mean().backward()
        assert "elements" in repr(model.module.head.weight.grad)
        optimizer.gather_gradients()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert_same_bits(one.grad, other.grad)
        optimizer.zero_grad(set_to_none=False)
        model(batch(1, group.rank())).square().mean().backward()
        optimizer.zero_grad(set_to_none=False)
        assert not model.module.head.weight.grad.any()
        model(batch(2, group.rank())).square().mean().backward()
        norm = optimizer.clip_grad_norm_(0.01)
        reference.zero_grad()
        reference(batch(2, group.rank())).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        torch.testing.assert_close(norm, expected)
        optimizer.gather_gradients()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)

    shm_ranks(rank_main, 3)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("cls", "options"), [CLASSES[0], CLASSES[2], (optim.Adafactor, {})])
def test_state_goes_to_the_plain_optimizer_and_to_another_number_of_ranks(cls, options, stage):
    saved = shm_ranks(partial(_save, cls, options, stage), 3)
    for state in saved[1:]:
        assert_same_bits(state, saved[0])

    def go_on(group, make):
        return train(group, make, range(3, 6), start=saved[0], use_in=(1, 4))[:2]

    expected = shm_ranks(lambda group: go_on(group, plain(cls, **options)), 2)
    found = shm_ranks(lambda group: go_on(group, sharded(cls, stage=stage, **options)), 2)
    assert_same_bits(found, expected)


def _save(cls, options, stage, group):
    weights, state, *_ = train(group, sharded(cls, stage=stage, **options), range(3), use_in=(1,))
    return {"model": weights, "optimizer": state}


def test_slices_are_recut_for_any_number_of_ranks():
    def save(group):
        weights, state, _, optimizer = train(group, sharded(optim.AdamW, lr=0.01), range(3), use_in=(1,))
        slices = optimizer.sharded_state()
        return {"model": weights, "optimizer": state}, slices, optimizer.state_bytes

    saved = shm_ranks(save, 4)
    whole = saved[0][0]["optimizer"]["state"]

    class Reader:
        """What a checkpoint of all ranks' slices would offer."""

        param_groups = saved[0][1].param_groups

        def tensors(self, parameter):
            from samestep.optim.state import TensorSpec

            return {
                s.key: TensorSpec(s.shape, s.stride, s.tensor.dtype)
                for _, state, _ in saved
                for s in state.slices
                if s.parameter == parameter
            }

        def values(self, parameter):
            return next((s.values[parameter] for _, s, _ in saved if parameter in s.values), {})

        def read(self, parameter, key, start, stop):
            flat = torch.full((stop,), torch.nan)
            for _, state, _ in saved:
                for s in state.slices:
                    if (s.parameter, s.key) == (parameter, key):
                        part = s.tensor[: max(0, stop - s.offset)]
                        flat[s.offset : s.offset + part.numel()] = part
            return flat[start:stop]

    def load(group):
        model = DistributedDataParallel(seeded(Net), process_group=group, bucket_cap_mb=CAP_MB)
        optimizer = ShardedOptimizer(model, optim.AdamW, lr=0.5)
        optimizer.load_sharded_state(Reader())
        assert optimizer.param_groups[0]["lr"] == 0.01
        return optimizer.state_dict()["state"]

    for size in (1, 2, 3):
        for state in shm_ranks(load, size):
            assert_same_bits(state, whole)


def test_each_rank_keeps_its_share_of_the_state():
    def bytes_of(make, group):
        model = DistributedDataParallel(
            seeded(lambda: nn.Sequential(nn.Linear(257, 511), nn.Linear(511, 129))), process_group=group
        )
        optimizer = make(model)
        model(torch.ones(2, 257)).sum().backward()
        optimizer.step()
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer.state_bytes
        tensors = [t for state in optimizer.state.values() for t in state.values()]
        return sum(t.nbytes for t in tensors)

    (whole,) = thread_ranks(partial(bytes_of, plain(optim.AdamW)), 1)
    for size in (2, 3, 4):
        parts = shm_ranks(partial(bytes_of, sharded(optim.AdamW)), size)
        assert max(parts) <= 1.01 * whole / size
        assert sum(parts) <= 1.01 * whole


def test_drop_in_for_torchs_class():
    def rank_main(group):
        model = DistributedDataParallel(seeded(Net), process_group=group)
        optimizer = ShardedOptimizer(
            model.parameters(),
            optimizer_class=optim.Adam,
            process_group=group,
            parameters_as_bucket_view=True,
            lr=0.01,
        )
        model(batch(0, group.rank())).sum().backward()
        optimizer.step()
        optimizer.consolidate_state_dict(to=0)
        if group.rank() != 0:
            with pytest.raises(OptimizerError, match="consolidated on rank 0"):
                optimizer.state_dict()
            return None
        state = optimizer.state_dict()
        optim.Adam(seeded(Net).parameters()).load_state_dict(state)
        return sorted(state["state"])

    found = thread_ranks(rank_main, 2)
    assert found[0]
    assert found[1] is None


def test_without_a_wrapper_gradients_are_the_scripts_affair():
    def rank_main(group):
        model = seeded(Net)
        optimizer = ShardedOptimizer(model.parameters(), optim.AdamW, process_group=group, lr=0.01)
        other = seeded(Net)
        expected = optim.AdamW(other.parameters(), lr=0.01)
        for step in range(3):
            for module, chosen in ((model, optimizer), (other, expected)):
                chosen.zero_grad()
                module(batch(step, 0)).square().mean().backward()
                chosen.step()
        assert_same_bits(dict(model.state_dict()), dict(other.state_dict()))
        assert_same_bits(optimizer.state_dict(), expected.state_dict())

    shm_ranks(rank_main, 3)


def test_parameters_whose_memory_was_replaced_are_found_again():
    def move(step, model, optimizer):
        if step == 1:
            model.module.head.weight.data = model.module.head.weight.detach().clone() * 2
        with torch.no_grad():
            model.module.first.bias.add_(0.1)

    compare(shm_ranks, 2, optim.SGD, {"lr": 0.1, "momentum": 0.9}, each_step=move)


def test_two_optimizers_share_a_model():
    def rank_main(group):
        results = []
        for is_sharded in (False, True):
            model = DistributedDataParallel(seeded(Net), process_group=group, bucket_cap_mb=CAP_MB)
            head = list(model.module.head.parameters())
            body = [p for n, p in model.module.named_parameters() if not n.startswith("head")]
            if is_sharded:
                both = [
                    ShardedOptimizer(body, optim.AdamW, stage=2, lr=0.01),
                    ShardedOptimizer(head, optim.SGD, stage=2, lr=0.1),
                ]
            else:
                both = [optim.AdamW(body, lr=0.01), optim.SGD(head, lr=0.1)]
            for step in range(3):
                model.zero_grad()
                model(batch(step, group.rank())).square().mean().backward()
                for optimizer in both:
                    optimizer.step()
            results.append(dict(model.module.state_dict()))
        assert_same_bits(results[0], results[1])

    shm_ranks(rank_main, 2)


def test_long_parameters_are_updated_in_pieces(monkeypatch):
    monkeypatch.setattr("samestep.optim.sharded.CACHED", 128)
    for cls, options in (CLASSES[0], CLASSES[2], CLASSES[-1]):
        compare(shm_ranks, 2, cls, options, stage=2, use_in=(1,))


def test_many_small_parameters_are_updated_as_few_tensors():
    def rank_main(group):
        model = DistributedDataParallel(
            seeded(lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(40)))), process_group=group
        )
        optimizer = ShardedOptimizer(model, optim.AdamW)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return len(optimizer._shards.inner.param_groups[0]["params"])

    assert thread_ranks(rank_main, 2) == [1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m, g: ShardedOptimizer(m, optim.LBFGS), "products over all parameters"),
        (lambda m, g: ShardedOptimizer(m, optim.AdamW, stage=3), "stage=3"),
        (lambda m, g: ShardedOptimizer(m, optim.Adafactor, elementwise=True), "whole parameters"),
        (lambda m, g: ShardedOptimizer(m, optim.SGD, differentiable=True), "in a graph"),
        (
            lambda m, g: ShardedOptimizer(seeded(Net), optim.SGD, process_group=g, stage=2),
            "wrap the model in it first",
        ),
        (
            lambda m, g: ShardedOptimizer(m, optim.SGD, lr=0.1, stage=1 + g.rank()),
            "the stage is 1 on rank 0 and 2 on rank 1",
        ),
    ],
    ids=["LBFGS", "stage", "elementwise", "differentiable", "no wrapper", "ranks differ"],
)
def test_what_makes_no_sense_is_refused(make, message):
    def rank_main(group):
        model = DistributedDataParallel(seeded(Net), process_group=group)
        with pytest.raises(OptimizerError, match=message):
            make(model, group)

    thread_ranks(rank_main, 2)
