"""A model behind a chat endpoint: what is sent, what comes back, what it costs, and each way in which it can fail. Real HTTP."""

import asyncio
import email.utils
import logging
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from termrsi.config.schema import RoleConfig
from termrsi.errors import ConfigError, EngineError, RequestRefused
from termrsi.interop.chat_endpoint import CONTINUE, EndpointWriter, Rate, open_writers
from termrsi.records import Message, SamplingParams, Writing
from tests.chat_server import HANG_UP, Answer, Asked, ChatServer, in_turn, said

ASK = [Message("system", "Be brief."), Message("user", "How?")]
PARAMS = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7, seed=3)
KEY = "sk-very-secret"
FAULT = Answer(500, "overloaded")


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@asynccontextmanager
async def asking(server: ChatServer, **options: Any) -> AsyncIterator[tuple[EndpointWriter, Time]]:  # Any: of whichever option
    """A writer, and the time that it lives in; its chance is none: what it draws is 0."""
    time_of = Time()
    options = {"clock": time_of.clock, "sleep": time_of.sleep, "draw": lambda: 0.0} | options
    writer = EndpointWriter(server.url, "m", **options)
    try:
        yield writer, time_of
    finally:
        await writer.close()


async def refused(answer: Callable[[Asked], Answer], **options: Any) -> tuple[EngineError, ChatServer, Time]:  # Any: see asking
    with ChatServer(answer) as server:
        async with asking(server, **options) as (writer, time_of):
            with pytest.raises(EngineError) as caught:
                await writer.write(ASK, PARAMS)
        return caught.value, server, time_of


# --- what is sent and what comes back ------------------------------------------------------------------------------


async def test_text_in_text_out_and_what_it_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with ChatServer(in_turn([said("So.", prompt=1200, completion=30), said("Cut", finish="length")])) as server:
        async with asking(server, key_env="MY_KEY", price_in=2.5, price_out=10.0) as (writer, _):
            assert await writer.write(ASK, PARAMS, "group") == Writing("So.", 1200, 30, 0.0033, "served", False)
            assert (await writer.write(ASK, PARAMS)).cut
    first, _ = server.asked
    assert (first.path, first.key) == ("/v1/chat/completions", f"Bearer {KEY}")
    assert first.body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How?"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": 3,
    }


async def test_without_a_key_the_environments_own_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with ChatServer(in_turn([said("So.")])) as server:
        async with asking(server) as (writer, _):
            await writer.write(ASK, SamplingParams())
    assert server.asked[0].key == "Bearer none"
    assert "seed" not in server.asked[0].body


async def test_free_keys_are_added_and_null_takes_one_away() -> None:
    extra = {"max_tokens": None, "max_completion_tokens": 9, "temperature": None, "reasoning_effort": "low"}
    with ChatServer(in_turn([said("So.")])) as server:
        async with asking(server, extra=extra) as (writer, _):
            await writer.write([Message("user", "a"), Message("tool", "b")], PARAMS)
    body = server.asked[0].body
    assert set(body) == {"model", "messages", "top_p", "seed", "max_completion_tokens", "reasoning_effort"}
    assert body["messages"][1] == {"role": "user", "content": "<tool_response>\nb\n</tool_response>"}


async def test_a_reply_that_is_begun_is_continued_or_asked_for() -> None:
    with ChatServer(in_turn([said(" four"), said("One, two four"), said(" four")])) as server:
        async with asking(server, continues=True) as (writer, _):
            assert (await writer.write(ASK, PARAMS, begun="One, two")).text == " four"
        async with asking(server) as (writer, _):
            for _ in range(2):  # one that begins again, and one that does not
                assert (await writer.write(ASK, PARAMS, begun="One, two")).text == " four"
    theirs, ours, _ = (asked.body for asked in server.asked)
    assert (theirs["continue_final_message"], theirs["add_generation_prompt"]) == (True, False)
    assert theirs["messages"][2:] == [{"role": "assistant", "content": "One, two"}]
    assert "continue_final_message" not in ours
    assert ours["messages"][2:] == [*theirs["messages"][2:], {"role": "user", "content": CONTINUE}]


