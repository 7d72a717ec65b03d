"""Slices of blocks to numpy, torch, pandas and Arrow: values, dtypes, and whose memory it is."""

from __future__ import annotations

import datetime
import math
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from blocks import BLOCK, ROWS, flat_lists, shared
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lance_stream import collate
from ray_lance_stream.errors import ConfigError


def plain(value: Any) -> Any:
    """Returns a cell as nested Python objects, every missing number as None."""
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        value = value.tolist()
    if isinstance(value, list):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def expected(table: pa.Table, name: str) -> list[Any]:
    column: Any = table.column(name)
    if isinstance(column.type, pa.FixedShapeTensorType):
        flat = [row for chunk in column.chunks for row in chunk.storage.to_pylist()]
        stored = np.array(flat).reshape((-1, *column.type.shape))  # pyarrow cannot show boolean tensors
        axes = [1 + i for i in column.type.permutation or range(stored.ndim - 1)]
        return list(plain(stored.transpose(0, *axes)))
    rows: list[Any] = column.to_pylist()
    leaf = column.type
    depth = []
    while pa.types.is_fixed_size_list(leaf):
        depth.append(leaf.list_size)
        leaf = leaf.value_type

    def spread(cell: Any, widths: list[int]) -> Any:  # a null row or list is all NaN in an array
        if not widths:
            return cell
        return [spread(None if cell is None else cell[i], widths[1:]) for i in range(widths[0])]

    return [spread(row, depth) for row in rows]


def assert_same(batch: dict[str, Any], table: pa.Table) -> None:
    assert list(batch) == table.column_names
    for name, got in batch.items():
        assert [plain(cell) for cell in got] == expected(table, name), name


