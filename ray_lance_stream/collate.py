"""Slices of blocks to the batch a trainer gets: numpy, torch, pandas or Arrow.

A batch is one or a few consecutive table slices of read-only shared memory. Each column is allocated once
and every slice copied into its place: one copy, no Python object per row, no memory shared with the block.
Boolean columns are unpacked from bits and columns with nulls are patched, at the cost of one more pass.

==============================  =============================  ===================================
column                          numpy                          torch
==============================  =============================  ===================================
number, bool                    (rows,)                        (rows,)
fixed-size list of these        (rows, width, ...)             (rows, width, ...)
fixed_shape_tensor              (rows, *shape)                 (rows, *shape)
list of any of the above        object array of arrays         list of tensors
timestamp, duration             datetime64, timedelta64 (UTC)  list of Python objects
text, bytes, date, struct, ...  object array                   list of Python objects
==============================  =============================  ===================================

A null is NaN in a float column and NaT in a timestamp column, None among objects and lists, and a
:class:`ConfigError` where the column's dtype has no such value. Dictionary columns are decoded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_lance_stream.errors import ConfigError, explain

if TYPE_CHECKING:
    import torch

# Below this, torch's own copy costs more to start than numpy's to finish; above it torch uses its threads.
_SMALL_COPY_BYTES = 1 << 20
_OBJECT = np.dtype(object)


@dataclass(frozen=True, kw_only=True)
class _Layout:
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

    @property
    def is_tensor(self) -> bool:
        """Whether torch has a tensor for these values."""
        return self.kind != "object" and self.dtype.kind not in "mM"

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row or item as the user sees it."""
        return self.shape if self.axes is None else tuple(self.shape[axis - 1] for axis in self.axes[1:])


def _refuse(what: str, found: object, expected: str, remedy: str) -> ConfigError:
    return ConfigError(explain(what, found=found, expected=expected, remedy=remedy))


@functools.lru_cache(maxsize=64)
def _layouts(schema: pa.Schema) -> tuple[_Layout, ...]:
    if len(set(schema.names)) < len(schema.names):
        raise _refuse("Column names repeat", schema.names, "distinct names", "rename columns")
    return tuple(_layout(field.name, index, field.type) for index, field in enumerate(schema))


def _layout(name: str, index: int, kind: Any) -> _Layout:
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
        return _Layout(name=name, index=index, kind="object", decode=decode)
    return _Layout(
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


def _layouts_of(parts: Sequence[pa.Table]) -> tuple[_Layout, ...]:
    if not parts:
        raise _refuse("A batch has no parts", 0, "at least one table", "pass a slice of no rows")
    schema = parts[0].schema
    for part in parts[1:]:
        if not part.schema.equals(schema):
            raise _refuse("Parts of a batch differ in schema", part.schema, f"{schema}", "cast the blocks")
    return _layouts(schema)


def _chunks(parts: Sequence[pa.Table], layout: _Layout) -> list[Any]:
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


def _view(array: Any, layout: _Layout) -> NDArray[Any]:
    """Returns a chunk as (rows, *shape) in the memory of the block, or in new memory for bits and nulls."""
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


def _null_mask(array: Any, layout: _Layout) -> NDArray[np.bool_]:
    """Returns, flat, which values of a chunk are null themselves or lie in a null row."""
    level = _storage(array)
    mask: NDArray[np.bool_] = level.is_null().to_numpy(zero_copy_only=False)
    for width in layout.widths:
        # Storage only now: slicing an extension array and its storage are the same thing.
        child = level.values.slice(level.offset * width, len(level) * width)
        level = _storage(child)
        mask = np.repeat(mask, width) | level.is_null().to_numpy(zero_copy_only=False)
    return mask


def _patch(flat: NDArray[Any], mask: NDArray[np.bool_], layout: _Layout) -> NDArray[Any]:
    if not mask.any():  # the nulls lie outside this slice
        return flat
    if layout.dtype.kind not in "fmM":
        what = f"Column {layout.name!r} holds nulls, for which its dtype has no value"
        remedy = f"filter the rows (filter='{layout.name} IS NOT NULL') or fill the nulls in the transform"
        raise _refuse(what, f"nulls in {layout.dtype}", "no nulls, or a float column", remedy)
    flat = flat.copy()
    flat[mask] = np.nan if layout.dtype.kind == "f" else "NaT"
    return flat


def _items(array: Any) -> tuple[Any, list[int], NDArray[np.bool_] | None]:
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


def _ragged(chunks: Iterable[Any], layout: _Layout) -> tuple[list[NDArray[Any]], list[int], list[int]]:
    """Returns views of all items, the number of items of each row, and the indices of the null rows."""
    views: list[NDArray[Any]] = []
    lengths: list[int] = []
    absent: list[int] = []
    for chunk in map(_storage, chunks):
        values, sizes, nulls = _items(chunk)
        if nulls is not None:
            absent += (np.flatnonzero(nulls) + len(lengths)).tolist()
        views.append(_view(values, layout))
        lengths += sizes
    return views, lengths, absent


def _objects(chunks: Iterable[Any]) -> list[Any]:
    rows: list[Any] = []
    for chunk in map(_storage, chunks):
        kind = chunk.type
        flat = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)
        # For text and bytes the array conversion gives the same objects several times faster.
        rows += chunk.to_numpy(zero_copy_only=False).tolist() if flat else chunk.to_pylist()
    return rows


