# pyright: reportMissingImports=false
"""What Harbor's own models say, for tests that compare with them. Run by its interpreter: `python harbor_side.py VERB PATH ...`.

fields PATH ...     one JSON object: path -> fields of the task, or {"error": text}
refused PATH ...    each directory of tasks: an object of those that are refused, name -> text
trials PATH ...     each trial directory's config, result and trajectory through Harbor's models; raises if one is refused
jobs PATH ...       each directory of trials: its config and result, and whether its counts are Harbor's; raises if not
"""

import json
import sys
from pathlib import Path


def fields(path: str) -> dict[str, object]:
    from harbor.models.task.task import Task

    try:
        task = Task(path)
    except Exception as error:  # noqa: BLE001 of whatever kind: that it is refused is the answer
        return {"error": f"{type(error).__name__}: {error}"}
    config, environment = task.config, task.config.environment
    return {
        "name": task.name,
        "instruction": task.instruction,
        "agent_timeout": config.agent.timeout_sec,
        "verifier_timeout": config.verifier.timeout_sec,
        "verifier_user": config.verifier.user,
        "verifier_env": config.verifier.env,
        "cpus": environment.cpus,
        "memory_mb": environment.memory_mb,
        "storage_mb": environment.storage_mb,
        "docker_image": environment.docker_image or None,
        "workdir": environment.workdir,
        "env": environment.env,
        "build_timeout": environment.build_timeout_sec,
        "network": (config.agent.network_mode or environment.network_mode).value == "public",  # the agent's own goes first
        "steps": [
            [step.name, step.agent.timeout_sec, step.min_reward, task.step_instruction(step.name)] for step in config.steps or []
        ],
        "step_verifiers": [[step.verifier.timeout_sec, health(step.healthcheck)] for step in config.steps or []],
        "healthcheck": health(environment.healthcheck),
        "last_step_counts": config.multi_step_reward_strategy is not None and config.multi_step_reward_strategy.value == "final",
        "solution_env": config.solution.env,
    }


def health(check: object) -> dict[str, object] | None:
    """Under our names of its fields."""
    return None if check is None else {name.replace("_sec", "_s"): value for name, value in vars(check).items()}


def refused(path: str) -> dict[str, str]:
    """Of a directory of tasks: the name of each that is refused, and why."""
    found = {one.name: fields(str(one)) for one in sorted(Path(path).iterdir())}
    return {name: str(said["error"]).splitlines()[-1] for name, said in found.items() if "error" in said}


def trial(path: Path) -> str:
    from harbor.models.trajectories.trajectory import Trajectory
    from harbor.models.trial.artifact_manifest import ArtifactManifestEntry
    from harbor.models.trial.config import TrialConfig
    from harbor.models.trial.result import TrialResult

    TrialConfig.model_validate_json((path / "config.json").read_text())
    result = TrialResult.model_validate_json((path / "result.json").read_text())
    valid = result.verifier_result is not None
    if result.reward_valid is not valid:
        raise AssertionError(f"{path}: reward_valid is {result.reward_valid}")
    for file in [path / "agent" / "trajectory.json", *sorted(path.glob("steps/*/agent/trajectory.json"))]:
        if not file.is_file():
            continue
        trajectory = Trajectory.model_validate_json(file.read_text())
        calls = [step for step in trajectory.steps if step.source == "agent"]
        if not all(len(step.metrics.completion_token_ids) == len(step.metrics.logprobs) > 0 for step in calls):
            raise AssertionError(f"{path}: tokens without log-probabilities")
    for file in [path / "artifacts" / "manifest.json", *sorted(path.glob("steps/*/artifacts/manifest.json"))]:
        for entry in json.loads(file.read_text()) if file.is_file() else []:
            ArtifactManifestEntry.model_validate(entry)
    for step in result.step_results or []:
        if not (path / "steps" / step.step_name / "verifier" / "reward.txt").is_file():
            raise AssertionError(f"{path}: nothing of its step {step.step_name}")
    return result.trial_name


def job(path: Path) -> dict[str, object]:
    """Raises unless its counts are those that Harbor makes of the trials in it."""
    from harbor.models.job.config import JobConfig
    from harbor.models.job.result import JobResult, JobStats
    from harbor.models.trial.result import TrialResult
    from harbor.utils.pass_at_k import compute_pass_at_k_by_evals

    JobConfig.model_validate_json((path / "config.json").read_text())
    result = JobResult.model_validate_json((path / "result.json").read_text())
    trials = [TrialResult.model_validate_json(file.read_text()) for file in sorted(path.glob("*/result.json"))]
    theirs = JobStats.from_trial_results(trials)
    passes = compute_pass_at_k_by_evals(trials)
    for key, ours in result.stats.evals.items():
        for names in ours.reward_stats.get("reward", {}).values():
            names.sort()
        if ours.pass_at_k != passes.get(key, {}):
            raise AssertionError(f"{path}: pass@k {ours.pass_at_k}, Harbor's {passes.get(key, {})}")
        ours.pass_at_k, ours.metrics = {}, []
    if result.stats != theirs:
        raise AssertionError(f"{path}: {result.stats} is not {theirs}")
    return {"trials": result.n_total_trials, "passes": {key: {str(k): v for k, v in of.items()} for key, of in passes.items()}}


if __name__ == "__main__":
    verb, paths = sys.argv[1], sys.argv[2:]
    verbs = {"trials": trial, "jobs": job, "refused": refused}
    answer = {path: fields(path) for path in paths} if verb == "fields" else [verbs[verb](Path(path)) for path in paths]
    sys.stdout.write(json.dumps(answer))
