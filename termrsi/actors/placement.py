"""Ray placement groups by role: what `sizing.layout` lays out, reserved before any actor starts.

Reserved all together or not at all: a critic that a later stage opens finds its place kept. Where `cluster.nodes` says nothing
there is no group, and actors are placed by Ray as they ask.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from termrsi.config.schema import Config
from termrsi.errors import ConfigError
from termrsi.sizing import layout
from termrsi.sizing.layout import Group

RESERVE_S = 120.0  # a node that is still being added may take that long


class Placement:
    """The reserved groups of one run. `reserve` once, before `options`; `release` is safe at any time."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._made: dict[str, PlacementGroup] = {}

    async def reserve(self) -> None:
        """Raises ConfigError if the cluster that is there does not hold the groups, with what it has."""
        if not self._config.cluster.nodes:
            return
        groups = layout.groups(self._config)
        resource = self._config.cluster.sandbox_resource
        if lacking := shortage(groups, resource, ray.cluster_resources()):
            raise ConfigError(lacking, "cluster", "valid: what `ray status` shows, or wait for more nodes")
        for group in groups:
            strategy = "SPREAD" if group.spread else "PACK"
            self._made[group.name] = placement_group(bundles(group, resource), strategy=strategy, name=f"termrsi-{group.name}")
            try:
                async with asyncio.timeout(RESERVE_S):
                    await self._made[group.name].ready()
            except TimeoutError as error:
                self.release()
                raise ConfigError(
                    f"no room for {group.name} ({len(group.bundles)} x {bundles(group, resource)[0]}) after {RESERVE_S:.0f} s",
                    "cluster",
                    "`ray status` shows what takes it; each bundle stands on one node",
                ) from error

    def options(self, role: str, process: int = 0) -> dict[str, Any]:  # Any: options of Ray's actors
        """Where one process of a role is put; nothing where Ray places it as it asks."""
        group = self._made.get(layout.group_of(self._config, role))
        if group is None:
            return {}
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=process)}

    def sandbox_resources(self) -> dict[str, Any]:  # Any: options of Ray's actors
        """What a sandbox actor asks for, so that it stands on a node for sandboxes, and no other beside it."""
        name = self._config.cluster.sandbox_resource
        spread = {"scheduling_strategy": "SPREAD"} if self._config.cluster.sandbox_nodes > 1 else {}
        return {"resources": {name: self._config.sandbox.concurrency}, **spread} if name else {}

    def release(self) -> None:
        for group in self._made.values():
            if ray.is_initialized():
                remove_placement_group(group)
        self._made = {}


def bundles(group: Group, sandbox_resource: str) -> list[dict[str, float]]:
    """As Ray takes them: what is not asked for is not named."""
    asked = [{"CPU": b.cpus, "GPU": b.gpus, **({sandbox_resource: b.resource} if sandbox_resource else {})} for b in group.bundles]
    return [{name: amount for name, amount in bundle.items() if amount} for bundle in asked]


def shortage(groups: tuple[Group, ...], sandbox_resource: str, there: Mapping[str, float]) -> str:
    """The first resource that the cluster as a whole has too little of, with the arithmetic; "" if there is none."""
    asked: dict[str, dict[str, float]] = {}
    for group in groups:
        for bundle in bundles(group, sandbox_resource):
            for name, amount in bundle.items():
                by_group = asked.setdefault(name, {})
                by_group[group.name] = by_group.get(group.name, 0.0) + amount
    for name, by_group in asked.items():
        total, has = round(sum(by_group.values()), 6), there.get(name, 0.0)
        if total > has:
            terms = " + ".join(f"{group} {amount:g}" for group, amount in by_group.items())
            return f"the run asks for {total:g} {name} ({terms}), and the cluster has {has:g}"
    return ""
