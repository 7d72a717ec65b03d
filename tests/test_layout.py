"""Layouts of columns, and views of their chunks: what they show, and whose memory it is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from blocks import flat_lists, tensor_column

from ray_lance_stream.errors import ConfigError
from ray_lance_stream.layout import Layout, chunks_of, items_of, layouts_of, objects_of, view_of


def layout_of(column: Any) -> Layout:
    return layouts_of([pa.table({"x": column})])[0]


def views(column: Any) -> list[np.ndarray[Any, Any]]:
    table = pa.table({"x": column})
    return [view_of(chunk, layout_of(column)) for chunk in chunks_of([table], layout_of(column))]


def tensors(shape: tuple[int, ...], permutation: list[int] | None = None) -> Any:
    """Returns numbers from 0 in the stored shape (rows, *shape)."""
    return tensor_column(np.arange(math.prod(shape), dtype=np.float32).reshape(shape), permutation)


NUMBERS = pa.array(np.arange(24, dtype=np.int16))
KINDS: list[tuple[Any, str, str, tuple[int, ...], bool]] = [
    (NUMBERS, "fixed", "i2", (), True),
    (pa.array([True, False]), "fixed", "?", (), True),
    (NUMBERS.dictionary_encode(), "fixed", "i2", (), True),
    (flat_lists(flat_lists(NUMBERS, 3), 2), "fixed", "i2", (2, 3), True),
    (tensors((4, 2, 3)), "fixed", "f4", (2, 3), True),
    (tensors((4, 2, 3), [1, 0]), "fixed", "f4", (3, 2), True),
    (flat_lists(tensors((4, 2, 3), [1, 0]), 2), "fixed", "f4", (2, 3, 2), True),
    (pa.array([[1], [2, 3]]), "ragged", "i8", (), True),
    (pa.array([[[1, 2]], []], pa.large_list(pa.list_(pa.int8(), 2))), "ragged", "i1", (2,), True),
    (pa.array([0, 1], pa.timestamp("us", "UTC")), "fixed", "M8[us]", (), False),
    (pa.array([0, 1], pa.duration("ms")), "fixed", "m8[ms]", (), False),
    (pa.array(["a"]), "object", "O", (), False),
    (pa.array([["a"]]), "object", "O", (), False),
    (pa.array([[[1]], [[2], [3, 4]]]), "object", "O", (), False),
    (pa.array([{"a": 1}]), "object", "O", (), False),
]


@pytest.mark.parametrize(("column", "kind", "dtype", "shape", "is_tensor"), KINDS, ids=range(len(KINDS)))
def test_the_type_of_a_column_decides_its_layout(
    column: Any, kind: str, dtype: str, shape: tuple[int, ...], is_tensor: bool
) -> None:
    got = layout_of(column)
    assert (got.kind, got.dtype, got.row_shape, got.is_tensor) == (kind, np.dtype(dtype), shape, is_tensor)
    assert math.prod(got.widths) == math.prod(shape)


def test_layouts_are_made_once_for_each_schema() -> None:
    tables = [pa.table({"x": tensors((2, *[2] * rank), order)}) for rank, order in ((2, None), (2, [1, 0]), (3, None))]
    tables += [pa.table({name: [1]}) for name in "abcdefgh"]
    layouts = [layouts_of([table]) for table in tables]
    assert len(set(layouts)) == len(tables)
    assert [layouts_of([table]) for table in tables] == layouts
    noted = tables[-1].replace_schema_metadata({"k": "v"})
    assert layouts_of([noted, tables[-1]]) is layouts_of([tables[-1]])


def test_views_lie_in_the_memory_of_the_block() -> None:
    for column in (NUMBERS, flat_lists(NUMBERS, 4), flat_lists(flat_lists(NUMBERS, 3), 2), tensors((6, 2, 2), [1, 0])):
        for part in (column, column.slice(1, 2), column.slice(1).slice(1, 1)):
            (view,) = views(part)
            data: Any = part.buffers()[-1]
            assert np.shares_memory(view, np.frombuffer(data, np.uint8)) and len(view) == len(part)
    (view,) = views(tensors((6, 2, 3), [1, 0]).slice(1, 2))
    assert np.array_equal(view, np.arange(36).reshape(6, 2, 3).transpose(0, 2, 1)[1:3])
    assert [view.tolist() for view in views(pa.chunked_array([[1, 2], [3]]))] == [[1, 2], [3]]
    assert [view.tolist() for view in views(pa.array([5, 6, 5]).dictionary_encode().slice(1))] == [[6, 5]]


@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 20])
def test_booleans_are_unpacked_from_any_bit(start: int) -> None:
    bits = np.random.default_rng(0).random(60) < 0.5
    assert np.array_equal(views(pa.array(bits).slice(start, 19))[0], bits[start : start + 19])
    nested = flat_lists(flat_lists(pa.array(bits), 3), 2)
    assert np.array_equal(views(nested.slice(start % 5, 4))[0], bits.reshape(10, 2, 3)[start % 5 :][:4])


def test_nulls_are_patched_in_a_copy() -> None:
    column: Any = pa.array([[1.0, None], None, [3.0, 4.0]], pa.list_(pa.float32(), 2))
    np.testing.assert_array_equal(views(column)[0], [[1, np.nan], [np.nan, np.nan], [3, 4]])
    assert views(column.slice(2))[0].tolist() == [[3, 4]]
    assert np.isnat(views(pa.array([None, 1], pa.timestamp("s")))[0]).tolist() == [True, False]
    assert column.to_pylist() == [[1.0, None], None, [3.0, 4.0]]
    with pytest.raises(ConfigError, match="Column 'x' holds nulls"):
        views(pa.array([1, None]))


def test_hidden_items_of_null_lists_are_left_out() -> None:
    offsets, mask = pa.array([0, 3, 6, 10], pa.int32()), pa.array([False, True, False])
    column = pa.ListArray.from_arrays(offsets, pa.array(range(10)), mask=mask)
    found, lengths, absent = items_of([column, column.slice(2), column.slice(1, 1)], layout_of(column))
    assert [view.tolist() for view in found] == [[0, 1, 2, 6, 7, 8, 9], [6, 7, 8, 9], []]
    assert lengths == [3, 0, 4, 4, 0] and absent == [1, 4]


def test_objects_are_python_objects() -> None:
    chunks = [pa.array(["a", None]), pa.array([b"a"]), pa.array([{"a": [1]}]), pa.array([["x"], []])]
    assert objects_of(chunks) == ["a", None, b"a", {"a": [1]}, ["x"], []]


def test_parts_that_make_no_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="no parts"):
        layouts_of([])
    with pytest.raises(ConfigError, match="differ in schema"):
        layouts_of([pa.table({"x": [1]}), pa.table({"x": [1.0]})])
    with pytest.raises(ConfigError, match="names repeat"):
        layouts_of([pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])])
    with pytest.raises(ConfigError, match="column 'x' are permuted"):
        layout_of(tensors((1, 2, 3, 4), [2, 0, 1]))
