from __future__ import annotations

import base64
import copy
import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from samestep import checkpoint
from samestep.checkpoint.layout import CheckpointName, Manifest
from samestep.data import DistributedSampler
from samestep.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, SamestepError


class Net(nn.Module):
    """Tied weights, buffers, mixed dtypes: what checkpoints get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x))) * self.scale.sum().float()


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "SGD-plain": lambda p: torch.optim.SGD(p, 0.01),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=False),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.1, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "LBFGS": lambda p: torch.optim.LBFGS(p, history_size=2, max_iter=2),
    "Adafactor": torch.optim.Adafactor,
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.arange(7)).square().mean()
        loss.backward()
        return loss.item()

    optimizer.step(closure)


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        bits, other_bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
        assert torch.equal(bits, other_bits)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other or (one != one and other != other)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, name: str) -> None:
    def fresh() -> tuple[Net, torch.optim.Optimizer]:
        model = Net()
        parameters = [p for p in model.parameters() if p.dtype == torch.float32 or name != "LBFGS"]
        return model, OPTIMIZERS[name](parameters)

    torch.manual_seed(0)
    model, optimizer = fresh()
    for _ in range(2):
        step(model, optimizer)
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=2)
    other, other_optimizer = fresh()
    loaded = checkpoint.load(tmp_path, {"model": other, "optimizer": other_optimizer})
    assert (loaded.step, loaded.world_size, loaded.skipped, loaded.notes) == (2, 1, (), ())
    assert_equal(other_optimizer.state_dict(), optimizer.state_dict())
    for _ in range(2):
        step(model, optimizer)
        step(other, other_optimizer)
    assert_equal(other.state_dict(), model.state_dict())
    assert_equal(other_optimizer.state_dict(), optimizer.state_dict())


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "Cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "Plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "Lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "Sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_come_back(tmp_path: Path, name: str) -> None:
    def fresh() -> tuple[Any, torch.optim.Optimizer]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)
        return SCHEDULERS[name](optimizer), optimizer

    scheduler, optimizer = fresh()
    optimizer.step()
    scheduler.step(*([1.0] if name == "Plateau" else []))
    checkpoint.save(tmp_path, {"scheduler": scheduler}, step=1)
    other, _ = fresh()
    checkpoint.load(tmp_path, {"scheduler": other})
    assert_equal(other.state_dict(), scheduler.state_dict())


def test_the_sampler_goes_on_where_it_was(tmp_path: Path) -> None:
    sampler = DistributedSampler(range(20), 2, 0)
    iterator = iter(sampler)
    taken = [next(iterator) for _ in range(4)]
    sampler.consumed(3)
    checkpoint.save(tmp_path, {"sampler": sampler}, step=3)
    resumed = DistributedSampler(range(20), 2, 0)
    checkpoint.load(tmp_path, {"sampler": resumed})
    assert list(resumed) == [taken[3], *iterator]


def test_plain_values_are_returned(tmp_path: Path) -> None:
    weight = torch.randn(2)
    state = {
        "epoch": 3,
        "best": float("inf"),
        "history": [(1, {"loss": 0.5})],
        "weight": weight,
        "none": None,
    }
    checkpoint.save(tmp_path, state, step=0)
    loaded = checkpoint.load(tmp_path, dict.fromkeys(state))
    assert_equal(dict(loaded.values), state)


def test_random_streams_go_on(tmp_path: Path) -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), np.random.standard_normal(), torch.randn(3).tolist()

    draw()
    checkpoint.save(tmp_path, {}, step=1)
    expected = [draw(), draw()]
    checkpoint.load(tmp_path, {})
    assert [draw(), draw()] == expected
    state = torch.get_rng_state()
    checkpoint.load(tmp_path, {}, random_states=False)
    assert torch.equal(torch.get_rng_state(), state)
    checkpoint.save(tmp_path, {}, step=2, random_states=False)
    with pytest.warns(RuntimeWarning, match="holds no random states"):
        loaded = checkpoint.load(tmp_path, {})
    assert "holds no random states" in loaded.notes[0]


@pytest.mark.parametrize("wrapped_when_saved", [False, True])
@pytest.mark.parametrize("wrapped_when_loaded", [False, True])
def test_wrappers_leave_no_trace(tmp_path: Path, wrapped_when_saved: bool, wrapped_when_loaded: bool) -> None:
    saved, loaded = nn.Linear(2, 2), nn.Linear(2, 2)
    checkpoint.save(tmp_path, {"model": nn.DataParallel(saved) if wrapped_when_saved else saved}, step=1)
    checkpoint.load(tmp_path, {"model": nn.DataParallel(loaded) if wrapped_when_loaded else loaded})
    assert_equal(loaded.state_dict(), saved.state_dict())


def test_a_wrappers_state_dict_and_a_compiled_model_load_too(tmp_path: Path) -> None:
    saved, loaded = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    saved.weight.data.mul_(3)
    checkpoint.save(tmp_path, {"model": nn.DataParallel(saved).state_dict()}, step=1)
    checkpoint.load(tmp_path, {"model": loaded})
    assert_equal(loaded.state_dict(), saved.state_dict())
    compiled = torch.compile(nn.BatchNorm1d(2), backend="eager")
    checkpoint.save(tmp_path, {"model": compiled}, step=2)
    checkpoint.load(tmp_path, {"model": loaded})
    assert torch.equal(loaded.weight, torch.ones(2))


def test_the_models_file_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    path = checkpoint.save(tmp_path, {"model": model}, step=7)
    assert path.name == "step-000000007"
    tensors = load_file(path / "model.safetensors")
    assert set(tensors) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].dtype == tensor.dtype


def test_a_reader_that_knows_only_the_page(tmp_path: Path) -> None:
    """docs/checkpoint-format.md, followed with nothing but json and safetensors."""
    tied = torch.arange(4.0)
    state = {
        "model": OrderedDict(weight=tied, tied=tied, z=torch.tensor([1 + 2j], dtype=torch.complex128)),
        "extra": {"a": [1, 2.5, float("-inf"), None, True, "x"], 3: (b"\x00\xff", 1j, torch.float16)},
    }
    path = checkpoint.save(tmp_path, state, step=12)

    manifest = json.loads((path / "manifest.json").read_bytes())
    assert (manifest["format"], manifest["version"]) == ("samestep-checkpoint", 1)
    description = json.loads((path / "state.json").read_bytes())
    assert (description["step"], description["world_size"]) == (12, 1)

    def read(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
        if isinstance(node, list):
            return [read(item, tensors) for item in node]
        if not isinstance(node, dict):
            return node
        tag = next((key for key in node if key.startswith("$")), None)
        if tag is None:
            return {key: read(item, tensors) for key, item in node.items()}
        value = node[tag]
        if tag in ("$dict", "$ordered_dict"):
            pairs = [(read(k, tensors), read(v, tensors)) for k, v in value]
            return OrderedDict(pairs) if tag == "$ordered_dict" else dict(pairs)
        if tag == "$tensor":
            tensor = tensors[value]
            return (
                tensor.view(getattr(torch, node["dtype"])).reshape(node["shape"])
                if "dtype" in node
                else tensor
            )
        if tag == "$float":
            return np.frombuffer(bytes.fromhex(value), ">f8")[0].item()
        if tag == "$tuple":
            return tuple(read(item, tensors) for item in value)
        if tag == "$bytes":
            return base64.b64decode(value)
        if tag == "$complex":
            return complex(*[read(part, tensors) for part in value])
        assert tag == "$dtype"
        return getattr(torch, value)

    result = {}
    for name, entry in description["entries"].items():
        tensors = {} if entry["tensors"] is None else load_file(path / entry["tensors"])
        result[name] = read(entry["value"], tensors)
    assert_equal(result, state)


def test_keep_and_latest(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "absent") is None
    for number in (1, 5, 999_999_999, 1_000_000_000, 2_000_000_000):
        path = checkpoint.save(tmp_path / "run", {"n": number}, step=number)
        assert checkpoint.latest(tmp_path / "run") == path
    names = ["step-1000000000", "step-2000000000", "step-999999999"]
    assert names_in(tmp_path / "run") == names
    checkpoint.save(tmp_path / "run", {"n": 3}, step=3, keep=1)
    assert names_in(tmp_path / "run") == ["step-000000003"]
    for number in range(10, 15):
        checkpoint.save(tmp_path / "run", {"n": 3}, step=number, keep=None)
    assert len(names_in(tmp_path / "run")) == 6


def test_a_step_saved_twice_is_replaced_and_never_missing(tmp_path: Path) -> None:
    first = checkpoint.save(tmp_path, {"n": 1}, step=4)

    class Watching(checkpoint.Files):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            assert checkpoint.latest(tmp_path) is not None

    second = checkpoint.save(tmp_path, {"n": 2}, step=4, files=Watching())
    assert (first.name, second.name) == ("step-000000004", "step-000000004.2")
    assert names_in(tmp_path) == ["step-000000004.2"]
    third = checkpoint.save(tmp_path, {"n": 3}, step=4, keep=None)
    assert names_in(tmp_path) == [third.name] == ["step-000000004.3"]
    assert checkpoint.load(tmp_path, {"n": 0}).values == {"n": 3}


def test_retention_counts_whole_checkpoints_only_and_touches_nothing_else(tmp_path: Path) -> None:
    good = [checkpoint.save(tmp_path, {"n": n}, step=n) for n in (1, 2)]
    broken = checkpoint.save(tmp_path, {"n": 3}, step=3)
    (broken / "state.json").write_bytes(b"{")
    (tmp_path / "step-000000009").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-000000099").symlink_to(good[0], target_is_directory=True)
    assert checkpoint.latest(tmp_path) == good[1]
    newest = checkpoint.save(tmp_path, {"n": 4}, step=4, keep=2)
    assert checkpoint.latest(tmp_path) == newest
    assert names_in(tmp_path) == [
        "notes.txt",
        good[1].name,
        broken.name,
        newest.name,
        "step-000000009",
        "step-000000099",
    ]


def test_what_is_saved_is_synced_before_it_is_seen(tmp_path: Path) -> None:
    journal: list[tuple[str, str]] = []

    class Recording(checkpoint.Files):
        def create(self, path: Path) -> Any:
            journal.append(("create", path.name))
            return super().create(path)

        def sync(self, file: Any) -> None:
            super().sync(file)
            journal.append(("sync", Path(file.name).name))

        def sync_directory(self, path: Path) -> None:
            super().sync_directory(path)
            journal.append(("sync directory", path.name.partition("~")[0]))

        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            journal.append(("rename", target.name.partition("~")[0]))

        def remove_tree(self, path: Path) -> None:
            super().remove_tree(path)
            journal.append(("remove", path.name.partition("~")[0]))

    root = tmp_path / "run"
    checkpoint.save(root, {"n": torch.ones(2)}, step=1, files=Recording())
    files = ["n.safetensors", "state.json", "random.json", "manifest.json"]
    written = [(verb, name) for name in files for verb in ("create", "sync")]
    revealed = [
        ("sync directory", ".saving-step-000000001"),
        ("rename", "step-000000001"),
        ("sync directory", "run"),
    ]
    assert journal == [("sync directory", tmp_path.name), *written, *revealed]
    journal.clear()
    checkpoint.save(root, {"n": torch.ones(2)}, step=2, keep=1, files=Recording())
    assert journal[-3:] == [
        ("sync directory", "run"),
        ("rename", ".removing-step-000000001"),
        ("remove", ".removing-step-000000001"),
    ]


def altered(state: dict[str, torch.Tensor], **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    merged = {**state, **changes}
    return {key: value for key, value in merged.items() if value is not None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": None}, "missing in the checkpoint: weight"),
        ({"extra": torch.ones(1)}, "unknown to the model: extra"),
        ({"bias": torch.ones(3)}, r"of another shape: bias \(saved: \[3\], model: \[2\]\)"),
        ({"bias": torch.ones(2).double()}, r"of another dtype: bias \(saved: float64, model: float32\)"),
        ({f"x{i}": torch.ones(1) for i in range(7)}, "unknown to the model: x0, x1, x2, x3, x4 and 2 more"),
    ],
)
def test_a_checkpoint_of_another_model_changes_nothing(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    model = nn.Linear(2, 2)
    sampler = DistributedSampler(range(9), 1, 0)
    sampler.set_epoch(5)
    checkpoint.save(tmp_path, {"model": altered(model.state_dict(), **change), "sampler": sampler}, step=1)
    target, other_sampler = nn.Linear(2, 2), DistributedSampler(range(9), 1, 0)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load(tmp_path, {"sampler": other_sampler, "model": target})
    assert "\n" not in str(caught.value)
    assert_equal(target.state_dict(), before)
    assert other_sampler.epoch == 0
    if "shape" not in message:
        checkpoint.load(tmp_path, {"model": target}, strict=False)
        kept = before if "weight" in change else model.state_dict()
        assert torch.equal(target.weight, kept["weight"])


def test_an_optimizer_of_other_groups(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    checkpoint.save(tmp_path, {"optimizer": torch.optim.SGD(one.parameters(), 0.1)}, step=1)
    with pytest.raises(CheckpointError, match=r"groups hold \[2\] parameters, this one's \[1\]"):
        checkpoint.load(tmp_path, {"optimizer": torch.optim.SGD(two.parameters(), 0.1)})
    checkpoint.save(tmp_path, {"optimizer": 3, "model": 4}, step=2)
    with pytest.raises(CheckpointError, match=r"'optimizer' in .* is not the state of an optimizer"):
        checkpoint.load(tmp_path, {"optimizer": torch.optim.SGD(two.parameters(), 0.1)})
    with pytest.raises(CheckpointError, match="'model' in the checkpoint is not the state of a model"):
        checkpoint.load(tmp_path, {"model": two})


def test_small_objects_refuse_before_the_model_is_touched(tmp_path: Path) -> None:
    model, target = nn.Linear(2, 2), nn.Linear(2, 2)
    checkpoint.save(tmp_path, {"model": model, "sampler": DistributedSampler(range(9), 1, 0)}, step=1)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(CheckpointError, match=r"'sampler' does not take its saved state: .*length=9"):
        checkpoint.load(tmp_path, {"model": target, "sampler": DistributedSampler(range(8), 1, 0)})
    assert_equal(target.state_dict(), before)


def test_names_on_one_side_only(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": 1, "b": 2}, step=1)
    assert checkpoint.load(tmp_path, {"a": 0}).skipped == ("b",)
    with pytest.raises(CheckpointError, match="has no 'c': it holds 'a', 'b'"):
        checkpoint.load(tmp_path, {"a": 0, "c": 0})
    loaded = checkpoint.load(tmp_path, {"a": 0, "c": 0}, strict=False)
    assert (loaded.values, loaded.skipped) == ({"a": 1}, ("b", "c"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1}, "step=-1 is not a whole number"),
        ({"step": 1.0}, r"step=1\.0 is not a whole number"),
        ({"step": True}, "step=True is not"),
        ({"step": 10**18}, "is not a whole number from 0"),
        ({"keep": 0}, "keep=0: keep at least 1"),
        ({"state": {"a/b": 1}}, "entry 'a/b': names are"),
        ({"state": {"..": 1}}, r"entry '\.\.': names are"),
        ({"state": {"": 1}}, "entry '': names are"),
        ({"state": {3: 1}}, "entry 3: names are"),
        ({"state": {"Model": 1, "model": 2}}, "'Model' and 'model', which differ only in case"),
        ({"state": {"f": print}}, r"state\['f'\] is a builtins"),
        ({"state": {"n": 10**5000}}, "cannot be written as JSON"),
    ],
)
def test_what_cannot_be_saved_leaves_nothing_behind(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.save(tmp_path / "run", **{"state": {}, "step": 1} | arguments)
    assert isinstance(caught.value, SamestepError)
    assert not (tmp_path / "run").exists()


def test_a_state_dict_that_raises(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> None:
            raise KeyError("oh")

    with pytest.raises(CheckpointError, match="KeyError: 'oh'"):
        checkpoint.save(tmp_path, {"broken": Broken()}, step=1)


def test_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=f"there is no checkpoint at {tmp_path}/absent"):
        checkpoint.load(tmp_path / "absent", {})
    with pytest.raises(FileNotFoundError, match=r"it has no manifest.json\) and holds none"):
        checkpoint.load(tmp_path, {})
    (tmp_path / "ckpt.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file and a checkpoint is a directory"):
        checkpoint.load(tmp_path / "ckpt.pt", {})
    with pytest.raises(CheckpointError, match=r"cannot look for checkpoints in .*ckpt.pt: Not a directory"):
        checkpoint.latest(tmp_path / "ckpt.pt")


@pytest.mark.parametrize("place", ["file", "file/below/it"])
def test_a_directory_that_cannot_be_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .* step 1 .* that this user can write"):
        checkpoint.save(tmp_path / place, {}, step=1)


def test_names_of_checkpoints() -> None:
    for text, name in {
        "step-000000042": CheckpointName(42),
        "step-000000042.2": CheckpointName(42, 2),
        "step-1234567890123": CheckpointName(1234567890123),
        "step-42": None,
        "step-0000000042": None,
        "step-000000042.1": None,
        "step-000000042.02": None,
        "step-000000042\n": None,
        "step-00000004²": None,
        ".saving-step-000000042": None,
        "step--00000042": None,
    }.items():
        assert CheckpointName.parse(text) == name
        assert name is None or str(name) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is not the manifest of a samestep checkpoint"),
        ({"version": 2}, "is of version 2 and this samestep reads version 1"),
        ({"version": True}, "is of version True"),
        ({"files": []}, "is altered: its fields"),
        ({"more": 1}, "is altered: its fields"),
        ({"files": {}}, "does not list state.json"),
        ({"files": {"../x": {"bytes": 1, "sha256": "0" * 64}}}, "'../x', which is not the name"),
        (
            {"files": {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}}},
            "'/etc/passwd', which is not",
        ),
        ({"files": {".x": {"bytes": 1, "sha256": "0" * 64}}}, "'.x', which is not the name"),
        ({"files": {"manifest.json": {"bytes": 1, "sha256": "0" * 64}}}, "which is not the name"),
        ({"files": {"x\n": {"bytes": 1, "sha256": "0" * 64}}}, "which is not the name"),
        ({"files": {"x": {"bytes": -1, "sha256": "0" * 64}}}, "'x' is not a size and a sha256"),
        ({"files": {"x": {"bytes": 1.0, "sha256": "0" * 64}}}, "'x' is not a size"),
        ({"files": {"x": {"bytes": 1, "sha256": "A" * 64}}}, "'x' is not a size"),
        ({"files": {"x": {"bytes": 1}}}, "'x' is not a size"),
        ({"files": {"x": 1}}, "'x' is not a size"),
    ],
)
def test_manifests_that_are_none(change: dict[str, Any], message: str) -> None:
    good = {"format": "samestep-checkpoint", "version": 1, "files": {}}
    with pytest.raises(CheckpointCorruptError, match=message):
        Manifest.from_json(json.dumps(good | change).encode(), "manifest.json")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"a":1,"a":1}', '{"a":NaN}', "[" * 100_000, "\ufeff{}"]
)
def test_manifests_that_are_not_even_objects(text: str) -> None:
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.json"):
        Manifest.from_json(text.encode(), "manifest.json")


def test_torchs_own_file_of_a_wrapped_model_is_still_a_line(tmp_path: Path) -> None:
    model, loaded = nn.DataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)
    torch.save(model.module.state_dict(), tmp_path / "ckpt.pt")
    loaded.load_state_dict(torch.load(tmp_path / "ckpt.pt", weights_only=True))
    assert_equal(loaded.state_dict(), model.module.state_dict())
