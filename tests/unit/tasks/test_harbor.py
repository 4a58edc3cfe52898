"""What a Harbor directory becomes, what is repaired with a note, and what is refused with a reason."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from termrsi.records import Healthcheck, LoadResult, StepSpec, TaskSpec
from termrsi.reward.verifier import load_spec, solution_environment
from termrsi.tasks import harbor

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A whole task; each file can be replaced, and left out with None."""

    def make_task(config: str | bytes = "", **files: str | None) -> Path:
        root = tmp_path / "my-task"
        whole = {"instruction.md": "Do it.\n", "environment/Dockerfile": "FROM debian\n", "tests/test.sh": "#!/bin/bash\n"}
        for name, content in (whole | {key.replace("__", "/"): value for key, value in files.items()}).items():
            if content is not None:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(content.encode())
        root.mkdir(exist_ok=True)
        (root / "task.toml").write_bytes(config if isinstance(config, bytes) else config.encode())
        return root

    return make_task


def only(result: LoadResult) -> TaskSpec:
    assert not result.skipped, result.skipped
    return result.tasks[0]


def reason(result: LoadResult) -> str:
    assert not result.tasks
    return result.skipped[0].reason


def test_fields(make: Make) -> None:
    config = """
schema_version = "1.1"
[task]
name = "org/short"
[metadata]
family = "copy"
level = 2
split = "heldout"
category = "other"
[agent]
timeout_sec = "90"
[environment]
build_timeout_sec = 30
docker_image = "debian:bookworm-slim"
cpus = 2
memory = "2G"
storage_mb = "100"
allow_internet = false
workdir = "/app"
env = { A = "b" }
"""
    root = make(config)
    task = only(harbor.load(root))
    assert (task.id, task.family, task.level, task.split) == ("org/short", "copy", 2, "heldout")
    assert (task.instruction, task.path, task.agent_timeout_s) == ("Do it.", str(root), 90.0)
    env = task.environment
    assert (env.context, env.docker_image, env.workdir) == (str(root / "environment"), "debian:bookworm-slim", "/app")
    assert (env.cpus, env.memory_mb, env.storage_mb, env.network) == (2.0, 2048, 100, False)
    assert (env.env, env.build_timeout_s) == ({"A": "b"}, 30.0)
    assert harbor.load(root).notes == ()


def test_defaults_depend_on_the_schema(make: Make) -> None:
    old = only(harbor.load(make('version = "1.0"\n[metadata]\ncategory = "games"\ndifficulty = "hard"\n')))
    assert (old.id, old.family, old.level, old.split, old.agent_timeout_s) == ("my-task", "games", 3, "", None)
    assert (old.environment.cpus, old.environment.memory_mb, old.environment.storage_mb) == (1.0, 2048, 10240)
    assert old.environment.network
    new = only(harbor.load(make('schema_version = "1.3"\n[environment]\nnetwork_mode = "no-network"\n')))
    assert (new.environment.cpus, new.environment.memory_mb, new.environment.network) == (None, None, False)


def test_verifier_and_solution_stay_out_of_the_record(make: Make) -> None:
    task = only(harbor.load(make('[verifier]\nenv = { KEY = "hidden" }\n', solution__solve__sh="echo hidden")))
    assert "hidden" not in repr(task)


def test_instruction_is_text_and_loses_only_leading_canaries(make: Make) -> None:
    text = "<!-- BENCH canary GUID 1 -->\r\n\r\n# Canary: 2\r\n\r\nUse {x} and ${HOME}\r\n# canary stays\r\n"
    assert only(harbor.load(make("", **{"instruction.md": text}))).instruction == "Use {x} and ${HOME}\n# canary stays"


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (b"\xef\xbb\xbf[agent]\n", "byte-order mark"),
        ("version = 1.0\n", 'version read as "1.0"'),
        ('[task]\nname = "Short Name"\n', "directory name is used"),
        ('[environment]\nmemory = "2GB"\n', "memory_mb 2048"),
        ('[environment]\nmemory = "2Gi"\n', "memory_mb 2048"),
        ('[environment]\nmemory = "2048"\n', "memory_mb 2048"),
        ("[environment]\nmemory = 2048\n", "memory_mb 2048"),
        ("[environment]\nmemory_gb = 2\n", "memory_mb 2048"),
        ("[environment.env]\nPORT = 8080\n", 'PORT read as "8080"'),
        ('[environment]\ndocker_image = "local-build"\n', "the Dockerfile is used"),
        ('[environment]\ndocker_image = "Not Legal"\n', "the Dockerfile is used"),
        ("[reward]\nx = 1\n[agent]\nmax_turns = 3\n", "unknown key agent.max_turns"),
        ("[environment.healthcheck]\ncommand = 'x'\ndelay = 1\n", "unknown key environment.healthcheck.delay"),
        ("[verifier.environment]\nflavour = 1\n", "unknown key verifier.environment.flavour"),
        ("artifacts = ['/a', {source = '/b', sauce = 1}, {source = '/c', sauce = 1}]\n", "unknown key artifacts[].sauce"),
        ("[task]\nname = 'a/my-task'\nauthors = [{name = 'A', mail = 'x'}]\n", "unknown key task.authors[].mail"),
    ],
)
def test_repairs_say_what_they_did(make: Make, config: str | bytes, note: str) -> None:
    result = harbor.load(make(config))
    task = only(result)
    assert any(note in line and line.startswith(task.path) for line in result.notes), result.notes
    memory = 2048 if "memory_mb" in note or "version" in note else None
    assert (task.id.removeprefix("a/"), task.environment.memory_mb, task.environment.docker_image) == ("my-task", memory, None)


