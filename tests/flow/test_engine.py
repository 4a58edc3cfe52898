"""The generator on a real vLLM engine: exact ids, log-probabilities the learner agrees with, weights that really arrive."""

import asyncio
from pathlib import Path

import pytest
import torch

from termrsi import weights
from termrsi.errors import RequestRefused, WeightsError
from termrsi.model.policy import PolicyModel
from termrsi.records import Sample, SamplingParams

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n"


def _ids(embedded: Path) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(embedded)).encode(PROMPT)


async def test_ids_in_ids_and_logprobs_out(engine, embedded: Path) -> None:
    ids = _ids(embedded)
    params = SamplingParams(temperature=0.7, max_tokens=12, seed=5)
    first, second = await engine.generate(ids, params), await engine.generate(ids, params)
    assert first.ids == second.ids
    assert len(first.ids) == len(first.logprobs) <= 12
    assert all(x <= 0 for x in first.logprobs)


async def test_a_reply_cut_by_its_limit_says_so(engine, embedded: Path) -> None:
    completion = await engine.generate(_ids(embedded), SamplingParams(temperature=0.0, max_tokens=2))
    assert completion.finish == "length"
    assert len(completion.ids) == 2


@pytest.mark.parametrize("length", [1024, 2000])
async def test_a_prompt_that_is_too_long_is_refused(engine, length: int) -> None:
    with pytest.raises(RequestRefused, match="1024"):
        await engine.generate([5] * length, SamplingParams(max_tokens=2))


async def test_more_prompt_than_one_step_of_the_engine_holds(engine) -> None:
    """Recoveries bring their failed history along. A prompt cut in two, with a seed, ends vLLM's engine on a CPU."""
    prompts = [[5 + (7 * i + k) % 4000 for k in range(900)] for i in range(12)]
    params = [SamplingParams(temperature=1.0, max_tokens=2, seed=i) for i in range(12)]
    completions = await asyncio.gather(*(engine.generate(ids, p) for ids, p in zip(prompts, params, strict=True)))
    assert [len(c.ids) for c in completions] == [2] * 12


async def test_the_rollouts_of_a_group_share_a_short_prompt(engine) -> None:
    """Prompts of a hundred tokens are the rule here: whole blocks of 32 come from the cache, on a turn's prompt too."""
    prompt = [5 + (11 * k) % 4000 for k in range(100)]
    first = await engine.generate(prompt, SamplingParams(temperature=1.0, max_tokens=4, seed=1))
    second = await engine.generate(prompt, SamplingParams(temperature=1.0, max_tokens=4, seed=2))
    later = await engine.generate([*prompt, *range(200, 240)], SamplingParams(temperature=1.0, max_tokens=4, seed=1))
    assert (first.cached_tokens, second.cached_tokens, later.cached_tokens) == (0, 96, 96)


async def test_a_turn_more_costs_the_tokens_that_are_new(engine) -> None:
    """Of a history that grows all but what was added since, and less than a block, comes from the cache; of a recovery's too."""
    history, added = [5 + (13 * k) % 4000 for k in range(70)], 30
    for turn in range(6):
        said = await engine.generate(history, SamplingParams(temperature=1.0, max_tokens=20, seed=turn))
        if turn:
            assert len(history) - said.cached_tokens <= added + 32
        history += [*said.ids, *(5 + (17 * turn + 3 * k) % 4000 for k in range(added))]
    recovery = [*history[:-added], *(5 + (19 * k) % 4000 for k in range(40))]
    said = await engine.generate(recovery, SamplingParams(temperature=1.0, max_tokens=4, seed=1))
    assert len(recovery) - said.cached_tokens <= 40 + 32


async def test_the_learner_agrees_with_the_sampler(engine, embedded: Path) -> None:
    """Same weights, bf16 on both sides: the mean gap of a token is small, and far below that of other weights."""
    ids = _ids(embedded)
    completion = await engine.generate(ids, SamplingParams(temperature=1.0, max_tokens=24, seed=1))
    whole = (*ids, *completion.ids)
    mask = (0,) * len(ids) + (1,) * len(completion.ids)
    (logp,) = PolicyModel(embedded).logp([Sample(whole, mask, (0,) * len(whole))])
    gaps = [abs(a - b) for a, b in zip(logp[len(ids) :], completion.logprobs, strict=True)]
    assert sum(gaps) / len(gaps) < 0.08


async def test_weights_arrive_bit_for_bit(engine, embedded: Path) -> None:
    state = {name: tensor.clone() for name, tensor in PolicyModel(embedded).state().items()}
    name = "model.layers.3.mlp.down_proj.weight"
    state[name][0, 0] += 0.5
    await engine.load(weights.pack(state), 7)
    assert engine.version == 7
    (found,) = await engine.weight_digests()
    state[name][0, 0] += 0.5
    from termrsi.actors.engine_probe import canonical

    with pytest.raises(WeightsError, match=r"layers\.3\.mlp\.down_proj"):
        weights.compare({n: canonical(t) for n, t in state.items()}, found)
    await engine.load(weights.pack(PolicyModel(embedded).state()), 8)


async def test_completions_carry_the_version_that_made_them(engine, embedded: Path) -> None:
    await engine.load(weights.pack(PolicyModel(embedded).state()), 9)
    completion = await engine.generate(_ids(embedded), SamplingParams(temperature=0.0, max_tokens=2))
    assert (completion.version_low, completion.version_high) == (9, 9)


async def test_a_saved_policy_loads_in_transformers_and_the_engine(engine, embedded: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = PolicyModel(embedded)
    ids = _ids(embedded)
    sample = Sample((*ids, 5, 6, 2), (0,) * len(ids) + (1, 1, 1), (0,) * (len(ids) + 3))
    policy.fit([sample], lr=1e-4)
    policy.save(tmp_path / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "policy"), dtype=torch.bfloat16)
    state = {n: t for n, t in loaded.state_dict().items() if n != "lm_head.weight"}
    assert weights.checksum(weights.pack(state)) == weights.checksum(weights.pack(policy.state()))
    await engine.load_directory(str(tmp_path / "policy"), 10)
    weights.compare(_canonical(state), (await engine.weight_digests())[0])


def _canonical(state: dict[str, torch.Tensor]) -> dict[str, str]:
    from termrsi.actors.engine_probe import canonical

    return {name: canonical(tensor) for name, tensor in state.items()}
