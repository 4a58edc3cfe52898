"""`ports.Writer` over an OpenAI-compatible chat endpoint: text both ways, retries, a rate that is kept, and what it cost.

A request waits for one of `concurrency` places, then for its turn under the rate; each retry waits for a turn again, so that the
endpoint never sees more than it allows. All waits end: a turn and a retry by the clock, a place by the request that holds it.
"""

import asyncio
import email.utils
import json
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from termrsi.config.schema import RoleConfig
from termrsi.errors import ConfigError, EngineError, RequestRefused
from termrsi.records import Message, SamplingParams, Writing

REFUSED = frozenset({400, 413, 422})  # for what a request holds, or for what all of them hold: see `EndpointWriter.write`
PASSING = frozenset({408, 409, 429})  # and 5xx: what may be well a little later
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
LONGEST_ASKED_S = 600.0  # an endpoint that asks for more patience than this is not there
CONTINUE = "Go on with your last message exactly where it ends. Say only what comes next; repeat nothing."
_PROBE = (Message("user", "Say yes."),)
_Body = dict[str, Any]  # Any: JSON


def open_writers(roles: Mapping[str, RoleConfig]) -> dict[str, "EndpointWriter"]:
    """A writer for each configured role. Raises ConfigError if a key's variable is not set."""
    return {
        role: EndpointWriter(
            c.url,
            c.model,
            c.key_env,
            requests_per_minute=c.requests_per_minute,
            concurrency=c.concurrency,
            retries=c.retries,
            timeout_s=c.timeout_s,
            price_in=c.price_in,
            price_out=c.price_out,
            continues=c.continues,
            extra=c.extra,
        )
        for role, c in roles.items()
    }


