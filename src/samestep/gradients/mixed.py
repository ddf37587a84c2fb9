"""Mixed precision as torch's wrapper offers it: cast copies of the parameters for forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.futures import Future

from samestep.gradients.hooks import GradBucket
from samestep.gradients.outputs import map_tensors

__all__ = ["MixedPrecision"]


class MixedPrecision:
    """Runs a module with parameters in a smaller dtype; its own stay in theirs, and so do the gradients.

    The casts are part of the graph, so autograd itself brings gradients back to the parameters' dtype, and
    optimizers and checkpoints see full precision alone.

    Args:
        policy: `param_dtype`, `reduce_dtype`, `buffer_dtype`, each a dtype or None, as torch's
            `_MixedPrecision`; `cast_forward_inputs` is optional.
        module: whose buffers are cast now.
        ignored: names of parameters and buffers to leave alone.
    """

    def __init__(self, policy: Any, module: nn.Module, ignored: set[str]) -> None:
        self.param_dtype: torch.dtype | None = policy.param_dtype
        self.reduce_dtype: torch.dtype | None = policy.reduce_dtype
        self._cast_inputs: bool = getattr(policy, "cast_forward_inputs", True)
        self._module = module
        self._ignored = ignored
        for name, parameter in module.named_parameters():
            if name not in ignored and self.param_dtype is not None:
                # torch's names; its copies, too, have no memory of their own outside of a step.
                parameter._fp_param = parameter.data  # type: ignore[attr-defined]
                parameter._mp_param = parameter.new_empty(0, dtype=self.param_dtype)  # type: ignore[attr-defined]
        if policy.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(policy.buffer_dtype)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module returns for these inputs, computed in `param_dtype`."""
        dtype = self.param_dtype
        if dtype is None:
            return self._module(*inputs, **kwargs)

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        if self._cast_inputs:
            inputs, kwargs = map_tensors(cast, inputs), map_tensors(cast, kwargs)
        small = {n: cast(p) for n, p in self._module.named_parameters() if n not in self._ignored}
        return functional_call(self._module, small, inputs, kwargs, tie_weights=True)

    def reduce_hook(self, group: Any, bucket: GradBucket) -> Future[Tensor]:
        """A communication hook that sends gradients in `reduce_dtype`."""
        buffer = bucket.buffer()
        small = buffer.to(self.reduce_dtype).div_(group.size())
        future = group.allreduce([small]).get_future()

        def grow(done: Future[Any]) -> Tensor:
            value = done.value()
            return buffer.copy_(value[0] if isinstance(value, (list, tuple)) else value)

        return future.then(grow)  # type: ignore[no-any-return]
