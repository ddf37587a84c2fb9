from __future__ import annotations

import pytest

from samestep.launch.failure import lost_a_peer
from samestep.launch.rank import LastWord


def word(last_line: str, exception: str = "RuntimeError") -> LastWord:
    return LastWord(1, 0.0, exception, last_line, f"Traceback ...\n{last_line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7580. This is",
        "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:43430: Connection reset by peer",
        "CollectiveError: rank 0 (process 71): all_reduce number 5: rank 1 (process 72) has died",
        "CollectiveError: the group can no longer be used: rank 1 (process 72) has died",
        "GradientError: rank 0 of 2: synchronised backward 3 of model 1, bucket 0 (w), 1 of 1, was "
        "not reduced: [pair.cc:553] Connection closed by peer [rank 0: waits in ...; rank 1: has ended]",
        "GradientError: rank 0: 1 other rank(s) gave up in the middle of this backward (their",
        "GradientError: rank 1 raised inside of join(); its own error says why",
    ],
)
def test_a_rank_that_lost_another_is_not_the_cause(line: str) -> None:
    assert lost_a_peer(word(line))


@pytest.mark.parametrize(
    "line", ["ZeroDivisionError: division by zero", "RuntimeError: shape '[2]' is invalid for size 3"]
)
def test_one_that_failed_by_itself_is(line: str) -> None:
    assert not lost_a_peer(word(line))
    assert not lost_a_peer(None)
    assert not lost_a_peer(word("SystemExit: Connection closed by peer", "SystemExit"))
