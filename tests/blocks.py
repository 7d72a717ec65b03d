"""Arrow columns of every kind, and a block of them as it comes out of the object store."""

from __future__ import annotations

import datetime
import math
from typing import Any

import numpy as np
import pyarrow as pa

ROWS = 24
FLOATS = [None if i % 5 == 2 else i / 4 for i in range(ROWS)]


def tensor_column(values: np.ndarray[Any, Any], permutation: list[int] | None = None) -> Any:
    """Returns (rows, *shape) as a fixed_shape_tensor column, its axes stored in the order given."""
    flat = pa.array(values.reshape(-1))
    kind: Any = pa.fixed_shape_tensor(flat.type, values.shape[1:], permutation=permutation)
    return pa.ExtensionArray.from_storage(kind, flat_lists(flat, math.prod(values.shape[1:])))


def flat_lists(values: Any, width: int) -> Any:
    return pa.FixedSizeListArray.from_arrays(values, width)


def columns() -> dict[str, Any]:
    """Returns one column of every kind, ``ROWS`` rows each."""
    rng = np.random.default_rng(0)
    vectors = [None if i % 7 == 3 else [i, None, i + 1] for i in range(ROWS)]
    ragged = [[j + i for j in range(i % 4)] for i in range(ROWS)]
    ragged_null = [None if i % 5 == 1 else row for i, row in enumerate(ragged)]
    when = datetime.datetime(2024, 2, 29, 1, 2, 3)
    hours = [when + datetime.timedelta(hours=i) for i in range(ROWS)]
    points = flat_lists(pa.array(np.arange(3 * ROWS * 2, dtype=np.float32)), 2)
    offsets = pa.array([0, *np.cumsum([i % 6 for i in range(ROWS)])], pa.int32())
    return {
        "i64": pa.array(range(ROWS)),
        "u16": pa.array(range(ROWS), pa.uint16()),
        "u32": pa.array(range(ROWS), pa.uint32()),
        "f16": pa.array(np.arange(ROWS, dtype=np.float16)),
        "f64_null": pa.array(FLOATS),
        "flag": pa.array([i % 3 == 0 for i in range(ROWS)]),
        "vector": flat_lists(pa.array(rng.random(ROWS * 5, np.float32)), 5),
        "vector_null": pa.array(vectors, pa.list_(pa.float32(), 3)),
        "bits": flat_lists(pa.array([i % 5 < 2 for i in range(ROWS * 3)]), 3),
        "matrix": flat_lists(flat_lists(pa.array(range(ROWS * 6)), 3), 2),
        "matrix_null": pa.array(
            [None if i % 4 == 1 else [[i, i], None if i % 3 else [None, i]] for i in range(ROWS)],
            pa.list_(pa.list_(pa.float64(), 2), 2),
        ),
        "image": tensor_column(rng.integers(0, 255, (ROWS, 2, 3, 4)).astype(np.uint8)),
        "image_t": tensor_column(rng.integers(0, 255, (ROWS, 2, 3, 4)).astype(np.uint8), [2, 1, 0]),
        "mask": tensor_column(rng.random((ROWS, 2, 3)) < 0.5),
        "tokens": pa.array(ragged),
        "tokens_null": pa.array(ragged_null, pa.large_list(pa.int32())),
        "points": pa.ListArray.from_arrays(offsets, points),
        "text": pa.array([None if i % 6 == 1 else f"row {i}" for i in range(ROWS)]),
        "raw": pa.array([bytes([i]) for i in range(ROWS)]),
        "word": pa.array(["a", "b", "c", "d"] * (ROWS // 4)).dictionary_encode(),
        "code": pa.array([5, 6, 7, 8] * (ROWS // 4)).dictionary_encode(),
        "words": pa.array([["x"] * (i % 3) for i in range(ROWS)]),
        "struct": pa.array([{"a": i, "b": None} for i in range(ROWS)]),
        "when": pa.array([None if i == 3 else h for i, h in enumerate(hours)], pa.timestamp("us")),
        "spans": flat_lists(pa.array([h - when for h in hours for _ in range(2)], pa.duration("ms")), 2),
        "day": pa.array([h.date() for h in hours]),
        "decimal": pa.array(range(ROWS)).cast(pa.decimal128(21, 2)),
        "nothing": pa.nulls(ROWS),
    }


def shared(table: pa.Table) -> pa.Table:
    """Returns the table in read-only memory, as blocks come out of the object store."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    result: pa.Table = pa.ipc.open_stream(sink.getvalue().to_pybytes()).read_all()
    return result


BLOCK = shared(pa.table(columns()))
