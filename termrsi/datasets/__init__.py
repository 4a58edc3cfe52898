"""Data sets of samples with their lineage, in Parquet: `write(path, rows)`, `DataSet(path)`."""

from termrsi.datasets.files import DataSet, Writer, write
from termrsi.datasets.schema import Kind, Lineage, Row, rows_of

__all__ = ["DataSet", "Kind", "Lineage", "Row", "Writer", "rows_of", "write"]
