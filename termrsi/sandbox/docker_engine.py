"""The Docker Engine through docker-py: its client, images and what they are built from, and what a dead owner left in it."""

import contextlib
import functools
import os
import socket
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from termrsi.errors import SandboxError, TaskError
from termrsi.records import Snapshot
from termrsi.sandbox import files, layers

if TYPE_CHECKING:
    import docker

LABEL, HOST_LABEL, BUILD_LABEL = "termrsi.sandbox", "termrsi.host", "termrsi.image"
STATE_LABEL, REPLACED_LABEL = "termrsi.state", "termrsi.replaced"
DEFAULT_ENGINE = "unix:///var/run/docker.sock"
CALL_S = 120
PARALLEL_CALLS = 64


@functools.lru_cache(maxsize=4)
def client(engine: str = "") -> "docker.APIClient":
    """One connection pool per process and engine. Raises SandboxError if the engine does not answer."""
    try:
        import docker
        from docker.errors import DockerException
    except ImportError as error:
        raise SandboxError("docker-py is not installed", "sandbox.docker", "pip install 'termrsi[docker]'") from error
    address = engine or os.environ.get("DOCKER_HOST") or DEFAULT_ENGINE
    try:
        _reach(address)
        from docker.utils import kwargs_from_env

        options: dict[str, Any] = {"base_url": engine} if engine else dict(kwargs_from_env())  # Any: docker-py is not typed
        api = docker.APIClient(**options, version="auto", timeout=CALL_S, max_pool_size=PARALLEL_CALLS)
        api.ping()
    except (DockerException, OSError) as error:
        raise SandboxError(f"no Docker Engine answers: {error}", address, "start dockerd, or set DOCKER_HOST") from error
    return api


@contextlib.contextmanager
def told(where: str) -> Iterator[None]:
    """The engine's and the connection's errors as SandboxError."""
    import requests
    from docker.errors import DockerException, NotFound

    try:
        yield
    except NotFound as error:
        raise SandboxError(f"not there: {error.explanation or error}", where) from error
    except (DockerException, requests.RequestException, tarfile.TarError, OSError) as error:
        raise SandboxError(f"{type(error).__name__}: {getattr(error, 'explanation', None) or error}", where) from error


def _reach(address: str) -> None:
    """Raises OSError. docker-py itself would leave a socket open that could not connect."""
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(address.removeprefix("unix://"))


def answers(engine: str = "") -> bool:
    """Whether there is an engine, and docker-py to ask it."""
    with contextlib.suppress(SandboxError):
        client(engine)
        return True
    return False


def inspect(api: Any, image: str) -> dict[str, Any]:
    """What the engine knows of an image. Raises TaskError if it has none of that name."""
    from docker.errors import ImageNotFound

    try:
        return api.inspect_image(image)
    except ImageNotFound as error:
        raise TaskError("the engine has no such image", image, "docker pull it, or build it first") from error


def send_archive(api: Any, container: str, entries: list[tuple[str, Path | None]], mode: int = 0o755) -> None:
    """See `files.pack`; paths from the root. The engine makes missing parents."""
    with tempfile.SpooledTemporaryFile(max_size=1 << 24) as spool:
        files.pack(entries, spool, mode)
        spool.seek(0)
        api.put_archive(container, "/", spool)


def forget(api: Any, image: str) -> None:
    """Removes a snapshot's image once it has no name and no container."""
    from docker.errors import APIError

    with contextlib.suppress(TaskError, APIError):  # in use, or gone: another is the last
        if not inspect(api, image)["RepoTags"]:
            api.remove_image(image)


def discard(snapshot: Snapshot, engine: str = "") -> None:
    """Frees what a snapshot holds; containers made from it live on. A second time does nothing."""
    from docker.errors import ImageNotFound

    with told(snapshot.id), contextlib.suppress(ImageNotFound):
        client(engine).remove_image(snapshot.handle, force=True)


def kept(snapshot: Snapshot, engine: str = "") -> bool:
    """Whether the engine still has its image. Raises SandboxError if it does not answer."""
    from docker.errors import ImageNotFound

    with told(snapshot.id):
        try:
            client(engine).inspect_image(snapshot.handle)
        except ImageNotFound:
            return False
    return True


def reap(owner: str | None = None, engine: str = "", *, snapshots: bool = False, keep: Collection[str] = frozenset()) -> list[str]:
    """Removes containers, networks and volumes of dead processes of `owner` (None: of any) on this host; snapshots, if asked.

    `keep`: ids of snapshots that stay all the same.
    """
    from docker.errors import NotFound

    api = client(engine)
    removed = []
    here = {"label": [LABEL, f"{HOST_LABEL}={socket.gethostname()}"]}
    with told("reap"):
        found: list[tuple[str, Any, Callable[[], object]]] = [
            ("container", one, functools.partial(api.remove_container, one["Id"], force=True, v=True))
            for one in api.containers(all=True, filters=here)
        ]
        found += [("network", one, functools.partial(api.remove_network, one["Id"])) for one in api.networks(filters=here)]
        volumes = api.volumes(filters=here)["Volumes"] or []
        found += [("volume", one, functools.partial(api.remove_volume, one["Name"], force=True)) for one in volumes]
        images = api.images(filters=here) if snapshots else []
        found += [("image", one, functools.partial(api.remove_image, one["Id"], force=True)) for one in images]
        for kind, one, remove in found:
            if layers.is_left_over(one["Labels"][LABEL], owner) and one["Labels"][LABEL] not in keep:
                with contextlib.suppress(NotFound):  # another start was first
                    remove()
                removed.append(f"{kind} {one['Labels'][LABEL]}")
    return removed


def has(image: str, engine: str = "") -> bool:
    """Whether the engine has an image, or could fetch it: tried once in this process. Raises SandboxError if it does not answer."""
    from docker.errors import APIError, ImageNotFound

    api = client(engine)
    with told(image):
        with contextlib.suppress(ImageNotFound):
            api.inspect_image(image)
            return True
        if (engine, image) not in _NOT_TO_BE_HAD:
            with contextlib.suppress(APIError):  # no such image, or no way to it; a pull that breaks off may raise nothing
                api.pull(image)
                api.inspect_image(image)
                return True
            _NOT_TO_BE_HAD.add((engine, image))
    return False


_NOT_TO_BE_HAD: set[tuple[str, str]] = set()  # engine, image


def build(context: Path, dockerfile: str, key: str, timeout_s: float, engine: str = "") -> str:
    """The image of a Dockerfile, built once per content `key`. Raises TaskError with the engine's words, SandboxError."""
    from docker.errors import ImageNotFound

    api = client(engine)
    name = f"termrsi-image:{key[:32]}"
    with told(str(context)):
        try:
            api.inspect_image(name)
            return name
        except ImageNotFound:
            pass
        said, error = [], ""
        for line in api.build(
            path=str(context), dockerfile=dockerfile, tag=name, rm=True, forcerm=True, decode=True, timeout=int(timeout_s),
            labels={BUILD_LABEL: key},
        ):  # fmt: skip
            said.append(str(line.get("stream", "")))
            error = str(line.get("error", error))  # the stream is read to its end: only then is its connection given back
        if error:
            raise TaskError(f"{error.strip()} {''.join(said)[-1000:].strip()}", str(context / dockerfile))
    return name
