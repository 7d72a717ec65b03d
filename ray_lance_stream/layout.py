"""Where the values of a column lie in a block: the layout of each column, and views of its chunks.

Nothing is copied that can be seen in place: only booleans, which are bits in Arrow, and columns with nulls
get memory of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_lance_stream.errors import ConfigError, explain

_OBJECT = np.dtype(object)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the rows of one column lie in memory.

    Attributes:
        name: Name of the column.
        index: Its index in the schema.
        kind: "fixed", all rows have one shape; "ragged", a row is any number of items of one shape; "object".
        decode: Whether the column is dictionary encoded.
        dtype: Of the values ("object": of no meaning).
        widths: Number of children per parent at each level of fixed-size lists.
        shape: Shape of one row or item as stored; its product is that of ``widths``.
        axes: Transposition of (rows, *shape), or None for none.
    """

    name: str
    index: int
    kind: Literal["fixed", "ragged", "object"]
    decode: bool = False
    dtype: np.dtype[Any] = _OBJECT
    widths: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    axes: tuple[int, ...] | None = None

    @cached_property
    def is_tensor(self) -> bool:
        """Whether torch has a tensor for these values."""
        return self.kind != "object" and self.dtype.kind not in "mM"

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row or item as the user sees it."""
        return self.shape if self.axes is None else tuple(self.shape[axis - 1] for axis in self.axes[1:])


def _refuse(what: str, found: object, expected: str, remedy: str) -> ConfigError:
    return ConfigError(explain(what, found=found, expected=expected, remedy=remedy))


# The newest few. A list, since to compare with all of them costs less than to hash a schema once.
_known: list[tuple[pa.Schema, tuple[Layout, ...]]] = []
_MAX_KNOWN = 8


def _layouts(schema: pa.Schema) -> tuple[Layout, ...]:
    for known, layouts in _known:
        if known.equals(schema):
            return layouts
    if len(set(schema.names)) < len(schema.names):
        raise _refuse("Column names repeat", schema.names, "distinct names", "rename columns")
    layouts = tuple(_layout(field.name, index, field.type) for index, field in enumerate(schema))
    _known.insert(0, (schema, layouts))
    del _known[_MAX_KNOWN:]
    return layouts


def _layout(name: str, index: int, kind: Any) -> Layout:
    decode = pa.types.is_dictionary(kind)
    if decode:
        kind = kind.value_type
    ragged = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    widths: list[int] = []
    shape: list[int] = []
    axes: list[int] = [0]
    leaf: Any = kind.value_type if ragged else kind
    while True:
        if isinstance(leaf, pa.FixedShapeTensorType):
            axes += [len(axes) + axis for axis in _permutation(leaf, name)]
            shape += leaf.shape
            widths.append(math.prod(leaf.shape))
            leaf = leaf.value_type
        elif isinstance(leaf, pa.BaseExtensionType):
            leaf = leaf.storage_type
        elif pa.types.is_fixed_size_list(leaf):
            axes.append(len(axes))
            shape.append(leaf.list_size)
            widths.append(leaf.list_size)
            leaf = leaf.value_type
        else:
            break
    dtype = _dtype(leaf)
    if dtype is None:
        return Layout(name=name, index=index, kind="object", decode=decode)
    return Layout(
        name=name,
        index=index,
        kind="ragged" if ragged else "fixed",
        decode=decode,
        dtype=dtype,
        widths=tuple(widths),
        shape=tuple(shape),
        axes=None if axes == sorted(axes) else tuple(axes),
    )


def _permutation(kind: pa.FixedShapeTensorType[Any], name: str) -> Sequence[int]:
    order = list(kind.permutation or range(len(kind.shape)))
    if any(order[axis] != i for i, axis in enumerate(order)):
        # The format defines the permutation, pyarrow's from_numpy_ndarray writes the inverse of it, and its
        # to_numpy_ndarray reads neither. Only where all agree is it known what the writer meant.
        remedy = "store contiguous arrays (numpy.ascontiguousarray), in the transform for example"
        what = f"The axes of column {name!r} are permuted in a way that has more than one reading"
        raise _refuse(what, f"permutation {order}", "none, or one that is its own inverse", remedy)
    return order


def _dtype(kind: Any) -> np.dtype[Any] | None:
    t = pa.types
    if t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind):
        return np.dtype(kind.to_pandas_dtype())
    if t.is_timestamp(kind) or t.is_duration(kind):
        return np.dtype(f"{'M' if t.is_timestamp(kind) else 'm'}8[{kind.unit}]")
    return None


def layouts_of(parts: Sequence[pa.Table]) -> tuple[Layout, ...]:
    """Returns the layout of each column of consecutive table slices.

    Raises:
        ConfigError: No parts, parts of different schemas, column names that repeat, or ambiguous axes.
    """
    if not parts:
        raise _refuse("A batch has no parts", 0, "at least one table", "pass a slice of no rows")
    schema = parts[0].schema
    for part in parts[1:]:
        if not part.schema.equals(schema):
            raise _refuse("Parts of a batch differ in schema", part.schema, f"{schema}", "cast the blocks")
    return _layouts(schema)


def chunks_of(parts: Sequence[pa.Table], layout: Layout) -> list[Any]:
    """Returns the chunks of one column of all parts, in order and not dictionary encoded."""
    chunks: list[Any] = []
    for part in parts:
        column = part.column(layout.index)
        # One chunk is the rule, and .chunks builds a list at twice the cost.
        chunks += [column.chunk(0)] if column.num_chunks == 1 else column.chunks
    return [chunk.dictionary_decode() for chunk in chunks] if layout.decode else chunks


def _storage(array: Any) -> Any:
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array


def view_of(array: Any, layout: Layout) -> NDArray[Any]:
    """Returns a chunk as (rows, *row_shape) in the memory of the block, or in new memory for bits and nulls.

    Raises:
        ConfigError: Nulls among values whose dtype has none.
    """
    rows = len(array)
    leaf = _storage(array)
    start, count, nulls = leaf.offset, rows, leaf.null_count > 0
    for width in layout.widths:
        # .values is the whole child whatever the slice, so the offset is carried down by hand: .flatten()
        # would drop the slots of null rows, and slicing costs more than the rest of this function.
        leaf = _storage(leaf.values)
        start, count = leaf.offset + start * width, count * width
        nulls = nulls or leaf.null_count > 0
    flat = _flat(leaf, start, count, layout.dtype)
    if nulls:
        flat = _patch(flat, _null_mask(array, layout), layout)
    view = flat.reshape((rows, *layout.shape)) if layout.shape else flat
    return view if layout.axes is None else view.transpose(layout.axes)


def _flat(leaf: Any, start: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns values ``start .. start + count - 1`` of a primitive array, counted from its buffer's begin."""
    buffer = leaf.buffers()[1] if count else None
    if buffer is None:
        return np.empty(0, dtype)
    if dtype.kind == "b":
        first, skip = divmod(start, 8)
        packed = np.frombuffer(buffer, np.uint8, (skip + count + 7) // 8, first)
        return np.unpackbits(packed, count=skip + count, bitorder="little")[skip:].view(np.bool_)
    return np.frombuffer(buffer, dtype, count, start * dtype.itemsize)


def _null_mask(array: Any, layout: Layout) -> NDArray[np.bool_]:
    """Returns, flat, which values of a chunk are null themselves or lie in a null row."""
    level = _storage(array)
    mask: NDArray[np.bool_] = level.is_null().to_numpy(zero_copy_only=False)
    for width in layout.widths:
        # Storage only now: slicing an extension array and its storage are the same thing.
        child = level.values.slice(level.offset * width, len(level) * width)
        level = _storage(child)
        mask = np.repeat(mask, width) | level.is_null().to_numpy(zero_copy_only=False)
    return mask


def _patch(flat: NDArray[Any], mask: NDArray[np.bool_], layout: Layout) -> NDArray[Any]:
    if not mask.any():  # the nulls lie outside this slice
        return flat
    if layout.dtype.kind not in "fmM":
        what = f"Column {layout.name!r} holds nulls, for which its dtype has no value"
        remedy = f"filter the rows (filter='{layout.name} IS NOT NULL') or fill the nulls in the transform"
        raise _refuse(what, f"nulls in {layout.dtype}", "no nulls, or a float column", remedy)
    flat = flat.copy()
    flat[mask] = np.nan if layout.dtype.kind == "f" else "NaT"
    return flat


def _chunk_items(array: Any) -> tuple[Any, list[int], NDArray[np.bool_] | None]:
    """Returns the items of a list chunk in one array, the number of items per row, the null rows if any."""
    if not len(array):  # its offsets may be missing
        return array.values.slice(0, 0), [], None
    offsets = array.offsets.to_numpy()
    lengths = np.diff(offsets)
    if not array.null_count:
        return array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])), lengths.tolist(), None
    absent = array.is_null().to_numpy(zero_copy_only=False)
    lengths[absent] = 0  # a null list may hide items, which flatten() leaves out
    return array.flatten(), lengths.tolist(), absent


def items_of(chunks: Iterable[Any], layout: Layout) -> tuple[list[NDArray[Any]], list[int], list[int]]:
    """Returns views of the items of list chunks, the number of items of each row, the indices of null rows."""
    views: list[NDArray[Any]] = []
    lengths: list[int] = []
    absent: list[int] = []
    for chunk in map(_storage, chunks):
        values, sizes, nulls = _chunk_items(chunk)
        if nulls is not None:
            absent += (np.flatnonzero(nulls) + len(lengths)).tolist()
        views.append(view_of(values, layout))
        lengths += sizes
    return views, lengths, absent


def objects_of(chunks: Iterable[Any]) -> list[Any]:
    """Returns the rows of chunks as Python objects."""
    rows: list[Any] = []
    for chunk in map(_storage, chunks):
        kind = chunk.type
        flat = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)
        # For text and bytes the array conversion gives the same objects several times faster.
        rows += chunk.to_numpy(zero_copy_only=False).tolist() if flat else chunk.to_pylist()
    return rows
