"""Routing replay on tiny random models of each family: the record selects, the live router weighs, and nothing is made up."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from termrsi.algo.batch import micro_batches
from termrsi.errors import ConfigError
from termrsi.model.policy import PolicyModel
from termrsi.model.routing import ROUTERS, RoutingReplay, gates, lay_out, record
from termrsi.records import Routing, Sample
from tests.moe_models import EXPERTS, FAMILIES, LAYERS, NORMALISED, TOP_K, tiny_moe

Make = Callable[..., list[Sample]]


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny_moe(tmp_path_factory.mktemp("moe") / family, family)
        return made[family]

    return get


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def routers_of(model: Any) -> list[Any]:
    return [part for part in model.modules() if type(part).__name__ in ROUTERS]


def watched(model: Any, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """Logits, and each router's (logits, weights, experts) in that forward pass."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def look(router: Any, _: object, output: tuple[Tensor, ...]) -> None:
        places = ROUTERS[type(router).__name__]
        seen.append((output[places.logits], output[places.weights], output[places.experts]))

    hooks = [router.register_forward_hook(look) for router in routers_of(model)]
    logits = model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, seen


def selection(seen: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """`[N, L, E]`."""
    return torch.stack([experts for _, _, experts in seen], 1)


def other(experts: Tensor) -> Tensor:
    """A selection that shares no expert with `experts`: of eight experts in two, the next two that are free."""
    used = torch.nn.functional.one_hot(experts, EXPERTS).sum(-2)
    return used.argsort(dim=-1, stable=True)[..., :TOP_K]


IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_s_own_selection_changes_nothing(moe: Callable[[str], Path], family: str) -> None:
    model = load(moe(family))
    with torch.no_grad():
        plain, seen = watched(model, IDS)
        replay = RoutingReplay(model)
        with replay.using(selection(seen)):
            again, _ = watched(model, IDS)
        afterwards, _ = watched(model, IDS)
    assert (replay.layers, replay.top_k, replay.num_experts) == (LAYERS, TOP_K, EXPERTS)
    assert torch.allclose(again, plain, atol=1e-5, rtol=1e-5)
    assert torch.equal(afterwards, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_selection_is_what_the_experts_get(moe: Callable[[str], Path], family: str) -> None:
    model = load(moe(family))
    with torch.no_grad():
        plain, seen = watched(model, IDS)
        replay = RoutingReplay(model)
        wanted = other(selection(seen))
        with replay.using(wanted):
            changed, replayed = watched(model, IDS)
    assert torch.equal(selection(replayed), wanted)
    assert (changed - plain).abs().max() > 0.1
    for logits, weights, experts in replayed:
        whole = torch.exp(logits.double())
        chosen = whole.gather(1, experts)
        below = chosen.sum(1, keepdim=True) if family in NORMALISED else whole.sum(1, keepdim=True)
        assert torch.allclose(weights.double(), chosen / below, atol=1e-6)
        if family in NORMALISED:
            assert torch.allclose(weights.sum(1), torch.ones(len(weights)), atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_reaches_the_router(moe: Callable[[str], Path], family: str) -> None:
    """Through the gate weights, as the definition has it: a small step along it moves the loss by its square."""
    model = load(moe(family))
    with torch.no_grad():
        _, seen = watched(model, IDS)
    wanted = other(selection(seen))
    replay = RoutingReplay(model)
    weight = routers_of(model)[1].weight

    def loss() -> Tensor:
        with replay.using(wanted):
            return torch.log_softmax(model(input_ids=IDS, use_cache=False).logits, -1)[..., 5].mean()

    before = loss()
    before.backward()
    gradient = weight.grad.clone()
    assert gradient.abs().max() > 1e-6
    step = 1e-2 / float(gradient.norm())
    with torch.no_grad():
        weight += step * gradient
        up = loss()
        weight -= 2 * step * gradient
        down = loss()
    assert float(up - down) == pytest.approx(2 * step * float(gradient.square().sum()), rel=0.05)


def test_gates_where_a_recorded_expert_has_no_probability_left() -> None:
    """Over all experts both would be 0 in float32, and 0 / 0 no weight."""
    logits = torch.tensor([[500.0, 0.0, -1.0]])
    found = gates(logits, torch.tensor([[1, 2]]), normalised=True)
    assert found.tolist()[0] == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))])


