"""Whole dry runs in which others than the policy play roles: who wrote what, what it cost, and that nothing of the key is left."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from termrsi.config.load import load
from termrsi.errors import ConfigError
from termrsi.fakes import FakeGenerator, FakePolicy, FakeSkill, FakeTokenizer
from termrsi.harness.render import ChatFormat
from termrsi.pipeline import Pipeline
from termrsi.stages.finished import FinishedRollouts
from tests.chat_server import ChatServer, as_policy

KEY = "sk-very-secret"


@pytest.fixture
async def expert(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[ChatServer]:
    """A model that always solves the tasks of the fakes' world."""
    monkeypatch.setenv("TERMRSI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EXPERT_KEY", KEY)
    generator = FakeGenerator(sloppy=0.0)
    await generator.pull(await FakePolicy(FakeSkill(solve=50.0, half=-50.0)).publish())
    with ChatServer(as_policy(generator, ChatFormat(FakeTokenizer()))) as server:
        yield server


def role(name: str, server: ChatServer) -> list[str]:
    settings = {"url": server.url, "model": "m", "key_env": "EXPERT_KEY", "price_in": 1.0, "price_out": 4.0, "continues": "true"}
    return [f"roles.{name}.{key}={value}" for key, value in settings.items()]


async def run(place: Path, *overrides: str) -> dict[str, dict]:
    """Entries of the ledger, by stage."""
    words = [*overrides, "scale=dry", f"run_dir={place}"]
    await Pipeline(load(words), words).run()
    return {entry["stage"]: entry for entry in json.loads((place / "ledger.json").read_text())}


def played(place: Path) -> dict[str, Counter[str]]:
    """Who played the episodes, by label."""
    found: dict[str, Counter[str]] = {}
    for line in (place / "rollouts.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["label"], Counter())[entry["rollout"]["model"]] += 1
    return found


async def test_a_solver_a_planner_and_a_critic_of_another_family(expert: ChatServer, tmp_path: Path) -> None:
    place = tmp_path / "run"
    names = ("solver", "planner", "critic")
    entries = await run(place, "experiment=rsr", *(word for name in names for word in role(name, expert)))
    who = played(place / "stages" / "rsr")
    assert set(who["rsr: discover"]) == {"served"}
    assert set(who["rsr: execute"]) == {""}, "what is trained on after a rewrite is the policy's own"
    assert entries["rsr"]["summary"]["solved"] == 8
    tokens = expert.tokens()
    assert entries["rsr"]["costs"]["cost"] == pytest.approx((tokens[0] + 4.0 * tokens[1]) / 1e6, rel=1e-12)
    assert [entries[name]["costs"]["cost"] for name in ("base_eval", "sft", "final_eval")] == [0.0] * 3
    assert "| cost |" in (place / "ledger.md").read_text()
    systems = Counter(asked.body["messages"][0]["content"].split()[2] for asked in expert.asked)
    assert len(systems) == 3, "agent, planner and critic were all asked"
    again = FinishedRollouts(place / "stages" / "rsr" / "rollouts.jsonl")
    rollout_id = json.loads((place / "stages" / "rsr" / "rollouts.jsonl").read_text().splitlines()[0])["rollout"]["id"]
    assert (again.of(rollout_id).rollout.model, again.of(rollout_id).rollout.chunks[0].logprobs) == ("served", ())
    assert all(asked.key == f"Bearer {KEY}" for asked in expert.asked)
    assert not [path for path in place.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


async def test_a_teacher_of_another_family_shows_the_way_back(expert: ChatServer, tmp_path: Path) -> None:
    place = tmp_path / "run"
    entries = await run(place, "experiment=reterm", "stage=recovery", *role("teacher", expert))
    who = played(place / "stages" / "recovery")
    assert who["recovery: first attempts"].keys() == {""}
    assert who["recovery: recovery"].keys() == {"served"}
    assert entries["recovery"]["counts"]["kept"] == entries["recovery"]["counts"]["failures"] > 0
    assert entries["recovery"]["costs"]["cost"] > 0.0


async def test_another_model_is_another_stage_and_another_place_is_not(expert: ChatServer, tmp_path: Path) -> None:
    place = tmp_path / "run"
    words = ["experiment=rsr", "stage=rsr", *role("planner", expert)]
    await run(place, *words)
    asked = len(expert.asked)
    await run(place, *words, "roles.planner.price_in=9", "roles.planner.concurrency=1")
    assert len(expert.asked) == asked, "it was finished before"
    with pytest.raises(ConfigError, match="another configuration"):
        await run(place, *words, "roles.planner.model=n")
