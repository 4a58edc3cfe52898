"""What kills the processes of a chaos run does so at the call that was named, and once; a seed draws the same kills again."""

import multiprocessing
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import chaos, chaos_life, chaos_parts
from tests.chaos_life import Kill, Plan


def host(plan: Plan, done: str) -> None:
    """A life of a policy's process: five calls, of which each that ends is told."""
    made: Any = chaos_life.telling(chaos_parts.Host, "policy", plan).__ray_metadata__.modified_class("", None, None)
    for _ in range(4):
        made.checksum()
        with Path(done).open("a") as file:
            file.write(".")
    os._exit(0)


def life(plan: Plan, done: Path) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=host, args=(plan, str(done)))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize(("call", "after", "ended"), [(1, True, 0), (3, False, 1), (3, True, 1), (5, True, 3)])
def test_a_kill_comes_at_its_call_and_once(call: int, after: bool, ended: int, tmp_path: Path) -> None:
    kill = Kill("one", "policy", call, after, of="policy")
    plan, done = Plan(str(tmp_path / "life"), (kill, Kill("two", "critic", 1, False))), tmp_path / "done"
    done.touch()
    assert life(plan, done) == -signal.SIGKILL
    assert done.stat().st_size == ended
    assert life(plan, done) == 0, "the next life of the same actor comes to the same call"
    assert done.stat().st_size == ended + 4
    assert [Kill(**entry) for entry in chaos.lines(tmp_path / "life" / chaos_life.KILLS)] == [kill]
    assert sorted(path.stat().st_size for path in (tmp_path / "life" / chaos_life.CALLS).iterdir()) == sorted([call, 5])


def test_a_seed_draws_the_same_kills_of_different_roles() -> None:
    calls = Counter({"generator": 40, "sandboxes": 90, "driver": 200, "policy": 12, "queue": 0})
    place = chaos.Place(Path("/nowhere"), raylet=77)
    one, other = [chaos.drawn(random.Random(seed), calls, place) for seed in ("a", "a")]
    assert one == other
    assert len({kill.of for kill in one}) == chaos.AT_ONCE
    for number in range(50):
        for kill in chaos.drawn(random.Random(f"seed {number}"), calls, place):
            assert 1 <= kill.call <= calls[kill.role]
            assert (kill.of == "node") == (kill.pid == 77)
            assert kill.role == ("sandboxes" if kill.of == "node" else kill.of)


def result(**changes: Any) -> dict[str, Any]:  # Any: JSON
    whole = {
        "trained": {"s": [["a", "b"], ["c"]]},
        "verdicts": {"s": {"f": {"a": True, "b": False, "c": True}}},
        "curve": {"s 1": {"loss": 0.5}},
    }
    return whole | changes


@pytest.mark.parametrize(
    ("found", "counted", "told"),
    [
        (result(), (0, 0, 0, 0), ""),
        (result(trained={"s": [["a", "b"]]}), (1, 0, 0, 1), "s: lost ['c']"),
        (result(trained={"s": [["a", "b"], ["c", "a"]]}), (0, 1, 0, 1), "s: trained twice ['a']"),
        (result(verdicts={"s": {"f": {"a": False, "b": False, "c": True}}}), (0, 0, 1, 1), "s/f: scored as failures ['a']"),
        (result(curve={"s 1": {"loss": 0.25}}), (0, 0, 0, 1), "curve differs: /s 1/loss: 0.5 became 0.25"),
    ],
)
def test_what_differs_is_counted_and_named(found: dict[str, Any], counted: tuple[int, ...], told: str) -> None:
    counts = chaos.Counts()
    if told:
        with pytest.raises(chaos.ChaosError) as error:
            chaos.judge(result(), found, counts, "seed 'x'")
        assert told in str(error.value)
    else:
        chaos.judge(result(), found, counts, "seed 'x'")
    assert (counts.lost, counts.twice, counts.failed, counts.other) == counted
