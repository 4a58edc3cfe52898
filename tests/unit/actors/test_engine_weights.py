"""What an engine is given, against an engine of bytes: it maps the real file, and only what is loaded into it changes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from termrsi import weights
from termrsi.actors import buckets
from termrsi.actors.buckets import SHARED_PREFIX, BucketFile, Slot
from termrsi.actors.engine_weights import Loader
from termrsi.errors import WeightsError

SIZE = 16  # bytes of each tensor


class ByteEngine:
    """As `engine_probe` in vLLM's worker: it has whatever was loaded, and complains of other bytes than were told."""

    def __init__(self) -> None:
        self.has: dict[str, bytes] = {}
        self.calls: list[tuple[str, Any]] = []
        self.wrong = ""
        self.unproved: list[str] = []

    async def __call__(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self, method)(*arguments)]

    def begin_load(self, version: int, groups: Sequence[str], columns: int) -> None:
        self.calls.append(("begin", (version, tuple(groups), columns)))

    def take_bucket(self, path: str, slots: Sequence[Slot]) -> str:
        self.calls.append(("bucket", tuple(slot.name for slot in slots)))
        data = Path(path).read_bytes()
        for slot in slots:
            part = data[slot.start : slot.start + slot.size_bytes]
            if weights.digest_of(part) != slot.digest:
                return f"tensor {slot.name}: other bytes"
            self.has[slot.name] = part
        return ""

    def end_load(self) -> tuple[str, list[str]]:
        return self.wrong, self.unproved


class Versions:
    """Published states of three layers of two tensors."""

    def __init__(self) -> None:
        self.state = {f"model.layers.{n}.{part}": torch.zeros(SIZE // 4) for n in range(3) for part in ("a", "b")}
        self.version = 0

    def publish(self, *changed: str) -> tuple[weights.Facts, weights.PackedState, int]:
        self.version += 1
        for name in changed:
            self.state[name] = self.state[name] + self.version
        packed = weights.pack({name: tensor.clone() for name, tensor in self.state.items()})
        return weights.facts_of(packed), packed, self.version

    def bytes(self) -> dict[str, bytes]:
        return {name: tensor.numpy().tobytes() for name, tensor in self.state.items()}


@pytest.fixture
def engine() -> ByteEngine:
    return ByteEngine()


@pytest.fixture
def loader(engine: ByteEngine) -> Iterator[Loader]:
    made = Loader(engine, bucket_bytes=4 * SIZE)
    yield made
    made.close()


async def test_the_first_load_is_whole_in_buckets_and_proved_whole(engine: ByteEngine, loader: Loader) -> None:
    published = Versions()
    took = await loader.load(*published.publish())
    assert engine.has == published.bytes()
    assert took["bytes"] == 6 * SIZE
    begun, *parts = engine.calls
    assert begun == ("begin", (1, (), 0))
    assert [len(names) for _, names in parts] == [4, 2]


async def test_an_engine_that_missed_versions_catches_up_from_what_it_has(engine: ByteEngine, loader: Loader) -> None:
    """It is at the first version, the fourth is the next that it sees: what changed in any between is loaded, the rest is not."""
    published = Versions()
    await loader.load(*published.publish())
    published.publish("model.layers.0.a")
    published.publish("model.layers.2.b")
    newest = published.publish("model.layers.0.a")
    engine.calls.clear()
    await loader.load(*newest)
    assert engine.has == published.bytes()
    assert engine.calls == [
        ("begin", (4, ("model.layers.0", "model.layers.2"), weights.SAMPLE_COLUMNS)),
        ("bucket", tuple(f"model.layers.{n}.{part}" for n in (0, 2) for part in ("a", "b"))),
    ]


async def test_the_base_is_what_the_engine_has_and_not_the_version_before(engine: ByteEngine, loader: Loader) -> None:
    """A change that was taken back while the engine looked away is none to it; one that it has and that was taken back is one."""
    published = Versions()
    before = published.publish()
    await loader.load(*before)
    published.publish("model.layers.1.a")
    await loader.load(before[0], before[1], 3)
    assert len(engine.calls) == 3  # as after the first
    changed = published.publish("model.layers.1.b")
    await loader.load(*changed)
    assert engine.has == published.bytes()
    await loader.load(before[0], before[1], 5)
    assert engine.calls[-1] == ("bucket", ("model.layers.1.a", "model.layers.1.b"))
    assert set(engine.has.values()) == {bytes(SIZE)}


async def test_after_a_load_that_failed_nothing_is_taken_for_held(engine: ByteEngine, loader: Loader) -> None:
    published = Versions()
    await loader.load(*published.publish())
    engine.wrong = "tensor x differs between learner and engine after a pull"
    with pytest.raises(WeightsError, match="version 2: tensor x differs"):
        await loader.load(*published.publish("model.layers.1.a"))
    engine.wrong = ""
    took = await loader.load(*published.publish())
    assert took["bytes"] == 6 * SIZE


async def test_bytes_that_were_changed_on_the_way_are_named(loader: Loader) -> None:
    published = Versions()
    facts, _, version = published.publish()
    other = weights.pack({name: torch.ones(SIZE // 4) for name in facts})
    with pytest.raises(WeightsError, match=r"tensor model\.layers\.0\.a: other bytes"):
        await loader.load(facts, other, version)


async def test_what_cannot_be_proved_is_said_once(engine: ByteEngine, loader: Loader, caplog: pytest.LogCaptureFixture) -> None:
    published = Versions()
    engine.unproved = ["model.layers.0.a", "model.layers.0.b"]
    await loader.load(*published.publish())
    await loader.load(*published.publish("model.layers.0.a"))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "2 tensors came whole" in said


def test_the_file_is_used_again_and_goes_with_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = BucketFile(256)
    facts = weights.facts_of(weights.pack({"a": torch.arange(3), "b": torch.arange(2)}))
    slots = file.fill(weights.pack({"a": torch.arange(3), "b": torch.arange(2)}), facts, ["b", "a"])
    assert [(slot.name, slot.start) for slot in slots] == [("b", 0), ("a", 64)]
    assert np.frombuffer(file.path.read_bytes()[64 : 64 + 24], np.int64).tolist() == [0, 1, 2]
    file.fill(weights.pack({"a": torch.arange(3, 6)}), facts, ["a"])
    assert np.frombuffer(file.path.read_bytes()[:24], np.int64).tolist() == [3, 4, 5]
    left = file.path.parent
    assert str(left) not in buckets.reap()  # its owner lives
    file.close()
    assert not left.exists()
    dead = Path("/dev/shm") / f"{SHARED_PREFIX}999999999-x"
    dead.mkdir()
    assert str(dead) in buckets.reap()