@pytest.mark.parametrize(
    ("version", "limited"),
    [('version = "1.0"', True), ('schema_version = "1.1"', True), ('version = "1"', True), ("", False)]
    + [(f'schema_version = "{later}"', False) for later in ("1.2", "1.3", "1.4", "1.10", "2.0")],
)
def test_limits_that_are_not_said_are_those_of_the_schema(make: Make, version: str, limited: bool) -> None:
    environment = only(harbor.load(make(f"{version}\n"))).environment
    expected = (1.0, 2048, 10240) if limited else (None, None, None)
    assert (environment.cpus, environment.memory_mb, environment.storage_mb) == expected


def test_image_under_the_wrong_key(make: Make) -> None:
    root = make('[environment]\nimage = "debian:12"\n', **{"environment/Dockerfile": None, "environment/data": "x"})
    assert only(harbor.load(root)).environment.docker_image == "debian:12"


def test_notes_on_the_build_context(make: Make) -> None:
    files = {
        "environment/Dockerfile": "FROM debian\nCOPY data.csv there/ /app/\nCOPY --from=build /x /y\nCOPY . /app\n",
        "environment/docker-compose.yaml": "services:\n  web:\n    volumes: ['${HOME}/.key:/key', '${CONTEXT_DIR}:/c']\n",
        "environment/there/a": "",
        "tests/test.sh": "#!/bin/bash\r\n",
    }
    notes = [line.split(": ", 1)[1] for line in harbor.load(make("", **files)).notes]
    assert notes == [
        "CRLF -> LF in tests/test.sh",
        "environment/docker-compose.yaml has no service main",
        "environment/docker-compose.yaml uses variables of the host: HOME",
        "environment/Dockerfile copies data.csv, which is not there",
    ]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("a = \n", "line 1"),
        (b"a = '\xff'\n", "not UTF-8 at byte 5"),
        ('metadata = "x"\n', "metadata is not a table"),
        ('[task]\nversion = "1"\n', r"\[task\]\.name is missing"),
        ("[task]\n[grading]\n", r"not a Harbor task: \[grading\]"),
        ('[agent]\ntimeout_sec = "soon"\n', r"agent\.timeout_sec"),
        ("[environment]\ncpus = nan\n", r"environment\.cpus"),
        ('[environment]\nmemory = "much"\n', r"environment\.memory"),
        ('[environment]\nmemory = "1G"\nmemory_mb = 2048\n', "disagree"),
        ('[environment]\nnetwork_mode = "none"\n', r"environment\.network_mode.*no-network"),
        ('[environment]\nallowed_hosts = ["a.org"]\n', "allowed_hosts needs"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["https://a.org"]\n', "URL"),
        ('[[environment.mcp_servers]]\nname = "m"\nheaders = { Api-Key = "literal" }\n', r"mcp_servers\[0\]\.headers\.Api-Key"),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\n', "shared"),
        ('artifacts = [{ source = "/a", destination = "../b" }]\n', "leaves its directory"),
        ('[[steps]]\nname = "a"\n[[steps]]\nname = "A"\n', "same name"),
        ('[[steps]]\nname = "a"\n', r"steps/<name>/instruction\.md \(steps a\) is missing"),
    ],
)
def test_refusals_name_file_and_key(make: Make, config: str | bytes, words: str) -> None:
    text = reason(harbor.load(make(config)))
    assert "\n" not in text
    assert re.search(words, text), text


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"instruction.md": None}, "instruction.md is missing"),
        ({"tests/test.sh": None, "tests/test_outputs.py": ""}, "tests/test.sh is missing"),
        ({"environment/Dockerfile": None}, "environment/ is missing and environment.docker_image is unset"),
        ({"environment/Dockerfile": None, "environment/setup.sh": ""}, "no image: environment/ has neither"),
    ],
)
def test_missing_files_are_refused(make: Make, files: dict[str, str | None], text: str) -> None:
    assert text in reason(harbor.load(make("", **files)))


