"""Common beginnings of a group's samples, computed once: each row of the forward pass is a tree of one stem and its branches.

A group's rollouts share their prompt, a recovery group's also the failed history; with short episodes that is most of their tokens.
A branch attends to the stem and to itself, its positions go on from the stem's: outputs and gradients are those of separate rows
(up to rounding). Letters: R rows, L the longest, K action tokens of the micro-batch in row-major order of its samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from termrsi.records import Sample

MIN_STEM = 16  # tokens: below, a mask of its own costs more than it saves
MAX_ROW = 8192  # tokens: the mask is [L, L]


@dataclass(frozen=True, slots=True)
class Tree:
    """One row: `stem` tokens that all `members` (places in the list of samples) begin with. A lone sample has a stem of 0."""

    stem: int
    members: tuple[int, ...]
    length: int  # tokens that are computed: the stem once, each branch without its last token, which predicts nothing


@dataclass(frozen=True, slots=True)
class Shared:
    """The forward pass of a micro-batch. `before[k]`: where in `[R * L]` the hidden state stands that predicts action token k."""

    ids: Tensor  # [R, L] int64
    positions: Tensor  # [R, L] int64
    attention: Tensor  # [R, 1, L, L] bool: True where a token may look
    before: Tensor  # [K] int64


def trees(samples: Sequence[Sample], lengths: Sequence[int], limit: int) -> list[Tree]:
    """Rows for all samples with a length above 0 (`lengths`: up to the last action token), longest first.

    Samples of one `group_id` share the stem that ends before any of them acts. A sample longer than `limit` has a row alone.
    """
    groups: dict[str, list[int]] = {}
    for i, length in enumerate(lengths):
        if length > 0:
            groups.setdefault(samples[i].group_id or f"\0{i}", []).append(i)
    rows: list[Tree] = []
    for members in groups.values():
        stem = _stem(samples, members)
        if stem < MIN_STEM:
            rows += [Tree(0, (i,), lengths[i] - 1) for i in members]
            continue
        held: list[int] = []
        length = stem
        for i in members:
            branch = lengths[i] - 1 - stem
            if held and length + branch > min(limit, MAX_ROW):
                rows.append(Tree(stem, tuple(held), length))
                held, length = [], stem
            held.append(i)
            length += branch
        rows.append(Tree(stem, tuple(held), length))
    return sorted(rows, key=lambda row: -row.length)


def _stem(samples: Sequence[Sample], members: Sequence[int]) -> int:
    """Tokens that all have in common, before the first action of any; 0 for a lone sample."""
    if len(members) < 2:
        return 0
    first = samples[members[0]]
    stem = min(samples[i].mask.index(1) for i in members)
    for i in members[1:]:
        other = samples[i].ids
        stem = next((k for k in range(stem) if first.ids[k] != other[k]), stem)
    return stem


def lay_out(samples: Sequence[Sample], lengths: Sequence[int], rows: Sequence[Tree], device: torch.device) -> Shared:
    """The tensors of one micro-batch, whose samples are the members of `rows` in order."""
    longest = max(row.length for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    positions = torch.zeros(len(rows), longest, dtype=torch.int64)
    attention = torch.eye(longest, dtype=torch.bool).repeat(len(rows), 1, 1)  # padding looks at itself: an empty row would be NaN
    before: list[int] = []
    for r, row in enumerate(rows):
        stem = row.stem
        ids[r, :stem] = torch.tensor(samples[row.members[0]].ids[:stem])
        positions[r, :stem] = torch.arange(stem)
        attention[r, :stem, :stem].copy_(torch.ones(stem, stem, dtype=torch.bool).tril())
        start = stem
        for i in row.members:
            sample, end = samples[i], lengths[i] - 1
            size = end - stem
            ids[r, start : start + size] = torch.tensor(sample.ids[stem:end])
            positions[r, start : start + size] = torch.arange(stem, end)
            attention[r, start : start + size, :stem] = True
            attention[r, start : start + size, start : start + size] = torch.ones(size, size, dtype=torch.bool).tril()
            for t in range(1, lengths[i]):
                if sample.mask[t]:  # predicted by t - 1: in the branch, or the last of the stem
                    before.append(r * longest + (start + t - 1 - stem if t > stem else t - 1))
            start += size
    return Shared(ids.to(device), positions.to(device), attention.unsqueeze(1).to(device), torch.tensor(before).to(device))
