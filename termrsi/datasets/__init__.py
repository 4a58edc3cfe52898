"""Data sets of samples with their lineage, in Parquet: `write(path, rows)`, `DataSet(path)`."""

from termrsi.datasets.files import DataSet, Writer, write
from termrsi.datasets.schema import Kind, Lineage, Row, cells_of, row_of, rows_of

__all__ = ["DataSet", "Kind", "Lineage", "Row", "Writer", "cells_of", "row_of", "rows_of", "write"]
