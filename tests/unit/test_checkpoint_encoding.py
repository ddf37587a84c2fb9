from __future__ import annotations

import contextlib
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.checkpoint.encoding import decode, encode, tensor_names
from samestep.checkpoint.layout import dump_json, parse_json
from samestep.checkpoint.tensors import chunks_of, read_tensors
from samestep.errors import CheckpointCorruptError, CheckpointError

Tensors = dict[str, torch.Tensor]


def write_and_read(tensors: Tensors, wanted: set[str] | None = None) -> Tensors:
    return read_from(b"".join(chunks_of(tensors)), wanted)


def read_from(data: bytes, wanted: set[str] | None = None) -> Tensors:
    position = 0

    def read_into(buffer: memoryview) -> None:
        nonlocal position
        buffer[:] = data[position : position + len(buffer)]
        position += len(buffer)

    result = read_tensors(read_into, len(data), wanted, "file")
    assert position == len(data)
    return result


def round_trip(value: object) -> Any:
    tree, tensors = encode(value, "entry")
    assert tensor_names(tree) == set(tensors)
    return decode(parse_json(dump_json(tree), "tree"), write_and_read(tensors), "entry")


def same(one: Any, other: Any) -> bool:
    """Whether both are the same to the last bit, types, order of keys and strides included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and bits_of(one) == bits_of(other)
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(k, key) and same(v, w) for (k, v), (key, w) in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same((one.real, one.imag), (other.real, other.imag))
    return bool(one == other)


def bits_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


tensors = st.builds(
    lambda data, dtype, shape: (
        torch.tensor(list(data * 64)[: math.prod(shape) * dtype.itemsize], dtype=torch.uint8)
        .view(dtype)
        .reshape(shape)
    ),
    st.binary(min_size=8, max_size=8),
    st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]
    ),
    st.sampled_from([(), (0,), (1,), (3,), (2, 3), (2, 0, 3)]),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=10)
    | st.complex_numbers()
    | st.sampled_from(
        [torch.float32, torch.device("cuda:1"), torch.Size([2, 3]), np.float32(0.1), np.int64(3)]
    )
)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
nested = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(nested)
def test_nested_state_comes_back_to_the_last_bit(value: object) -> None:
    assert same(round_trip(value), value)


DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES.split()], ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    tensor = (torch.arange(48, dtype=torch.uint8) % 2).view(dtype)
    for value in (tensor, tensor[:1].reshape(()), tensor[:0], tensor[::2]):
        back = round_trip(value)
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert bits_of(back) == bits_of(value)


def test_strides_are_kept_where_the_memory_is_dense() -> None:
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    transposed = torch.randn(3, 4).t()
    sliced = torch.randn(6, 4)[::2, 1:3]
    expanded = torch.randn(3, 1).expand(3, 4)
    values = [channels_last, transposed, sliced, expanded]
    back = round_trip(values)
    assert same(back, values)
    assert [t.stride() for t in back[:2]] == [t.stride() for t in values[:2]]
    assert all(t.is_contiguous() for t in back[2:])


def test_tied_tensors_are_written_once_and_come_back_tied() -> None:
    weight = torch.randn(4, 4)
    tree, tensors = encode({"a": weight, "b": weight, "view": weight.view(4, 4), "row": weight[0]}, "entry")
    assert sorted(tensors) == ["a", "row"]
    back = decode(tree, write_and_read(tensors), "entry")
    assert back["a"] is back["b"] is back["view"]
    assert same(back["row"], weight[0])


def test_views_with_lazy_signs() -> None:
    z = torch.complex(torch.randn(3), torch.randn(3))
    values = [z, z.conj(), z.conj().imag]
    assert values[2].is_neg()
    back = round_trip(values)
    assert all(torch.equal(a, b) for a, b in zip(back, values, strict=True))


def test_special_floats_ints_and_strings() -> None:
    payload = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    value = [
        math.inf,
        -math.inf,
        math.nan,
        payload,
        -0.0,
        5e-324,
        2**100,
        -(2**64),
        "\ud800\x00é",
        True,
        1,
        1.0,
    ]
    assert same(round_trip(value), value)


def test_collections_keep_their_types_and_the_order_of_keys() -> None:
    value = {
        "b": {"$tensor": "not a tensor"},
        "a": OrderedDict([(2, "x"), ("2", "y"), (None, "z")]),
        "counter": Counter({3: 2, 1: 1}),
        "sets": [{1, 2, 3}, frozenset({"a", (1, 2)}), set()],
        "empty": [{}, [], (), OrderedDict()],
    }
    assert same(round_trip(value), value)
    assert list(round_trip(value)) == list(value)


def test_numpy_arrays_and_scalars() -> None:
    value = [
        np.arange(6.0).reshape(2, 3).T,
        np.array(3, dtype=np.uint16),
        np.float64(0.1),
        np.bool_(True),
        np.float16(2.0),
        np.complex128(1j),
        np.empty((0, 2), dtype=np.int8),
    ]
    assert same(round_trip(value), value)


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    back = round_trip(state)
    assert same(back, state)
    assert back._metadata == state._metadata


def test_names_that_safetensors_could_not_hold() -> None:
    value = {"__metadata__": torch.ones(1), "\ud800": torch.zeros(2), "": torch.ones(3), "a/b": torch.ones(4)}
    value["a"] = {"b": torch.ones(5)}  # type: ignore[assignment]
    assert same(round_trip(value), value)


class Color(IntEnum):
    RED = 1


class Point(tuple):
    pass


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"a": [lambda: 0]}, r"state\['entry'\]\['a'\]\[0\] is a builtins.function"),
        (Color.RED, "is a .*Color"),
        (Point((1,)), "is a .*Point"),
        (defaultdict(int), "collections.defaultdict"),
        (torch.ones(2, 2).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "on meta"),
        (np.array(["a"]), "a numpy array of dtype"),
        (np.array([object()]), "a numpy array of dtype"),
        (np.ma.masked_array([1.0]), "MaskedArray, which is not a plain numpy array"),
        ({1: object()}, r"state\['entry'\]\[1\] is a builtins.object"),
    ],
)
def test_what_cannot_be_saved_is_named(value: object, what: str) -> None:
    with pytest.raises(CheckpointError, match=what) as caught:
        encode(value, "entry")
    assert "\n" not in str(caught.value)


def test_a_value_that_contains_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="'entry' is nested too deeply, or contains itself"):
        encode(value, "entry")


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "absent"},
        {"$tensor": ["x"]},
        {"$tensor": "x", "stride": [2**61]},
        {"$tensor": "x", "stride": "1"},
        {"$tensor": "x", "stride": [-1]},
        {"$tensor": "x", "dtype": "float99", "shape": [2]},
        {"$tensor": "x", "dtype": "complex128", "shape": [7]},
        {"$tensor": "x", "dtype": "int64"},
        {"$tensor": "x", "more": 1},
        {"$float": "zz"},
        {"$float": "00"},
        {"$float": 1},
        {"$complex": [1.0]},
        {"$bytes": "?"},
        {"$tuple": 3},
        {"$dict": [[[1], 2]]},
        {"$dict": [[1, 2], [True, 3]]},
        {"$dict": [[1]]},
        {"$set": [1, 1]},
        {"$ordered_dict": [["a", 1], ["a", 2]]},
        {"$ordered_dict": [], "more": 1},
        {"$tuple": [], "$set": []},
        {"$dtype": "nn"},
        {"$dtype": "load"},
        {"$device": "nowhere:x"},
        {"$size": ["a"]},
        {"$numpy": {"$bytes": ""}},
        {"$numpy": 3},
        {"$unknown": 1},
        {"a": {"$eval": "1"}},
    ],
    ids=str,
)
def test_trees_that_encode_nothing(tree: Any) -> None:
    with pytest.raises(CheckpointCorruptError, match="entry is altered: it encodes no value"):
        decode(tree, {"x": torch.ones(2, dtype=torch.uint8)}, "entry")


@given(
    st.recursive(
        st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "$tensor",
                        "$dict",
                        "$tuple",
                        "$set",
                        "$numpy",
                        "$size",
                        "$float",
                        "$device",
                        "$ordered_dict",
                        "metadata",
                        "stride",
                        "shape",
                        "dtype",
                        "a",
                    ]
                ),
                inner,
                max_size=2,
            )
        ),
        max_leaves=8,
    )
)
def test_any_json_decodes_or_is_called_altered(tree: Any) -> None:
    with contextlib.suppress(CheckpointCorruptError):
        decode(tree, {"x": torch.ones(2)}, "entry")


def header(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


OVERLAPPING = (
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
    '"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}'
)
GOOD = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


def test_a_good_header() -> None:
    assert read_from(header(GOOD, b"\0\0\x80\x3f"))["a"].tolist() == [1.0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0",
        (2**63).to_bytes(8, "little") + b"{}",
        (10**8 + 1).to_bytes(8, "little") + b"{}",
        header("[]"),
        header("nonsense"),
        header("{" * 50_000),
        header('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', bytes(4)),
        header(GOOD, bytes(3)),
        header(GOOD, bytes(5)),
        header(GOOD.replace("F32", "F31"), bytes(4)),
        header(GOOD.replace("[1]", "[2]"), bytes(4)),
        header(GOOD.replace("[1]", "[-1]"), bytes(4)),
        header(GOOD.replace("[1]", "[1.0]"), bytes(4)),
        header(GOOD.replace("[1]", "[true]"), bytes(4)),
        header(GOOD.replace("[1]", "[4611686018427387905]"), bytes(4)),
        header(GOOD.replace("[0,4]", "[1,5]"), bytes(5)),
        header(GOOD.replace("[0,4]", "[4,0]"), bytes(4)),
        header(GOOD.replace("[0,4]", "[0]"), bytes(4)),
        header(GOOD.replace("}}", ',"more":1}}'), bytes(4)),
        header('{"a":3}'),
        header(OVERLAPPING, bytes(3)),
        header('{"a":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}}', b"\x02"),
    ],
    ids=range(23),
)
def test_malformed_safetensors(data: bytes) -> None:
    with pytest.raises(CheckpointCorruptError, match="file"):
        read_from(data)


def test_only_wanted_tensors_are_kept() -> None:
    tensors = {name: torch.randn(5) for name in "abc"}
    assert set(write_and_read(tensors, {"b", "z"})) == {"b"}
