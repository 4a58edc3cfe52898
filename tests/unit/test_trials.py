"""Trial directories and trajectories: what Harbor's layout asks for, the sampler's own tokens, no score for what was dropped."""

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from termrsi.harness import variants
from termrsi.interop import atif, trials
from termrsi.records import (
    Chunk,
    CollectedArtifact,
    DroppedRollout,
    EnvironmentSpec,
    EpisodeSpec,
    KeptFiles,
    Limits,
    Rollout,
    SamplingParams,
    ScoredRollout,
    Snapshot,
    StopReason,
    TaskSpec,
    Turn,
    Verdict,
)
from tests.written import two_steps

CHUNK = Chunk((1, 2, 3, 4, 9, 5, 6), (0, 0, 1, 1, 0, 1, 1), (0, 0, 0, 0, 0, 1, 1), (-0.1, -0.2, -0.3, -0.4))
TURNS = (Turn("ls", "ls", "[exit 0]\na", 0, completion_tokens=2), Turn("DONE", None, "", completion_tokens=2))


@pytest.fixture
def task(tmp_path: Path) -> TaskSpec:
    root = tmp_path / "task"
    root.mkdir()
    (root / "instruction.md").write_text("Do it.")
    return TaskSpec("org/my task", "f", "Do it.", str(root), EnvironmentSpec())


def spec(task: TaskSpec, name: str = "e1", harness: str = "react") -> EpisodeSpec:
    return EpisodeSpec(name, "g", task, harness, SamplingParams(), Limits())


def scored(name: str = "e1", verdict: Verdict | None = None) -> ScoredRollout:
    rollout = Rollout(
        name, "g", "org/my task", "f", "react", (CHUNK,), TURNS, StopReason.done, prompt_tokens=7, completion_tokens=4
    )
    return ScoredRollout(rollout, verdict or Verdict(False, 0.5, ("a",), ("b",), ("c",), "ctrf", 2.0, log="1 failed\n"))


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_each_call_has_its_whole_prompt_and_the_samplers_tokens(task: TaskSpec) -> None:
    document = atif.trajectory(spec(task), scored().rollout, model="m")
    assert document["schema_version"] == "ATIF-v1.7"
    assert [step["step_id"] for step in document["steps"]] == [1, 2, 3, 4]
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent"]
    assert document["steps"][1]["message"] == "Do it."
    first, second = document["steps"][2], document["steps"][3]
    assert first["metrics"]["prompt_token_ids"] == [1, 2]
    assert first["metrics"]["completion_token_ids"] == [3, 4]
    assert first["metrics"]["logprobs"] == [-0.1, -0.2]
    assert second["metrics"]["prompt_token_ids"] == [1, 2, 3, 4, 9]
    assert second["metrics"]["completion_token_ids"] == [5, 6]
    (call,) = first["tool_calls"]
    assert first["observation"]["results"] == [{"content": "[exit 0]\na", "source_call_id": call["tool_call_id"]}]
    assert "tool_calls" not in second
    assert document["final_metrics"] == {
        "total_prompt_tokens": 7,
        "total_completion_tokens": 4,
        "total_cached_tokens": 0,
        "total_steps": 4,
    }
    assert "null" not in json.dumps(document)


def test_another_models_episode_has_its_name_and_no_log_probabilities(tmp_path: Path, task: TaskSpec) -> None:
    result = scored()
    chunks = tuple(replace(chunk, logprobs=()) for chunk in result.rollout.chunks)
    theirs = replace(result, rollout=replace(result.rollout, chunks=chunks, model="other-1"))
    trial, said = trials.write(tmp_path / "trials", replace(spec(task), model="teacher"), theirs, model="policy")
    assert said["agent_info"]["model_info"] == {"name": "other-1", "provider": "endpoint"}
    assert "logprobs" not in said["agent_result"]["rollout_details"][0]
    document = json.loads((trial / "agent" / "trajectory.json").read_text())
    assert document["agent"]["model_name"] == "other-1"
    assert "logprobs" not in document["steps"][2]["metrics"]
    lost = DroppedRollout("e", "g", task.id, "SandboxError: lost")
    _, said = trials.write(tmp_path / "trials", replace(spec(task), model="teacher"), lost, model="policy")
    assert said["agent_info"]["model_info"]["name"] == "teacher"


@pytest.mark.parametrize("harness", variants.names())
def test_every_harness_makes_a_trajectory(task: TaskSpec, harness: str) -> None:
    document = atif.trajectory(spec(task, harness=harness), scored().rollout)
    assert ("tool_definitions" in document["agent"]) == bool(variants.get(harness).tools)


