"""Scored rollouts as trial directories in Harbor's layout, so that its viewer and scripts made for it read a run of ours.

    DIR/config.json, result.json                        the job (`jobs`), after each batch of episodes
    DIR/<task[:32]>__<7>/config.json, result.json       one trial: what was asked for, what came out
    DIR/<task[:32]>__<7>/agent/trajectory.json          ATIF
    DIR/<task[:32]>__<7>/verifier/reward.txt, ctrf.json, test-stdout.txt
    DIR/<task[:32]>__<7>/artifacts/manifest.json, ...   what the task publishes, where the agent left it
    DIR/<task[:32]>__<7>/steps/<step>/agent, verifier   of a task of several steps, in place of the two above

A dropped episode has an exception and no reward: it is no 0.
"""

import asyncio
import errno
import functools
import hashlib
import json
import os
import re
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from termrsi import __version__, durable
from termrsi.interop import atif
from termrsi.interop.jobs import Job, job_id
from termrsi.ports import Rollouts
from termrsi.records import DroppedRollout, EpisodeSpec, KeptFiles, Rollout, ScoredRollout, Snapshot, Verdict
from termrsi.reward import apart, steps

Json = dict[str, Any]  # Any: JSON
_SPACE = uuid.UUID("5f1c2f0a-93c4-4a37-9d6d-0b6f3d3f7a10")  # of our names, so that the same episode has the same id


