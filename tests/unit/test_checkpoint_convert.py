"""Checkpoints in other tools' formats, there and back."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from samestep import checkpoint
from samestep.checkpoint import dcp
from samestep.checkpoint.convert import export_checkpoint, import_checkpoint
from samestep.checkpoint.difference import compare, differences
from samestep.errors import CheckpointError

# torch says that there is one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    model.register_parameter("tied", model[0].weight)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def same(one: Any, other: Any) -> None:
    assert list(differences(one, other, "state")) == []


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer, "epoch": 3, "best": {"loss": 0.5, "at": (1, 2)}}
    return checkpoint.save(tmp_path / "run", state, step=42)


def test_to_torch_save_and_back(tmp_path: Path, saved: Path) -> None:
    target = tmp_path / "ckpt.pt"
    export_checkpoint(tmp_path / "run", target)
    loaded = torch.load(target, weights_only=True)
    model, optimizer = trained()
    assert (loaded["step"], loaded["epoch"], loaded["best"]) == (42, 3, {"loss": 0.5, "at": (1, 2)})
    same(loaded["model"], model.state_dict())
    same(loaded["optimizer"], optimizer.state_dict())
    back = import_checkpoint(target, tmp_path / "back")
    assert back.name == "step-000000042"
    assert compare(saved, back).first is None


def test_to_safetensors_and_back(tmp_path: Path, saved: Path) -> None:
    target = tmp_path / "model.safetensors"
    export_checkpoint(saved, target)
    model, _ = trained()
    expected = dict(model.state_dict())
    found = load_file(target)
    assert sorted(found) == sorted(expected)  # the tied one under both names
    same({name: found[name] for name in expected}, expected)
    import_checkpoint(target, tmp_path / "back", step=5)
    other = trained()[0]
    nn.init.zeros_(other[0].weight)
    assert checkpoint.load(tmp_path / "back", {"model": other}, random_states=False).step == 5
    same(other.state_dict(), model.state_dict())


def test_to_dcp_and_back(tmp_path: Path, saved: Path) -> None:
    target = tmp_path / "dcp"
    export_checkpoint(saved, target)
    model, optimizer = trained()
    theirs = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    torch_dcp.load(theirs, checkpoint_id=target, no_dist=True)
    same(theirs["model"], dict(model.state_dict()))
    back = import_checkpoint(target, tmp_path / "back")
    other, other_optimizer = trained()
    nn.init.zeros_(other[0].weight)
    state = {"model": other, "optimizer": other_optimizer, "epoch": 0, "best": None}
    loaded = checkpoint.load(back, state, random_states=False)
    assert (loaded.step, loaded.values["epoch"]) == (42, 3)
    same(other.state_dict(), model.state_dict())
    same(other_optimizer.state_dict(), optimizer.state_dict())


def test_what_other_scripts_save(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    bare = import_checkpoint(tmp_path / "weights.pth", tmp_path / "1")
    checkpoint.load(bare, {"model": trained()[0]}, random_states=False)
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 9, "loss": 0.25}
    torch.save(whole, tmp_path / "ckpt.pt")
    path = import_checkpoint(tmp_path / "ckpt.pt", tmp_path / "2")
    loaded = checkpoint.load(path, {"loss": 0, "model": trained()[0]}, random_states=False)
    assert (loaded.step, loaded.values) == (9, {"loss": 0.25})
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    path = import_checkpoint(tmp_path / "w.safetensors", tmp_path / "3")
    same(checkpoint.load(path, {"model": None}, random_states=False).values["model"], {"w": torch.ones(2)})


class Attack:
    """What a pickle can carry."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", ["pt", "index", "bytes"])
def test_code_in_a_file_is_not_run(tmp_path: Path, place: str) -> None:
    attack = Attack(tmp_path / "attacked")
    source = tmp_path / ("ckpt.pt" if place == "pt" else "dcp")
    if place == "pt":
        torch.save({"model": attack}, source)
    else:
        torch_dcp.save({"x": attack} if place == "bytes" else {"x": 1}, checkpoint_id=source, no_dist=True)
        if place == "index":
            (source / ".metadata").write_bytes(pickle.dumps(attack))
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(source, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "attacked").exists()