def test_all_missing_files_in_one_line(make: Make) -> None:
    result = harbor.load(make("", **{"instruction.md": None, "tests/test.sh": None}))
    assert reason(result) == "instruction.md and tests/test.sh are missing"


def test_link_that_leaves_the_task(make: Make, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    root = make("")
    (root / "tests" / "data").symlink_to(tmp_path / "outside")
    assert reason(harbor.load(root)) == "tests/data is a link that leaves the task"


def test_no_config(tmp_path: Path) -> None:
    assert reason(harbor.load(tmp_path)) == "task.toml is missing"


def test_verifier_image_may_bundle_the_tests(make: Make) -> None:
    config = '[verifier]\nenvironment_mode = "separate"\n'
    files = {"tests/test.sh": None, "tests/Dockerfile": "FROM debian\n"}
    assert only(harbor.load(make(config, **files)))


def test_steps(make: Make) -> None:
    files = {"steps/a/instruction.md": "<!-- canary -->\n\nOne.\n", "steps/b/instruction.md": "Two.\n"}
    config = """multi_step_reward_strategy = "final"
[agent]
timeout_sec = 60
[[steps]]
name = "a"
min_reward = 0.5
[steps.agent]
timeout_sec = "30"
[[steps]]
name = "b"
min_reward = {reward = 1, speed = 2}
"""
    result = harbor.load(make(config, **files))
    task = only(result)
    assert task.steps == (StepSpec("a", "One.", 30.0, 0.5), StepSpec("b", "Two.", None, 1.0))
    assert task.instruction == "One.\n\nTwo."
    assert task.last_step_counts
    assert result.notes[0].endswith("task.toml: steps[b].min_reward of speed is not compared: only that of reward is")


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ('min_reward = "much"', r"steps\.0\.min_reward is 'much': Input should be a valid number"),
        ("agent = 3", r"steps\.0\.agent is 3: Input should be a valid dictionary"),
        ('agent = {timeout_sec = "soon"}', r"steps\.0\.agent\.timeout_sec is 'soon': Input should be a valid number"),
    ],
)
def test_steps_that_cannot_be(make: Make, step: str, why: str) -> None:
    root = make(f'[[steps]]\nname = "a"\n{step}\n', **{"steps/a/instruction.md": "One.\n"})
    assert re.search(why, reason(harbor.load(root)))


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_a_step_is_named_as_a_folder_can_be(make: Make, name: str) -> None:
    assert "which no folder can have" in reason(harbor.load(make(f'[[steps]]\nname = "{name}"\n')))


def test_what_is_not_carried_out_is_told(make: Make) -> None:
    config = """
artifacts = ["/app/out"]
[environment]
gpus = 1
gpu_types = []
skills_dir = ""
healthcheck = {command = "true"}
[agent]
user = "root"
network_mode = "no-network"
[verifier]
environment_mode = "separate"
collect = [{command = "true"}]
[[steps]]
name = "a"
healthcheck = {command = "true"}
[[steps]]
name = "b"
healthcheck = {command = "true"}
"""
    files = {"steps/a/instruction.md": "One.\n", "steps/b/instruction.md": "Two.\n"}
    told = [note.partition("not carried out: ")[2] for note in harbor.load(make(config, **files)).notes]
    assert told == ["environment.gpus"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('[verifier]\ntimeout_sec = "soon"\n', "verifier.timeout_sec is 'soon'"),
        ("[verifier]\ntimeout_sec = nan\n", "verifier.timeout_sec is nan"),
        ("[verifier]\ntimeout_sec = -5\n", "verifier.timeout_sec is -5; it must be more than 0"),
        ("[agent]\ntimeout_sec = 0\n", "agent.timeout_sec is 0; it must be more than 0"),
        ('[verifier]\nenvironment_mode = "bogus"\n', "verifier.environment_mode is 'bogus'"),
        ('[verifier]\nenvironment = "x"\n', "verifier.environment is 'x'"),
        ("[verifier]\ncollect = 3\n", "verifier.collect is 3"),
        ('[[verifier.collect]]\ncommand = "x"\ntimeout_sec = "soon"\n', "verifier.collect.0.timeout_sec is 'soon'"),
        ('multi_step_reward_strategy = "last"\n', "multi_step_reward_strategy is 'last'"),
        ("artifacts = 3\n", "artifacts is 3"),
        ('artifacts = "/app/x"\n', "artifacts is '/app/x'"),
        ("[environment]\nworkdir = 3\n", "environment.workdir is 3"),
        ('[environment]\nos = "windows"\n', "only linux is run here"),
    ],
)
def test_values_of_another_kind_are_refused_with_their_key(make: Make, config: str, words: str) -> None:
    files = {"tests/test.bat": "\n"}
    assert words in reason(harbor.load(make(config, **files)))


