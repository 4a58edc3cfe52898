"""The models behind endpoints, in one actor for the run: its rates and places are kept whoever asks, stages or rollout workers."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ray

from termrsi.actors.calls import ask
from termrsi.ports import Writer
from termrsi.records import Message, SamplingParams, Writing


class Closing(Writer, Protocol):
    """A writer that holds connections."""

    async def close(self) -> None: ...


@ray.remote(max_restarts=0)
class WritersActor:
    """Hosts what `make` makes, by role. `keys`: environment variables of the driver's, which a node of a cluster does not have."""

    def __init__(self, make: Callable[[], Mapping[str, Closing]], keys: Mapping[str, str]) -> None:
        os.environ.update(keys)
        self._writers = make()

    async def ready(self) -> bool:
        return True

    async def write(self, role: str, messages: Sequence[Message], sampling: SamplingParams, key: str, begun: str) -> Writing:
        return await self._writers[role].write(messages, sampling, key, begun)

    async def close(self) -> None:
        for writer in self._writers.values():
            await writer.close()


class RayWriter:
    """`ports.Writer` of one role over a WritersActor."""

    def __init__(self, actor: Any, role: str) -> None:  # Any: Ray's actor handles are untyped
        self._actor = actor
        self._role = role

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        return await ask(f"model of role {self._role}", self._actor, "write", self._role, list(messages), sampling, key, begun)
