"""The run of a phase: which step is a candidate, what comes before what, and what a refused candidate leaves."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from termrsi.config.stages import RetentionConfig
from termrsi.records import FinishedBatch
from termrsi.stages import phase, retain
from termrsi.stages.retain import Candidate


class Host:
    """A policy or a critic: a number that steps change, and what was saved of it."""

    def __init__(self, name: str, did: list[str]) -> None:
        self.name, self.did, self.weights = name, did, 0
        self.saved: dict[str, int] = {}

    async def save(self, directory: str) -> str:
        self.saved[directory] = self.weights
        return ""

    async def load(self, directory: str) -> str:
        self.did.append(f"{self.name} back")
        self.weights = self.saved[directory]
        return ""


class Bench:
    """Steps that count the weights up by one; `scores[step]` is what validation finds."""

    def __init__(self, root: Path, scores: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[str] = []
        self.begun: list[int] = []  # the policy's weights as each step began
        self.policy, self.critic = Host("policy", self.did), Host("critic", self.did)
        self.ctx: Any = SimpleNamespace(
            name="rpr",
            out=root,
            policy=self.policy,
            critic=self.critic,
            sync=self.sync,
            log=lambda stage, values: None,
            finished=None,
            step=lambda number: nullcontext(),
        )

        async def measure(ctx: Any, step: int, config: RetentionConfig) -> Candidate:
            self.did.append(f"measure {step}")
            return Candidate(step, {"level-1": scores[step]})

        monkeypatch.setattr(retain, "measure", measure)

    async def sync(self) -> None:
        self.did.append("served")

    async def step(self, step: int, taken: FinishedBatch) -> None:
        self.begun.append(self.policy.weights)
        self.policy.weights += 1
        self.critic.weights += 10
        self.did.append(f"step {step}")

    def sampler(self) -> Any:
        return Sampler(self.did)

    async def state(self) -> dict[str, Any]:
        raise AssertionError("there are no checkpoints")

    async def restore(self, state: dict[str, Any]) -> None:
        raise AssertionError("there are no checkpoints")

    async def let_go(self, step: int) -> None:
        assert step == len(self.begun)

    async def play(self, steps: int, **retention: Any) -> retain.Keeper:
        rule = RetentionConfig(max_drop=1.0, **retention)
        return await phase.play(self.ctx, self, steps=steps, retention=rule, checkpoint_every=1)


class Sampler:
    def __init__(self, did: list[str]) -> None:
        self.did = did

    async def __aenter__(self) -> "Sampler":
        return self

    async def __aexit__(self, *error: object) -> None:
        self.did.append("ended")

    async def batch(self, what: str) -> FinishedBatch:
        return FinishedBatch(())

    async def trained(self) -> None:
        self.did.append("trained")


async def test_the_next_batch_is_sampled_beside_the_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, {0: 0.2, 2: 0.1, 3: 0.4}, monkeypatch)
    keeper = await bench.play(3, every=2)
    assert bench.did == [
        "measure 0", "step 1", "trained", "step 2", "trained", "measure 2", "step 3", "trained", "measure 3", "ended",
    ]  # fmt: skip
    assert bench.begun == [0, 1, 2]  # the refused candidate is where the next step begins
    assert json.loads((tmp_path / "retention.json").read_text()) == keeper.log
    assert [entry.get("kept") for entry in keeper.log] == [None, False, True]
    result = phase.result(bench.ctx, keeper, 3, {"own": 7}, "policy", "critic")
    assert result.outputs == {"policy": str(tmp_path / "policy"), "critic": str(tmp_path / "critic")}
    assert result.verdict == "retained step 3"
    assert result.summary == {
        "steps": 3, "retained_step": 3, "validation_before": 0.2, "validation_after": 0.4, "own": 7,
    }  # fmt: skip
    assert list(bench.policy.saved.values()) == [3]


async def test_a_refused_candidate_is_rolled_back_before_anything_more_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept at 1, refused at 2 and at 3: steps 3 and 4 begin with the actor and the critic of step 1; the last is left as it is."""
    bench = Bench(tmp_path, {0: 0.2, 1: 0.3, 2: 0.1, 3: 0.3, 4: 0.0}, monkeypatch)
    keeper = await bench.play(4, every=1, rollback=True)
    back = ["policy back", "critic back", "served", "trained"]
    assert bench.did == [
        "measure 0", "step 1", "measure 1", "trained",
        "step 2", "measure 2", *back,
        "step 3", "measure 3", *back,
        "step 4", "measure 4", "trained", "ended",
    ]  # fmt: skip
    assert bench.begun == [0, 1, 1, 1]
    assert (bench.policy.weights, bench.critic.weights) == (2, 20)
    assert [entry.get("rolled_back") for entry in keeper.log] == [None, None, 1, 1, None]
    assert keeper.best.step == 1


async def test_a_phase_may_go_back_to_its_start_and_has_no_critic_to_bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, {0: 0.5, 1: 0.1, 2: 0.1}, monkeypatch)
    bench.ctx.critic = None
    keeper = await bench.play(2, every=1, rollback=True)
    assert bench.begun == [0, 0]
    assert "critic back" not in bench.did
    assert phase.result(bench.ctx, keeper, 2, {}, "policy").verdict.startswith("no candidate beat the starting policy")
