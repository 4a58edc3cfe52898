"""Data sets on disk: a row comes back exactly, whatever it is; files are whole or not there; memory is that of one row group."""

import errno
import gc
import random
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from termrsi.datasets import DataSet, Kind, Lineage, Row, Writer, files, schema, write
from termrsi.errors import ConfigError
from termrsi.records import Sample

whole = st.integers(-(1 << 63), (1 << 63) - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
number = st.floats(allow_nan=False)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    n = draw(st.integers(0, 6))

    def per_token(what: st.SearchStrategy) -> tuple:
        return tuple(draw(st.lists(what, min_size=n, max_size=n)))

    logp = per_token(number) if draw(st.booleans()) else ()
    ids, mask, turns = per_token(whole), per_token(st.integers(0, 1)), per_token(st.integers(0, 9))
    return Sample(ids, mask, turns, draw(text), draw(text), logp, temperature=draw(number))


known = st.none() | whole
lineages = st.builds(Lineage, st.sampled_from(Kind), text, text, text, text, known, known, text, text)
rows = st.builds(Row, samples(), text, st.none() | number, st.none() | st.booleans(), lineages)


def row(number: int, tokens: int = 4) -> Row:
    sample = Sample(
        (number,) * tokens, (0, *(1,) * (tokens - 1)), (0,) * tokens, rollout_id=f"r{number}", group_id=f"t{number % 5}"
    )
    return Row(sample, f"f{number % 3}", float(number % 2), number % 2 == 1, Lineage(Kind.rsr, stage="s"))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(rows, max_size=5))
def test_rows_come_back_exactly(tmp_path: Path, given_rows: list[Row]) -> None:
    path = tmp_path / "data.parquet"
    assert write(path, given_rows) == len(given_rows)
    with DataSet(path) as data:
        assert list(data) == given_rows
        assert [data[i] for i in range(len(data))] == given_rows
        found = list(data.select("turns", "trained_tokens", "context_tokens"))
    for (turns, trained, context), one in zip(found, given_rows, strict=True):
        sample = one.sample
        assert turns == len({t for t, m in zip(sample.turn_ids, sample.mask, strict=True) if m})
        assert (trained, context) == (sample.mask.count(1), sample.mask.count(0))


def test_what_belongs_to_a_learners_step_is_not_kept(tmp_path: Path) -> None:
    sample = Sample((1, 2), (0, 1), (0, 0), "r", "t", (0.0, -0.5), advantages=(0.0, 1.0), returns=(0.0, 2.0), old_values=(0.0, 3.0))
    write(tmp_path / "d.parquet", [Row(sample)])
    with DataSet(tmp_path / "d.parquet") as data:
        assert data[0].sample == Sample((1, 2), (0, 1), (0, 0), "r", "t", (0.0, -0.5))


def test_any_order_and_any_row(tmp_path: Path) -> None:
    path, count = tmp_path / "d.parquet", 3 * files.GROUP_ROWS + 7
    write(path, (row(i) for i in range(count)))
    assert pq.ParquetFile(path).num_row_groups == 4
    order = list(range(count))
    random.Random(0).shuffle(order)
    with DataSet(path) as data:
        assert len(data) == count
        assert [data[i].sample.rollout_id for i in order] == [f"r{i}" for i in order]
        assert data[-1] == row(count - 1)
        for wrong in (count, -count - 1):
            with pytest.raises(IndexError, match=f"row {wrong} of {count}"):
                data[wrong]


def test_only_the_columns_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.parquet"
    write(path, map(row, range(10)))
    read: list[list[str]] = []
    real = pq.ParquetFile.read_row_group

    def spied(self: pq.ParquetFile, group: int, columns: list[str], use_threads: bool) -> pa.Table:
        read.append(columns)
        return real(self, group, columns=columns, use_threads=use_threads)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spied)
    with DataSet(path) as data:
        assert list(data.select("family", "strict"))[:2] == [("f0", False), ("f1", True)]
        with pytest.raises(ConfigError, match="no column 'returns'"):
            list(data.select("returns"))
    assert read == [["family", "strict"]]


