"""What stands on disk between two steps: whole or not at all, the newest two, and what a full disk leaves."""

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from termrsi.errors import StageError
from termrsi.fakes import FakePolicy, FakeSkill
from termrsi.stages import checkpoints
from termrsi.stages.checkpoints import Checkpoints, forget, snapshots


class Stage(SimpleNamespace):
    """The part of a context that matters here."""

    @property
    def version(self) -> int:
        return max(self.served)


class Bench:
    """A policy whose skill is the number of the step."""

    def __init__(self, out: Path, finished: object = True) -> None:
        self.policy = FakePolicy()
        self.ctx: Any = Stage(
            name="grpo", out=out, finished=finished, served={4: "base"}, sync=self.sync, keep_costs=self.keep_costs
        )

    async def sync(self) -> None:
        weights = await self.policy.publish()
        self.ctx.served[weights.version] = weights.checksum

    async def keep_costs(self) -> None: ...

    def checkpoints(self, every: int = 1, steps: int = 9) -> Checkpoints:
        return Checkpoints(self.ctx, every, steps, {"policy": self.policy})

    async def step(self, kept: Checkpoints, number: int) -> None:
        self.policy.skill = FakeSkill(solve=float(number))
        await kept.add(number, {"rollouts": [f"r{number}"]}, {"number": number} if kept.due(number) else None)


def there(out: Path) -> list[str]:
    return sorted(path.name for path in (out / checkpoints.FOLDER).iterdir())


async def test_the_newest_two_stay_and_the_last_is_gone_on_from(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.checkpoints(every=2, steps=7) as kept:
        assert await kept.take_up() == (0, None)
        oldest = []
        for number in range(1, 6):
            await bench.step(kept, number)
            oldest.append(kept.oldest(number))
        assert oldest == [0, 0, 0, 2, 2]
        assert [kept.due(number) for number in range(1, 8)] == [False, True, False, True, False, True, True]
    assert there(tmp_path) == ["step-2", "step-4"]
    (tmp_path / checkpoints.FOLDER / "step-6.part" / "policy").mkdir(parents=True)  # killed while it was written
    shutil.copytree(tmp_path / checkpoints.FOLDER / "step-4", tmp_path / checkpoints.FOLDER / "step-6")  # and before its line
    again = Bench(tmp_path)
    with again.checkpoints(every=2) as kept:
        assert await kept.take_up() == (4, {"number": 4})
        assert there(tmp_path) == ["step-2", "step-4"]
        assert again.policy.skill == FakeSkill(solve=4.0)
        assert again.ctx.served == {4: "base"}  # the generator had not been told of them
        assert (await again.policy.publish()).version == 5
        found = [json.loads(line)["key"] for line in (tmp_path / checkpoints.LINES).read_text().splitlines()]
        assert found == ["1", "2", "3", "4"]  # the fifth is done again
        await again.step(kept, 5)
    forget(tmp_path)
    assert not (tmp_path / checkpoints.FOLDER).exists()


async def test_what_was_served_is_served_again_under_its_number(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.policy.skill = FakeSkill(solve=1.0)
    await bench.policy.load_training(str(await _saved(bench, tmp_path / "as it was")), 6)
    await bench.sync()
    with bench.checkpoints() as kept:
        await kept.take_up()
        await bench.step(kept, 1)
    again = Bench(tmp_path)
    with again.checkpoints() as kept:
        assert (await kept.take_up())[0] == 1
    assert again.ctx.served == bench.ctx.served == {4: "base", 7: await bench.policy.checksum()}


async def _saved(bench: Bench, folder: Path) -> Path:
    await bench.policy.save_training(str(folder))
    return folder


async def test_weights_that_are_not_those_written_are_not_gone_on_from(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.checkpoints() as kept:
        await kept.take_up()
        for number in (1, 2):
            await bench.step(kept, number)
    skill = tmp_path / checkpoints.FOLDER / "step-2" / "policy" / "skill.json"
    skill.write_text(json.dumps({"solve": 9.0, "half": 0.0}))
    again = Bench(tmp_path)
    with again.checkpoints() as kept:
        assert await kept.take_up() == (1, {"number": 1})
    assert again.policy.skill == FakeSkill(solve=1.0)
    assert there(tmp_path) == ["step-1"]
    (tmp_path / checkpoints.FOLDER / "step-1" / "policy" / "skill.json").write_text(json.dumps({"solve": 9.0, "half": 0.0}))
    with Bench(tmp_path).checkpoints() as kept, pytest.raises(StageError, match="no checkpoint can be read"):
        await kept.take_up()


@pytest.mark.parametrize(("every", "finished"), [(0, True), (1, None)])
async def test_without_checkpoints_nothing_is_written(tmp_path: Path, every: int, finished: object) -> None:
    bench = Bench(tmp_path, finished)
    with bench.checkpoints(every) as kept:
        assert await kept.take_up() == (0, None)
        await bench.step(kept, 1)
        assert kept.oldest(1) == 1
    assert list(tmp_path.iterdir()) == []


async def test_a_full_disk_is_told_and_the_one_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)

    async def full(directory: str) -> str:
        (Path(directory) / "half").parent.mkdir(parents=True)
        (Path(directory) / "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with bench.checkpoints() as kept:
        await kept.take_up()
        await bench.step(kept, 1)
        with monkeypatch.context() as patch:
            patch.setattr(bench.policy, "save_training", full)
            with pytest.raises(OSError, match="No space left"):
                await bench.step(kept, 2)
        assert there(tmp_path) == ["step-1"]
        usage = namedtuple("usage", ["total", "used", "free"])
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
        with pytest.raises(StageError, match=r"the disk is full: 0\.0 GiB free, a checkpoint takes 0\.0; free some"):
            await bench.step(kept, 2)
    with Bench(tmp_path).checkpoints() as kept:
        assert (await kept.take_up())[0] == 1


def test_the_states_that_a_stage_may_go_on_from(tmp_path: Path) -> None:
    one = {"id": "a", "backend": "local", "handle": "/a", "digest": "1", "lost_processes": [], "size_bytes": 0}
    state = {"own": {"loop": {"queue": [{"id": "point", "snapshot": one}], "free": [[1, one | {"id": "b"}]]}}}
    place = tmp_path / checkpoints.FOLDER / "step-1"
    place.mkdir(parents=True)
    (place / checkpoints.STATE).write_text(json.dumps(state))
    rollout = {"id": "r", "snapshot": one | {"id": "c"}, "chunks": [], "recovery_id": ""}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({"rollout": rollout, "verdict": {}}) + "\n")
    assert snapshots(tmp_path) == frozenset()  # of a stage that has no checkpoints
    (tmp_path / checkpoints.LINES).touch()
    assert snapshots(tmp_path) == {"a", "b", "c"}
    assert snapshots(tmp_path / "none") == frozenset()
