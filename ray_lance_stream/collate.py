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

import contextlib
import functools
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.layout import Layout, chunks_of, items_of, layouts_of, objects_of, view_of

if TYPE_CHECKING:
    import torch


def _object_array(rows: list[Any]) -> NDArray[Any]:
    # Not np.array(rows): it would turn rows of equal length into a second axis.
    return np.fromiter(rows, dtype=object, count=len(rows))


def _join(views: Sequence[NDArray[Any]], layout: Layout, out: NDArray[Any] | None = None) -> NDArray[Any]:
    # Always into given memory: left to itself, concatenate keeps the order of transposed views.
    if out is None:
        out = np.empty((sum(map(len, views)), *layout.row_shape), layout.dtype)
    return np.concatenate(views, out=out) if views else out


def _array(views: Sequence[NDArray[Any]], layout: Layout, copy: bool) -> NDArray[Any]:
    if copy or len(views) != 1:
        return _join(views, layout)
    views[0].flags.writeable = False  # also where the buffer is not read-only: nobody else expects it
    return views[0]


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
    for layout in layouts_of(parts):
        chunks = chunks_of(parts, layout)
        if layout.kind == "object":
            batch[layout.name] = _object_array(objects_of(chunks))
        elif layout.kind == "fixed":
            batch[layout.name] = _array([view_of(chunk, layout) for chunk in chunks], layout, copy)
        else:
            views, lengths, absent = items_of(chunks, layout)
            items = _array(views, layout, copy)
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


def _tensor(
    views: Sequence[NDArray[Any]], layout: Layout, dtype: torch.dtype | None, pinned: bool, copy: bool
) -> torch.Tensor:
    import torch

    natural = _torch_dtype(layout.dtype)
    dtype = natural if dtype is None else dtype
    if not copy and len(views) == 1:
        return _alias(views[0]).to(dtype)
    # By numpy where it can be: torch copies with threads of its own, which take the cores of the training loop, and
    # where there are more of them than cores, as in containers, spin until each has had its turn.
    if dtype == natural and not pinned:
        return torch.from_numpy(_join(views, layout))  # memory that torch allocates costs several times as much
    # The device is named, since the user may have set another default.
    rows = sum(map(len, views))
    out = torch.empty((rows, *layout.row_shape), dtype=dtype, device="cpu", pin_memory=pinned)
    if dtype == natural:
        _join(views, layout, out.numpy())
        return out
    start = 0
    for view in views:
        out[start : start + len(view)].copy_(_alias(view))
        start += len(view)
    return out


def _column_dtypes(
    dtypes: torch.dtype | dict[str, torch.dtype] | None, layouts: Iterable[Layout]
) -> dict[str, torch.dtype]:
    if dtypes is None:
        return {}
    tensors = [layout.name for layout in layouts if layout.is_tensor]
    if not isinstance(dtypes, dict):
        return dict.fromkeys(tensors, dtypes)
    if unknown := dtypes.keys() - set(tensors):
        what, expected = "dtypes names columns that are no tensors", f"some of {tensors}"
        raise ConfigError(explain(what, found=sorted(unknown), expected=expected, remedy="leave them out"))
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

    layouts = layouts_of(parts)
    wanted = _column_dtypes(dtypes, layouts)
    pinned = pin_memory and _can_pin()

    # Memory is pinned by the current CUDA device; on a thread of ours that is the first one, not the worker's.
    on_cuda = pinned and device is not None and torch.device(device).type == "cuda"

    def tensor(views: list[NDArray[Any]], layout: Layout) -> torch.Tensor:
        with torch.cuda.device(device) if on_cuda else contextlib.nullcontext():
            out = _tensor(views, layout, wanted.get(layout.name), pinned, copy or pinned)
        return out if device is None else out.to(device, non_blocking=pinned)

    batch: dict[str, torch.Tensor | list[Any]] = {}
    for layout in layouts:
        chunks = chunks_of(parts, layout)
        if not layout.is_tensor:
            batch[layout.name] = objects_of(chunks)
        elif layout.kind == "fixed":
            batch[layout.name] = tensor([view_of(chunk, layout) for chunk in chunks], layout)
        else:
            views, lengths, absent = items_of(chunks, layout)
            rows: list[Any] = list(torch.split(tensor(views, layout), lengths)) if lengths else []
            for row in absent:
                rows[row] = None
            batch[layout.name] = rows
    return batch


def to_arrow(parts: Sequence[pa.Table], *, copy: bool = True) -> pa.Table:
    """Returns consecutive table slices as one table.

    Args:
        parts: At least one table; all of one schema.
        copy: False returns a view, which keeps the whole blocks alive.
    """
    layouts_of(parts)
    table = pa.concat_tables(parts)
    if not copy:
        return table
    # Through Arrow's stream format: unlike `take`, it copies dictionaries too, and of a slice only its rows.
    memory = pa.BufferOutputStream()
    with pa.ipc.new_stream(memory, table.schema) as writer:
        writer.write_table(table)
    own: pa.Table = pa.ipc.open_stream(memory.getvalue()).read_all()
    return own


def to_pandas(parts: Sequence[pa.Table]) -> Any:
    """Returns consecutive table slices as one ``pandas.DataFrame`` that owns its memory.

    Rows of fixed shape, and lists of numbers, are object columns of arrays; integer and boolean columns with nulls
    have pandas' nullable types, which keep every digit. All else is what ``pyarrow.Table.to_pandas`` makes of it.
    """
    layouts = layouts_of(parts)
    table = pa.concat_tables(parts)
    scalars_with_nulls = {name for name in table.column_names if table.column(name).null_count}
    scalars_with_nulls -= {layout.name for layout in layouts if layout.kind == "ragged" or layout.shape}
    arrays = [layout.name for layout in layouts if layout.is_tensor and layout.name not in scalars_with_nulls]
    # A copy, since single columns come as views.
    frame = table.drop_columns(arrays).to_pandas(types_mapper=_nullable_dtype).copy()
    for name, array in to_numpy([part.select(arrays) for part in parts]).items():
        frame[name] = list(array) if array.ndim > 1 else array
    return frame[table.column_names]


def _nullable_dtype(kind: pa.DataType) -> Any:
    """Returns pandas' type for integers or booleans that may be null; None for all others."""
    import pandas as pd

    if pa.types.is_boolean(kind):
        return pd.BooleanDtype()
    if pa.types.is_integer(kind):
        return pd.api.types.pandas_dtype(str(kind).replace("uint", "UInt").replace("int", "Int"))
    return None


def move(batch: Any, device: str | torch.device | None) -> Any:
    """Returns what a user's ``collate_fn`` made with its tensors on a device; None leaves it as it is.

    Looks into dicts, lists and tuples; a named tuple stays one.
    """
    if device is None:
        return batch
    import torch

    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=batch.is_pinned())
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device) for value in batch)
    return batch
