"""The verifier on a folder that plays the sandbox: commands run on the host with the machine's paths moved into it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from termrsi.errors import SandboxError, SandboxSpoiled, TaskError, VerifierError
from termrsi.records import EnvironmentSpec, TaskSpec
from termrsi.reward.verifier import HarborVerifier, load_spec, read_reward, read_verdict
from termrsi.reward.verifiers import TaskVerifier
from tests.folder_sandbox import FolderSandbox

Make = Callable[..., TaskSpec]


@pytest.fixture
def box(tmp_path: Path) -> FolderSandbox:
    root = tmp_path / "machine"
    (root / "app").mkdir(parents=True)
    return FolderSandbox(root)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_task(script: str, config: str = "") -> TaskSpec:
        root = tmp_path / "task"
        (root / "tests").mkdir(parents=True)
        (root / "tests" / "test.sh").write_bytes(script.encode())
        (root / "task.toml").write_text(config)
        return TaskSpec("t", "f", "do it", str(root), EnvironmentSpec(workdir="/app"))

    return make_task


CTRF = '{"results":{"tests":[{"name":"a","status":"passed"},{"name":"b","status":"failed"},{"name":"c","status":"skipped"}]}}'
REPORT = f"echo '{CTRF}' > /logs/verifier/ctrf.json\n"


async def test_partial_result(box: FolderSandbox, make: Make) -> None:
    verdict = await HarborVerifier().verify(box, make(f"#!/bin/bash\n{REPORT}echo 0 > /logs/verifier/reward.txt\nexit 3\n"))
    assert (verdict.strict, verdict.reward, verdict.source) == (False, 0.0, "ctrf")
    assert (verdict.passed, verdict.failed, verdict.skipped) == (("a",), ("b",), ("c",))


async def test_a_sandbox_without_room_is_the_agents_failure_where_the_disk_was_its_own(box: FolderSandbox, make: Make) -> None:
    task = make("echo 1 > /logs/verifier/reward.txt\n")
    assert (await HarborVerifier().verify(box, task)).strict
    assert not (box.root / ".room").exists()
    box.fault = SandboxSpoiled("no space left")
    verdict = await HarborVerifier().verify(box, task)
    assert (verdict.strict, verdict.reward, verdict.source) == (False, 0.0, "spoiled")
    box.fault = SandboxError("the engine's disk is full")
    with pytest.raises(SandboxError, match="engine"):
        await HarborVerifier().verify(box, task)


async def test_official_reward_decides_strictness(box: FolderSandbox, make: Make) -> None:
    verdict = await HarborVerifier().verify(box, make(f"#!/bin/bash\n{REPORT}echo 1.0 > /logs/verifier/reward.txt\n"))
    assert verdict.strict
    assert verdict.failed == ("b",)


async def test_without_a_report_the_reward_stands_alone(box: FolderSandbox, make: Make) -> None:
    verdict = await HarborVerifier().verify(box, make("echo 0 > /logs/verifier/reward.txt\n"))
    assert (verdict.reward, verdict.source, verdict.passed) == (0.0, "reward", ())


async def test_processes_die_before_anything_else(box: FolderSandbox, make: Make) -> None:
    await HarborVerifier().verify(box, make("echo 1 > /logs/verifier/reward.txt\n"))
    assert box.events[0] == "kill"
    assert box.events.index("put /tests") < len(box.events) - 1


async def test_a_replaced_program_scores_nothing_unless_the_solution_replaces_it_too(box: FolderSandbox, make: Make) -> None:
    task = make("echo 1 > /logs/verifier/reward.txt")
    box.changed = ["/root/.local/bin/black", "/usr/local/bin/pytest"]
    verdict = await HarborVerifier().verify(box, task)
    assert (verdict.strict, verdict.replaced) == (True, tuple(box.changed))  # told, and no more
    box.changed = ["/usr/bin/env", "/usr/local/bin/pytest"]
    verdict = await HarborVerifier().verify(box, task)
    assert (verdict.strict, verdict.reward, verdict.source, verdict.replaced) == (False, 0.0, "replaced", tuple(box.changed))
    assert box.events[-1] == "kill"  # no test was run
    assert (await HarborVerifier().verify(box, replace(task, touches=("/usr/bin/env",)))).strict


async def test_planted_files_are_gone(box: FolderSandbox, make: Make) -> None:
    logs, tests = box.root / "logs" / "verifier", box.root / "tests"
    logs.mkdir(parents=True)
    tests.mkdir()
    (logs / "reward.json").write_text('{"reward": 1}')
    (logs / "ctrf.json").write_text('{"results":{"tests":[{"name":"forged","status":"passed"}]}}')
    (tests / "conftest.py").write_text("raise SystemExit(0)")
    script = "#!/bin/bash\n[ -e /tests/conftest.py ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    verdict = await HarborVerifier().verify(box, make(script))
    assert (verdict.reward, verdict.passed) == (0.0, ())


async def test_planted_links_are_not_written_through(box: FolderSandbox, make: Make) -> None:
    target = box.root / "app" / "mine"
    target.mkdir()
    (target / "keep").write_text("x")
    for name in ("logs", "tests"):
        (box.root / name).symlink_to(target)
    verdict = await HarborVerifier().verify(box, make("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"))
    assert verdict.strict
    assert [path.name for path in target.iterdir()] == ["keep"]


async def test_working_directory_output_and_environment(box: FolderSandbox, make: Make) -> None:
    script = '#!/bin/bash\npwd\necho "$WORD"\necho 1 > /logs/verifier/reward.txt\n'
    await HarborVerifier().verify(box, make(script, '[verifier]\nenv = { WORD = "two words" }\n'))
    assert (box.root / "logs/verifier/test-stdout.txt").read_text() == f"{box.root}/app\ntwo words\n"


async def test_windows_line_ends_in_the_script(box: FolderSandbox, make: Make) -> None:
    verdict = await HarborVerifier().verify(box, make("#!/bin/bash\r\necho 1 > /logs/verifier/reward.txt\r\n"))
    assert verdict.strict


async def test_time_out_is_an_error(box: FolderSandbox, make: Make) -> None:
    task = make("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\nsleep 60\n", "[verifier]\ntimeout_sec = 0.3\n")
    with pytest.raises(VerifierError, match=r"no end within 0\.3 s"):
        await HarborVerifier().verify(box, task)


async def test_lost_reward_is_an_error(box: FolderSandbox, make: Make) -> None:
    with pytest.raises(VerifierError, match="no reward file"):
        await HarborVerifier().verify(box, make("#!/bin/bash\nset -e\nfalse\necho $? > /logs/verifier/reward.txt\n"))


@pytest.mark.parametrize("reward", ["0", "1"])
async def test_no_sign_of_its_tests(box: FolderSandbox, make: Make, reward: str) -> None:
    """Also of a success: what stood for pytest may have been the agent's."""
    script = f"#!/bin/bash\npytest() {{ true; }}\npytest /tests\necho {reward} > /logs/verifier/reward.txt\n"
    with pytest.raises(VerifierError, match="never ran"):
        await HarborVerifier().verify(box, make(script))


