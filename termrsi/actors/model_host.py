"""Hosts of the learner and the critic: model and optimizer, in one process or several. A reference is a learner never updated.

Methods are synchronous: a host does one thing at a time, callers wait for their own call. `export` hands weights out as objects
that its caller owns, so that they outlive the host: in buckets, and what its caller has already is not put again. The processes of
one host are actors in a row (`Seat`): each gets the same calls, the first one's answers count (`actors.group`, `model.ranks`).
"""

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from termrsi import processor, weights
from termrsi.actors import nccl_channel
from termrsi.actors.calls import alive
from termrsi.actors.group import Group
from termrsi.config.schema import ModelConfig
from termrsi.errors import WeightsError
from termrsi.records import Sample, UpdateMetrics, WeightsVersion

BUCKET_BYTES = 256 * 2**20


def _options(config: ModelConfig) -> dict[str, Any]:  # Any: arguments of both models
    """What both models are made with, on the device that Ray gave to this actor."""
    import torch

    torch.set_num_threads(config.threads)
    return {
        "compute": processor.compute(config.compute, gpu=bool(ray.get_gpu_ids())),
        "device": "cuda" if ray.get_gpu_ids() else "cpu",
        "micro_tokens": config.micro_tokens,
        "gradient_checkpointing": config.gradient_checkpointing,
        "share_prefix": config.share_prefix,
        "offload_activations": config.offload_activations,
        "offload_optimizer": config.offload_optimizer,
        "liger": config.liger,
    }


@dataclass(frozen=True, slots=True)
class Seat:
    """A process's place among those of one host. `limit_s`: how long one waits for the others in an exchange."""

    rank: int = 0
    size: int = 1
    limit_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Handed:
    """What was exported: all that is known of the state, and the names in each object that is new."""

    version: int
    facts: weights.Facts
    fresh: tuple[tuple[str, ...], ...]


class _Member:
    """One process of a host. Alone it has the model from the start, as one of several from `join` on."""

    def __init__(self, model: str, config: ModelConfig, seat: Seat = Seat()) -> None:
        self._path, self._config, self._seat = model, config, seat
        self._version = 0
        self._handed: tuple[int, weights.Facts] = (0, {})  # what was exported last
        self._store: Any = None  # Any: torch's, which is not imported here; the first process keeps it open
        self._model: Any = self._make(_options(config)) if seat.size == 1 else None  # Any: a policy or a critic

    def _make(self, options: dict[str, Any]) -> Any:  # Any: as above
        raise NotImplementedError

    def address(self) -> tuple[str, int]:
        """Where the processes meet: asked of the first one."""
        from termrsi.model.ranks import open_store

        host = ray.util.get_node_ip_address()
        self._store = open_store(host, self._seat.limit_s)
        return host, self._store.port

    def join(self, address: tuple[str, int]) -> None:
        """Wait for the others there, then load this process's part of the model."""
        import torch

        from termrsi.model import ranks

        interface = ranks.interface_of(ray.util.get_node_ip_address())
        if interface is not None:  # a host name may lead to another one, or nowhere
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        options, seat = _options(self._config), self._seat
        store = self._store if seat.rank == 0 else ranks.find_store(*address, seat.limit_s)
        device = torch.device(options["device"])
        joined = ranks.join(store, seat.rank, seat.size, device, seat.limit_s)
        self._model = self._make({**options, "ranks": joined})

    def ready(self) -> bool:
        return True

    def save(self, directory: str) -> str:
        return self._model.save(directory)

    def load(self, directory: str) -> str:
        return self._model.load(directory)

    def save_training(self, directory: str) -> str:
        return self._model.save_training(directory)

    def load_training(self, directory: str, version: int) -> str:
        checksum = self._model.load_training(directory)
        self._version = version
        return checksum

    def checksum(self) -> str:
        return self._model.checksum()

    def _first(self, rows: list[list[float]]) -> list[list[float]]:
        """An answer that need not travel twice."""
        return rows if self._seat.rank == 0 else []

    def _hand_out(self, tensors: Iterable[tuple[str, Any]], base: int, bucket_bytes: int) -> Iterator[Any]:  # Any: see `Handed`
        """Objects of about `bucket_bytes`, then what they are (`Handed`); of what was exported at version `base`, if that was the
        last, only what differs. The first process's is whole, the others' are empty."""
        held = weights.digests(self._handed[1]) if base == self._handed[0] else {}
        facts: weights.Facts = {}
        fresh = []
        for packed in weights.portions(tensors, bucket_bytes):
            found = weights.facts_of(packed)
            facts |= found
            if names := weights.changed(found, held):
                fresh.append(tuple(names))
                yield {name: packed[name] for name in names}
        self._version += 1
        self._handed = (self._version, facts)
        yield Handed(self._version, facts, tuple(fresh))


