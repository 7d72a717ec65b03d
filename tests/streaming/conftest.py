"""Tables and implementations for the streaming tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lancedb
import pyarrow as pa
import pytest
from conftest import Tables

from streaming.sides import LANCEDB, OURS, OpenTable, Side


@pytest.fixture
def ours() -> Side:
    """This package's classes."""
    return OURS


@pytest.fixture(params=["lancedb", "ours"])
def side(request: pytest.FixtureRequest) -> Side:
    """One implementation after the other: what holds for both."""
    return LANCEDB if request.param == "lancedb" else OURS


@pytest.fixture(params=["saved by lancedb", "saved by ours"])
def writer_and_reader(request: pytest.FixtureRequest) -> tuple[Side, Side]:
    """Both directions in which a state may travel."""
    return (LANCEDB, OURS) if request.param == "saved by lancedb" else (OURS, LANCEDB)


@pytest.fixture(scope="session")
def table_of(tables: Tables) -> OpenTable:
    """Opens a table of so many rows, whose ids are 0, 1, ...; shared, not to be changed."""
    return lambda rows: lancedb.connect(tables.uri(rows)).open_table("t")


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A table of 61 token lists of 0 to 12 tokens; document d holds the tokens 100 * d, 100 * d + 1, ..."""
    lengths = [(d * 7) % 13 for d in range(61)]
    tokens = [[100 * d + 100 + t for t in range(length)] for d, length in enumerate(lengths)]
    return new_table(tmp_path_factory.mktemp("documents"), pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32()))}))


@pytest.fixture(scope="session")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A table of 16 rows with a column of every kind that default_collate treats in its own way."""
    count = range(16)
    columns = {
        "id": pa.array(count, pa.int64()),
        "small": pa.array(count, pa.int8()),
        "half": pa.array([i / 2 for i in count], pa.float32()),
        "flag": pa.array([i % 3 == 0 for i in count]),
        "text": pa.array([f"row {i}" for i in count]),
        "raw": pa.array([bytes([i, 255 - i]) for i in count], pa.binary()),
        "pair": pa.array([[i, -i] for i in count], pa.list_(pa.int64())),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array([i / 4 for i in range(48)], pa.float32()), 3),
        "nested": pa.array([{"a": i, "b": f"b{i}"} for i in count]),
        "ragged": pa.array([[0] * (i % 4) for i in count], pa.list_(pa.int64())),
        "missing": pa.array([None if i % 5 == 0 else i for i in count], pa.int64()),
    }
    return new_table(tmp_path_factory.mktemp("rich"), pa.table(columns))


def new_table(path: Path, rows: pa.Table) -> Any:
    """Creates a table in a new database."""
    return lancedb.connect(str(path)).create_table("t", rows)