@pytest.mark.parametrize(
    "script",
    [
        "/app/run.sh; echo 0 > /logs/verifier/reward.txt\n",  # the agent's program lacks something, not the tests
        "#!/bin/bash\necho 0 > /logs/verifier/reward.txt # as pytest would\n",
        "pytest() { :; }; pytest\necho '3 failed in 0.1s' > /logs/verifier/x.log; echo 0 > /logs/verifier/reward.txt\n",
    ],
)
async def test_a_failure_is_one(box: FolderSandbox, make: Make, script: str) -> None:
    (box.root / "app" / "run.sh").write_text("#!/bin/bash\nno_such_program\n")
    (box.root / "app" / "run.sh").chmod(0o755)
    assert (await HarborVerifier().verify(box, make(script))).reward == 0.0


async def test_a_reward_that_no_test_names_is_not_read(box: FolderSandbox, make: Make) -> None:
    """What the tests ran of the agent's may write, while they run, beside theirs."""
    plant = "echo '{\"reward\": 1}' > /logs/verifier/$(echo drawer | rev).json"
    script = f"#!/bin/bash\n{plant}; echo 0 > /logs/verifier/reward.txt\n"
    assert (await HarborVerifier().verify(box, make(script))).reward == 0.0


@pytest.mark.parametrize(
    "script",
    [
        "curl -LsSf https://example.invalid/uv | sh; uvx pytest /tests\necho 0 > /logs/verifier/reward.txt\n",
        "run_the_checks_tool\necho 0 > /logs/verifier/reward.txt\n",
        "echo 'E: Unable to locate package curl'\necho 0 > /logs/verifier/reward.txt\n",
    ],
)
async def test_a_verifier_that_never_ran_is_an_error(box: FolderSandbox, make: Make, script: str) -> None:
    with pytest.raises(VerifierError, match="never ran"):
        await HarborVerifier().verify(box, make(f"#!/bin/bash\ncurl() {{ return 6; }}; uvx() {{ return 1; }}\n{script}"))