def spoil(experts: Tensor, token: int, layer: int, row: list[int]) -> Tensor:
    spoilt = experts.clone()
    spoilt[token, layer] = torch.tensor(row)
    return spoilt


@pytest.mark.parametrize("row", [[0, 0], [-1, -1], [255, 255], [3, 3], [3, EXPERTS]])
def test_a_missing_capture_is_an_error(moe: Callable[[str], Path], row: list[int]) -> None:
    model = load(moe("qwen3_moe"))
    with torch.no_grad():
        _, seen = watched(model, IDS)
    replay = RoutingReplay(model)
    with (
        pytest.raises(ValueError, match="no record of the routing of token 7 in layer 2"),
        replay.using(spoil(selection(seen), 7, 2, row)),
    ):
        model(input_ids=IDS)


def test_records_of_another_shape_are_refused(moe: Callable[[str], Path]) -> None:
    model = load(moe("qwen3_moe"))
    with torch.no_grad():
        _, seen = watched(model, IDS)
    experts = selection(seen)
    replay = RoutingReplay(model)
    for wrong in (experts[:, :-1], experts[..., :1], experts[0]):
        with pytest.raises(ValueError, match=r"is needed"), replay.using(wrong):
            pass
    with pytest.raises(ValueError, match="routing of 47 tokens for a forward pass of 48"), replay.using(experts[:-1]):
        model(input_ids=IDS)


def test_each_record_is_taken_exactly_once(moe: Callable[[str], Path]) -> None:
    model = load(moe("qwen3_moe"))
    with torch.no_grad():
        _, seen = watched(model, IDS)
        replay = RoutingReplay(model)
        with pytest.raises(RuntimeError, match="layer 0 takes its routing a second time"), replay.using(selection(seen)):
            [model(input_ids=IDS) for _ in range(2)]
        with pytest.raises(RuntimeError, match=r"routing of layers \[0, 1, 2\] unused"), replay.using(selection(seen)):
            pass


def test_a_model_without_routers_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"routing_replay.*LlamaForCausalLM"):
        PolicyModel(tiny, routing_replay=True)


def test_replay_and_shared_prefixes_are_refused_together(moe: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="share_prefix=false"):
        PolicyModel(moe("qwen3_moe"), routing_replay=True, share_prefix=True)


def recorded(samples: list[Sample], seed: int = 0) -> list[Sample]:
    """Samples with random records, which end before the last token."""
    rng = np.random.default_rng(seed)
    made = []
    for sample in samples:
        scores = rng.random((len(sample.ids) - 1, LAYERS, EXPERTS))
        made.append(dataclasses.replace(sample, routing=record(scores.argsort(-1)[..., :TOP_K], EXPERTS)))
    return made


def array_of(routing: Routing | None) -> Tensor:
    assert routing is not None
    flat = np.frombuffer(routing.data, f"<u{routing.width}").astype(np.int64)
    return torch.from_numpy(flat.reshape(-1, routing.layers, routing.top_k))


def test_log_probabilities_are_those_of_each_row_alone(moe: Callable[[str], Path], make_samples: Make) -> None:
    """Rows of different lengths in one micro-batch, against a forward pass of each sample by itself."""
    directory = moe("qwen3_moe")
    samples = recorded(make_samples())
    got = PolicyModel(directory, compute="fp32", routing_replay=True).logp(samples)
    without = PolicyModel(directory, compute="fp32").logp(samples)
    model = load(directory)
    replay = RoutingReplay(model)
    for sample, row, plain in zip(samples, got, without, strict=True):
        with torch.no_grad(), replay.using(array_of(sample.routing)):
            full = torch.log_softmax(model(torch.tensor([sample.ids[:-1]])).logits[0], 1)
        want = [full[t - 1, i].item() if m else 0.0 for t, (i, m) in enumerate(zip(sample.ids, sample.mask, strict=True))]
        assert row == pytest.approx(want, abs=1e-4)
        assert max(abs(a - b) for a, b in zip(row, plain, strict=True)) > 0.1


