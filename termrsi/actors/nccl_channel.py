"""Weights from GPU to GPU by vLLM's weight-transfer engine (backend "nccl", vLLM 0.32). No GPU has ever run this: see the tests.

Learner and engines form one NCCL group: the learner's first process is rank 0, the workers of the engines follow in order. A
version is announced by the learner (names, types, shapes, samples), and sent when the engines' client wants it: every engine stops
and begins an update, each is told what comes and waits for it, then the learner sends, bucket by bucket, while they receive; then
each ends the update and proves samples. All wait for the slowest, at most `limit_s`. Everything is sent each time; a learner that
has moved on cannot send an older version.

An engine that came back is not in the group: all meet again, and it is given the present version then, or with the next one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from termrsi.actors.calls import first_line
from termrsi.errors import ConfigError, EngineError, WeightsError
from termrsi.records import WeightsVersion
from termrsi.weights import Facts

NUM_BUFFERS = 2  # of `bucket_bytes`, on either side: one is filled while the other is sent
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announced:
    """What will be sent: facts in order, and `weights.sample_digest` of each at this version."""

    facts: Facts
    samples: dict[str, str]

    def info(self) -> dict[str, object]:
        """As vLLM's NCCLWeightTransferUpdateInfo wants it."""
        facts = self.facts.values()
        return {
            "names": list(self.facts),
            "dtype_names": [one.dtype for one in facts],
            "shapes": [list(one.shape) for one in facts],
        }


class Receiver(Protocol):
    """One engine: `RayGenerator`."""

    async def workers(self) -> int:
        """Its processes: as many places in the group."""
        ...

    async def transfer(self, step: str, *arguments: object) -> None:
        """See `generator.Engine`: join_transfer, begin_transfer, receive, end_transfer."""
        ...


class Sender(Protocol):
    """The learner: `RayPolicy`."""

    async def transfer_problem(self) -> str:
        """Why it cannot send, or nothing."""
        ...

    async def transfer_address(self) -> tuple[str, int]:
        """Where all meet."""
        ...

    async def join_transfer(self, host: str, port: int, world_size: int) -> None: ...

    async def holds(self, version: int) -> bool:
        """Whether its weights are still those that it announced as this version."""
        ...

    async def send(self, version: int) -> None: ...


def join_info(host: str, port: int, rank_offset: int, world_size: int, bucket_bytes: int) -> dict[str, object]:
    """As vLLM's NCCLWeightTransferInitInfo wants it. `rank_offset`: the place of the engine's first worker."""
    return {
        "master_address": host,
        "master_port": port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "packed": True,
        "packed_buffer_size_bytes": bucket_bytes,
        "packed_num_buffers": NUM_BUFFERS,
    }


class NcclChannel:
    """`channels.Channel`. One transfer at a time."""

    def __init__(self, learner: Sender, engines: Sequence[Receiver], bucket_bytes: int, limit_s: float) -> None:
        self._learner, self._engines = learner, engines
        self._bucket_bytes, self._limit_s = bucket_bytes, limit_s
        self._together = False
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        if problem := await self._learner.transfer_problem():
            raise ConfigError(f"nccl: {problem}", "cluster.weight_channel", "object_store")
        async with self._turn:
            await self._meet()

    async def deliver(self, weights: WeightsVersion) -> None:
        async with self._turn:
            if not self._together:
                await self._meet()
            await self._pass_on(weights)

    async def restore(self, engine: int, newest: Callable[[], WeightsVersion]) -> None:
        async with self._turn:
            self._together, weights = False, newest()
            if not await self._learner.holds(weights.version):
                _LOG.warning("generator %d: the learner is past version %d; it waits for the next one", engine, weights.version)
                return
            await self._meet()
            await self._pass_on(weights)

    async def _meet(self) -> None:
        """Workers wait for the learner in the call, so they are told first."""
        counts = await asyncio.gather(*(engine.workers() for engine in self._engines))
        host, port = await self._learner.transfer_address()
        world_size = 1 + sum(counts)
        joins = []
        for i, engine in enumerate(self._engines):
            info = join_info(host, port, 1 + sum(counts[:i]), world_size, self._bucket_bytes)
            joins.append(engine.transfer("join_transfer", info))
        await self._all("the learner and its engines did not meet", [*joins, self._learner.join_transfer(host, port, world_size)])
        self._together = True

    async def _pass_on(self, weights: WeightsVersion) -> None:
        announced, version = weights.handle, weights.version
        assert isinstance(announced, Announced), "made by actors.model_host"
        if not await self._learner.holds(version):
            raise WeightsError(f"the learner is past version {version}", "weights", "pull a version before the next update")
        late = f"version {version} was not across"
        await self._all(late, [engine.transfer("begin_transfer") for engine in self._engines])
        receipts = [engine.transfer("receive", announced.info()) for engine in self._engines]
        await self._all(late, [*receipts, self._learner.send(version)])
        await self._all(late, [engine.transfer("end_transfer", version, announced.samples) for engine in self._engines])

    async def _all(self, late: str, calls: Sequence[Awaitable[None]]) -> None:
        """Begun in this order. After a failure the group is no more: whoever still waits in it can only be ended."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            async with asyncio.timeout(self._limit_s):
                await asyncio.gather(*tasks)
        except TimeoutError as error:
            self._together = False
            raise EngineError(f"{late} after {self._limit_s:.0f} s", "weights", "the same command goes on") from error
        except (EngineError, WeightsError):
            self._together = False
            raise
        except Exception as error:  # of torch's or NCCL's, in whoever took part
            self._together = False
            raise EngineError(f"{late}: {first_line(error)}", "weights", "the same command goes on") from error
        finally:
            for task in tasks:
                task.cancel()


# In the learner's first process.


def problem(device: str) -> str:
    """Why this process cannot send, or nothing."""
    import importlib.util

    import torch.distributed as dist

    if device != "cuda":
        return "the learner has no GPU"
    if not dist.is_nccl_available():
        return "the learner's torch has no NCCL"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed where the learner is"
    return ""


def free_port() -> int:
    from vllm.utils.network_utils import get_open_port

    return get_open_port()


def join(host: str, port: int, world_size: int) -> Any:  # Any: vLLM's PyNcclCommunicator
    """Rank 0 of the group; returns once all are there."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init({"master_address": host, "master_port": port, "world_size": world_size})


def send(group: Any, tensors: Iterable[tuple[str, Any]], bucket_bytes: int) -> None:  # Any: see `join`; tensors
    """Each tensor in order, as vLLM's engines expect them after `Announced.info`; across on return.

    All of one type, as `PolicyModel.stream` gives them: vLLM packs without padding, and a wider one behind an odd number of bytes
    cannot be unpacked there.
    """
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    packed_nccl_broadcast_producer(
        iterator=iter(tensors),
        group=group,
        src=0,
        post_iter_func=lambda item: item[1],
        buffer_size_bytes=bucket_bytes,
        num_buffers=NUM_BUFFERS,
    )
