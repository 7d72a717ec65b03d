"""Orders that are lists of row numbers: filtered rows, LanceDB's own permutation, and rows the user chose."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.readable import said
from ray_lance_stream.sqltext import as_lance_reads
from ray_lance_stream.userplan import UserPlan

if TYPE_CHECKING:
    from ray_lance_stream.location import TableRef
    from ray_lance_stream.readable import ReadableTable

_EPOCH_FACTOR: Final = 100_003  # how lancedb.streaming derives an epoch's seed from the first
_MEMORY_VARIABLE: Final = "LANCEDB_PERM_BUILDER_MEMORY_LIMIT"
_BYTES_PER_ROW: Final = 1024  # far more than the builder's sort needs; its default of 100 MB fails at 3M rows
_LEAST_BUILDER_BYTES: Final = 1 << 30
_environment = threading.Lock()  # the builder reads its limit from the environment at every build
_MAX_BUILDER_SEED: Final = 2**64 - 1


def listed_rows(spec: PlanSpec, table: ReadableTable, ref: TableRef, plan: UserPlan | None) -> tuple[IntArray, int]:
    """Returns the row numbers that places of a plan refer to, in the plan's order; and how many are left out.

    Args:
        spec: The plan; its order is a list.
        table: The table version, open.
        ref: How to open it with LanceDB.
        plan: The user's rows, for the order "plan".

    Raises:
        ConfigError: The filter is not valid, fewer rows than splits, or ids of rows that are not in the version.
    """
    order = spec.order
    if order.order == "plan":
        assert plan is not None
        return table.numbers_of(plan.row_ids), plan.surplus_rows
    if order.is_listed_per_epoch:
        count = table.num_rows if order.filter is None else table.count_rows(order.filter)
        if count < order.num_splits:
            return np.arange(count), 0  # the plan says what is wrong
        rows = table.numbers_of(ref.original_ids(_permuted(spec, table, ref)))
        return rows, count - len(rows)
    assert order.filter is not None
    return table.matching_rows(order.filter), 0


def _permuted(spec: PlanSpec, table: ReadableTable, ref: TableRef) -> Any:
    """Asks LanceDB's permutation builder for an epoch's order: row ids, split by split, without the remainder."""
    from lancedb.permutation import permutation_builder

    order = spec.order
    seed = order.shuffle_seed + spec.epoch * _EPOCH_FACTOR
    if seed > _MAX_BUILDER_SEED:
        raise ConfigError(
            explain(
                "shuffle_seed is too large for order='lancedb' in this epoch",
                found=f"shuffle_seed={order.shuffle_seed}, epoch={spec.epoch}",
                expected=f"shuffle_seed + epoch * {_EPOCH_FACTOR} below 2**64",
                remedy="pass a smaller seed, or order='feistel'",
            )
        )
    builder = permutation_builder(ref.open_lancedb(table.version))
    if order.filter is not None:
        builder = builder.filter(as_lance_reads(order.filter))
    clump = None if order.shuffle_clump_size == 1 else order.shuffle_clump_size
    try:
        with _builder_memory(table.num_rows * _BYTES_PER_ROW):
            built = builder.split_random(fixed=order.num_splits, seed=seed, clump_size=clump).execute()
    except Exception as error:
        if ref.shown(error) is not None:
            raise
        text = f"LanceDB's permutation of table {ref.name!r} failed: {said(error)}"
        raise OSError(ref.without_secrets(text)) from None
    return built.to_arrow().column("row_id").to_numpy()


@contextlib.contextmanager
def _builder_memory(num_bytes: int) -> Iterator[None]:
    """Lets the permutation builder use so much memory, or what the user has set if that is more."""
    with _environment:
        before = os.environ.get(_MEMORY_VARIABLE)
        allowed = int(before) if before is not None and before.isdigit() else 0
        os.environ[_MEMORY_VARIABLE] = str(max(allowed, num_bytes, _LEAST_BUILDER_BYTES))
        try:
            yield
        finally:
            if before is None:
                del os.environ[_MEMORY_VARIABLE]
            else:
                os.environ[_MEMORY_VARIABLE] = before
