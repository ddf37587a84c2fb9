"""Runs on several numbers of processes, side by side: which of them were the same."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from samestep.testing import process_ranks

from .training import NUM_STEPS, Case, play, play_part

__all__ = ["changing_digests", "digests_of"]

Digests = dict[Case, list[str]]
_TIMEOUT_S = 240.0


def digests_of(todo: Sequence[Case], num_ranks: int, backend: str) -> Digests:
    """After each step of each case; all ranks' are found equal to rank 0's."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = process_ranks(
            play, num_ranks, backend, f"file://{folder}/store", list(todo), timeout=_TIMEOUT_S
        )
    return _agreed(ranks)


def changing_digests(todo: Sequence[Case], nums_ranks: Sequence[int], backend: str) -> Digests:
    """After each step; each is played by another number of processes, from checkpoint to checkpoint."""
    digests: Digests = {case: [] for case in todo}
    assert len(nums_ranks) == NUM_STEPS
    with tempfile.TemporaryDirectory() as folder:
        for step, num_ranks in enumerate(nums_ranks):
            address = f"file://{folder}/store{step}"
            ranks = process_ranks(
                play_part, num_ranks, backend, address, list(todo), folder, step, step + 1, timeout=_TIMEOUT_S
            )
            for case, found in _agreed(ranks).items():
                digests[case] += found
    return digests


def _agreed(ranks: Sequence[Digests]) -> Digests:
    for other in ranks[1:]:
        for case, digests in ranks[0].items():
            # After a plain all-reduce, too, all ranks of one run hold the same bits.
            assert other[case] == digests, f"{case}: the ranks of one run differ"
    return ranks[0]