def _object_array(rows: list[Any]) -> NDArray[Any]:
    # Not np.array(rows): it would turn rows of equal length into a second axis.
    return np.fromiter(rows, dtype=object, count=len(rows))


def _join(views: Sequence[NDArray[Any]], layout: _Layout, copy: bool) -> NDArray[Any]:
    if not copy and len(views) == 1:
        views[0].flags.writeable = False  # also where the buffer is not read-only: nobody else expects it
        return views[0]
    return _fill(np.empty((sum(map(len, views)), *layout.row_shape), layout.dtype), views)


def _fill(out: NDArray[Any], views: Sequence[NDArray[Any]]) -> NDArray[Any]:
    # Into memory made by the caller: left to itself, concatenate keeps the order of transposed views.
    return np.concatenate(views, out=out) if views else out


def to_numpy(parts: Sequence[pa.Table], *, copy: bool = True) -> dict[str, NDArray[Any]]:
    """Returns consecutive table slices as one array per column; the module says which.

    Args:
        parts: At least one table; all of one schema.
        copy: False returns read-only views of the block where the batch lies in one chunk of it. They keep
            the whole block alive.

    Raises:
        ConfigError: No parts, parts of different schemas, or nulls in an integer or boolean column.
    """
    batch: dict[str, NDArray[Any]] = {}
    for layout in _layouts_of(parts):
        chunks = _chunks(parts, layout)
        if layout.kind == "object":
            batch[layout.name] = _object_array(_objects(chunks))
        elif layout.kind == "fixed":
            batch[layout.name] = _join([_view(chunk, layout) for chunk in chunks], layout, copy)
        else:
            views, lengths, absent = _ragged(chunks, layout)
            items = _join(views, layout, copy)
            ends = np.cumsum([0, *lengths]).tolist()
            rows: list[Any] = [items[start:end] for start, end in pairwise(ends)]
            for row in absent:
                rows[row] = None
            batch[layout.name] = _object_array(rows)
    return batch


@functools.lru_cache(maxsize=64)
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype


@functools.lru_cache(maxsize=1)
def _can_pin() -> bool:
    import torch

    return torch.cuda.is_available()