@ray.remote(max_restarts=0)
class PolicyActor(_Member):
    """The policy with its optimizer."""

    _changes = 0  # of its weights
    _announced = (0, 0)  # version, and `_changes` then
    _transfer: Any = None  # Any: vLLM's PyNcclCommunicator

    def _make(self, options: dict[str, Any]) -> Any:  # Any: see _Member
        from termrsi.model.lora import Lora
        from termrsi.model.policy import PolicyModel

        c = self._config
        adapters = Lora(c.lora_rank, c.lora_alpha, tuple(c.lora_targets)) if c.lora_rank else None
        return PolicyModel(self._path, routing_replay=c.routing_replay, adapters=adapters, **options)

    def load(self, directory: str) -> str:
        self._changes += 1
        return super().load(directory)

    def load_training(self, directory: str, version: int) -> str:
        self._changes += 1
        return super().load_training(directory, version)

    def logp(self, samples: Sequence[Sample]) -> list[list[float]]:
        return self._first(self._model.logp(samples))

    def update(self, samples: Sequence[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
        self._changes += 1
        return self._model.update(samples, loss, lr)

    def fit(self, samples: Sequence[Sample], lr: float) -> UpdateMetrics:
        self._changes += 1
        return self._model.fit(samples, lr)

    @ray.method(num_returns="streaming")
    def export(self, base: int, bucket_bytes: int) -> Iterator[Any]:  # Any: see _hand_out
        yield from self._hand_out(self._model.stream(), base, bucket_bytes)

    # By NCCL, see `actors.nccl_channel`: what is announced stays here until it is sent.

    def announce(self) -> tuple[int, nccl_channel.Announced]:
        self._version += 1
        facts: weights.Facts = {}
        samples = {}
        for name, tensor in self._model.stream():
            facts |= weights.facts_of(weights.pack({name: tensor}))
            samples[name] = weights.sample_digest(tensor, self._version)
        self._announced = (self._version, self._changes)
        return self._version, nccl_channel.Announced(facts, samples)

    def holds(self, version: int) -> bool:
        return self._announced == (version, self._changes)

    def transfer_problem(self) -> str:
        return nccl_channel.problem("cuda" if ray.get_gpu_ids() else "cpu")

    def transfer_address(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), nccl_channel.free_port()

    def join_transfer(self, host: str, port: int, world_size: int) -> None:
        self._transfer = nccl_channel.join(host, port, world_size)

    def send(self, bucket_bytes: int) -> None:
        """The first process sends; the others help it to put each tensor together."""
        if self._seat.rank == 0:
            nccl_channel.send(self._transfer, self._model.stream(), bucket_bytes)
        else:
            assert not list(self._model.stream()), "the first process alone is given tensors"


@ray.remote(max_restarts=0)
class CriticActor(_Member):
    """The value model with its optimizer."""

    def _make(self, options: dict[str, Any]) -> Any:  # Any: see _Member
        from termrsi.model.critic import CriticModel

        return CriticModel(self._path, layers=self._config.critic_layers, **options)

    def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        return self._first(self._model.values(samples))

    def update(self, samples: Sequence[Sample], lr: float, value_clip: float) -> UpdateMetrics:
        return self._model.update(samples, lr, value_clip)

    def refit(self, scale: float, shift: float) -> None:
        self._model.refit(scale, shift)

    @ray.method(num_returns="streaming")
    def export(self, base: int, bucket_bytes: int) -> Iterator[Any]:  # Any: see _hand_out
        yield from self._hand_out(self._model.weights_only().items(), base, bucket_bytes)

    def pull(self, stored: weights.Stored, expected: str) -> None:
        """Weights only, fresh optimizer; proves that they arrived."""
        states = ray.get([part.reference for part in stored.parts])
        taken = ((name, state[name]) for part, state in zip(stored.parts, states, strict=True) for name in part.names)
        self._model.load_weights(weights.unpack(dict(taken)))
        found = weights.checksum_of(self._model.weights_only())
        if self._seat.rank == 0 and found != expected:
            raise WeightsError(f"checksum {found} after a pull of {expected}", "critic")


def make_actors(kind: Any, options: Sequence[dict[str, Any]], model: str, config: ModelConfig, limit_s: float) -> list[Any]:
    """The processes of one host, PolicyActors or CriticActors, by rank; `meet` before anything else. `options`: Ray's, of each."""
    return [kind.options(**one).remote(model, config, Seat(rank, len(options), limit_s)) for rank, one in enumerate(options)]


async def meet(actors: Sequence[Any]) -> None:  # Any: Ray's actor handles are untyped
    """Have the processes of one host find each other and load the model; what a process raises."""
    if len(actors) > 1:
        address = await actors[0].address.remote()
        await asyncio.gather(*[actor.join.remote(address) for actor in actors])


class _Host:
    """What both clients share. `others`: the further processes of the host, by rank; `limit_s` as in `Seat`; `name`: its role."""

    name = ""

    def __init__(
        self,
        actor: Any,  # Any: Ray's actor handles are untyped, here and below
        *others: Any,
        limit_s: float = 600.0,
        name: str = "",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`bucket_bytes`: of weights in one object of the store."""
        self.actor = actor
        self.name = name or self.name
        self._group = Group(self.name, [actor, *others], limit_s)
        self._bucket_bytes = bucket_bytes
        self._published: WeightsVersion | None = None

    async def _ask(self, method: str, *arguments: object) -> Any:  # Any: what the method returns
        return await self._group.call(method, *arguments)

    async def publish(self) -> WeightsVersion:
        """What did not change since the last time stays where it is, as long as half of what is kept in the store is needed."""
        before = self._published.handle if self._published is not None else None
        assert before is None or isinstance(before, weights.Stored), "made below"
        if before is not None and before.put_bytes > 2 * before.size_bytes:
            before = None
        base = self._published.version if self._published is not None and before is not None else 0
        calls = [asyncio.ensure_future(_drain(actor.export.remote(base, self._bucket_bytes))) for actor in self._group.actors]
        references, handed = await self._group.first_of("publish", calls)
        whole = sum(map(len, handed.fresh)) == len(handed.facts)
        stored = weights.merge(handed.facts, zip(references, handed.fresh, strict=True), None if whole else before)
        checksum = weights.checksum(handed.facts)
        self._published = WeightsVersion(self.name, handed.version, checksum, stored, stored.size_bytes)
        return self._published

    async def save(self, directory: str) -> str:
        return await self._ask("save", directory)

    async def load(self, directory: str) -> str:
        return await self._ask("load", directory)

    async def save_training(self, directory: str) -> str:
        return await self._ask("save_training", directory)

    async def load_training(self, directory: str, version: int) -> str:
        return await self._ask("load_training", directory, version)

    async def checksum(self) -> str:
        return await self._ask("checksum")

    def end(self) -> None:
        """Kill the host's processes."""
        self._group.end()


class RayPolicy(_Host):
    """`ports.Policy` over a PolicyActor."""

    name = "policy"
    announces = False  # weights are sent by NCCL, and not put

    async def publish(self) -> WeightsVersion:
        if not self.announces:
            return await super().publish()
        version, announced = await self._ask("announce")
        size = sum(one.size_bytes for one in announced.facts.values())
        return WeightsVersion(self.name, version, weights.checksum(announced.facts), announced, size)

    async def transfer_problem(self) -> str:
        return await alive(self.name, self.actor.transfer_problem.remote())

    async def transfer_address(self) -> tuple[str, int]:
        return await alive(self.name, self.actor.transfer_address.remote())

    async def join_transfer(self, host: str, port: int, world_size: int) -> None:
        await alive(self.name, self.actor.join_transfer.remote(host, port, world_size))

    async def holds(self, version: int) -> bool:
        return await alive(self.name, self.actor.holds.remote(version))

    async def send(self, version: int) -> None:
        await self._ask("send", self._bucket_bytes)

    async def logp(self, samples: Sequence[Sample]) -> list[list[float]]:
        return await self._ask("logp", list(samples))

    async def update(self, samples: Sequence[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
        return await self._ask("update", list(samples), loss, lr)

    async def fit(self, samples: Sequence[Sample], lr: float) -> UpdateMetrics:
        return await self._ask("fit", list(samples), lr)


class RayCritic(_Host):
    """`ports.Critic` over a CriticActor."""

    name = "critic"

    async def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        return await self._ask("values", list(samples))

    async def update(self, samples: Sequence[Sample], lr: float, value_clip: float) -> UpdateMetrics:
        return await self._ask("update", list(samples), lr, value_clip)

    async def refit(self, scale: float, shift: float) -> None:
        await self._ask("refit", scale, shift)

    async def pull(self, weights: WeightsVersion) -> None:
        await self._ask("pull", weights.handle, weights.checksum)


async def _drain(objects: Any) -> tuple[list[Any], Handed]:  # Any: Ray's generator of references, and these
    """References to what was put, and what was said last. Raises what the method raised."""
    references = [reference async for reference in objects]
    return references[:-1], await references[-1]
