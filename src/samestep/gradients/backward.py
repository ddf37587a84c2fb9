"""When does a backward begin and end? Asked of the autograd engine, never guessed from forwards.

[Note: One backward]
The engine numbers its *graph tasks*; a hook can ask for the current one, and can queue a callback that
runs when that task is done. So the first hook that fires in a new task begins a backward, and the
callback ends it: in the same `loss.backward()`, whatever was used, however many forwards came before.

- Re-entrant checkpointing runs a task inside of a task. While the first task's callback is alive (it is
  owned by that task), firings in other tasks belong to the same backward. The hook on the wrapper's outputs
  fires before any parameter's, so that it is the outermost task which owns the callback.
- A backward that raises destroys its task without calling the callback: the weak reference to it dies, and
  the next forward or hook finds a backward that was *abandoned*.
- `torch.autograd.grad` runs tasks as well. The engine says of a parameter's node whether the task will
  execute it: "no" for all although the output depends on some means a gradient by something else (an
  input): none of our business. It refuses to answer for a parameter whose gradient is itself asked for.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.errors import GradientError

__all__ = ["BackwardWatch", "reaches_any"]

_current_task = torch._C._current_graph_task_id
_will_execute = torch._C._will_engine_execute_node


class _Kind(enum.Enum):
    """What a graph task computes, as far as the parameters are concerned."""

    BACKWARD = enum.auto()  # gradients are accumulated into parameters (or could have been: none was used)
    OTHER = enum.auto()  # the gradient by something else, such as an input
    OF_PARAMETERS = enum.auto()  # torch.autograd.grad by parameters: nothing is accumulated


class _End:
    """Owned by the graph task alone; called when it is done, dropped uncalled when it raised."""

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


class BackwardWatch:
    """Tells one listener when backwards that concern its parameters begin, end, or were abandoned.

    Args:
        nodes: the gradient accumulators of the parameters.
        begin: called first in each backward, inside of it.
        end: called last in each backward, inside of it.
        of_parameters: called when `torch.autograd.grad` is asked for gradients by parameters.
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        *,
        begin: Callable[[], None],
        end: Callable[[], None],
        of_parameters: Callable[[], None],
    ) -> None:
        self.task = -1  # the graph task of the last firing
        self.nested = False  # whether that one runs inside of the backward's own
        self._first_task = -1
        self._nodes = nodes
        self._begin = begin
        self._end = end
        self._of_parameters = of_parameters
        self._end_ref: weakref.ref[_End] | None = None

    @property
    def running(self) -> bool:
        """Whether a backward is under way."""
        return self._end_ref is not None and self._end_ref() is not None

    @property
    def abandoned(self) -> bool:
        """Whether the last backward raised before its end. `forget()` settles it."""
        return self._end_ref is not None and self._end_ref() is None

    def forget(self) -> None:
        """No backward is under way, nor was one abandoned."""
        self._end_ref = None
        self.task = self._first_task = -1
        self.nested = False

    def on_output(self, reaches_parameters: bool, _gradient: Tensor) -> None:
        """The hook on each output of a forward; `reaches_parameters`: it depends on some of them."""
        if _current_task() == self.task:
            return
        if self.running:
            self.enter()
            return
        kind = self._kind(reaches_parameters)
        if kind is _Kind.BACKWARD:
            self.enter()
        elif kind is _Kind.OF_PARAMETERS:
            self._of_parameters()

    def enter(self) -> None:
        """A hook fires in another graph task than the last one: a new backward, or one inside of it."""
        task = _current_task()
        if task < 0:
            raise GradientError("a gradient hook ran outside of a backward: call loss.backward() instead")
        self.task = task
        if self.running:
            self.nested = task != self._first_task
            return
        end = _End(self._finish)
        self._begin()  # while `abandoned` still tells of the one before
        self._first_task = self.task = task
        self.nested = False
        self._end_ref = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _finish(self) -> None:
        self.forget()
        self._end()

    def _kind(self, reaches_parameters: bool) -> _Kind:
        for node in self._nodes:
            try:
                if _will_execute(node):
                    return _Kind.BACKWARD
            except RuntimeError:  # "a leaf node ... we are currently running autograd.grad()"
                return _Kind.OF_PARAMETERS
        return _Kind.OTHER if reaches_parameters else _Kind.BACKWARD


def reaches_any(tensor: Tensor, nodes: frozenset[Any]) -> bool:
    """Whether `tensor` depends, as autograd sees it, on any of the accumulator `nodes`.

    It stops at the first one found, which as a rule is a few steps away.
    """
    start = tensor.grad_fn
    if start is None:
        return False
    seen = {start}
    frontier = [start]
    while frontier:
        found = []
        for node in frontier:
            for child, _ in node.next_functions:
                if child is None or child in seen:
                    continue
                if child in nodes:
                    return True
                seen.add(child)
                found.append(child)
        frontier = found
    return False
