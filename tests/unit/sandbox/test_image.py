"""Dockerfiles: what is understood, what is refused and where, and images built for real."""

import asyncio
import io
import os
import shutil
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest

from termrsi.errors import SandboxError, TaskError
from termrsi.records import EnvironmentSpec
from termrsi.sandbox import dockerfile, image
from termrsi.sandbox.local import LocalOptions, LocalSandbox


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(text)
    return folder / "Dockerfile"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("FROM a\n\n# note\nONBUILD RUN x", 4, "ONBUILD is not supported"),
        ("FROM a\nFROM b", 2, "a second FROM"),
        ("RUN x\nFROM a", 1, "RUN before FROM"),
        ("FROM a\nUSER a b", 2, "USER a b is not a name"),
        ("FROM a\nSHELL /bin/bash -c", 2, "SHELL /bin/bash -c is not a list"),
        ("FROM a\nCOPY --from=b x y", 2, "COPY --from is not supported"),
        ("FROM a\nCOPY --chown=bob x y", 2, "--chown=bob"),
        ("FROM a\nCOPY --chmod=u+x x y", 2, "--chmod=u+x"),
        ("FROM a\nRUN --mount=type=cache,target=/x y", 2, "RUN --mount"),
        ("FROM a\nADD https://x.org/y /z", 2, "ADD of a URL"),
        ("FROM a\n\nRUN cat <<EOF\nx\n EOF", 3, "the heredoc EOF has no end"),
        ("FROM a\nRUN", 2, "RUN without arguments"),
        ("FROM a\nENV X", 2, "name=value"),
        ("FROM a\nLABEL x=y \\\n  z=w\nCOPY 'x y", 4, "No closing quotation"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = write(tmp_path / "c", text)

    def read() -> None:
        for instruction in dockerfile.parse(path):
            if instruction.name == "ENV":
                dockerfile.pairs(instruction)

    with pytest.raises(TaskError) as caught:
        read()
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert words in str(caught.value)


def test_no_from_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no FROM"):
        dockerfile.parse(write(tmp_path / "c", "# nothing\n"))
    (tmp_path / "c" / "Dockerfile").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match="cannot be read"):
        dockerfile.parse(tmp_path / "c" / "Dockerfile")


def test_lines_are_joined(tmp_path: Path) -> None:
    steps = dockerfile.parse(write(tmp_path / "c", 'from a AS b\nRUN one && \\\n# between\n\n    two\nCMD ["x"]\nCOPY a b c/\n'))
    assert [(s.name, s.where.rpartition(":")[2]) for s in steps] == [("FROM", "1"), ("RUN", "2"), ("CMD", "6"), ("COPY", "7")]
    assert steps[1].rest.split() == ["one", "&&", "two"]
    assert steps[3].words == ("a", "b", "c/")


def test_heredocs_are_kept_as_they_are(tmp_path: Path) -> None:
    text = (
        "FROM a\nRUN python3 <<'A' && cat <<-B\n# not a comment\n\n  x \\\nA\n\tindented\n\tB\nCOPY <<EOF /x\n$Y\nEOF\nRUN last\n"
    )
    steps = dockerfile.parse(write(tmp_path / "c", text))
    assert [(s.name, s.where.rpartition(":")[2]) for s in steps] == [("FROM", "1"), ("RUN", "2"), ("COPY", "9"), ("RUN", "12")]
    first, second = steps[1].heredocs
    assert (first.name, first.body, first.literal) == ("A", "# not a comment\n\n  x \\\n", True)
    assert (second.name, second.body, second.literal) == ("B", "indented\n", False)


def test_what_only_looks_like_a_heredoc(tmp_path: Path) -> None:
    steps = dockerfile.parse(write(tmp_path / "c", 'FROM a\nRUN cat <<<yes && echo $((1<<N)) <<<"no"\nRUN last\n'))
    assert [(step.name, step.heredocs) for step in steps] == [("FROM", ()), ("RUN", ()), ("RUN", ())]


def test_variables() -> None:
    values = {"X": "1", "E": ""}
    assert dockerfile.expand("$X ${X}a $Y|${Y:-d} ${E:-d} ${X:+s} ${Y:+s}| \\$X ${Y-e}", values) == "1 1a |d d s | $X e"


