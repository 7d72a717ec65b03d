"""What a transform may return, which columns it becomes, and which later blocks fit the first one."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ray_lance_stream import collate
from ray_lance_stream.columns import OutputError, cast_to, to_table
from ray_lance_stream.errors import TransformError

ROWS = 4
BATCH = pa.record_batch({"n": pa.array(range(ROWS)), "f": pa.array([0.5, 1.5, 2.5, 3.5], pa.float32())})


def made(output: Any, rows: int = ROWS) -> pa.Table:
    """Returns the columns of what a transform returned for ``rows`` rows."""
    return to_table(output, rows)


# --- Output -----------------------------------------------------------------------------------------------


def test_tables_batches_and_data_frames_are_taken_as_they_are() -> None:
    table = pa.table(BATCH).replace_schema_metadata({"a": "b"})
    for output in (BATCH, table, BATCH.to_pandas()):
        got = made(output)
        assert got.schema.equals(BATCH.schema, check_metadata=True) and got.equals(pa.table(BATCH))


def test_columns_may_be_arrays_tensors_lists_and_arrow() -> None:
    image = np.arange(ROWS * 6, dtype=np.uint8).reshape(ROWS, 2, 3)
    got = made(
        {
            "image": image,
            "vector": torch.arange(ROWS * 2.0, requires_grad=True).reshape(ROWS, 2),
            "half": np.arange(ROWS, dtype=np.float16),
            "mask": image % 2 == 0,
            "bits": torch.tensor([[True, False]] * ROWS),
            "flag": np.array([True, False] * 2),
            "text": ["a", None, "c", "d"],
            "raw": [b"a"] * ROWS,
            "nested": [[1], [], None, [2, 3]],
            "arrow": pa.array(range(ROWS), pa.int8()),
            "chunked": pa.chunked_array([[1, 2], [3, 4]]),
            "names": np.array(["x", "yy", "z", ""]),
            "when": np.array(["2020-01-01"] * ROWS, "M8[s]"),
            "range": range(ROWS),
            "big_endian": np.arange(ROWS, dtype=">i4"),
            "masked": np.ma.masked_array(np.arange(ROWS * 2.0).reshape(ROWS, 2), [[False, True]] * ROWS),
            "scalars": [np.float32(1), np.float32(2), np.float32(3), np.float32(4)],
            "zero_d": [torch.tensor(1), torch.tensor(2), torch.tensor(3), torch.tensor(4)],
        }
    )
    types = {name: str(got.schema.field(name).type) for name in got.column_names}
    assert got.schema.field("image").type == pa.fixed_shape_tensor(pa.uint8(), (2, 3))
    assert got.schema.field("mask").type == pa.fixed_shape_tensor(pa.bool_(), (2, 3))
    want = "halffloat bool string binary list<item: int64> int8 string timestamp[s] int64 int32 float int64"
    names = ["half", "flag", "text", "raw", "nested", "arrow", "names", "when", "range", "big_endian"]
    assert " ".join(types[name] for name in [*names, "scalars", "zero_d"]) == want
    assert types["vector"] == "fixed_size_list<item: float>[2]"
    assert types["bits"] == "fixed_size_list<item: bool>[2]"
    assert got["masked"].to_pylist()[1] == [2.0, None]
    batch = collate.to_numpy([got])
    assert np.array_equal(batch["image"], image) and np.array_equal(batch["mask"], image % 2 == 0)
    assert batch["zero_d"].tolist() == [1, 2, 3, 4] and batch["text"].tolist() == ["a", None, "c", "d"]


@settings(max_examples=50, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from(["u1", "i2", "u4", "i8", "f2", "f4", "f8", "?"]),
        hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4),
    ),
    st.booleans(),
)
def test_arrays_come_back_as_they_were(array: np.ndarray[Any, Any], fortran: bool) -> None:
    if fortran:
        array = np.asfortranarray(array)
    for output in (array, torch.from_numpy(array), list(array)):
        got = collate.to_numpy([made(output, len(array))])
        if len(array):
            assert got["value"].dtype == array.dtype
            np.testing.assert_array_equal(got["value"], array)


class Image(torch.Tensor):
    """A tensor class of another package."""


def test_subclasses_of_tensor_are_tensors() -> None:
    images = torch.zeros(ROWS, 2, 3).as_subclass(Image)
    for output in (images, list(images)):
        assert str(made(output).schema.field("value").type).startswith(("extension", "fixed_size_list"))


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 8), (ROWS, 2, 4)])
def test_arrays_and_tensors_are_not_copied(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)
    for output in ({"x": array}, {"x": torch.from_numpy(array)}):
        view = collate.to_numpy([made(output)], copy=False)["x"]
        assert view.shape == shape and np.shares_memory(view, array)


def test_rows_may_be_dicts_or_single_values() -> None:
    vector = np.zeros(3, np.float32)
    rows = [{"x": vector, "y": i, "z": torch.zeros(2, 2), "s": f"{i}"} for i in range(ROWS)]
    got = made(iter(rows))
    assert str(got.schema.field("x").type) == "fixed_size_list<item: float>[3]"
    assert got.schema.field("z").type == pa.fixed_shape_tensor(pa.float32(), (2, 2))
    assert got["y"].to_pylist() == [0, 1, 2, 3] and got["s"].to_pylist() == ["0", "1", "2", "3"]
    assert made(["a", "b", "c", "d"])["value"].to_pylist() == ["a", "b", "c", "d"]
    kind = made([np.zeros((2, 2))] * ROWS).schema.field("value").type
    assert kind == pa.fixed_shape_tensor(pa.float64(), (2, 2))
    assert made(np.arange(ROWS))["value"].to_pylist() == [0, 1, 2, 3]
    assert made(pa.array(range(ROWS)))["value"].to_pylist() == [0, 1, 2, 3]


def test_missing_and_unequal_rows() -> None:
    one = np.ones(2, np.float32)
    lists, images = [one, one[:1], None, one[:0]], [np.ones((2, 2))] * 3 + [None]
    got = made({"x": [one, None, one, one], "l": lists, "i": images})
    assert got["x"].to_pylist() == [[1, 1], None, [1, 1], [1, 1]]
    assert str(got.schema.field("l").type) == "list<item: float>"
    assert got["l"].to_pylist() == [[1, 1], [1], None, []]
    assert np.isnan(collate.to_numpy([got])["i"][3]).all()


def test_no_rows() -> None:
    empty = BATCH.slice(0, 0)
    outputs: list[Any] = [[], {}, pa.table({}), {"a": []}, {"a": np.empty((0, 2, 3), np.uint8)}, empty]
    for output in outputs:
        assert made(output, 0).num_rows == 0
    tensor = made({"a": np.empty((0, 2, 3), np.uint8)}, 0)
    assert tensor.schema.field("a").type == pa.fixed_shape_tensor(pa.uint8(), (2, 3))


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ([1, 2, 3], "has 3 rows for a batch of 4"),
        ({"x": np.zeros((5, 2))}, "Column 'x' has 5 rows for a batch of 4"),
        ({}, "has 0 rows for a batch of 4"),
        (pa.table({"a": [1]}), "has 1 row for a batch of 4"),
        ("abcd", "Found: str"),
        (None, "Found: NoneType"),
        ({"x": 3}, "Column 'x' is a single value"),
        ({"x": np.float32(3)}, "Column 'x' is a single value"),
        ({"x": "abcd"}, "Column 'x' is a single value"),
        ({3: [1] * 4}, "column name is not text"),
        ({"x": [1, 2, object(), 4]}, "Column 'x' holds values that cannot be stored.*object in row 2"),
        ({"x": [1, 2, "a", 4]}, "Column 'x' holds values.*int, str"),
        ({"x": np.zeros(4, complex)}, "Column 'x' holds values.*complex128"),
        ({"x": [[1], ["a", object()], [2], [3]]}, "Column 'x' holds values.*list in row 1"),
        ({"x": torch.zeros(4, dtype=torch.bfloat16)}, "tensor of column 'x' has no numpy form.*float"),
        ([np.zeros((2, i + 1)) for i in range(4)], "'value' differ in shape.*only 1-d"),
        ([np.zeros(2), np.zeros(2, np.float32)] * 2, "'value' mix types.*float32"),
        ([np.zeros(2), [1, 2]] * 2, "'value' mix types.*list"),
        ([{"a": 1}, {"b": 1}, {"a": 1}, {"a": 1}], "Row 1 differs from row 0.*'b'.*'a'"),
        ([{"a": 1}, 2, 3, 4], "Row 1 differs from row 0.*int"),
        ([1, {"a": 1}, 3, 4], "Some rows are dicts"),
        (pa.Table.from_arrays([pa.array(range(4))] * 2, names=["a", "a"]), "names repeat"),
    ],
)
def test_output_that_makes_no_block_is_refused(output: Any, found: str) -> None:
    with pytest.raises(OutputError, match=found):
        made(output)


# --- Schema -----------------------------------------------------------------------------------------------


def fits(column: Any, kind: Any) -> list[Any]:
    """Casts one column to a type and returns its values."""
    got = cast_to(pa.table({"x": column}), pa.schema([("x", kind)]))
    assert got.schema.field("x").type == kind
    values: list[Any] = got["x"].to_pylist()
    return values


def tensors(dtype: str, *shape: int) -> Any:
    return made({"x": np.ones((ROWS, *shape), dtype)})["x"]


def test_a_block_is_cast_to_the_schema() -> None:
    fields: list[Any] = [("b", pa.int32()), ("a", pa.large_string())]
    schema = pa.schema(fields, metadata={"k": "v"})
    got = cast_to(pa.table({"a": ["x"], "b": [1]}), schema)
    assert got.schema.equals(schema, check_metadata=True) and got.to_pylist() == [{"b": 1, "a": "x"}]
    assert cast_to(got, schema) is got
    tensor: Any = pa.fixed_shape_tensor(pa.float32(), (2, 3))
    assert fits(pa.array([1, 2]), pa.float32()) == [1.0, 2.0]
    assert fits(pa.array([0.5, None, float("inf")]), pa.float16()) == [0.5, None, float("inf")]
    assert np.isnan(fits(pa.array([float("nan")]), pa.float32())[0])
    assert fits(pa.array(["a", "b"]).dictionary_encode(), pa.string()) == ["a", "b"]
    assert fits(pa.array([[1, 2], None]), pa.list_(pa.float32(), 2)) == [[1.0, 2.0], None]
    assert fits(pa.array([[1.0], [2.0]], pa.list_(pa.float64(), 1)), pa.list_(pa.float32())) == [[1.0], [2.0]]
    kinds: list[Any] = [pa.int64(), pa.list_(pa.float32(), 2), tensor]
    for kind in kinds:
        assert fits(pa.nulls(2), kind) == [None, None]
    assert len(fits(tensors("f8", 2, 3), tensor)) == ROWS
    assert fits(pa.array([[]]), pa.list_(pa.int8())) == [[]]
    schema = pa.schema([("x", tensor)])
    assert cast_to(pa.table({}), schema).schema == schema
    assert fits(pa.array([], pa.float64()), pa.float32()) == []


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([300]), pa.int8()),
        (pa.array([-1]), pa.uint64()),
        (pa.array([1.5]), pa.int64()),
        (pa.array([1e300]), pa.float32()),
        (pa.array([0.1]), pa.float32()),
        (pa.array([2**53 + 1]), pa.float64()),
        (pa.array([2**20]), pa.float16()),
        (pa.array([[0.1]]), pa.list_(pa.float32())),
        (pa.array([1]), pa.string()),
        (pa.array(["1"]), pa.int64()),
        (pa.array([True]), pa.int64()),
        (pa.array([[1], [2, 3]]), pa.list_(pa.int64(), 2)),
        (pa.array([1]), pa.list_(pa.int64(), 1)),
        (pa.array([b"\xff"]), pa.string()),
        (tensors("f4", 2, 3), pa.fixed_shape_tensor(pa.float32(), (3, 2))),
        (tensors("f4", 2, 3), pa.list_(pa.float32(), 6)),
        (tensors("f4", 6), pa.fixed_shape_tensor(pa.float32(), (2, 3))),
        (pa.array([datetime.datetime(2020, 1, 1, 5)]), pa.date32()),
        (pa.array([1]), pa.null()),
    ],
    ids=range(19),
)
def test_a_cast_that_would_change_values_is_refused(column: Any, kind: Any) -> None:
    with pytest.raises(TransformError, match="Column 'x' of a block does not fit"):
        fits(column, kind)


def test_structs_are_cast_field_by_field() -> None:
    kind = pa.struct([("a", pa.float32()), ("b", pa.string())])
    column = pa.array([{"a": 9, "b": "no"}, {"a": 1, "b": "x"}, None, {"a": None, "b": None}])
    assert fits(column.slice(1), kind) == [{"a": 1.0, "b": "x"}, None, {"a": None, "b": None}]
    assert fits(pa.array([{"a": 0.5, "b": None}]), kind) == [{"a": 0.5, "b": None}]
    wrong: list[Any] = [[{"a": 0.1, "b": "x"}], [{"a": 1.0}], [{"a": 1.0, "b": 2}], [1.0]]
    for rows in wrong:
        with pytest.raises(TransformError, match="Column 'x' of a block does not fit"):
            fits(pa.array(rows), kind)
    with pytest.raises(TransformError, match="Column 'x' of a block does not fit"):
        fits(pa.array([[{"a": 0.1}]]), pa.list_(pa.struct([("a", pa.float32())])))


def test_missing_and_extra_columns_are_named() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64())])
    with pytest.raises(TransformError, match="lacks the column 'b'"):
        cast_to(pa.table({"a": [1]}), schema)
    with pytest.raises(TransformError, match="adds the column 'c'"):
        cast_to(pa.table({"a": [1], "b": [1], "c": [1]}), schema)
