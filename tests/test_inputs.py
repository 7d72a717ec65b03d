"""Whole streams over unusual tables: every type of column, odd names, tables that change while they are read."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest

from ray_lance_stream import LanceStream, PrefetchConfig
from ray_lance_stream.testing import global_batches

ROWS = 24
DAY = datetime.date(2020, 2, 28)


def sparse(values: list[Any]) -> list[Any]:
    """The values with every seventh missing."""
    return [None if i % 7 == 3 else value for i, value in enumerate(values)]


def ints(kind: Any) -> Any:
    return pa.array(range(ROWS), kind)


COLUMNS: dict[str, Any] = {
    **{str(kind): ints(kind) for kind in (pa.int8(), pa.uint16(), pa.int64(), pa.float32(), pa.float64())},
    "uint64": pa.array([2**64 - 1 - i for i in range(ROWS)], pa.uint64()),
    "half": pa.array([np.float16(i / 2) for i in range(ROWS)], pa.float16()),
    "float with nulls": pa.array(sparse([i / 2 for i in range(ROWS)])),
    "bool": pa.array([i % 3 == 0 for i in range(ROWS)]),
    "null": pa.nulls(ROWS),
    "text": pa.array(sparse([f"é{i}" for i in range(ROWS)])),
    "large text": pa.array([f"é{i}" for i in range(ROWS)], pa.large_string()),
    "bytes": pa.array(sparse([bytes([i, 0]) for i in range(ROWS)])),
    "bytes of one width": pa.array([bytes([i, 0]) for i in range(ROWS)], pa.binary(2)),
    "date": pa.array(sparse([DAY + datetime.timedelta(i) for i in range(ROWS)])),
    "time": ints(pa.int64()).cast(pa.time64("us")),
    "decimal": pa.array(sparse([decimal.Decimal(f"{i}.25") for i in range(ROWS)])),
    "lists": pa.array(sparse([list(range(i % 5)) for i in range(ROWS)]), pa.list_(pa.int32())),
    "large lists": pa.array([list(range(i % 5)) for i in range(ROWS)], pa.large_list(pa.float64())),
    "lists with nulls in them": pa.array([[None, float(i)] * (i % 3) for i in range(ROWS)], pa.list_(pa.float32())),
    "lists of text": pa.array(sparse([["a", str(i)] * (i % 3) for i in range(ROWS)])),
    "lists of bools": pa.array(sparse([[True, False] * (i % 3) for i in range(ROWS)])),
    "lists of lists": pa.array([[[i], [i, 1]] * (i % 3) for i in range(ROWS)], pa.list_(pa.list_(pa.int32()))),
    "vectors": pa.array([[i, i + 1] for i in range(ROWS)], pa.list_(pa.float32(), 2)),
    "vectors with nulls in them": pa.array([[i, None] for i in range(ROWS)], pa.list_(pa.float32(), 2)),
    "vectors of bools": pa.array([[i % 2 == 0, i % 3 == 0] for i in range(ROWS)], pa.list_(pa.bool_(), 2)),
    "matrices": pa.array([[[i, 1], [2, i]] for i in range(ROWS)], pa.list_(pa.list_(pa.int16(), 2), 2)),
    "structs": pa.array(sparse([{"a": i, "b": str(i)} for i in range(ROWS)])),
    "lists of structs": pa.array([[{"a": i}] * (i % 3) for i in range(ROWS)], pa.list_(pa.struct([("a", pa.int32())]))),
    "maps": pa.array([[("k", i)] for i in range(ROWS)], pa.map_(pa.string(), pa.int32())),
    "dictionary": pa.array(sparse(["x", "y"] * (ROWS // 2))).dictionary_encode(),
    "dictionary of ints": pa.array([i % 5 for i in range(ROWS)]).dictionary_encode(),
}


def plain(value: Any) -> Any:
    """A value of any batch format as Python objects; NaN, which is what a missing float becomes, as None."""
    if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and value != value else value


@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_every_type_of_column_comes_out_as_the_table_has_it(tmp_path: Path, block_bytes: int) -> None:
    table = lancedb.connect(tmp_path).create_table("t", pa.table({"id": np.arange(ROWS)} | COLUMNS))
    table.delete("id % 5 = 2")
    stored = table.to_arrow()
    assert set(COLUMNS) < set(stored.column_names)
    expected = {row.pop("id"): {name: plain(value) for name, value in row.items()} for row in stored.to_pylist()}
    stream = LanceStream(
        tmp_path, "t", num_splits=1, global_batch_size=6, prefetch=PrefetchConfig(block_bytes=block_bytes)
    )
    with stream.open() as shard:
        for batches in (
            shard.iter_batches(),
            shard.iter_batches(zero_copy=True),
            shard.iter_batches(batch_format="pandas"),
            shard.iter_torch_batches(),
        ):
            found: dict[int, dict[str, Any]] = {}
            for batch in batches:
                for place, key in enumerate(batch["id"].tolist()):
                    found[key] = {name: plain(list(batch[name])[place]) for name in COLUMNS}
            assert found == expected
        whole = pa.concat_tables(shard.iter_batches(batch_format="pyarrow"))
        assert whole.schema.types == stored.schema.types
        assert {row.pop("id"): {n: plain(v) for n, v in row.items()} for row in whole.to_pylist()} == expected


NAMES = ["a b", "a'b", 'a"b', "a-b", "a/b", "a[0]", "a(b)", "a\nb", "select", "1a", "Ünï", "😀", " x ", "ID"]


@pytest.mark.parametrize("columns", [None, ["id", *NAMES]])
def test_columns_may_have_any_name(tmp_path: Path, columns: list[str] | None) -> None:
    rows = {"id": np.arange(ROWS)} | {name: np.arange(ROWS) * factor for factor, name in enumerate(NAMES, 2)}
    table = lancedb.connect(tmp_path).create_table("t", pa.table(rows))
    for _ in range(2):
        stream = LanceStream(tmp_path, "t", num_splits=2, global_batch_size=4, columns=columns)
        for batch in global_batches(stream):
            for factor, name in enumerate(NAMES, 2):
                assert batch.columns[name].tolist() == (batch.columns["id"] * factor).tolist()
        table.delete("id = 3")  # rows are read in another way once some were deleted


CHANGES: dict[str, Callable[[Any], Any]] = {
    "column added": lambda table: table.add_columns({"double": "id * 2"}),
    "column dropped": lambda table: table.drop_columns(["x"]),
    "column renamed": lambda table: table.alter_columns({"path": "x", "rename": "y"}),
    "column of another type": lambda table: table.alter_columns({"path": "x", "data_type": pa.float32()}),
    "rows updated": lambda table: table.update(where="id % 2 = 0", values={"x": -1.0}),
    "rows merged": lambda table: (
        table.merge_insert("id").when_matched_update_all().execute(pa.table({"id": np.arange(9), "x": np.ones(9)}))
    ),
    "all deleted": lambda table: table.delete("true"),
    "older version restored": lambda table: table.restore(1),
}


# Where the latest version lacks the filter's column, a new stream needs version= to resume.
@pytest.mark.parametrize(
    ("change", "filter"),
    [(change, None) for change in CHANGES]
    + [(change, "x < 15") for change in CHANGES if change not in ("column dropped", "column renamed")],
)
def test_a_stream_keeps_reading_the_version_it_began_with(tmp_path: Path, change: str, filter: str | None) -> None:
    table = lancedb.connect(tmp_path).create_table("t", pa.table({"id": np.arange(40), "x": np.arange(40) * 0.5}))
    table.add(pa.table({"id": np.arange(40, 48), "x": np.arange(40, 48) * 0.5}))
    stream = LanceStream(tmp_path, "t", num_splits=3, global_batch_size=6, filter=filter)
    before = [batch.columns for batch in global_batches(stream)]
    state = json.loads(json.dumps(global_batches(stream, stop_after=2)[-1].state))
    CHANGES[change](table)
    after = [batch.columns for batch in global_batches(stream, 3)]
    stream = LanceStream(tmp_path, "t", num_splits=3, global_batch_size=6, filter=filter, resume_from=state)
    resumed = [batch.columns for batch in global_batches(stream, 2)]
    for found, expected in ((after, before), (resumed, before[2:])):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert a.keys() == b.keys()
            assert all((a[name] == b[name]).all() for name in b)