def test_a_dcp_index_that_names_files_elsewhere(tmp_path: Path) -> None:
    torch_dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    index = (tmp_path / "dcp" / ".metadata").read_bytes()
    assert b"__0_0.distcp" in index
    (tmp_path / "distcp").write_bytes((tmp_path / "dcp" / "__0_0.distcp").read_bytes())
    (tmp_path / "dcp" / ".metadata").write_bytes(index.replace(b"__0_0.distcp", b"../../distcp"))
    with pytest.raises(CheckpointError, match="outside of its directory"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "run")


def test_sharded_chunks_of_dcp_become_whole(tmp_path: Path) -> None:
    """What FSDP writes: one tensor in chunks."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    whole = torch.arange(12.0).reshape(4, 3)
    source = tmp_path / "dcp"
    torch_dcp.save({"x": whole}, checkpoint_id=source, no_dist=True)
    index = pickle.loads((source / ".metadata").read_bytes())
    index.state_dict_metadata["x"].chunks = []
    index.storage_data = {}
    for start, stop in ((0, 1), (1, 4)):
        name = f"__{start}_0.distcp"
        torch.save(whole[start:stop].clone(), source / name)
        sizes = torch.Size([stop - start, 3])
        offsets = torch.Size([start, 0])
        index.state_dict_metadata["x"].chunks.append(ChunkStorageMetadata(offsets, sizes))
        info = _StorageInfo(name, 0, (source / name).stat().st_size)
        index.storage_data[MetadataIndex("x", offsets)] = info
    (source / ".metadata").write_bytes(pickle.dumps(index))
    path = import_checkpoint(source, tmp_path / "run")
    same(checkpoint.load(path, {"model": None}, random_states=False).values["model"]["x"], whole)


@pytest.fixture(scope="module")
def small_dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "a"
    torch_dcp.save({"m": {"x": torch.ones(2)}, "n": 1}, checkpoint_id=folder, no_dist=True)
    shutil.copy(folder / ".metadata", folder / "kept")
    return folder


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3))
def test_an_altered_dcp_index_is_an_error_or_harmless(small_dcp: Path, edits: list[tuple[int, int]]) -> None:
    raw = bytearray((small_dcp / "kept").read_bytes())
    for position, value in edits:
        raw[position % len(raw)] = value
    (small_dcp / ".metadata").write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        dcp.read(small_dcp)
    assert sorted(path.name for path in small_dcp.parent.iterdir()) == ["a"]


def test_what_cannot_be_exported(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(CheckpointError, match="has no entry 'net': it holds 'model'"):
        export_checkpoint(saved, tmp_path / "x.safetensors", entry="net")
    with pytest.raises(CheckpointError, match="the entry 'epoch' holds no tensors"):
        export_checkpoint(saved, tmp_path / "x.safetensors", entry="epoch")
    with pytest.raises(CheckpointError, match="its suffix names no format"):
        export_checkpoint(saved, tmp_path / "x.zip")
    with pytest.raises(CheckpointError, match="is there already"):
        export_checkpoint(saved, tmp_path / "run")
    with pytest.raises(CheckpointError, match="cannot write"):
        export_checkpoint(saved, tmp_path / "no" / "x.safetensors")
    complex_state = checkpoint.save(
        tmp_path / "c", {"model": {"z": torch.zeros(1, dtype=torch.complex64)}}, step=1
    )
    with pytest.raises(CheckpointError, match="safetensors has no complex64, the dtype of 'z'"):
        export_checkpoint(complex_state, tmp_path / "x.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "run"]


def test_types_that_torchs_reader_refuses_become_plain(tmp_path: Path) -> None:
    state = {"a": np.arange(3), "b": np.float32(1.5), "c": frozenset({1}), "d": OrderedDict(x=[np.zeros(1)])}
    checkpoint.save(tmp_path / "run", state, step=1)
    export_checkpoint(tmp_path / "run", tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    same(loaded["a"], torch.arange(3))
    assert (loaded["b"], loaded["c"]) == (1.5, {1})
    same(loaded["d"]["x"][0], torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_what_cannot_be_imported(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="there is nothing at"):
        import_checkpoint(tmp_path / name, tmp_path / "run")
    for content in (b"", b"x" * 100, pickle.dumps([1]), b"PK\x03\x04"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            import_checkpoint(tmp_path / name, tmp_path / "run")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
