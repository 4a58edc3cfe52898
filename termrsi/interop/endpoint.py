"""`ports.Generator` over an OpenAI-compatible server that takes and returns token ids, as vLLM's does (`termrsi serve`)."""

import math
from collections.abc import Sequence
from typing import Any

from termrsi.errors import EngineError, WeightsError
from termrsi.records import Completion, SamplingParams, WeightsVersion


class EndpointGenerator:
    """One model behind `url` (".../v1"). `close` it: it holds connections."""

    def __init__(self, url: str, model: str, *, key: str = "", timeout_s: float = 600.0) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, timeout=timeout_s)
        self._model = model

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        """Raises EngineError with the server's reason, or if it does not return token ids."""
        import httpx

        body: dict[str, Any] = {  # Any: JSON
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            # What a server would take from the model's generation_config: log-probabilities are those of the policy itself.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        if params.seed is not None:
            body["seed"] = params.seed
        if params.stop_ids:
            body["stop_token_ids"] = list(params.stop_ids)
        try:
            response = await self._client.post("/completions", json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"the server does not answer: {error or type(error).__name__}", str(self._client.base_url)) from error
        if response.status_code != 200:
            raise EngineError(f"the server refused: {response.status_code} {response.text[:300]}", str(self._client.base_url))
        try:
            data = response.json()
        except ValueError as error:
            raise EngineError(f"the server's answer is no JSON: {response.text[:200]!r}", str(self._client.base_url)) from error
        return _completion(data, str(self._client.base_url))

    async def pull(self, weights: WeightsVersion) -> None:
        """Raises WeightsError: a server's weights are not ours to change."""
        raise WeightsError("a served model cannot be updated", str(self._client.base_url))

    async def close(self) -> None:
        await self._client.aclose()


def _completion(data: dict[str, Any], where: str) -> Completion:  # Any: JSON
    try:
        choice = data["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if ids is None or len(ids) != len(logprobs):
            raise TypeError("token_ids")
        numbers = [float(p) for p in logprobs]
        if not all(math.isfinite(p) for p in numbers):
            raise ValueError("one that is not finite")
        ids = tuple(int(i) for i in ids)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        message = f"its answer has no token ids with log-probabilities ({error})"
        raise EngineError(message, where, "valid: a server with return_token_ids, as vLLM's; see `termrsi serve`") from error
    details = (data.get("usage") or {}).get("prompt_tokens_details") or {}
    finish = "length" if choice.get("finish_reason") == "length" else "stop"
    return Completion(ids, tuple(numbers), finish, 0, 0, int(details.get("cached_tokens") or 0))
