"""Answers of several processes as one: whose fault it was when they are out of step, and when it is nobody's."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayActorError

from termrsi.actors.group import Group
from termrsi.errors import ConfigError, EngineError

RESET = RuntimeError("gloo: connection reset by peer")
DEAD = RayActorError(error_msg="The actor died unexpectedly")


class Watched(Group):
    """Processes that only answer."""

    ended = 0

    def end(self) -> None:
        self.ended += 1


def ready(answers: list[Any]) -> list[asyncio.Future[Any]]:  # Any: a value, an error, or None for silence
    futures = []
    for answer in answers:
        future = asyncio.get_running_loop().create_future()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        futures.append(future)
    return futures


async def outcome(*answers: Any) -> tuple[Any, int]:  # Any: see ready
    """Value or error, and how often the processes were ended."""
    group = Watched("policy", [object()] * len(answers), limit_s=0.01)
    try:
        return await group.first_of("update", ready(list(answers))), group.ended
    except (EngineError, ValueError, OSError) as error:
        return error, group.ended


async def test_the_first_process_answers_once_all_have() -> None:
    assert await outcome("first", "second", "third") == ("first", 0)


async def test_an_error_of_its_own_ends_nothing_where_all_have_answered() -> None:
    """Refused alike by all; or by the first alone after the others are through, as a disk that is full."""
    refused = ConfigError("no loss kind", "policy.update")
    assert await outcome(refused, refused) == (refused, 0)
    full = OSError("No space left on device")
    assert await outcome(full, "second") == (full, 0)


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ((RESET, DEAD, RESET), "policy: process 1 of 3 died in update: The actor died unexpectedly"),
        ((RESET, ValueError("bad row"), None), "policy: process 1 of 3 failed alone in update: bad row"),
        (("first", None, "third"), "policy: process 1 of 3 did not come to the end of update"),
        ((RESET, RESET, None), "policy: process 2 of 3 did not come to the end of update"),
        ((RESET, RESET, RESET), "of 3 failed in update: gloo"),
        ((None, None, DEAD), "policy: process 2 of 3 died in update"),
    ],
)
async def test_the_one_that_is_lost_is_named_and_all_are_ended(answers: tuple[Any, ...], line: str) -> None:
    error, ended = await outcome(*answers)
    assert isinstance(error, EngineError)
    assert line in str(error)
    assert ended == 1


async def test_what_is_lost_stays_lost() -> None:
    group = Watched("policy", [object(), object()], limit_s=0.01)
    for answers in ([DEAD, RESET], ["first", "second"]):
        with pytest.raises(EngineError, match="process 0 of 2 died in update"):
            await group.first_of("update", ready(answers))
    assert group.ended == 1
