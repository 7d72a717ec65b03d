"""The user's transform: how it is called, what it may return, and how that becomes Arrow columns.

Columns keep their dtype. Arrays and tensors are taken over without a copy and without a Python object
per row: 1-d becomes a primitive column, 2-d a ``FixedSizeList(width)``, n-d a ``fixed_shape_tensor``
extension column. Boolean arrays of any rank keep the Arrow type ``bool``, so they are packed to bits
(one copy) and come back as booleans. Because nothing is copied, a transform must hand out a fresh array
at every call: one that refills and returns the same buffer overwrites rows already returned.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import os
import struct
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.random.bit_generator import ISpawnableSeedSequence
from numpy.typing import DTypeLike, NDArray

from ray_lance_stream.errors import ConfigError, TransformError, explain

_PACK_ROW = struct.Struct("<Q3q").pack
_CONTEXT_NAMES = ("ctx", "context")


class _RowSeed(ISpawnableSeedSequence):
    """A seed sequence that is one 128-bit key.

    It costs a quarter of numpy's own and, unlike ``Philox(key=...)`` whose seed sequence holds entropy
    of the operating system, makes ``generator.spawn()`` repeatable as well.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._children = 0

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[Any]:
        """Returns ``n_words`` words of ``dtype``; the two 64-bit words of a Philox are the key itself."""
        size = n_words * np.dtype(dtype).itemsize
        raw = self._key if size == len(self._key) else hashlib.shake_256(self._key).digest(size)
        return np.frombuffer(raw, dtype=dtype)

    def spawn(self, n_children: int) -> list[_RowSeed]:
        """Returns the next ``n_children`` seeds derived from this one; their order is their identity."""
        first, self._children = self._children, self._children + n_children
        packed = (struct.pack("<Q", first + i) for i in range(n_children))
        return [_RowSeed(hashlib.blake2b(p, key=self._key, digest_size=16).digest()) for p in packed]


@dataclass(frozen=True, kw_only=True, eq=False)
class TransformContext:
    """What a transform may know about the rows of its batch.

    Attributes:
        epoch: Epoch these rows belong to.
        row_numbers: (rows,) row number of each row in the table version.
        splits: (rows,) split of each row.
        positions: (rows,) position of each row inside its split.
        seed: The stream's seed; taken modulo 2**64.
    """

    epoch: int
    row_numbers: NDArray[np.int64]
    splits: NDArray[np.int64]
    positions: NDArray[np.int64]
    seed: int

    def __post_init__(self) -> None:
        arrays = (self.row_numbers, self.splits, self.positions)
        if any(a.dtype != np.int64 or a.shape != (len(self.row_numbers),) for a in arrays):
            found = ", ".join(f"{a.dtype}{a.shape}" for a in arrays)
            what = "row_numbers, splits and positions of a TransformContext do not fit together"
            expected = "three int64 arrays of one shape (rows,)"
            raise ConfigError(explain(what, found=found, expected=expected, remedy="pass one entry per row"))

    def __len__(self) -> int:
        return len(self.row_numbers)

    def generator(self, row: int) -> np.random.Generator:
        """Returns the generator of one row: a Philox, the same after a retry, a resume, another block size.

        Its 128-bit key is the 16-byte blake2b digest of seed (unsigned), epoch, split and position (signed),
        each 8 bytes, little endian. Every call starts the stream of the row anew.
        """
        where = (self.epoch, int(self.splits[row]), int(self.positions[row]))
        packed = _PACK_ROW(self.seed & 0xFFFF_FFFF_FFFF_FFFF, *where)
        # Any: numpy takes every ISeedSequence, its type stubs name SeedSequence only.
        seed: Any = _RowSeed(hashlib.blake2b(packed, digest_size=16).digest())
        return np.random.Generator(np.random.Philox(seed))

    def generators(self) -> Iterator[np.random.Generator]:
        """Yields the generator of each row, in row order."""
        return map(self.generator, range(len(self)))

    def slice(self, start: int, length: int = 1) -> TransformContext:
        """Returns the context of rows ``start .. start + length - 1`` alone."""
        part = np.s_[start : start + length]
        rows = {"row_numbers": self.row_numbers[part], "splits": self.splits[part]}
        return TransformContext(epoch=self.epoch, seed=self.seed, positions=self.positions[part], **rows)


