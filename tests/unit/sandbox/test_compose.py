"""Compose files of tasks as they may be run; nothing is started."""

from pathlib import Path

import pytest

from termrsi.errors import TaskError
from termrsi.records import EnvironmentSpec, TaskSpec
from termrsi.sandbox import compose, machines


def read(folder: Path, text: str, *, network: bool = False) -> tuple[compose.Json, str]:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text("FROM a\n")
    (folder / compose.NAME).write_text(text)
    return compose.read(
        folder / compose.NAME, {"MEMORY": "64M"}, lambda context, name: f"built:{context.name}/{name}", network=network
    )


def test_a_file_is_written_anew(tmp_path: Path) -> None:
    text = """
services:
  client:
    build: {context: ., dockerfile: Dockerfile}
    image: ${NAME}
    container_name: ${CONTAINER}
    command: [sh, -c, sleep infinity]
    ports: ["80:80"]
    volumes: ["${LOGS}:/logs"]
    environment: ["MEMORY=${MEMORY}", "D=${X:-d}", "DOLLAR=$$HOME"]
    depends_on: [db]
  db:
    image: postgres:16
    volumes: ["data:/var/lib/data", "./init:/init"]
    healthcheck: {test: [CMD, "true"]}
    networks: {back: }
"""
    (tmp_path / "t" / "init").mkdir(parents=True)
    content, main = read(tmp_path / "t", text)
    assert main == "client"
    assert content["services"]["client"] == {
        "image": "built:t/Dockerfile",
        "environment": ["MEMORY=64M", "D=d", "DOLLAR=$HOME"],
        "depends_on": ["db"],
        "volumes": [],
    }
    db = content["services"]["db"]
    assert db["volumes"] == ["data:/var/lib/data", f"{tmp_path}/t/init:/init:ro"]
    assert db["healthcheck"] == {"test": ["CMD", "true"]}
    alone = {"internal": True, "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"}}
    assert content["networks"] == {"default": alone, "back": alone}
    assert content["volumes"] == {"data": {}}


def test_harbors_overlay_may_leave_the_main_service_out(tmp_path: Path) -> None:
    content, main = read(tmp_path / "t", "services:\n  redis:\n    image: redis:7\n", network=True)
    assert (main, content["services"]["main"]["image"]) == ("main", "built:t/Dockerfile")
    assert content["networks"] == {"default": {}}


@pytest.mark.parametrize(
    ("service", "words"),
    [
        ("privileged: true", "services.x: privileged is not allowed"),
        ("cap_add: [SYS_ADMIN]", "cap_add is not allowed"),
        ("pid: host", "pid is not allowed"),
        ("network_mode: host", "network_mode 'host' is not allowed"),
        ("volumes: ['/:/host']", "/ is outside of the task"),
        ("volumes: ['../../x:/y']", "../../x is outside of the task"),
        ("volumes: ['~/.ssh:/y']", "~/.ssh is outside of the task"),
        ("volumes: [{type: bind, source: /var/run/docker.sock, target: /s}]", "/var/run/docker.sock is outside"),
        ("env_file: /etc/environment", "env_file is not allowed"),
        ("use_api_socket: true", "use_api_socket is not allowed"),
        ("post_start: [{command: x, privileged: true}]", "post_start is not allowed"),
        ("build: {context: ., dockerfile: ../../Dockerfile}", "there is no ../../Dockerfile in its context"),
        ("build: ..", "services.x.build is outside of the task"),
        ("build: {context: ., args: {A: b}}", "more than a context and a Dockerfile"),
        ("environment: [A=b]", "neither an image nor a build"),
    ],
)
def test_what_reaches_into_the_host_is_refused(tmp_path: Path, service: str, words: str) -> None:
    extra = "" if service.startswith(("build", "environment")) else "\n    image: a"
    with pytest.raises(TaskError) as caught:
        read(tmp_path / "t", f"services:\n  x:\n    {service}{extra}\n")
    assert words in str(caught.value)
    assert str(tmp_path / "t" / compose.NAME) in str(caught.value)


def test_images_and_limits(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / compose.NAME).write_text(
        "services:\n  main:\n    image: ${MAIN_IMAGE_NAME}\n  db:\n    image: b\n    mem_limit: 64g\n"
    )
    variables = {"MAIN_IMAGE_NAME": "prebuilt:1"}
    content, _ = compose.read(
        folder / compose.NAME, variables, lambda *_: "built", network=False, image="prebuilt:1", limits={"mem_limit": "9m"}
    )
    assert [(one["image"], one["mem_limit"]) for one in content["services"].values()] == [("prebuilt:1", "9m"), ("b", "9m")]


@pytest.mark.parametrize("text", ["", "services: [a]", "services: {a: 1}", "a: [", "\x00"])
def test_what_is_no_compose_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(TaskError, match=compose.NAME):
        read(tmp_path / "t", text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("services:\n  main:\n    build: .\n", []),
        ("services:\n  main: {}\n  db:\n    image: postgres\n", ["db"]),
        ("services:\n  db:\n    image: postgres\n", ["db"]),
        ("services:\n  client: {}\n  server: {}\n", []),
        ("services: 3\n", []),
        ("", []),
    ],
)
def test_services_beside_the_agents(tmp_path: Path, text: str, names: list[str]) -> None:
    (tmp_path / compose.NAME).write_text(text)
    assert compose.others(tmp_path / compose.NAME) == names


async def test_a_backend_without_services_refuses_a_task_that_needs_them(tmp_path: Path) -> None:
    """It would be the agent who fails for it."""
    (tmp_path / compose.NAME).write_text("services:\n  main: {}\n  db:\n    image: postgres\n")
    (tmp_path / "Dockerfile").write_text("FROM debian\n")
    task = TaskSpec("t", "f", "", str(tmp_path), EnvironmentSpec(context=str(tmp_path)))
    for backend in ("local", "gvisor"):
        made = machines.of(backend, machines.Limits(), owner="x", cache_dir=tmp_path / "c", state_dir=tmp_path / "s")
        with pytest.raises(TaskError, match="needs the services db, which this backend cannot run"):
            await made.make(task, None)
