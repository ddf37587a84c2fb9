"""SyncBatchNorm: batch normalisation over the batches of all ranks, on every device."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from samestep import collectives
from samestep.errors import NormalizationError
from samestep.gradients.compiling import untraced
from samestep.gradients.rounds import CollectiveLayer
from samestep.nn.exchange import Exchange, Intent, Phase, Rows, row_bytes
from samestep.nn.moments import Moments, measure, wide_dtype
from samestep.nn.normalize import Backward, intent_of, normalize
from samestep.process_group import default_group
from samestep.virtual import virtual_ranks

__all__ = ["BatchNorm", "SyncBatchNorm"]


class BatchNorm(_BatchNorm):
    """torch's BatchNorm for an input of any number of dimensions, (N, C) or (N, C, ...).

    What `SyncBatchNorm.revert` makes of a layer that was not converted from another.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # torch's name and argument
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class SyncBatchNorm(BatchNorm, CollectiveLayer):
    """Batch normalisation with the mean and variance of the global batch: that of all ranks together.

    Takes the place of `torch.nn.SyncBatchNorm`, whose arguments, parameters and buffers it has; it runs on
    CPUs too. Batches may differ in size between ranks, and be empty on some.

    Ranks: all of the group run the same layers in the same order. A forward in training mode is one
    collective, and so is its backward, if the input of any rank needs a gradient. In eval mode, without a
    process group and in a group of one it communicates nothing. As with torch's class, each of a rank's
    parameters must be used by all ranks or by none: a bucket of gradients goes out when it is complete, and
    its place among these collectives must be the same on all ranks.

    Shapes: input (N, C) or (N, C, ...), of float64, float32, bfloat16 or float16; output alike, in the same
    memory format. Statistics are measured in float32 at least, and combined in float64 along the tree: they
    are the same bits on all ranks.

    Args:
        num_features: C.
        eps: is added to the variance.
        momentum: what the newest batch counts for in the running statistics; None: their plain average.
        affine: whether there are `weight` and `bias`.
        track_running_stats: whether to keep running statistics for eval mode.
        process_group: the ranks; default: the world. A copy made by pickle forgets it.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: False leaves out the bias alone.

    Raises:
        NormalizationError: training with one value per channel on all ranks together, or a virtual rank
            that must share its process with others.
    """

    process_group: dist.ProcessGroup | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        options: dict[str, Any] = {} if bias else {"bias": False}  # older versions of torch have no such
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype, **options
        )
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """`input` normalised."""
        return self._in_training(input) if self.training else super().forward(input)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """`module` with every BatchNorm in it turned into a `SyncBatchNorm`, torch's own included.

        Parameters, buffers and hooks are kept as they are.

        Returns:
            `module`, or the new layer if it is a BatchNorm itself.

        Raises:
            NormalizationError: a lazy BatchNorm has not seen its first batch.
        """

        def convert(layer: _BatchNorm) -> _BatchNorm:
            if any(nn.parameter.is_lazy(t) for t in (layer.weight, layer.running_mean) if t is not None):
                raise NormalizationError(
                    f"{type(layer).__name__} does not know its number of features yet: run one batch through "
                    "the model before it is converted"
                )
            plain = getattr(layer, "_plain_class", type(layer))
            is_plain = not isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm))
            return _recast(
                layer,
                cls,
                process_group=process_group,
                _plain_class=plain if is_plain or hasattr(layer, "_plain_class") else BatchNorm,
            )

        return _replace(module, _BatchNorm, convert)

    @classmethod
    def revert(cls, module: nn.Module) -> nn.Module:
        """`module` with every SyncBatchNorm in it turned back into what it was before: the way back.

        A layer that was made as a SyncBatchNorm becomes a `samestep.nn.BatchNorm`.

        Returns:
            `module`, or the new layer if it is a SyncBatchNorm itself.
        """

        def revert(layer: Any) -> _BatchNorm:
            return _recast(layer, getattr(layer, "_plain_class", BatchNorm))

        return _replace(module, (SyncBatchNorm, nn.SyncBatchNorm), revert)

    # Training

    @untraced
    def _in_training(self, batch: Tensor) -> Tensor:
        group = self.collective_group()
        if group is None:
            return super().forward(batch)
        self._check(batch, group)
        exchange = self._exchange(group, batch)
        intent = intent_of(batch)
        with torch.no_grad():
            count, mean, square_sum = measure(batch)
            rows = exchange.rows(Phase.FORWARD, (mean, square_sum), count=count, intent=intent)
            whole = rows.moments()
            if count <= 1:
                self._check_whole(batch, sum(header[1] for header in rows.headers))
            self._track(whole)
        return normalize(
            batch,
            self.weight,
            self.bias,
            statistics=(whole.count, whole.mean, whole.variance),
            eps=self.eps,
            backward=_agreed(exchange, rows, intent),
        )

    def _exchange(self, group: dist.ProcessGroup, batch: Tensor) -> Exchange:
        return Exchange(
            partial(self._all_gather, group),
            wire=collectives.wire_device(batch.device, group),
            device=batch.device,
            dtype=wide_dtype(batch.dtype, batch.device),
        )

    def _all_gather(self, group: dist.ProcessGroup, row: Tensor) -> list[Tensor]:
        if self.rounds is not None:
            return self.rounds.all_gather(self, row)
        return collectives.all_gather(row, group)

    def _track(self, whole: Moments) -> None:
        """The running statistics take in a batch; one of no values leaves them as they are."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        newest = (self.running_mean, whole.mean), (self.running_var, whole.unbiased_variance)
        for running, new in newest:
            moved = (1.0 - share) * running.to(new.dtype) + share * new
            running.copy_(torch.where(whole.count > 0, moved, running.to(new.dtype)))

    def _check(self, batch: Tensor, group: dist.ProcessGroup) -> None:
        self._check_input_dim(batch)
        if batch.size(1) != self.num_features or not self.num_features:
            raise NormalizationError(
                f"SyncBatchNorm expected {self.num_features} channels in the second dimension, 1 at least; "
                f"the input's shape is {tuple(batch.shape)}"
            )
        virtual = virtual_ranks(group)
        if virtual.virtual_size != group.size():
            raise NormalizationError(
                f"SyncBatchNorm needs all virtual ranks at the same time, but {virtual.virtual_size} are "
                f"played by {group.size()} processes: start {virtual.virtual_size}, or let each virtual rank "
                "normalise its own batch (SyncBatchNorm.revert)"
            )

    def _check_whole(self, batch: Tensor, total: int) -> None:
        if total == 1:
            raise NormalizationError(
                "Expected more than 1 value per channel when training, got input size "
                f"{tuple(batch.shape)}, and all ranks together have 1"
            )

    # Inside of a join block

    def round_bytes(self) -> int:
        return row_bytes(self.num_features)

    def collective_group(self) -> dist.ProcessGroup | None:
        """The ranks whose batches are normalised together; None: this one's alone."""
        group: Any = self.process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = default_group()
        if not isinstance(group, dist.ProcessGroup) or group.size() == 1:  # torch has an object for no member
            return None
        return group

    @torch.no_grad()
    def follow(self, rows: list[Tensor]) -> None:
        device = self._device()
        dtype = wide_dtype(torch.float32, device)
        found = Rows(rows, self.num_features, dtype, device)
        if any(header[0] == Phase.FORWARD for header in found.headers):
            self._track(found.moments())

    def _device(self) -> torch.device:
        tensors = [self.running_mean, self.weight]
        return next((t.device for t in tensors if t is not None), torch.device("cpu"))

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "process_group": None}
        state.pop("rounds", None)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        twin.process_group = self.process_group
        return twin


