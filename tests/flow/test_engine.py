"""The generator on a real vLLM engine: exact ids, log-probabilities the learner agrees with, weights that really arrive."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from termrsi import weights
from termrsi.actors.generator import Engine, EngineOptions, _Said
from termrsi.errors import RequestRefused, WeightsError
from termrsi.model.checkpoint import tiny_model
from termrsi.model.lora import Lora
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


async def _give(engine, state: dict[str, torch.Tensor], version: int) -> dict[str, float]:
    """As a pull does, without a store."""
    packed = weights.pack(state)

    async def fetch(names: Sequence[str]) -> weights.PackedState:
        return {name: packed[name] for name in names}

    return await engine.load(weights.facts_of(packed), fetch, version)


async def test_weights_arrive_bit_for_bit(engine, embedded: Path) -> None:
    state = {name: tensor.clone() for name, tensor in PolicyModel(embedded).state().items()}
    name = "model.layers.3.mlp.down_proj.weight"
    state[name][0, 0] += 0.5
    took = await _give(engine, state, 7)
    assert engine.version == 7
    assert took["bytes"] == sum(tensor.nbytes for tensor in state.values())
    weights.compare(_canonical(state), (await engine.weight_digests())[0])
    state[name][0, 0] += 0.5
    with pytest.raises(WeightsError, match=r"layers\.3\.mlp\.down_proj"):
        weights.compare(_canonical(state), (await engine.weight_digests())[0])


async def test_only_layers_that_changed_are_loaded_and_the_others_are_still_there(engine, embedded: Path) -> None:
    """Of fused projections, and of an embedding whose head computes with a copy of its own."""
    state = {name: tensor.clone() for name, tensor in PolicyModel(embedded).state().items()}
    await _give(engine, state, 1)
    state["model.layers.5.self_attn.q_proj.weight"][:, 7] *= 1.5
    took = await _give(engine, state, 2)
    assert took["bytes"] == sum(tensor.nbytes for name, tensor in state.items() if name.startswith("model.layers.5."))
    weights.compare(_canonical(state), (await engine.weight_digests())[0])
    state["model.embed_tokens.weight"] *= 0.5
    took = await _give(engine, state, 3)
    assert took["bytes"] == state["model.embed_tokens.weight"].nbytes
    weights.compare(_canonical(state), (await engine.weight_digests())[0])
    assert (await _give(engine, state, 4))["bytes"] == 0
    assert engine.version == 4


async def test_the_head_samples_with_the_weights_that_came(engine, embedded: Path) -> None:
    """Tied to the embedding, it has a packed copy of its own on CPU."""
    state = {name: tensor.clone() for name, tensor in PolicyModel(embedded).state().items()}
    await _give(engine, state, 1)
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    before = (await engine.generate(_ids(embedded), greedy)).ids[0]
    state["model.embed_tokens.weight"][before] = 0.0  # its logit is 0 now, and the likeliest token's is far above
    await _give(engine, state, 2)
    assert (await engine.generate(_ids(embedded), greedy)).ids[0] != before


async def test_bytes_that_were_changed_on_the_way_are_not_served(engine, embedded: Path) -> None:
    state = {name: tensor.clone() for name, tensor in PolicyModel(embedded).state().items()}
    await _give(engine, state, 1)
    state["model.norm.weight"] *= 2
    packed = weights.pack(state)
    facts = weights.facts_of(packed)
    state["model.norm.weight"][3] += 1.0  # the bytes of `packed`

    async def fetch(names: Sequence[str]) -> weights.PackedState:
        return {name: packed[name] for name in names}

    with pytest.raises(WeightsError, match=r"model\.norm\.weight: other bytes came than were published"):
        await engine.load(facts, fetch, 2)
    assert engine.version == 1
    await _give(engine, state, 3)  # everything, for nothing is known of what the engine has
    weights.compare(_canonical(state), (await engine.weight_digests())[0])


async def test_completions_carry_the_version_that_made_them(engine, embedded: Path) -> None:
    await _give(engine, PolicyModel(embedded).state(), 9)
    completion = await engine.generate(_ids(embedded), SamplingParams(temperature=0.0, max_tokens=2))
    assert (completion.version_low, completion.version_high) == (9, 9)


async def test_completions_in_flight_go_on_with_new_weights(engine, embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paused in the middle, seeded or not: every token, its log-probability too, is of the weights that it is said to be of."""
    monkeypatch.setattr(engine, "pauses", True)
    policies = {1: PolicyModel(embedded), 2: PolicyModel(embedded)}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in policies[2].state().items():  # the live parameters
            if "layers.2" in name and "proj" in name:
                tensor.mul_(1 + 0.5 * torch.randn(tensor.shape, generator=generator))
    ids, begun = _ids(embedded), asyncio.Event()
    await _give(engine, policies[1].state(), 1)
    monkeypatch.setattr(_Said, "add", _telling(_Said.add, 8, begun))
    params = [SamplingParams(temperature=1.0, max_tokens=160, seed=seed) for seed in (3, 4, None)]
    saying = [asyncio.ensure_future(engine.generate(ids, one)) for one in params]
    await begun.wait()
    await _give(engine, policies[2].state(), 2)
    late = asyncio.ensure_future(engine.generate(ids, params[0]))
    found = [said for said in await asyncio.gather(*saying) if said.version_high == 2]
    assert found, "at least one was long enough"
    for said in found:
        assert [version for version, _ in said.weights] == [1, 2]
        assert sum(tokens for _, tokens in said.weights) == len(said.ids) == len(said.logprobs)
        whole, first = (*ids, *said.ids), said.weights[0][1]
        sample = Sample(whole, (0,) * len(ids) + (1,) * len(said.ids), (0,) * len(whole))
        for version, policy in policies.items():
            gaps = (torch.tensor(policy.logp([sample])[0][len(ids) :]) - torch.tensor(said.logprobs)).abs()
            own, others = (gaps[:first], gaps[first:]) if version == 1 else (gaps[first:], gaps[:first])
            assert own.mean() < 0.25 < 1.0 < others.mean(), (version, own.mean(), others.mean())
    said = await late
    assert said.weights == (await engine.generate(ids, params[0])).weights == ((2, len(said.ids)),), "nothing stands still any more"


