"""What a GPU need not hold all the time, in CPU memory meanwhile: activations until backward, optimizer state between steps.

The numbers are the same with and without. On a CPU the bytes really move too, into buffers beside: no use, but so it is tested.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

SMALL_BYTES = 1 << 20  # an activation below that stays where it is: moving it costs more than it frees


def activations(small_bytes: int = SMALL_BYTES) -> AbstractContextManager[object]:
    """Within a forward pass: what the backward pass needs goes to CPU memory, but for parameters, which are held anyway."""

    def pack(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
        whose = tensor if tensor._base is None else tensor._base
        if isinstance(whose, nn.Parameter) or tensor.nbytes < small_bytes:
            return None, tensor
        return tensor.device, _buffer(tensor).copy_(tensor)

    def unpack(packed: tuple[torch.device | None, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor if device is None else tensor.to(device, non_blocking=True, copy=tensor.device == device)

    return saved_tensors_hooks(pack, unpack)


class Parking:
    """Tensors whose memory is given back while they are away. Of a tensor that is cut over processes, this one's part.

    `put` and `take` may be called of any tensors; those of a single number stay. What is away has its shape and no bytes.
    """

    def __init__(self) -> None:
        self._buffers = WeakTensorKeyDictionary()
        self._away = WeakTensorKeyDictionary()

    def put(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.dim() and tensor not in self._away:
                local = _local(tensor)
                if tensor not in self._buffers:
                    self._buffers[tensor] = _buffer(local)
                self._buffers[tensor].copy_(local)
                self._away[tensor] = True
                local.untyped_storage().resize_(0)

    def take(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor in self._away:
                local = _local(tensor)
                local.untyped_storage().resize_(int(local.storage_offset() + local.numel()) * local.element_size())
                local.copy_(self._buffers[tensor])
                del self._away[tensor]

    def one_by_one(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Each is there until the next is asked for."""
        for name, tensor in tensors:
            away = tensor in self._away
            self.take([tensor])
            yield name, tensor
            if away:
                self.put([tensor])


def _local(tensor: Tensor) -> Tensor:
    """Shares the memory; no gradient flows."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _buffer(like: Tensor) -> Tensor:
    """In CPU memory; pinned where it is for a GPU, or copies would go through a second buffer."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type == "cuda")
