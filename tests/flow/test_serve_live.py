"""`termrsi serve` itself: vLLM's server on the embedded model, asked by our own client, beside the engine of a run."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from termrsi.actors.generator import Engine
from termrsi.errors import EngineError
from termrsi.harness.chat_generator import ChatGenerator
from termrsi.harness.render import ChatFormat
from termrsi.interop.chat_endpoint import EndpointWriter
from termrsi.interop.endpoint import EndpointGenerator
from termrsi.records import Message, SamplingParams
from termrsi.stages.roles import PolicyWriter

pytestmark = pytest.mark.engine
of_session = pytest.mark.asyncio(loop_scope="session")  # the engine's
PROMPT = [5 + (11 * k) % 4000 for k in range(70)]
START_S, STOP_S = 300.0, 60.0


class Server:
    """`termrsi serve` as its user starts it, and what it prints."""

    def __init__(self, checkpoint: Path, *words: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        command = [sys.executable, "-m", "termrsi", "serve", str(checkpoint), f"port={port}", *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.said: list[str] = []
        self.ready = threading.Event()  # or ended
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if "Application startup complete" in line:
                self.ready.set()
        self.ready.set()

    def reading(self) -> bool:
        return self._reader.is_alive()

    def stop(self) -> int:
        """As a user's Ctrl-C does; then whatever is left of it."""
        try:
            os.killpg(self.process.pid, signal.SIGINT)
            return self.process.wait(STOP_S)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self._reader.join(STOP_S)
            assert self.process.stdout is not None
            self.process.stdout.close()


@pytest.fixture(scope="module")
def server(embedded: Path) -> Iterator[Server]:
    started = Server(embedded, "name=mine", "max_model_len=512", "max_num_seqs=4", "kv_cache_gib=1", "eager=true")
    try:
        assert started.ready.wait(START_S), "".join(started.said)
        assert started.process.poll() is None, "".join(started.said)
        yield started
    finally:
        if started.process.poll() is None:
            started.stop()


@of_session
async def test_it_answers_as_the_engine_of_a_run(server: Server, engine: Engine) -> None:
    client = EndpointGenerator(server.url, "mine")
    try:
        params = SamplingParams(temperature=0.0, max_tokens=8)
        here, there = await engine.generate(PROMPT, params), await client.generate(PROMPT, params)
        assert (len(there.ids), there.finish) == (len(here.ids), here.finish) == (8, "length")
        assert there.ids[0] == here.ids[0]
        assert there.logprobs[0] == pytest.approx(here.logprobs[0], abs=0.15), "two processes add in another order, in bf16"
        drawn = SamplingParams(temperature=1.0, max_tokens=8, seed=3)
        assert (await client.generate(PROMPT, drawn)).ids == (await client.generate(PROMPT, drawn)).ids
        assert (await client.generate(PROMPT, params)).cached_tokens == 64, "whole blocks of 32"
    finally:
        await client.close()


@of_session
async def test_what_it_refuses_is_told(server: Server) -> None:
    for model, prompt, why in (("other", PROMPT, "404"), ("mine", [5] * 600, "512")):
        client = EndpointGenerator(server.url, model)
        try:
            with pytest.raises(EngineError, match=why):
                await client.generate(prompt, SamplingParams(max_tokens=2))
        finally:
            await client.close()


@of_session
async def test_a_role_is_played_by_what_it_serves(server: Server, embedded: Path) -> None:
    """Text both ways through vLLM's own chat template, as by the policy itself: the same text, token for token."""
    from transformers import AutoTokenizer

    chat = ChatFormat(AutoTokenizer.from_pretrained(embedded))
    ids = EndpointGenerator(server.url, "mine")
    text = EndpointWriter(server.url, "mine", retries=0, continues=True, price_in=1.0, price_out=2.0)
    other = EndpointWriter(server.url, "other", retries=0)
    try:
        messages = [Message("system", "You count."), Message("user", "Count from one to ten in words.")]
        params = SamplingParams(temperature=0.0, max_tokens=8)
        for begun in ("", "one, two, three,"):
            there = await text.write(messages, params, begun=begun)
            here = await PolicyWriter(ids, chat).write(messages, params, begun=begun)
            assert (there.text, there.cut) == (here.text, here.cut)
            assert (there.prompt_tokens, there.completion_tokens) == (here.prompt_tokens, here.completion_tokens)
            assert there.model == "mine"
            assert there.cost == pytest.approx((there.prompt_tokens + 2.0 * there.completion_tokens) / 1e6, rel=1e-12)
        prompt = chat.prompt(messages)
        spoken, sampled = await ChatGenerator(text, chat).generate(prompt, params), await ids.generate(prompt, params)
        assert chat.decode(spoken.ids) == chat.decode(sampled.ids)
        assert (spoken.logprobs, spoken.finish, spoken.model) == ((), sampled.finish, "mine")
        with pytest.raises(EngineError, match="404"):
            await other.write(messages, params)
    finally:
        for client in (ids, text, other):
            await client.close()


def test_it_ends_when_it_is_told_to(server: Server) -> None:
    server.stop()
    assert not server.reading(), "no process of it holds its output any more"
