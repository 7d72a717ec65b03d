"""What a transform returned, as Arrow columns; and a later block's columns cast to the first block's schema.

Columns keep their dtype. Arrays and tensors are taken over without a copy and without a Python object
per row: 1-d becomes a primitive column, 2-d a ``FixedSizeList(width)``, n-d a ``fixed_shape_tensor``
extension column. Boolean arrays of any rank keep the Arrow type ``bool``, so they are packed to bits
(one copy) and come back as booleans. Because nothing is copied, a transform must hand out a fresh array
at every call: one that refills and returns the same buffer overwrites rows already returned.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_lance_stream.errors import TransformError, explain


class OutputError(Exception):
    """What a transform returned cannot become a block; users see it as a TransformError with a name."""


def _bad(what: str, found: object, expected: str, remedy: str) -> OutputError:
    return OutputError(explain(what, found=found, expected=expected, remedy=remedy))


@functools.lru_cache(maxsize=256)
def _is_tensor_type(kind: type) -> bool:
    # By name, since this layer must not import torch; by ancestors, for the sake of tv_tensors and the like.
    return any(c.__module__ == "torch" and c.__name__ == "Tensor" for c in kind.__mro__)


def _is_tensor(value: object) -> bool:
    kind: Any = type(value)
    return _is_tensor_type(kind)


def _as_array(name: str, value: Any) -> Any:
    """Returns a tensor as an ndarray of the same memory, a 0-d array as a scalar, all else as it is."""
    if _is_tensor(value):
        try:
            value = value.detach().cpu().numpy()
        except (TypeError, RuntimeError) as exc:
            what = f"A tensor of column {name!r} has no numpy form"
            remedy = "convert it in the transform, bfloat16 with .float() for example"
            raise _bad(what, exc, "a dense tensor of a dtype numpy knows", remedy) from exc
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


def to_table(output: Any, rows: int) -> pa.Table:
    """Returns what a transform returned for ``rows`` rows as a table of ``rows`` rows, without metadata.

    Args:
        output: A table, record batch or data frame; a dict of columns; the one column ``value`` as an array
            or a tensor; or an iterable of one dict or one value per row.
        rows: Rows of the batch the transform was called with.

    Raises:
        OutputError: The output cannot become such a table. Errors of a lazy output pass through.
    """
    if isinstance(output, Mapping):
        table = _from_columns(output, rows)
    elif isinstance(output, (pa.Array, pa.ChunkedArray, np.ndarray)) or _is_tensor(output):
        table = _from_columns({"value": output}, rows)
    elif isinstance(output, pa.Table):
        table = output
    elif isinstance(output, pa.RecordBatch):
        table = pa.Table.from_batches([output])
    elif hasattr(output, "__arrow_c_stream__"):  # data frames of pandas and polars, among others
        table = pa.table(output)
    elif isinstance(output, (str, bytes)) or not hasattr(output, "__iter__"):
        what, expected = "It is neither columns nor rows", "a table, a dict of columns, or one item per row"
        raise _bad(what, type(output).__name__, expected, "return one of these")
    else:
        table = _from_columns(_rows_to_columns(list(output), rows), rows)
    if len(set(table.column_names)) < table.num_columns:
        raise _bad("Column names repeat", table.column_names, "distinct names", "rename columns")
    _check_rows("It", table.num_rows, rows)
    return table.replace_schema_metadata(None)


def _check_rows(what: str, found: int, rows: int) -> None:
    if found != rows:
        remedy = "return one output row per input row; leave rows out with filter= or on_transform_error"
        raise _bad(f"{what} has {found} row{'s' * (found != 1)} for a batch of {rows}", found, f"{rows} rows", remedy)


def _rows_to_columns(items: list[Any], rows: int) -> Mapping[Any, list[Any]]:
    _check_rows("It", len(items), rows)
    if not any(isinstance(item, Mapping) for item in items):
        return {"value": items} if items else {}
    if not isinstance(items[0], Mapping):
        found, remedy = type(items[0]).__name__, "return dicts for all rows, or for none"
        raise _bad("Some rows are dicts, row 0 is not", found, "rows of one form", remedy)
    for row, item in enumerate(items):
        if not isinstance(item, Mapping) or item.keys() != items[0].keys():
            kind: object = sorted(map(str, item)) if isinstance(item, Mapping) else type(item).__name__
            expected = f"a dict with the keys {sorted(map(str, items[0]))}, as in row 0"
            remedy = "return the same keys for every row, with None where a value is missing"
            raise _bad(f"Row {row} differs from row 0", kind, expected, remedy)
    return {name: [item[name] for item in items] for name in items[0]}


def _from_columns(columns: Mapping[Any, Any], rows: int) -> pa.Table:
    arrays: dict[str, pa.Array[Any] | pa.ChunkedArray[Any]] = {}
    for name, values in columns.items():
        if not isinstance(name, str):
            raise _bad("A column name is not text", repr(name), "str keys", "name the columns with strings")
        arrays[name] = _column(name, values)
        _check_rows(f"Column {name!r}", len(arrays[name]), rows)
    return pa.table(arrays)


def _column(name: str, values: Any) -> pa.Array[Any] | pa.ChunkedArray[Any]:
    values = _as_array(name, values)
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if isinstance(values, np.ndarray):
        return _from_ndarray(name, values)
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        remedy = "return a list, an array or a tensor with one entry per row"
        raise _bad(f"Column {name!r} is a single value", type(values).__name__, "one value per row", remedy)
    cells = [_as_array(name, value) for value in values]
    if any(isinstance(cell, np.ndarray) for cell in cells):
        return _stack(name, cells)
    return _from_objects(name, cells)


def _stack(name: str, cells: list[Any]) -> pa.Array[Any]:
    """Returns rows that are arrays, or None, as one column: of fixed shape where all shapes are equal."""
    present = [c for c in cells if c is not None]
    kinds: set[Any] = {c.dtype if isinstance(c, np.ndarray) else type(c).__name__ for c in present}
    if len(kinds) > 1:
        # Promotion would make the type of a column depend on which rows happen to share a batch.
        what = f"Rows of column {name!r} mix types"
        remedy = "cast to one dtype in the transform"
        raise _bad(what, sorted(map(str, kinds)), "arrays of one dtype, or None", remedy)
    shapes = {c.shape for c in present}
    valid = np.array([c is not None for c in cells])
    if len(shapes) == 1:
        if len(present) == len(cells):
            return _from_ndarray(name, np.stack(cells))
        stacked = np.zeros((len(cells), *present[0].shape), present[0].dtype)
        stacked[valid] = present
        return _from_ndarray(name, stacked, valid)
    if any(len(shape) != 1 for shape in shapes):
        expected = "one shape for all rows; only 1-d rows may differ in length"
        remedy = "pad or resize in the transform, or return flat arrays and the shape as a second column"
        raise _bad(f"Rows of column {name!r} differ in shape", sorted(shapes)[:4], expected, remedy)
    ends = np.cumsum([0, *(0 if c is None else len(c) for c in cells)])
    flat = _from_ndarray(name, np.concatenate(present))
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), flat, mask=pa.array(~valid))


def _from_ndarray(name: str, array: NDArray[Any], valid: NDArray[np.bool_] | None = None) -> pa.Array[Any]:
    """Returns (rows, *shape) as a column over the same memory; rows that are not ``valid`` are null."""
    if array.dtype.kind in "OSUV":
        return _from_objects(name, [c if valid is None or valid[i] else None for i, c in enumerate(array.tolist())])
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    try:
        flat: pa.Array[Any] = pa.array(array.reshape(-1))
    except pa.ArrowException as exc:
        raise _unsupported(name, f"an array of dtype {array.dtype} ({exc})") from exc
    if array.ndim == 1:
        return flat
    validity = None if valid is None else pa.array(valid).buffers()[1]
    # from_buffers, because FixedSizeListArray.from_arrays cannot tell the row count of empty rows.
    list_type = pa.list_(flat.type, math.prod(array.shape[1:]))
    storage: pa.Array[Any] = pa.Array.from_buffers(list_type, len(array), [validity], children=[flat])
    if array.ndim == 2:
        return storage
    kind: Any = pa.fixed_shape_tensor(flat.type, array.shape[1:])
    return cast("pa.Array[Any]", pa.ExtensionArray.from_storage(kind, storage))


def _from_objects(name: str, cells: list[Any]) -> pa.Array[Any]:
    try:
        return cast("pa.Array[Any]", pa.array(cells))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
        for row, cell in enumerate(cells):
            try:
                pa.array([cell])
            except Exception:
                raise _unsupported(name, f"{type(cell).__name__} in row {row} ({exc})") from exc
        kinds = sorted({type(c).__name__ for c in cells})
        raise _unsupported(name, f"rows of types {', '.join(kinds)} ({exc})") from exc


def _unsupported(name: str, found: str) -> OutputError:
    expected = "numbers, text, bytes, dates, arrays, tensors, or lists and dicts of these, alike in all rows"
    remedy = "convert in the transform, an image with numpy.asarray(image) for example"
    return _bad(f"Column {name!r} holds values that cannot be stored", found, expected, remedy)


# --- Later blocks to the schema of the first ---------------------------------------------------------------


def cast_to(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns ``table`` with exactly ``schema``, its columns in that order.

    Only casts that keep every value are made: none that overflows, truncates, rounds a float, reads numbers
    from text, or changes the shape of a row. A table of no rows and no columns becomes an empty one.

    Raises:
        TransformError: A column is missing, is not in ``schema``, or does not fit; the message names it.
    """
    try:
        return _cast_table(table, schema)
    except OutputError as exc:
        raise TransformError(str(exc)) from exc.__cause__