class Transform:
    """Picklable wrapper of the user's callable; at most one thread of a process is inside it at a time.

    Args:
        fn: A function ``fn(batch)`` or ``fn(batch, ctx)``, an object that can be called so, or a class (or a
            ``functools.partial`` of one) whose instances can: it is built once per process, at first use.

    Raises:
        ConfigError: ``fn`` cannot be called in either way, or the class needs constructor arguments.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        target = fn.func if isinstance(fn, functools.partial) else fn
        self.name: str = getattr(target, "__qualname__", None) or type(target).__qualname__
        self._fn = fn
        self._is_class = isinstance(target, type) and any("__call__" in vars(c) for c in target.__mro__)
        if not callable(fn) or (isinstance(fn, type) and not self._is_class):
            raise self._cannot_call(f"{fn!r}, which is not callable")
        self._context = self._context_parameter(target)
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._instance: Callable[..., Any] | None = None if self._is_class else self._fn

    def __getstate__(self) -> dict[str, Any]:
        # A lock cannot travel, and every process builds its own instance.
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_instance")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def _cannot_call(self, found: str) -> ConfigError:
        expected = "a callable (batch) or (batch, ctx), or a class of such callables built without arguments"
        remedy = "bind further arguments with functools.partial"
        what = f"Transform {self.name} cannot be called"
        return ConfigError(explain(what, found=found, expected=expected, remedy=remedy))

    def _context_parameter(self, target: Any) -> str | None:
        """Returns how the context is passed: None not at all, "" as second argument, else by this name."""
        try:
            if self._is_class:
                inspect.signature(self._fn).bind()
                call = inspect.signature(target.__call__)
                signature = call.replace(parameters=list(call.parameters.values())[1:])  # without self
            else:
                signature = inspect.signature(self._fn)
        except ValueError:  # a builtin that does not tell its signature
            return None
        except TypeError as exc:
            raise self._cannot_call(f"a class whose constructor says: {exc}") from exc
        bound = self._fn.keywords if isinstance(self._fn, functools.partial) and not self._is_class else {}
        style = _context_style(signature, bound)
        try:
            signature.bind(*([None, None] if style == "" else [None]), **({style: None} if style else {}))
        except TypeError as exc:
            raise self._cannot_call(f"the signature {signature} ({exc})") from exc
        return style

    def validate_picklable(self, dumps: Callable[[object], bytes]) -> None:
        """Checks that prefetchers can receive the transform, with the ``dumps`` that will send it.

        Raises:
            ConfigError: ``dumps`` fails; the message names the transform and the cause.
        """
        try:
            dumps(self)
        except Exception as exc:
            what = f"Transform {self.name} cannot be sent to the prefetchers"
            expected = "a picklable transform"
            remedy = "open files, locks and connections inside a callable class, which every process builds"
            raise ConfigError(explain(what, found=_text(exc), expected=expected, remedy=remedy)) from exc

    def __call__(self, batch: pa.RecordBatch, ctx: TransformContext) -> pa.Table:
        """Runs the transform on a batch and returns its output as a table with as many rows.

        Raises:
            TransformError: The user's code raised (chained), or its output cannot become a block.
        """
        # The output is converted under the lock as well: a lazy one runs the user's code while it is read.
        with self._lock:
            try:
                return _to_table(self._call(batch, ctx), batch.num_rows)
            except _OutputError as exc:
                raise TransformError(f"Output of transform {self.name}: {exc}") from exc.__cause__
            except Exception as exc:
                raise self._failed(exc, batch.num_rows) from exc

    def _failed(self, exc: Exception, rows: int) -> TransformError:
        expected = f"an output for the {rows} rows of the batch"
        remedy = "correct the transform, or choose with on_transform_error which rows may be left out"
        what = f"Transform {self.name} failed"
        return TransformError(explain(what, found=_text(exc), expected=expected, remedy=remedy))

    def _call(self, batch: pa.RecordBatch, ctx: TransformContext) -> Any:
        if self._instance is None:
            self._instance = self._fn()
        if self._context == "":
            return self._instance(batch, ctx)
        return self._instance(batch, **({self._context: ctx} if self._context else {}))


def _context_style(signature: inspect.Signature, bound: Mapping[str, Any]) -> str | None:
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    second = positional[1] if len(positional) > 1 else None
    if second is not None and (second.default is second.empty or second.name in _CONTEXT_NAMES):
        return ""
    by_name = [p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return next((name for name in by_name if name in _CONTEXT_NAMES and name not in bound), None)


def _text(exc: BaseException) -> str:
    """Returns an exception as text with its last three frames: it must survive the way to another process."""
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if f.filename != __file__][-3:]
    where = ", ".join(f"{os.path.basename(f.filename)}:{f.lineno} in {f.name}" for f in frames)
    return f"{type(exc).__name__}: {exc}" + (f" (at {where})" if where else "")


# --- Output to columns ------------------------------------------------------------------------------------


class _OutputError(Exception):
    """What a transform returned cannot become a block; callers see it as a TransformError with a name."""


def _bad(what: str, found: object, expected: str, remedy: str) -> _OutputError:
    return _OutputError(explain(what, found=found, expected=expected, remedy=remedy))


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


def _to_table(output: Any, rows: int) -> pa.Table:
    """Returns what a transform returned for ``rows`` rows as a table of ``rows`` rows, without metadata."""
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
        raise _bad(f"{what} has {found} rows for a batch of {rows}", found, f"{rows} rows", remedy)


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
        cells = [c if valid is None or valid[i] else None for i, c in enumerate(array.tolist())]
        return _from_objects(name, cells)
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


def _unsupported(name: str, found: str) -> _OutputError:
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
    except _OutputError as exc:
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
    columns = [_cast_column(field, table.column(field.name)) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


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