def test_every_command_of_a_turn_is_a_call_of_its_tool(task: TaskSpec) -> None:
    def made(harness: str, text: str) -> list[tuple[str, dict]]:
        executed = variants.get(harness).parse(text).command or "x"
        rollout = replace(scored().rollout, turns=(Turn(text, executed, "o"), TURNS[1]), harness=harness)
        step = atif.trajectory(spec(task, harness=harness), rollout)["steps"][-2]
        assert step["observation"]["results"][0]["source_call_id"] == step["tool_calls"][-1]["tool_call_id"]
        assert len({call["tool_call_id"] for call in step["tool_calls"]}) == len(step["tool_calls"])
        return [(call["function_name"], call["arguments"]) for call in step["tool_calls"]]

    call = '<tool_call>{"name": "%s", "arguments": {"command": "%s"}}</tool_call>'
    assert made("mini_tool", call % ("bash", "a") + call % ("bash", "b")) == [
        ("bash", {"command": "a"}),
        ("bash", {"command": "b"}),
    ]
    assert made("openhands", call % ("execute_bash", "a")) == [("execute_bash", {"command": "a"})]
    typed = json.dumps({"analysis": "", "plan": "", "commands": [{"keystrokes": "ls\n", "duration": 2}, {"keystrokes": "C-c"}]})
    assert made("terminus_json", typed) == [
        ("bash_command", {"keystrokes": "ls\n", "duration": 2.0}),
        ("bash_command", {"keystrokes": "C-c", "duration": 1.0}),
    ]
    assert made("react", "```bash\nls\n```") == [("bash_command", {"command": "ls"})]
    assert made("react", "no block") == [("bash_command", {"command": "x"})]


def test_what_was_executed_is_told_and_not_what_a_reply_alone_reads_as(task: TaskSpec) -> None:
    """As of a reply whose reasoning the template had opened."""
    rollout = replace(scored().rollout, turns=(Turn("```bash\nrm x\n```", "ls", "o"), TURNS[1]))
    step = atif.trajectory(spec(task), rollout)["steps"][-2]
    assert [call["arguments"] for call in step["tool_calls"]] == [{"command": "ls"}]


def test_turns_that_disagree_with_tokens_are_refused(task: TaskSpec) -> None:
    with pytest.raises(ValueError, match="1 turns but 2 calls"):
        atif.trajectory(spec(task), replace(scored().rollout, turns=TURNS[:1]))


def test_a_trial(task: TaskSpec, tmp_path: Path) -> None:
    trial, _ = trials.write(tmp_path / "trials", spec(task), scored(), model="m")
    assert trial.name.startswith("my-task__")
    assert len(trial.name.rpartition("__")[2]) == 7
    result = read(trial / "result.json")
    assert (result["task_name"], result["trial_name"]) == ("org/my task", trial.name)
    assert (result["verifier_result"], result["reward_valid"], result["exception_info"]) == (
        {"rewards": {"reward": 0.5}},
        True,
        None,
    )
    assert result["agent_result"]["rollout_details"][0]["completion_token_ids"] == [[3, 4], [5, 6]]
    assert result["started_at"] <= result["verifier"]["started_at"] <= result["finished_at"]
    assert (trial / "verifier" / "reward.txt").read_text() == "0.5\n"
    assert (trial / "verifier" / "test-stdout.txt").read_text() == "1 failed\n"
    tests = read(trial / "verifier" / "ctrf.json")["results"]["tests"]
    assert [(test["name"], test["status"]) for test in tests] == [("a", "passed"), ("b", "failed"), ("c", "skipped")]
    assert read(trial / "config.json") == result["config"]
    assert read(trial / "agent" / "trajectory.json")["steps"]


def test_kept_files_are_laid_where_harbor_has_them(task: TaskSpec, tmp_path: Path) -> None:
    entry = CollectedArtifact("/app/out", "artifacts/app/out", "directory", "ok", ("*.o",))
    logs = (("ctrf.json", b"{}"), ("reward.json", b'{"reward": 0.5}'), ("sub/\udcff", b"x"))
    kept = KeptFiles(logs, (("app/out/deep/a", b"\x00"),), (entry,), ("verifier/core\udcff",))
    trial, _ = trials.write(tmp_path / "trials", spec(task), scored(verdict=Verdict(False, 0.5, log="end", kept=kept)))
    assert read(trial / "artifacts" / "manifest.json") == [
        {
            "source": "/app/out",
            "destination": "artifacts/app/out",
            "type": "directory",
            "status": "ok",
            "exclude": ["*.o"],
            "service": None,
        }
    ]
    assert (trial / "artifacts" / "app" / "out" / "deep" / "a").read_bytes() == b"\x00"
    found = {path.relative_to(trial / "verifier").as_posix() for path in (trial / "verifier").rglob("*") if path.is_file()}
    assert found == {"ctrf.json", "reward.json", "sub/\udcff", "left-out.txt", "test-stdout.txt"}
    assert (trial / "verifier" / "ctrf.json").read_text() == "{}"
    assert (trial / "verifier" / "left-out.txt").read_bytes() == b"verifier/core\xff\n"


