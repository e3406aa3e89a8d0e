"""Tensors leave the device while the next batch is being computed.

A plain copy makes the host wait for everything that the device was told before. Here a stream of
its own copies into pinned memory, and the host waits only when it takes the tensor.
"""

import torch
from torch import Tensor


class Parcel:
    """A tensor on its way to the host; see :class:`Outbox`."""

    def __init__(self, tensor: Tensor, arrived: "torch.cuda.Event | None" = None) -> None:
        self._tensor, self._arrived = tensor, arrived

    def take(self) -> Tensor:
        """The tensor on the CPU; waits until it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor


class Outbox:
    """Sends tensors of a device to the host. On a CPU they are there already.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, tensor: Tensor) -> Parcel:
        """Begin to copy a tensor, which nobody changes afterwards."""
        if self._stream is None:
            return Parcel(tensor)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        tensor.record_stream(self._stream)  # its memory isn't given away before it was read
        return Parcel(pinned, arrived)
