"""Seconds by hand: which of memory and arithmetic bounds a step, and what looking back costs."""

import pytest

from termrsi.sizing import rates, shapes
from termrsi.sizing.rates import SOURCES, Rates
from tests.small_shape import FIELDS, SHAPE

ONE = Rates(flops=1e6, bandwidth=1e6, decode_share=0.5, prefill_share=0.5, learn_share=0.25, network=1e6)
MATRICES = SHAPE.parameters - 64_000  # the embedding is looked up


def test_every_figure_has_a_source() -> None:
    assert set(SOURCES) == set(Rates.__dataclass_fields__)


def test_a_step_reads_weights_and_cache_or_computes() -> None:
    law = rates.step_s(SHAPE, ONE, 1)
    assert law(1, 0) == pytest.approx(2 * MATRICES / 5e5)
    assert law(1, 1e6) == pytest.approx((2 * MATRICES + 1e6 * SHAPE.kv_bytes) / 5e5)
    assert law(100, 0) == pytest.approx(2 * 100 * SHAPE.active / 5e5), "many sequences are bound by arithmetic"
    assert rates.step_s(SHAPE, ONE, 4)(1, 0) == pytest.approx(law(1, 0) / 4)


def test_of_experts_a_step_reads_those_that_are_used() -> None:
    moe = shapes.of(FIELDS | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1})
    experts = 2 * 4 * 3 * 64 * 128
    fast = Rates(flops=1e15, bandwidth=1e6, decode_share=1.0)
    law, read = rates.step_s(moe, fast, 1), 2 * (moe.parameters - 64_000)
    assert law(1, 0) * 1e6 == pytest.approx(read - 2 * experts * 0.75)
    assert law(2, 0) * 1e6 == pytest.approx(read - 2 * experts * 0.75**2)


def test_a_prompt_costs_its_tokens_and_what_they_look_at() -> None:
    law = rates.prefill_s(SHAPE, ONE, 1)
    of_token = 2 * (SHAPE.active - SHAPE.embedding)
    assert law(1, 1) == pytest.approx((of_token + 4 * 2 * 64 * 0.5) / 5e5)
    assert law(10, 1000) == pytest.approx(10 * (of_token + 4 * 2 * 64 * 995) / 5e5)
    assert law(0, 1000) == 0.0


def test_learning_counts_passes_blocks_and_head() -> None:
    one = rates.learn_s(SHAPE, ONE, 1, [100], passes=1.0)
    assert one == pytest.approx((2 * SHAPE.active * 100 + 2 * 2 * 64 * 100**2) / 2.5e5)
    assert rates.learn_s(SHAPE, ONE, 2, [100, 100], passes=3.0) == pytest.approx(3 * one)
    critic = rates.learn_s(SHAPE, ONE, 1, [100], passes=1.0, layers=1, head=False)
    assert critic == pytest.approx((2 * SHAPE.blocks[0].active * 100 + 2 * 64 * 100**2) / 2.5e5)


def test_weights_move_twice() -> None:
    assert rates.move_s(SHAPE, ONE) == pytest.approx(2 * 2 * SHAPE.parameters / 1e6)
