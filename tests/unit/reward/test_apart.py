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
    own = "artifacts = [{source = '/logs/artifacts/', exclude = ['*.o'], destination = 'out'}]\n"
    assert apart.declared(task(tmp_path), tomllib.loads(own)) == (Artifact(f"{ARTIFACTS}/", ("*.o",), "out"),)
    assert apart.declared(task(tmp_path), {}) == (Artifact(ARTIFACTS),)


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


@pytest.fixture
def boxes(tmp_path: Path) -> tuple[FolderSandbox, FolderSandbox]:
    made = []
    for name in ("agent", "judge"):
        (tmp_path / name / "app").mkdir(parents=True)
        made.append(FolderSandbox(tmp_path / name))
    return made[0], made[1]


def fill(box: FolderSandbox, *names: str) -> None:
    for name in names:
        path = box.root / "app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


async def carried(boxes: tuple[FolderSandbox, FolderSandbox], folder: Path, *artifacts: Artifact) -> list[str]:
    """What is in the verifier's sandbox then."""
    source, target = boxes
    folder.mkdir()
    await apart.lay(target, await apart.fetch(source, "/app", artifacts, folder))
    return sorted(
        path.relative_to(target.root).as_posix() for path in target.root.rglob("*") if path.is_symlink() or not path.is_dir()
    )


async def test_what_crosses_over(boxes: tuple[FolderSandbox, FolderSandbox], tmp_path: Path) -> None:
    """Files as they are, directories without what is excluded; what is not there is left out."""
    fill(boxes[0], "answer", "out/keep", "out/drop.o", "out/deep/drop.o", "out/cache/x", "secret")
    artifacts = (Artifact("/app/answer"), Artifact("out", ("*.o", "cache")), Artifact("/app/nowhere"))
    assert await carried(boxes, tmp_path / "held", *artifacts) == ["app/answer", "app/out/keep"]


async def test_what_the_image_had_there_is_gone(boxes: tuple[FolderSandbox, FolderSandbox], tmp_path: Path) -> None:
    """A deletion is an answer, too; and a file may stand where a directory was."""
    fill(boxes[0], "out/new", "was-a-folder")
    fill(boxes[1], "out/old", "out/deep/older", "was-a-folder/x")
    found = await carried(boxes, tmp_path / "held", Artifact("/app/out"), Artifact("/app/was-a-folder"))
    assert found == ["app/out/new", "app/was-a-folder"]


async def test_links_lead_nowhere_else(boxes: tuple[FolderSandbox, FolderSandbox], tmp_path: Path) -> None:
    fill(boxes[0], "out/real")
    fill(boxes[1], "expected")
    links = {"out/inside": "real", "out/above": "../expected", "out/absolute": "/tests/expected", "out/over": "deep/../../expected"}
    links |= {"out/here": ".", "out/sly": "here/../expected", "out/ring": "ring"}
    for name, target in links.items():
        (boxes[0].root / "app" / name).symlink_to(target)
    (boxes[1].root / "app" / "out").symlink_to(boxes[1].root / "elsewhere")  # of its image: not written through
    assert await carried(boxes, tmp_path / "held", Artifact("/app/out")) == [
        "app/expected",
        "app/out/here",
        "app/out/inside",
        "app/out/real",
    ]
    assert not (boxes[1].root / "elsewhere").exists()


async def test_an_artifact_inside_another_is_part_of_it(boxes: tuple[FolderSandbox, FolderSandbox], tmp_path: Path) -> None:
    """Else a link that came with the first would lead the second anywhere."""
    fill(boxes[0], "logs/other", "forged/test.sh")
    (boxes[0].root / "app" / "logs" / "model.patch").symlink_to("/tests")
    (boxes[0].root / "tests").mkdir()
    (boxes[0].root / "tests" / "test.sh").write_text("forged")
    found = await carried(boxes, tmp_path / "held", Artifact("/app/logs"), Artifact("/app/logs/model.patch"), Artifact("/app"))
    assert found == ["app/logs/other"]


async def test_hooks_run_where_the_task_is_and_by_themselves(boxes: tuple[FolderSandbox, FolderSandbox], tmp_path: Path) -> None:
    box = boxes[0]
    await apart.collect(box, (Hook("pwd > /app/said"),), "/app")
    assert (box.root / "app" / "said").read_text() == f"{box.root}/app\n"
    await apart.collect(box, (Hook("cd /nowhere || exit 3; touch /app/never"),), None)
    assert not (box.root / "app" / "never").exists()
    ran = [event for event in box.events if "/bin/bash -p" in event]
    assert len(ran) == 2
    assert all("-u GIT_DIR" in event for event in ran)
