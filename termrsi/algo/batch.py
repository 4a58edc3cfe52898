"""Samples to padded micro-batches and back. Rows are sorted by length, so that little is padding; nothing is lost.

Letters: B rows of one micro-batch, T its longest row, K action tokens of it in row-major order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from termrsi.algo.prefix import Shared, Tree, lay_out, trees
from termrsi.records import Sample

Field = Literal["sampler_logp", "old_logp", "ref_logp", "advantages", "returns", "old_values"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded rows. `rows[b]` is where row b stood in the list of samples; `columns[name]` is `[B, T]` float32, 0 in padding.

    A row ends at its last action token: what follows it can reach no output of a causal model.
    """

    rows: tuple[int, ...]
    ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool
    temperatures: Tensor  # [B] float32, of the sampler
    columns: dict[str, Tensor] = field(default_factory=dict)
    shared: Shared | None = None  # the forward pass, where common beginnings are computed once

    @property
    def computed(self) -> int:
        """Tokens that the model computes, padding included."""
        return self.ids.numel() if self.shared is None else self.shared.ids.numel()

    @property
    def tokens(self) -> int:
        """Action tokens K."""
        return int(self.mask.sum())


def micro_batches(
    samples: Sequence[Sample],
    *,
    budget_tokens: int,
    fields: Sequence[Field] = (),
    device: str | torch.device = "cpu",
    share_prefix: bool = False,
    part: tuple[int, int] = (0, 1),
) -> list[MicroBatch]:
    """All samples that have action tokens, each once, longest first; a padded micro-batch holds at most `budget_tokens`.

    A sample longer than the budget gets a micro-batch of its own. Longest first: if memory does not suffice, the
    first one says so. Samples without action tokens are left out, `restore` gives them zeros. `share_prefix`: what the samples of
    a group have in common is computed once (`prefix`), and the budget counts computed tokens. `part` (k, n): only what the k-th of
    n processes has to do (`deal`); `rows` count through all samples all the same, and all are checked.

    Raises ValueError if a sample's lists differ in length, if a name of `fields` is missing, or if the first token of a
    sample is an action (nothing predicts it).
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens must be at least 1, not {budget_tokens}")
    lengths = [_used_length(sample, fields) for sample in samples]
    if share_prefix:
        rows = trees(samples, lengths, budget_tokens)
        own = [rows[i] for i in deal([row.length for row in rows], *part)]
        return _sharing(samples, lengths, own, budget_tokens, fields, torch.device(device))
    order = sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: -lengths[i])
    order = [order[i] for i in deal([lengths[i] for i in order], *part)]
    batches: list[MicroBatch] = []
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        rows = order[start : start + max(1, budget_tokens // longest)]
        batches.append(_pad(samples, rows, longest, fields, torch.device(device)))
        start += len(rows)
    return batches


def deal(sizes: Sequence[int], k: int, n: int) -> list[int]:
    """Places in `sizes` (largest first) of what the k-th of n processes gets: each in turn to whoever has the least so far."""
    loads, own = [0] * n, []
    for i, size in enumerate(sizes):
        least = loads.index(min(loads))
        loads[least] += size
        if least == k:
            own.append(i)
    return own


def blank(fields: Sequence[Field] = (), device: str | torch.device = "cpu") -> MicroBatch:
    """A row of no sample and without action: it is computed like any other, and all its gradients are 0.

    Processes that share a model must take the same number of passes; whoever has fewer micro-batches takes this instead.
    """
    shape = (1, 2)
    return MicroBatch(
        (),
        torch.zeros(shape, dtype=torch.int64, device=device),
        torch.zeros(shape, dtype=torch.bool, device=device),
        torch.ones(1, device=device),
        {name: torch.zeros(shape, device=device) for name in fields},
    )


def _sharing(
    samples: Sequence[Sample],
    lengths: Sequence[int],
    rows: Sequence[Tree],
    budget_tokens: int,
    fields: Sequence[Field],
    device: torch.device,
) -> list[MicroBatch]:
    batches: list[MicroBatch] = []
    start = 0
    while start < len(rows):
        together = rows[start : start + max(1, budget_tokens // max(1, rows[start].length))]
        members = [i for row in together for i in row.members]
        padded = _pad(samples, members, max(lengths[i] for i in members), fields, device)
        batches.append(replace(padded, shared=lay_out(samples, lengths, together, device)))
        start += len(together)
    return batches


def restore(samples: Sequence[Sample], outputs: Sequence[tuple[MicroBatch, Tensor]]) -> list[list[float]]:
    """Per-token results `[B, T]` of each micro-batch, as one list per sample in its order, 0 off the mask."""
    lists = [[0.0] * len(sample.ids) for sample in samples]
    for batch, output in ((batch, output) for batch, output in outputs if batch.rows):
        kept = torch.where(batch.mask, output.detach().float(), 0.0).tolist()
        for row, values in zip(batch.rows, kept, strict=True):
            used = min(len(values), len(lists[row]))
            lists[row][:used] = values[:used]
    return lists


def _used_length(sample: Sample, fields: Sequence[Field]) -> int:
    """Length up to the last action token; 0 if there is none."""
    size = len(sample.ids)
    name = sample.rollout_id or "a sample"
    if len(sample.mask) != size:
        raise ValueError(f"{name}: {size} ids, but a mask of {len(sample.mask)}")
    last = max((i for i, bit in enumerate(sample.mask) if bit), default=-1)
    if last < 0:
        return 0
    if sample.mask[0]:
        raise ValueError(f"{name}: the first token is an action, but nothing precedes it")
    for column in fields:
        if len(getattr(sample, column)) != size:
            raise ValueError(f"{name}: {column} holds {len(getattr(sample, column))} entries, {size} are needed")
    return last + 1


def _pad(samples: Sequence[Sample], rows: Sequence[int], longest: int, fields: Sequence[Field], device: torch.device) -> MicroBatch:
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    columns = {name: torch.zeros(len(rows), longest) for name in fields}
    for b, row in enumerate(rows):
        sample = samples[row]
        used = min(longest, len(sample.ids))
        ids[b, :used] = torch.tensor(sample.ids[:used])
        mask[b, :used] = torch.tensor(sample.mask[:used], dtype=torch.bool)
        for name in fields:
            columns[name][b, :used] = torch.tensor(getattr(sample, name)[:used])
    temperatures = torch.tensor([samples[row].temperature for row in rows], dtype=torch.float32)
    return MicroBatch(
        tuple(rows),
        ids.to(device),
        mask.to(device),
        temperatures.to(device),
        {name: column.to(device) for name, column in columns.items()},
    )
