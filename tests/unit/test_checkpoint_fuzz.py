"""Checkpoints from a stranger, drawn at random: each loads, or is refused by one of our errors.

What is changed is signed anew, so that the digests notice nothing and the readers behind them have to.
FUZZ_EXAMPLES=5000 in the environment looks longer.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from samestep import checkpoint
from samestep.checkpoint.convert import import_checkpoint
from samestep.checkpoint.report import print_comparison, print_tensors, print_verdict
from samestep.errors import CheckpointError

FILES = ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors", "random.json"]
TAGS = [
    *("$tensor", "$float", "$complex", "$bytes", "$tuple", "$size", "$set", "$frozenset", "$dict"),
    *("$counter", "$dtype", "$device", "$numpy", "$numpy_scalar", "$ordered_dict", "$unknown"),
]
NUMBERS = [0, 1, -1, 2, 7, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308]
TEXTS = [
    *("", "x", "F32", "BOOL", "float32", "complex64", "cuda:0", "cpu", "meta", "weight", "model.safetensors"),
    *("../../etc/passwd", "/etc/passwd", "..", ".", "a/b", "\x00", "\ud83d\ude00", "$tensor", "0" * 300),
]
leaves = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.text(max_size=8)
)
keys = st.one_of(
    st.sampled_from(TAGS), st.sampled_from(["shape", "stride", "dtype", "metadata"]), st.text(max_size=4)
)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)
thorough = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def objects() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 1, 5, 5)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    plain = {
        "numbers": [1, 2.5, float("nan"), 3j, True, None],
        "kept": (torch.tensor([1j, 2]), torch.float16, torch.device("cpu"), torch.Size([2, 3])),
        "sets": [{1, 2}, frozenset("ab"), Counter("aab"), OrderedDict(b=1, a=2), {3: "three"}],
        "bytes": b"\x00\xff",
        "numpy": [np.arange(3.0), np.float32(2)],
    }
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "plain": plain}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(tmp_path_factory.mktemp("original"), objects(), step=3)


def sign(path: Path) -> None:
    """The manifest fits whatever the files hold."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in path.iterdir()
        if file.name != "manifest.json"
    }
    manifest = json.loads((path / "manifest.json").read_text()) | {"files": files}
    (path / "manifest.json").write_text(json.dumps(manifest))


