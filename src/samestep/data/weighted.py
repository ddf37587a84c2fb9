"""`WeightedSampler`: samples drawn in proportion to their weights, shared out among the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from samestep.data.orders import Weighted
from samestep.data.sampler import DistributedSampler, Mode
from samestep.errors import DataError

__all__ = ["WeightedSampler"]


class WeightedSampler(DistributedSampler):
    """This rank's share of `num_samples` indices, each drawn with a probability in proportion to its weight.

    What torch's `WeightedRandomSampler` is on one process, on all of them: the draws of an epoch are a
    function of (seed, epoch, position), so the ranks share one sequence of draws instead of each having its
    own. Modes, epochs and resuming are `DistributedSampler`'s. Give it to torch's `DataLoader`, or to ours
    as `sampler=`, which then shares out the draws by itself.

    Ranks: each makes its own, with equal arguments but `rank`. Nothing here communicates.

    Memory: 8 bytes per weight; without replacement 8 more.

    Args:
        weights: one per sample of the data set, at least 0; they need not sum to 1.
        num_samples: draws of all ranks together in an epoch. Default: as many as there are weights; without
            replacement, as many as are above 0.
        replacement: False draws no sample twice in an epoch. Each rank then makes a draw for every weight at
            the start of an epoch; with replacement only for its own share.
        num_replicas: as for `DistributedSampler`, and so the rest.

    Raises:
        DataError: a weight is negative or no number; all are 0; more draws without replacement than there
            are weights above 0.
    """

    def __init__(
        self,
        weights: Sequence[float] | torch.Tensor,
        num_samples: int | None = None,
        replacement: bool = True,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        mode: Mode | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        orders = Weighted(weights, num_samples, replacement=replacement, seed=seed)
        draws = range(orders.length)
        super().__init__(draws, num_replicas, rank, seed=seed, mode=mode, process_group=process_group)
        self.replacement = replacement
        self.num_weights = orders.weights.size
        self._orders = orders

    def state_dict(self) -> dict[str, Any]:
        """As `DistributedSampler.state_dict`."""
        return super().state_dict() | self._orders.facts()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `DistributedSampler.load_state_dict`; the weights must be equal too."""
        own = self._orders.facts()
        for key, value in own.items():
            if isinstance(state, Mapping) and state.get(key, value) != value:
                raise DataError(
                    f"the sampler's saved state has {key}={state[key]!r}, this one {key}={value!r}: its "
                    "draws are others; give the weights and options of the run that was saved"
                )
        super().load_state_dict(state)