async def test_a_session_that_started_is_a_real_zero(box: FolderSandbox, make: Make) -> None:
    script = "#!/bin/bash\necho '== test session starts =='  # pytest\necho 0 > /logs/verifier/reward.txt\n"
    assert (await HarborVerifier().verify(box, make(script))).reward == 0.0


@pytest.mark.parametrize("text", ["", "nan", "inf", "-1", "2", "True", "0x1", "1\n1", "one"])
def test_invalid_reward_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.txt").write_text(text)
    with pytest.raises(VerifierError):
        read_reward(tmp_path)


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), (" 0.5\n", 0.5), ("1e-1", 0.1), ("0", 0.0)])
def test_valid_reward_text(tmp_path: Path, text: str, value: float) -> None:
    (tmp_path / "reward.txt").write_text(text)
    assert read_reward(tmp_path) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"reward": 0.25, "parts": 1}', 0.25),
        ('{"success": true, "f1": 0.3}', 1.0),
        ('{"accuracy": 0.5}', 0.5),
        ("0.75", 0.75),
        ('{"reward": 0.25, "status": "ok"}', 1.0),  # not only numbers: the text file counts
        ("{", 1.0),
        ("{}", 1.0),
        ('{"a": 0.25, "b": 0.5}', 0.375),
    ],
)
def test_json_before_text(tmp_path: Path, text: str, value: float) -> None:
    (tmp_path / "reward.txt").write_text("1")
    (tmp_path / "reward.json").write_text(text)
    assert read_reward(tmp_path) == value


