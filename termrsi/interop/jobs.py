"""The job of a directory of trials in Harbor's layout: `config.json` and `result.json`, counted as Harbor 0.26 counts.

A trial that was dropped is an error and in no mean. pass@k stands where every reward is 0 or 1, for k = 2, 4, 8, ... and 5, 10, ...
up to the fewest attempts of a task.
"""

import json
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from termrsi.algo.metrics import mean_pass_at_k
from termrsi.interop import atif

Json = dict[str, Any]  # Any: JSON
DATASET = "adhoc"  # as Harbor names trials of no dataset


@dataclass(slots=True)
class _Counts:
    """Of one agent with one model."""

    rewards: dict[str, list[tuple[str, float]]] = field(default_factory=lambda: defaultdict(list))  # task -> trial, reward
    errors: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # exception type -> trials


class Job:
    """Counts trials, each by its result as written to its result.json; `write` says what there is."""

    def __init__(self, directory: Path, number: str) -> None:
        self._directory = directory
        self._id = number
        self._started = ""
        self._evals: dict[str, _Counts] = defaultdict(_Counts)
        self._tokens = dict.fromkeys(("n_input_tokens", "n_cache_tokens", "n_output_tokens"), 0)
        self._trials = 0
        self._tasks: dict[str, None] = {}
        self._agents: list[Json] = []

    @classmethod
    def of(cls, directory: Path) -> "Job":
        """Of every trial that lies there whole, whichever run of the stage wrote it."""
        job = cls(directory, job_id(directory))
        for file in sorted(directory.glob("*/result.json")):
            job.add(json.loads(file.read_text(encoding="utf-8")))
        return job

    def add(self, result: Json) -> None:
        name, agent = result["trial_name"], result["agent_info"]
        model = (agent["model_info"] or {}).get("name")
        counts = self._evals["__".join((agent["name"], *((model,) if model else ()), DATASET))]
        if result["verifier_result"] is not None:
            counts.rewards[result["task_name"]].append((name, result["verifier_result"]["rewards"]["reward"]))
        if result["exception_info"] is not None:
            counts.errors[result["exception_info"]["exception_type"]].append(name)
        for key in self._tokens:
            self._tokens[key] += (result["agent_result"] or {}).get(key, 0)
        self._trials += 1
        self._started = min(self._started or result["started_at"], result["started_at"])
        self._tasks[result["task_id"]["path"]] = None
        if result["config"]["agent"] not in self._agents:
            self._agents.append(result["config"]["agent"])

    def write(self) -> None:
        """`config.json` and `result.json`; nothing where there is no trial."""
        if not self._trials:
            return
        now = datetime.now(UTC).isoformat()
        errors = sum(len(trials) for counts in self._evals.values() for trials in counts.errors.values())
        stats = {
            "n_completed_trials": self._trials,
            "n_errored_trials": errors,
            "evals": {key: _eval(counts) for key, counts in self._evals.items()},
            **self._tokens,
        }
        config = {
            "job_name": self._directory.name,
            "jobs_dir": str(self._directory.parent),
            "agents": self._agents,
            "tasks": [{"path": path} for path in self._tasks],
        }
        atif.dump(self._directory / "config.json", config)
        times = {"started_at": self._started, "updated_at": now, "finished_at": now}
        atif.dump(self._directory / "result.json", {"id": self._id, **times, "n_total_trials": self._trials, "stats": stats})


def job_id(directory: Path) -> str:
    """The same for the same directory."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, directory.absolute().as_uri()))


def _eval(counts: _Counts) -> Json:
    trials = [trial for of_task in counts.rewards.values() for trial in of_task]
    by_reward: dict[str, list[str]] = defaultdict(list)
    for name, reward in trials:
        by_reward[str(reward)].append(name)
    return {
        "n_trials": len(trials),
        "n_errors": sum(map(len, counts.errors.values())),
        "metrics": [{"mean": sum(reward for _, reward in trials) / len(trials)}] if trials else [],
        "pass_at_k": _pass_at_k([[reward for _, reward in of_task] for of_task in counts.rewards.values()]),
        "reward_stats": {"reward": dict(by_reward)} if trials else {},
        "exception_stats": dict(counts.errors),
    }


def _pass_at_k(rewards: list[list[float]]) -> dict[str, float]:
    if not rewards or any(reward not in (0.0, 1.0) for of_task in rewards for reward in of_task):
        return {}
    fewest = min(map(len, rewards))
    wanted = {2**power for power in range(1, fewest.bit_length())} | set(range(5, fewest + 1, 5))
    return {str(k): mean_pass_at_k(rewards, k) for k in sorted(wanted)}