class _Alias:
    """Shows an array's memory as writable, which is what torch wants of all memory it is given."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory alive
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _alias(view: NDArray[Any]) -> torch.Tensor:
    """Returns a tensor over the memory of a view. Unlike a warnings filter, _Alias is safe among threads."""
    import torch

    return torch.from_numpy(view if view.flags.writeable else np.asarray(_Alias(view)))


def _join_torch(
    views: Sequence[NDArray[Any]], layout: _Layout, dtype: torch.dtype | None, pinned: bool, copy: bool
) -> torch.Tensor:
    import torch

    natural = _torch_dtype(layout.dtype)
    dtype = natural if dtype is None else dtype
    if not copy and len(views) == 1:
        return _alias(views[0]).to(dtype)
    out = torch.empty((sum(map(len, views)), *layout.row_shape), dtype=dtype, pin_memory=pinned)
    if dtype == natural and out.nbytes < _SMALL_COPY_BYTES:
        _fill(out.numpy(), views)
        return out
    start = 0
    for view in views:
        out[start : start + len(view)].copy_(_alias(view))
        start += len(view)
    return out


def _column_dtypes(
    dtypes: torch.dtype | dict[str, torch.dtype] | None, layouts: Iterable[_Layout]
) -> dict[str, torch.dtype]:
    tensors = [layout.name for layout in layouts if layout.is_tensor]
    if dtypes is None:
        return {}
    if not isinstance(dtypes, dict):
        return dict.fromkeys(tensors, dtypes)
    if unknown := dtypes.keys() - set(tensors):
        what = "dtypes names columns that are no tensors"
        raise _refuse(what, sorted(unknown), f"some of {tensors}", "leave them out")
    return dtypes


def to_torch(
    parts: Sequence[pa.Table],
    *,
    dtypes: torch.dtype | dict[str, torch.dtype] | None = None,
    device: str | torch.device | None = None,
    pin_memory: bool = False,
    copy: bool = True,
) -> dict[str, torch.Tensor | list[Any]]:
    """Returns consecutive table slices as one tensor or list per column; the module says which.

    Args:
        parts: At least one table; all of one schema.
        dtypes: One dtype for all tensor columns, or a dict for some of them; the others keep the dtype of the
            column. The conversion is part of the one copy.
        device: Where tensors go, with one transfer a column.
        pin_memory: Whether tensors are built in page-locked memory, so that the transfer to ``device`` is
            asynchronous; ignored without CUDA.
        copy: False returns tensors over the memory of the block where the batch lies in one chunk of it and
            neither ``dtypes`` nor ``pin_memory`` asks for other memory. Writing into such a tensor, also by
            an in-place operation, corrupts the block for every reader of the node or kills the process.

    Rows of a list column are views of one tensor. Null lists are None.

    Raises:
        ConfigError: As :func:`to_numpy`; ``dtypes`` names a column that is missing or not a tensor.
    """
    import torch

    layouts = _layouts_of(parts)
    wanted = _column_dtypes(dtypes, layouts)
    pinned = pin_memory and _can_pin()

    def tensor(views: list[NDArray[Any]], layout: _Layout) -> torch.Tensor:
        out = _join_torch(views, layout, wanted.get(layout.name), pinned, copy or pinned)
        return out if device is None else out.to(device, non_blocking=pinned)

    batch: dict[str, torch.Tensor | list[Any]] = {}
    for layout in layouts:
        chunks = _chunks(parts, layout)
        if not layout.is_tensor:
            batch[layout.name] = _objects(chunks)
        elif layout.kind == "fixed":
            batch[layout.name] = tensor([_view(chunk, layout) for chunk in chunks], layout)
        else:
            views, lengths, absent = _ragged(chunks, layout)
            rows: list[Any] = list(torch.split(tensor(views, layout), lengths)) if lengths else []
            for row in absent:
                rows[row] = None
            batch[layout.name] = rows
    return batch


def to_arrow(parts: Sequence[pa.Table]) -> pa.Table:
    """Returns consecutive table slices as one table, without a copy: it keeps their blocks alive."""
    _layouts_of(parts)
    return pa.concat_tables(parts)


def to_pandas(parts: Sequence[pa.Table]) -> Any:
    """Returns consecutive table slices as one ``pandas.DataFrame`` that owns its memory.

    Rows of fixed shape, and lists of numbers, are object columns of arrays. All else, nulls in integer
    columns included, is what ``pyarrow.Table.to_pandas`` makes of it.
    """
    layouts = _layouts_of(parts)
    table = pa.concat_tables(parts)
    scalars_with_nulls = {name for name in table.column_names if table.column(name).null_count}
    scalars_with_nulls -= {layout.name for layout in layouts if layout.kind == "ragged" or layout.shape}
    arrays = [layout.name for layout in layouts if layout.is_tensor and layout.name not in scalars_with_nulls]
    frame = table.drop_columns(arrays).to_pandas().copy()  # a copy, since single columns come as views
    for name, array in to_numpy([part.select(arrays) for part in parts]).items():
        frame[name] = list(array) if array.ndim > 1 else array
    return frame[table.column_names]
