"""Checkpoints that were cut short, altered or made by a stranger: an error, and nothing else happens."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samestep import checkpoint
from samestep.errors import CheckpointCorruptError, CheckpointError


def save_small(directory: Path) -> Path:
    torch.manual_seed(0)
    return checkpoint.save(directory, {"model": nn.Linear(3, 2), "n": 1}, step=1)


def load_all(path: Path) -> nn.Linear:
    """Load everything; the model must be untouched if that fails."""
    model = nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stream = torch.get_rng_state()
    try:
        checkpoint.load(path, {"model": model, "n": 0})
    except BaseException:
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert torch.equal(stream, torch.get_rng_state())
        raise
    return model


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = save_small(tmp_path)
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for length in {0, 1, 7, 8, len(data) // 2, len(data) - 1}:
            file.write_bytes(data[:length])
            with pytest.raises(CheckpointCorruptError, match=file.name):
                load_all(path)
            assert checkpoint.latest(tmp_path) is None
        file.write_bytes(data)
    load_all(path)


@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", "model.safetensors", "random.json"], ids=lambda name: name
)
def test_every_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    file = save_small(tmp_path) / name
    data = bytearray(file.read_bytes())
    for position in range(0, len(data), 1 + len(data) // 400):
        for bit in range(8) if name == "manifest.json" else [position % 8]:
            data[position] ^= 1 << bit
            file.write_bytes(data)
            with pytest.raises(CheckpointCorruptError):
                load_all(file.parent)
            data[position] ^= 1 << bit
    file.write_bytes(data)
    load_all(file.parent)


def test_additions_are_noticed(tmp_path: Path) -> None:
    path = save_small(tmp_path)
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        file.write_bytes(data + b"x")
        with pytest.raises(CheckpointCorruptError, match=file.name):
            load_all(path)
        file.write_bytes(data)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors", "random.json"])
@pytest.mark.parametrize("kind", ["missing", "link", "pipe", "directory"])
def test_files_that_are_not_files(tmp_path: Path, name: str, kind: str) -> None:
    path = save_small(tmp_path / "run")
    file = path / name
    secret = tmp_path / "elsewhere"
    file.rename(secret)
    if kind == "link":
        file.symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    with pytest.raises(CheckpointError, match="symbolic link" if kind == "link" else name):
        load_all(path)
    assert checkpoint.latest(tmp_path / "run") is None


def resign(path: Path) -> None:
    """What a stranger can do: make the manifest fit whatever the files hold."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in path.iterdir()
        if file.name != "manifest.json"
    }
    manifest = {"format": "samestep-checkpoint", "version": 1, "files": files}
    (path / "manifest.json").write_text(json.dumps(manifest))


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        state = json.loads((path / "state.json").read_text())
        change(state)
        (path / "state.json").write_text(json.dumps(state))

    return apply


def replace(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(content) and None


FORGERIES: dict[str, Callable[[Path], None]] = {
    "no step": edit(lambda s: s.pop("step")),
    "step is text": edit(lambda s: s.update(step="1")),
    "entries is a list": edit(lambda s: s.update(entries=[])),
    "entry is null": edit(lambda s: s["entries"].update(n=None)),
    "entry without value": edit(lambda s: s["entries"]["n"].pop("value")),
    "tensors elsewhere": edit(lambda s: s["entries"]["model"].update(tensors="../../x.safetensors")),
    "tensors absolute": edit(lambda s: s["entries"]["model"].update(tensors="/etc/passwd")),
    "tensors is a list": edit(lambda s: s["entries"]["model"].update(tensors=[])),
    "tensors in JSON": edit(lambda s: s["entries"]["model"].update(tensors="random.json")),
    "no tensors": edit(lambda s: s["entries"]["model"].update(tensors=None)),
    "unknown tag": edit(lambda s: s["entries"]["n"].update(value={"$pickle": "gASV"})),
    "absent tensor": edit(lambda s: s["entries"]["n"].update(value={"$tensor": "other"})),
    "deep": replace("state.json", b'{"entries":' * 100_000),
    "duplicate keys": replace("state.json", b'{"step":1,"step":2,"world_size":1,"entries":{}}'),
    "state is a list": replace("state.json", b"[]"),
    "state is not text": replace("state.json", b"\xff\xfe"),
    "huge header": replace("model.safetensors", (10**9).to_bytes(8, "little") + b"{}"),
    "empty tensors": replace("model.safetensors", b""),
    "random is a number": edit(lambda s: s.update(random=3)),
    "random elsewhere": edit(lambda s: s.update(random="../random.json")),
    "random is a list": edit(lambda s: s.update(random=[])),
    "random is empty": replace("random.json", b"[]"),
    "random of none": replace("random.json", b"[null]"),
    "random of text": replace("random.json", b'[{"python":3,"numpy":null,"torch":"","accelerator":null}]'),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_strangers_checkpoint_is_refused(tmp_path: Path, forgery: str) -> None:
    path = save_small(tmp_path)
    FORGERIES[forgery](path)
    resign(path)
    with pytest.raises(CheckpointCorruptError) as caught:
        load_all(path)
    assert "\n" not in str(caught.value)


def test_a_forged_random_state_touches_no_stream(tmp_path: Path) -> None:
    path = save_small(tmp_path)
    states = json.loads((path / "random.json").read_text())
    states[0]["numpy"]["position"] = 10**6
    (path / "random.json").write_text(json.dumps(states))
    resign(path)
    with pytest.raises(CheckpointCorruptError, match="holds no random states"):
        load_all(path)


def test_a_moved_checkpoint_loads_and_other_files_do_no_harm(tmp_path: Path) -> None:
    path = save_small(tmp_path / "run")
    expected = load_all(path)
    moved = tmp_path / "best"
    shutil.copytree(path, moved)
    (moved / "README").write_text("mine")
    (tmp_path / "link").symlink_to(moved, target_is_directory=True)
    for place in (moved, tmp_path / "link"):
        assert torch.equal(load_all(place).weight, expected.weight)


def test_the_message_says_what_to_do(tmp_path: Path) -> None:
    path = save_small(tmp_path)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointCorruptError) as caught:
        load_all(path)
    assert str(caught.value) == (
        f"{path}/model.safetensors is altered: its bytes are not those that were saved (sha256 differs); "
        "load another checkpoint of the run"
    )
