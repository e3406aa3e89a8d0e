"""Tensors leave the device while it goes on computing.

A plain copy makes the host wait for everything that the device was told before. Here copies go to
pinned memory, and the host waits only when it takes the tensor.
"""

import torch
from torch import Tensor


class HostCopy:
    """A tensor on its way to the host; see :func:`start_copy`."""

    def __init__(self, tensor: Tensor, arrived: "torch.cuda.Event | None" = None) -> None:
        self._tensor, self._arrived = tensor, arrived

    def wait(self) -> Tensor:
        """The tensor on the CPU; waits until it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor


def start_copy(tensor: Tensor) -> HostCopy:
    """Begin to copy a tensor, in the order of what its device was told: it may be changed
    afterwards."""
    if tensor.device.type != "cuda":
        return HostCopy(tensor.clone())
    with torch.cuda.device_of(tensor):
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
    return HostCopy(pinned, arrived)


class CopyStream:
    """Sends large tensors of a device, besides what it computes. On a CPU they are there already.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, tensor: Tensor) -> HostCopy:
        """Begin to copy a tensor, which nobody changes afterwards."""
        if self._stream is None:
            return HostCopy(tensor)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy = start_copy(tensor)
        tensor.record_stream(self._stream)  # its memory isn't given away before it was read
        return copy


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; a GPU fetches it when it gets there, and nobody waits."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
