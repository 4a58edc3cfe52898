"""Hosts of the learner and the critic: model and optimizer, in one process or several. A reference is a learner never updated.

Methods are synchronous: a host does one thing at a time, callers wait for their own call. `export` hands weights out as an object
that its caller owns, so that they outlive the host. The processes of one host are actors in a row (`Seat`): each gets the same
calls, the first one's answers count (`actors.group`, `model.ranks`).
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from termrsi import weights
from termrsi.actors.group import Group
from termrsi.config.schema import ModelConfig
from termrsi.errors import WeightsError
from termrsi.records import Sample, UpdateMetrics, WeightsVersion


def _options(config: ModelConfig) -> dict[str, Any]:  # Any: arguments of both models
    """What both models are made with, on the device that Ray gave to this actor."""
    import torch

    torch.set_num_threads(config.threads)
    return {
        "compute": config.compute,
        "device": "cuda" if ray.get_gpu_ids() else "cpu",
        "micro_tokens": config.micro_tokens,
        "gradient_checkpointing": config.gradient_checkpointing,
        "share_prefix": config.share_prefix,
        "offload_activations": config.offload_activations,
        "offload_optimizer": config.offload_optimizer,
    }


@dataclass(frozen=True, slots=True)
class Seat:
    """A process's place among those of one host. `limit_s`: how long one waits for the others in an exchange."""

    rank: int = 0
    size: int = 1
    limit_s: float = 600.0


class _Member:
    """One process of a host. Alone it has the model from the start, as one of several from `join` on."""

    def __init__(self, model: str, config: ModelConfig, seat: Seat = Seat()) -> None:
        self._path, self._config, self._seat = model, config, seat
        self._version = 0
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

    def _hand_out(self, state: Any) -> tuple[tuple[int, weights.StateMeta], weights.PackedState]:  # Any: tensors by name
        """The first process's is whole, the others' are empty."""
        self._version += 1
        packed = weights.pack(state)
        return (self._version, weights.meta(packed)), packed


@ray.remote(max_restarts=0)
class PolicyActor(_Member):
    """The policy with its optimizer."""

    def _make(self, options: dict[str, Any]) -> Any:  # Any: see _Member
        from termrsi.model.policy import PolicyModel

        return PolicyModel(self._path, routing_replay=self._config.routing_replay, **options)

    def logp(self, samples: Sequence[Sample]) -> list[list[float]]:
        return self._first(self._model.logp(samples))

    def update(self, samples: Sequence[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
        return self._model.update(samples, loss, lr)

    def fit(self, samples: Sequence[Sample], lr: float) -> UpdateMetrics:
        return self._model.fit(samples, lr)

    @ray.method(num_returns=2)
    def export(self) -> tuple[tuple[int, weights.StateMeta], weights.PackedState]:
        return self._hand_out(self._model.state())


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

    @ray.method(num_returns=2)
    def export(self) -> tuple[tuple[int, weights.StateMeta], weights.PackedState]:
        return self._hand_out(self._model.weights_only())

    def pull(self, packed: weights.PackedState, expected: str) -> None:
        """Weights only, fresh optimizer; proves that they arrived."""
        self._model.load_weights(weights.unpack(packed))
        found = weights.checksum(weights.pack(self._model.weights_only()))
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
    """What both clients share. `others`: the further processes of the host, by rank; `limit_s` as in `Seat`."""

    name = ""

    def __init__(self, actor: Any, *others: Any, limit_s: float = 600.0) -> None:  # Any: Ray's actor handles are untyped
        self.actor = actor
        self._group = Group(self.name, [actor, *others], limit_s)

    async def _ask(self, method: str, *arguments: object) -> Any:  # Any: what the method returns
        return await self._group.call(method, *arguments)

    async def publish(self) -> WeightsVersion:
        handed = [actor.export.remote() for actor in self._group.actors]  # (version and meta, state) each
        version, meta = await self._group.first_of("publish", [about for about, _ in handed])
        return WeightsVersion(self.name, version, meta.checksum, [handed[0][1]], meta.size_bytes)

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
        (state,) = weights.handle  # type: ignore[misc]  # one object reference, made by `publish`
        await self._ask("pull", state, weights.checksum)
