"""Where a verifier's tests run: modes, images and networks in their order of precedence; what crosses over."""

import tomllib
from pathlib import Path

import pytest

from termrsi.errors import TaskError
from termrsi.records import EnvironmentSpec, TaskSpec
from termrsi.reward import apart
from termrsi.reward.apart import ARTIFACTS, Artifact, Hook
from tests.folder_sandbox import FolderSandbox


def task(root: Path, step: str = "") -> TaskSpec:
    environment = EnvironmentSpec(context=str(root / "environment"), workdir="/app", memory_mb=512, network=False)
    return TaskSpec("t", "f", "", str(root), environment, step=step)


def of(root: Path, config: str, *files: str, step: str = "") -> apart.Apart | None:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("FROM debian\n")
    return apart.of(task(root, step), tomllib.loads(config))


SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
STEP = '[[steps]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("config", "step", "separate"),
    [
        ("", "", False),
        ("[verifier]\ntimeout_sec = 3\n", "", False),
        (SEPARATE, "", True),
        ("[verifier.environment]\ncpus = 1\n", "", True),
        (SEPARATE + STEP, "a", True),
        (SEPARATE + STEP + '[steps.verifier]\nenvironment_mode = "shared"\n', "a", False),
        (STEP + "[steps.verifier.environment]\ncpus = 1\n", "a", True),
        (STEP + "[steps.verifier.environment]\ncpus = 1\n", "", False),
    ],
)
def test_modes(tmp_path: Path, config: str, step: str, separate: bool) -> None:
    assert (of(tmp_path, config, step=step) is not None) is separate


def test_images_in_their_order(tmp_path: Path) -> None:
    def found(config: str, *files: str, step: str = "") -> tuple[str | None, str, bool]:
        where = of(tmp_path, config, *files, step=step)
        assert where is not None
        return where.environment.docker_image, where.environment.context.removeprefix(str(tmp_path)), where.bundled

    named = '[verifier.environment]\ndocker_image = "judge:1"\n'
    own = STEP + '[steps.verifier.environment]\ndocker_image = "own:1"\n'
    assert found(SEPARATE) == (None, "/environment", False)
    assert found(named) == ("judge:1", "", True)
    assert found(SEPARATE, "tests/Dockerfile") == (None, "/tests", True)
    assert found(named) == ("judge:1", "", True)
    assert found(named + STEP, "steps/a/tests/Dockerfile", step="a") == (None, "/steps/a/tests", True)
    assert found(named + own, step="a") == ("own:1", "", True)


def test_its_limits_are_its_own(tmp_path: Path) -> None:
    config = '[verifier.environment]\ncpus = 0.5\nmemory = "1G"\nstorage_mb = 7\nworkdir = "/w"\nenv = {A = "b"}\n'
    where = of(tmp_path, config)
    assert where is not None
    environment = where.environment
    assert (environment.cpus, environment.memory_mb, environment.storage_mb, environment.workdir) == (0.5, 1024, 7, "/w")
    assert environment.env == {"A": "b"}
    inherited = of(tmp_path, SEPARATE)
    assert inherited is not None
    assert (inherited.environment.memory_mb, inherited.environment.workdir) == (512, "/app")


@pytest.mark.parametrize(
    ("config", "network"),
    [
        (SEPARATE, True),
        (SEPARATE + '[environment]\nnetwork_mode = "no-network"\n', False),
        (SEPARATE + "[environment]\nallow_internet = false\n", False),
        (SEPARATE + '[agent]\nnetwork_mode = "no-network"\n', True),
        (SEPARATE + 'network_mode = "no-network"\n', False),
        ('[environment]\nnetwork_mode = "no-network"\n[verifier.environment]\nnetwork_mode = "public"\n', True),
        ('[verifier]\nnetwork_mode = "no-network"\n[verifier.environment]\nnetwork_mode = "public"\n', False),
    ],
)
def test_its_network_is_not_the_agents(tmp_path: Path, config: str, network: bool) -> None:
    where = of(tmp_path, config)
    assert where is not None
    assert where.environment.network is network


def test_artifacts_of_task_and_step(tmp_path: Path) -> None:
    config = f"artifacts = ['/a', {{source = 'b', exclude = ['*.o']}}]\n{SEPARATE}{STEP}artifacts = ['/c']\n"
    where = of(tmp_path, config, step="a")
    assert where is not None
    assert where.artifacts == (Artifact(ARTIFACTS), Artifact("/a"), Artifact("b", ("*.o",)), Artifact("/c"))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (SEPARATE + "artifacts = 1", None),
        ("artifacts = [{source = '/a', service = 'db'}]\n" + SEPARATE, "service 'db'"),
        ("artifacts = [{destination = 'x'}]\n" + SEPARATE, "without a source"),
        (SEPARATE + "[verifier.environment]\ncpus = 'many'\n", "verifier.environment"),
    ],
)
def test_what_cannot_be_is_the_tasks_fault(tmp_path: Path, config: str, why: str | None) -> None:
    if why is None:
        assert of(tmp_path, config) is not None  # a key of the verifier's that means nothing
        return
    with pytest.raises(TaskError, match=why):
        of(tmp_path, config)


def test_services_of_a_verifier_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="services of its own"):
        of(tmp_path, SEPARATE, "tests/docker-compose.yaml")


def test_hooks(tmp_path: Path) -> None:
    config = """[[verifier.collect]]
command = "first"
[[verifier.collect]]
command = "second"
timeout_sec = 5
user = 1000
[[steps]]
name = "a"
[[steps.verifier.collect]]
command = "third"
"""
    data = tomllib.loads(config)
    assert apart.hooks(task(tmp_path), data) == (Hook("first"), Hook("second", 5.0, "1000"))
    assert apart.hooks(task(tmp_path, "a"), data) == (Hook("first"), Hook("second", 5.0, "1000"), Hook("third"))
    with pytest.raises(TaskError, match="only main"):
        apart.hooks(task(tmp_path), tomllib.loads('[[verifier.collect]]\ncommand = "x"\nservice = "db"\n'))
    with pytest.raises(TaskError, match="without a command"):
        apart.hooks(task(tmp_path), tomllib.loads("[[verifier.collect]]\nuser = 1\n"))


async def test_what_crosses_over(tmp_path: Path) -> None:
    """Files as they are, directories without what is excluded; what is not there is left out."""
    boxes = []
    for name in ("agent", "judge"):
        (tmp_path / name / "app").mkdir(parents=True)
        boxes.append(FolderSandbox(tmp_path / name))
    source, target = boxes
    for name in ("answer", "out/keep", "out/drop.o", "out/deep/drop.o", "out/cache/x", "secret"):
        path = source.root / "app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    artifacts = (Artifact("/app/answer"), Artifact("out", ("*.o", "cache")), Artifact("/nowhere"))
    await apart.carry(source, target, task(tmp_path), artifacts)
    found = sorted(path.relative_to(target.root).as_posix() for path in target.root.rglob("*") if path.is_file())
    assert found == ["app/answer", "app/out/keep"]