@pytest.mark.parametrize("text", ['{"reward": NaN}', '{"reward": 2}', '{"reward": -0.5}', '{"status": "ok"}', "[1]"])
def test_invalid_json_reward(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.json").write_text(text)
    with pytest.raises(VerifierError):
        read_reward(tmp_path)


async def test_links_in_the_copied_logs_are_not_followed(box: FolderSandbox, make: Make, tmp_path: Path) -> None:
    (tmp_path / "host").write_text("1")
    with pytest.raises(VerifierError, match="no reward file"):
        await HarborVerifier().verify(box, make(f"#!/bin/bash\nln -s {tmp_path}/host /logs/verifier/reward.txt\n"))


def test_text_before_json_where_asked(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("1")
    (tmp_path / "reward.json").write_text('{"reward": 0.5}')
    assert read_reward(tmp_path, text_first=True) == 1.0
    (tmp_path / "reward.txt").unlink()
    assert read_reward(tmp_path, text_first=True) == 0.5
    (tmp_path / "reward.json").unlink()
    (tmp_path / "test-stdout.txt").write_text("1 passed in 0.1s")
    with pytest.raises(VerifierError, match="no reward file"):
        read_verdict(tmp_path, tmp_path, "t", 0.0, text_first=True)


def test_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_HOME", "/here")
    monkeypatch.delenv("GRADER_KEY", raising=False)
    config = '[verifier]\ntimeout_sec = "90"\nuser = 1000\nenv = { A = "${GRADER_HOME}", B = "${GRADER_KEY:-none}", C = "x${D}" }\n'
    (tmp_path / "task.toml").write_bytes(b"\xef\xbb\xbf" + config.encode())
    spec = load_spec(tmp_path)
    assert (spec.timeout_s, spec.user) == (90.0, "1000")
    assert spec.env == {"A": "/here", "B": "none", "C": "x${D}"}
    (tmp_path / "task.toml").write_text('[verifier]\nenv = { A = "${GRADER_KEY}" }\n')
    with pytest.raises(VerifierError, match="GRADER_KEY"):
        load_spec(tmp_path)
    with pytest.raises(TaskError, match="cannot be read"):
        load_spec(tmp_path / "nowhere")


async def test_a_task_without_a_test_script_is_named(box: FolderSandbox, make: Make) -> None:
    task = make("")
    (Path(task.path) / "tests" / "test.sh").unlink()
    with pytest.raises(TaskError, match=r"tests/test\.sh"):
        await HarborVerifier().verify(box, task)


@pytest.mark.parametrize("text", ["9" * 10_000, "[" * 100_000, '{"reward": ' + "9" * 400 + "}"])
async def test_a_reward_that_no_script_writes_is_an_error(box: FolderSandbox, make: Make, text: str) -> None:
    script = f"#!/bin/bash\nprintf '%s' '{text}' > /logs/verifier/reward.json\n"
    with pytest.raises(VerifierError):
        await HarborVerifier().verify(box, make(script))


@pytest.mark.parametrize(
    "config",
    [
        '[verifier]\nenvironment_mode = "separate"\n',
        "[verifier.environment]\ncpus = 1\n",
    ],
)
async def test_a_verifier_apart_is_not_scored_where_it_can_have_no_container(box: FolderSandbox, make: Make, config: str) -> None:
    with pytest.raises(TaskError, match="none can be made here"):
        await HarborVerifier().verify(box, make("echo 0 > /logs/verifier/reward.txt\n", config))


REPORTED = """cat > /logs/verifier/ctrf.json <<'END'
{"results": {"tests": [{"name": "a", "status": "passed"}, {"name": "b", "status": "passed"}]}}
END
echo 1 > /logs/verifier/reward.txt
"""


async def test_full_reward_with_fewer_checks_than_the_solution_passed_is_an_error(box: FolderSandbox, make: Make) -> None:
    verifier, task = TaskVerifier(), make(f"#!/bin/bash\n{REPORTED}")
    verifier.expect({task.id: ("x", "y")})  # names may differ: some hold a time or a path
    assert (await verifier.verify(box, task)).strict
    verifier.expect({task.id: ("x", "y", "z")})
    with pytest.raises(VerifierError, match="reward 1 with 2 checks passed, its solution passed 3"):
        await verifier.verify(box, task)


@pytest.mark.parametrize(
    ("text", "reward"), [('{"style": 1, "tests": 0.5}', 0.75), ('{"a": 1, "b": 1}', 1.0), ('{"reward": 0, "b": 1}', 0.0)]
)
async def test_a_reward_of_several_keys(box: FolderSandbox, make: Make, text: str, reward: float) -> None:
    script = f"#!/bin/bash\nprintf '%s' '{text}' > /logs/verifier/reward.json\n"
    assert (await HarborVerifier().verify(box, make(script))).reward == reward


async def test_a_report_that_vanished_is_no_success(box: FolderSandbox, make: Make) -> None:
    """As where the agent's code ends pytest, with exit code 0, in its first test: the header is all that is printed."""
    header = "echo '===== test session starts ====='; : pytest; echo 1 > /logs/verifier/reward.txt\n"
    task = make(f"#!/bin/bash\n{header}")
    with pytest.raises(VerifierError, match="never ran its tests"):
        await HarborVerifier().verify(box, task)


async def test_no_report_at_all_is_fewer_checks_too(box: FolderSandbox, make: Make) -> None:
    verifier, task = HarborVerifier(), make("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    assert (await verifier.verify(box, task)).strict
    verifier.expect({task.id: ("a", "b")})
    with pytest.raises(VerifierError, match="reward 1 with 0 checks passed, its solution passed 2"):
        await verifier.verify(box, task)


ARTIFACTS = """artifacts = ["/app/out", {source = "/app/big.bin", destination = "in/big"},
    {source = "/app/out/x", destination = "in"}, {source = "/app/none.txt"},
    {source = "/logs/artifacts", exclude = ["*.tmp"], destination = "published"}]
"""


async def test_files_are_kept_for_whoever_asks(box: FolderSandbox, make: Make) -> None:
    for name in ("app/out/x", "app/out/y", "app/big.bin", "logs/artifacts/model.patch", "logs/artifacts/a.tmp"):
        (box.root / name).parent.mkdir(parents=True, exist_ok=True)
        (box.root / name).write_text(name if name != "app/big.bin" else "b" * 2000)
    script = f"#!/bin/bash\n{REPORT}head -c 3000 /dev/zero > /logs/verifier/core\necho 0 > /logs/verifier/reward.txt; echo out\n"
    task = make(script, ARTIFACTS)
    verdict = await TaskVerifier(keep_bytes=1000).verify(box, task)
    kept = verdict.kept
    assert kept is not None
    assert dict(kept.logs) == {"ctrf.json": f"{CTRF}\n".encode(), "reward.txt": b"0\n", "test-stdout.txt": b"out\n"}
    assert dict(kept.artifacts) == {
        "app/out/x": b"app/out/x",
        "app/out/y": b"app/out/y",
        "published/model.patch": b"logs/artifacts/model.patch",
    }
    assert kept.left_out == ("artifacts/in/big", "verifier/core")
    assert [(one.destination, one.type, one.status, one.exclude) for one in kept.manifest] == [
        ("artifacts/app/out", "directory", "ok", ()),
        ("artifacts/in/big", "file", "skipped", ()),
        ("artifacts/in", "directory", "skipped", ()),
        ("artifacts/app/none.txt", "file", "failed", ()),
        ("artifacts/published", "directory", "ok", ("*.tmp",)),
    ]
    assert (await TaskVerifier().verify(box, task)).kept is None


@pytest.mark.parametrize(
    ("entry", "place"),
    [
        ("'/app/a'", "artifacts/app/a"),
        ("{source = '/app/a', destination = '../../a'}", "artifacts/a"),
        ("{source = '/app/a', destination = 'manifest.json'}", "artifacts/_/manifest.json"),
        ("{source = '/app/a', destination = '.'}", "artifacts/app/a"),
        ("{source = '/app/a', destination = '/..'}", "artifacts/app/a"),
    ],
)
async def test_an_artifact_stays_in_its_directory(box: FolderSandbox, make: Make, entry: str, place: str) -> None:
    (box.root / "app" / "a").mkdir()
    task = make("echo 1 > /logs/verifier/reward.txt\n", f"artifacts = [{entry}]\n")
    kept = (await TaskVerifier(keep_bytes=10).verify(box, task)).kept
    assert kept is not None
    assert [(one.destination, one.status) for one in kept.manifest] == [("artifacts/logs/artifacts", "failed"), (place, "empty")]


async def test_files_without_number_are_bounded_too(box: FolderSandbox, make: Make) -> None:
    (box.root / "logs" / "artifacts").mkdir(parents=True)
    for number in range(1203):
        (box.root / "logs" / "artifacts" / f"{number:04}").touch()
    kept = (await TaskVerifier(keep_bytes=10).verify(box, make("echo 1 > /logs/verifier/reward.txt\n"))).kept
    assert kept is not None
    assert len(kept.artifacts) == 1000
    assert (len(kept.left_out), kept.left_out[-1]) == (101, "artifacts/103 more")