def test_variables_without_quotes_are_told_wherever_they_stand(make: Make) -> None:
    root = make("[verifier.env]\nA = 1\n[solution.env]\nB = true\n")
    notes = harbor.load(root).notes
    assert [note.partition("task.toml: ")[2] for note in notes] == ['verifier.env.A read as "1"', 'solution.env.B read as "true"']
    assert load_spec(root).env == {"A": "1"}
    assert solution_environment(root) == {"B": "true"}


def test_more_that_is_not_carried_out_is_told(make: Make) -> None:
    config = """artifacts = ["/app/out"]
[agent]
user = "dev"
[verifier]
network_mode = "no-network"
[[steps]]
name = "a"
artifacts = ["/x"]
[steps.agent]
user = 1000
network_mode = "public"
"""
    root = make(config, **{"steps/a/instruction.md": "One.\n", "trajectory.json": "{}", ".harborignore": ""})
    told = [note.partition("not carried out: ")[2] for note in harbor.load(root).notes]
    assert told == [
        "agent.user",
        "verifier.network_mode",
        "steps[].agent.user",
        "steps[].agent.network_mode",
        "trajectory.json",
        ".harborignore",
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_each_step_may_have_its_tests_elsewhere(make: Make, strict: bool) -> None:
    config = '[[steps]]\nname = "a"\n[steps.verifier]\nenvironment_mode = "separate"\n[[steps]]\nname = "b"\n'
    files = {
        "tests/test.sh": None,
        "steps/a/instruction.md": "One.\n",
        "steps/b/instruction.md": "Two.\n",
        "steps/a/tests/Dockerfile": "FROM debian\n",
    }
    assert "tests/test.sh is missing" in reason(harbor.load(make(config, **files), strict=strict))
    assert only(harbor.load(make(config, **files, **{"steps/b/tests/test.sh": "exit 1\n"}), strict=strict))


def test_healthchecks(make: Make) -> None:
    config = """
[environment.healthcheck]
command = "test -e /ready"
interval_sec = 0.5
timeout_sec = "3"
start_period_sec = 2
start_interval_sec = 1
retries = 7
[[steps]]
name = "a"
healthcheck = {command = "true"}
"""
    task = only(harbor.load(make(config, **{"steps/a/instruction.md": "One.\n"})))
    assert task.environment.healthcheck == Healthcheck("test -e /ready", 0.5, 3.0, 2.0, 1.0, 7)
    assert task.steps[0].healthcheck == Healthcheck("true", 5.0, 30.0, 0.0, 5.0, 3)
    assert "environment.healthcheck.command: Field required" in reason(
        harbor.load(make("[environment.healthcheck]\nretries = 1\n"))
    )


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ("[environment]\ncpus = " + "9" * 400, {}),
        ("[environment]\nmemory_gb = 1e308", {}),
        ("x = " + "[" * 20_000, {}),
        ("x = " + "9" * 10_000, {}),
        ("", {"environment/Dockerfile": "FROM debian\nCOPY src/**.py /x\n"}),
    ],
)
def test_what_nobody_would_write_is_one_refused_task(make: Make, config: str, files: dict[str, str]) -> None:
    result = harbor.load(make(config, **files))
    assert len(result.tasks) + len(result.skipped) == 1
    assert all("\n" not in one.reason for one in result.skipped)


def test_links_and_folders_in_place_of_scripts(make: Make) -> None:
    root = make()
    (root / "tests" / "gone.sh").symlink_to("nowhere.sh")
    (root / "tests" / "folder.sh").mkdir()
    (root / "solution").mkdir()
    (root / "solution" / "round").symlink_to("round")
    result = harbor.load(root)
    assert len(result.tasks) + len(result.skipped) == 1


@pytest.mark.parametrize(("agent", "network"), [("public", True), ("no-network", False)])
def test_the_agents_own_network_comes_first(make: Make, agent: str, network: bool) -> None:
    other = "no-network" if network else "public"
    config = f'[environment]\nnetwork_mode = "{other}"\n[agent]\nnetwork_mode = "{agent}"\n'
    assert only(harbor.load(make(config))).environment.network is network