def _telling(add, after: int, begun: asyncio.Event):
    """Once a completion has so many tokens."""

    def told(self, *arguments) -> None:
        add(self, *arguments)
        if len(self.ids) >= after:
            begun.set()

    return told


async def test_a_saved_policy_loads_in_transformers_and_the_engine(engine, embedded: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = PolicyModel(embedded)
    ids = _ids(embedded)
    sample = Sample((*ids, 5, 6, 2), (0,) * len(ids) + (1, 1, 1), (0,) * (len(ids) + 3))
    policy.fit([sample], lr=1e-4)
    policy.save(tmp_path / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "policy"), dtype=torch.bfloat16)
    state = {n: t for n, t in loaded.state_dict().items() if n != "lm_head.weight"}
    assert weights.checksum_of(state) == policy.checksum()
    await engine.load_directory(str(tmp_path / "policy"), 10)
    weights.compare(_canonical(state), (await engine.weight_digests())[0])


async def test_adapters_reach_the_engine_merged(engine, embedded: Path) -> None:
    """After one update of adapters and a publish: other tensors than the base's, the learner's own, and what it says of tokens."""
    policy, ids = PolicyModel(embedded, adapters=Lora(8)), _ids(embedded)
    base = policy.state()  # merged ones are copies, the others stay as they are
    policy.fit([Sample((*ids, 5, 6, 2), (0,) * len(ids) + (1, 1, 1), (0,) * (len(ids) + 3))], lr=2e-3)
    assert weights.checksum_of(policy.state()) == policy.checksum() != weights.checksum_of(base)
    await _give(engine, policy.state(), 11)
    (found,) = await engine.weight_digests()
    weights.compare(_canonical(policy.state()), found)
    with pytest.raises(WeightsError, match=r"_proj\.weight differs"):
        weights.compare(_canonical(base), found)

    said = await engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=24))
    await _give(engine, base, 12)
    before = await engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=24))
    assert said.ids != before.ids
    whole, number = (*ids, *said.ids), len(said.ids)
    sample = Sample(whole, (0,) * len(ids) + (1,) * number, (0,) * len(whole))

    def gap() -> float:
        return sum(abs(a - b) for a, b in zip(policy.logp([sample])[0][len(ids) :], said.logprobs, strict=True)) / number

    assert gap() < 0.08
    with torch.no_grad():
        logits = policy._module(input_ids=torch.tensor([whole[:-1]])).logits[0, len(ids) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(said.ids).unsqueeze(1)).squeeze(1)
    assert (logits.max(1).values - chosen).max() < 0.25, "greedy in the engine is greedy in the learner, up to bf16"
    policy.load(embedded)
    assert gap() > 0.5, "and not in the base"


def _canonical(state: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: weights.canonical(tensor) for name, tensor in state.items()}


async def test_a_vocabulary_that_the_engine_fills_up_comes_in_buckets(tmp_path: Path) -> None:
    """vLLM puts such an embedding off to the end of a load, when the memory of its bucket has been used again."""
    model = tiny_model(tmp_path / "tiny")  # 259 tokens, 320 rows in the engine
    small = EngineOptions(max_model_len=128, max_num_seqs=2, kv_cache_gib=1, enforce_eager=True, bucket_bytes=110_000)
    engine = Engine(str(model), small)
    try:
        state = {name: tensor.clone() for name, tensor in PolicyModel(model).state().items()}
        state["model.embed_tokens.weight"] *= 0.5
        await _give(engine, state, 1)
        weights.compare(_canonical(state), (await engine.weight_digests())[0])
    finally:
        engine.close()
