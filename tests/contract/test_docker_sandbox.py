"""What the Docker backend does beyond the contract: images, loss, what a killed owner leaves."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from termrsi.errors import SandboxError, TaskError
from termrsi.records import EnvironmentSpec, TaskSpec
from termrsi.sandbox import compose
from termrsi.sandbox import docker_engine as engines
from termrsi.sandbox.docker import DockerOptions, DockerSandbox
from termrsi.sandbox.host_pool import HostPool

pytestmark = pytest.mark.docker


@pytest.fixture
def engine(docker_engine: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Its address, which is the environment's for the test."""
    monkeypatch.setenv("DOCKER_HOST", docker_engine[0])
    engines.client.cache_clear()
    return docker_engine[0]


@pytest.fixture
async def pool(engine: str, tmp_path: Path) -> AsyncIterator[HostPool]:
    made = HostPool(size=2, cache_dir=tmp_path, owner="dockerpool", backend="docker")
    yield made
    await made.close()
    assert engines.reap("dockerpool", engine) == []


def task(context: Path, name: str = "t") -> TaskSpec:
    return TaskSpec(name, "f", "do it", str(context), EnvironmentSpec(context=str(context), env={"GIVEN": "1"}))


def dockerfile(context: Path, image: str, *lines: str) -> Path:
    context.mkdir(exist_ok=True)
    (context / "Dockerfile").write_text("\n".join((f"FROM {image}", *lines)) + "\n")
    return context


async def test_an_image_is_built_once_per_content(docker_engine: tuple[str, str], pool: HostPool, tmp_path: Path) -> None:
    context = dockerfile(tmp_path / "context", docker_engine[1], "WORKDIR /work", "ENV OWN=2", "COPY data /work/data")
    (context / "data").write_text("first\n")
    api = engines.client()
    ids = []
    for content in ("first\n", "first\n", "second\n"):
        (context / "data").write_text(content)
        box = await pool.lease(task(context))
        assert (await box.run("cat data; pwd; echo $GIVEN $OWN")).output == f"{content}/work\n1 2\n"
        ids.append(api.inspect_container(box.id)["Image"])
        await pool.release(box)
    assert ids[0] == ids[1] != ids[2]


async def test_a_dockerfile_that_does_not_build_is_the_tasks_fault(
    docker_engine: tuple[str, str], pool: HostPool, tmp_path: Path
) -> None:
    context = dockerfile(tmp_path / "context", docker_engine[1], "RUN echo about to fail && exit 7")
    with pytest.raises(TaskError, match=r"(?s)returned a non-zero code: 7.*about to fail"):
        await pool.lease(task(context))
    with pytest.raises(TaskError, match="no such image"):
        await pool.lease(TaskSpec("t", "f", "do it", "", EnvironmentSpec(docker_image="termrsi-none:9")))


async def test_limits_reach_the_engine(docker_engine: tuple[str, str], engine: str) -> None:
    box = DockerSandbox(DockerOptions(image=docker_engine[1], memory_mb=300, pids=70, cpus=0.5, owner="limits", engine=engine))
    await box.start()
    try:
        found = engines.client(engine).inspect_container(box.id)["HostConfig"]
        assert (found["Memory"], found["MemorySwap"]) == (300 << 20, 300 << 20)
        assert (found["PidsLimit"], found["NanoCpus"], found["NetworkMode"]) == (70, 5 * 10**8, "none")
    finally:
        await box.close()


async def test_a_container_that_is_gone_is_a_lost_sandbox(docker_engine: tuple[str, str], engine: str) -> None:
    box = DockerSandbox(DockerOptions(image=docker_engine[1], owner="lost", engine=engine))
    await box.start()
    running = asyncio.create_task(box.run("echo begun > /tmp/begun; sleep 4713", 30.0))
    while "sleep 4713" not in await box._call(box._processes):  # noqa: ASYNC110  # it raises no event here
        await asyncio.sleep(0.05)
    engines.client(engine).remove_container(box.id, force=True)
    with pytest.raises(SandboxError):
        await asyncio.wait_for(running, 20.0)
    with pytest.raises(SandboxError):
        await box.run("true")
    await box.close()


async def test_processes_end_even_where_bash_cannot_be_begun(docker_engine: tuple[str, str], engine: str) -> None:
    """A full process table, or an agent that broke bash: the engine ends them, and files stay."""
    box = DockerSandbox(DockerOptions(image=docker_engine[1], pids=16, owner="full", engine=engine))
    await box.start()
    try:
        await box.run("echo kept > /app/f; for i in {1..40}; do sleep 99 & done 2>/dev/null", 5.0)
        await box.kill_processes()
        assert (await box.run("cat /app/f; pgrep -c slee[p]")).output == "kept\n0\n"
    finally:
        await box.close()


OWNER_PROGRAM = """
import asyncio, sys
from termrsi.sandbox.docker import DockerOptions, DockerSandbox
async def main():
    box = DockerSandbox(DockerOptions(image=sys.argv[2], engine=sys.argv[1], owner="killed"))
    await box.start()
    await box.snapshot()
    print("ready", flush=True)
    await box.run("sleep 4717")
asyncio.run(main())
"""