def _agreed(exchange: Exchange, rows: Rows, intent: Intent) -> Backward:
    """What the ranks do in backward. An accelerator is asked only if this rank cannot tell by itself."""
    if "headers" in rows.__dict__ or intent is Intent.NEEDS_NOTHING:
        anyone = bool(rows.ranks_that(Intent.NEEDS_GRADIENT))
        return Backward(exchange, anyone, tuple(rows.ranks_that(Intent.NO_BACKWARD)))
    return Backward(exchange, intent is Intent.NEEDS_GRADIENT, ())


def _recast(layer: _BatchNorm, kind: type[_BatchNorm], **attributes: Any) -> _BatchNorm:
    """`layer` as a `kind`, with the same parameters, buffers, hooks and other attributes."""
    new = kind.__new__(kind)
    state = {name: value for name, value in layer.__dict__.items() if name not in _OURS}
    tables = {name: value.copy() for name, value in state.items() if isinstance(value, (dict, set))}
    new.__dict__.update(state, **tables)
    new.__dict__.update(attributes)
    return new


_OURS = ("process_group", "rounds", "_plain_class")


def _replace(module: nn.Module, kind: Any, new: Any) -> nn.Module:
    """`module` with `new(layer)` for every `kind` in it; a layer in several places stays one layer."""
    made: dict[int, nn.Module] = {}

    def replaced(part: nn.Module) -> nn.Module:
        if id(part) not in made:
            made[id(part)] = new(part) if isinstance(part, kind) else part
            for name, child in part._modules.items():
                if child is not None:
                    made[id(part)]._modules[name] = replaced(child)
        return made[id(part)]

    return replaced(module)