def test_what_cannot_be_written_is_told(task: TaskSpec, tmp_path: Path) -> None:
    """Names that the tests' programs chose: a directory where a report is due, one too long for this file system."""
    logs = (("ctrf.json/x", b"1"), ("left", b""), ("left/x", b"2"), ("n" * 300, b"3"))
    verdict = Verdict(False, 0.5, ("a",), log="end", kept=KeptFiles(logs, ((".", b"4"),)))
    trial, _ = trials.write(tmp_path / "trials", spec(task), scored(verdict=verdict))
    found = {path.relative_to(trial / "verifier").as_posix() for path in (trial / "verifier").rglob("*") if path.is_file()}
    assert found == {"ctrf.json/x", "left", "left-out.txt", "reward.txt", "test-stdout.txt"}
    assert (trial / "verifier" / "left-out.txt").read_text().split() == ["artifacts/.", "verifier/left/x", f"verifier/{'n' * 300}"]


def test_each_step_has_a_directory_and_a_result(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    trial, result = trials.write(tmp_path / "trials", *two_steps(str(tmp_path / "task")), model="m")
    assert (result["verifier_environment_mode"], result["verifier_result"]) == (None, {"rewards": {"reward": 0.625}})
    one, two = result["step_results"]
    assert [step["step_name"] for step in (one, two)] == ["one", "two"]
    assert [step["verifier_result"]["rewards"] for step in (one, two)] == [{"reward": 1.0}, {"reward": 0.25}]
    assert (one["agent_result"]["n_input_tokens"], one["agent_result"]["n_output_tokens"]) == (2, 1)
    assert (two["agent_result"]["n_input_tokens"], two["agent_result"]["n_output_tokens"]) == (1 + 4, 3)
    assert two["agent_result"]["rollout_details"][0]["completion_token_ids"] == [[4, 5], [6]]
    for name, told, calls in (("one", "Do it.", 1), ("two", "Do more.", 2)):
        document = read(trial / "steps" / name / "agent" / "trajectory.json")
        assert [step["message"] for step in document["steps"] if step["source"] == "user"] == [told]
        assert len([step for step in document["steps"] if step["source"] == "agent"]) == calls
    assert (trial / "steps" / "one" / "verifier" / "reward.txt").read_text() == "1\n"
    assert (trial / "steps" / "one" / "verifier" / "test-stdout.txt").read_text() == "fine\n"
    assert not (trial / "agent").exists()


@pytest.mark.parametrize(("config", "mode"), [("", "shared"), ('[verifier]\nenvironment_mode = "separate"\n', "separate")])
def test_where_the_tests_ran(task: TaskSpec, tmp_path: Path, config: str, mode: str) -> None:
    (Path(task.path) / "task.toml").write_text(config)
    trials.verifier_mode.cache_clear()
    _, result = trials.write(tmp_path / "trials", spec(task), scored())
    assert result["verifier_environment_mode"] == mode


def test_what_was_dropped_has_no_reward(task: TaskSpec, tmp_path: Path) -> None:
    trial, _ = trials.write(tmp_path / "trials", spec(task), DroppedRollout("e1", "g", task.id, "SandboxError: lost: gone", 3))
    result = read(trial / "result.json")
    assert (result["verifier_result"], result["reward_valid"]) == (None, False)
    assert (result["exception_info"]["exception_type"], result["exception_info"]["exception_message"]) == (
        "SandboxError",
        "lost: gone",
    )
    assert list((trial / "verifier").iterdir()) == []


def test_episodes_of_one_task_do_not_meet(task: TaskSpec, tmp_path: Path) -> None:
    first, second = (trials.write(tmp_path, spec(task, name), scored(name))[0] for name in ("e1", "e2"))
    assert first != second
    assert read(first / "result.json")["task_checksum"] == read(second / "result.json")["task_checksum"]


async def test_recorded_rollouts_hand_on_what_they_wrote(task: TaskSpec, tmp_path: Path) -> None:
    class Plain:
        discarded: Sequence[Snapshot] = ()

        async def run(self, specs: Sequence[EpisodeSpec]) -> AsyncGenerator[ScoredRollout | DroppedRollout, None]:
            for one in specs:
                verdict = Verdict(True, 1.0, kept=KeptFiles((("log", b"x"),)))
                yield scored(one.id, verdict) if one.id != "e2" else DroppedRollout("e2", "g", task.id, "late", 1)

        async def discard(self, snapshots: Sequence[Snapshot]) -> None:
            self.discarded = snapshots

        async def kept(self, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
            raise NotImplementedError

    plain = Plain()
    recorded = trials.RecordedRollouts(plain, tmp_path / "trials")
    found = [one async for one in recorded.run([spec(task, "e1"), spec(task, "e2")])]
    assert [type(one) for one in found] == [ScoredRollout, DroppedRollout]
    assert isinstance(found[0], ScoredRollout)
    assert found[0].verdict == Verdict(True, 1.0)  # nobody else reads the files
    assert [path.read_text() for path in tmp_path.rglob("log")] == ["x"]
    assert len(list((tmp_path / "trials").glob("*/result.json"))) == 2
    assert not (tmp_path / "trials" / "result.json").exists()
    recorded.close()
    again = trials.RecordedRollouts(plain, tmp_path / "trials")  # of a stage that goes on
    assert len([one async for one in again.run([spec(task, "e2"), spec(task, "e3")])]) == 2
    again.close()
    assert read(tmp_path / "trials" / "result.json")["n_total_trials"] == 3
    await recorded.discard([])
    assert plain.discarded == []
