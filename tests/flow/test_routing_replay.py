"""Routing replay on a real engine: a tiny random mixture-of-experts model, sampled by vLLM and computed again by the learner."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from termrsi.harness.render import Transcript
from termrsi.model.policy import PolicyModel
from termrsi.model.routing import ROUTERS
from termrsi.records import Chunk, Completion, Rollout, Routing, Sample, SamplingParams, ScoredRollout, StopReason, Verdict
from termrsi.stages.credit import samples_of
from tests.moe_models import LAYERS, TOP_K, tiny_moe

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

KEPT: list[object] = []  # vLLM leaves its socket context open, which warns if it is collected before the interpreter ends
LOG = logging.getLogger(__name__)
PROMPTS = [[5 + (11 * k + 700 * i) % 4000 for k in range(70)] for i in range(4)]
OBSERVATION = [9, 8, 7, 6, 5]


@pytest.fixture(scope="module")
def moe(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe(tmp_path_factory.mktemp("moe") / "qwen3_moe", "qwen3_moe", tokenizer=embedded)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(moe: Path) -> AsyncIterator:
    from termrsi.actors.generator import Engine, EngineOptions

    # In bf16 whatever the processor: an engine as exact as the learner would choose the same experts by itself.
    options = EngineOptions(dtype="bfloat16", max_model_len=512, max_num_seqs=8, kv_cache_gib=1, routing_replay=True)
    started = Engine(str(moe), options)
    KEPT.append(started)
    yield started
    started.close()


def array_of(routing: Routing | None) -> np.ndarray:
    """`[tokens, L, E]`, each selection in ascending order."""
    assert routing is not None
    assert (routing.layers, routing.top_k) == (LAYERS, TOP_K)
    return np.sort(np.frombuffer(routing.data, f"<u{routing.width}").reshape(-1, LAYERS, TOP_K).astype(np.int64), -1)


def live(policy: PolicyModel, ids: tuple[int, ...]) -> np.ndarray:
    """The learner's own selection of all tokens but the last, as `array_of`."""
    seen: list[torch.Tensor] = []

    def look(router: Any, _: object, output: tuple[torch.Tensor, ...]) -> None:
        seen.append(output[ROUTERS[type(router).__name__].experts])

    routers = [part for part in policy._module.modules() if type(part).__name__ in ROUTERS]
    hooks = [router.register_forward_hook(look) for router in routers]
    with torch.no_grad():
        policy._module.base_model(input_ids=torch.tensor([ids[:-1]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(seen, 1).numpy(), -1)


async def played(engine: Any, tokenizer: Any, prompt: list[int], seed: int) -> Chunk:
    """Two calls with an observation between them."""
    transcript = Transcript(tokenizer)
    transcript.prompt(prompt)
    for turn in range(2):
        said: Completion = await engine.generate(transcript.ids, SamplingParams(temperature=1.0, max_tokens=60, seed=seed + turn))
        transcript.sampled(said.ids, said.logprobs)
        assert said.routing is not None
        transcript.routed(said.routing)
        transcript.follow(OBSERVATION)
    (chunk,) = transcript.chunks
    return chunk


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def chunks(engine: Any, embedded: Path) -> list[Chunk]:
    """Eight rollouts at once, two of each prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(embedded))
    return list(await asyncio.gather(*(played(engine, tokenizer, PROMPTS[i % 4], 100 * i) for i in range(8))))


async def test_every_token_that_the_engine_computed_has_its_experts(engine: Any) -> None:
    params = [SamplingParams(temperature=1.0, max_tokens=6, seed=i) for i in range(2)]
    prompt = list(range(300, 400))
    first, second = await engine.generate(prompt, params[0]), await engine.generate(prompt, params[1])
    later = await engine.generate([*prompt, *first.ids, *OBSERVATION], params[0])
    assert (first.cached_tokens, second.cached_tokens, later.cached_tokens) == (0, 96, 96)
    for completion, before in ((first, 100), (second, 100), (later, 100 + len(first.ids) + len(OBSERVATION))):
        assert completion.routing.tokens == before + len(completion.ids) - 1
    assert (array_of(second.routing)[:96] == array_of(first.routing)[:96]).all()
    assert (array_of(later.routing)[:96] == array_of(first.routing)[:96]).all()


async def test_they_are_the_experts_of_these_tokens(chunks: list[Chunk], moe: Path) -> None:
    """Same weights, other arithmetic: rounding changes few selections. Shifted by a token or a layer, few would be the same."""
    policy = PolicyModel(moe, compute="fp32")
    same, shifted, turned = [], [], []
    for chunk in chunks:
        record = array_of(chunk.routing)
        assert len(record) == max(i for i, m in enumerate(chunk.mask) if m)
        own = live(policy, chunk.ids)[: len(record)]
        same.append((record == own).all(-1).mean())
        shifted.append((record[1:] == own[:-1]).all(-1).mean())
        turned.append((record[:, 1:] == own[:, :-1]).all(-1).mean())
    assert np.mean(same) > 0.97
    assert max(np.mean(shifted), np.mean(turned)) < 0.5


@pytest.mark.parametrize("noise", [0.0, 0.05])
async def test_replay_narrows_the_gap_between_sampler_and_learner(
    chunks: list[Chunk], moe: Path, tmp_path: Path, noise: float
) -> None:
    """bf16 in the engine, float32 in the learner; `noise`: of the learner's routers, in parts of their own, as if updates ahead.

    On a random model each expert is another function, so one selection changed moves a token's log-probability far.
    """
    directory = tmp_path / "learner"
    _with_noise(moe, directory, noise)
    plain = PolicyModel(directory, compute="fp32")
    replayed = PolicyModel(directory, compute="fp32", routing_replay=True)
    samples = [_sample(chunk, i) for i, chunk in enumerate(chunks)]
    without, with_it = (_gaps(policy.logp(samples), chunks) for policy in (plain, replayed))
    LOG.info("mean gap at noise %s: %.4f without replay, %.4f with it", noise, without.mean(), with_it.mean())
    changed = np.concatenate([_changed(plain, chunk) for chunk in chunks])
    assert changed.any()
    assert with_it.mean() <= without.mean()
    assert with_it[changed].mean() < without[changed].mean()


def _with_noise(source: Path, directory: Path, noise: float) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32)
    g = torch.Generator().manual_seed(1)
    routers: list[Any] = [part for part in model.modules() if type(part).__name__ in ROUTERS]
    with torch.no_grad():
        for router in routers:
            router.weight += noise * router.weight.std() * torch.randn(router.weight.shape, generator=g)
    model.save_pretrained(str(directory))


def _sample(chunk: Chunk, number: int) -> Sample:
    rollout = Rollout(f"r{number}", "g", "t", "f", "react", (chunk,), (), StopReason.done)
    (sample,) = samples_of(ScoredRollout(rollout, Verdict(False, 0.0)), 1.0)
    return sample


def _gaps(logps: list[list[float]], chunks: list[Chunk]) -> np.ndarray:
    """Of each sampled token, the distance of the learner's log-probability from the sampler's."""
    return np.concatenate(
        [np.abs(np.array(row)[np.array(chunk.mask) == 1] - chunk.logprobs) for row, chunk in zip(logps, chunks, strict=True)]
    )


def _changed(policy: PolicyModel, chunk: Chunk) -> np.ndarray:
    """Of each sampled token, whether the learner alone would choose other experts somewhere before it."""
    record = array_of(chunk.routing)
    other = (record != live(policy, chunk.ids)[: len(record)]).any((1, 2))
    before = np.maximum.accumulate(other)
    return np.array([before[t - 1] for t, m in enumerate(chunk.mask) if m])
