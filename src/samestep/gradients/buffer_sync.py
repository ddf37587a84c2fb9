"""Buffers (BatchNorm's running statistics): rank 0's go to all, in training steps and on demand only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from samestep.gradients.replicas import broadcast_tensors

__all__ = ["BufferHook", "BufferSync"]

BufferHook = Callable[[Any, dict[str, Tensor]], Any]


class BufferSync:
    """Sends one rank's buffers to all, at most once between two synchronised backwards.

    Once, because further forwards before the backward must not touch what autograd has saved; and never
    in eval or without gradients, so that rank 0 may validate alone.

    Args:
        module: whose buffers.
        ignored: names of buffers to leave alone.
        group: the ranks.
        each_step: whether training steps send them at all.
    """

    def __init__(
        self, module: nn.Module, ignored: set[str], group: dist.ProcessGroup, *, each_step: bool
    ) -> None:
        self.each_step = each_step
        self._module = module
        self._ignored = ignored
        self._group = group
        self._due = True
        self._hook: tuple[Any, BufferHook, bool] | None = None
        self._futures: list[Any] = []

    def named_buffers(self) -> dict[str, Tensor]:
        """The buffers that are kept the same, by name."""
        return {n: b for n, b in self._module.named_buffers() if n not in self._ignored}

    def set_hook(self, state: Any, hook: BufferHook, *, after_forward: bool) -> None:
        """`hook(state, named_buffers)` replaces the broadcast; its futures are waited for in backward."""
        self._hook = (state, hook, after_forward)

    def before_forward(self, *, src: int = 0) -> None:
        """A training step begins: send the buffers if they are due.

        Ranks: all, or those in a join block from `main_hook`.
        """
        if not self.each_step:
            return
        if self._hook is not None:
            if not self._hook[2]:
                self._call_hook()
        elif self._due:
            self._due = False
            self.now(src=src)

    def after_forward(self) -> None:
        """The forward of a training step is over: a hook may want the buffers now."""
        if self.each_step and self._hook is not None and self._hook[2]:
            self._call_hook()

    def after_backward(self) -> None:
        """The step's gradients are synchronised: the next training forward sends the buffers again."""
        self._due = True
        for future in self._futures:
            future.wait()
        self._futures.clear()

    def now(self, *, src: int = 0) -> None:
        """Every rank holds rank `src`'s buffers.

        Ranks: all.
        """
        broadcast_tensors(self.named_buffers().values(), self._group, src=src)

    def _call_hook(self) -> None:
        assert self._hook is not None
        state, hook, _ = self._hook
        self._futures += hook(state, self.named_buffers()) or []
