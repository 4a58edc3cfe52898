"""What a data set's row holds: a sample as the learner takes it, what is known of its rollout, and where it comes from.

The table in README.md beside this file says what each column means. A change of a column's name, type or meaning is a new version.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import pyarrow as pa

from termrsi.errors import ConfigError
from termrsi.records import Sample, ScoredRollout

VERSION = "1"
KEY = b"termrsi.dataset"


class Kind(enum.StrEnum):
    """How a row came to be."""

    rsr = "rsr"  # a verified execution of a screened runbook, restated without it
    recovery = "recovery"  # a verified continuation of a failure of the policy
    source = "source"  # a verified rollout as it was sampled
    imported = "imported"  # from another program's file


@dataclass(frozen=True, slots=True)
class Lineage:
    """What made a row; "" and None: not known. `parent`: the rollout that this one rewrites, or goes on from."""

    kind: Kind = Kind.imported
    run: str = ""
    experiment: str = ""
    stage: str = ""
    harness: str = ""
    runbook: int | None = None
    seed: int | None = None
    checkpoint: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Of `sample` a file keeps ids, mask, turn_ids, rollout_id, group_id, sampler_logp and temperature: what belongs to the data.

    The rest belongs to one step of one learner. `reward` is the task's official one; None, as in `strict`: not known.
    """

    sample: Sample
    family: str = ""
    reward: float | None = None
    strict: bool | None = None
    lineage: Lineage = field(default_factory=Lineage)

    @property
    def turns(self) -> int:
        """Generation calls that are trained on."""
        return len({turn for turn, one in zip(self.sample.turn_ids, self.sample.mask, strict=True) if one})

    @property
    def trained(self) -> int:
        return sum(self.sample.mask)

    @property
    def context(self) -> int:
        return len(self.sample.ids) - self.trained


_TEXT, _COUNT = pa.string(), pa.int64()
SCHEMA = pa.schema(
    [
        pa.field("ids", pa.list_(pa.int64()), nullable=False),
        pa.field("mask", pa.list_(pa.int8()), nullable=False),
        pa.field("turn_ids", pa.list_(pa.int64()), nullable=False),
        pa.field("sampler_logp", pa.list_(pa.float64()), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("rollout_id", _TEXT, nullable=False),
        pa.field("task", _TEXT, nullable=False),
        pa.field("family", _TEXT, nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("strict", pa.bool_()),
        pa.field("turns", _COUNT, nullable=False),
        pa.field("trained_tokens", _COUNT, nullable=False),
        pa.field("context_tokens", _COUNT, nullable=False),
        pa.field("kind", _TEXT, nullable=False),
        pa.field("run", _TEXT, nullable=False),
        pa.field("experiment", _TEXT, nullable=False),
        pa.field("stage", _TEXT, nullable=False),
        pa.field("harness", _TEXT, nullable=False),
        pa.field("runbook", pa.int64()),
        pa.field("seed", pa.int64()),
        pa.field("checkpoint", _TEXT, nullable=False),
        pa.field("parent", _TEXT, nullable=False),
    ],
    metadata={KEY: VERSION.encode()},
)
LINEAGE = tuple(one.name for one in fields(Lineage))


def rows_of(
    samples: Iterable[Sample],
    results: Iterable[ScoredRollout],
    lineage: Lineage,
    *,
    runbooks: Mapping[str, int] | None = None,
    parents: Mapping[str, str] | None = None,
) -> list[Row]:
    """Samples of scored rollouts, each with what the verifier found of its own; a recovery's parent is the failure it began from.

    `runbooks` and `parents`: by rollout. Raises KeyError if a sample's rollout is not among the results.
    """
    of_id = {result.rollout.id: result for result in results}
    rows = []
    for sample in samples:
        rollout, verdict = of_id[sample.rollout_id].rollout, of_id[sample.rollout_id].verdict
        failure = rollout.recovery_id.removeprefix("point:")  # a restart point is named after its rollout
        own = replace(
            lineage,
            harness=rollout.harness,
            runbook=(runbooks or {}).get(rollout.id),
            parent=(parents or {}).get(rollout.id, failure),
        )
        rows.append(Row(sample, rollout.family, verdict.reward, verdict.strict, own))
    return rows


def to_batch(rows: Sequence[Row]) -> pa.RecordBatch:
    """Raises ValueError if the per-token lists of a sample are not of one length."""
    return pa.RecordBatch.from_pylist([cells_of(row) for row in rows], schema=SCHEMA)


def cells_of(row: Row) -> dict[str, Any]:  # Any: what JSON takes
    """A row's columns. Raises ValueError if the per-token lists of the sample are not of one length."""
    sample = row.sample
    lengths = {len(sample.ids), len(sample.mask), len(sample.turn_ids), len(sample.sampler_logp or sample.ids)}
    if len(lengths) != 1:
        raise ValueError(f"per-token lists of {sorted(lengths)} entries in the sample of rollout {sample.rollout_id!r}")
    return {
        "ids": sample.ids,
        "mask": sample.mask,
        "turn_ids": sample.turn_ids,
        "sampler_logp": sample.sampler_logp,
        "temperature": sample.temperature,
        "rollout_id": sample.rollout_id,
        "task": sample.group_id,
        "family": row.family,
        "reward": row.reward,
        "strict": row.strict,
        "turns": row.turns,
        "trained_tokens": row.trained,
        "context_tokens": row.context,
        **asdict(row.lineage),
    }


def from_table(table: pa.Table | pa.RecordBatch) -> Iterator[Row]:
    """Raises ConfigError for a kind of row that is none."""
    for cells in table.to_pylist():
        yield row_of(cells)


def row_of(cells: Mapping[str, Any]) -> Row:  # Any: see cells_of
    """From columns, of a table or of a line of JSON. Raises ConfigError for a kind of row that is none."""
    sample = Sample(
        ids=tuple(cells["ids"]),
        mask=tuple(cells["mask"]),
        turn_ids=tuple(cells["turn_ids"]),
        rollout_id=cells["rollout_id"],
        group_id=cells["task"],
        sampler_logp=tuple(cells["sampler_logp"]),
        temperature=cells["temperature"],
    )
    return Row(sample, cells["family"], cells["reward"], cells["strict"], lineage_of(cells))


def lineage_of(cells: Mapping[str, Any]) -> Lineage:  # Any: text and whole numbers
    """From what is known of it. Raises ConfigError for a kind that is none."""
    known = {name: cells[name] for name in LINEAGE if name in cells and name != "kind"}
    return Lineage(kind_of(cells.get("kind", Kind.imported)), **known)


def kind_of(text: str) -> Kind:
    try:
        return Kind(text)
    except ValueError as error:
        raise ConfigError(f"kind is {text!r}", "", f"valid: {', '.join(Kind)}") from error


def check(schema: pa.Schema, path: str) -> None:
    """Raises ConfigError for a file of another version, or one that lacks a column or has one of another type."""
    made = (schema.metadata or {}).get(KEY)
    if made is None:
        raise ConfigError("is Parquet, but no data set of termrsi", path, "termrsi data import makes one of chat messages")
    if made.decode(errors="replace") != VERSION:
        raise ConfigError(f"is of version {made.decode(errors='replace')}", path, f"this termrsi reads version {VERSION}")
    if missing := [name for name in SCHEMA.names if name not in schema.names]:
        raise ConfigError(f"lacks {', '.join(missing)}", path, f"a data set of version {VERSION} has every column")
    for one in SCHEMA:
        if not schema.field(one.name).type.equals(one.type):
            raise ConfigError(f"column {one.name} is {schema.field(one.name).type}", path, f"must be {one.type}")
