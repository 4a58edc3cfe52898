"""What the watchdog says and does, of scripted actors: the late are named with all that is known, the silent are ended."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from termrsi.actors.remote_pool import RemotePool
from termrsi.actors.sandboxes import Beat
from termrsi.actors.watchdog import Bounds, Watchdog
from termrsi.harness.progress import Progress, Standing
from termrsi.report import logs

BOUNDS = Bounds(every_s=0.001, answer_s=0.01, late_s=0.02, hung_s=0.06)
LOST = ActorUnavailableError("the node died", None)
SILENT = object()


class Actor:
    """Answers in order; the last one again and again."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.told = list(answers), []

    def __getattr__(self, method: str) -> Any:  # Any: a method of Ray's handles
        class Method:
            def remote(_self, *arguments: object) -> Any:  # Any: a future
                self.told.append((method, *arguments))
                future = asyncio.get_running_loop().create_future()
                if method in ("beat", "late"):
                    answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                    if isinstance(answer, Exception):
                        future.set_exception(answer)
                    elif answer is not SILENT:
                        future.set_result(answer)
                else:
                    future.set_result(None)
                return future

        return Method()


async def watched(nodes: list[Any], workers: list[Any], until: Callable[[list[str]], bool], caplog: Any) -> list[str]:
    """What it has said once `until` is true of it."""
    watchdog = Watchdog(RemotePool(nodes or [Actor(SILENT)]), nodes, workers, BOUNDS)
    with caplog.at_level(logging.WARNING):
        watchdog.start()
        async with asyncio.timeout(10.0):
            while not until([r.getMessage() for r in caplog.records]):  # noqa: ASYNC110  # of a log
                await asyncio.sleep(0.001)
        await watchdog.close()
    return [r.getMessage() for r in caplog.records]


def beat(life: str, *, forgetful: bool = False) -> Beat:
    return Beat("10.0.0.7 (ab12cd34)", life, forgetful)


async def test_a_lost_node_that_comes_back_is_told_what_it_has_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    actor = Actor(beat("1"), LOST, LOST, beat("2", forgetful=True), beat("2"))
    said = await watched([actor], [], lambda lines: any("started again" in line for line in lines[1:]), caplog)
    said = [line for line in said if "has not answered" not in line]  # as often as the machine is slow
    assert said[0].startswith("sandbox node 0 at 10.0.0.7 (ab12cd34) is lost: ")
    assert said[0].endswith("; it is started again where there is a place for it")
    assert "answers again after" in said[1]
    assert said[2] == "sandbox node 0 at 10.0.0.7 (ab12cd34) was started again: the sandboxes that it had are lost"
    assert ("expect", {}) in actor.told


async def test_an_answer_that_cannot_be_had_does_not_end_the_looks(caplog: pytest.LogCaptureFixture) -> None:
    actor = Actor(beat("1"), RayTaskError("beat", "a traceback", ValueError("of its own")), beat("2"))
    said = await watched([actor], [], lambda lines: any("was started again" in line for line in lines), caplog)
    assert [line for line in said if "at one actor less" in line] == []


async def test_what_ends_a_look_is_told(caplog: pytest.LogCaptureFixture) -> None:
    said = await watched([Actor("no beat")], [], bool, caplog)
    assert said[0].startswith("the watchdog looks at one actor less: 'str' object has no attribute")


async def test_one_that_is_dead_for_good_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    said = await watched([Actor(ActorDiedError())], [Actor([])], bool, caplog)
    assert len(said) == 1
    assert said[0].startswith("sandbox node 0 is dead and is not started again: ")


async def test_a_silent_one_is_named_and_then_ended(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    killed: list[tuple[object, bool]] = []
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append((actor, no_restart)))
    worker = Actor(SILENT)
    said = await watched([], [worker], lambda lines: bool(killed), caplog)
    assert said[0].startswith("rollout worker 0 has not answered for ")
    assert said[-1].endswith("its process is ended")
    assert killed[0] == (worker, False), "and started again"


async def test_a_late_episode_is_named_with_turn_sandbox_and_node(caplog: pytest.LogCaptureFixture) -> None:
    late = Standing("grpo/3/t/0", 2, 7, "at its commands", "box-1", held_s=0.05)
    later = Standing("grpo/3/t/0", 2, 7, "at its commands", "box-1", held_s=0.09)
    ids = {"run": "r", "stage": "grpo", "step": 3}
    actor = Actor([(late, "node 4", ids)], [(late, "node 4", ids)], [(later, "node 4", ids)], [])
    known: list[logs.Ids] = []
    caplog.handler.addFilter(lambda record: known.append(logs.current()) or True)
    said = await watched([], [actor], lambda lines: len(actor.told) > 4, caplog)
    assert known == [{**ids, "rollout": "grpo/3/t/0"}] * 2, "of the episode, not of whoever looks"
    text = "episode grpo/3/t/0 (attempt 2, turn 7) has been at its commands for 0 s in sandbox box-1 on node 4"
    assert said == [text, text], "once for each time that it is so much later"
    assert actor.told[0] == ("late", BOUNDS.late_s)


def test_progress_tells_the_longest_first_and_forgets_what_has_ended() -> None:
    now = [0.0]
    progress = Progress(lambda: now[0])
    progress.begin("a", 1)
    now[0] = 5.0
    progress.begin("b", 2)
    progress.at("b", "generating", sandbox="box", turns=1)
    progress.at("gone", "generating")
    now[0] = 8.0
    first, second = progress.late(2.0)
    assert first == Standing("a", 1, 0, "waiting for a sandbox", held_s=8.0)
    assert second == Standing("b", 2, 1, "generating", "box", held_s=3.0)
    assert first.told() == "episode a (attempt 1) has been waiting for a sandbox for 8 s"
    assert second.told("node 1") == "episode b (attempt 2, turn 1) has been generating for 3 s in sandbox box on node 1"
    assert progress.late(3.0) == [first]
    progress.end("a")
    progress.end("a")
    assert progress.late(3.0) == []