def key_of(variable: str, where: str = "key_env") -> str:
    """Raises ConfigError if it is not set, or holds what no header can say."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {variable} is not set", where, "export it where the run is started")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the environment variable {variable} holds what is no key", where, "valid: printable ASCII in one line")
    return key


class Rate:
    """Turns at most `per_minute`, evenly spaced (a token bucket that holds one), in the order asked for; 0: at once."""

    def __init__(
        self,
        per_minute: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._gap_s = 60.0 / per_minute if per_minute else 0.0
        self._clock = clock
        self._sleep = sleep
        self._next_s = -math.inf

    async def turn(self) -> None:
        now = self._clock()
        mine = max(now, self._next_s)
        self._next_s = mine + self._gap_s
        if mine > now:
            await self._sleep(mine - now)


@dataclass(frozen=True, slots=True)
class _Passing:
    """A fault that may pass. `wait_s`: how long the endpoint asks to wait."""

    what: str
    wait_s: float | None = None


class EndpointWriter:
    """One model behind `url` (".../v1"). `key_env`: the environment variable that holds the key. `close` it: it holds connections.

    `continues`: a reply that is begun is continued by the server (`continue_final_message`, as vLLM has it); without that the model
    is asked to go on with its own last message, which a small one does badly. Prices are of a million tokens. `clock`, `sleep` and
    `draw` (in [0, 1)) are time and chance.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key_env: str = "",
        *,
        requests_per_minute: float = 0.0,
        concurrency: int = 8,
        retries: int = 8,
        timeout_s: float = 600.0,
        price_in: float = 0.0,
        price_out: float = 0.0,
        continues: bool = False,
        extra: Mapping[str, Any] | None = None,  # Any: JSON
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        from openai import AsyncOpenAI

        self._key = key_of(key_env) if key_env else ""
        # Some key has to be given: without one the client would send the environment's OPENAI_API_KEY to whoever this is. Its own
        # retries do not wait for a turn.
        self._client = AsyncOpenAI(api_key=self._key or "none", base_url=url, max_retries=0, timeout=timeout_s)
        self._where = url
        self._model = model
        self._rate = Rate(requests_per_minute, clock, sleep)
        self._places = asyncio.Semaphore(concurrency)
        self._retries = retries
        self._prices = (price_in, price_out)
        self._continues = continues
        self._extra = dict(extra or {})
        self._sleep = sleep
        self._draw = draw

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        """Raises EngineError with the endpoint's reason: at once if it refuses, after the retries if it fails; RequestRefused if it
        refuses this request, and answers one of two words with the same settings. What that one costs is not counted.

        `key` is not sent: endpoints find out by themselves which requests begin alike.
        """
        async with self._places:
            try:
                answer = await self._answer(*self._body(messages, sampling, begun))
            except RequestRefused as refusal:
                if await self._refuses_all(sampling, begun):
                    raise EngineError(refusal.what, refusal.where) from None
                raise
        # A model that is asked to go on may begin again.
        return answer if self._continues else replace(answer, text=answer.text.removeprefix(begun))

    async def close(self) -> None:
        await self._client.close()

    async def _refuses_all(self, sampling: SamplingParams, begun: str) -> bool:
        """Wrong settings, a model that is not there and an account without money are 400 at some endpoints, too."""
        try:
            await self._answer(*self._body(_PROBE, sampling, begun and "Y"))
        except RequestRefused:
            return True
        return False

    def _body(self, messages: Sequence[Message], sampling: SamplingParams, begun: str) -> tuple[list[dict[str, str]], _Body]:
        """Messages, and the rest of the request but its model."""
        said = [_message(m) for m in messages]
        ours: _Body = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_tokens}
        if sampling.seed is not None:
            ours["seed"] = sampling.seed
        if begun:
            said.append({"role": "assistant", "content": begun})
            if self._continues:
                ours |= {"continue_final_message": True, "add_generation_prompt": False}
            else:
                said.append({"role": "user", "content": CONTINUE})
        return said, {name: value for name, value in (ours | self._extra).items() if value is not None}

    async def _answer(self, said: list[dict[str, str]], rest: _Body) -> Writing:
        """One request, until it is answered, refused, or out of retries."""
        tried = 0
        while True:
            await self._rate.turn()
            answer = await self._once(said, rest)
            if isinstance(answer, Writing):
                return answer
            tried += 1
            if tried > self._retries:
                raise EngineError(f"{answer.what}; tried {tried} times", self._where)
            if answer.wait_s is not None and answer.wait_s > LONGEST_ASKED_S:
                raise EngineError(f"{answer.what}; it asks to wait {answer.wait_s:.0f} s", self._where)
            doubled = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(tried - 1, 16))
            await self._sleep(doubled * (1.0 - 0.5 * self._draw()) if answer.wait_s is None else answer.wait_s)

    async def _once(self, said: list[dict[str, str]], rest: _Body) -> Writing | _Passing:
        """Raises EngineError for what no retry cures, RequestRefused for what may be of this request alone."""
        from openai import APIConnectionError, APIStatusError

        status, headers = 0, {}
        try:
            raw = await self._client.chat.completions.with_raw_response.create(
                model=self._model,
                messages=said,  # type: ignore[arg-type]  # the client has a type for each role
                extra_body=rest,
            )
            return self._writing(raw.text)
        except APIConnectionError as error:  # a time-out too
            what = f"the endpoint does not answer: {self._scrubbed(str(error.__cause__ or error) or type(error).__name__)}"
        except APIStatusError as error:
            status, headers = error.status_code, error.response.headers
            what = f"the endpoint refused: {status} {self._scrubbed(error.response.text)[:300]}"
        # Outside of `except`: the client's own errors hold the request, and with it the key.
        if status in REFUSED:
            raise RequestRefused(what, self._where)
        if status and status not in PASSING and status < 500:
            raise EngineError(what, self._where)
        return _Passing(what, _asked_wait(headers.get("retry-after", "")))

    def _scrubbed(self, text: str) -> str:
        """An endpoint may say the key that it refuses."""
        return text.replace(self._key, "[key]") if self._key else text

    def _writing(self, text: str) -> Writing | _Passing:
        try:
            data = json.loads(text)
            choice = data["choices"][0]
            content, usage = choice["message"].get("content"), data.get("usage") or {}
            if not isinstance(content, str | None) or (not usage and any(self._prices)):
                raise TypeError("no usage, though prices are given" if isinstance(content, str | None) else "content")
            tokens = int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return _Passing(f"its answer is no chat completion ({error}): {self._scrubbed(text)[:200]!r}")
        cost = sum(price * count for price, count in zip(self._prices, tokens, strict=True)) / 1e6
        return Writing(content or "", *tokens, cost, str(data.get("model") or self._model), choice.get("finish_reason") == "length")


def _message(message: Message) -> dict[str, str]:
    """What a tool says is told by the user: no call of a tool that an endpoint knows of stands before it."""
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.content}\n</tool_response>"}
    return {"role": message.role, "content": message.content}


def _asked_wait(value: str) -> float | None:
    """Seconds of a Retry-After: a number, or a date."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
