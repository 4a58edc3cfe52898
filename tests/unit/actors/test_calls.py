"""A call to an actor ends: with its answer, its process's death, or the caller's patience."""

import asyncio
import logging

import pytest
import torch
from ray.exceptions import ActorDiedError, RayTaskError

from termrsi.actors import calls
from termrsi.errors import ConfigError, EngineError


async def answer(value: object) -> object:
    if isinstance(value, Exception):
        raise value
    return value


async def test_an_answer_and_an_error_of_ours_arrive_as_they_are() -> None:
    assert await calls.alive("policy", answer(3)) == 3
    with pytest.raises(ConfigError, match="bad"):
        await calls.alive("policy", answer(ConfigError("bad")))


async def test_a_death_is_one_line() -> None:
    with pytest.raises(EngineError, match="policy: its process died: The actor died") as caught:
        await calls.alive("policy", answer(ActorDiedError()))
    assert "\n" not in str(caught.value)


async def test_a_device_without_room_is_told_with_what_would_fit() -> None:
    """Torch's error, as Ray brings it; any other error of a call is a fault of ours, and keeps its traceback."""
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    crossed = RayTaskError("update", "Traceback\n  in line 3", full).as_instanceof_cause()
    with pytest.raises(
        EngineError, match=r"^policy: its device has no room for update: CUDA out.*; a smaller model\.micro_tokens"
    ) as caught:
        await calls.alive("policy", answer(crossed), "update")
    assert "\n" not in str(caught.value)
    with pytest.raises(ZeroDivisionError):
        await calls.alive("policy", answer(RayTaskError("update", "", ZeroDivisionError()).as_instanceof_cause()))


async def test_what_is_late_is_named_and_what_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "LATE_S", 0.01)
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(EngineError, match="critic: update was not done after 0 s; `ray stack`"):
        await calls.alive("critic", never, "update", patience_s=0.025)
    assert never.cancelled()
    assert [record.getMessage() for record in caplog.records] == ["critic: update has not been done for 0 s"] * 2
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


async def test_a_caller_that_goes_away_lets_go_of_its_call() -> None:
    never = asyncio.get_running_loop().create_future()
    caller = asyncio.ensure_future(calls.alive("policy", never))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert never.cancelled()