async def test_a_reply_without_words_is_one() -> None:
    with ChatServer(in_turn([said(None)])) as server:
        async with asking(server) as (writer, _):
            assert (await writer.write(ASK, PARAMS)).text == ""


# --- faults --------------------------------------------------------------------------------------------------------


async def test_an_endpoint_that_asks_to_wait_is_waited_for() -> None:
    later = email.utils.format_datetime(datetime.now(UTC), usegmt=True)
    answers = [Answer(429, "slow down", {"retry-after": "7"}), Answer(503, "", {"retry-after": later}), said("So.")]
    with ChatServer(in_turn(answers)) as server:
        async with asking(server) as (writer, time_of):
            assert (await writer.write(ASK, PARAMS)).text == "So."
    assert (time_of.slept, len(server.asked)) == ([7.0, 0.0], 3), "that date is past"


async def test_one_that_asks_for_too_long_is_not_waited_for() -> None:
    error, server, time_of = await refused(in_turn([Answer(429, "quota", {"retry-after": "86400"})]))
    assert "429 quota; it asks to wait 86400 s" in str(error)
    assert (len(server.asked), time_of.slept) == (1, [])


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503, HANG_UP])
async def test_what_may_pass_is_tried_again_until_the_retries_are_spent(status: int) -> None:
    error, server, time_of = await refused(lambda asked: Answer(status, "overloaded"), retries=3)
    reason = f"refused: {status} overloaded" if status else "does not answer: "
    assert reason in str(error)
    assert str(error).endswith("tried 4 times")
    assert error.where == server.url
    assert (len(server.asked), time_of.slept) == (4, [1.0, 2.0, 4.0])


async def test_waits_double_up_to_a_minute_and_chance_takes_up_to_half() -> None:
    _, _, time_of = await refused(lambda asked: FAULT, retries=8, draw=lambda: 0.5)
    assert time_of.slept == [0.75 * wait for wait in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0)]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_what_no_retry_cures_is_told_at_once(status: int) -> None:
    error, server, time_of = await refused(lambda asked: Answer(status, "no such thing"))
    assert str(error) == f"{server.url}: the endpoint refused: {status} no such thing"
    assert type(error) is EngineError, "it refuses whatever it is asked"
    assert (len(server.asked), time_of.slept) == (2 if status in (400, 413, 422) else 1, [])


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_one_request_that_is_refused_is_told_from_an_endpoint_that_refuses_all(status: int) -> None:
    def too_long(asked: Asked) -> Answer:
        return said("yes") if "Say yes." in asked.body["messages"][0]["content"] else Answer(status, "too long")

    error, server, _ = await refused(too_long)
    assert (type(error), str(error)) == (RequestRefused, f"{server.url}: the endpoint refused: {status} too long")
    ours, probe = (asked.body for asked in server.asked)
    assert probe.pop("messages") == [{"role": "user", "content": "Say yes."}]
    assert probe == {name: value for name, value in ours.items() if name != "messages"}, "with the same settings"


async def test_an_endpoint_that_dies_after_a_refusal_is_dead() -> None:
    error, server, _ = await refused(in_turn([Answer(400, "too long"), FAULT, FAULT]), retries=1)
    assert (type(error), len(server.asked)) == (EngineError, 3)
    assert "500 overloaded; tried 2 times" in str(error)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("<html>busy</html>", "<html>busy"),
        ("[]", "no chat completion"),
        ('{"error": {"message": "upstream"}}', "upstream"),
        ('{"choices": []}', "no chat completion"),
        ('{"choices": [{"message": null}]}', "no chat completion"),
        ('{"choices": [{"message": {"content": ["a"]}}]}', "content"),
        ('{"choices": [{"message": {"content": "a"}}]}', "no usage, though prices are given"),
        ('{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": "x"}}', "no chat completion"),
    ],
)
async def test_an_answer_that_is_none_may_pass_too(text: str, part: str) -> None:
    error, server, _ = await refused(lambda asked: Answer(200, text), retries=1, price_in=1.0)
    assert part in str(error)
    assert len(server.asked) == 2


