"""What we send is what vLLM's own receiver takes: its real packing on both sides, over a broadcast of threads instead of NCCL."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from termrsi import weights
from termrsi.actors import nccl_channel
from termrsi.actors.nccl_channel import NUM_BUFFERS, Announced

pytestmark = pytest.mark.engine  # vLLM is imported; no engine starts


class Broadcast:
    """`broadcast` of vLLM's communicator, for one sender and one receiver."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=30)
        self._sent: torch.Tensor | None = None
        self.sizes: list[int] = []

    def of(self, rank: int) -> SimpleNamespace:
        def broadcast(tensor: torch.Tensor, src: int, stream: object = None) -> None:
            assert src == 0
            if rank == 0:
                self._sent = tensor
                self.sizes.append(tensor.numel())
            self._barrier.wait()
            assert self._sent is not None
            assert self._sent.shape == tensor.shape
            tensor.copy_(self._sent)
            self._barrier.wait()

        return SimpleNamespace(broadcast=broadcast)


@pytest.mark.filterwarnings("ignore:Tensor .* exceeds buffer_size_bytes:UserWarning")  # it goes alone
@pytest.mark.parametrize("bucket", [1, 100, 10_000])
def test_vllms_receiver_takes_what_we_send(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    state = {f"w{i}": torch.randn(i + 1, 7).bfloat16() for i in range(6)} | {"b": torch.randn(3).bfloat16()}
    info = Announced(weights.facts_of(weights.pack(state)), {}).info()
    told = zip(info["names"], zip(info["shapes"], info["dtype_names"], strict=True), strict=True)  # type: ignore[call-overload]
    found: dict[str, torch.Tensor] = {}
    wire = Broadcast()

    def receive() -> None:
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=((name, (shape, getattr(torch, dtype))) for name, (shape, dtype) in told),
            group=wire.of(1),
            src=0,
            post_unpack_func=lambda pairs: found.update({name: tensor.clone() for name, tensor in pairs}),
            buffer_size_bytes=bucket,
            num_buffers=NUM_BUFFERS,
            device="cpu",
        )

    receiver = threading.Thread(target=receive)
    receiver.start()
    nccl_channel.send(wire.of(0), iter(state.items()), bucket)
    receiver.join(30)
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert sum(wire.sizes) == sum(tensor.nbytes for tensor in state.values())
    assert len(wire.sizes) == {1: 7, 100: 3, 10_000: 1}[bucket]


def test_the_fields_are_those_of_vllms_records() -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    told = Announced(weights.facts_of(weights.pack({"a": torch.zeros(2, 3)})), {}).info()
    update = NCCLWeightTransferUpdateInfo(**told)  # type: ignore[arg-type]
    assert (update.names, update.dtype_names, update.shapes) == (["a"], ["float32"], [[2, 3]])
    info = nccl_channel.join_info("host", 9, rank_offset=3, world_size=5, bucket_bytes=64)
    joined = NCCLWeightTransferInitInfo(**info)  # type: ignore[arg-type]
    assert (joined.master_address, joined.master_port, joined.rank_offset, joined.world_size) == ("host", 9, 3, 5)
    assert (joined.packed, joined.packed_buffer_size_bytes, joined.packed_num_buffers) == (True, 64, NUM_BUFFERS)
