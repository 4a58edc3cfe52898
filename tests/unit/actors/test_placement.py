"""Bundles as Ray takes them, and what is said of a cluster that has too little. No Ray is started."""

from termrsi.actors import placement
from termrsi.actors.placement import Placement
from termrsi.config.load import load
from termrsi.sizing import layout

FULL = ("experiment=terminal_rsi", "scale=full", "cluster=a100x16")
THERE = {"CPU": 192.0, "GPU": 16.0, "sandbox": 512.0}


def groups(*overrides: str) -> tuple[layout.Group, ...]:
    return layout.groups(load((*FULL, *overrides)))


def test_bundles_name_what_is_asked_for() -> None:
    found = {group.name: placement.bundles(group, "sandbox") for group in groups()}
    assert found["policy"] == [{"CPU": 1.0, "GPU": 1}] * 4
    assert found["sandboxes"] == [{"CPU": 0.1, "sandbox": 256}]
    assert found["rollouts"] == [{"CPU": 0.1}] * 16


def test_a_cluster_that_holds_them() -> None:
    assert placement.shortage(groups(), "sandbox", THERE) == ""


def test_what_is_missing_is_told_with_the_arithmetic() -> None:
    said = placement.shortage(groups(), "sandbox", THERE | {"GPU": 12.0})
    assert said == "the run asks for 16 GPU (policy 4 + critic 4 + generator 8), and the cluster has 12"
    said = placement.shortage(groups(), "sandbox", {"CPU": 192.0, "GPU": 16.0})
    assert said == "the run asks for 256 sandbox (sandboxes 256), and the cluster has 0"


async def test_nothing_is_reserved_where_nothing_is_said_of_nodes() -> None:
    made = Placement(load(("experiment=terminal_rsi",)))
    await made.reserve()
    assert [made.options(role) for role in ("generator", "policy", "sandboxes", "rollouts")] == [{}] * 4
    assert made.sandbox_resources() == {}
    made.release()


def test_several_nodes_of_sandboxes_stand_apart() -> None:
    several = groups("cluster.sandbox_nodes=3")
    (found,) = [group for group in several if group.name == "sandboxes"]
    assert placement.bundles(found, "sandbox") == [{"CPU": 0.1, "sandbox": 256}] * 3
    assert found.spread
    said = placement.shortage(several, "sandbox", THERE)
    assert said == "the run asks for 768 sandbox (sandboxes 768), and the cluster has 512"
    made = Placement(load((*FULL, "cluster.sandbox_nodes=3")))
    assert made.sandbox_resources() == {"resources": {"sandbox": 256}, "scheduling_strategy": "SPREAD"}


def test_sandboxes_ask_for_their_nodes() -> None:
    assert Placement(load(FULL)).sandbox_resources() == {"resources": {"sandbox": 256}}