@st.composite
def part_lists(draw: st.DrawFn) -> list[pa.Table]:
    """Draws one to three slices of the block, some rechunked, some sliced twice."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, ROWS))
        part = BLOCK.slice(start, draw(st.integers(0, ROWS - start)))
        if draw(st.booleans()):
            cut = draw(st.integers(0, part.num_rows))
            part = pa.concat_tables([part.slice(0, cut), part.slice(cut)])
        parts.append(part.slice(draw(st.integers(0, 2))))
    return parts


@settings(max_examples=30, deadline=None)
@given(part_lists(), st.booleans())
def test_a_batch_is_the_concatenation_of_its_parts(parts: list[pa.Table], copy: bool) -> None:
    table = pa.concat_tables(parts)
    numpy_batch = collate.to_numpy(parts, copy=copy)
    tensors: Any = collate.to_torch(parts, copy=copy)
    assert_same(numpy_batch, table)
    assert_same(tensors, table)
    assert collate.to_arrow(parts).equals(table)
    for name in ("vector_null", "image", "image_t", "matrix", "mask"):
        assert numpy_batch[name].shape == tuple(tensors[name].shape)


def test_dtypes_are_those_of_the_columns() -> None:
    numpy_batch = collate.to_numpy([BLOCK])
    tensors: Any = collate.to_torch([BLOCK])
    want = {"i64": "i8", "u16": "u2", "u32": "u4", "f16": "f2", "f64_null": "f8", "flag": "?", "vector": "f4"}
    want |= {"image": "u1", "image_t": "u1", "mask": "?", "bits": "?", "matrix": "i8", "code": "i8"}
    for name, dtype in want.items():
        assert numpy_batch[name].dtype == np.dtype(dtype), name
        assert tensors[name].dtype == torch.from_numpy(np.empty(0, dtype)).dtype, name
    assert numpy_batch["when"].dtype == np.dtype("M8[us]")
    assert np.isnat(numpy_batch["when"][3])
    assert numpy_batch["spans"].dtype == np.dtype("m8[ms]") and numpy_batch["spans"].shape == (ROWS, 2)
    assert isinstance(numpy_batch["day"][0], datetime.date) and isinstance(numpy_batch["text"][0], str)
    assert isinstance(tensors["when"], list) and isinstance(tensors["when"][0], datetime.datetime)
    assert isinstance(tensors["tokens"], list) and tensors["tokens"][1].dtype == torch.int64
    assert tensors["points"][4].shape == (4, 2) and tensors["tokens_null"][1] is None
    assert numpy_batch["image_t"].shape == (ROWS, 4, 3, 2) and numpy_batch["image_t"].flags.c_contiguous


def memory(batch: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    """Returns every array of a batch that holds numbers, tensors and rows of lists included."""
    found = []
    for values in batch.values():
        rows = isinstance(values, list) or (isinstance(values, np.ndarray) and values.dtype.kind == "O")
        cells = values if rows else [values]
        for cell in cells:
            if isinstance(cell, torch.Tensor):
                found.append(cell.numpy())
            elif isinstance(cell, np.ndarray):
                found.append(cell)
    return found


def block_buffers(table: pa.Table) -> list[np.ndarray[Any, Any]]:
    chunks = [chunk for column in table.columns for chunk in column.chunks]
    buffers: list[Any] = [buffer for chunk in chunks for buffer in chunk.buffers()]
    return [np.frombuffer(buffer, np.uint8) for buffer in buffers if buffer is not None and buffer.size]


@pytest.mark.parametrize("parts", [[BLOCK], [BLOCK.slice(3, 4), BLOCK.slice(7, 10)]], ids=["one", "two"])
@pytest.mark.parametrize("make", [collate.to_numpy, collate.to_torch])
def test_a_batch_is_writable_memory_of_its_own(make: Any, parts: list[pa.Table]) -> None:
    before = BLOCK.to_pydict()
    arrays = memory(make(parts))
    buffers = block_buffers(BLOCK)
    assert len(arrays) > 20
    for array in arrays:
        assert array.flags.writeable
        assert not any(np.shares_memory(array, buffer) for buffer in buffers)
        array.fill(0)
    assert BLOCK.to_pydict() == before


def test_without_copy_a_batch_is_a_view_that_keeps_the_block() -> None:
    table = shared(pa.table({"x": flat_lists(pa.array(np.arange(40.0)), 4), "n": pa.array(range(10))}))
    numpy_batch = collate.to_numpy([table.slice(2, 5)], copy=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors: Any = collate.to_torch([table.slice(2, 5)], copy=False)
    buffers = block_buffers(table)
    for name in ("x", "n"):
        assert not numpy_batch[name].flags.writeable
        assert any(np.shares_memory(numpy_batch[name], buffer) for buffer in buffers)
        assert any(np.shares_memory(tensors[name].numpy(), buffer) for buffer in buffers)
    del table, buffers
    assert numpy_batch["x"][0, 0] == 8.0 and tensors["x"][0].tolist() == [8.0, 9.0, 10.0, 11.0]
    two = collate.to_numpy([BLOCK.slice(0, 2), BLOCK.slice(2, 2)], copy=False)
    assert two["i64"].flags.writeable and two["i64"].tolist() == [0, 1, 2, 3]


def test_conversion_is_part_of_the_copy() -> None:
    tensors: Any = collate.to_torch([BLOCK.slice(1, 3), BLOCK.slice(4, 2)], dtypes=torch.float32)
    for name in ("i64", "u16", "flag", "vector", "image", "code"):
        assert tensors[name].dtype == torch.float32, name
    assert tensors["tokens"][2].dtype == torch.float32
    assert isinstance(tensors["text"], list) and isinstance(tensors["when"], list)
    some: Any = collate.to_torch([BLOCK], dtypes={"vector": torch.bfloat16, "flag": torch.int32}, copy=False)
    assert some["vector"].dtype == torch.bfloat16 and some["flag"].dtype == torch.int32
    assert some["i64"].dtype == torch.int64
    assert some["flag"].tolist() == [int(i % 3 == 0) for i in range(ROWS)]
    for wrong in ("text", "absent"):
        with pytest.raises(ConfigError, match=f"no tensors.*{wrong}"):
            collate.to_torch([BLOCK], dtypes={wrong: torch.float32})


def test_a_large_batch_is_copied_without_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1 << 18, dtype=np.float64).reshape(256, 1024)
    table = shared(pa.table({"x": flat_lists(pa.array(values.reshape(-1)), 1024)}))
    # They are the training loop's, and spin where cores are fewer.
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("copied by torch"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got: Any = collate.to_torch([table.slice(1, 200), table.slice(201)])["x"]
    assert got.nbytes > 1 << 20
    assert np.array_equal(got.numpy(), values[1:])


def test_device_and_pinning_without_cuda() -> None:
    tensors: Any = collate.to_torch([BLOCK.slice(1, 3)], device="meta", pin_memory=True)
    assert tensors["image"].device.type == "meta" and tensors["tokens"][0].device.type == "meta"
    tensors = collate.to_torch([BLOCK.slice(1, 3)], device=torch.device("cpu"), pin_memory=True)
    assert tensors["flag"].shape == (3,)
    with torch.device("meta"):
        assert collate.to_torch([BLOCK])["image"].device.type == "cpu"  # type: ignore[union-attr]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("copy", [True, False])
def test_pinned_memory_and_transfer(copy: bool) -> None:
    pinned: Any = collate.to_torch([BLOCK.slice(1, 9)], pin_memory=True, copy=copy)
    assert pinned["image"].is_pinned() and pinned["vector"].is_pinned()
    there: Any = collate.to_torch([BLOCK.slice(1, 9)], pin_memory=True, device="cuda", copy=copy)
    torch.cuda.synchronize()
    assert there["image"].is_cuda
    assert_same(there, BLOCK.slice(1, 9))


@pytest.mark.parametrize("make", [collate.to_numpy, collate.to_torch])
@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, None, 3]),
        pa.array([True, None, False]),
        pa.array([[1, None], None, [3, 4]], pa.list_(pa.int8(), 2)),
    ],
    ids=["int", "bool", "vector"],
)
def test_nulls_without_a_value_are_refused_by_name(make: Any, column: Any) -> None:
    table = pa.table({"x": column})
    with pytest.raises(ConfigError, match=r"Column 'x' holds nulls.*x IS NOT NULL.*transform"):
        make([table])
    assert plain(make([table.slice(2)])["x"][0]) == column[2].as_py()  # the nulls lie outside


@pytest.mark.parametrize("rows", [0, 3])
def test_rows_of_no_values(rows: int) -> None:
    values: Any = pa.array([], pa.float32())
    empty: Any = pa.Array.from_buffers(pa.list_(pa.float32(), 0), rows, [None], children=[values])
    parts = [pa.table({"x": empty, "l": pa.array([[]] * rows, pa.list_(pa.int8()))})]
    numpy_batch = collate.to_numpy(parts)
    tensors: Any = collate.to_torch(parts)
    assert numpy_batch["x"].shape == tuple(tensors["x"].shape) == (rows, 0)
    assert [len(row) for row in numpy_batch["l"]] == [len(row) for row in tensors["l"]] == [0] * rows


def test_no_rows_and_no_chunks_keep_shape_and_dtype() -> None:
    table = pa.Table.from_batches([], schema=BLOCK.schema)
    numpy_batch = collate.to_numpy([table])
    tensors: Any = collate.to_torch([table])
    assert numpy_batch["image_t"].shape == tuple(tensors["image_t"].shape) == (0, 4, 3, 2)
    assert numpy_batch["f16"].dtype == np.float16
    assert tensors["tokens"] == []


def test_pandas_owns_its_memory() -> None:
    parts = [BLOCK.slice(2, 5), BLOCK.slice(7, 4)]
    ints = pa.array([None if i % 2 else i + 2**53 + 1 for i in range(ROWS)])
    frame = collate.to_pandas([p.append_column("int_null", ints.slice(0, p.num_rows)) for p in parts])
    assert frame.columns.tolist() == [*BLOCK.column_names, "int_null"]
    assert frame.index.tolist() == list(range(9))
    assert frame["image"][0].shape == (2, 3, 4) and frame["points"][2].shape == (4, 2)
    assert frame["i64"].tolist() == list(range(2, 11)) and frame["text"][0] == "row 2"
    assert frame["int_null"].isna()[1] and int(frame["int_null"][2]) == 2**53 + 3, "every digit is kept"
    buffers = block_buffers(BLOCK)
    one = collate.to_pandas([BLOCK.select(["i64", "image", "when"])])
    for array in (one["i64"].to_numpy(), one["image"][0], one["when"].to_numpy()):
        assert not any(np.shares_memory(array, buffer) for buffer in buffers)
    for name in ("text", "i64"):
        assert len(collate.to_pandas([BLOCK.select([name])])) == ROWS


def test_numpy_needs_no_torch() -> None:
    modules = "ray_lance_stream.collate, ray_lance_stream.transform"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