DOCKERFILE = """
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG WHO=world
ENV GREETING="hello $WHO" OTHER=a\\ b
ENV OLD style value
WORKDIR /work
WORKDIR sub
COPY data.txt *.py ./
COPY --chmod=0755 run.sh /usr/local/bin/run
COPY folder /copied
ADD archive.tar.gz /unpacked
RUN echo "$GREETING" > made && pwd >> made
RUN ["/bin/sh", "-c", "echo $OTHER >> made"]
RUN rm -rf /etc/apt && ! ls /etc/apt
USER root
LABEL x=y
EXPOSE 80
CMD ["bash"]
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    write(folder, DOCKERFILE)
    for name, text in (("data.txt", "data"), ("a.py", "a"), ("b.py", "b"), ("run.sh", "#!/bin/sh\necho ran\n")):
        (folder / name).write_text(text)
    (folder / "folder" / "in").mkdir(parents=True)
    (folder / "folder" / "in" / "f").write_text("f")
    with tarfile.open(folder / "archive.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("inside"), io.BytesIO(b""))
    return folder


async def built(context: Path, tmp_path: Path) -> image.Image:
    return await image.build(EnvironmentSpec(context=str(context)), tmp_path / "cache", state_dir=tmp_path / "state")


async def look(made: image.Image, tmp_path: Path, command: str) -> str:
    box = LocalSandbox(LocalOptions(image=made, state_dir=tmp_path / "state"))
    await box.start()
    try:
        return (await box.run(command, 10.0)).output
    finally:
        await box.close()


async def test_an_image(context: Path, tmp_path: Path) -> None:
    made = await built(context, tmp_path)
    assert made.workdir == "/work/sub"
    assert made.env == {"GREETING": "hello world", "OTHER": "a b", "OLD": "style value"}
    text = await look(
        made,
        tmp_path,
        "pwd; echo $OLD; ls; cat made; run; cat /copied/in/f; ls /unpacked; ls /etc/apt 2>&1 | grep -c 'No such'",
    )
    assert text == "/work/sub\nstyle value\na.py\nb.py\ndata.txt\nmade\nhello world\n/work/sub\na b\nran\nfinside\n1\n"
    assert await look(made, tmp_path, "cat /proc/self/mountinfo > /dev/null; echo x > made; cat made") == "x\n"
    assert "hello" in await look(made, tmp_path, "cat made")  # the layer is never written


HEREDOCS = r"""
FROM a
ARG NAME=world
RUN <<EOF
set -e
echo one > /made
# not a comment of the Dockerfile's
echo "two $NAME" >> /made
EOF
RUN <<'EOF'
#!/usr/bin/python3
print("three $NAME", file=open("/made", "a"))
EOF
RUN cat <<A >> /made && cat <<B >> /made
four
A
five
B
COPY <<EOF /etc/greeting
hello $NAME
EOF
COPY --chmod=0755 <<'run' <<data /tools/
#!/bin/sh
echo $HOME
run
x
data
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN [[ -e /made ]] && echo bash >> /made && ! (false | true)
HEALTHCHECK CMD true
VOLUME /data
RUN useradd -m -u 1234 bob
USER bob
RUN id -un > ~/who; ! touch /nobody 2>/dev/null
"""


async def test_heredocs_shell_and_user(context: Path, tmp_path: Path) -> None:
    write(context, HEREDOCS)
    made = await built(context, tmp_path)
    assert made.user == "bob"
    text = await look(
        made, tmp_path, "cat /made /etc/greeting; /tools/run; cat /tools/data; cat /home/bob/who; ls /nobody /.termrsi-run"
    )
    assert text.startswith("one\ntwo world\nthree $NAME\nfour\nfive\nbash\nhello world\n/root\nx\nbob\n")
    assert text.count("No such file") == 2
    write(context, "FROM a\nUSER nobody_here\nRUN true")
    with pytest.raises(TaskError, match="there is no such user"):
        await built(context, tmp_path)


def small_root(root: Path) -> Path:
    """A root file system of a few of this host's programs and their libraries."""
    programs = ["bash", "sh", "cat", "env", "mkdir", "ls", "rm", "id", "cp"]
    paths = {Path(found) for name in programs if (found := shutil.which(name, path="/usr/bin:/bin"))}
    for path in list(paths):
        said = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=True).stdout
        paths |= {Path(word) for word in said.split() if word.startswith("/")}
    for path in paths:
        target = root / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path.resolve(), target)
    for name in ("bash", "sh"):
        (root / "bin").mkdir(exist_ok=True)
        shutil.copy2(Path("/bin", name).resolve(), root / "bin" / name)
    (root / "etc").mkdir()
    (root / "etc/os-release").write_text("NAME=Small\n")
    return root


async def test_from_an_unpacked_root_file_system(context: Path, tmp_path: Path) -> None:
    """Nothing of the host's is there but what the root has."""
    small_root(image.root_place("registry.example/small:1", tmp_path / "cache"))
    write(context, "ARG TAG=1\nFROM registry.example/small:$TAG\nRUN echo built > /made\nWORKDIR /w")
    made = await built(context, tmp_path)
    command = "cat /made /etc/os-release; pwd; ls /usr/lib/python3 /etc/passwd 2>&1 | cat; ls -d /tmp /logs/verifier; echo $0"
    text = await look(made, tmp_path, command)
    assert text.startswith("built\nNAME=Small\n/w\n")
    assert text.count("No such file") == 2
    assert "/logs/verifier\n/tmp\n" in text
    fetched = await image.build(EnvironmentSpec(docker_image="registry.example/small:1"), tmp_path / "cache")
    assert "Small" in await look(fetched, tmp_path, "cat /etc/os-release")


