from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import GradientError
from samestep.gradients.buckets import BucketPlan, ParameterInfo, plan_buckets

_MIB = 1024 * 1024


def parameter(name: str, numel: int, dtype: str = "float32", **more: object) -> ParameterInfo:
    item_bytes = {"float32": 4, "float64": 8, "bfloat16": 2}[dtype]
    return replace(ParameterInfo(name, (numel,), (1,), dtype, "cpu", item_bytes), **more)


parameters = st.lists(
    st.builds(
        parameter,
        st.text("abc.", min_size=1, max_size=4),
        st.integers(0, 600_000),
        st.sampled_from(["float32", "float64", "bfloat16"]),
        sparse=st.booleans(),
        place=st.integers(0, 1),
    ),
    min_size=1,
    max_size=30,
)


@given(parameters, st.one_of(st.none(), st.floats(1e-6, 8)))
def test_every_parameter_travels_once_with_its_own_kind(
    infos: list[ParameterInfo], cap_mb: float | None
) -> None:
    plan = plan_buckets(infos, cap_mb=cap_mb)
    members = [i for bucket in plan.buckets for i in bucket]
    assert sorted([*members, *plan.sparse]) == list(range(len(infos)))
    for b, bucket in enumerate(plan.buckets):
        kinds = {(infos[i].dtype, infos[i].device, infos[i].place) for i in bucket}
        assert len(kinds) == 1
        assert list(bucket) == sorted(bucket, reverse=True)
        cap = (cap_mb if cap_mb is not None else (1 if b == 0 else 25)) * _MIB
        without_last = plan.bucket_bytes(b) - infos[bucket[-1]].bytes
        assert without_last < cap  # the parameter that fills a bucket closes it
    assert plan == plan_buckets(infos, cap_mb=cap_mb)
    assert plan == BucketPlan.from_json(json.loads(json.dumps(plan.to_json())))


def test_the_first_bucket_is_small_and_holds_the_last_layers() -> None:
    plan = plan_buckets([parameter(f"layer{i}", _MIB // 8) for i in range(20)])  # 0.5 MiB each
    assert plan.names(0) == ["layer19", "layer18"]
    assert len(plan.buckets) == 2


def test_a_parameter_as_large_as_a_bucket_travels_alone() -> None:
    infos = [parameter("huge", 8 * _MIB), parameter("small", 10), parameter("head", 10)]
    plan = plan_buckets(infos, cap_mb=25)
    assert [plan.names(b) for b in range(2)] == [["head", "small"], ["huge"]]


def test_a_list_of_caps_holds_its_last_for_the_rest() -> None:
    infos = [parameter(f"p{i}", _MIB // 4) for i in range(8)]  # 1 MiB each
    plan = plan_buckets(infos, caps_mb=[1, 2])
    assert [len(bucket) for bucket in plan.buckets] == [1, 2, 2, 2, 1]


def test_a_plan_prints_its_buckets() -> None:
    text = str(
        plan_buckets([parameter("word", 8, sparse=True), parameter("a", _MIB // 4), parameter("b", 3)])
    )
    assert text.splitlines() == [
        "2 buckets, launched in this order:",
        "    0      0.000 MiB  float32   cpu       1 parameters  b",
        "    1      1.000 MiB  float32   cpu       1 parameters  a",
        "    -  sparse: word",
    ]


@pytest.mark.parametrize("caps", [{"cap_mb": 0}, {"cap_mb": -1.0}, {"caps_mb": [1, 0]}, {"caps_mb": []}])
def test_sizes_that_cannot_be(caps: dict[str, object]) -> None:
    with pytest.raises(GradientError, match="MiB"):
        plan_buckets([parameter("p", 1)], **caps)
