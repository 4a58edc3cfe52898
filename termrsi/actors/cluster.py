"""Starts Ray and the actors of a run, hands out their ports, and shuts everything down in order.

Order of the end: rollout workers (no new commands), models behind endpoints, sandboxes (their processes and mounts), generator,
model hosts, Ray. Each step is bounded, and one that fails does not stop the next.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from termrsi.actors.calls import first_line
from termrsi.actors.channels import Channel, ObjectStoreChannel
from termrsi.actors.engines import Engines
from termrsi.actors.generator import EngineOptions, GeneratorActor, RayGenerator
from termrsi.actors.model_host import CriticActor, PolicyActor, RayCritic, RayPolicy, make_actors, meet
from termrsi.actors.nccl_channel import NcclChannel
from termrsi.actors.placement import Placement
from termrsi.actors.queues import BufferActor, RayGroupStore, RayRecoveryStore, RecoveryActor
from termrsi.actors.remote_pool import RemotePool
from termrsi.actors.rollouts import RayRollouts, RolloutActor, worker_name
from termrsi.actors.sandboxes import LEASE_LIMIT_S, SandboxActor, SandboxOptions
from termrsi.actors.watchdog import Watchdog
from termrsi.actors.writers import Closing, RayWriter, WritersActor
from termrsi.config.schema import Config
from termrsi.errors import ConfigError, EngineError
from termrsi.harness.runner import AWAY_S, attempt_s
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.report import logs

START_S = 600.0
STOP_S = 30.0
CALLS = 1000  # at once, of an actor that waits for others
GIVE_BACK_S = 600.0  # after an attempt's time is over: its sandbox is closed by its holder, not by the pool
_LOG = logging.getLogger(__name__)
Host = TypeVar("Host", RayPolicy, RayCritic)


class Cluster:
    """The actors of one run. `connect`, then `start`, before anything else; `close` is safe at any time and may be called twice.

    `make_writers`, `keys`: the models behind endpoints and what they take from the environment, see `actors.writers`. `kept`: ids
    of snapshots that an earlier life of the run left. `most_steps`: of a task, as each has the time of an episode.
    """

    def __init__(
        self,
        config: Config,
        model: str,
        cache_dir: Path,
        state_dir: Path,
        make_writers: Callable[[], Mapping[str, Closing]],
        keys: Mapping[str, str],
        kept: frozenset[str] = frozenset(),
        most_steps: int = 1,
    ) -> None:
        self._config = config
        self._make_writers = make_writers
        self._keys = keys
        self._model = model
        self._cache_dir = cache_dir
        self._state_dir = state_dir
        self._own_ray = False
        self._kept = kept
        self._most_steps = most_steps
        self._sandboxes: list[Any] = []  # Any: Ray's actor handles are untyped, here and below
        self._pool: RemotePool | None = None
        self._watchdog: Watchdog | None = None
        self._generators: list[Any] = []
        self._router = PrefixRouter(config.cluster.generators, config.model.max_num_seqs // 4)
        self._engines: Engines | None = None
        self._policy: RayPolicy | None = None
        self._critic: RayCritic | None = None
        self._reference: RayPolicy | None = None
        self._queue: Any = None
        self._buffer: Any = None
        self._writers: Any = None
        self._workers: list[Any] = []
        self._place = Placement(config)

    async def start(self) -> None:
        """Raises EngineError if an actor does not start, ConfigError if the cluster has no room for all of them."""
        config, heavy, at = self._config, {"max_concurrency": CALLS}, self._place.options
        await self._place.reserve()
        stands, again = self._place.sandbox_resources(), {"max_restarts": config.cluster.sandbox_restarts, "max_task_retries": 0}
        # Where one node is left all episodes wait for it: its calls of control come on top.
        again["max_concurrency"] = max(CALLS, 2 * config.sandbox.concurrency * config.cluster.sandbox_nodes)
        self._sandboxes = [
            SandboxActor.options(num_cpus=0.1, **again, **{**stands, **at("sandboxes", k)}).remote(self._sandbox_options())
            for k in range(config.cluster.sandbox_nodes)
        ]
        self._pool = RemotePool(self._sandboxes)
        options = EngineOptions(
            max_model_len=config.model.max_model_len,
            max_num_seqs=config.model.max_num_seqs,
            kv_cache_gib=config.model.kv_cache_gib,
            threads=config.model.threads,
            routing_replay=config.model.routing_replay,
            weight_channel=config.cluster.weight_channel,
            bucket_bytes=config.cluster.weight_bucket_mb * 2**20,
            pause=config.cluster.weight_update == "pause",
            extra=dict(config.model.engine),
            run=config.run_name,
        )
        gpus, restarts = config.cluster.gpus_generator, config.cluster.generator_restarts
        self._generators = [
            GeneratorActor.options(
                num_cpus=1, num_gpus=gpus, max_restarts=restarts, max_task_retries=0, **heavy, **at("generator", k)
            ).remote(self._model, options)
            for k in range(config.cluster.generators)
        ]
        learners = self._learners(PolicyActor, "policy")
        self._policy = policy = self._client(RayPolicy, learners)
        self._queue = RecoveryActor.options(num_cpus=0.1).remote(16)
        self._buffer = BufferActor.options(num_cpus=0.1, **heavy).remote()
        if config.roles:
            self._writers = WritersActor.options(num_cpus=0.1, **heavy).remote(self._make_writers, self._keys)
        self._workers = [
            RolloutActor.options(num_cpus=0.1, max_restarts=config.cluster.worker_restarts, **heavy, **at("rollouts", k)).remote(
                self._model, self._sandboxes, self._generators, config.cluster.episode_retries, self.writers, worker_name(k)
            )
            for k in range(config.cluster.rollout_workers)
        ]
        actors = [*self._sandboxes, *self._generators, self._queue, self._buffer, *self._workers]
        await self._ready(actors if self._writers is None else [*actors, self._writers], learners)
        self._engines = Engines(self._generators, self._router, restarts, lambda engines: self._channel(policy, engines))
        await self._engines.open()
        self._engines.watch()
        self._watchdog = Watchdog(self._pool, self._sandboxes, self._workers)
        self._watchdog.start()

    def _sandbox_options(self) -> SandboxOptions:
        config = self._config
        return SandboxOptions(
            backend=config.sandbox.backend,
            concurrency=config.sandbox.concurrency,
            memory_mb=config.sandbox.memory_mb,
            disk_mb=config.sandbox.disk_mb,
            pids=config.sandbox.pids,
            network=config.sandbox.network == "host",
            build_network=config.sandbox.build_network == "host",
            spares=config.sandbox.spares,
            host_share=config.sandbox.host_share,
            owner=config.owner,
            text_first=config.tasks.text_first,
            keep_bytes=int(config.trial_mb * 2**20) if config.trials else 0,
            verifier_time=config.tasks.verifier_time,
            kit=config.tasks.kit,
            cache_dir=str(self._cache_dir),
            state_dir=str(self._state_dir),
            run=config.run_name,
            keep=tuple(self._kept),
            lease_limit_s=max(LEASE_LIMIT_S, attempt_s(config.limits.wall_s, self._most_steps) + AWAY_S + GIVE_BACK_S),
        )

    def connect(self) -> None:
        """Start or join Ray. Raises ConfigError if it cannot be reached."""
        cluster = self._config.cluster
        if ray.is_initialized():
            return
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": "termrsi"}  # Any: ray.init's
        if asked := logs.worker_environment(self._config.logger.lines, self._config.run_name):
            quiet["runtime_env"] = asked
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would have a run starve beside anything
        try:
            if cluster.address == "local":
                ray.init(
                    address="local",
                    num_cpus=cluster.num_cpus,
                    object_store_memory=cluster.object_store_mb * 2**20,
                    include_dashboard=False,
                    **quiet,
                )
            else:
                ray.init(address=cluster.address, **quiet)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"no Ray at {cluster.address!r}: {error}", "cluster.address", "valid: local, auto, or HOST:PORT"
            ) from error
        except Exception as error:  # Ray knows no narrower one for a node that is not there in its 30 s
            if type(error) is not Exception:
                raise
            what = f"Ray did not start: {first_line(error)}"
            raise EngineError(what, "cluster", "the same command again, when the machine is less busy") from error
        self._own_ray = True

    def _learners(self, kind: Any, role: str) -> list[Any]:
        """The processes of a host of the learner's kind, each in its place."""
        cluster = self._config.cluster
        options = [
            {"num_cpus": 1, "num_gpus": cluster.gpus_learner, **self._place.options(role, rank)}
            for rank in range(cluster.learner_processes)
        ]
        return make_actors(kind, options, self._model, self._config.model, cluster.learner_limit_s)

    def _client(self, kind: type[Host], learners: list[Any], name: str = "") -> Host:
        cluster = self._config.cluster
        return kind(*learners, limit_s=cluster.learner_limit_s, name=name, bucket_bytes=cluster.weight_bucket_mb * 2**20)

    def _channel(self, policy: RayPolicy, engines: Sequence[RayGenerator]) -> Channel:
        cluster = self._config.cluster
        if cluster.weight_channel == "object_store":
            return ObjectStoreChannel(engines)
        policy.announces = True
        return NcclChannel(policy, engines, cluster.weight_bucket_mb * 2**20, cluster.learner_limit_s)

    async def _ready(self, actors: list[Any], learners: list[Any]) -> None:
        """`learners`: the processes of one host."""
        try:
            async with asyncio.timeout(START_S):
                await asyncio.gather(meet(learners), *[actor.ready.remote() for actor in actors])
                await asyncio.gather(*[actor.ready.remote() for actor in learners])
        except TimeoutError as error:
            raise EngineError(
                f"an actor was not ready after {START_S:.0f} s", "cluster", "see the logs in /tmp/ray/session_latest"
            ) from error
        except RayError as error:
            what = f"an actor did not start: {ends(error)}"
            raise EngineError(what, "cluster", "see the logs in /tmp/ray/session_latest") from error

    @property
    def pool(self) -> RemotePool:
        assert self._pool is not None, "`start` comes first"
        return self._pool

    @property
    def generator(self) -> Engines:
        """After `start`."""
        assert self._engines is not None
        return self._engines

    @property
    def policy(self) -> RayPolicy:
        assert self._policy is not None, "`start` comes first"
        return self._policy

    @property
    def queue(self) -> RayRecoveryStore:
        return RayRecoveryStore(self._queue)

    @property
    def groups(self) -> RayGroupStore:
        return RayGroupStore(self._buffer)

    @property
    def rollouts(self) -> RayRollouts:
        cluster = self._config.cluster
        concurrency = self._config.sandbox.concurrency * cluster.sandbox_nodes
        return RayRollouts(self._workers, self.pool, self._router, concurrency, cluster.episode_retries)

    @property
    def writers(self) -> dict[str, RayWriter]:
        """By role; those that are not there are the policy's."""
        return {role: RayWriter(self._writers, role) for role in self._config.roles}

    async def open_critic(self) -> RayCritic:
        """A critic host of its own for one stage; its weights leave it through the object store."""
        await self.close_critic()
        learners = self._learners(CriticActor, "critic")
        self._critic = self._client(RayCritic, learners)
        await self._ready([], learners)
        return self._critic

    async def close_critic(self) -> None:
        if self._critic is not None:
            self._critic.end()
            self._critic = None

    async def open_reference(self) -> RayPolicy:
        """A policy host that no stage updates."""
        await self.close_reference()
        learners = self._learners(PolicyActor, "reference")
        self._reference = self._client(RayPolicy, learners, name="reference")
        await self._ready([], learners)
        return self._reference

    async def close_reference(self) -> None:
        if self._reference is not None:
            self._reference.end()
            self._reference = None

    async def busy(self) -> dict[str, float]:
        """Seconds of work since the start, by part."""
        stats, sandboxes = await asyncio.gather(self.generator.stats(), self.pool.busy())
        return {"generator": stats["busy_s"], **sandboxes}

    async def close(self) -> None:
        if self._watchdog is not None:
            await self._watchdog.close()
            self._watchdog = None
        for worker in self._workers:
            _kill(worker)
        self._workers = []
        await _bounded("endpoints", self._writers and self._writers.close.remote())
        await asyncio.gather(*[_bounded(f"sandboxes of node {k}", one.close.remote()) for k, one in enumerate(self._sandboxes)])
        if self._engines is not None:
            await self._engines.close()
        await asyncio.gather(*[_bounded("generator", one.close.remote()) for one in self._generators])
        for actor in (*self._sandboxes, *self._generators, self._queue, self._buffer, self._writers):
            if actor is not None:
                _kill(actor)
        for host in (self._policy, self._critic, self._reference):
            if host is not None and ray.is_initialized():
                host.end()
        self._sandboxes, self._pool = [], None
        self._policy = self._critic = self._reference = self._queue = self._buffer = None
        self._generators, self._engines, self._writers = [], None, None
        self._place.release()
        if self._own_ray:
            ray.shutdown()
            self._own_ray = False


async def _bounded(what: str, call: Awaitable[None] | None) -> None:
    """One step of the shutdown: the next is taken whatever becomes of it, and what went wrong is said."""
    if call is None:
        return
    try:
        async with asyncio.timeout(STOP_S):
            await call
    except (TimeoutError, RayError) as error:
        told = f"not done after {STOP_S:.0f} s" if isinstance(error, TimeoutError) else first_line(error)
        _LOG.warning("closing the %s: %s", what, told)


def ends(error: Exception) -> str:
    """One line: the first of Ray's many, which says what happened, and the last, which says why."""
    lines = [line.strip() for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
    return ": ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or type(error).__name__


def _kill(actor: Any) -> None:  # Any: see Cluster
    if ray.is_initialized():
        ray.kill(actor)