class RecordedRollouts:
    """`ports.Rollouts` that writes a trial directory for each result before it hands it on."""

    def __init__(self, rollouts: Rollouts, directory: Path, *, model: str = "") -> None:
        self._rollouts = rollouts
        self._directory = directory
        self._model = model

    async def run(self, specs: Sequence[EpisodeSpec]) -> AsyncGenerator[ScoredRollout | DroppedRollout, None]:
        by_id = {spec.id: spec for spec in specs}
        async with aclosing(self._rollouts.run(specs)) as results:
            async for result in results:
                number = result.id if isinstance(result, DroppedRollout) else result.rollout.id
                await asyncio.to_thread(write, self._directory, by_id[number], result, model=self._model)
                yield without_files(result)

    def close(self) -> None:
        """Counts all trials that lie there, once nothing runs any more."""
        Job.of(self._directory).write()

    async def discard(self, snapshots: Sequence[Snapshot]) -> None:
        await self._rollouts.discard(snapshots)

    async def kept(self, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
        return await self._rollouts.kept(snapshots)


def write(directory: Path, spec: EpisodeSpec, result: ScoredRollout | DroppedRollout, *, model: str = "") -> tuple[Path, Json]:
    """One trial directory, and its result. `result.json` comes last: a directory without one is half-written.

    `model`: the policy. Of an episode that another model played, that one's name; of a dropped one, its role.
    """
    model = (result.rollout.model if isinstance(result, ScoredRollout) else spec.model) or model
    trial = directory / _name(spec)
    config = _config(spec, trial, model)
    trial.mkdir(parents=True, exist_ok=True)
    atif.dump(trial / "config.json", config)
    said = _result(spec, result, trial, config, model)
    if isinstance(result, ScoredRollout) and spec.task.steps:
        said["step_results"] = []
        for step, part in _steps(spec, result):
            _recorded(trial / "steps" / step.task.step, step, part, model)
            said["step_results"].append(_step_result(step.task.step, part))
    else:
        _recorded(trial, spec, result, model)
    atif.dump(trial / "result.json", said)
    return trial, said


def _recorded(place: Path, spec: EpisodeSpec, result: ScoredRollout | DroppedRollout, model: str) -> None:
    """What the agent did, and what the verifier found."""
    for name in ("agent", "verifier", "artifacts"):
        (place / name).mkdir(parents=True, exist_ok=True)
    kept = (result.verdict.kept if isinstance(result, ScoredRollout) else None) or KeptFiles()
    lost = [f"artifacts/{name}" for name in _lay(place / "artifacts", kept.artifacts)]
    atif.dump(place / "artifacts" / "manifest.json", [{**asdict(entry), "service": None} for entry in kept.manifest])
    if isinstance(result, ScoredRollout):
        atif.dump(place / "agent" / "trajectory.json", atif.trajectory(spec, result.rollout, model=model))
        _verifier(place / "verifier", result.verdict, lost)


def _steps(spec: EpisodeSpec, result: ScoredRollout) -> Iterator[tuple[EpisodeSpec, ScoredRollout]]:
    """Each step that was verified, as an episode of its own: its calls and turns, its tokens, its verdict."""
    rollout = result.rollout
    bounds = [*rollout.step_starts, len(rollout.chunks)]
    turns = iter(rollout.turns)
    for task, verdict, (start, end) in zip(steps.parts(spec.task), result.verdict.parts, pairwise(bounds), strict=False):
        chunks = rollout.chunks[start:end]
        calls = list(atif.tokens(chunks))
        own = replace(
            rollout,
            id=f"{rollout.id}/{task.step}",
            chunks=chunks,
            turns=tuple(islice(turns, len(calls))),
            prompt_tokens=sum(len(prompt) for prompt, _, _ in calls),
            completion_tokens=sum(len(ids) for _, ids, _ in calls),
            cached_tokens=0,  # counted for the whole alone
            step=task.step,
            step_starts=(),
        )
        yield replace(spec, task=task), ScoredRollout(own, verdict)


def _step_result(name: str, part: ScoredRollout) -> Json:
    return {
        "step_name": name,
        "agent_result": _agent_result(part.rollout),
        "verifier_result": {"rewards": {"reward": part.verdict.reward}},
        "exception_info": None,
    }


def _agent_result(rollout: Rollout) -> Json:
    return {
        "n_input_tokens": rollout.prompt_tokens,
        "n_cache_tokens": rollout.cached_tokens,
        "n_output_tokens": rollout.completion_tokens,
        "rollout_details": _details(rollout),
        "metadata": {
            "stop": rollout.stop.value,
            "turns": len(rollout.turns),
            "attempt": rollout.attempt,
            "transcript_cases": rollout.cases,
        },
    }


def _name(spec: EpisodeSpec) -> str:
    short = re.sub(r"[^A-Za-z0-9._-]+", "-", spec.task.id.rpartition("/")[2])[:32].strip("-.") or "task"
    return f"{short}__{hashlib.sha256(spec.id.encode()).hexdigest()[:7]}"


def _config(spec: EpisodeSpec, trial: Path, model: str) -> Json:
    return {
        "task": {"path": spec.task.path},
        "trial_name": trial.name,
        "trials_dir": str(trial.parent),
        "agent": {
            "import_path": "termrsi.interop.harbor:Agent",
            "model_name": model or None,
            "kwargs": {"harness": spec.harness, "temperature": spec.sampling.temperature, "top_p": spec.sampling.top_p},
        },
        "environment": {"type": None, "import_path": "termrsi.interop.harbor:Environment"},
        "verifier": {},
        "job_id": job_id(trial.parent),
    }


def _result(spec: EpisodeSpec, result: ScoredRollout | DroppedRollout, trial: Path, config: Json, model: str) -> Json:
    end = datetime.now(UTC)
    said: Json = {
        "schema_version": 1,
        "id": str(uuid.uuid5(_SPACE, f"{trial.parent}/{spec.id}")),
        "task_name": spec.task.id,
        "trial_name": trial.name,
        "trial_uri": trial.absolute().as_uri(),
        "task_id": {"path": spec.task.path},
        "source": None,
        "task_checksum": _checksum(Path(spec.task.path)),
        "config": config,
        "agent_info": {
            "name": f"termrsi-{spec.harness}",
            "version": __version__,
            "model_info": {"name": model, "provider": "endpoint" if spec.model else "termrsi"} if model else None,
        },
        "finished_at": end.isoformat(),
        "verifier_environment_mode": None if spec.task.steps else verifier_mode(spec.task.path),
    }
    if isinstance(result, DroppedRollout):
        said |= {
            "started_at": end.isoformat(),
            "agent_result": None,
            "verifier_result": None,
            "exception_info": _exception(result, end),
            "reward_valid": False,
        }
        return said
    rollout, verdict = result.rollout, result.verdict
    begin = end - timedelta(seconds=rollout.wall_s + verdict.duration_s)
    between = end - timedelta(seconds=verdict.duration_s)
    said |= {
        "started_at": begin.isoformat(),
        "agent_execution": {"started_at": begin.isoformat(), "finished_at": between.isoformat()},
        "verifier": {"started_at": between.isoformat(), "finished_at": end.isoformat()},
        "agent_result": _agent_result(rollout),
        "verifier_result": {"rewards": {"reward": verdict.reward}},
        "exception_info": None,
        "reward_valid": True,
    }
    return said


def _details(rollout: Rollout) -> list[Json]:
    """One segment: every call with its whole prompt."""
    calls = list(atif.tokens(rollout.chunks))
    segment: Json = {
        "prompt_token_ids": [prompt for prompt, _, _ in calls],
        "completion_token_ids": [ids for _, ids, _ in calls],
    }
    known = all(logprobs for _, _, logprobs in calls)
    return [segment | ({"logprobs": [logprobs for _, _, logprobs in calls]} if known else {})]


def _exception(result: DroppedRollout, when: datetime) -> Json:
    kind, found, what = result.reason.partition(": ")
    known = found and kind.endswith("Error")
    return {
        "exception_type": kind if known else "TaskError",
        "exception_message": what if known else result.reason,
        "exception_traceback": "",
        "occurred_at": when.isoformat(),
    }


def without_files(result: ScoredRollout | DroppedRollout) -> ScoredRollout | DroppedRollout:
    """For those who come after: no stage reads them, and a step's rollouts stay in memory together."""
    if isinstance(result, DroppedRollout):
        return result
    parts = tuple(replace(part, kept=None) for part in result.verdict.parts)
    return replace(result, verdict=replace(result.verdict, kept=None, parts=parts))


def _lay(folder: Path, files: Iterable[tuple[str, bytes]]) -> list[str]:
    """Writes what can be written; the names of what cannot (too long here, a file where another has a directory)."""
    lost = []
    for name, data in files:
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            durable.write_bytes(folder / name, data, sync=False)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            lost.append(name)
    return lost


def _verifier(folder: Path, verdict: Verdict, lost: list[str]) -> None:
    """What the verifier left, if it was kept; else the verdict's own words. `lost`: artifacts that could not be written."""
    kept = verdict.kept or KeptFiles()
    lost = [*kept.left_out, *lost, *(f"verifier/{name}" for name in _lay(folder, kept.logs))]
    taken = {name.partition("/")[0] for name, _ in kept.logs}
    own = {"test-stdout.txt": verdict.log.encode()}
    if "reward.json" not in taken:
        own["reward.txt"] = f"{verdict.reward:g}\n".encode()
    if report := _ctrf(verdict):
        own["ctrf.json"] = json.dumps(report, indent=2).encode()
    if lost:
        own["left-out.txt"] = os.fsencode("".join(f"{path}\n" for path in lost))
    _lay(folder, ((name, data) for name, data in own.items() if name not in taken))


def _ctrf(verdict: Verdict) -> Json:
    outcomes = (("passed", verdict.passed), ("failed", verdict.failed), ("skipped", verdict.skipped))
    tests = [{"name": name, "status": status, "duration": 0} for status, names in outcomes for name in names]
    if not tests:
        return {}
    counts = {status: len(names) for status, names in outcomes}
    summary = {"tests": len(tests), **counts, "pending": 0, "other": 0, "start": 0, "stop": 0}
    tool = {"name": f"termrsi ({verdict.source})", "version": __version__}
    return {"results": {"tool": tool, "summary": summary, "tests": tests}}


@functools.lru_cache(maxsize=4096)
def verifier_mode(task_path: str) -> str:
    """Harbor's word for where a task's tests run."""
    return "separate" if (Path(task_path) / "task.toml").is_file() and apart.is_separate(task_path) else "shared"


@functools.lru_cache(maxsize=4096)  # a run has many trials of one task, which does not change meanwhile
def _checksum(root: Path) -> str:
    """Of a task directory's files: SHA-256 over sorted paths and contents, each behind its length."""
    total = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink()):
        for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            total.update(len(part).to_bytes(4, "big") + part)
    return total.hexdigest()
