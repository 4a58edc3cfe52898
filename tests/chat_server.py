"""A chat endpoint that a test speaks for: real HTTP, in a thread; each answer is what the test's function says of the request."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from termrsi.errors import EngineError
from termrsi.harness.render import ChatFormat
from termrsi.ports import Generator
from termrsi.records import Message, SamplingParams
from termrsi.stages.roles import PolicyWriter

Json = dict[str, Any]  # Any: JSON
HANG_UP = 0  # the status of an answer that never comes: the connection is closed


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    path: str
    key: str | None
    body: Json


def said(text: str | None, *, finish: str = "stop", prompt: int = 10, completion: int = 5, model: str = "served") -> Answer:
    """A chat completion."""
    return Answer(
        200,
        json.dumps(
            {
                "id": "x",
                "object": "chat.completion",
                "model": model,
                "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}],
                "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
            }
        ),
    )


def in_turn(answers: Iterable[Answer]) -> Callable[[Asked], Answer]:
    """One after the other; a request too many ends the server's thread, and so hangs up."""
    left = iter(answers)
    return lambda asked: next(left)


def as_policy(generator: Generator, chat: ChatFormat) -> Callable[[Asked], Answer]:
    """The policy itself, as a model behind an endpoint that continues what is begun."""

    def answer(asked: Asked) -> Answer:
        body = asked.body
        messages = [Message(m["role"], m["content"]) for m in body["messages"]]
        begun = messages.pop().content if body.get("continue_final_message") else ""
        sampling = SamplingParams(body["temperature"], body["top_p"], body["max_tokens"], body.get("seed"))
        try:
            wrote = asyncio.run(PolicyWriter(generator, chat).write(messages, sampling, begun=begun))
        except EngineError as error:
            return Answer(500, str(error))
        finish = "length" if wrote.cut else "stop"
        return said(wrote.text, finish=finish, prompt=wrote.prompt_tokens, completion=wrote.completion_tokens)

    return answer


class ChatServer:
    """`with` it. `.asked`, `.given`: in the order they came; `.url`: what is configured."""

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self.asked: list[Asked] = []
        self.given: list[Answer] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                asked = Asked(self.path, self.headers["authorization"], body)
                outer.asked.append(asked)
                given = answer(asked)
                outer.given.append(given)
                if given.status == HANG_UP:
                    return
                self.send_response(given.status)
                for name, value in {"content-type": "application/json", **given.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(given.text.encode())

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def tokens(self) -> tuple[int, int]:
        """Of all prompts and all completions that were told."""
        usages = [json.loads(given.text)["usage"] for given in self.given if given.status == 200]
        return sum(u["prompt_tokens"] for u in usages), sum(u["completion_tokens"] for u in usages)

    def __enter__(self) -> "ChatServer":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
