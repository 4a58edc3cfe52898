"""Hosts of the learner and the critic: one process each, with model and optimizer. A reference model is a learner never updated.

Methods are synchronous: a host does one thing at a time, callers wait for their own call. `export` hands weights out as an object
that its caller owns, so that they outlive the host.
"""

from collections.abc import Sequence
from typing import Any

import ray

from termrsi import weights
from termrsi.actors.calls import alive, ask
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
    }


@ray.remote(max_restarts=0)
class PolicyActor:
    """The policy with its optimizer."""

    def __init__(self, model: str, config: ModelConfig) -> None:
        from termrsi.model.policy import PolicyModel

        self._model = PolicyModel(model, routing_replay=config.routing_replay, **_options(config))
        self._version = 0

    def ready(self) -> bool:
        return True

    def logp(self, samples: Sequence[Sample]) -> list[list[float]]:
        return self._model.logp(samples)

    def update(self, samples: Sequence[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
        return self._model.update(samples, loss, lr)

    def fit(self, samples: Sequence[Sample], lr: float) -> UpdateMetrics:
        return self._model.fit(samples, lr)

    @ray.method(num_returns=2)
    def export(self) -> tuple[tuple[int, weights.StateMeta], weights.PackedState]:
        self._version += 1
        packed = weights.pack(self._model.state())
        return (self._version, weights.meta(packed)), packed

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


@ray.remote(max_restarts=0)
class CriticActor:
    """The value model with its optimizer."""

    def __init__(self, model: str, config: ModelConfig) -> None:
        from termrsi.model.critic import CriticModel

        self._model = CriticModel(model, layers=config.critic_layers, **_options(config))
        self._version = 0

    def ready(self) -> bool:
        return True

    def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        return self._model.values(samples)

    def update(self, samples: Sequence[Sample], lr: float, value_clip: float) -> UpdateMetrics:
        return self._model.update(samples, lr, value_clip)

    def refit(self, scale: float, shift: float) -> None:
        self._model.refit(scale, shift)

    @ray.method(num_returns=2)
    def export(self) -> tuple[tuple[int, weights.StateMeta], weights.PackedState]:
        self._version += 1
        packed = weights.pack(self._model.weights_only())
        return (self._version, weights.meta(packed)), packed

    def pull(self, packed: weights.PackedState, expected: str) -> None:
        """Weights only, fresh optimizer; proves that they arrived."""
        self._model.load_weights(weights.unpack(packed))
        found = weights.checksum(weights.pack(self._model.weights_only()))
        if found != expected:
            raise WeightsError(f"checksum {found} after a pull of {expected}", "critic")

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


class _Host:
    """What both clients share."""

    name = ""

    def __init__(self, actor: Any) -> None:  # Any: Ray's actor handles are untyped
        self.actor = actor

    async def _ask(self, method: str, *arguments: object) -> Any:  # Any: what the method returns
        return await ask(self.name, self.actor, method, *arguments)

    async def publish(self) -> WeightsVersion:
        (meta_ref, state_ref) = self.actor.export.remote()
        version, meta = await alive(self.name, meta_ref)
        return WeightsVersion(self.name, version, meta.checksum, [state_ref], meta.size_bytes)

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