def loads_or_is_refused(original: Path, name: str, data: bytes) -> None:
    """With `data` in place of the file `name`; nothing outside of the checkpoint is touched either way."""
    stream = torch.get_rng_state()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(shutil.copytree(original, Path(folder, "step-000000003")))
        (path / name).write_bytes(data)
        if name != "manifest.json":
            sign(path)
        beside = sorted(Path(folder).iterdir())
        target = objects()
        before = copy.deepcopy(target["model"].state_dict())
        refusal = None
        try:
            checkpoint.load(path, target, strict=False)
        except CheckpointError as error:
            refusal = str(error)
        finally:
            torch.set_rng_state(stream)
        if refusal is not None:
            assert "\n" not in refusal
            unchanged = zip(before.values(), target["model"].state_dict().values(), strict=True)
            assert all(torch.equal(one, other) for one, other in unchanged)
        # The same without `load`, which would make one of our errors of any other.
        with contextlib.suppress(CheckpointError):
            print_verdict(path)
        for look in (lambda: print_tensors(path), lambda: print_comparison(path, original)):
            with contextlib.suppress(CheckpointError):
                look()
        assert sorted(Path(folder).iterdir()) == beside


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
@thorough
@given(data=st.data())
def test_bytes_that_were_changed_anywhere(original: Path, name: str, data: st.DataObject) -> None:
    content = bytearray((original / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        stop = data.draw(st.sampled_from([start, start + 1, start + 8, len(content)]))
        content[start:stop] = data.draw(st.binary(max_size=9))
    loads_or_is_refused(original, name, bytes(content))


def places_in(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in `tree`."""
    found: list[tuple[Any, Any]] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        below = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        found += [(node, key) for key, _ in below]
        pending += [value for _, value in below if isinstance(value, (dict, list))]
    return found


def changed(tree: Any, data: st.DataObject) -> Any:
    """`tree` with something in it replaced, removed, renamed, or put where something else was."""
    for _ in range(data.draw(st.integers(1, 3))):
        places = places_in(tree)
        if not places:
            break
        container, key = data.draw(st.sampled_from(places))
        how = data.draw(st.sampled_from(["replace", "remove", "rename", "move"]))
        if how == "replace":
            container[key] = data.draw(trees)
        elif how == "remove":
            del container[key]
        elif how == "rename" and isinstance(container, dict):
            container[data.draw(keys)] = container.pop(key)
        else:
            other, other_key = data.draw(st.sampled_from(places))
            container[key] = copy.deepcopy(other[other_key])
    return tree


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "random.json"])
@thorough
@given(data=st.data())
def test_json_that_says_something_else(original: Path, name: str, data: st.DataObject) -> None:
    tree = changed(json.loads((original / name).read_text()), data)
    loads_or_is_refused(original, name, json.dumps(tree).encode())


@pytest.mark.filterwarnings("ignore")
@thorough
@given(data=st.data())
def test_headers_that_describe_other_tensors(original: Path, data: st.DataObject) -> None:
    content = (original / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(changed(json.loads(content[8 : 8 + length]), data)).encode()
    loads_or_is_refused(
        original, "model.safetensors", len(header).to_bytes(8, "little") + header + content[8 + length :]
    )


@pytest.mark.parametrize("shape", [[0, 2**61], [2**40, 0, 2**40], [2**61, 0], [0] * 100, [1] * 1000])
def test_shapes_of_nothing_that_no_tensor_can_have(original: Path, shape: list[int]) -> None:
    content = (original / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    tree = json.loads(content[8 : 8 + length])
    begin = min(value["data_offsets"][0] for name, value in tree.items() if name != "__metadata__")
    one = shape == [1] * 1000
    tree["extra"] = {"dtype": "U8", "shape": shape, "data_offsets": [begin, begin]}
    if one:
        end = len(content) - 8 - length
        tree["extra"]["data_offsets"] = [end, end + 1]
    header = json.dumps(tree).encode()
    data = len(header).to_bytes(8, "little") + header + content[8 + length :] + b"\x00" * one
    state = json.loads((original / "state.json").read_text())
    state["entries"]["plain"] = {"value": {"$tensor": "extra"}, "tensors": "model.safetensors"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(shutil.copytree(original, Path(folder, "step-000000003")))
        (path / "state.json").write_text(json.dumps(state))
        loads_or_is_refused(path, "model.safetensors", data)


def test_a_checkpoint_reached_through_links_reads_only_its_own_files(original: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "step-000000009").symlink_to(original, target_is_directory=True)
    assert checkpoint.latest(run) is None  # a link in a run is no checkpoint of it
    away = shutil.copytree(original, tmp_path / "away")
    (away / "state.json").unlink()
    (away / "state.json").symlink_to(original / "state.json")
    with pytest.raises(CheckpointError, match="symbolic link"):
        checkpoint.load(away, objects())


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[31mb", "../../x", "", "a" * 100])
def test_entries_that_no_save_would_name_so(original: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(original, tmp_path / "step-000000003"))
    state = json.loads((path / "state.json").read_text())
    state["entries"][name] = {"value": 1, "tensors": None}
    (path / "state.json").write_text(json.dumps(state))
    sign(path)
    for look in (print_verdict, print_tensors):
        if look is print_verdict:
            assert not look(path)
        else:
            with pytest.raises(CheckpointError, match="names are 1 to 64 letters"):
                look(path)


def test_tensors_named_to_confuse_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = checkpoint.save(tmp_path, {"odd": {"a\x1b[31mb": torch.ones(1)}}, step=1)
    print_tensors(saved)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "a\\x1b[31mb" in shown


def test_a_pipe_is_no_file_to_import(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="not a regular file"):
        import_checkpoint(tmp_path / "model.pt", tmp_path / "run")


def test_a_file_larger_than_memory_is_not_read(original: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(original, tmp_path / "step-000000003"))
    os.truncate(path / "state.json", 1 << 43)  # sparse; 8 terabytes
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"]["bytes"] = 1 << 43
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"state.json: \d+ bytes do not fit in memory"):
        print_tensors(path)