def test_an_update_replays_too_and_checkpointing_changes_nothing(moe: Callable[[str], Path], make_samples: Make) -> None:
    """A layer that is computed again takes the same record: else its gradient would be of other experts."""
    samples = recorded(make_samples())

    def learnt(*, replaying: bool = True, checkpointing: bool = False) -> str:
        policy = PolicyModel(
            moe("qwen3_moe"), compute="fp32", micro_tokens=60, gradient_checkpointing=checkpointing, routing_replay=replaying
        )
        first = policy.update(samples, {"kind": "grpo", "anchor": "current"}, lr=1e-3)
        assert first.extra["micro_batches"] > 1
        policy.update(samples, {"kind": "grpo", "anchor": "current"}, lr=1e-3)
        return policy.checksum()

    replayed = learnt()
    assert learnt(checkpointing=True) == replayed
    assert learnt(replaying=False) != replayed


def test_a_checkpointed_layer_takes_its_record_at_most_once_more(moe: Callable[[str], Path], make_samples: Make) -> None:
    policy = PolicyModel(moe("qwen3_moe"), compute="fp32", routing_replay=True, gradient_checkpointing=True)
    samples = recorded(make_samples(1))
    (micro,) = micro_batches(samples, budget_tokens=1000)
    loss = policy._forward(micro, samples)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="takes its routing a second time"):
        loss.backward()


def test_fit_learns_without_records(moe: Callable[[str], Path], make_samples: Make) -> None:
    """Its samples are shown under another prompt; and what an update left does not reach into it."""
    after = []
    for replaying in (False, True):
        policy = PolicyModel(moe("olmoe"), compute="fp32", routing_replay=replaying, gradient_checkpointing=True)
        if replaying:
            policy.logp(recorded(make_samples()))
        policy.fit(make_samples(), lr=1e-3)
        after.append(policy.checksum())
    assert after[0] == after[1]


def test_a_sample_without_its_record_is_an_error(moe: Callable[[str], Path], make_samples: Make) -> None:
    policy = PolicyModel(moe("qwen3_moe"), compute="fp32", routing_replay=True)
    samples = recorded(make_samples())
    with pytest.raises(ValueError, match="r3: no record of the sampler's routing"):
        policy.logp([*samples[:3], dataclasses.replace(samples[3], routing=None), samples[4]])
    whole = samples[1].routing
    assert whole is not None
    last = max(t for t, m in enumerate(samples[1].mask) if m)
    short = dataclasses.replace(whole, data=whole.data[: (last - 1) * whole.row_bytes])
    with pytest.raises(ValueError, match=f"r1: routing of {last - 1} tokens, {last} are needed"):
        policy.logp([dataclasses.replace(samples[1], routing=short)])
    enough = dataclasses.replace(whole, data=whole.data[: last * whole.row_bytes])
    assert policy.logp([dataclasses.replace(samples[1], routing=enough)]) == policy.logp([samples[1]])


def test_records_are_laid_out_by_row_and_token(make_samples: Make) -> None:
    samples = recorded(make_samples(3))
    (micro,) = micro_batches(samples, budget_tokens=1000)
    laid = lay_out(samples, micro).unflatten(0, (3, -1))
    for b, i in enumerate(micro.rows):
        used = int(micro.mask[b].nonzero()[-1])
        assert torch.equal(laid[b, :used], array_of(samples[i].routing)[:used])
        assert (laid[b, used:] == torch.arange(TOP_K)).all()


def test_a_record_takes_as_many_bytes_as_the_model_s_experts_need() -> None:
    """By the model, not by what was chosen: records of one model must join."""
    for num_experts, expert, width in ((256, 255, 1), (257, 3, 2), (50_000, 40_000, 2)):
        array = np.array([[[expert, 2]], [[0, 1]]])
        made = record(array, num_experts)
        assert (made.width, made.tokens, made.row_bytes) == (width, 2, 2 * width)
        assert array_of(made).tolist() == array.tolist()