def _cast_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    if table.schema.equals(schema, check_metadata=True):
        return table
    if not table.num_rows and not table.num_columns:
        return pa.Table.from_batches([], schema=schema)  # empty_table() fails for some tensor types
    have, want = set(table.column_names), set(schema.names)
    for verb, names in (("lacks", want - have), ("adds", have - want)):
        if names:
            what = f"A block {verb} the column " + ", ".join(map(repr, sorted(names)))
            remedy = "return the same columns for every batch"
            raise _bad(what, table.column_names, f"the columns {schema.names}", remedy)
    return pa.Table.from_arrays([_cast_column(field, table.column(field.name)) for field in schema], schema=schema)


def _cast_column(field: pa.Field[Any], column: pa.ChunkedArray[Any]) -> pa.ChunkedArray[Any]:
    if column.type == field.type:
        return column
    try:
        chunks = [_cast_array(chunk, field.type) for chunk in column.chunks]
    except (pa.ArrowException, ValueError) as exc:
        what = f"Column {field.name!r} of a block does not fit the type the first block gave it"
        expected = f"{field.type}, or what casts to it without loss"
        remedy = "return one dtype and shape always, and Python lists for rows that differ in length"
        raise _bad(what, f"{column.type} ({exc})", expected, remedy) from exc
    return pa.chunked_array(chunks, type=field.type)