async def test_tokens_that_are_not_told_are_none_where_they_cost_nothing() -> None:
    with ChatServer(lambda asked: Answer(200, '{"choices": [{"message": {"content": "a"}}]}')) as server:
        async with asking(server) as (writer, _):
            assert await writer.write(ASK, PARAMS) == Writing("a", model="m")


async def test_an_endpoint_that_never_answers_is_given_up() -> None:
    over = threading.Event()

    def wait(asked: Asked) -> Answer:
        over.wait(30.0)
        return Answer(HANG_UP, "")

    with ChatServer(wait) as server:
        async with asking(server, timeout_s=0.05, retries=1) as (writer, _):
            with pytest.raises(EngineError, match=r"does not answer.*tried 2 times"):
                await writer.write(ASK, PARAMS)
        over.set()


# --- the key -------------------------------------------------------------------------------------------------------


async def test_the_key_is_in_no_error_and_no_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    for status in (400, 401, 500, 200, HANG_UP):
        error, server, _ = await refused(lambda asked, s=status: Answer(s, f"bad key {KEY}"), retries=1, key_env="MY_KEY")
        assert server.asked[0].key == f"Bearer {KEY}"
        told = "".join(traceback.format_exception(error)) + repr(error.args) + repr(error.__context__) + repr(error.__cause__)
        assert KEY not in told
        assert status == HANG_UP or "[key]" in str(error)
    assert KEY not in caplog.text


@pytest.mark.parametrize(("value", "part"), [("", "MY_KEY is not set"), (" \n", "is not set"), ("a\nb", "no key"), ("ä", "no key")])
def test_a_key_that_cannot_be_sent_is_refused(value: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(ConfigError, match=part):
        open_writers({"judge": RoleConfig(url="http://127.0.0.1:9/v1", model="m", key_env="MY_KEY")})


# --- rate and places -----------------------------------------------------------------------------------------------


async def test_turns_are_evenly_spaced_in_the_order_asked_for() -> None:
    time_of, turns = Time(), []
    rate = Rate(6.0, time_of.clock, time_of.sleep)
    for _ in range(3):
        await rate.turn()
        turns.append(time_of.now_s)
    time_of.now_s += 25.0  # idle: nothing is saved up
    for _ in range(2):
        await rate.turn()
        turns.append(time_of.now_s)
    assert turns == [100.0, 110.0, 120.0, 145.0, 155.0]


async def test_turns_asked_for_at_once_are_told_their_times_at_once() -> None:
    waits: list[float] = []
    over = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await over.wait()

    rate = Rate(120.0, lambda: 0.0, sleep)
    asked = asyncio.gather(*[rate.turn() for _ in range(4)])
    over.set()
    await asked
    assert waits == [0.5, 1.0, 1.5]
    unbounded = Rate(0.0, lambda: 0.0, sleep)
    for _ in range(9):
        await unbounded.turn()
    assert len(waits) == 3


async def test_a_retry_waits_for_a_turn_of_its_own() -> None:
    with ChatServer(in_turn([FAULT, said("a"), said("b")])) as server:
        async with asking(server, requests_per_minute=6.0) as (writer, time_of):
            await writer.write(ASK, PARAMS)
            await writer.write(ASK, PARAMS)
    assert time_of.slept == [1.0, 9.0, 10.0], "the wait after the fault counts"


async def test_no_more_at_once_than_there_are_places() -> None:
    """The server answers no one before two are there, and sees that a third does not come."""
    both, lock, now, most = threading.Barrier(2), threading.Lock(), 0, 0

    def together(asked: Asked) -> Answer:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        both.wait(30.0)
        with lock:
            now -= 1
        return said("a")

    with ChatServer(together) as server:
        async with asking(server, concurrency=2, sleep=asyncio.sleep, clock=time.monotonic) as (writer, _):
            answers = await asyncio.gather(*[writer.write(ASK, PARAMS) for _ in range(6)])
    assert (len(answers), most) == (6, 2)
