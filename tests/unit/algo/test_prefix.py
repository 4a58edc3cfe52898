"""Trees of common beginnings: every sample in one row, stems that end before anybody acts, nothing seen across branches."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from termrsi.algo import batch, prefix
from termrsi.records import Sample

PROMPT = tuple(range(1000, 1020))


def sample(tail: tuple[int, ...], mask: tuple[int, ...], group: str = "g", prompt: tuple[int, ...] = PROMPT) -> Sample:
    ids = (*prompt, *tail)
    whole = (*(0 for _ in prompt), *mask)
    return Sample(ids, whole, (0,) * len(ids), rollout_id=f"{group}/{tail}", group_id=group)


tails = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=1, max_size=8)


@given(groups=st.lists(st.lists(tails, min_size=1, max_size=4), min_size=1, max_size=4), budget=st.integers(1, 200))
def test_every_sample_is_in_one_row_within_the_budget(groups: list[list[list[tuple[int, int]]]], budget: int) -> None:
    samples = [
        sample(tuple(t for t, _ in tail), tuple(m for _, m in tail), f"g{g}") for g, group in enumerate(groups) for tail in group
    ]
    batches = batch.micro_batches(samples, budget_tokens=budget, share_prefix=True)
    assert sorted(i for b in batches for i in b.rows) == [i for i, s in enumerate(samples) if any(s.mask)]
    for b in batches:
        assert b.shared is not None
        assert b.shared.before.shape == (b.tokens,)
        rows, length = b.shared.ids.shape
        assert rows * length <= budget or rows == 1
        # The token that stands where an action token is predicted from is the one before it in its own sample.
        flat = b.shared.ids.flatten()[b.shared.before]
        wanted = [samples[i].ids[t - 1] for i in b.rows for t, m in enumerate(samples[i].mask) if m]
        assert flat.tolist() == wanted
        places = b.shared.positions.flatten()[b.shared.before]
        assert places.tolist() == [t - 1 for i in b.rows for t, m in enumerate(samples[i].mask) if m]


def test_a_group_of_four_computes_its_prompt_once() -> None:
    samples = [sample((i, i, i), (1, 1, 1)) for i in range(4)]
    (row,) = prefix.trees(samples, [23] * 4, 1000)
    assert (row.stem, row.members, row.length) == (20, (0, 1, 2, 3), 20 + 4 * 2)


def test_a_stem_ends_before_the_first_action_and_where_texts_part() -> None:
    acts_early = replace(sample((1, 2), (0, 1)), mask=(*(0 for _ in range(17)), 1, 0, 0, 0, 1))
    assert prefix.trees([acts_early, sample((1, 2), (0, 1))], [22, 22], 1000)[0].stem == 17
    other = sample((1, 2), (0, 1), prompt=(*PROMPT[:18], 7, 8))
    assert prefix.trees([other, sample((1, 2), (0, 1))], [22, 22], 1000)[0].stem == 18
    strangers = [sample((1, 2), (0, 1), group=""), sample((1, 2), (0, 1), group="")]
    assert [row.stem for row in prefix.trees(strangers, [22, 22], 1000)] == [0, 0]


def test_a_branch_sees_the_stem_and_itself() -> None:
    samples = [sample((1, 2, 3), (0, 1, 1)), sample((4, 5), (1, 1))]
    (made,) = batch.micro_batches(samples, budget_tokens=1000, share_prefix=True)
    assert made.shared is not None
    seen = made.shared.attention[0, 0]
    assert seen.shape == (23, 23)  # 20 of the stem, 2 and 1 of the branches: a last token predicts nothing
    assert torch.equal(seen[:20, :20], torch.ones(20, 20, dtype=torch.bool).tril())
    assert seen[20:, :20].all()
    assert torch.equal(seen[20:, 20:], torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool))
    assert made.shared.positions[0, 20:].tolist() == [20, 21, 20]
