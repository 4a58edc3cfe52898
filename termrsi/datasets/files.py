"""Data sets on disk: rows go in one by one and come out by row groups or by number; no more than a few groups are held.

A file appears under its name when it is whole: until then it is a draft beside it, which the next writer of that name replaces.
"""

import contextlib
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from termrsi.datasets.schema import SCHEMA, Row, check, from_table, to_batch
from termrsi.errors import ConfigError

GROUP_ROWS = 64  # a row asked for by number costs the reading of its group
GROUP_TOKENS = 1 << 18
HELD_GROUPS = 4


def write(path: Path | str, rows: Iterable[Row]) -> int:
    """Rows of any number into a new file, or in place of an old one; how many there were. Whatever stops it leaves no file."""
    with Writer(path) as writer:
        for row in rows:
            writer.append(row)
    return writer.rows


class Writer:
    """Appends rows to a draft; `close` gives it its name. In a `with`, an error takes the draft away."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._draft = self._path.with_name(f".{self._path.name}.draft")
        self._file = self._draft.open("wb")
        self._parquet = pq.ParquetWriter(self._file, SCHEMA, compression="zstd")
        self._waiting: list[Row] = []
        self._tokens = 0
        self.rows = 0

    def append(self, row: Row) -> None:
        self._waiting.append(row)
        self._tokens += len(row.sample.ids)
        self.rows += 1
        if len(self._waiting) >= GROUP_ROWS or self._tokens >= GROUP_TOKENS:
            self._flush()

    def close(self) -> None:
        if self._waiting:
            self._flush()
        self._parquet.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._draft.replace(self._path)

    def abandon(self) -> None:
        """Nothing is left of what was appended."""
        with contextlib.suppress(OSError):  # a full disk, perhaps: what is closed here is thrown away
            self._parquet.close()
        with contextlib.suppress(OSError):
            self._file.close()
        self._draft.unlink(missing_ok=True)

    def _flush(self) -> None:
        self._parquet.write_batch(to_batch(self._waiting), row_group_size=len(self._waiting))
        self._waiting, self._tokens = [], 0

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abandon()
            return
        try:
            self.close()
        except BaseException:
            self.abandon()
            raise


class DataSet:
    """A file of rows: `len(data)`, `data[i]` in any order, `for row in data` and `select` by row groups.

    Raises ConfigError for what is no data set of this version. One thread at a time.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError("no such data set", str(path), "valid: a file that a stage or termrsi data import wrote")
        try:
            self._file = pq.ParquetFile(self.path)
        except pa.ArrowInvalid as error:
            raise ConfigError("is no Parquet file", str(path), "data sets are *.parquet") from error
        check(self._file.schema_arrow, str(path))
        meta = self._file.metadata
        sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        self._begins = [0, *accumulate(sizes)]
        self._held: OrderedDict[int, pa.Table] = OrderedDict()

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, index: int) -> Row:
        """Raises IndexError. The groups read last are held, so that neighbours are cheap."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        group = bisect_right(self._begins, index) - 1
        if group not in self._held:
            while len(self._held) >= HELD_GROUPS:
                self._held.popitem(last=False)
            self._held[group] = self._group(group)
        self._held.move_to_end(group)
        (row,) = from_table(self._held[group].slice(index - self._begins[group], 1))
        return row

    def __iter__(self) -> Iterator[Row]:
        """In the order of the file; one group is held at a time."""
        for group in range(len(self._begins) - 1):
            yield from from_table(self._group(group))

    def select(self, *columns: str) -> Iterator[tuple]:
        """These columns of every row; no other column is read. Raises ConfigError for one that is none."""
        for name in columns:
            if name not in SCHEMA.names:
                raise ConfigError(f"no column {name!r}", str(self.path), f"valid: {', '.join(SCHEMA.names)}")
        for group in range(len(self._begins) - 1):
            yield from _lines(self._group(group, columns), columns)

    def close(self) -> None:
        self._held.clear()
        self._file.close()

    def _group(self, group: int, columns: Iterable[str] = SCHEMA.names) -> pa.Table:
        try:
            return self._file.read_row_group(group, columns=list(columns), use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(f"row group {group} cannot be read: {str(error).splitlines()[0]}", str(self.path)) from error

    def __enter__(self) -> "DataSet":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _lines(table: pa.Table, columns: Iterable[str]) -> Iterator[tuple]:
    yield from zip(*(table.column(name).to_pylist() for name in columns), strict=True)
