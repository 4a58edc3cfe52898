"""What a model in a role promises: the policy on its generator, and one behind an endpoint, which here is that policy served."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from termrsi.config.schema import RoleConfig
from termrsi.errors import EngineError
from termrsi.fakes import FakeGenerator, FakeTokenizer
from termrsi.harness.render import ChatFormat
from termrsi.interop.chat_endpoint import EndpointWriter, open_writers
from termrsi.ports import Writer
from termrsi.records import Message, SamplingParams
from termrsi.stages.roles import PolicyWriter
from tests.chat_server import ChatServer, as_policy

CHAT = ChatFormat(FakeTokenizer())
ACT = [Message("user", "Make both files.")]
JUDGE = [Message("system", "Does it name a hidden test? Answer yes or no."), Message("user", "Well?")]


@dataclass
class Kit:
    writer: Writer
    generator: FakeGenerator


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    yield
    ray.shutdown()


@pytest.fixture(params=["policy", "endpoint", pytest.param("actor", marks=pytest.mark.ray)])
async def kit(request: pytest.FixtureRequest) -> AsyncIterator[Kit]:
    generator = FakeGenerator()
    if request.param == "policy":
        yield Kit(PolicyWriter(generator, CHAT), generator)
        return
    with ChatServer(as_policy(generator, CHAT)) as server:
        if request.param == "endpoint":
            writer = EndpointWriter(server.url, "m", retries=0, continues=True)
            yield Kit(writer, generator)
            await writer.close()
            return
        request.getfixturevalue("ray_here")
        from termrsi.actors.writers import RayWriter, WritersActor

        roles = {"judge": RoleConfig(url=server.url, model="m", key_env="ONLY_THERE", retries=0, continues=True)}
        make: Any = WritersActor.options(num_cpus=0.1, max_concurrency=100)  # Any: actor handles are untyped
        actor = make.remote(partial(open_writers, roles), {"ONLY_THERE": "sk-abc"})
        await actor.ready.remote()
        yield Kit(RayWriter(actor, "judge"), generator)
        await actor.close.remote()
        assert {asked.key for asked in server.asked} == {"Bearer sk-abc"}


async def test_it_answers_in_text_and_counts(kit: Kit) -> None:
    wrote = await kit.writer.write(JUDGE, SamplingParams(temperature=0.0), "judge")
    assert (wrote.text, wrote.cut, wrote.cost) == ("no", False, 0.0)
    assert (wrote.prompt_tokens, wrote.completion_tokens) == (len(CHAT.prompt(JUDGE)), 2), "the end of its turn is a token"


async def test_a_reply_over_the_limit_is_cut_and_says_so(kit: Kit) -> None:
    wrote = await kit.writer.write(ACT, SamplingParams(max_tokens=2, seed=1))
    assert wrote.cut
    assert wrote.completion_tokens == 2
    assert wrote.text == "```bash"


async def test_a_seed_is_a_draw(kit: Kit) -> None:
    async def draw(seed: int) -> str:
        return (await kit.writer.write(ACT, SamplingParams(seed=seed))).text

    draws = [await draw(seed) for seed in range(12)]
    assert draws == [await draw(seed) for seed in range(12)]
    assert len(set(draws)) > 1


async def test_what_is_begun_is_continued_and_not_given_back(kit: Kit) -> None:
    messages = [
        Message("system", "Use these five headings: Target, Milestones, Checks, Recovery, Limits."),
        Message("user", "Task: x\nCommands that worked: solve"),
    ]
    wrote = await kit.writer.write(messages, SamplingParams(seed=0), begun="Target: Both.\nMilestones:")
    assert wrote.text == "Run solve."


async def test_requests_at_once_get_their_own_answers(kit: Kit) -> None:
    wrote = await asyncio.gather(*[kit.writer.write(messages, SamplingParams(seed=5)) for messages in (JUDGE, ACT) * 4])
    assert [one.text == "no" for one in wrote] == [True, False] * 4


async def test_one_that_cannot_be_had_is_a_machine_fault(kit: Kit) -> None:
    kit.generator._dies_at = 1
    with pytest.raises(EngineError, match="told to die"):
        await kit.writer.write(JUDGE, SamplingParams())