async def test_what_a_killed_owner_leaves_is_removed(docker_engine: tuple[str, str], engine: str) -> None:
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER_PROGRAM, *docker_engine, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"ready\n"
    assert engines.reap("killed", engine, snapshots=True) == []  # it lives
    owner.kill()
    await owner.wait()
    assert engines.reap("other", engine, snapshots=True) == []
    assert [name.split()[0] for name in engines.reap("killed", engine)] == ["container"]
    assert [name.split()[0] for name in engines.reap("killed", engine, snapshots=True)] == ["image"]
    assert engines.reap("killed", engine, snapshots=True) == []


async def test_a_stream_whose_requester_has_gone_is_closed(
    docker_engine: tuple[str, str], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = engines.client(engine)
    attach, attached, go_on = api.exec_start, threading.Event(), threading.Event()
    streams = []

    def slow(made: str, *, socket: bool) -> object:
        streams.append(attach(made, socket=socket))
        attached.set()
        assert go_on.wait(30)
        return streams[-1]

    monkeypatch.setattr(api, "exec_start", slow)
    box = DockerSandbox(DockerOptions(image=docker_engine[1], owner="gone", engine=engine))
    starting = asyncio.ensure_future(box.start())
    assert await asyncio.to_thread(attached.wait, 30)
    starting.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await starting
    await box.close()
    assert [stream.closed for stream in streams] == [True]


async def test_an_image_that_is_not_a_snapshot_is_refused(docker_engine: tuple[str, str], engine: str) -> None:
    box = DockerSandbox(DockerOptions(image=docker_engine[1], owner="snap", engine=engine))
    await box.start()
    try:
        snapshot = await box.snapshot()
        engines.discard(snapshot, engine)
        copy = DockerSandbox(DockerOptions(snapshot=snapshot, owner="snap", engine=engine))
        with pytest.raises(SandboxError):
            await copy.start()
    finally:
        await box.close()


async def test_a_start_that_is_cancelled_leaves_nothing(docker_engine: tuple[str, str], engine: str) -> None:
    """The engine goes on making the container that its requester has given up."""
    for delay_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3):
        box = DockerSandbox(DockerOptions(image=docker_engine[1], owner="cancelled", engine=engine))
        starting = asyncio.ensure_future(box.start())
        await asyncio.sleep(delay_s)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await box.close()
    containers = engines.client(engine).containers(all=True, filters={"label": engines.LABEL})
    labels = [container["Labels"][engines.LABEL] for container in containers]
    assert [label for label in labels if label.startswith("cancelled-")] == []


SERVICE = "import socket\ns = socket.create_server(('', 80))\nwhile True:\n    c, _ = s.accept(); c.sendall(b'beside'); c.close()"
COMPOSE = """
services:
  main:
    image: {image}
    depends_on: [web]
    environment: [FROM_FILE=1]
  web:
    image: {image}
    command: [/usr/bin/python3, -c, {service}]
"""


async def test_a_compose_files_services_run_beside(
    docker_engine: tuple[str, str], pool: HostPool, engine: str, tmp_path: Path
) -> None:
    if not compose.program():
        pytest.skip("there is no compose program")
    context = tmp_path / "context"
    context.mkdir()
    (context / "docker-compose.yaml").write_text(COMPOSE.format(image=docker_engine[1], service=json.dumps(SERVICE)))
    box = await pool.lease(task(context))
    api = engines.client(engine)
    ask = "/usr/bin/python3 -c \"import socket; print(socket.create_connection(('web', 80), 5).recv(9).decode())\""
    assert (await box.run(f"until {ask} 2>/dev/null; do sleep 0.1; done; echo $GIVEN $FROM_FILE", 20.0)).output == "beside\n1 1\n"
    assert (await box.run("timeout 2 bash -c 'echo > /dev/tcp/1.1.1.1/53'", 10.0)).exit_code != 0
    with socket.socket() as server:  # on every address of the host: the bridge's is the nearest
        server.bind(("0.0.0.0", 0))
        server.listen()
        there = (await box.run("/usr/bin/python3 -c 'import socket; print(socket.gethostbyname(\"sandbox\"))'")).output.strip()
        for host in (there.rpartition(".")[0] + ".1", socket.gethostbyname(socket.gethostname()), "172.17.0.1"):
            reach = await box.run(f"timeout 2 bash -c 'echo > /dev/tcp/{host}/{server.getsockname()[1]}'", 10.0)
            assert reach.exit_code != 0, host
    await box.run("echo kept > /app/f; x=5")
    snapshot = await box.snapshot()
    again = await pool.lease(task(context), snapshot)
    assert (await again.run(f"cat /app/f; echo $x; {ask}", 20.0)).output == "kept\n5\nbeside\n"
    for one in (box, again):
        await pool.release(one)
    await pool.discard(snapshot)
    for found in (api.containers(all=True), api.networks(), api.images()):
        assert [one for one in found if "dockerpool" in str(one.get("Labels"))] == []


async def test_a_compose_file_that_reaches_into_the_host_is_the_tasks_fault(pool: HostPool, tmp_path: Path) -> None:
    if not compose.program():
        pytest.skip("there is no compose program")
    (tmp_path / "docker-compose.yaml").write_text("services:\n  main:\n    image: a\n    privileged: true\n")
    with pytest.raises(TaskError, match="privileged is not allowed"):
        await pool.lease(task(tmp_path))
