"""Micro-batches: every action token comes out once, within the budget, and finds its way back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from termrsi.algo import batch
from termrsi.records import Sample


def sample(mask: list[int], start: int = 0, rollout: str = "") -> Sample:
    n = len(mask)
    return Sample(
        tuple(range(start, start + n)),
        tuple(mask),
        (0,) * n,
        rollout,
        advantages=tuple(float(start + i) * m for i, m in enumerate(mask)),
    )


masks = st.lists(st.integers(0, 1), min_size=0, max_size=12).map(lambda bits: [0, *bits])


@given(rows=st.lists(masks, max_size=9), budget=st.integers(1, 40))
def test_nothing_is_lost_and_the_order_comes_back(rows: list[list[int]], budget: int) -> None:
    samples = [sample(mask, 100 * i) for i, mask in enumerate(rows)]
    batches = batch.micro_batches(samples, budget_tokens=budget, fields=("advantages",))
    assert sorted(i for b in batches for i in b.rows) == [i for i, mask in enumerate(rows) if any(mask)]
    assert sum(b.tokens for b in batches) == sum(map(sum, rows))
    widths = [b.ids.shape[1] for b in batches]
    assert widths == sorted(widths, reverse=True)
    for b in batches:
        assert b.ids.numel() <= budget or len(b.rows) == 1
        assert bool(b.mask[:, -1].any())  # a row ends at its last action token
    back = batch.restore(samples, [(b, b.ids.float()) for b in batches])
    assert back == [[float(i) * m for i, m in zip(s.ids, s.mask, strict=True)] for s in samples]
    advantages = batch.restore(samples, [(b, b.columns["advantages"]) for b in batches])
    assert advantages == [list(s.advantages) for s in samples]


@given(rows=st.lists(masks, max_size=9), processes=st.integers(1, 4), share=st.booleans())
def test_the_shares_of_several_processes_are_the_whole(rows: list[list[int]], processes: int, share: bool) -> None:
    samples = [sample(mask, 100 * i) for i, mask in enumerate(rows)]
    parts = [batch.micro_batches(samples, budget_tokens=20, share_prefix=share, part=(k, processes)) for k in range(processes)]
    assert sorted(i for part in parts for b in part for i in b.rows) == [i for i, mask in enumerate(rows) if any(mask)]
    assert batch.restore(samples, [(b, b.ids.float()) for part in parts for b in [*part, batch.blank()]]) == [
        [float(i) * m for i, m in zip(s.ids, s.mask, strict=True)] for s in samples
    ]


def test_shares_are_even() -> None:
    """Each sample in turn, longest first, to whoever has the least: 9, 5+3, 4+4 of 25."""
    sizes = [9, 5, 4, 4, 3]
    assert [batch.deal(sizes, k, 3) for k in range(3)] == [[0], [1, 4], [2, 3]]
    assert [batch.deal([7], k, 2) for k in range(2)] == [[0], []]
    assert batch.deal(sizes, 0, 1) == [0, 1, 2, 3, 4]


def test_a_blank_has_the_columns_and_no_action() -> None:
    blank = batch.blank(("advantages",))
    assert (blank.rows, blank.tokens, blank.columns["advantages"].tolist()) == ((), 0, [[0.0, 0.0]])
    assert batch.restore([sample([0, 1])], [(blank, blank.ids.float())]) == [[0.0, 0.0]]


def test_restore_never_lets_a_value_off_the_mask_through() -> None:
    samples = [sample([0, 1, 0, 1])]
    (only,) = batch.micro_batches(samples, budget_tokens=9)
    assert batch.restore(samples, [(only, torch.full((1, 4), float("nan")).where(~only.mask, 2.0))]) == [[0.0, 2.0, 0.0, 2.0]]


def test_refusals() -> None:
    good = sample([0, 1])
    with pytest.raises(ValueError, match="nothing precedes it"):
        batch.micro_batches([sample([1, 1])], budget_tokens=8)
    with pytest.raises(ValueError, match="old_logp holds 0 entries, 2 are needed"):
        batch.micro_batches([good], budget_tokens=8, fields=("old_logp",))
    with pytest.raises(ValueError, match="a mask of 1"):
        batch.micro_batches([Sample((1, 2), (0,), (0, 0))], budget_tokens=8)
    with pytest.raises(ValueError, match="at least 1"):
        batch.micro_batches([good], budget_tokens=0)