async def test_the_cache(context: Path, tmp_path: Path) -> None:
    first, *others = await asyncio.gather(*(built(context, tmp_path) for _ in range(40)))  # more than there are threads
    assert others == [first] * 39
    assert len(list((tmp_path / "cache/images").glob("*/image.json"))) == 1
    assert not list((tmp_path / "cache/images").glob("tmp-*"))
    times = Path(first.layers[0]).stat().st_ctime_ns
    assert await built(context, tmp_path) == first
    assert Path(first.layers[0]).stat().st_ctime_ns == times
    (context / "data.txt").write_text("changed")
    assert (await built(context, tmp_path)).digest != first.digest


async def test_a_build_that_fails(context: Path, tmp_path: Path) -> None:
    for text, words in (
        ("FROM a\nRUN echo why; exit 3", r"Dockerfile:2: RUN failed with exit code 3(.|\n)*why"),
        ("FROM a\nRUN curl --max-time 2 http://1.1.1.1 || cat < /dev/tcp/1.1.1.1/80", "Dockerfile:2: RUN failed"),
        ("FROM a\nCOPY none /x", "Dockerfile:2: COPY none: no such file"),
        ("FROM a\nCOPY ../../etc/passwd /x", "outside of the context"),
        ("FROM a\nCOPY one", "needs a source and a destination"),
    ):
        write(context, text)
        (tmp_path / "etc").mkdir(exist_ok=True)
        with pytest.raises(TaskError, match=words):
            await built(context, tmp_path)
    assert not [path for path in (tmp_path / "cache/images").iterdir() if path.suffix != ".lock"]


async def test_without_a_dockerfile(tmp_path: Path) -> None:
    """The host's programs; an image that would have to be fetched is refused, not left out without a word."""
    made = await image.build(EnvironmentSpec(workdir="/w"), tmp_path)
    assert (made.layers, made.workdir) == ((), "/w")
    with pytest.raises(TaskError, match=r"ubuntu:24\.04, which the local backend cannot fetch"):
        await image.build(EnvironmentSpec(docker_image="someone/ubuntu:24.04", workdir="/w"), tmp_path)


async def test_the_host_stands_in_for_a_distribution(tmp_path: Path) -> None:
    """And for its Python, which images call python."""
    for name in ("debian:bookworm-slim", "docker.io/library/python:3.11-slim"):
        made = await image.build(EnvironmentSpec(docker_image=name), tmp_path / "cache", state_dir=tmp_path / "state")
        said = await look(made, tmp_path, "python -c 'print(6 * 7)'")
        assert said == "42\n" or (name.startswith("debian") and "not found" in said)


async def test_a_build_has_the_network_if_asked_for(context: Path, tmp_path: Path) -> None:
    """The host's own: here a server on its loopback. The agent has none all the same."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        write(context, f"FROM debian:12\nRUN : < /dev/tcp/127.0.0.1/{port}\n".replace("RUN", 'SHELL ["/bin/bash", "-c"]\nRUN'))
        with pytest.raises(TaskError, match=r"sandbox\.build_network=host"):
            await built(context, tmp_path)
        environment = EnvironmentSpec(context=str(context))
        made = await image.build(environment, tmp_path / "cache", state_dir=tmp_path / "state", network=True)
        assert "refused" in await look(made, tmp_path, f": < /dev/tcp/127.0.0.1/{port}")


def test_package_sources_with_a_password_stay_on_the_host() -> None:
    assert image.WITH_PASSWORD.search(b"deb https://me:pass@packages.example/debian bookworm main")
    assert not image.WITH_PASSWORD.search(b"URIs: http://deb.debian.org/debian\nSigned-By: a@b")


async def test_an_image_lock_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="image lock"):
        await asyncio.wait_for(image._lock(tmp_path / "missing" / "x.lock"), 5.0)


async def test_an_image_lock_delivered_to_a_cancelled_waiter_is_given_back(tmp_path: Path) -> None:
    """Cancelled in the very turn of the loop that delivers it."""
    path = tmp_path / "x.lock"
    for _ in range(20):
        waiter = asyncio.ensure_future(image._lock(path))
        await asyncio.sleep(0.005)
        waiter.cancel()
        found = (await asyncio.gather(waiter, return_exceptions=True))[0]
        if isinstance(found, int):
            os.close(found)
    os.close(await asyncio.wait_for(image._lock(path), 5.0))
