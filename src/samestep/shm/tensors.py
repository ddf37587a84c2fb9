"""Tensors as the collectives see them: flat, dense, on the CPU; and what to copy back afterwards."""

from __future__ import annotations

import torch

from samestep.errors import CollectiveError
from samestep.shm.operation import Progress

__all__ = [
    "Back",
    "copying_back",
    "dense",
    "densely",
    "describe",
    "dtype_name",
    "is_plain",
    "readable",
    "writable",
]

Back = list[tuple[torch.Tensor, torch.Tensor]]  # (what the caller passed, what stood in for it)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its elements, one after the other, on the CPU."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is plain, else a plain copy.

    Raises:
        CollectiveError: it is sparse or not on the CPU.
    """
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise CollectiveError(
            f'backend="shm" communicates dense CPU tensors, not {describe(tensor)} with layout '
            f'{tensor.layout} on {tensor.device}: call .to_dense() or .cpu(), or use backend="gloo" or "nccl"'
        )
    tensor = tensor.detach()
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def densely(output: torch.Tensor, back: Back) -> torch.Tensor:
    """A flat tensor to write `output` into: a view if it is plain, else one that `back` says to copy back."""
    output = output.detach()
    standing = dense(output)
    if standing.data_ptr() != output.data_ptr() or not is_plain(output):
        back.append((output, standing))
    return standing.view(-1)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor`."""
    return dense(tensor).view(-1).view(torch.uint8)


def writable(output: torch.Tensor, back: Back) -> torch.Tensor:
    """The bytes to write `output` into, see `densely`."""
    return densely(output, back).view(torch.uint8)


def copying_back(progress: Progress, back: Back) -> Progress:
    """`progress`, and at its end the outputs become what stood in for them."""
    yield from progress
    for output, standing in back:
        output.copy_(standing)


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of its dtype, "float32" for example."""
    return str(tensor.dtype).removeprefix("torch.")


def describe(tensor: torch.Tensor) -> str:
    """Dtype and shape, "float32[3, 4]" for example."""
    return f"{dtype_name(tensor)}{list(tensor.shape)}"