def _cast_array(array: Any, target: Any) -> Any:
    source = array.type
    if pa.types.is_null(source):
        return pa.nulls(len(array), target)
    if isinstance(source, pa.BaseExtensionType) or isinstance(target, pa.BaseExtensionType):
        if _shape(source) != _shape(target):
            raise ValueError("another shape or extension type")
        return pa.ExtensionArray.from_storage(target, _cast_array(array.storage, target.storage_type))
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        if [f.name for f in source] != [f.name for f in target]:
            raise ValueError("other fields")
        children = [_cast_array(array.field(i), field.type) for i, field in enumerate(target)]
        return pa.StructArray.from_arrays(children, fields=list(target), mask=array.is_null())
    leaves = _leaf(source), _leaf(target)
    if not pa.types.is_null(leaves[0]) and _family(leaves[0]) != _family(leaves[1]):
        raise ValueError(f"{leaves[0]} is no {leaves[1]}")
    result = array.cast(target)
    if pa.types.is_floating(leaves[1]) and not pa.types.is_null(leaves[0]):
        # Arrow's safe cast lets floats overflow and lose digits.
        before = _values(array).to_numpy(zero_copy_only=False)
        after = _values(result).cast(leaves[0], safe=False).to_numpy(zero_copy_only=False)
        if not np.array_equal(before, after, equal_nan=True):
            raise ValueError("values would change")
    return result


def _shape(kind: pa.DataType) -> tuple[Any, ...] | None:
    """Returns the row shape of a tensor type, another extension type itself, None for a plain type."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape), tuple(kind.permutation or range(len(kind.shape)))
    return (kind,) if isinstance(kind, pa.BaseExtensionType) else None


def _leaf(kind: pa.DataType) -> pa.DataType:
    while (inner := getattr(kind, "value_type", None)) is not None:
        kind = inner
    return kind


def _family(kind: pa.DataType) -> object:
    t = pa.types
    if t.is_integer(kind) or t.is_floating(kind):
        return "number"
    if t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind):
        return "text"
    # Nested types within lists must be equal: Arrow would fill missing fields in, and narrow floats.
    return kind if t.is_nested(kind) else kind.id


def _values(array: Any) -> Any:
    while hasattr(array, "flatten") and getattr(array.type, "value_type", None) is not None:
        array = array.flatten()
    return array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array