class Watched(DataSet):
    """Counts the row groups that are alive whenever one is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._tables: list[weakref.ref[pa.Table]] = []
        self.read = self.most = 0

    def _group(self, group: int, columns: Iterable[str] = tuple(schema.SCHEMA.names)) -> pa.Table:
        table = super()._group(group, columns)
        self._tables.append(weakref.ref(table))
        self.read += 1
        self.most = max(self.most, self.alive())
        return table

    def alive(self) -> int:
        return sum(table() is not None for table in self._tables)


def test_twenty_thousand_rows_pass_through_the_memory_of_one_group(tmp_path: Path) -> None:
    path, count = tmp_path / "d.parquet", 20_000
    waiting = 0

    def made() -> Iterator[Row]:
        for i in range(count):
            yield row(i)

    with Writer(path) as writer:
        for one in made():
            writer.append(one)
            waiting = max(waiting, len(writer._waiting))
    assert waiting < files.GROUP_ROWS
    data = Watched(path)
    assert sum(one.sample.ids[0] for one in data) == count * (count - 1) // 2
    assert (data.read, data.most) == (-(-count // files.GROUP_ROWS), 1)
    assert sum(1 for _ in data.select("ids")) == count
    assert data.most == 1
    rng = random.Random(0)
    for _ in range(100):
        index = rng.randrange(count)
        assert data[index].sample.ids[0] == index
    assert data.most <= files.HELD_GROUPS
    data.close()
    assert data.alive() == 0


def test_long_rows_make_short_groups(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    write(path, (row(i, files.GROUP_TOKENS // 2) for i in range(4)))
    assert pq.ParquetFile(path).num_row_groups == 2


def test_a_writer_that_is_stopped_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    write(path, [row(1)])

    def broken() -> Iterator[Row]:
        yield from (row(i) for i in range(100))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, broken())
    with pytest.raises(ValueError, match=r"per-token lists of \[1, 2\] entries in the sample of rollout 'r'"):
        write(path, [Row(Sample((1, 2), (1,), (0, 0), "r"))])
    assert [p.name for p in tmp_path.iterdir()] == ["d.parquet"]
    with DataSet(path) as data:
        assert list(data) == [row(1)]


def test_a_killed_writer_leaves_the_old_file_and_a_draft_for_the_next(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    write(path, [row(1)])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == [".d.parquet.draft", "d.parquet"]
    with DataSet(path) as data:
        assert list(data) == [row(1)]
    write(path, [row(2), row(3)])
    assert [p.name for p in tmp_path.iterdir()] == ["d.parquet"]
    with DataSet(path) as data:
        assert list(data) == [row(2), row(3)]


KILLED = """
import os, sys
from termrsi.datasets import Row, Writer
from termrsi.records import Sample
writer = Writer(sys.argv[1])
for i in range(200):
    writer.append(Row(Sample((i,), (1,), (0,))))
os.kill(os.getpid(), 9)
"""


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / ".d.parquet.draft").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "d.parquet", map(row, range(1000)))
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())
    gc.collect()  # what is left of the writer says nothing more


def test_what_is_no_data_set_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    write(path, [row(1)])
    table = pq.read_table(path)
    cases = {
        "older": (table.replace_schema_metadata({schema.KEY: b"0"}), "is of version 0; this termrsi reads version 1"),
        "other": (table.replace_schema_metadata(None), "is Parquet, but no data set of termrsi"),
        "fewer": (table.drop_columns(["ids", "seed"]), "lacks ids, seed"),
        "typed": (table.set_column(0, "ids", pa.array(["a"])), "column ids is string; must be list"),
    }
    for name, (made, why) in cases.items():
        pq.write_table(made, tmp_path / name)
        with pytest.raises(ConfigError) as caught:
            DataSet(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: {why}")
        assert "\n" not in str(caught.value)
    (tmp_path / "json").write_text("[]")
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-20])
    for name in ("json", "cut"):
        with pytest.raises(ConfigError, match="is no Parquet file"):
            DataSet(tmp_path / name)
    with pytest.raises(ConfigError, match="no such data set"):
        DataSet(tmp_path / "none")


def test_a_spoilt_row_group_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    write(path, map(row, range(2 * files.GROUP_ROWS)))
    content = bytearray(path.read_bytes())
    begins = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset or 0
    assert begins > 0
    content[begins : begins + 60] = bytes(60)
    path.write_bytes(content)
    with DataSet(path) as data:
        assert data[0] == row(0)
        with pytest.raises(ConfigError, match="row group 1 cannot be read"):
            data[files.GROUP_ROWS]


def test_more_columns_are_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    write(path, [row(1)])
    pq.write_table(pq.read_table(path).append_column("note", pa.array(["x"])), path)
    with DataSet(path) as data:
        assert list(data) == [row(1)]
