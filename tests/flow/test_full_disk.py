"""A disk that fills up, at whatever a run was writing: one line that names the file, no half file that counts, and the run goes on.

Writes of a run on the fakes are counted where they leave Python, under whatever opened the file, and told apart by the file's kind.
Of each kind one in the middle fails: half of it is written, as on a disk that fills up, and all later ones fail.
Policy and critic write through other languages: they save to a small disk of their own.
"""

import builtins
import errno
import io
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from termrsi.driver import main
from termrsi.durable import Lines, write_text


class Disk:
    """Counts writes below `root` by kind; from number `full_at[1]` of kind `full_at[0]` on there is no room for anything.

    By kind, because how often some files are written depends on how long others took.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.full_at: tuple[str, int] | None = None
        self.written: Counter[str] = Counter()
        self.full = ""  # the file that met it
        self._write, self._open = os.write, io.open

    def take(self, name: str, data: Any) -> int | None:  # Any: whatever a file takes
        """None: there is room. Else how much of it there is room for, before the error."""
        if not name.startswith(self.root):
            return None
        if self.full:
            return 0
        number = self.written[what := kind(name, self.root)]
        self.written[what] += 1
        if self.full_at != (what, number):
            return None
        self.full = name
        return memoryview(data).nbytes // 2

    def os_write(self, number: int, data: Any) -> int:  # Any: as above
        room = self.take(str(Path(f"/proc/self/fd/{number}").readlink()), data)
        if room is None:
            return self._write(number, data)
        if room:
            return self._write(number, memoryview(data)[:room])  # the next call says that it is full
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *rest: Any, **more: Any) -> Any:
        if not set(mode) & set("wax+") or not isinstance(file, str | os.PathLike) or not str(Path(file)).startswith(self.root):
            return self._open(file, mode, buffering, encoding, *rest, **more)
        if "b" not in mode or "+" in mode:
            raw = _Raw(self, str(file), mode.replace("t", "").replace("b", ""))
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", *rest, **more)
        raw = _Raw(self, str(file), mode.replace("b", ""))
        return raw if buffering == 0 else io.BufferedWriter(raw)


class _Raw(io.FileIO):
    def __init__(self, disk: Disk, name: str, mode: str) -> None:
        super().__init__(name, mode)
        self._disk = disk

    def write(self, data: Any) -> int:  # Any: as in Disk
        room = self._disk.take(str(self.name), data)
        if room is None:
            return super().write(data)
        if room:
            super().write(memoryview(data).cast("B")[:room])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(tmp_path / "run")
    monkeypatch.setattr(os, "write", made.os_write)
    monkeypatch.setattr(io, "open", made.open)
    monkeypatch.setattr(builtins, "open", made.open)
    return made


def kind(name: str, root: str) -> str:
    """The same for files that differ in number, task or episode, and for what the stages of one kind write, or all of them."""
    path = re.sub(r"\.part$|\.tmp$", "", name.removeprefix(root))
    if "/trials/" in path:
        return re.sub(r"/stages/\w+/trials/([^/]+/)?", lambda found: "/stages/*/trials/" + ("*/" if found[1] else ""), path)
    path = re.sub(r"/stages/\w+/(?=\.begun|rollouts\.|\d+\.json)", "/stages/*/", path)
    path = re.sub(r"/stages/\w+_eval/", "/stages/*_eval/", path)
    path = re.sub(r"/stages/sft\w*/", "/stages/sft*/", path)
    return re.sub(r"\d+|\.[a-z0-9_]{8}(?=/|\.|$)", "*", path)


def results(run_dir: Path) -> list[dict[str, Any]]:  # Any: JSON
    entries = json.loads((run_dir / "ledger.json").read_text())
    return [{key: entry[key] for key in ("stage", "summary", "verdict", "counts")} for entry in entries]


def check_whole(run_dir: Path) -> None:
    """What bears its name is whole."""
    for path in run_dir.rglob("*.json"):
        if not path.name.startswith(".") and ".part" not in str(path):
            json.loads(path.read_text())
    for path in run_dir.rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            json.loads(line)


@pytest.mark.parametrize(("experiment", "of"), [("rsr", "/"), ("tmax", "/stages/synthesise/|/stages/dppo/")])
def test_whichever_write_meets_it_the_run_says_so_and_goes_on(
    experiment: str, of: str, disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`of`: the kinds that count, for others are those of the first experiment too."""

    def run(place: Path) -> int:
        return main([f"experiment={experiment}", "scale=dry", "trials=true", f"run_dir={place}"])

    assert run(tmp_path / "run") == 0
    whole, kinds = results(tmp_path / "run"), dict(disk.written)
    # The middle one, or the fourth: costs are written as often as episodes end apart from each other, in each life anew.
    places = sorted((name, min(3, (times - 1) // 2)) for name, times in kinds.items() if re.match(of, name))
    assert {"/metrics.jsonl", "/.ledger.json", "/.config.yaml", "/stages/*/trials/*/artifacts/.manifest.json"} <= kinds.keys()
    (tmp_path / "run").rename(tmp_path / "whole")
    capsys.readouterr()
    for number, place in enumerate(places):
        disk.written.clear()
        disk.full_at, disk.full = place, ""
        code = run(tmp_path / "run")
        err, failed = capsys.readouterr().err, disk.full
        assert code == 1, (failed, err)
        told = [line for line in err.splitlines() if line.startswith("termrsi: ")]
        assert len(told) == 1, (failed, err)
        assert "Traceback" not in err
        assert "the disk is full" in told[0], (failed, err)
        assert str(tmp_path / "run") in told[0]
        check_whole(tmp_path / "run")
        disk.full_at, disk.full = None, ""
        assert run(tmp_path / "run") == 0, failed
        assert results(tmp_path / "run") == whole, failed
        check_whole(tmp_path / "run")
        (tmp_path / "run").rename(tmp_path / f"run-{number}")
        capsys.readouterr()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "disk", place], check=False).returncode:
        pytest.skip("cannot mount a disk")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_model_that_does_not_fit_leaves_nothing_and_the_one_before_stays(small_disk: Path, tmp_path: Path, role: str) -> None:
    from termrsi.model.checkpoint import tiny_model
    from termrsi.model.critic import CriticModel
    from termrsi.model.policy import PolicyModel

    model = tiny_model(tmp_path / "tiny")
    made = PolicyModel(str(model), compute="fp32") if role == "policy" else CriticModel(str(model), compute="fp32")
    place = small_disk / role
    place.mkdir()
    (place / "before").write_text("x")
    with (small_disk / "others").open("wb") as file:
        file.write(b"x" * (200 << 10))
    for save in (made.save, made.save_training):
        with pytest.raises(OSError, match=r"No space left|os error 28") as caught:
            save(place)
        assert caught.value.errno == errno.ENOSPC
        assert (place / "before").read_text() == "x"
        assert {path.name for path in small_disk.iterdir()} == {"others", role}


def test_a_line_is_whole_or_not_there_and_a_file_as_it_was(small_disk: Path) -> None:
    with Lines(small_disk / "lines.jsonl") as lines:
        lines.add("first")
        write_text(small_disk / "kept.json", "1")
        for big in ("x" * (300 << 10), "x" * (512 << 10)):
            with pytest.raises(OSError, match=rf"{len(big) + 1} bytes were to be written.*lines.jsonl"):
                lines.add(big)
            with pytest.raises(OSError, match=rf"{len(big)} bytes were to be written.*kept.json"):
                write_text(small_disk / "kept.json", big)
        lines.add("second")
    assert (small_disk / "lines.jsonl").read_text() == "first\nsecond\n"
    assert (small_disk / "kept.json").read_text() == "1"
    assert sorted(path.name for path in small_disk.iterdir()) == ["kept.json", "lines.jsonl"]
