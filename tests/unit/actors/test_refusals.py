"""A request that vLLM does not take: for its length, or for a fault that the next one would have as well."""

import pytest

from termrsi.actors.generator import refusal
from termrsi.errors import EngineError, RequestRefused


@pytest.mark.parametrize(
    ("length", "kind"), [(2000, RequestRefused), (1024, RequestRefused), (1023, EngineError), (3, EngineError)]
)
def test_a_prompt_that_leaves_no_token_free_is_this_requests_fault(length: int, kind: type[EngineError]) -> None:
    error = refusal(ValueError("no"), length, 1024)
    assert (type(error), str(error)) == (kind, "generator: ValueError: no")
