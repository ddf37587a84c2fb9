"""`samestep verify` and `samestep checkpoint show|verify`, as functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import checkpoint
from samestep.checkpoint.difference import compare, differences
from samestep.checkpoint.report import human_bytes, print_comparison, print_tensors, print_verdict
from samestep.errors import CheckpointCorruptError, CheckpointNotFoundError


def make(directory: Path, state: dict[str, Any], step: int = 1) -> Path:
    return checkpoint.save(directory, state, step=step, random_states=False)


def weights() -> dict[str, Any]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16)}


def test_the_same_bits_are_the_same_whoever_saved_them(tmp_path: Path) -> None:
    one = checkpoint.save(tmp_path / "1", {"model": weights(), "n": 1.5}, step=1)
    torch.rand(3)
    other = make(tmp_path / "2", {"model": weights(), "n": 1.5})
    comparison = compare(one, other)
    assert (comparison.first, comparison.num_tensors, comparison.num_bytes) == (None, 2, 30)


def test_the_first_tensor_index_and_values_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = weights()
    changed["a"][1, 1] = 4.5
    changed["a"][1, 2] = -5.0
    changed["b"][0] = -0.0
    one = make(tmp_path / "1", {"model": weights(), "n": 1})
    other = make(tmp_path / "2", {"model": changed, "n": 1})
    assert not print_comparison(one, other)
    assert capsys.readouterr().out == (
        "model['a'] differs at [1, 1]: 4.0 and 4.5 (bits 0x40800000 and 0x40900000); 2 of 6 elements differ\n"
        "and 1 more tensors or values differ\n"
    )
    assert print_comparison(one, tmp_path / "1")
    assert capsys.readouterr().out == "the same: 2 tensors, 30 bytes, bit by bit\n"


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"x": 1}, {"x": 2}, "x differs: 1 and 2"),
        ({"x": 1}, {"x": 1.0}, "x differs: 1 and 1.0"),
        ({"x": 0.0}, {"x": -0.0}, "x differs: 0.0 and -0.0"),
        ({"x": [1, 2]}, {"x": [1]}, "x differs: 2 items and 1"),
        ({"x": {"k": 1}}, {"x": {}}, "x['k'] is missing in the second"),
        ({"x": {}}, {"x": {"k": 1}}, "x['k'] is missing in the first"),
        ({"x": 1}, {"y": 1}, "the entry 'x' is missing in "),
        (
            {"x": torch.zeros(2)},
            {"x": torch.zeros(3)},
            "x differs: a float32 tensor of shape [2]",
        ),
        (
            {"x": torch.zeros(2)},
            {"x": torch.zeros(2).half()},
            "x differs: a float32 tensor of shape [2]",
        ),
        (
            {"x": torch.tensor(1)},
            {"x": torch.tensor(2)},
            "x differs: 1 and 2 (bits 0x0000000000000001",
        ),
        ({"x": np.zeros(2)}, {"x": np.array([0.0, 1])}, "x differs at [1]: 0.0 and 1.0"),
    ],
)
def test_whatever_differs_is_said(tmp_path: Path, one: Any, other: Any, words: str) -> None:
    first = compare(make(tmp_path / "1", one), make(tmp_path / "2", other)).first
    assert first is not None
    assert first.startswith(words)


def test_another_step_differs(tmp_path: Path) -> None:
    first = compare(make(tmp_path / "1", {}, step=1), make(tmp_path / "2", {}, step=2)).first
    assert first == "the step differs: 1 and 2"


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([torch.float64, torch.bfloat16, torch.int8, torch.complex64]), st.data())
def test_one_flipped_bit_is_found_where_it_is(dtype: torch.dtype, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3))
    one = torch.zeros(shape, dtype=dtype)
    other = torch.zeros(shape, dtype=dtype)
    raw = other.reshape(-1).view(torch.uint8)
    position = data.draw(st.integers(0, raw.numel() - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    index = [int(i) for i in np.unravel_index(position // one.itemsize, shape)]
    assert list(differences(one, one.clone(), "x")) == []
    [words] = differences(one, other, "x")
    assert words.startswith(f"x differs at {index}: " if index else "x differs: ")


def test_not_a_number_equals_itself(tmp_path: Path) -> None:
    state = {"x": torch.tensor([float("nan")]), "y": float("nan")}
    assert compare(make(tmp_path / "1", state), make(tmp_path / "2", state)).first is None


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    one = make(tmp_path / "1", {"model": weights()})
    with pytest.raises(CheckpointNotFoundError):
        compare(one, tmp_path / "2")
    data = bytearray((one / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (one / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="sha256 differs"):
        compare(one, one)


def test_the_table_of_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tied = torch.zeros(4, 2)
    state = {"model": {"a": tied, "b": tied, "c": torch.zeros(3, dtype=torch.complex64)}, "epoch": 3}
    print_tensors(make(tmp_path, state, step=7))
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert rows == [
        ["model/a", "float32", "[4, 2]", "32"],
        ["model/b", "float32", "[4, 2]", "= 32"],
        ["model/c", "complex64", "[3]", "24"],
    ]
    assert "step 7" in out
    assert "epoch" in out


@pytest.mark.parametrize("name", ["model.safetensors", "random.json", "state.json", "manifest.json"])
def test_digests_are_checked(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint.save(tmp_path, {"model": weights()}, step=1)
    assert print_verdict(tmp_path)
    assert "is as it was saved: 3 files" in capsys.readouterr().out
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    assert not print_verdict(path)
    assert name in capsys.readouterr().out


def test_bytes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 999, 1000, 2_500_000)] == ["0 bytes", "999 bytes", "1.0 KB", "2.5 MB"]
