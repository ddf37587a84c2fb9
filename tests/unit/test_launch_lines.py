"""Bytes in any pieces -> lines and progress messages; options and reports, which are pure too."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.launch.failure import Failure, in_order, report, signal_name
from samestep.launch.lines import Line, LineCutter
from samestep.launch.memory import parse_count
from samestep.observe import messages
from samestep.observe.messages import BarState

texts = st.text(max_size=30)
states = st.builds(
    BarState,
    bar=texts,
    description=st.text(st.characters(categories=["L", "N", "P"]), max_size=50),
    done=st.integers(0, 2**40),
    total=st.none() | st.integers(0, 2**40),
    elapsed_s=st.floats(0, 1e9),
    figures=st.dictionaries(st.from_regex("[a-z]{1,9}", fullmatch=True), st.just("0.5"), max_size=4),
    finished=st.booleans(),
)
# Pieces of a stream that are likely to meet at an awkward place.
pieces = st.lists(
    st.sampled_from(
        [b"\n", b"\r", b"\r\n", b"a", b"\x1b", b"\x1b\\", messages.START, b"\xff\xfe", b"{}", b""]
    )
    | st.binary(max_size=20)
    | st.builds(messages.encode, states)
)


def cut(stream: bytes, sizes: list[int]) -> list[Line | BarState]:
    cutter = LineCutter()
    items: list[Line | BarState] = []
    for size in sizes:
        items += cutter.feed(stream[:size])
        stream = stream[size:]
    items += cutter.feed(stream)
    items += cutter.flush()
    return items


@settings(deadline=None)  # the machine may be busy
@given(pieces, st.lists(st.integers(0, 40)))
def test_where_the_stream_is_split_makes_no_difference(parts: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(parts)
    assert cut(stream, sizes) == cut(stream, []) == cut(stream, [1] * len(stream))


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.binary(max_size=50).filter(lambda b: not {10, 13, 27} & set(b))))
def test_lines_come_back_as_they_were(lines: list[bytes]) -> None:
    expected = [Line(line) for line in lines]
    assert cut(b"".join(line + b"\n" for line in lines), []) == expected
    assert cut(b"".join(line + b"\r\n" for line in lines), []) == expected


@settings(deadline=None)  # the machine may be busy
@given(st.lists(states), st.binary(max_size=5).filter(lambda b: not {10, 13, 27} & set(b)))
def test_messages_are_taken_out_of_the_line_they_stand_in(sent: list[BarState], text: bytes) -> None:
    stream = text.join([b"", *map(messages.encode, sent), b"\n"])
    items = cut(stream, [7, 7, 7])
    assert [item for item in items if isinstance(item, BarState)] == sent
    assert [item for item in items if isinstance(item, Line)] == [Line(text * (len(sent) + 1))]


def test_carriage_returns() -> None:
    assert cut(b"1 %\r2 %\r\r\nend\r", []) == [
        Line(b"1 %", True),
        Line(b"2 %", True),
        Line(b""),
        Line(b"end"),
    ]


@settings(deadline=None)  # the machine may be busy
@given(
    st.binary()
    | st.builds(
        lambda value: json.dumps(value).encode(),
        st.recursive(
            st.none() | st.integers() | st.floats() | texts,
            lambda inner: st.dictionaries(
                st.sampled_from(["bar", "done", "total", "figures", "elapsed_s", "description", "finished"]),
                inner,
            ),
        ),
    )
)
def test_whatever_a_message_holds_it_is_a_state_or_nothing(payload: bytes) -> None:
    state = messages.decode(payload)
    if state is not None:
        assert state.done >= 0
        shown = state.description + "".join([*state.figures, *state.figures.values()])
        assert shown.isprintable()


@settings(deadline=None)  # the machine may be busy
@given(states)
def test_a_long_message_still_fits_one_write(state: BarState) -> None:
    huge = BarState(
        state.bar, "\U0001f600" * 1000, state.done, figures={"x" * 99 + str(i): "y" * 999 for i in range(50)}
    )
    for one in (state, huge):
        assert len(messages.encode(one)) <= messages.MAX_BYTES


def failure(rank: int, **fields: object) -> Failure:
    return Failure(**{"rank": rank, "host": "h", "pid": 1, "exit_code": 1, "time_s": float(rank), **fields})  # type: ignore[arg-type]


def test_order_of_failures() -> None:
    killed_later = failure(5, exit_code=-9, time_s=2.1)
    raised = failure(2, exception="ValueError", time_s=2.0)
    lost = failure(1, exception="RuntimeError", lost_a_peer=True, time_s=0.5)
    ended = failure(0, ended_by_launcher=True, exit_code=-15)
    # Death without a word is noticed late: within a quarter of a second it goes before an exception.
    assert in_order([ended, lost, raised, killed_later]) == [killed_later, raised, lost, ended]


def test_report_of_a_death_for_memory() -> None:
    first = failure(1, exit_code=-9, killed_for_memory="oom_kill in memory.events grew")
    lines = report(
        [first, failure(0, ended_by_launcher=True)], world_size=2, what_next="restart 1 of 3"
    ).splitlines()
    assert lines[0].startswith("rank 1 of 2 failed: killed by the kernel, probably out of memory")
    assert lines[1:] == ["rank 0: ended by the launcher", "restart 1 of 3"]


@settings(deadline=None)  # the machine may be busy
@given(st.integers(0, 1000))
def test_failures_pass_between_hosts(rank: int) -> None:
    sent = failure(rank, last_line="x: \u20ac\n\udc80")
    assert Failure.from_json(sent.to_json()) == sent


def test_exit_status_and_signal_names() -> None:
    assert failure(0, exit_code=-11).exit_status == 139
    assert failure(0, exit_code=77).exit_status == 77
    assert (signal_name(9), signal_name(250)) == ("SIGKILL", "signal 250")


def test_counters_of_the_kernel() -> None:
    assert parse_count("low 0\noom 3\noom_kill 2\noom_group_kill 0\n") == 2
    assert parse_count("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n") == 7
    assert parse_count("pgfault 1\n") is None
