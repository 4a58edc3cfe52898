"""A served model as a generator: token ids both ways, and each way in which a server can fail is an EngineError with its reason."""

import json
from typing import Any

import httpx
import pytest

from termrsi.errors import EngineError, WeightsError
from termrsi.interop.endpoint import EndpointGenerator
from termrsi.records import SamplingParams, WeightsVersion

GOOD = {
    "choices": [{"token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.1, -0.2]}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens_details": {"cached_tokens": 2}},
}


def serving(answer: dict[str, Any] | httpx.Response | Exception) -> tuple[EndpointGenerator, list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append({"url": str(request.url), "key": request.headers.get("authorization"), **json.loads(request.content)})
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    generator = EndpointGenerator("http://here/v1/", "m", key="k")
    generator._client._transport = httpx.MockTransport(handle)
    return generator, asked


async def test_ids_in_ids_and_logprobs_out() -> None:
    generator, _ = serving(GOOD)
    completion = await generator.generate([1, 2], SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7, seed=3))
    assert (completion.ids, completion.logprobs, completion.finish, completion.cached_tokens) == ((5, 6), (-0.1, -0.2), "stop", 2)
    await generator.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(404, text="no such model"), "refused: 404 no such model"),
        (httpx.ConnectError("refused"), "does not answer: refused"),
        ({}, "no token ids"),
        ({"choices": []}, "no token ids"),
        ({"choices": [{"text": "ls"}]}, "valid: a server with return_token_ids"),
        ({"choices": [{"token_ids": None, "logprobs": {"token_logprobs": []}}]}, "no token ids"),
        ({"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": []}}]}, "no token ids"),
        ({"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [None]}}]}, "no token ids"),
        ({"choices": [{"token_ids": ["x"], "logprobs": {"token_logprobs": [-0.1]}}]}, "no token ids"),
        (httpx.Response(200, text='{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [NaN]}}]}'), "not finite"),
        (httpx.Response(200, text="<html>busy</html>"), "is no JSON: '<html>busy"),
    ],
)
async def test_each_fault_is_named(answer: Any, message: str) -> None:  # Any: of whichever kind
    generator, _ = serving(answer)
    with pytest.raises(EngineError, match=message):
        await generator.generate([1], SamplingParams())
    await generator.close()


async def test_what_is_sent() -> None:
    generator, asked = serving(GOOD | {"usage": None})
    completion = await generator.generate([1, 2], SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7, seed=3))
    assert completion.cached_tokens == 0
    (body,) = asked
    assert (body["url"], body["key"], body["model"], body["prompt"]) == ("http://here/v1/completions", "Bearer k", "m", [1, 2])
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.5, 0.9, 7, 3)
    assert body["return_token_ids"] is True
    # A server takes what is not said from the model's own generation_config: these would change what is sampled.
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)
    assert "stop_token_ids" not in body
    await generator.generate([1], SamplingParams(stop_ids=(9,)))
    assert asked[1]["stop_token_ids"] == [9]
    with pytest.raises(WeightsError, match="cannot be updated"):
        await generator.pull(WeightsVersion("w", 1, "c"))
    await generator.close()
